import json
import re

import numpy as np
import pytest
from PIL import Image

from anysize.config import DataConfig, RunConfig
from anysize.errors import DataError
from anysize.geometry import Canvas, NetGeometry, Size
from anysize.planning.canvases import Plan, write_plan
from anysize.report import _draw_sizes, _scores, loss_and_iou, sizes_and_canvases, write_report
from anysize.tables import to_toml

SIZES = [Size(40, 60), Size(60, 40), Size(50, 50)]


def make_plan(*canvases):
    return Plan(
        geometry=NetGeometry(),
        images_per_step=2,
        max_pixels_per_step=100_000,
        canvases=canvases,
    )


def train_event(step, loss):
    return {
        "event": "train",
        "step": step,
        "epoch": 0,
        "loss": loss,
        "valid_megapixels_per_s": 0.5,
        "wait_s": 0.2,
        "elapsed_s": 2.0,
    }


def evaluate_event(step, iou):
    known = [v for v in iou.values() if v is not None]
    return {
        "event": "evaluate",
        "step": step,
        "epoch": 1,
        "kind": "multiclass",
        "iou": iou,
        "miou": sum(known) / len(known),
    }


def num_pixels(path, colour):
    """Pixels of exactly this colour; lines are antialiased, but their middles are pure."""
    return int((np.asarray(Image.open(path).convert("RGB")) == colour).all(-1).sum())


BLUE, GREEN, ORANGE = (0, 114, 178), (0, 158, 115), (213, 94, 0)


def test_curves_show_a_line_for_the_loss_and_for_each_class(tmp_path):
    events = [train_event(10 * i, 2.0 / i) for i in range(1, 30)]
    events += [evaluate_event(s, {"sea": 0.5, "land": 0.8}) for s in (100, 200)]
    loss_and_iou(events, tmp_path / "both.png")
    loss_and_iou(events[:29], tmp_path / "loss.png")
    assert num_pixels(tmp_path / "loss.png", BLUE) > 100
    assert num_pixels(tmp_path / "loss.png", GREEN) == 0
    assert num_pixels(tmp_path / "both.png", BLUE) > num_pixels(tmp_path / "loss.png", BLUE) + 100
    assert num_pixels(tmp_path / "both.png", GREEN) > 100


def test_a_class_that_never_occurs_has_no_line(tmp_path):
    events = [evaluate_event(s, {"sea": 0.5, "land": None}) for s in (100, 200)]
    loss_and_iou(events, tmp_path / "absent.png")
    events = [evaluate_event(s, {"sea": 0.5, "land": 0.7}) for s in (100, 200)]
    loss_and_iou(events, tmp_path / "present.png")
    # The legend names it either way.
    assert num_pixels(tmp_path / "present.png", GREEN) > 3 * num_pixels(
        tmp_path / "absent.png", GREEN
    )


def test_curves_of_many_classes_name_only_the_mean(tmp_path):
    iou = {f"class {i}": i / 200 for i in range(150)}
    loss_and_iou([evaluate_event(s, iou) for s in (100, 200)], tmp_path / "many.png")
    assert num_pixels(tmp_path / "many.png", BLUE) == 0
    assert num_pixels(tmp_path / "many.png", (153, 153, 153)) > 1000
    assert num_pixels(tmp_path / "many.png", (0, 0, 0)) > 100


def test_curves_of_a_run_that_has_just_begun(tmp_path):
    loss_and_iou([], tmp_path / "nothing.png")
    loss_and_iou([train_event(1, 0.7)], tmp_path / "one.png")
    assert num_pixels(tmp_path / "nothing.png", BLUE) == 0
    assert num_pixels(tmp_path / "one.png", BLUE) > 10


def test_curves_of_sigmoid_runs_show_average_precision(tmp_path):
    event = {
        "event": "evaluate",
        "step": 5,
        "epoch": 1,
        "kind": "multilabel",
        "average_precision": {"knee": 0.9},
        "map": 0.9,
    }
    loss_and_iou([event], tmp_path / "sigmoid.png")
    assert num_pixels(tmp_path / "sigmoid.png", BLUE) > 10


def test_sizes_show_every_canvas(tmp_path):
    sizes_and_canvases(SIZES, make_plan(Canvas(1, 64, 64)), tmp_path / "one.png")
    plan = make_plan(Canvas(1, 64, 64), Canvas(2, 44, 100), Canvas(2, 100, 44))
    sizes_and_canvases(SIZES, plan, tmp_path / "three.png")
    assert num_pixels(tmp_path / "one.png", ORANGE) > 200
    assert num_pixels(tmp_path / "three.png", ORANGE) > 1.5 * num_pixels(
        tmp_path / "one.png", ORANGE
    )


def test_sizes_take_more_canvases_than_letters(tmp_path):
    plan = make_plan(*(Canvas(1, 64 + 4 * i, 200 - 4 * i) for i in range(30)))
    sizes_and_canvases(SIZES, plan, tmp_path / "many.png")
    assert num_pixels(tmp_path / "many.png", ORANGE) > 1000


@pytest.fixture
def run(tmp_path):
    images = tmp_path / "data" / "images"
    images.mkdir(parents=True)
    for i, size in enumerate(SIZES):
        Image.new("RGB", (size.width, size.height)).save(images / f"{i}.png")
    run = tmp_path / "run<1>"
    run.mkdir()
    config = RunConfig(data=DataConfig(root=str(tmp_path / "data")))
    (run / "run.toml").write_text(to_toml(config))
    write_plan(make_plan(Canvas(1, 64, 64)), run / "plan.json", sizes=SIZES)
    events = [
        train_event(10, 1.5),
        {"event": "canvas", "step": 1, "canvas": [1, 64, 64], "first_visit_s": 0.75},
        train_event(20, 1.0),
    ]
    (run / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    return run


def test_report_is_one_page_that_needs_no_other_file(run):
    metrics = {
        "step": 20,
        "kind": "multiclass",
        "iou": {"sea & ice": 0.812, "moon": None},
        "miou": 0.406,
    }
    (run / "metrics.json").write_text(json.dumps(metrics))
    page = write_report(run)
    text = page.read_text()
    assert page == run / "report.html"
    assert "Run run&lt;1&gt;" in text
    assert text.count('src="data:image/png;base64,') == text.count("<img") == 2
    assert "<td>sea &amp; ice</td><td>81.2</td>" in text
    assert "<td>moon</td><td>-</td>" in text
    assert "<td>mean</td><td>40.6</td>" in text
    assert "20 steps in 4 s of training: 0.500 valid megapixels a second, 10.0% of" in text
    assert "first visits took 0.8 s" in text
    assert "images_per_step = 4" in text


def test_report_of_a_run_whose_images_are_gone(run, tmp_path):
    for path in (tmp_path / "data" / "images").iterdir():
        path.unlink()
    text = write_report(run).read_text()
    assert text.count("<img") == 1
    assert "The image sizes are not shown" in text
    assert "Best evaluation" not in text


def test_report_names_a_damaged_file(run):
    (run / "metrics.json").write_text('{"kind": "multiclass", "iou": 3}')
    with pytest.raises(DataError, match=r"metrics\.json"):
        write_report(run)


def test_of_many_canvases_the_most_used_are_named_and_the_others_counted():
    def rows(*canvases):
        figure = _draw_sizes([Size(40, 60)] * 8, make_plan(*canvases))
        return [text.get_text() for text in figure.legends[0].get_texts()]

    larger = [Canvas(1, 64 + 4 * i, 64) for i in range(1, 63)]
    assert len(rows(*larger[:10])) == 11
    # All images fit best on the last one, which comes after many that nothing needs.
    many = rows(*larger, Canvas(2, 40, 60))
    assert len(many) == 12
    assert any("40x60" in row for row in many)
    assert many[-1] == "and 53 used less"


def test_a_confusion_matrix_is_in_percent_of_each_true_class(tmp_path):
    metrics = {
        "kind": "multiclass",
        "step": 3,
        "iou": {"sea": 0.6, "land": 0.5},
        "miou": 0.55,
        "confusion": [[30, 10], [0, 5]],
    }
    page = _scores(_written(tmp_path, metrics).parent)
    assert "<td>sea</td>" in page
    cells = re.findall(r"\)\">([\d.]+)</td>", page)
    assert cells == ["75.0", "25.0", "0.0", "100.0"]


def test_classes_on_their_own_have_what_was_found_missed_and_false(tmp_path):
    metrics = {
        "kind": "multilabel",
        "step": 3,
        "average_precision": {"arm": 0.6},
        "map": 0.6,
        "at_half": {"arm": [30, 20, 10]},
    }
    page = _scores(_written(tmp_path, metrics).parent)
    assert re.findall(r"\)\">([\d.]+)</td>", page) == ["75.0", "25.0", "40.0"]


def _written(folder, metrics):
    (folder / "metrics.json").write_text(json.dumps(metrics))
    return folder / "metrics.json"
