import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from anysize.config import (
    DataConfig,
    ModelConfig,
    PixelConvention,
    RunConfig,
    TrainConfig,
)
from anysize.data.record import write_record
from anysize.data.samples import (
    Classes,
    Sample,
    decode_image,
    decode_mask,
    find_samples,
    split_samples,
)
from anysize.errors import ConfigError, DataError, WeightsError
from anysize.geometry import Canvas, Layout, NetGeometry, Size
from anysize.models.build import build_model
from anysize.models.weights_file import Weights
from anysize.planning.canvases import Plan, write_plan
from anysize.predict import metrics
from anysize.predict.evaluate import evaluate, evaluate_run, evaluation_steps, format_table
from anysize.predict.tiles import predict_logits
from anysize.tables import to_toml

CLASSES = Classes(
    names=("sea", "land", "lake"), colours=((0, 0, 9), (9, 0, 0), (0, 9, 0)), ignore_index=255
)
SIZES = [(61, 40), (40, 61), (33, 70), (70, 35), (64, 64), (17, 90), (3, 50), (130, 30)]
"""The last fits on no canvas of the plan."""

PIXELS = PixelConvention()


def tiny_model(norm="frozen"):
    config = ModelConfig(units=(1, 1, 1, 1), base_depth=8, norm=norm)
    model = build_model(config, 3, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        model.head.weights.mul_(0.02)
        for name, buffer in model.named_buffers():
            if name.endswith("moving_variance"):
                buffer.fill_(1.5)
    return model


def plan_of(*canvases):
    return Plan(
        geometry=NetGeometry(),
        images_per_step=3,
        max_pixels_per_step=65_536,
        canvases=canvases or (Canvas(1, 160, 160), Canvas(3, 72, 92)),
    )


def smooth(rng, channels, height, width):
    coarse = torch.from_numpy(rng.uniform(0, 255, (1, channels, height // 9 + 2, width // 9 + 2)))
    return F.interpolate(coarse, (height, width), mode="bilinear", align_corners=False)[0].numpy()


def labels_of(rng, kind, height, width):
    scores = smooth(rng, 3, height, width)
    ignored = smooth(rng, 1, height, width)[0] > 170
    if kind == "multiclass":
        return [np.where(ignored, 255, scores.argmax(0)).astype(np.uint8)]
    return [np.where(ignored, 255, plane > 128).astype(np.uint8) for plane in scores]


def make_samples(folder, kind):
    rng = np.random.default_rng(2)
    samples = []
    for number, size in enumerate(SIZES):
        stem = f"image{number}"
        image = folder / f"{stem}.png"
        Image.fromarray(smooth(rng, 3, *size).transpose(1, 2, 0).astype(np.uint8)).save(image)
        masks = []
        for c, labels in enumerate(labels_of(rng, kind, *size)):
            masks.append(folder / f"{stem}-mask{c}.png")
            Image.fromarray(labels).save(masks[-1])
        samples.append(Sample(stem=stem, image=image, masks=tuple(masks), size=Size(*size)))
    return samples


def one_by_one(model, samples, kind):
    """Each image alone, on its own smallest canvas."""
    confusion, histograms = metrics.empty_confusion(3), metrics.empty_histograms(3)
    images = {}
    for sample in samples:
        logits = predict_logits(model, decode_image(sample.image), PIXELS).numpy()
        target = decode_mask(sample, CLASSES)
        if kind == "multiclass":
            own = metrics.empty_confusion(3)
            for counts in (own, confusion):
                metrics.add_labels(counts, target, logits.argmax(0), ignore_index=255)
            images[sample.stem] = metrics.multiclass_metrics(own, CLASSES.names)["miou"]
        else:
            metrics.add_scores(histograms, target, logits, ignore_index=255)
            images[sample.stem] = metrics.iou_at_half(target, logits, ignore_index=255)
    if kind == "multiclass":
        return {**metrics.multiclass_metrics(confusion, CLASSES.names), "images": images}
    return {**metrics.multilabel_metrics(histograms, CLASSES.names), "images": images}


def run(model, samples, kind, **arguments):
    arguments.setdefault("plan", plan_of())
    return evaluate(
        model, samples, classes=CLASSES, kind=kind, pixels=PIXELS, num_threads=2, **arguments
    )


def differences(result, expected):
    """The largest difference of any number, by the structure of the two."""
    if isinstance(expected, dict):
        assert result.keys() == expected.keys()
        return max(differences(result[key], value) for key, value in expected.items())
    if isinstance(expected, str) or expected is None:
        assert result == expected
        return 0
    if isinstance(expected, list | tuple):
        return np.abs(np.subtract(result, expected)).max() / max(np.sum(expected), 1)
    return abs(result - expected)


@pytest.mark.parametrize("kind", ["multiclass", "multilabel"])
@pytest.mark.parametrize("norm", ["frozen", "trained"])
def test_packed_evaluation_equals_that_of_each_image_alone(tmp_path, kind, norm):
    model, samples = tiny_model(norm), make_samples(tmp_path, kind)
    result = run(model, samples, kind)
    # Rounding may flip a pixel where two logits tie, of about 20,000.
    assert differences(result, one_by_one(model, samples, kind)) < 2e-4
    assert result["num_images"] == len(SIZES)


def test_without_exact_placement_the_result_differs(tmp_path, monkeypatch):
    """The control of the test above: the net is told that images fill their slots."""
    model, samples = tiny_model(), make_samples(tmp_path, "multiclass")[:5]
    forward = type(model.body).forward

    def without_masks(body, pixels, layout):
        whole = plan_of().geometry
        slots = [
            placement._replace(
                top=whole.shift(layout.canvas.height),
                left=whole.shift(layout.canvas.width),
                height=layout.canvas.height,
                width=layout.canvas.width,
            )
            for placement in layout.placements
        ]
        return forward(body, pixels, Layout(layout.canvas, tuple(slots)))

    expected = one_by_one(model, samples, "multiclass")
    monkeypatch.setattr(type(model.body), "forward", without_masks)
    result = run(model, samples, "multiclass", plan=plan_of(Canvas(3, 160, 160)))
    assert differences(result, expected) > 1e-3


def test_counts_leave_out_ignored_pixels(tmp_path):
    samples = make_samples(tmp_path, "multiclass")
    result = run(tiny_model(), samples, "multiclass")
    valid = sum(int((decode_mask(sample, CLASSES) != 255).sum()) for sample in samples)
    assert 0 < valid < sum(h * w for h, w in SIZES)
    assert result["num_pixels"] == valid


def test_images_that_fit_on_no_canvas_run_alone():
    sizes = [Size(*size) for size in SIZES]
    steps = evaluation_steps(sizes, plan_of(Canvas(3, 72, 92)))
    last = steps[-1].passes
    assert [p.images for p in last] == [(7,)]
    assert last[0].layout.canvas == (1, 132, 32)
    assert sorted(i for s in steps for p in s.passes for i in p.images) == list(range(len(SIZES)))


def test_mode_is_restored_and_progress_told(tmp_path):
    model, samples = tiny_model("trained"), make_samples(tmp_path, "multiclass")
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    told = []
    run(model, samples, "multiclass", progress=lambda done, total: told.append((done, total)))
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert told[-1] == (len(SIZES), len(SIZES))
    assert [done for done, _ in told] == sorted({done for done, _ in told})


def test_bf16_is_near_float32(tmp_path):
    model, samples = tiny_model(), make_samples(tmp_path, "multilabel")
    exact = run(model, samples, "multilabel")
    rounded = run(model, samples, "multilabel", precision="bf16")
    assert rounded != exact
    assert rounded["map"] == pytest.approx(exact["map"], abs=0.02)


def test_no_sample_is_an_error():
    with pytest.raises(DataError, match="no image to evaluate on"):
        run(tiny_model(), [], "multiclass")


def test_a_plan_for_another_net_is_an_error(tmp_path):
    plan = Plan(
        geometry=NetGeometry(output_stride=8),
        images_per_step=3,
        max_pixels_per_step=65_536,
        canvases=(Canvas(1, 160, 160),),
    )
    with pytest.raises(ConfigError, match=r"output_stride=8.*but the net has.*output_stride=16"):
        run(tiny_model(), make_samples(tmp_path, "multiclass"), "multiclass", plan=plan)


def make_run(tmp_path, model):
    """A data folder, and a run folder with all that `evaluate_run` reads."""
    root, folder = tmp_path / "data", tmp_path / "run"
    for part in (root / "images", root / "masks", folder):
        part.mkdir(parents=True)
    samples = [
        Sample(
            stem=sample.stem,
            image=sample.image.rename(root / "images" / f"{sample.stem}.png"),
            masks=(sample.masks[0].rename(root / "masks" / f"{sample.stem}.png"),),
            size=sample.size,
        )
        for sample in make_samples(tmp_path, "multiclass")
    ]
    (root / "classes.toml").write_text(
        "".join(
            f'[[class]]\nname = "{name}"\ncolour = {list(colour)}\n'
            for name, colour in zip(CLASSES.names, CLASSES.colours, strict=True)
        )
    )
    config = RunConfig(data=DataConfig(root=str(root), val_fraction=0.5), train=TrainConfig(seed=3))
    (folder / "run.toml").write_text(to_toml(config))
    write_plan(plan_of(), folder / "plan.json", sizes=[sample.size for sample in samples])
    weights = Weights(
        model=model, config=ModelConfig(), classes=CLASSES, kind="multiclass", pixels=PIXELS
    )
    _, held_out = split_samples(samples, config.data, root, seed=3)
    return folder, weights, held_out


def test_a_run_is_evaluated_on_what_it_held_out_wherever_the_data_are(tmp_path):
    model = tiny_model()
    folder, weights, held_out = make_run(tmp_path, model)
    result = evaluate_run(folder, weights)
    assert result["num_images"] == len(held_out) == len(SIZES) // 2
    assert differences(result, one_by_one(model, held_out, "multiclass")) < 2e-4
    (tmp_path / "data").rename(tmp_path / "moved")
    assert evaluate_run(folder, weights, data=tmp_path / "moved") == result


def test_another_folder_is_scored_whole(tmp_path):
    """Also one whose files happen to have the same names and sizes."""
    model = tiny_model()
    folder, weights, held_out = make_run(tmp_path, model)
    root = tmp_path / "data"
    samples = find_samples(root, CLASSES, "multiclass")
    train = [s for s in samples if s.stem not in {h.stem for h in held_out}]
    write_record(folder / "samples.json", train, held_out)
    said = []
    own = evaluate_run(folder, weights, say=said.append)
    assert (own["num_images"], said) == (4, [f"4 images of {root} that the run held out."])
    other = tmp_path / "other"
    shutil.copytree(root, other)
    assert evaluate_run(folder, weights, data=other) == own
    for path in (other / "images").iterdir():
        Image.open(path).transpose(Image.Transpose.ROTATE_180).save(path.with_suffix(".bmp"))
        path.unlink()
    result = evaluate_run(folder, weights, data=other, say=said.append)
    assert result["num_images"] == len(SIZES)
    assert "Scored: 8 images." in said[-1]
    everything = one_by_one(model, find_samples(other, CLASSES, "multiclass"), "multiclass")
    assert differences(result, everything) < 2e-4
    for path in [*(other / "images").iterdir()][:4]:
        path.unlink()
        (other / "masks" / f"{path.stem}.png").unlink()
    assert evaluate_run(folder, weights, data=other)["num_images"] == len(SIZES) - 4


def test_a_run_with_other_classes_or_no_run_is_an_error(tmp_path):
    folder, weights, _ = make_run(tmp_path, tiny_model())
    classes = tmp_path / "data" / "classes.toml"
    classes.write_text(classes.read_text().replace("lake", "river"))
    with pytest.raises(DataError, match=r"sea, land, lake, but .*sea, land, river"):
        evaluate_run(folder, weights)
    with pytest.raises(ConfigError, match=r"not the folder of a run: there is no run\.toml"):
        evaluate_run(tmp_path / "data", weights)


def test_a_damaged_mask_is_named(tmp_path):
    samples = make_samples(tmp_path, "multiclass")
    samples[3].masks[0].write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"image3-mask0\.png"):
        run(tiny_model(), samples, "multiclass")


def test_weights_that_diverged_are_an_error_and_not_a_score(tmp_path):
    model = tiny_model()
    with torch.no_grad():
        model.head.biases.fill_(float("nan"))
    with pytest.raises(WeightsError, match="not finite"):
        run(model, make_samples(tmp_path, "multiclass"), "multiclass")


def test_table_of_softmax():
    confusion = metrics.Confusion(np.array([[6, 2, 0], [1, 3, 0], [0, 0, 0]]), num_images=1200)
    table = format_table(metrics.multiclass_metrics(confusion, ["sea", "land", "never"]))
    assert table.splitlines() == [
        "class     IoU      F1",
        "sea      66.7    80.0",
        "land     50.0    66.7",
        "never       -       -",
        "mean     58.3    73.3",
        "pixel accuracy 75.0, class accuracy 75.0, 1,200 images, 0.00 megapixels",
    ]


def test_table_of_sigmoid():
    result = {
        "kind": "multilabel",
        "average_precision": {"arm": 0.5, "leg": None},
        "average_precision_error": {"arm": 0.001, "leg": None},
        "map": 0.5,
        "f1": {"arm": 0.25, "leg": 0.0},
        "mean_f1": 0.125,
        "num_images": 2,
        "num_pixels": 1_500_000,
    }
    assert format_table(result).splitlines() == [
        "class      AP      F1",
        "arm      50.0    25.0",
        "leg         -     0.0",
        "mean     50.0    12.5",
        "2 images, 1.50 megapixels",
        "AP is computed from binned logits; it is within ± 0.1 of the exact value "
        "(average_precision_error)",
    ]
    result["average_precision_error"] = {"arm": 0.0001, "leg": None}
    assert format_table(result).splitlines()[-1] == "2 images, 1.50 megapixels"
