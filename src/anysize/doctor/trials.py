"""The loop under other settings, by turns with those that are set."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from anysize.data.batching import epoch_steps
from anysize.data.transforms import largest_size
from anysize.doctor.diagnose import WAIT, StepTimes, Trial
from anysize.doctor.loop import (
    FEWEST_TURNS,
    MOST_TURNS,
    Loop,
    canvases_of,
    computed_pixels_of,
)
from anysize.errors import ShapeError
from anysize.geometry import Size
from anysize.planning.canvases import plan_canvases
from anysize.planning.packing import Step
from anysize.training.job import Job
from anysize_why.cores import num_cores

__all__ = ["run_trials"]


TRIAL_STEPS = 8


MOST_CANVASES = 64
"""That a trial of another plan may have."""


WORTH_A_TRIAL = 0.05
"""Share of waits, waste or first visits from which other settings are tried."""


def run_trials(
    loop: Loop,
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
            epoch_computed_pixels=computed_pixels_of(other.steps),
            num_canvases=len(canvases_of(other.steps)),
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
        return rate * computed_pixels_of(steps) + visit_s * len(canvases_of(steps)) / epochs

    waste = 1 - sum(s.pixels for s in sizes) / computed_pixels_of(steps)
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
