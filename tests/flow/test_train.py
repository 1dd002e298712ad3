"""Whole runs, a few steps long, on real files."""

import dataclasses
import json
import signal

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file

from anysize.config import ModelConfig, OptimConfig, PixelConvention
from anysize.data.loader import load_steps
from anysize.data.samples import find_samples, read_classes
from anysize.data.transforms import no_augmentation
from anysize.errors import ConfigError, DataError, StoppedByUserError
from anysize.geometry import NetGeometry
from anysize.models.build import build_model
from anysize.planning.canvases import plan_canvases
from anysize.planning.packing import pack
from anysize.training import job as job_module
from anysize.training.events import read_events
from anysize.training.losses import CrossEntropy
from anysize.training.optim import build_optimizer
from anysize.training.run import train
from anysize.training.step import train_step

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
        "weights_last.safetensors",
        "metrics.json",
        "checkpoints",
        "events.jsonl",
        "versions.json",
        "samples.json",
        ".lock",
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
    last = load_file(folder / "weights_last.safetensors")
    state = last_checkpoint(folder)
    assert_same(last, {n[6:]: t for n, t in state.items() if n.startswith("model/")})
    best = max(e["miou"] for e in events if e["event"] == "evaluate")
    assert json.loads((folder / "metrics.json").read_text())["miou"] == best


@pytest.mark.parametrize("stop_after", [1, 4, 6, 8])
def test_a_resumed_run_is_bit_for_bit_an_uninterrupted_one(workspace, monkeypatch, stop_after):
    whole = run(workspace, "train.run=whole")
    calls = []
    real = job_module.train_step

    def stopped(*args, **kwargs):
        calls.append(1)
        if len(calls) == stop_after:
            signal.raise_signal(signal.SIGINT)
        return real(*args, **kwargs)

    monkeypatch.setattr(job_module, "train_step", stopped)
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
    checkpoint = max((workspace / "parts/checkpoints").iterdir())
    assert checkpoint.name == "step-00000004.safetensors"
    parts = run(workspace, "train.run=parts", "train.checkpoint_every=4", resume=True)
    assert_same(last_checkpoint(whole), last_checkpoint(parts))


def stepped(workspace, budget):
    """Parameters after one real step on four images, in float64, and the number of canvases."""
    root = workspace / "data"
    classes = read_classes(root / "classes.toml")
    samples = find_samples(root, classes, "multiclass")[::4]
    plan = plan_canvases(
        [s.size for s in samples],
        geometry=NetGeometry(16),
        images_per_step=4,
        max_pixels_per_step=budget,
        max_canvases=8,
    )
    (step,) = pack([s.size for s in samples], range(4), plan)
    (loaded,) = load_steps(
        samples,
        [step],
        [no_augmentation(s.size) for s in samples],
        classes=classes,
        geometry=NetGeometry(16),
        loss_at="full",
        pixels=PixelConvention(),
        num_threads=1,
        prefetch_steps=1,
    )
    config = ModelConfig(units=(1, 1, 1, 1), base_depth=4, loss_at="full")
    model = build_model(config, 3, generator=torch.Generator().manual_seed(0)).double().train()
    optimizer = build_optimizer(model, OptimConfig(lr=1e-4, momentum=0.0))
    batches = [dataclasses.replace(b, pixels=b.pixels.double()) for b in loaded.batches]
    loss = train_step(model, CrossEntropy(), batches, optimizer).loss
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    return parameters, float(loss), len(batches)


def test_one_canvas_and_accumulated_canvases_take_the_same_step(workspace):
    together, loss, num_together = stepped(workspace, 10**6)
    apart, apart_loss, num_apart = stepped(workspace, 7000)
    assert num_together < num_apart
    assert loss == pytest.approx(apart_loss, rel=1e-6)  # added up in float32
    torch.testing.assert_close(together, apart, rtol=1e-12, atol=1e-12)


def test_settings_and_data_of_a_resumed_run_must_be_the_same(workspace):
    run(workspace, "train.epochs=1")
    with pytest.raises(ConfigError, match="is not empty"):
        run(workspace)
    with pytest.raises(ConfigError, match=r"optim.lr was 0.003, is 0.1"):
        run(workspace, "optim.lr=0.1", resume=True)
    with pytest.raises(ConfigError, match="no run to resume"):
        run(workspace, "train.run=other", resume=True)


def test_a_wrong_label_stops_the_run_and_keeps_what_was_learned(workspace):
    mask = np.array(Image.open(workspace / "data/masks/s05.png"))
    mask[:3] = 9
    Image.fromarray(mask).save(workspace / "data/masks/s05.png")
    with pytest.raises(DataError, match=r"s05\.png"):
        run(workspace, "plan.images_per_step=1", "train.prefetch_steps=1", "data.val_fraction=0.01")
    newest = max((workspace / "run/checkpoints").iterdir())
    events = read_events(workspace / "run/events.jsonl")
    steps = [e["step"] for e in events if e["event"] == "train"]
    assert int(newest.stem.split("-")[1]) >= max(steps, default=0)


def test_a_net_that_diverged_stops_the_run_and_is_not_saved(workspace):
    with pytest.raises(DataError, match="was not finite in 5 steps in a row"):
        run(
            workspace,
            "optim.kind=sgd",
            "optim.lr=1e9",
            "model.norm=frozen",
            "plan.images_per_step=1",  # 11 steps come before the first evaluation.
        )
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
    with pytest.raises(DataError, match="fits on no canvas of .*plan.json"):
        run(workspace, "plan.file=first/plan.json", "augment.max_scale=3.0")
    with pytest.raises(ConfigError, match="output_stride"):
        run(
            workspace,
            *("plan.file=first/plan.json", "augment.max_scale=1.0", "model.output_stride=8"),
        )


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
