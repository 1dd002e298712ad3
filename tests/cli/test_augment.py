"""Every key of `[augment]` through the command, on images larger than any canvas of the plan."""

import dataclasses
import json

import pytest
from PIL import Image
from tests.cli.command import anysize

from anysize.config import AugmentConfig

LARGE = {
    "crop": {"crop": "[64, 80]", "min_scale": "1.0", "max_scale": "1.0"},
    "scales": {"min_scale": "0.2", "max_scale": "0.5"},
    "colours": {
        "max_scale": "0.5",
        "min_scale": "0.5",
        "mirror": "false",
        "brightness": "0.4",
        "contrast": "0.4",
        "saturation": "0.4",
    },
}


def test_every_key_is_tried():
    names = {field.name for field in dataclasses.fields(AugmentConfig)}
    assert {key for keys in LARGE.values() for key in keys} == names - {
        "module"
    }  # A function of one's own: tests/data.


@pytest.mark.parametrize("keys", LARGE)
def test_large_images_train_on_a_planned_canvas(workspace, keys):
    for path in sorted((workspace / "data").rglob("*.png")):
        picture = Image.open(path)
        picture.resize((240, 200 + picture.height), Image.Resampling.NEAREST).save(path)
    settings = {f"augment.{key}": value for key, value in LARGE[keys].items()}
    settings |= {
        "plan.max_pixels_per_step": "30000",  # The smallest image has 57,600.
        "plan.max_canvases": "2",
        "train.epochs": "1",
    }
    options = [word for item in settings.items() for word in ("--set", "=".join(item))]
    anysize("train", "run.toml", *options, cwd=workspace)
    plan = json.loads((workspace / "run/plan.json").read_text())
    assert 0 < plan["summary"]["waste"] < 0.8
    events = [json.loads(x) for x in (workspace / "run/events.jsonl").read_text().splitlines()]
    assert [e["num_images"] for e in events if e["event"] == "evaluate"] == [3]
    anysize("train", "run.toml", *options, "--resume", cwd=workspace)
