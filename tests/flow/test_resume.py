"""A run that was stopped or killed, and resumed, is the run that was not."""

import shutil

import pytest
import torch
from PIL import Image
from tests.flow.runs import (
    assert_same_results,
    copy,
    events_of,
    results,
    run,
    said,
)

from anysize.atomic_files import only_process_in
from anysize.errors import ConfigError, DataError
from anysize.models import weights_file
from anysize.models.weights_file import load_weights
from anysize.predict.evaluate import evaluate_run
from anysize.training import evaluation, run_folder
from anysize.training import events as runlog
from anysize.training import state as state_module
from anysize.training.state import load_latest_state

VARIANTS = {
    "trained norms, adamw, poly": (),
    "frozen norms, sgd, accumulated, multistep": (
        "model.norm=frozen",
        "optim.kind=sgd",
        "optim.schedule=multistep",
        "optim.milestones=[4, 9]",
        "optim.warmup_steps=3",
        "augment.crop=[40, 40]",
        "augment.saturation=0.3",
        "plan.file=one-image.json",
    ),
}


def one_image_a_pass(workspace):
    """A plan on which each step is accumulated over two passes."""
    text = (workspace / "plan.json").read_text()
    lines = [line for line in text.splitlines() if '"slots": 2' not in line]
    text = "\n".join(lines).replace("},\n  ]", "}\n  ]")
    (workspace / "one-image.json").write_text(text)


def copies_at_each_checkpoint(monkeypatch, folder, to):
    real = run_folder.save_state

    def saving(*args, **kwargs):
        real(*args, **kwargs)
        if kwargs["step"]:
            copy(folder, to / f"step-{kwargs['step']}")

    monkeypatch.setattr(run_folder, "save_state", saving)


@pytest.mark.parametrize("variant", VARIANTS)
def test_resumes_bit_for_bit_from_any_step_of_an_epoch(workspace, monkeypatch, variant):
    settings = VARIANTS[variant]
    run(workspace, "train.run=planned", "train.epochs=1")
    one_image_a_pass(workspace)
    copies_at_each_checkpoint(monkeypatch, workspace / "whole", workspace / "at")
    whole = run(workspace, "train.run=whole", "train.checkpoint_every=1", *settings)
    monkeypatch.undo()
    if settings:
        canvases = {tuple(e["canvas"]) for e in events_of(whole, "canvas")}
        assert canvases == {(1, 100, 104)}
    num_steps = results(whole)["evaluations"][-1]["step"]
    assert num_steps == 12
    for step in range(1, num_steps // 2 + 1):  # All of the first epoch, and its end.
        at = workspace / f"at/step-{step}"
        assert load_latest_state(at / "checkpoints").step == step
        other = ("train.loader_threads=3", "train.prefetch_steps=2", "train.checkpoint_every=100")
        run(workspace, f"train.run=at/step-{step}", *other, *settings, resume=True)
        assert_same_results(whole, at)


def test_another_seed_gives_other_results(workspace):
    """The control of all comparisons here."""
    run(workspace, "train.run=a", "train.epochs=1")
    run(workspace, "train.run=b", "train.epochs=1", "train.seed=1")
    with pytest.raises(AssertionError):
        assert_same_results(workspace / "a", workspace / "b")


def copies_around_each_write(monkeypatch, folder, to):
    """Every state that a kill between two writes can leave, as copies of the run folder."""
    taken = []

    def take(*_):
        if (folder / "run.toml").exists():
            taken.append(copy(folder, to / f"{len(taken):03}"))

    def around(real):
        def writing(*args):
            take()
            result = real(*args)
            take()
            return result

        return writing

    for module in (weights_file, run_folder, evaluation):
        monkeypatch.setattr(module, "write_atomic", around(module.write_atomic))
    monkeypatch.setattr(runlog.EventLog, "write", around(runlog.EventLog.write))
    return taken


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
def test_a_kill_between_any_two_writes_loses_nothing(workspace, monkeypatch, every):
    settings = ("train.checkpoint_every=2", "train.log_every=1")
    taken = copies_around_each_write(monkeypatch, workspace / "whole", workspace / "at")
    whole = run(workspace, "train.run=whole", *settings)
    monkeypatch.undo()
    between = [
        i
        for i, at in enumerate(taken)
        if (at / "weights.safetensors").exists()
        and (
            not (at / "metrics.json").exists()
            or f'"step": {max([e["step"] for e in events_of(at, "evaluate")], default=0)},'
            not in (at / "metrics.json").read_text()
        )
    ]
    assert len(between) >= 2  # Best weights without their metrics, metrics without their event.
    chosen = sorted({*between, *range(0, len(taken), every)})
    for i in chosen:
        at = taken[i]
        log = at / "events.jsonl"
        if i % 2 and log.stat().st_size:
            log.write_bytes(log.read_bytes()[:-7])  # The kill came in the middle of a line.
        run(workspace, f"train.run=at/{at.name}", *settings, resume=True)
        assert_same_results(whole, at)


def test_the_older_checkpoint_is_taken_when_the_newest_is_damaged_and_it_is_said(
    workspace, monkeypatch
):
    copies_at_each_checkpoint(monkeypatch, workspace / "whole", workspace / "at")
    whole = run(workspace, "train.run=whole", "train.checkpoint_every=2")
    monkeypatch.undo()
    at = workspace / "at/step-8"
    newest = at / "checkpoints/step-00000008.safetensors"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    text = said(workspace, "train.run=at/step-8", "train.checkpoint_every=5", resume=True)
    assert "Passed over" in text
    assert "step-00000008.safetensors is damaged: its checksum does not match" in text
    assert "Resuming after step 6 of 12" in text
    assert_same_results(whole, at)


def test_a_damaged_checkpoint_does_not_take_the_place_of_a_whole_one(workspace, monkeypatch):
    copies_at_each_checkpoint(monkeypatch, workspace / "whole", workspace / "at")
    run(workspace, "train.run=whole", "train.checkpoint_every=1", "train.epochs=1")
    monkeypatch.undo()
    folder = workspace / "at/step-5/checkpoints"
    (folder / "step-00000005.safetensors").write_bytes(b"nothing")
    model = load_weights(workspace / "whole/weights.safetensors", torch.device("cpu")).model
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state_module.save_state(folder, step=4, made_of={}, model=model, optimizer=optimizer)
    assert [p.name for p in sorted(folder.iterdir())] == ["step-00000004.safetensors"]


def test_what_a_killed_process_left_unfinished_is_removed_and_never_read(workspace, monkeypatch):
    copies_at_each_checkpoint(monkeypatch, workspace / "whole", workspace / "at")
    whole = run(workspace, "train.run=whole", "train.checkpoint_every=3", "train.epochs=1")
    monkeypatch.undo()
    at = workspace / "at/step-3"
    left = [
        at / "checkpoints/.step-00000009.safetensors.0123abcd.part",
        at / ".weights.safetensors.0123abcd.part",
    ]
    for path in left:
        path.write_bytes(b"half of it")
    assert load_latest_state(at / "checkpoints").step == 3
    run(workspace, "train.run=at/step-3", "train.epochs=1", resume=True)
    assert_same_results(whole, at)
    assert not list(at.rglob("*.part"))


def test_a_run_that_was_killed_before_it_began_can_be_started_again(workspace):
    whole = run(workspace, "train.run=whole", "train.epochs=1")
    early = copy(whole, workspace / "early")
    for name in ("run.toml", "weights.safetensors", "weights_last.safetensors", "metrics.json"):
        (early / name).unlink()
    with pytest.raises(ConfigError, match="no run to resume"):
        run(workspace, "train.run=early", "train.epochs=1", resume=True)
    run(workspace, "train.run=early", "train.epochs=1")
    assert_same_results(whole, early)
    (workspace / "other").mkdir()
    (workspace / "other/plan.json").write_text("somebody's own plan")
    with pytest.raises(ConfigError, match="is not empty"):
        run(workspace, "train.run=other")


def test_two_processes_do_not_train_in_one_folder(workspace):
    whole = run(workspace, "train.run=whole", "train.epochs=1")
    before = {p: p.read_bytes() for p in whole.rglob("*") if p.is_file() and p.name != ".lock"}
    with only_process_in(whole), pytest.raises(ConfigError, match="in use: process"):
        run(workspace, "train.run=whole", resume=True)
    assert before == {p: p.read_bytes() for p in before}
    run(workspace, "train.run=whole", resume=True)


def add_image(workspace, name="new"):
    for kind in ("images", "masks"):
        shutil.copy(workspace / f"data/{kind}/s00.png", workspace / f"data/{kind}/{name}.png")


def stopped_after_an_epoch(workspace):
    """A run of one epoch, to be resumed to two."""
    return run(workspace, "train.epochs=1")


def test_an_added_file_is_named_and_asked_about(workspace):
    whole = run(workspace, "train.run=whole", "train.epochs=2", "optim.schedule=constant")
    run(workspace, "train.epochs=1", "optim.schedule=constant")
    add_image(workspace)
    settings = ("train.epochs=2", "optim.schedule=constant")
    before = results(workspace / "run")
    with pytest.raises(DataError, match=r"1 image that the run did not begin with: new\..*--as-b"):
        run(workspace, *settings, resume=True)
    asked = []
    with pytest.raises(DataError, match="Nothing was done"):
        run(workspace, *settings, resume=True, agrees=lambda q: bool(asked.append(q)))
    assert "new" in asked[0]
    assert before["evaluations"] == results(workspace / "run")["evaluations"]
    text = said(workspace, *settings, resume=True, agrees=lambda q: True)
    assert "Going on with those that it began with" in text
    assert_same_results(whole, workspace / "run")


def test_an_added_file_does_not_change_what_a_run_is_evaluated_on(workspace):
    folder = stopped_after_an_epoch(workspace)
    weights = load_weights(folder / "weights.safetensors", torch.device("cpu"))
    before = evaluate_run(folder, weights)
    for i in range(12):
        add_image(workspace, f"a{i}")
    assert evaluate_run(folder, weights) == before


def test_missing_and_resized_images_are_named(workspace):
    stopped_after_an_epoch(workspace)
    for kind in ("images", "masks"):
        path = workspace / f"data/{kind}/s03.png"
        with Image.open(path) as image:
            image.resize((30, 31), Image.Resampling.NEAREST).save(path)
    with pytest.raises(DataError, match=r"another size.*s03 \(31x30, was 46x69\)"):
        run(workspace, resume=True)
    for kind in ("images", "masks"):
        (workspace / f"data/{kind}/s03.png").unlink()
    with pytest.raises(DataError, match=r"no longer there: s03 .*samples\.json"):
        run(workspace, resume=True)


def test_changed_files_of_the_same_size_are_said(workspace):
    stopped_after_an_epoch(workspace)
    Image.new("RGB", (69, 46)).save(workspace / "data/images/s03.png")
    assert "Files changed since the run began: s03." in said(workspace, resume=True)


def test_a_record_that_was_tampered_with_is_named(workspace):
    folder = stopped_after_an_epoch(workspace)
    record = folder / "samples.json"
    good = record.read_text()
    for text in ("", "[1]", '{"train": [[1, [2, 3], []]], "val": []}', "[" * 100_000):
        record.write_text(text)
        with pytest.raises(DataError, match=r"samples\.json"):
            run(workspace, resume=True)
    lines = good.splitlines()
    lines[2], lines[3] = lines[3], lines[2]
    record.write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"samples\.json was changed after"):
        run(workspace, resume=True, agrees=lambda question: True)


def test_a_log_with_a_line_that_is_no_event_is_named(workspace):
    folder = stopped_after_an_epoch(workspace)
    log = folder / "events.jsonl"
    good = log.read_bytes()
    for line in (
        b"\xff\xfe",
        b"7",
        b'{"event": "train"}',
        b'{"event": "train", "step": 3}',
        b'{"event": "evaluate", "step": 3, "kind": "multiclass", "iou": {"a": "x"}, "miou": 1}',
        b'{"event": 1, "step": "x"}',
        b"[" * 9000,
    ):
        log.write_bytes(line + b"\n" + good)
        with pytest.raises(DataError, match="Line 1 of .*events"):
            run(workspace, resume=True)


def test_a_run_whose_checkpoints_are_gone_is_not_begun_again_over_its_weights(workspace):
    folder = run(workspace, "train.epochs=1")
    shutil.rmtree(folder / "checkpoints")
    before = {p: p.read_bytes() for p in folder.iterdir() if p.is_file() and p.name != ".lock"}
    with pytest.raises(ConfigError, match=r"no checkpoint.*start anew"):
        run(workspace, "train.epochs=2", resume=True)
    assert {p: p.read_bytes() for p in before} == before
