"""The real loop of a run, in another folder, timed stage by stage."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from rich.console import Console

from anysize.device import (
    synchronise,
)
from anysize.doctor.diagnose import StepTimes
from anysize.geometry import Canvas
from anysize.planning.packing import Step
from anysize.timing import untimed
from anysize.training.events import EventLog
from anysize.training.job import Job
from anysize.training.loop import Place, drawn_epoch, run_steps

__all__ = [
    "FEWEST_TURNS",
    "LOADER_STAGES",
    "MOST_TURNS",
    "Clock",
    "Loop",
    "canvases_of",
    "computed_pixels_of",
    "rehearsing",
    "untimed_job",
]

LOADER_STAGES = ("decode", "transform", "place")

FEWEST_TURNS, MOST_TURNS = 3, 7
"""Of a control or a trial."""

NUM_CHECKPOINTS = 6


NEVER = 10**9


def rehearsing(job: Job, folder: Path, clock: Clock) -> Job:
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


def untimed_job(job: Job) -> Job:
    """The job as controls take its steps: memory that runs out is an answer, not split away."""
    limit = dataclasses.replace(job.pass_limit, is_fixed=True)
    return dataclasses.replace(job, stage=untimed, pass_limit=limit)


@dataclass(slots=True)
class Clock:
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
class Loop:
    """The real loop, `run_steps`, the canvases that it has met, and what packing epochs took."""

    job: Job
    clock: Clock
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
                        computed_pixels=computed_pixels_of([step]),
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

    def under(self, job: Job) -> Loop:
        """The loop of another job; the net has met the same canvases."""
        return dataclasses.replace(self, job=job)


def computed_pixels_of(steps: Sequence[Step]) -> int:
    """Pixels of all canvases of some steps."""
    return sum(p.layout.canvas.pixels for s in steps for p in s.passes)


def canvases_of(steps: Sequence[Step]) -> set[Canvas]:
    """The canvases that some steps meet."""
    return {p.layout.canvas for s in steps for p in s.passes}
