"""Where the time of a step goes: exclusive times of nested stages. Pure but for the clock."""

from __future__ import annotations

import time
from collections import defaultdict

__all__ = ["AFTER_BACKWARD", "BETWEEN", "LOSS", "MAX_SEGMENTS", "Clock", "with_evaluation"]


MAX_SEGMENTS = 2000
"""Stages that a step remembers in their order; a step with more keeps only the sums."""


BETWEEN, LOSS, AFTER_BACKWARD = "between steps", "loss", "after backward"
"""Where the script's own lines are: after the optimiser, after the forward, after the backward."""


class Clock:
    """Exclusive times of nested stages: what lies within a stage counts only there.

    Attributes:
        base: The stage outside all others.
        stack: Those that have begun, innermost last.
        began: When the step began.
        mark: Until when time was charged.
        sums, segments: What was charged since the last cut.
    """

    def __init__(self) -> None:
        self.base = BETWEEN
        self.stack: list[str] = []
        self.began = self.mark = time.perf_counter()
        self.sums: dict[str, float] = defaultdict(float)
        self.segments: list[tuple[str, float]] = []

    @property
    def top(self) -> str:
        """The stage that runs now."""
        return self.stack[-1] if self.stack else self.base

    def enter(self, name: str) -> None:
        """A stage begins."""
        self._charge()
        self.stack.append(name)

    def leave(self, name: str, base: str | None = None) -> None:
        """A stage ends, and with it all that had begun within it; `base` is what follows."""
        self._charge()
        if name in self.stack:
            while self.stack.pop() != name:
                pass
        if base is not None:
            self.base = base

    def cut(self) -> tuple[dict[str, float], list[tuple[str, float]]]:
        """What was charged since the last cut: the sums, and the stages in their order."""
        self._charge()
        cut = dict(self.sums), self.segments
        self.sums, self.segments = defaultdict(float), []
        return cut

    def begin(self) -> None:
        """A step begins."""
        self.began = self.mark = time.perf_counter()

    def skip(self, seconds: float) -> None:
        """Takes out what was the probe's own: of no stage, and not of the step."""
        self.mark += seconds
        self.began += seconds

    def _charge(self) -> None:
        now = time.perf_counter()
        name, seconds = self.top, now - self.mark
        self.mark = now
        self.sums[name] += seconds
        if self.segments and self.segments[-1][0] == name:
            self.segments[-1] = (name, self.segments[-1][1] + seconds)
        elif len(self.segments) < MAX_SEGMENTS:
            self.segments.append((name, seconds))


def with_evaluation(segments: list[tuple[str, float]]) -> dict[str, float]:
    """The sums of a step that evaluates: what lies around its evaluation belongs to it.

    That is all between the training steps but the wait for the training's own batch, which comes
    before the evaluation or after it.
    """
    names = [name for name, _ in segments]
    evaluated = [i for i, name in enumerate(names) if name == "evaluation"]
    first, last = (evaluated[0], evaluated[-1]) if evaluated else (len(names), len(names))
    end = next((i for i in range(last, len(names)) if names[i] == "forward"), len(names))
    before = [i for i in range(first) if names[i] == "wait for data"]
    after = [i for i in range(last, end) if names[i] == "wait for data"]
    own_is_before = len(before) > 1 or (len(before) == 1 and not after)
    begin = before[0] + 1 if own_is_before else 0
    if after and not own_is_before:
        end = after[-1]
    sums: dict[str, float] = defaultdict(float)
    for i, (name, seconds) in enumerate(segments):
        kept = name in ("checkpoint", "printing") or not begin <= i < end
        sums[name if kept else "evaluation"] += seconds
    return dict(sums)
