"""A timer for a training loop of your own, that does not lie.

    timer = Timer(synchronise=torch.cuda.synchronize)
    for images, labels in timer.waiting(loader):
        with timer.step(visit=images.shape):
            with timer.stage("forward"):
                loss = criterion(model(images.cuda()), labels.cuda())
            with timer.stage("backward"):
                loss.backward()
            with timer.stage("optimiser", synchronise=True):
                optimizer.step()
    print(timer.summary())

What it does that timers in scripts often do not:

- It reads a monotonic clock and keeps whole seconds. (`timedelta.microseconds` drops them.)
- A device works on after a call has returned. Only where `synchronise=True` asks for it does a
  stage end with a wait for the device; what a stage without it started is counted where the next
  wait is. A step always ends with one.
- The first step of each `visit` (a shape, a canvas, a graph) is kept apart from its repeats:
  tuning, compilation and allocation happen there, and a mean over both says nothing about either.
- It gives percentiles, and what of the wall clock no stage accounts for.

This module knows nothing of PyTorch: how to wait for the device is given to it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["Spread", "Stage", "StageTimes", "Timer", "Times", "spread", "untimed"]

T = TypeVar("T")

Stage = Callable[[str], AbstractContextManager[object]]
"""What a named part of some work runs in, as in `Timer.stage`."""

WAITING = "waiting"
"""Name of the stage of `Timer.waiting`."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How some durations are spread; all in seconds.

    Attributes:
        count: Of durations; with 0 all others are 0.
        total_s, mean_s: Their sum, and that over `count`.
        p10_s, median_s, p90_s, max_s: Percentiles, interpolated linearly.
    """

    count: int
    total_s: float
    mean_s: float
    p10_s: float
    median_s: float
    p90_s: float
    max_s: float


@dataclass(frozen=True, slots=True)
class StageTimes:
    """A stage in the steps that were no first visits, and in those that were."""

    name: str
    repeats: Spread
    first_visits: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """What a `Timer` measured.

    Attributes:
        wall_s: From the first wait or step to the end of the last.
        waiting: For the next batch; no part of a step.
        repeats: Steps whose visit had been seen before.
        first_visits: Steps whose visit had not.
        stages: Within the steps, in the order in which they were first met.
        unaccounted_s: Of the wall clock that is neither in a step nor in a wait.
    """

    wall_s: float
    waiting: Spread
    repeats: Spread
    first_visits: Spread
    stages: tuple[StageTimes, ...]
    unaccounted_s: float


class Timer:
    """Times the steps of a loop and stages within them; see the module's docstring.

    Not for use by several threads at once.
    """

    def __init__(
        self,
        *,
        synchronise: Callable[[], object] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Starts nothing yet: the wall clock runs from the first wait or step.

        Args:
            synchronise: Waits for the device, such as `torch.cuda.synchronize`; None where calls
                return when they are done, as on a CPU.
            clock: Monotonic, in seconds.
        """
        self._synchronise = synchronise or (lambda: None)
        self._clock = clock
        self._started: float | None = None
        self._ended = 0.0
        self._waits: list[float] = []
        self._seen: set[Hashable] = set()
        self._steps: dict[bool, list[float]] = {False: [], True: []}
        self._stages: dict[str, dict[bool, list[float]]] = {}
        self._in_first_visit: bool | None = None

    def waiting(self, batches: Iterable[T]) -> Iterator[T]:
        """Passes a loader's batches on, and times how long each is waited for."""
        iterator = iter(batches)
        while True:
            began = self._now()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._ended = self._clock()
            self._waits.append(self._ended - began)
            yield batch

    @contextmanager
    def step(self, visit: Hashable = None) -> Generator[None, None, None]:
        """Times a step, up to the moment at which the device is done with it.

        Args:
            visit: What makes this step new to the framework, usually the shape of its input. The
                first step of each value is counted apart.

        Raises:
            RuntimeError: A step is running already.
        """
        if self._in_first_visit is not None:
            raise RuntimeError("A step is running already: steps do not lie within one another.")
        began = self._now()
        self._in_first_visit = visit not in self._seen
        try:
            yield
            self._synchronise()
            self._ended = self._clock()
            self._seen.add(visit)
            self._steps[self._in_first_visit].append(self._ended - began)
        finally:
            self._in_first_visit = None

    @contextmanager
    def stage(self, name: str, *, synchronise: bool = False) -> Generator[None, None, None]:
        """Times a part of a step.

        Args:
            name: Of the stage. Stages may lie within one another; then both count.
            synchronise: Wait for the device at its end. Each wait costs: the device runs dry until
                the next call reaches it.

        Raises:
            RuntimeError: No step is running.
        """
        if self._in_first_visit is None:
            raise RuntimeError(f"The stage {name!r} is outside a step. Put it within `step()`.")
        first = self._in_first_visit
        began = self._clock()
        yield
        if synchronise:
            self._synchronise()
        times = self._stages.setdefault(name, {False: [], True: []})
        times[first].append(self._clock() - began)

    def times(self) -> Times:
        """What was measured so far."""
        wall = 0.0 if self._started is None else self._ended - self._started
        inside = sum(self._waits) + sum(self._steps[False]) + sum(self._steps[True])
        return Times(
            wall_s=wall,
            waiting=spread(self._waits),
            repeats=spread(self._steps[False]),
            first_visits=spread(self._steps[True]),
            stages=tuple(
                StageTimes(name, spread(times[False]), spread(times[True]))
                for name, times in self._stages.items()
            ),
            unaccounted_s=max(wall - inside, 0.0),
        )

    def summary(self) -> str:
        """The times as a table, one line a stage."""
        times = self.times()
        lines = [
            f"{'':<14} {'count':>6} {'total s':>9} {'share':>6} {'p10 ms':>9} {'median':>9} "
            f"{'p90':>9} {'max':>9}"
        ]
        rows = [
            (WAITING, times.waiting),
            ("first visits", times.first_visits),
            ("repeats", times.repeats),
            *((f"  {stage.name}", stage.repeats) for stage in times.stages),
        ]
        for name, row in rows:
            share = row.total_s / times.wall_s if times.wall_s else 0.0
            milliseconds = [1000 * s for s in (row.p10_s, row.median_s, row.p90_s, row.max_s)]
            figures = " ".join(f"{value:>9.1f}" for value in milliseconds)
            lines.append(f"{name:<14} {row.count:>6} {row.total_s:>9.2f} {share:>6.1%} {figures}")
        lines.append(
            f"wall clock {times.wall_s:.2f} s, of which {times.unaccounted_s:.2f} s in neither a "
            "step nor a wait"
        )
        return "\n".join(lines)

    def _now(self) -> float:
        now = self._clock()
        if self._started is None:
            self._started = now
        return now


def untimed(name: str) -> AbstractContextManager[object]:
    """The `Stage` of work that nobody times."""
    del name
    return nullcontext()


def spread(durations_s: Sequence[float]) -> Spread:
    """Count, sum, mean and percentiles of some durations in seconds."""
    if not durations_s:
        return Spread(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    ordered = sorted(durations_s)
    total = math.fsum(ordered)
    return Spread(
        count=len(ordered),
        total_s=total,
        mean_s=total / len(ordered),
        p10_s=_percentile(ordered, 0.1),
        median_s=_percentile(ordered, 0.5),
        p90_s=_percentile(ordered, 0.9),
        max_s=ordered[-1],
    )


def _percentile(ordered: Sequence[float], fraction: float) -> float:
    place = fraction * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
