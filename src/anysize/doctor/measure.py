"""Measures a run: its real loop with its real `train_step`, and controls that tell causes apart.

The loop runs in a temporary folder, with a learning rate of 0: every step does the work of a real
one, and none of them learns. Nothing is written to the folder of the run.

A control takes the same step on the same batches with one thing changed; a trial runs the loop
under other settings. Both take turns with what the run has, since a machine is never quiet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import os
import signal
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from anysize.atomic_files import LOCK_NAME
from anysize.config import RunConfig
from anysize.data.batch import Batch
from anysize.data.batching import epoch_steps
from anysize.data.loader import LoadedStep, load_steps
from anysize.data.transforms import Draw, largest_size
from anysize.device import (
    is_out_of_memory,
    peak_memory_bytes,
    release_memory,
    synchronise,
)
from anysize.doctor.diagnose import WAIT, Control, Measurements, StepTimes, Trial
from anysize.errors import DoctorError, ShapeError
from anysize.geometry import Canvas, Size, padded_batch, target_canvas
from anysize.limits import convolution_flops_s, count_flops
from anysize.models.levels import num_out
from anysize.models.weights_file import save_weights
from anysize.planning.canvases import plan_canvases
from anysize.planning.packing import Step
from anysize.predict.evaluate import evaluate
from anysize.timing import untimed
from anysize.training.events import EventLog, read_events
from anysize.training.job import Job, prepare
from anysize.training.loop import Place, drawn_epoch, run_steps
from anysize.training.optim import set_learning_rate
from anysize.training.settings import load_run_config, with_whole_paths
from anysize_why.cores import num_cores

__all__ = ["Subject", "find_subject", "measure"]

LOADER_STAGES = ("decode", "transform", "place")

LOOP_SHARE, CHECKPOINT_SHARE, EVALUATION_SHARE = 0.35, 0.05, 0.15
CONTROL_SHARE, TRIAL_SHARE = 0.2, 0.25
"""Of the time that a measurement may take."""

MOST_STEPS, TRIAL_STEPS = 400, 8
FOR_TRIALS, FOR_CONTROLS = 8, 2
"""Without time for as many steps, there are no trials, or no controls either."""

FEWEST_TURNS, MOST_TURNS = 3, 7
"""Of a control or a trial."""

NUM_CHECKPOINTS = 6
MOST_KEPT = 3
"""Steps whose batches are kept for the controls."""

MOST_CANVASES = 64
"""That a trial of another plan may have."""

WORTH_A_TRIAL = 0.05
"""Share of waits, waste or first visits from which other settings are tried."""

NEVER = 10**9
MOST_SECONDS = 86_400
LIMIT_SECONDS = 0.5

ONE_SIZE, CHANNELS_LAST, THREADS = "one size", "channels_last", "fewer threads"
RECOMPUTE = "activation_checkpointing off"

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
    as_set, clock = job.config, _Clock(job.device)
    job = _rehearsing(job, folder, clock)
    set_learning_rate(job.optimizer, 0.0)
    steps, draws = drawn_epoch(job, 0)
    sizes = [d.out_size for d in draws]
    one_size = _one_size(job, sizes)
    quiet = _untimed(job)
    quiet.take_step(one_size.batches)  # What a process does once is no first visit.
    with EventLog(folder / "events.jsonl") as log:
        loop = _Loop(job, clock, log)
        say("the loop as it is ...")
        rounds = loop.rounds(0, seconds=LOOP_SHARE * seconds, num_steps=MOST_STEPS)
        images = sum(len(p.images) for s in steps for p in s.passes)
        a_image = {name: clock.loader_s[name] / max(clock.num_loaded, 1) for name in LOADER_STAGES}
        packing_s = [*loop.packing_s]
        say("checkpoints and evaluation ...")
        checkpoint_s = loop.checkpoint_s(CHECKPOINT_SHARE * seconds)
        evaluation_s, evaluated = _evaluation(job, rounds, EVALUATION_SHARE * seconds)
        controls = _Controls(quiet, _kept(job, steps, draws), one_size)
        turns: dict[str, list[float]] = {}
        trials: list[Trial] = []
        step_s = statistics.median(r.wall_s for r in rounds)
        not_measured = _too_slow(step_s, seconds)
        if step_s * FOR_CONTROLS <= seconds:
            say("the same steps with one thing changed ...")
            turns = controls.turns(CONTROL_SHARE * seconds)
        if not not_measured:
            say("the loop under other settings ...")
            trials = _trials(loop, rounds, steps, sizes, TRIAL_SHARE * seconds)
    of_one_size = turns.pop(ONE_SIZE, [])
    return Measurements(
        device=_in_words(job.device),
        cores=num_cores(),
        threads=torch.get_num_threads(),
        fewer_threads=_fewer_threads(),
        settings=_settings(job, as_set),
        epochs=as_set.train.epochs,
        steps_per_epoch=job.steps_per_epoch,
        epoch_images=images,
        epoch_computed_pixels=_computed_pixels(steps),
        epoch_valid_pixels=sum(s.pixels for s in sizes),
        num_canvases=len(_canvases_of(steps)),
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
            num_out(job.config.model.base_depth, block=0),
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


def _rehearsing(job: Job, folder: Path, clock: _Clock) -> Job:
    """The job in another folder, timed, with a line each step, and learning nothing."""
    config = dataclasses.replace(
        job.config,
        optim=dataclasses.replace(job.config.optim, lr=0.0),
        train=dataclasses.replace(
            job.config.train, log_every=1, checkpoint_every=NEVER, max_bad_steps=NEVER
        ),
    )
    return dataclasses.replace(
        job, config=config, run=folder, console=Console(file=io.StringIO()), stage=clock.stage
    )


def _untimed(job: Job) -> Job:
    """The job as controls take its steps: memory that runs out is an answer, not split away."""
    limit = dataclasses.replace(job.pass_limit, is_fixed=True)
    return dataclasses.replace(job, stage=untimed, pass_limit=limit)


@dataclass(slots=True)
class _Clock:
    """Adds up stages: those of the loop's thread by step, those of the loader's threads in all."""

    device: torch.device
    thread: int = field(default_factory=threading.get_ident)
    stages: dict[str, float] = field(default_factory=dict[str, float])
    loader_s: defaultdict[str, float] = field(
        default_factory=lambda: defaultdict[str, float](float)
    )
    num_loaded: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A `Stage`; ends when the device is done."""
        began = time.perf_counter()
        try:
            yield
        finally:
            if threading.get_ident() == self.thread:
                synchronise(self.device)
                self.stages[name] = self.stages.get(name, 0.0) + time.perf_counter() - began
            else:
                with self.lock:
                    self.loader_s[name] += time.perf_counter() - began
                    self.num_loaded += name == LOADER_STAGES[-1]

    def take(self) -> dict[str, float]:
        """The stages since the last time."""
        taken, self.stages = self.stages, {}
        return taken


@dataclass(slots=True)
class _Loop:
    """The real loop, `run_steps`, the canvases that it has met, and what packing epochs took."""

    job: Job
    clock: _Clock
    log: EventLog
    seen: set[Canvas] = field(default_factory=set[Canvas])
    packing_s: list[float] = field(default_factory=list[float])

    def rounds(self, epoch: int, *, seconds: float, num_steps: int) -> list[StepTimes]:
        """Times steps from the start of an epoch on, until time or number is reached.

        Args:
            epoch: To begin with; after the last of the run the first comes again.
            seconds: Time that they may take; two steps are taken anyway.
            num_steps: Most steps.
        """
        found: list[StepTimes] = []
        deadline = time.perf_counter() + seconds
        while len(found) < num_steps:
            found += self._of_epoch(epoch, deadline, num_steps - len(found), len(found))
            if len(found) >= 2 and time.perf_counter() >= deadline:
                break
            epoch += 1
        return found

    def _of_epoch(
        self, epoch: int, deadline: float, num_steps: int, num_before: int
    ) -> list[StepTimes]:
        job = self.job
        epoch %= job.config.train.epochs
        began = time.perf_counter()
        steps, draws = drawn_epoch(job, epoch)
        self.packing_s.append(time.perf_counter() - began)
        place = Place(epoch * job.steps_per_epoch, 0, seen=self.seen)
        found: list[StepTimes] = []
        self.clock.take()
        num_seen, began = len(self.seen), time.perf_counter()
        with contextlib.closing(run_steps(job, epoch, steps, draws, place, self.log)) as done:
            for step, _ in zip(steps, islice(done, num_steps), strict=False):
                now = time.perf_counter()
                found.append(
                    StepTimes(
                        first_of_epoch=not found,
                        new_canvases=len(self.seen) - num_seen,
                        computed_pixels=_computed_pixels([step]),
                        valid_pixels=sum(p.layout.valid_pixels for p in step.passes),
                        wall_s=now - began,
                        stages=self.clock.take(),
                    )
                )
                if now >= deadline and num_before + len(found) >= 2:
                    break
                num_seen, began = len(self.seen), time.perf_counter()
        return found

    def checkpoint_s(self, seconds: float) -> float:
        """Of one checkpoint, as the loop writes it while the loader is at work."""
        train = dataclasses.replace(self.job.config.train, checkpoint_every=1)
        config = dataclasses.replace(self.job.config, train=train)
        writing = self.under(dataclasses.replace(self.job, config=config))
        found = writing.rounds(0, seconds=seconds, num_steps=NUM_CHECKPOINTS)
        return statistics.median(r.stages["checkpoint"] for r in found)

    def under(self, job: Job) -> _Loop:
        """The loop of another job; the net has met the same canvases."""
        return dataclasses.replace(self, job=job)


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


def _kept(job: Job, steps: Sequence[Step], draws: Sequence[Draw]) -> list[LoadedStep]:
    """A few steps with their batches: that with the largest canvas, and the first ones."""
    largest = max(steps, key=lambda s: max(p.layout.canvas.pixels for p in s.passes))
    chosen = [largest, *(s for s in steps if s is not largest)][:MOST_KEPT]
    loaded = load_steps(
        job.train_samples,
        chosen,
        draws,
        classes=job.classes,
        geometry=job.model.geometry,
        loss_at=job.config.model.loss_at,
        pixels=job.pixels,
        num_threads=job.config.train.loader_threads,
        prefetch_steps=MOST_KEPT,
        skip_broken=job.config.data.skip_broken,
    )
    with contextlib.closing(loaded):
        return [step for step in loaded if step.batches]


class _Controls:
    """One step by turns: as it is set, and with one thing changed."""

    def __init__(self, job: Job, kept: list[LoadedStep], one_size: LoadedStep) -> None:
        self._job = job
        self._kept = kept
        self._one_size = one_size
        self.memory_share = 0.0

    def turns(self, seconds: float) -> dict[str, list[float]]:
        """Of each control and turn, the time with the change over the time without."""
        deadline = time.perf_counter() + seconds
        found: dict[str, list[float]] = {name: [] for name in self._names()}
        # One canvas, the smallest, where all of them would take too long.
        kept = self._kept
        if self._time("", kept) > seconds / 20:
            kept = [min(map(_smallest_pass, kept), key=lambda loaded: _valid_pixels([loaded]))]
        for name in list(found):
            if not self._is_possible(name, kept):
                del found[name]
        for turn in range(MOST_TURNS):
            if turn >= FEWEST_TURNS and time.perf_counter() >= deadline:
                break
            as_set = self._time("", kept)
            for name, ratios in found.items():
                if name == ONE_SIZE:
                    valid = self._one_size.batches[0].layout.valid_pixels
                    took = self._time("", [self._one_size]) / valid
                    ratios.append(took / (as_set / _valid_pixels(kept)))
                else:
                    ratios.append(self._time(name, kept) / as_set)
        return found

    def flops_a_pixel(self) -> float:
        """Multiplications and additions of a training step, a canvas pixel; without recomputing."""
        with _changed(self._job, RECOMPUTE):
            flops = count_flops(lambda: self._job.take_step(self._one_size.batches))
        return flops / self._one_size.batches[0].layout.canvas.pixels

    def _names(self) -> list[str]:
        config = self._job.config
        names = [
            ONE_SIZE,
            "precision float32" if config.train.precision == "bf16" else "precision bf16",
        ]
        if not config.train.channels_last:
            names.append(CHANNELS_LAST)
        if torch.get_num_threads() > 1 and self._job.device.type == "cpu":
            names.append(THREADS)
        if config.model.activation_checkpointing:
            names.append(RECOMPUTE)
        return names

    def _is_possible(self, name: str, kept: Sequence[LoadedStep]) -> bool:
        """Takes the first visits; a change that does not fit in memory is dropped."""
        try:
            if name == ONE_SIZE:
                self._time("", [self._one_size])
            else:
                self._time(name, kept)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._job.optimizer.zero_grad(set_to_none=True)
            release_memory(self._job.device)
            return False
        if name == RECOMPUTE:
            self.memory_share = peak_memory_bytes(self._job.device) / _memory_bytes(
                self._job.device
            )
        return True

    def _time(self, change: str, kept: Sequence[LoadedStep]) -> float:
        device = self._job.device
        precision = self._job.config.train.precision
        if change.startswith("precision"):
            precision = "float32" if precision == "bf16" else "bf16"
        with _changed(self._job, change):
            synchronise(device)
            began = time.perf_counter()
            for loaded in kept:
                self._job.take_step(loaded.batches, precision)
            synchronise(device)
            return time.perf_counter() - began


@contextlib.contextmanager
def _changed(job: Job, change: str) -> Iterator[None]:
    """Changes one thing, and puts it back."""
    num_threads, recomputes = torch.get_num_threads(), job.model.recomputes
    try:
        if change == CHANNELS_LAST:
            _set_memory_format(job, torch.channels_last)
        elif change == THREADS:
            torch.set_num_threads(_fewer_threads())
        elif change == RECOMPUTE:
            job.model.recomputes = False
        yield
    finally:
        if change == CHANNELS_LAST:
            _set_memory_format(job, torch.contiguous_format)
        torch.set_num_threads(num_threads)
        job.model.recomputes = recomputes


def _set_memory_format(job: Job, memory_format: torch.memory_format) -> None:
    """Of the net and of what the optimiser keeps, which must lie alike."""
    job.model.to(memory_format=memory_format)  # pyright: ignore[reportCallIssue]
    for state in job.optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() == 4:
                state[key] = value.contiguous(memory_format=memory_format)


def _one_size(job: Job, sizes: Sequence[Size]) -> LoadedStep:
    """A step of made-up images that all have the mean size, in a batch without waste."""
    size = Size(
        round(statistics.fmean(s.height for s in sizes)),
        round(statistics.fmean(s.width for s in sizes)),
    )
    geometry, model = job.model.geometry, job.config.model
    height, width = (geometry.canvas_extent(extent) for extent in size)
    slots = min(job.plan.images_per_step, job.plan.max_pixels_per_step // (height * width))
    canvas = Canvas(max(slots, 1), height, width)
    labels = target_canvas(canvas, geometry, model.loss_at)
    shape = (labels.slots, labels.height, labels.width)
    num_classes = len(job.classes.names)
    if job.config.loss.labels == "multilabel":
        shape = (labels.slots, num_classes, labels.height, labels.width)
    pixels = torch.zeros(canvas.slots, model.num_channels, height, width)
    layout = padded_batch([size] * canvas.slots, canvas, geometry)
    for p in layout.placements:
        pixels[p.slot, :, p.top : p.top + p.height, p.left : p.left + p.width] = 1.0
    batch = Batch(
        pixels=pixels.contiguous(memory_format=torch.channels_last),
        target=torch.zeros(shape, dtype=torch.uint8),
        layout=layout,
        stems=("made up",) * canvas.slots,
        geometry=geometry,
        loss_at=model.loss_at,
    )
    return LoadedStep(batches=(batch,), wait_s=0.0)


def _trials(
    loop: _Loop,
    rounds: Sequence[StepTimes],
    steps: Sequence[Step],
    sizes: Sequence[Size],
    seconds: float,
) -> list[Trial]:
    """Other settings that promise something, by turns with those that are set."""
    others = [
        *_other_loaders(loop.job, rounds, steps),
        *_other_plans(loop.job, rounds, steps, sizes),
    ]
    deadline = time.perf_counter() + seconds
    tried: list[list[float]] = [[] for _ in others]
    for other in others:  # First visits of the canvases that are new.
        if other.job.plan != loop.job.plan:
            loop.under(other.job).rounds(0, seconds=seconds / 8, num_steps=TRIAL_STEPS)
    for turn in range(MOST_TURNS if others else 0):
        if turn >= FEWEST_TURNS and time.perf_counter() >= deadline:
            break
        a_turn = seconds / FEWEST_TURNS / (1 + len(others)) / 2
        as_it_is = _s_a_pixel(loop.rounds(turn, seconds=a_turn, num_steps=TRIAL_STEPS))
        for other, ratios in zip(others, tried, strict=True):
            there = loop.under(other.job).rounds(turn, seconds=a_turn, num_steps=TRIAL_STEPS)
            ratios.append(_s_a_pixel(there) / as_it_is)
    return [
        Trial(
            settings=other.settings,
            ratios=tuple(ratios),
            epoch_computed_pixels=_computed_pixels(other.steps),
            num_canvases=len(_canvases_of(other.steps)),
        )
        for other, ratios in zip(others, tried, strict=True)
    ]


def _s_a_pixel(rounds: Sequence[StepTimes]) -> float:
    """Seconds a valid pixel of a loop that is under way: no first wait, no first visit."""
    steady = [r for r in rounds if not (r.first_of_epoch or r.new_canvases)] or list(rounds)
    return sum(r.wall_s for r in steady) / sum(r.valid_pixels for r in steady)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Other:
    """The job under other settings, and the steps of its first epoch."""

    job: Job
    settings: tuple[tuple[str, Any], ...]
    steps: Sequence[Step]


def _other_loaders(
    job: Job, rounds: Sequence[StepTimes], steps: Sequence[Step]
) -> Iterator[_Other]:
    """More threads where there are cores; more steps ahead where only some steps wait."""
    steady = [r for r in rounds if not r.first_of_epoch] or list(rounds)
    waits = [r.stages.get(WAIT, 0.0) for r in steady]
    if sum(waits) < WORTH_A_TRIAL * sum(r.wall_s for r in steady):
        return
    train = job.config.train
    changes: list[tuple[str, int]] = []
    if train.loader_threads < num_cores():
        changes.append(("loader_threads", num_cores()))
    if statistics.median(waits) < WORTH_A_TRIAL * statistics.median(r.wall_s for r in steady):
        changes.append(("prefetch_steps", 4 * train.prefetch_steps))
    for key, value in changes:
        config = dataclasses.replace(job.config, train=dataclasses.replace(train, **{key: value}))
        yield _Other(
            job=dataclasses.replace(job, config=config),
            settings=((f"train.{key}", value),),
            steps=steps,
        )


def _other_plans(
    job: Job, rounds: Sequence[StepTimes], steps: Sequence[Step], sizes: Sequence[Size]
) -> Iterator[_Other]:
    """The plan of more or fewer canvases that by its pixels and first visits saves most, if any."""
    config, seed = job.config, job.config.train.seed
    now, epochs = len(job.plan.canvases), config.train.epochs
    repeats = [r for r in rounds if not r.new_canvases] or list(rounds)
    rate = sum(r.computing_s for r in repeats) / sum(r.computed_pixels for r in repeats)
    first = [r for r in rounds if r.new_canvases]
    more = sum(r.computing_s - rate * r.computed_pixels for r in first)
    visit_s = max(more, 0.0) / max(sum(r.new_canvases for r in first), 1)

    def cost(steps: Sequence[Step]) -> float:
        return rate * _computed_pixels(steps) + visit_s * len(_canvases_of(steps)) / epochs

    waste = 1 - sum(s.pixels for s in sizes) / _computed_pixels(steps)
    numbers = [2 * now, 4 * now] if waste >= WORTH_A_TRIAL else []
    if visit_s * now / epochs >= WORTH_A_TRIAL * cost(steps):
        numbers.append(now // 2)
    best, least = None, (1 - WORTH_A_TRIAL) * cost(steps)
    for number in numbers:
        if not 1 <= number <= MOST_CANVASES:
            continue
        try:
            plan = plan_canvases(
                sizes,
                geometry=job.plan.geometry,
                images_per_step=job.plan.images_per_step,
                max_pixels_per_step=job.plan.max_pixels_per_step,
                max_canvases=number,
                must_fit=[largest_size(config.augment, s.size) for s in job.train_samples],
            )
        except ShapeError:
            continue  # So few canvases do not fit all images.
        packed = epoch_steps(plan, sizes, seed=seed, epoch=0)
        if cost(packed) < least:
            least = cost(packed)
            settings: tuple[tuple[str, Any], ...] = (("plan.max_canvases", number),)
            if config.plan.file:
                settings = (("plan.file", ""), *settings)
            best = _Other(job=dataclasses.replace(job, plan=plan), settings=settings, steps=packed)
    if best is not None:
        yield best


def _smallest_pass(loaded: LoadedStep) -> LoadedStep:
    batch = min(loaded.batches, key=lambda b: b.layout.canvas.pixels)
    return LoadedStep(batches=(batch,), wait_s=0.0)


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


def _computed_pixels(steps: Sequence[Step]) -> int:
    return sum(p.layout.canvas.pixels for s in steps for p in s.passes)


def _valid_pixels(kept: Sequence[LoadedStep]) -> int:
    return sum(batch.layout.valid_pixels for loaded in kept for batch in loaded.batches)


def _canvases_of(steps: Sequence[Step]) -> set[Canvas]:
    return {p.layout.canvas for s in steps for p in s.passes}


def _fewer_threads() -> int:
    """One a core, or half of them: other programs may have the rest of the cores."""
    threads, cores = torch.get_num_threads(), num_cores()
    return cores if threads > cores else max(threads // 2, 1)


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _in_words(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{num_cores()} CPU core(s) with {torch.get_num_threads()} thread(s)"
