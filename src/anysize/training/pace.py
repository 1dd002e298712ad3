"""What steps take, and what is left of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any


@dataclass(slots=True)
class Pace:
    """Seconds that steps took: those on known canvases, and those that met a new one."""

    known_s: float = 0.0
    num_known: int = 0
    new_s: float = 0.0
    num_new: int = 0
    num_canvases: int = 0

    def add(self, seconds: float, num_canvases: int) -> None:
        """Counts a step that met so many canvases for the first time."""
        if num_canvases:
            self.new_s += seconds
            self.num_new += 1
            self.num_canvases += num_canvases
        else:
            self.known_s += seconds
            self.num_known += 1

    def seconds_left(self, num_steps: int, num_canvases: int) -> float:
        """An estimate for the steps to come and the first visits among them; no evaluations."""
        if not self.num_known:  # All that is known of a step has a first visit in it.
            return num_steps * self.new_s / max(self.num_new, 1)
        step = self.known_s / self.num_known
        visits = max(self.new_s - self.num_new * step, 0.0)
        return num_steps * step + num_canvases * visits / max(self.num_canvases, 1)


def time_left(event: Mapping[str, Any]) -> str:
    """The time left of a run in words, from a "train" event, and first visits still to come."""
    seen, canvases = event["first_visits"]
    words = f"left {timedelta(seconds=round(event['eta_s']))}"
    return f"{words}  first visits: {seen} of {canvases} canvases" if seen < canvases else words
