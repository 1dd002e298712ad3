"""The changed `run.toml`: new, complete, and otherwise as a person wrote it."""

import dataclasses
import tomllib

import pytest

from anysize.config import load_config
from anysize.doctor.apply import (
    Promise,
    changes_of,
    faster_file,
    read_promise,
    with_settings,
    write_faster,
)
from anysize.doctor.measure import find_subject
from anysize.errors import DoctorError
from anysize_why.findings import Finding

TEXT = """\
# Ours.
[data]
root = "data"  # from the camera

[train]
epochs = 3
log_every = 2 # often
"""


def finding(*settings, cost_s=1.0):
    return Finding(
        cause="x", cost_s=cost_s, evidence="e", change="c", gain="g", settings=tuple(settings)
    )


def test_a_key_is_set_where_it_stands_and_comments_stay():
    changed = with_settings(TEXT, [("train.log_every", 50)], "run.toml")
    assert changed == TEXT.replace("log_every = 2 # often", "log_every = 50 # often")


def test_a_key_or_section_that_is_not_there_is_added():
    settings = [("train.channels_last", True), ("plan.max_canvases", 8), ("plan.file", "")]
    changed = with_settings(TEXT, settings, "run.toml")
    assert tomllib.loads(changed) == {
        "data": {"root": "data"},
        "train": {"epochs": 3, "log_every": 2, "channels_last": True},
        "plan": {"max_canvases": 8, "file": ""},
    }
    assert "# from the camera" in changed


def test_a_key_of_the_same_name_in_another_section_is_left_alone():
    text = '[data]\ntrain = "a"\nroot = "r"\n[x]\nroot = "o"\n'
    changed = with_settings(text, [("x.root", "n")], "run.toml")
    assert tomllib.loads(changed) == {"data": {"train": "a", "root": "r"}, "x": {"root": "n"}}


@pytest.mark.parametrize(
    "text",
    [
        'data = {root = "d"}\ntrain = {log_every = 1}\n',
        "train.log_every = 1\n",
        '[train]\nrun = """\n[train]\nlog_every = 1"""\nlog_every = 1\n',
        '[train]\n"log_every" = 1\n',
    ],
)
def test_a_file_that_cannot_be_changed_by_lines_is_not_guessed_at(text):
    with pytest.raises(DoctorError, match=r"run.toml.*by hand: train.log_every = 5"):
        with_settings(text, [("train.log_every", 5)], "run.toml")


def test_the_most_costly_finding_decides_about_a_key():
    found = [finding(("a.b", 1)), finding(("a.b", 2), ("a.c", 3)), finding()]
    assert changes_of(found) == [("a.b", 1), ("a.c", 3)]


def test_the_file_says_what_it_changes_and_is_read_back(workspace):
    subject = find_subject(workspace / "run.toml")
    out = faster_file(subject, None)
    assert out == workspace / "run-faster.toml"
    promise = Promise(20.0, 12.5)
    said = write_faster(subject, [finding(("train.loader_threads", 2))], out, promise=promise)
    assert said == f"Wrote {out}. Start with: anysize train {out}"
    assert "#   train.loader_threads = 2\n" in out.read_text()
    assert read_promise(out) == promise
    assert read_promise(workspace / "run.toml") is None
    before, after = load_config(workspace / "run.toml"), load_config(out)
    assert after == dataclasses.replace(
        before, train=dataclasses.replace(before.train, loader_threads=2)
    )
    # A second diagnosis, of the changed file, makes its own promise.
    again = faster_file(find_subject(out), workspace / "again.toml")
    write_faster(
        find_subject(out), [finding(("train.log_every", 9))], again, promise=Promise(13.0, 11.0)
    )
    assert read_promise(again) == Promise(13.0, 11.0)
    assert again.read_text().count("an epoch took") == 1


def test_paths_hold_from_another_folder(workspace):
    (workspace / "other").mkdir()
    out = faster_file(find_subject(workspace / "run.toml"), workspace / "other" / "f.toml")
    subject = find_subject(workspace / "run.toml")
    write_faster(subject, [finding(("train.log_every", 9))], out, promise=Promise(2.0, 1.0))
    config = load_config(out)
    assert config.data.root == str(workspace / "data")
    assert config.train.run == str(workspace / "run")


def test_a_run_goes_on_where_its_steps_stay_the_same(workspace):
    run = a_run(workspace)
    subject = find_subject(run)
    out = faster_file(subject, None)
    assert out == workspace / "run-faster.toml"  # Not in the folder of the run.
    said = write_faster(
        subject, [finding(("train.loader_threads", 2))], out, promise=Promise(2.0, 1.0)
    )
    assert said.endswith("--resume")
    assert load_config(out).train.run == str(run)


def test_a_run_whose_plan_changes_starts_anew_in_another_folder(workspace):
    run = a_run(workspace)
    subject = find_subject(run)
    out = faster_file(subject, workspace / "f.toml")
    said = write_faster(
        subject, [finding(("plan.max_canvases", 8))], out, promise=Promise(2.0, 1.0)
    )
    assert "--resume" not in said
    assert load_config(out).train.run == f"{run}-faster"


def a_run(workspace):
    run = workspace / "run"
    run.mkdir()
    text = (workspace / "run.toml").read_text().replace('"data"', f'"{workspace / "data"}"')
    (run / "run.toml").write_text(text.replace("[train]", f'[train]\nrun = "{run}"'))
    return run


def test_no_file_is_written_over(workspace):
    subject = find_subject(workspace / "run.toml")
    with pytest.raises(DoctorError, match="never overwritten"):
        faster_file(subject, workspace / "run.toml")
    with pytest.raises(DoctorError, match=r"ends with \.toml"):
        faster_file(subject, workspace / "new.txt")
    with pytest.raises(DoctorError, match="no folder"):
        faster_file(subject, workspace / "nowhere" / "new.toml")
