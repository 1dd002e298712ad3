"""What a run says of itself: when it stops early, to whoever listens, and to TensorBoard."""

import importlib.util

import pytest
from tests.flow.runs import events_of, run, said

from anysize.errors import ConfigError
from anysize.report import write_report
from anysize.training import evaluation


@pytest.fixture
def scores(monkeypatch):
    """Scores that evaluations give, one after the other."""
    real, given = evaluation.evaluate, []

    def evaluate(*args, **options):
        return real(*args, **options) | {"miou": given.pop(0)}

    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    return given


def test_a_run_stops_after_its_patience_and_goes_on_with_more(workspace, scores):
    scores += [0.3, 0.5, 0.4, 0.5, 0.9]
    options = ("train.epochs=6", "train.patience=2")
    text = said(workspace, *options)
    assert "Stopped early after epoch 4: miou has not been better than 50.00%" in text
    folder = workspace / "run"
    (event,) = events_of(folder, "early_stop")
    assert (event["step"], event["best_epoch"]) == (24, 2)
    assert "Stopped early after step 24" in write_report(folder).read_text()
    assert scores == [0.9]

    text = said(workspace, *options, resume=True)
    assert "Stopped early after epoch 4" in text
    assert len(events_of(folder, "early_stop")) == 1
    assert scores == [0.9], "nothing was trained or evaluated"

    scores += [0.8]
    run(workspace, "train.epochs=6", "train.patience=3", resume=True)
    assert not scores
    assert "Stopped early" not in write_report(folder).read_text()


def test_patience_without_evaluations_is_refused(workspace):
    with pytest.raises(ConfigError, match=r"train\.evaluate_every"):
        run(workspace, "train.patience=2", "train.evaluate_every=0")


def test_whoever_listens_is_told_each_event(workspace):
    told = []
    folder = run(workspace, tell=told.append)
    kinds = {event["event"] for event in told}
    assert kinds == {"train", "canvas", "evaluate"}
    for kind in kinds:
        assert [e for e in told if e["event"] == kind] == events_of(folder, kind)
    first, *_, last = events_of(folder, "train")
    assert first["num_steps"] == 12
    assert first["eta_s"] > 0
    assert last["eta_s"] == 0
    assert first["first_visits"][1] == 2
    assert last["first_visits"][0] == len(events_of(folder, "canvas"))


def test_tensorboard_that_is_not_installed_is_said_before_anything_is_written(
    workspace, monkeypatch
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"anysize\[tensorboard\]"):
        run(workspace, "train.tensorboard=true")
    assert not (workspace / "run").exists()


@pytest.mark.filterwarnings("ignore")  # Of TensorBoard's own imports.
def test_tensorboard_has_the_numbers_and_pictures_of_a_run(workspace):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = run(workspace, "train.tensorboard=true")
    found = EventAccumulator(str(folder / "tensorboard")).Reload()
    losses = [(e.step, e.value) for e in found.Scalars("train/loss")]
    expected = [(e["step"], e["loss"]) for e in events_of(folder, "train")]
    assert losses == [(step, pytest.approx(loss)) for step, loss in expected]
    scores = [e.value for e in found.Scalars("evaluate/miou")]
    assert scores == pytest.approx([e["miou"] for e in events_of(folder, "evaluate")])
    names = [name for name in found.Tags()["images"] if name.startswith("evaluate/s")]
    assert len(names) == 3, "one for each image held out"
    assert [e.step for e in found.Images(names[0])] == [6, 12]
