import dataclasses
import json

import pytest

from anysize.errors import ConfigError, ShapeError
from anysize.geometry import Canvas, NetGeometry, Size
from anysize.planning.canvases import Plan, check_plan, read_plan, write_plan

PLAN = Plan(
    geometry=NetGeometry(16),
    images_per_step=2,
    max_pixels_per_step=50_000,
    canvases=(Canvas(1, 100, 140), Canvas(2, 96, 100)),
)
SIZES = [Size(90, 100), Size(96, 80), Size(96, 128)]


def written(tmp_path):
    path = tmp_path / "plan.json"
    write_plan(PLAN, path, sizes=SIZES)
    return path


def test_what_is_written_is_read_back(tmp_path):
    path = written(tmp_path)
    assert read_plan(path) == PLAN
    summary = json.loads(path.read_text())["summary"]
    assert summary["images"] == 3
    assert summary["distinct_sizes"] == 3
    assert 0 < summary["waste"] < 1


def test_the_summary_is_for_people_only(tmp_path):
    path = written(tmp_path)
    table = json.loads(path.read_text())
    del table["summary"]
    path.write_text(json.dumps(table))
    assert read_plan(path) == PLAN


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(format="other"), "`format` is 'other'"),
        (lambda t: t.update(colour=1), "Unknown key `colour`"),
        (lambda t: t.pop("canvases"), "`canvases` is missing"),
        (lambda t: t.update(canvases=[]), "at least one canvas"),
        (lambda t: t.update(images_per_step=0), "`images_per_step` is 0"),
        (lambda t: t.update(images_per_step=True), "`images_per_step` is True"),
        (lambda t: t.update(max_pixels_per_step="x"), "`max_pixels_per_step` is 'x'"),
        (lambda t: t["geometry"].update(output_stride=12), "must be one of 8, 16, 32"),
        (lambda t: t["geometry"].update(pool_padding="valid"), "geometry.pool_padding"),
        (lambda t: t["geometry"].update(gutter=-1), "geometry.gutter"),
        (lambda t: t["geometry"].update(logits_per_cell=3), "not a multiple of"),
        (
            lambda t: t["geometry"].update(canvas_multiple=0),
            "multiple` is 0; it must be",
        ),
        (lambda t: t.update(geometry=[]), "`geometry` must be a section"),
        (lambda t: t["canvases"][0].update(height=98), "Use 100"),
        (lambda t: t["canvases"][0].update(height=-4), "height` is -4"),
        (lambda t: t["canvases"][0].update(depth=4), "Unknown key `canvases.0..depth`"),
        (lambda t: t["canvases"][1].pop("slots"), "`canvases.1..slots` is missing"),
        (lambda t: t["canvases"][1].update(slots=9), "above `max_pixels_per_step`"),
        (lambda t: t["canvases"].append(t["canvases"][0]), "Remove one"),
        (lambda t: t.update(canvases={}), "must be a list"),
    ],
)
def test_a_wrong_edit_is_named(tmp_path, change, message):
    path = written(tmp_path)
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))
    with pytest.raises(ConfigError, match=message) as caught:
        read_plan(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": "anysize-plan-1"}'])
def test_a_damaged_file_is_named(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"plan\.json"):
        read_plan(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="No such plan"):
        read_plan(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_plan(PLAN, tmp_path / "nowhere" / "plan.json", sizes=SIZES)


def test_a_plan_must_suit_net_and_images():
    check_plan(PLAN, SIZES, geometry=NetGeometry(16), source="p.json")
    with pytest.raises(ConfigError, match=r"output_stride` = 16, but this net has 8 \(p.json\)"):
        check_plan(PLAN, SIZES, geometry=NetGeometry(8), source="p.json")
    with pytest.raises(ShapeError, match=r"p.json: 1 image \(200x10"):
        check_plan(PLAN, [Size(200, 10)], geometry=NetGeometry(16), source="p.json")


def test_the_geometry_of_another_net_comes_back(tmp_path):
    geometry = NetGeometry(32, "none", 64, mosaic=False, canvas_multiple=32, logits_cover=4)
    plan = dataclasses.replace(PLAN, geometry=geometry, canvases=(Canvas(1, 192, 256),))
    write_plan(plan, tmp_path / "plan.json", sizes=SIZES)
    assert read_plan(tmp_path / "plan.json") == plan


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 5000], ids=["nested", "long"])
def test_json_that_python_refuses_names_the_file(tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ConfigError, match=r"plan\.json cannot be read as JSON"):
        read_plan(tmp_path / "plan.json")
