"""The folder of a run: what is written before the first step, saved, and taken up again."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from pathlib import Path

import torch

from anysize.atomic_files import LOCK_NAME, write_atomic
from anysize.data.record import (
    RECORD_FILE,
    write_record,
)
from anysize.errors import ConfigError, DataError
from anysize.models.any_net import package_of
from anysize.models.weights_file import weights_path
from anysize.planning.planfile import write_plan
from anysize.tables import to_toml
from anysize.training.events import forget_events_after, read_events, read_metrics
from anysize.training.job import Job
from anysize.training.plans import drawn_sizes
from anysize.training.settings import check_same_settings
from anysize.training.state import State, load_latest_state, save_state
from anysize.wording import count_of, say

WRITTEN_AT_START = {"checkpoints", "events.jsonl", "plan.json", "versions.json", RECORD_FILE}
"""What a run writes before `run.toml`: a folder with no more than this was killed so early."""


def require_run_folder(run: Path, *, resume: bool) -> Path:
    """The folder of a run, which must be one to go on with, or one to begin in.

    Raises:
        ConfigError: There is no run to resume, or the folder is not empty.
    """
    if resume:
        if not (run / "run.toml").is_file():
            raise ConfigError(f"There is no run to resume in {run}. Start it without --resume.")
        return run
    names = {p.name for p in run.iterdir()} if run.is_dir() else set[str]()
    was_killed_early = LOCK_NAME in names and all(
        n == LOCK_NAME or n in WRITTEN_AT_START or n.endswith(".part") for n in names
    )
    if names and not was_killed_early:
        raise ConfigError(
            f"The run folder {run} is not empty. Go on with --resume, or set train.run to another."
        )
    return run


def begin(job: Job, *, resume: bool) -> int:
    """Starts or restores a run on all ranks, of which the first reads and writes; gives the step.

    Raises:
        AnysizeError: What `restore` raises.
    """
    ranks = job.ranks
    state = ranks.on_first(lambda: restore(job) if resume else start(job))
    if state is not None and not ranks.is_first:
        state.restore(job.model, job.optimizer)
        job.tally.restore(state.tally, str(state.path))
    ranks.copy_from_first(job.model.state_dict().values())
    return 0 if state is None else state.step


def start(job: Job) -> None:
    """Writes what describes the run, before its first step; `run.toml` last, which makes it one."""
    run = job.run
    save(job, 0)
    write_record(run / RECORD_FILE, job.train_samples, job.val_samples)
    write_plan(
        job.plan,
        run / "plan.json",
        sizes=drawn_sizes(job.config, [s.size for s in job.train_samples]),
    )
    names = ("torch", "numpy", "pillow", "safetensors")
    versions = {
        "anysize": importlib.metadata.version("anysize"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": str(job.device),
        **({"net": package_of(job.config.model.net)} if job.config.model.net else {}),
        **{name: importlib.metadata.version(name) for name in names},
    }
    write_atomic(run / "versions.json", json.dumps(versions, indent=2).encode())
    write_atomic(run / "events.jsonl", b"")
    write_atomic(run / "run.toml", to_toml(job.config).encode())


def restore(job: Job) -> State | None:
    """Puts the net, the optimiser and the log back to the last checkpoint, and returns it."""
    check_same_settings(job.run, job.config)
    state = load_latest_state(job.run / "checkpoints")
    if state is None:
        events = job.run / "events.jsonl"
        if (job.run / "weights.safetensors").exists() or (events.exists() and read_events(events)):
            raise ConfigError(
                f"{job.run / 'checkpoints'} holds no checkpoint, but the run has trained: going on "
                "would overwrite its weights and events. Put the checkpoints back, or start anew "
                "without --resume: set train.run to another folder, and train.weights to "
                f"{job.run / 'weights.safetensors'} to begin with what was learned."
            )
        say(job.console, "No checkpoint yet: starting from the first step.")
        return start(job)
    for message in state.damaged:
        say(job.console, f"Passed over: {message}")
    _check_same_origin(job, state)
    if state.step > job.num_steps:
        raise ConfigError(
            f"The run in {job.run} has done {count_of(state.step, 'step')}, but train.epochs = "
            f"{job.config.train.epochs} is {count_of(job.num_steps, 'step')}. Set train.epochs to "
            "at least "
            f"{-(-state.step // job.steps_per_epoch)} to go on."
        )
    _check_events(job, state.step)
    state.restore(job.model, job.optimizer)
    job.tally.restore(state.tally, str(state.path))
    forget_events_after(job.run / "events.jsonl", state.step)
    say(job.console, f"Resuming after step {state.step} of {job.num_steps} ({state.path}).")
    return state


def _check_same_origin(job: Job, state: State) -> None:
    """Compares what a checkpoint was made of with what the run has now."""
    was, now = state.made_of, _made_of(job)
    for key, file in (("images", RECORD_FILE), ("plan", "plan.json")):
        if was.get(key) != now[key]:
            raise DataError(
                f"{job.run / file} was changed after {state.path} was written, so the run cannot "
                "go on as it began. Put the file back, or start a new run, with train.weights set "
                f"to {weights_path(job.run)}."
            )
    changed = [f"{key} {was.get(key)}, now {now[key]}" for key in MACHINE if was[key] != now[key]]
    if changed:
        say(
            job.console,
            f"The checkpoint was made with {'; '.join(changed)}. Rounding differs, so the result "
            "is not bit for bit that of a run that never stopped. OMP_NUM_THREADS sets the number "
            "of threads.",
        )


def save(job: Job, step: int) -> None:
    """Writes a checkpoint, on the first rank."""
    if not job.ranks.is_first:
        return
    save_state(
        job.run / "checkpoints",
        step=step,
        made_of=_made_of(job),
        model=job.model,
        optimizer=job.optimizer,
        tally=job.tally.to_json(),
    )


def _check_events(job: Job, step: int) -> None:
    """Says where the log has lost the score of the best weights, and what is known of it."""
    events, best = job.run / "events.jsonl", read_metrics(job.run)
    kept = [e for e in read_events(events) if e["step"] <= step]
    if best is None:
        if not kept and step and weights_path(job.run).exists():
            raise DataError(
                f"{events} has lost the events of this run, and there are no metrics.json, so "
                f"nothing says how good {weights_path(job.run)} is, and the next evaluation would "
                "replace it. Put one of the two back, or move the weights elsewhere."
            )
        return
    scored = {e["step"] for e in kept if e["event"] == "evaluate"}
    if (step and not kept) or (best["step"] < step and best["step"] not in scored):
        say(
            job.console,
            f"{events} has lost earlier events of this run. The best score is that in "
            f"metrics.json, after step {best['step']}; weights.safetensors is only replaced by "
            "better ones.",
        )


MACHINE = ("threads", "ranks", "device", "torch")
"""What decides how sums are rounded: with the same, a resumed run is bit for bit the whole one."""


def _made_of(job: Job) -> dict[str, str]:
    """What the result depends on beside the settings: fingerprints, and `MACHINE`."""
    images = "".join(f"{s.stem} {s.size}\n" for s in job.train_samples)
    return {
        "images": _fingerprint(images),
        "plan": _fingerprint(repr(job.plan)),
        "threads": str(torch.get_num_threads()),
        "ranks": str(job.ranks.size),
        "device": job.device.type,
        "torch": torch.__version__,
    }


def _fingerprint(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
