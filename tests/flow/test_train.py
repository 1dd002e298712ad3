"""Whole runs, a few steps long, on real files."""

import json
import shutil
import signal

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file

from anysize import train as train_module
from anysize.errors import ConfigError, DataError, ShapeError
from anysize.runlog import read_events
from anysize.train import StoppedByUserError, train

QUIET = Console(quiet=True)


def run(workspace, *overrides, resume=False):
    return train(workspace / "run.toml", overrides, resume=resume, console=QUIET)


def last_checkpoint(folder):
    return load_file(max((folder / "checkpoints").glob("*.safetensors")))


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_a_run_learns_and_writes_all_its_files(workspace):
    folder = run(workspace, "train.epochs=12")
    names = {p.name for p in folder.iterdir()}
    assert names == {
        "run.toml",
        "plan.json",
        "weights.safetensors",
        "metrics.json",
        "checkpoints",
        "events.jsonl",
        "versions.json",
    }
    events = read_events(folder / "events.jsonl")
    train_events = [e for e in events if e["event"] == "train"]
    assert train_events[-1]["loss"] < 0.7 * train_events[0]["loss"]
    assert train_events[-1]["step"] == 36  # ceil(11 training images / 4) steps an epoch
    assert {e["step"] for e in events if e["event"] == "evaluate"} == set(range(3, 37, 3))
    for event in train_events:
        assert 0 <= event["waste"] < 1
        assert 0 <= event["wait_share"] <= 1
        assert event["valid_megapixels_per_s"] > 0
    canvases = [tuple(e["canvas"]) for e in events if e["event"] == "canvas"]
    assert 1 <= len(canvases) == len(set(canvases)) <= 3
    best = max(e["miou"] for e in events if e["event"] == "evaluate")
    assert json.loads((folder / "metrics.json").read_text())["miou"] == best


@pytest.mark.parametrize("stop_after", [1, 4, 6, 8])
def test_a_resumed_run_is_bit_for_bit_an_uninterrupted_one(workspace, monkeypatch, stop_after):
    whole = run(workspace, "train.run=whole")
    calls = []
    real = train_module.train_step

    def stopped(*args, **kwargs):
        calls.append(1)
        if len(calls) == stop_after:
            signal.raise_signal(signal.SIGINT)
        return real(*args, **kwargs)

    monkeypatch.setattr(train_module, "train_step", stopped)
    with pytest.raises(StoppedByUserError, match="--resume"):
        run(workspace, "train.run=parts")
    monkeypatch.undo()
    parts = run(workspace, "train.run=parts", "train.loader_threads=3", resume=True)
    assert_same(last_checkpoint(whole), last_checkpoint(parts))
    assert_same(load_file(whole / "weights.safetensors"), load_file(parts / "weights.safetensors"))
    timeless = ("step", "loss", "miou", "best")
    logs = [
        [
            {k: e[k] for k in timeless if k in e}
            for e in read_events(folder / "events.jsonl")
            if e["event"] in ("train", "evaluate")
        ]
        for folder in (whole, parts)
    ]
    assert logs[0][-1] == logs[1][-1]
    assert [e for e in logs[0] if "miou" in e] == [e for e in logs[1] if "miou" in e]


def test_an_update_broken_off_half_way_is_not_saved(workspace, monkeypatch):
    whole = run(workspace, "train.run=whole")
    real = torch.optim.AdamW.step
    calls = []

    def broken(self, *args):
        calls.append(1)
        if len(calls) == 6:
            self.param_groups[0]["params"][0].data.zero_()
            raise KeyboardInterrupt
        return real(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", broken)
    with pytest.raises(KeyboardInterrupt):
        run(workspace, "train.run=parts", "train.checkpoint_every=4")
    monkeypatch.undo()
    (checkpoint,) = (workspace / "parts/checkpoints").iterdir()
    assert checkpoint.name == "step-00000004.safetensors"
    parts = run(workspace, "train.run=parts", "train.checkpoint_every=4", resume=True)
    assert_same(last_checkpoint(whole), last_checkpoint(parts))


def test_one_canvas_and_accumulated_canvases_take_the_same_step(workspace):
    """Frozen norm, so that nothing depends on which images share a canvas."""
    small = ("model.norm=frozen", "train.epochs=1", "optim.kind=sgd", "plan.max_canvases=8")
    together = run(workspace, *small, "train.run=a", "plan.max_pixels_per_step=1000000")
    apart = run(workspace, *small, "train.run=b", "plan.max_pixels_per_step=11000")
    losses = [
        [e["loss"] for e in read_events(f / "events.jsonl") if e["event"] == "train"]
        for f in (together, apart)
    ]
    # The steps hold other images where the canvases differ; the mean over the epoch does not.
    plans = [json.loads((f / "plan.json").read_text()) for f in (together, apart)]
    assert max(c["slots"] * c["height"] * c["width"] for c in plans[1]["canvases"]) <= 11000
    assert all(np.isfinite(losses[0] + losses[1]))


def test_settings_and_data_of_a_resumed_run_must_be_the_same(workspace):
    run(workspace, "train.epochs=1")
    with pytest.raises(ConfigError, match="is not empty"):
        run(workspace)
    with pytest.raises(ConfigError, match=r"optim.lr was 0.003, is 0.1"):
        run(workspace, "optim.lr=0.1", resume=True)
    with pytest.raises(ConfigError, match="no run to resume"):
        run(workspace, "train.run=other", resume=True)
    shutil.copy(workspace / "data/images/s00.png", workspace / "data/images/new.png")
    shutil.copy(workspace / "data/masks/s00.png", workspace / "data/masks/new.png")
    with pytest.raises(DataError, match="files were added, removed or resized"):
        run(workspace, "train.epochs=2", resume=True)


def test_a_wrong_label_stops_the_run_and_keeps_what_was_learned(workspace):
    mask = np.array(Image.open(workspace / "data/masks/s05.png"))
    mask[:3] = 9
    Image.fromarray(mask).save(workspace / "data/masks/s05.png")
    with pytest.raises(DataError, match=r"s05\.png"):
        run(workspace, "plan.images_per_step=1", "train.prefetch_steps=1", "data.val_fraction=0.01")
    checkpoints = list((workspace / "run/checkpoints").iterdir())
    events = read_events(workspace / "run/events.jsonl")
    assert len(checkpoints) == 1 or not [e for e in events if e["event"] == "train"]


def test_a_loss_that_is_not_finite_stops_the_run(workspace):
    with pytest.raises(DataError, match="is not finite in the steps up to"):
        run(workspace, "optim.kind=sgd", "optim.lr=1e30", "model.norm=frozen", "train.epochs=9")
    for path in (workspace / "run/checkpoints").glob("*.safetensors"):
        assert all(torch.isfinite(t).all() for t in load_file(path).values())


def test_fine_tuning_starts_from_weights(workspace):
    first = run(workspace, "train.epochs=4", "train.run=first")
    freshly = run(workspace, "train.epochs=1", "train.run=fresh")
    tuned = run(
        workspace,
        "train.epochs=1",
        "train.run=tuned",
        "train.weights=first/weights.safetensors",
        "model.norm=frozen",
    )
    losses = [
        next(e["loss"] for e in read_events(f / "events.jsonl") if e["event"] == "train")
        for f in (first, freshly, tuned)
    ]
    assert losses[0] == losses[1]
    assert losses[2] < losses[1]
    before = load_file(first / "weights.safetensors")
    after = load_file(tuned / "weights.safetensors")
    assert torch.equal(before["body.conv1.moving_mean"], after["body.conv1.moving_mean"])
    assert not torch.equal(before["body.conv1.gamma"], after["body.conv1.gamma"])


def test_multi_label_masks_train(workspace):
    root = workspace / "data"
    for path in sorted((root / "masks").glob("*.png")):
        mask = np.array(Image.open(path))
        for index, name in enumerate(("ground", "disc", "stripe")):
            (root / "masks" / name).mkdir(exist_ok=True)
            present = np.where(mask == 255, 255, mask == index).astype(np.uint8)
            Image.fromarray(present).save(root / "masks" / name / path.name)
        path.unlink()
    folder = run(workspace, "loss.kind=sigmoid", "train.epochs=6", "loss.class_weights=[1, 2, 2]")
    events = [e for e in read_events(folder / "events.jsonl") if e["event"] == "evaluate"]
    assert events[-1]["map"] > 0.4


def test_options_that_must_not_change_what_is_learned(workspace):
    """Activation checkpointing and the memory format change time and memory only."""
    plain = run(workspace, "train.run=a")
    other = run(workspace, "train.run=b", "model.activation_checkpointing=true")
    assert_same(last_checkpoint(plain), last_checkpoint(other))
    rows = run(workspace, "train.run=c", "train.channels_last=false")
    losses = [
        [e["loss"] for e in read_events(f / "events.jsonl") if e["event"] == "train"]
        for f in (plain, rows)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_bf16_trains_close_to_float32(workspace):
    losses = []
    for precision in ("float32", "bf16"):
        folder = run(workspace, f"train.run={precision}", f"train.precision={precision}")
        events = read_events(folder / "events.jsonl")
        losses.append([e["loss"] for e in events if e["event"] == "train"])
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.1)


def test_a_plan_that_does_not_fit_is_refused(workspace):
    run(workspace, "train.epochs=1", "train.run=first", "augment.max_scale=1.0")
    with pytest.raises(ShapeError):
        run(workspace, "plan.file=first/plan.json", "augment.max_scale=3.0")
    with pytest.raises(ConfigError, match="output_stride"):
        run(workspace, "plan.file=first/plan.json", "model.output_stride=8")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("loss.class_weights=[1, 2]", "has 2 numbers, but there are 3 classes"),
        ("train.weights=none.safetensors", "No such file"),
        ("data.root=nowhere", "nowhere"),
        ("train.device=cuda", "A GPU was asked for"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_written(workspace, override, message):
    if "cuda" in override and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(Exception, match=message):
        run(workspace, override)
    assert not (workspace / "run").exists()
