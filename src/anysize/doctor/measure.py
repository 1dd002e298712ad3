"""Measures a run: its real loop with its real `train_step`, and controls that tell causes apart.

The loop runs in a temporary folder, with a learning rate of 0: every step does the work of a real
one, and none of them learns. Nothing is written to the folder of the run.

A control takes the same step on the same batches with one thing changed; a trial runs the loop
under other settings. Both take turns with what the run has, since a machine is never quiet.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console

from anysize.atomic_files import LOCK_NAME
from anysize.config import RunConfig
from anysize.device import (
    is_out_of_memory,
)
from anysize.doctor.controls import (
    ONE_SIZE,
    Controls,
    fewer_threads,
    keep_steps,
    one_size_step,
)
from anysize.doctor.diagnose import Control, Measurements, StepTimes, Trial
from anysize.doctor.loop import (
    LOADER_STAGES,
    Clock,
    Loop,
    canvases_of,
    computed_pixels_of,
    rehearsing,
    untimed_job,
)
from anysize.doctor.trials import run_trials
from anysize.errors import DoctorError
from anysize.limits import convolution_flops_s
from anysize.models.levels import has_basic_units, num_out
from anysize.models.weights_file import save_weights
from anysize.predict.evaluate import evaluate
from anysize.training.events import EventLog, read_events
from anysize.training.job import Job, prepare
from anysize.training.loop import drawn_epoch
from anysize.training.optim import set_learning_rate
from anysize.training.settings import load_run_config, with_whole_paths
from anysize_why.cores import num_cores

__all__ = ["Subject", "find_subject", "measure"]


LOOP_SHARE, CHECKPOINT_SHARE, EVALUATION_SHARE = 0.35, 0.05, 0.15


CONTROL_SHARE, TRIAL_SHARE = 0.2, 0.25
"""Of the time that a measurement may take."""


MOST_STEPS = 400

FOR_TRIALS, FOR_CONTROLS = 8, 2
"""Without time for as many steps, there are no trials, or no controls either."""


MOST_SECONDS = 86_400


LIMIT_SECONDS = 0.5


NAMED = {
    "plan": ("file", "images_per_step", "max_canvases"),
    "model": ("activation_checkpointing",),
    "train": (
        "precision",
        "channels_last",
        "log_every",
        "checkpoint_every",
        "evaluate_every",
        "loader_threads",
        "prefetch_steps",
    ),
}
"""Keys of `run.toml` that a finding may be about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is measured.

    Attributes:
        source: The TOML file.
        config: Its settings, with whole paths.
        run: Folder of the run that goes on; None where a new one is measured.
    """

    source: Path
    config: RunConfig
    run: Path | None

    @property
    def folder(self) -> Path:
        """Of the run, whether it has begun or not."""
        return self.run or Path(self.config.train.run)


def find_subject(path: Path) -> Subject:
    """What a run folder or a `run.toml` names.

    Raises:
        ConfigError: No such run, or the settings are invalid.
        DoctorError: The run is finished, or is being trained at this moment.
    """
    is_run = path.suffix != ".toml"
    source = path / "run.toml" if is_run else path
    if is_run and not source.is_file():
        raise DoctorError(
            f"There is no run in {path}: it has no run.toml. Give the folder of a run, or a "
            "run.toml."
        )
    config = with_whole_paths(load_run_config(source), source.resolve().parent)
    subject = Subject(source=source, config=config, run=path.resolve() if is_run else None)
    _require_idle(subject.folder)
    return subject


def measure(
    subject: Subject, *, seconds: float, say: Callable[[str], object] = lambda _: None
) -> Measurements:
    """Measures a run for about so many seconds, on the device that it names.

    Args:
        subject: Of `find_subject`.
        seconds: Aimed at; slow steps take longer, since each is measured at least a few times.
        say: Told what is being done.

    Raises:
        AnysizeError: The data folder is invalid, the run is finished, or memory ran out.
    """
    if not 0 < seconds <= MOST_SECONDS:
        raise DoctorError(
            f"--seconds is {seconds}; it must be above 0 and at most {MOST_SECONDS}, a day."
        )
    job = _prepared(subject)
    with _terminated_as_interrupted(), _scratch_folder(subject.folder) as folder:
        say(f"Measuring for about {seconds:.0f} s.")
        try:
            return _measure(job, Path(folder), seconds, say)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise DoctorError(
                f"Memory ran out while measuring: {str(error).splitlines()[0]} Free memory, or "
                "lower plan.max_pixels_per_step."
            ) from error


def _prepared(subject: Subject) -> Job:
    """The job, as `train` would have it; of a run that is not finished."""
    job = prepare(
        subject.config,
        subject.folder,
        resume=subject.run is not None,
        agrees=lambda _: True,
        console=Console(file=io.StringIO()),
    )
    if subject.run is not None:
        events = read_events(subject.run / "events.jsonl")
        done = max((e["step"] for e in events if e["event"] == "train"), default=0)
        if done >= job.num_steps:
            raise DoctorError(
                f"The run in {subject.run} is finished: all {done} steps are done. For what a new "
                f"run like it would gain, give {subject.run / 'run.toml'}."
            )
    return job


def _require_idle(run: Path) -> None:
    """Refuses a run that another process trains: both would slow each other down."""
    try:
        import fcntl

        handle = os.open(run / LOCK_NAME, os.O_RDONLY)
    except (ImportError, OSError):  # Windows has no such module.
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DoctorError(
            f"{run} is being trained at this moment, which would spoil the measurement, as the "
            "measurement would slow it down. Wait until it has ended, or stop it; it goes on with "
            "--resume."
        ) from None
    except OSError:
        return  # A file system without locks.
    finally:
        os.close(handle)


def _scratch_folder(run: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder on the disk of the run, where checkpoints cost what they cost there."""
    there = next(p for p in run.resolve().parents if p.is_dir())
    try:
        return tempfile.TemporaryDirectory(dir=there, prefix=".anysize-doctor-")
    except OSError:
        return tempfile.TemporaryDirectory(prefix="anysize-doctor-")


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Lets SIGTERM take the way of Ctrl-C, which leaves no folder behind."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # Not in the main thread: signals are the caller's business.
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _measure(job: Job, folder: Path, seconds: float, say: Callable[[str], object]) -> Measurements:
    as_set, clock = job.config, Clock(job.device)
    job = rehearsing(job, folder, clock)
    set_learning_rate(job.optimizer, 0.0)
    steps, draws = drawn_epoch(job, 0)
    sizes = [d.out_size for d in draws]
    one_size = one_size_step(job, sizes)
    quiet = untimed_job(job)
    quiet.take_step(one_size.batches)  # What a process does once is no first visit.
    with EventLog(folder / "events.jsonl") as log:
        loop = Loop(job, clock, log)
        say("the loop as it is ...")
        rounds = loop.rounds(0, seconds=LOOP_SHARE * seconds, num_steps=MOST_STEPS)
        images = sum(len(p.images) for s in steps for p in s.passes)
        a_image = {name: clock.loader_s[name] / max(clock.num_loaded, 1) for name in LOADER_STAGES}
        packing_s = [*loop.packing_s]
        say("checkpoints and evaluation ...")
        checkpoint_s = loop.checkpoint_s(CHECKPOINT_SHARE * seconds)
        evaluation_s, evaluated = _evaluation(job, rounds, EVALUATION_SHARE * seconds)
        controls = Controls(quiet, keep_steps(job, steps, draws), one_size)
        turns: dict[str, list[float]] = {}
        trials: list[Trial] = []
        step_s = statistics.median(r.wall_s for r in rounds)
        not_measured = _too_slow(step_s, seconds)
        if step_s * FOR_CONTROLS <= seconds:
            say("the same steps with one thing changed ...")
            turns = controls.turns(CONTROL_SHARE * seconds)
        if not not_measured:
            say("the loop under other settings ...")
            trials = run_trials(loop, rounds, steps, sizes, TRIAL_SHARE * seconds)
    of_one_size = turns.pop(ONE_SIZE, [])
    return Measurements(
        device=_in_words(job.device),
        cores=num_cores(),
        threads=torch.get_num_threads(),
        fewer_threads=fewer_threads(),
        settings=_settings(job, as_set),
        epochs=as_set.train.epochs,
        steps_per_epoch=job.steps_per_epoch,
        epoch_images=images,
        epoch_computed_pixels=computed_pixels_of(steps),
        epoch_valid_pixels=sum(s.pixels for s in sizes),
        num_canvases=len(canvases_of(steps)),
        steps=tuple(rounds),
        loader_s={name: images * s for name, s in a_image.items()},
        decoded_pixels=sum(s.size.pixels for s in job.train_samples),
        loaded_pixels=sum(s.pixels for s in sizes),
        packing_s=statistics.median(packing_s),
        logging_s=statistics.fmean(r.stages.get("logging", 0.0) for r in rounds),
        checkpoint_s=checkpoint_s,
        evaluation_s=evaluation_s,
        evaluated_images=evaluated,
        val_images=len(job.val_samples),
        controls=tuple(Control(name=n, ratios=tuple(r)) for n, r in turns.items() if r),
        one_size_ratio=statistics.median(of_one_size) if of_one_size else None,
        trials=tuple(trials),
        memory_share=controls.memory_share,
        flops_a_pixel=controls.flops_a_pixel(),
        limit_flops_s=convolution_flops_s(
            num_out(job.config.model.base_depth, block=0, basic=has_basic_units(job.config.model)),
            precision=job.config.train.precision,
            device=job.device,
            seconds=LIMIT_SECONDS,
        ),
        not_measured=not_measured,
    )


def _too_slow(step_s: float, seconds: float) -> str:
    """Says so where steps are so slow that controls and trials would take far too long."""
    if step_s * FOR_TRIALS <= seconds:
        return ""
    return (
        f"a step takes {step_s:.1f} s, so other loaders and plans were not tried: that takes "
        f"--seconds {math.ceil(step_s * FOR_TRIALS)} or more"
    )


def _evaluation(job: Job, rounds: Sequence[StepTimes], seconds: float) -> tuple[float, int]:
    """Seconds of an evaluation with its weights file, from some of the images; and how many."""
    a_pixel = sum(r.stages.get("forward", 0.0) for r in rounds) / sum(
        r.computed_pixels for r in rounds
    )
    # Twice: the first time also pays for what a net does once for every canvas.
    budget = seconds / 2 / max(a_pixel, 1e-12)
    sizes = [s.size.pixels for s in job.val_samples]
    number = max(min(int(budget / statistics.fmean(sizes)), len(sizes)), 1)
    some = [job.val_samples[i * len(sizes) // number] for i in range(number)]
    took = 0.0
    for _ in range(2):
        began = time.perf_counter()
        evaluate(
            job.model,
            some,
            plan=job.plan,
            classes=job.classes,
            kind=job.config.loss.labels,
            pixels=job.pixels,
            precision=job.config.train.precision,
            num_threads=job.config.train.loader_threads,
            broken={} if job.config.data.skip_broken else None,
        )
        took = time.perf_counter() - began
    began = time.perf_counter()
    save_weights(job.run / "weights.safetensors", job.weights)
    saving = time.perf_counter() - began
    return took * sum(sizes) / sum(s.size.pixels for s in some) + saving, number


def _settings(job: Job, config: RunConfig) -> dict[str, Any]:
    """The keys that a finding may name."""
    named = {
        f"{section}.{key}": getattr(getattr(config, section), key)
        for section, keys in NAMED.items()
        for key in keys
    }
    # A plan that was read may have been made with another number than the key's, 0 means any.
    if config.plan.file or not config.plan.max_canvases:
        named["plan.max_canvases"] = len(job.plan.canvases)
    return named


def _in_words(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{num_cores()} CPU core(s) with {torch.get_num_threads()} thread(s)"
