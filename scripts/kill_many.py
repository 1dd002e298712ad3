"""Kills a small training run many times with SIGKILL, resumes it, and prints what was lost.

    python scripts/kill_many.py --kills 200

Each life of the run is killed at an instant of one of four kinds: anywhere in the process's life,
anywhere while it trains, while a checkpoint is being written (its temporary file is there), or
around the writing of the best weights, their metrics and their event. After every kill there must
be a whole checkpoint that is at most `checkpoint_every` steps older than the last step that the
console reported; and every run that ends must have the weights, optimiser, metrics and evaluations
of a run that was never killed, bit for bit. Two controls must fail these checks: a run with another
seed, and a run that writes its checkpoints in place.

Lives are forked from this process, which has PyTorch loaded, so that time goes into training.

Exits with 1 if anything was lost.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.context import ForkProcess as Life
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

from anysize.cli import main as anysize_command
from anysize.geometry import Canvas, NetGeometry
from anysize.models import weights_file
from anysize.planning.canvases import Plan, write_plan
from anysize.training import run as train  # noqa: F401 (loaded for all lives)
from anysize.training import state
from anysize.training.events import read_events
from anysize.training.state import load_latest_state

CHECKPOINT_EVERY = 3
RUN_TOML = f"""
[data]
root = "data"
val_fraction = 0.25

[plan]
file = "plan.json"
images_per_step = 2

[model]
units = [1, 1, 1, 1]
base_depth = 8
norm = "trained"
norm_decay = 0.5
loss_at = "full"

[augment]
min_scale = 0.8
max_scale = 1.25
brightness = 0.2

[optim]
kind = "adamw"
lr = 0.003
schedule = "poly"
warmup_steps = 4

[train]
epochs = 8
precision = "float32"
log_every = 1
checkpoint_every = {CHECKPOINT_EVERY}
evaluate_every = 2
loader_threads = 3
"""

PLAN = Plan(
    geometry=NetGeometry(),
    images_per_step=2,
    max_pixels_per_step=12_000,
    canvases=(Canvas(1, 56, 104), Canvas(1, 100, 104)),
)
"""Made by hand, since planning takes longer than the run; a step is accumulated over two passes."""

CLASSES_TOML = """
ignore_index = 255

[[class]]
name = "ground"
colour = [90, 120, 90]

[[class]]
name = "disc"
colour = [200, 80, 60]
"""

FORK = multiprocessing.get_context("fork")
KINDS = ("checkpoint", "checkpoint", "checkpoint", "best", "training", "training", "any")


def main() -> int:
    """Runs the kills and the stops; returns the exit code."""
    parser = argparse.ArgumentParser(description="Kill a small run many times and resume it.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--stops", type=int, default=10, help="SIGTERMs and Ctrl-Cs after that")
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args()
    torch.set_num_threads(1)  # A fork must not inherit a pool of threads.
    with tempfile.TemporaryDirectory() as folder:
        job = make_job(Path(folder), random.Random(parsed.seed))
        faults = [*controls(job), *kill_many(job, parsed.kills), *stop_many(job, parsed.stops)]
    for fault in faults:
        print(f"LOST: {fault}")
    print("nothing was lost" if not faults else f"{len(faults)} faults")
    return 1 if faults else 0


@dataclass
class Job:
    """A folder with data and a `run.toml`, and what a run of it that was never killed gives."""

    folder: Path
    rng: random.Random
    whole: dict[str, Any] = field(default_factory=dict[str, Any])
    seconds: float = 0.0
    num_lives: int = 0

    def start(self, run: Path, *given: str, in_place: bool = False) -> Life:
        """Starts or resumes a run; its console goes to a file in the job's folder."""
        self.num_lives += 1
        settings = [f"train.run={run}", *given]
        arguments = ["train", "run.toml", *(o for key in settings for o in ("--set", key))]
        if (run / "run.toml").exists():
            arguments.append("--resume")
        life = FORK.Process(target=live, args=(self.folder, self.console, arguments, in_place))
        life.start()
        return life

    @property
    def console(self) -> Path:
        """Where the last life's console goes."""
        return self.folder / f"console-{self.num_lives:05d}.txt"

    def said(self) -> str:
        """The console of the last process; empty where it was killed before it had one."""
        return self.console.read_text() if self.console.exists() else ""


def live(folder: Path, console: Path, arguments: list[str], in_place: bool) -> None:
    """A life: the command line in a process of its own."""
    os.chdir(folder)
    handle = os.open(console, os.O_WRONLY | os.O_CREAT)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    if in_place:
        state.write_atomic = weights_file.write_atomic = write_in_place
    sys.exit(anysize_command(arguments))


def write_in_place(path: Path, data: bytes) -> None:
    """What a checkpoint must not be written like."""
    with path.open("wb") as file:
        file.write(data[: len(data) // 2])
        file.flush()
        time.sleep(0.3)
        file.write(data[len(data) // 2 :])


def end_of(life: Life) -> int:
    """Waits for a life to end; returns its exit code."""
    life.join()
    assert life.exitcode is not None
    return life.exitcode


def make_job(folder: Path, rng: random.Random) -> Job:
    """Draws the data and trains once without a kill."""
    for name in ("data/images", "data/masks"):
        (folder / name).mkdir(parents=True)
    noise = np.random.default_rng(0)
    for i in range(14):
        height, width = 37 + 3 * i, 81 - 4 * i
        rows, columns = np.mgrid[:height, :width]
        mask = (rows - height / 2) ** 2 + (columns - width / 2) ** 2 < (height / 3) ** 2
        image = np.where(mask[..., None], (200, 80, 60), (90, 120, 90))
        image = (image + noise.normal(0, 12, image.shape)).clip(0, 255).astype(np.uint8)
        Image.fromarray(image).save(folder / f"data/images/s{i:02}.png")
        Image.fromarray(mask.astype(np.uint8)).save(folder / f"data/masks/s{i:02}.png")
    (folder / "data/classes.toml").write_text(CLASSES_TOML)
    write_plan(PLAN, folder / "plan.json", sizes=[])
    (folder / "run.toml").write_text(RUN_TOML)
    job = Job(folder, rng)
    run = folder / "whole"
    if end_of(job.start(run)) != 0:
        raise SystemExit(job.said())
    job.whole = result_of(run)
    began = time.monotonic()
    again = folder / "whole-again"
    end_of(job.start(again))
    job.seconds = time.monotonic() - began
    if differing(job.whole, result_of(again)):
        raise SystemExit("two runs that are never killed differ: nothing can be measured here")
    steps = last_reported(job.said())
    print(f"a run that is never killed: {steps} steps, {job.seconds:.1f} s")
    return job


def result_of(run: Path) -> dict[str, Any]:
    """What a run gives: all tensors, its metrics and its evaluations."""
    state = load_latest_state(run / "checkpoints")
    assert state is not None
    timeless = ("step", "best", "miou", "iou", "num_images")
    return {
        **{f"weights/{n}": t for n, t in load_file(run / "weights.safetensors").items()},
        **{f"state/{n}": t for n, t in state.tensors.items()},
        "step": state.step,
        "metrics": json.loads((run / "metrics.json").read_text()),
        "evaluations": [
            {key: event[key] for key in timeless}
            for event in read_events(run / "events.jsonl")
            if event["event"] == "evaluate"
        ],
    }


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Names of what is not bit for bit the same."""
    return sorted(
        name
        for name in a.keys() | b.keys()
        if name not in a
        or name not in b
        or not (torch.equal(a[name], b[name]) if "/" in name else a[name] == b[name])
    )


def last_reported(console: str) -> int | None:
    """The last step that a console has a line for."""
    steps = re.findall(r"^step +(\d+)/\d+ ", console, re.MULTILINE)
    return int(steps[-1]) if steps else None


def controls(job: Job) -> list[str]:
    """Two runs that must not pass for good."""
    faults = []
    other = job.folder / "other-seed"
    end_of(job.start(other, "train.seed=1"))
    num = len(differing(job.whole, result_of(other)))
    print(f"control, another seed: {num} of {len(job.whole)} results differ")
    if not num:
        faults.append("the control with another seed looks the same")
    run = job.folder / "in-place"
    life = job.start(run, in_place=True)
    wait_for(life, lambda: len(list((run / "checkpoints").glob("step-*"))) >= 2, 60)
    life.kill()
    life.join()
    state = load_latest_state(run / "checkpoints")
    found = bool(state and state.damaged)
    print(f"control, checkpoints written in place: {'damage was found' if found else 'NO DAMAGE'}")
    if not found:
        faults.append("the control that writes in place left no damage")
    return faults


def kill_many(job: Job, num_kills: int) -> list[str]:
    """Kills and resumes until there were that many kills; prints the figures, returns faults."""
    faults: list[str] = []
    counts: Counter[str] = Counter()
    worst_age = 0
    num_runs = 0
    run = job.folder / "run-0"
    reported = 0
    while counts["kills"] < num_kills:
        kind = job.rng.choice(KINDS)
        life = job.start(run)
        wait_for_instant(job, life, run, kind)
        life.kill()
        code = end_of(life)
        said = last_reported(job.said())
        reported = reported if said is None else said
        if code == 0:
            differs = differing(job.whole, result_of(run))
            faults += [f"{run.name} differs in {name}" for name in differs]
            num_runs += 1
            run, reported = job.folder / f"run-{num_runs}", 0
            continue
        if code != -signal.SIGKILL:
            faults.append(f"{run.name} ended with {code}: {job.said()[-500:]}")
            run, reported = job.folder / f"broken-{len(faults)}", 0
            continue
        counts["kills"] += 1
        counts[f"kind {kind}"] += 1
        counts["writing"] += bool(list((run / "checkpoints").glob(".step-*.part")))
        counts["between"] += is_between_best_and_event(run)
        counts["cut"] += is_cut(run / "events.jsonl")
        if not (run / "run.toml").exists():
            counts["early"] += 1
            continue
        state = load_latest_state(run / "checkpoints")
        if state is None or state.damaged:
            faults.append(f"kill {counts['kills']} ({kind}): no whole newest checkpoint")
            continue
        age = reported - state.step
        worst_age = max(worst_age, age)
        if age > CHECKPOINT_EVERY:
            faults.append(f"kill {counts['kills']} ({kind}): the checkpoint is {age} steps old")
    code = end_of(job.start(run))
    differs = differing(job.whole, result_of(run)) if code == 0 else [f"exit code {code}"]
    faults += [f"{run.name} differs in {name}" for name in differs]
    print(f"kills with SIGKILL: {counts['kills']}")
    print(f"  while a checkpoint was being written (temporary file there): {counts['writing']}")
    print(f"  between best weights and their evaluation's event: {counts['between']}")
    print(f"  in the middle of a line of events.jsonl: {counts['cut']}")
    print(f"  before the run had begun: {counts['early']}")
    print(f"oldest checkpoint: {worst_age} steps before the last reported, of {CHECKPOINT_EVERY}")
    print(f"runs finished through kills, compared bit for bit: {num_runs + 1}")
    return faults


def wait_for_instant(job: Job, life: Life, run: Path, kind: str) -> None:
    """Returns at an instant of a kind, or when the process has ended."""
    checkpoints, events = run / "checkpoints", run / "events.jsonl"
    if kind == "any":
        wait_for(life, lambda: False, job.rng.uniform(0, 1.1 * job.seconds))
        return
    length = events.stat().st_size if events.exists() else 0
    if kind == "training":
        wait_for(life, lambda: events.exists() and events.stat().st_size != length, 60)
        wait_for(life, lambda: False, job.rng.uniform(0, job.seconds / 2))
        return
    if kind == "checkpoint":
        for _ in range(job.rng.randint(1, 3)):
            wait_for(life, lambda: not parts(checkpoints, "step-"), 60)
            wait_for(life, lambda: bool(parts(checkpoints, "step-")), 60)
        return
    wait_for(life, lambda: bool(parts(run, "weights")), 60)
    if job.rng.random() < 0.7:
        # The best weights are there, their metrics or event perhaps not yet.
        wait_for(life, lambda: not parts(run, "weights"), 60)
        wait_for(life, lambda: False, job.rng.uniform(0, 0.02))


def parts(folder: Path, name: str) -> list[Path]:
    """Temporary files of a name."""
    return list(folder.glob(f".{name}*.part"))


def wait_for(life: Life, happened: Callable[[], bool], seconds: float) -> None:
    """Looks every fifth of a millisecond, so that the writing of a small file is met."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not happened() and life.is_alive():
        time.sleep(0.0002)


def is_between_best_and_event(run: Path) -> bool:
    """Whether the best weights are newer than the log says."""
    weights, events = run / "weights.safetensors", run / "events.jsonl"
    if not weights.exists():
        return False
    evaluated = [e for e in read_events(events) if e["event"] == "evaluate" and e["best"]]
    metrics = run / "metrics.json"
    step = json.loads(metrics.read_text())["step"] if metrics.exists() else None
    stale = step is None or metrics.stat().st_mtime_ns < weights.stat().st_mtime_ns
    return stale or not evaluated or evaluated[-1]["step"] != step


def is_cut(path: Path) -> bool:
    """Whether a file ends without a line end."""
    data = path.read_bytes() if path.exists() else b""
    return bool(data) and not data.endswith(b"\n")


def stop_many(job: Job, num_stops: int) -> list[str]:
    """Sends SIGTERM and SIGINT at random instants; prints how long the runs took to end."""
    faults: list[str] = []
    waits: list[float] = []
    for i in range(num_stops):
        run = job.folder / f"stopped-{i}"
        life = job.start(run)
        events = run / "events.jsonl"
        wait_for(life, lambda events=events: events.exists() and events.stat().st_size, 60)
        wait_for(life, lambda: False, job.rng.uniform(0, job.seconds / 4))
        began = time.monotonic()
        os.kill(life.pid or 0, (signal.SIGTERM, signal.SIGINT)[i % 2])
        code = end_of(life)
        waits.append(time.monotonic() - began)
        if code == 0:
            continue  # It had ended by itself.
        state = load_latest_state(run / "checkpoints")
        reported = last_reported(job.said()) or 0
        if code != 130 or state is None or state.step < reported:
            faults.append(f"stop {i}: exit code {code}, {job.said()[-300:]}")
        if end_of(job.start(run)) != 0 or differing(job.whole, result_of(run)):
            faults.append(f"stop {i}: the resumed run differs")
    if waits:
        steps = [e["elapsed_s"] for e in read_events(events) if e["event"] == "train"]
        print(
            f"stops with SIGTERM and Ctrl-C: {num_stops}; from signal to exit at most "
            f"{max(waits):.2f} s, steps take at most {max(steps):.2f} s; resumed bit for bit"
        )
        if max(waits) > max(steps) + 5:
            faults.append(f"a stop took {max(waits):.1f} s")
    return faults


if __name__ == "__main__":
    sys.exit(main())
