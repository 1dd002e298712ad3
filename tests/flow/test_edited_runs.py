"""Files of a run that were changed between its stop and its resume."""

import json
import re

import pytest
import torch
from tests.flow.runs import QUIET, assert_same_results, events_of, move, run, said

from anysize.errors import ConfigError, DataError, WeightsError
from anysize.models.weights_file import load_weights
from anysize.planning.canvases import read_plan
from anysize.training.run import train

LONGER = ("train.epochs=3", "optim.schedule=constant")


@pytest.fixture(scope="module")
def done(tmp_path_factory, make_workspace):
    """A run of two epochs that may be copied."""
    workspace = make_workspace(tmp_path_factory.mktemp("done"))
    run(workspace, "optim.schedule=constant")
    return workspace


@pytest.fixture
def workspace(done, tmp_path):
    return move(done, tmp_path / "workspace")


def test_another_plan_is_refused_and_another_layout_of_the_same_is_not(workspace):
    plan = workspace / "run/plan.json"
    good = plan.read_text()
    assert '"images_per_step": 2' in good
    for text in (
        good.replace('"images_per_step": 2', '"images_per_step": 3'),
        re.sub(r'"height": 100', '"height": 96', good),
    ):
        plan.write_text(text)
        with pytest.raises(DataError, match=r"plan\.json was changed after .* Put the file back"):
            run(workspace, *LONGER, resume=True)
    plan.write_text(json.dumps(json.loads(good), indent=7))
    assert read_plan(plan).images_per_step == 2
    run(workspace, *LONGER, resume=True)


def test_better_weights_outlive_a_log_that_was_emptied(workspace):
    folder = workspace / "run"
    best = json.loads((folder / "metrics.json").read_text())
    (folder / "metrics.json").write_text(json.dumps({**best, "step": 6, "miou": 0.99}))
    weights = (folder / "weights.safetensors").read_bytes()
    (folder / "events.jsonl").write_bytes(b"")
    text = said(workspace, *LONGER, resume=True)
    assert "events.jsonl has lost earlier events of this run. The best score is that in" in text
    assert (folder / "weights.safetensors").read_bytes() == weights
    assert [e["best"] for e in events_of(folder, "evaluate")] == [False, False]


def test_weights_of_which_nothing_tells_the_score_are_not_replaced(workspace):
    folder = workspace / "run"
    weights = (folder / "weights.safetensors").read_bytes()
    (folder / "events.jsonl").write_bytes(b"")
    for damaged in (b"", b'{"step": 12, "kind": "multiclass", "miou": "good"}'):
        (folder / "metrics.json").write_bytes(damaged)
        with pytest.raises(DataError, match=r"events\.jsonl has lost the events .* move the"):
            run(workspace, *LONGER, resume=True)
    assert (folder / "weights.safetensors").read_bytes() == weights


def test_another_number_of_threads_is_said(workspace, tmp_path):
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        text = said(workspace, *LONGER, resume=True)
    finally:
        torch.set_num_threads(before)
    assert f"The checkpoint was made with threads {before}, now {before + 1}. Rounding" in text
    text = said(workspace, "train.epochs=4", "optim.schedule=constant", resume=True)
    assert f"threads {before + 1}, now {before}" in text


def test_the_same_number_of_threads_says_nothing(workspace, done):
    text = said(workspace, "optim.schedule=constant", resume=True)
    assert "threads" not in text
    assert "Resuming after step 12 of 12" in text
    assert_same_results(done / "run", workspace / "run")


def test_fewer_epochs_than_were_done_are_refused(workspace):
    with pytest.raises(ConfigError, match=r"has done 12 steps, .* at least 2 to go on"):
        run(workspace, "train.epochs=1", "optim.schedule=constant", resume=True)


@pytest.mark.parametrize("where", ["a weight", "the name of a class"])
def test_a_flipped_bit_in_the_weights_is_noticed(workspace, where):
    path = workspace / "run/weights.safetensors"
    data = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    at = header + 4003 if where == "a weight" else data.index(b"stripe")
    data[at] ^= 0x80 if where == "a weight" else 1
    path.write_bytes(data)
    with pytest.raises(WeightsError, match=r"weights\.safetensors is damaged: its checksum"):
        load_weights(path, torch.device("cpu"))
    with pytest.raises(WeightsError, match="its checksum"):
        train(
            workspace / "run.toml",
            [f"train.weights={path}", "train.run=other"],
            console=QUIET,
        )


def test_a_run_folder_instead_of_a_run_toml_is_named(workspace):
    with pytest.raises(ConfigError, match=r"is a run folder\. .*run\.toml"):
        train(workspace / "run", resume=True, console=QUIET)
    with pytest.raises(ConfigError, match=r"is a folder, not a run\.toml"):
        train(workspace / "data", console=QUIET)
