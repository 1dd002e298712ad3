"""Stops, kills, full disks and second processes, as a user meets them."""

import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.command import anysize
from tests.cli.test_commands import start, wait_for_steps
from tests.flow.runs import assert_same_results, events_of, run

from anysize.atomic_files import only_process_in
from anysize.training.state import load_latest_state

SCRIPT = Path(__file__).parents[2] / "scripts" / "kill_many.py"
PLANNED = ("--set", "plan.file=plan.json", "--set", "plan.images_per_step=2")


def kill_many(num_kills, num_stops):
    done = subprocess.run(
        [sys.executable, SCRIPT, "--kills", str(num_kills), "--stops", str(num_stops)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing was lost" in done.stdout
    figures = re.search(r"being written \(temporary file there\): (\d+)", done.stdout)
    assert figures is not None
    return int(figures[1])


def test_some_kills_lose_nothing():
    assert kill_many(4, 1) >= 1


@pytest.mark.slow
def test_two_hundred_kills_lose_nothing():
    assert kill_many(200, 10) >= 50


def files_of(folder):
    return {
        p: p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file() and p.name not in (".lock", "events.jsonl")
    }


def train(workspace, *options, **more):
    epochs = ("--set", "train.epochs=2")
    return anysize("train", "run.toml", *PLANNED, *epochs, *options, cwd=workspace, **more)


def half_a_run(workspace):
    """A run that was never stopped, and one that was stopped after its first epoch."""
    whole = run(workspace, "train.run=whole", "train.epochs=2", "optim.schedule=constant")
    half = run(workspace, "train.epochs=1", "optim.schedule=constant")
    return whole, half


SCHEDULE = ("--set", "optim.schedule=constant")


def test_a_full_disk_keeps_the_earlier_state(workspace):
    whole, half = half_a_run(workspace)
    before = files_of(half)

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))

    said = train(workspace, *SCHEDULE, "--resume", code=2, preexec_fn=limit)
    assert re.search(r"checkpoints/step-\d+\.safetensors: File too large\.", said)
    assert files_of(half) == before
    train(workspace, *SCHEDULE, "--resume")
    assert_same_results(whole, half)


@pytest.mark.slow
def test_a_full_disk_keeps_the_log_whole(workspace):
    whole, half = half_a_run(workspace)
    size = (half / "events.jsonl").stat().st_size

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 90, size + 90))

    said = train(workspace, *SCHEDULE, "--resume", code=2, preexec_fn=limit)
    assert "File too large" in said
    train(workspace, *SCHEDULE, "--resume")
    assert_same_results(whole, half)


def obey_permissions():
    """Takes away root's right to write anywhere; without root there is none."""
    if os.geteuid() == 0:
        drop_from_bounding_set, dac_override = 24, 1
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(drop_from_bounding_set, dac_override, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


def test_a_folder_that_cannot_be_written_is_a_message_and_keeps_the_state(workspace):
    whole, half = half_a_run(workspace)
    before = files_of(half)
    folders = (half, half / "checkpoints")
    for folder in folders:
        folder.chmod(0o555)
    (half / ".lock").chmod(0o444)
    said = train(workspace, *SCHEDULE, "--resume", code=2, preexec_fn=obey_permissions)
    assert "Permission denied" in said
    assert str(half) in said
    assert files_of(half) == before
    for folder in folders:
        folder.chmod(0o755)
    (half / ".lock").chmod(0o644)
    train(workspace, *SCHEDULE, "--resume")
    assert_same_results(whole, half)


@pytest.mark.slow
def test_a_run_folder_in_a_folder_that_cannot_be_written_is_a_message(workspace):
    run(workspace, "train.run=whole", "train.epochs=1")
    (workspace / "shut").mkdir(mode=0o555)
    said = train(workspace, "--set", "train.run=shut/run", code=2, preexec_fn=obey_permissions)
    assert "shut/run: Permission denied" in said
    (workspace / "file").write_text("not a folder")
    said = train(workspace, "--set", "train.run=file/run", code=2)
    assert "file/run" in said


def test_a_second_run_in_the_same_folder_is_refused_and_the_first_goes_on(workspace):
    run(workspace, "train.run=whole", "train.epochs=1")
    first = start("train", "run.toml", *PLANNED, "--set", "train.epochs=400", cwd=workspace)
    wait_for_steps(workspace / "run", 2)
    said = train(workspace, "--resume", code=2)
    assert f"is in use: process {first.pid} is training in it" in said
    said = train(workspace, code=2)
    assert "is not empty" in said
    assert first.poll() is None
    first.send_signal(signal.SIGTERM)
    _, errors = first.communicate(timeout=60)
    assert first.returncode == 130
    assert "Go on with --resume" in errors
    with only_process_in(workspace / "run"):
        pass  # A process that has ended holds nothing.
    state = load_latest_state(workspace / "run/checkpoints")
    assert state.step >= events_of(workspace / "run", "train")[-1]["step"]


def test_a_second_signal_ends_at_once_and_leaves_the_last_checkpoint(workspace):
    run(workspace, "train.run=whole", "train.epochs=1")
    more = ("--set", "train.epochs=400", "--set", "train.checkpoint_every=2")
    process = start("train", "run.toml", *PLANNED, *more, cwd=workspace)
    wait_for_steps(workspace / "run", 4)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert load_latest_state(workspace / "run/checkpoints").damaged == ()


def test_an_added_file_is_an_error_that_names_the_way_on(workspace):
    whole, half = half_a_run(workspace)
    for kind in ("images", "masks"):
        path = workspace / f"data/{kind}/s00.png"
        (workspace / f"data/{kind}/later.png").write_bytes(path.read_bytes())
    said = train(workspace, *SCHEDULE, "--resume", code=2, stdin=subprocess.DEVNULL)
    assert "1 image that the run did not begin with: later" in said
    assert "add --as-before" in said
    said = train(workspace, *SCHEDULE, "--as-before", code=2)
    assert "--as-before goes with --resume" in said
    train(workspace, *SCHEDULE, "--resume", "--as-before")
    assert_same_results(whole, half)


def test_memory_that_the_system_refuses_splits_the_step():
    """A process with a limit on its memory computes what one without a limit does."""
    code = Path(__file__).with_name("scarce_memory.py")
    done = subprocess.run(
        [sys.executable, code], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "split: the same step" in done.stdout
