"""Whole runs on several ranks: the same results, one voice, one decision where something fails."""

import json
import time

import pytest
from tests.flow import ranks_script
from tests.flow.runs import events_of, last_checkpoint, run, write_small_plan
from tests.torchrun import torchrun

from anysize.training.state import load_latest_state

SETTINGS = (
    "plan.file=plan.json",
    "plan.images_per_step=2",
    "optim.schedule=constant",
    "optim.kind=sgd",  # Where AdamW divides by a gradient near 0, a last digit becomes the first.
    "optim.lr=0.001",
    "train.log_every=1",
)


SLOWLY = ("optim.lr=1e-9",)
"""For frozen norms, whose statistics are of no image: the net diverges."""


def on_ranks(num_ranks, workspace, how, *overrides, resume=False, **options):
    """`anysize train` as `ranks_script` has it; gives what it printed."""
    pairs = [x for s in (*SETTINGS, *overrides) for x in ("--set", s)]
    options = {"cwd": workspace, "timeout": 120, **options}
    more = ["--resume"] if resume else []
    write_small_plan(workspace)
    return torchrun(
        num_ranks, ranks_script.__file__, how, "train", "run.toml", *pairs, *more, **options
    )


def assert_near(folder, other, allowed=1e-12):
    a, b = last_checkpoint(folder), last_checkpoint(other)
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert float((value - b[name]).abs().max()) <= allowed * float(b[name].abs().max()), name


def test_resumed_on_two_one_and_three_ranks_a_run_is_that_of_one(workspace, monkeypatch):
    settings = ("data.val_fraction=0.5", *SETTINGS)  # 7 images to evaluate on.
    monkeypatch.syspath_prepend(".")
    ranks_script.in_float64(monkeypatch.setattr)
    whole = run(workspace, "train.run=whole", *settings, "train.epochs=3")
    more = ("data.val_fraction=0.5", "train.run=parts")
    said = on_ranks(2, workspace, "float64", *more, "train.epochs=1")
    assert said.count("Done.") == said.count("evaluate after epoch 1") == 1
    run(workspace, "train.run=parts", *settings, "train.epochs=2", resume=True)
    said = on_ranks(3, workspace, "float64", *more, "train.epochs=3", resume=True)
    assert said.count("Resuming after step") == said.count("Done.") == 1
    parts = workspace / "parts"
    assert_near(parts, whole)
    keys = ("step", "miou", "iou", "num_images", "num_pixels", "best")
    for kind in ("evaluate", "train"):
        of_one, of_many = events_of(whole, kind), events_of(parts, kind)
        assert [e["step"] for e in of_one] == [e["step"] for e in of_many]
    assert [[e[k] for k in keys] for e in events_of(whole, "evaluate")] == [
        [e[k] for k in keys] for e in events_of(parts, "evaluate")
    ]
    assert events_of(parts, "evaluate")[0]["num_images"] == 7
    assert {p.name for p in whole.iterdir()} == {p.name for p in parts.iterdir()}


def test_a_killed_rank_ends_the_others_at_once_and_the_checkpoint_is_whole(workspace):
    began = time.monotonic()
    said = on_ranks(2, workspace, "kill", "train.checkpoint_every=1", code=1)
    assert time.monotonic() - began < 60  # Of which the start takes most on a busy machine.
    assert "Rank 0 of 2 lost touch with another one" in said
    assert 'Traceback (most recent call last):\n  File "/tmp' not in said
    assert load_latest_state(workspace / "run/checkpoints").step == 2
    run(workspace, *SETTINGS, "train.epochs=1", resume=True)


@pytest.mark.parametrize("norm", ["trained", pytest.param("frozen", marks=pytest.mark.slow)])
def test_a_loss_that_is_not_finite_on_one_rank_skips_the_step_on_all(workspace, norm):
    on_ranks(2, workspace, "nan", "train.epochs=1", f"model.norm={norm}", *SLOWLY)
    (event,) = events_of(workspace / "run", "skip")
    assert event["step"] == ranks_script.FAULT_AT
    assert len(event["images"]) == 2


@pytest.mark.parametrize("norm", ["trained", "frozen"])
@pytest.mark.slow
def test_memory_that_runs_out_on_one_rank_makes_passes_smaller_on_all(workspace, norm):
    said = on_ranks(2, workspace, "memory", "train.epochs=1", f"model.norm={norm}", *SLOWLY)
    (event,) = events_of(workspace / "run", "memory")
    assert event["step"] == ranks_script.FAULT_AT
    assert said.count("Memory ran out in step 3") == 1
    tally = load_latest_state(workspace / "run/checkpoints").tally
    assert tally["max_pass_pixels"] == event["max_pass_pixels"]


@pytest.mark.slow
def test_a_stop_that_one_rank_is_asked_for_stops_all(workspace):
    said = on_ranks(3, workspace, "sigterm", code=1)
    assert said.count("anysize: Stopped; a checkpoint was written.") == 1
    assert load_latest_state(workspace / "run/checkpoints").step == ranks_script.FAULT_AT


@pytest.mark.slow
def test_a_broken_image_stops_or_is_left_out_on_all_ranks(workspace):
    (workspace / "data/images/s05.png").write_bytes(
        (workspace / "data/images/s05.png").read_bytes()[:400]
    )
    said = on_ranks(2, workspace, "float64", code=1)
    assert said.count("anysize: ") == 1
    assert "s05.png" in said
    on_ranks(2, workspace, "float64", "data.skip_broken=true", "train.run=other")
    assert events_of(workspace / "other", "broken")
    ranks = json.loads((workspace / "other/metrics.json").read_text())
    assert ranks["num_images"] >= 2
