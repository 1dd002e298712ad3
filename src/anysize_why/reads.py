"""Times reads of single values, `.item()` and its kin, in a few steps of a script."""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from anysize_why.places import own_place, own_places
from anysize_why.stages import Clock

__all__ = ["SYNC_STEPS", "Reads"]

SYNC_STEPS = (3, 8, 14)
"""Steps in which reads of single values are timed; in the others nothing wraps them.

Whatever happens every second step, or less often, does not happen in all three.
"""

READ_GAP_S = 2e-5
"""Longest time between two reads that still is the loop around them: picking the next value."""

SYNCS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__repr__")
"""Methods of a tensor that wait for its value."""


class Reads:
    """Reads of values and waits for the device, by line of the script.

    Attributes:
        num_steps: In which they were timed.
        of_step: Of the running step, by stage: calls, seconds, and those of the loop around them.
        by_line: Of all these steps, by method, stage, file and line: calls and seconds.
        waits: Waits for the device, by method and the lines of the script that wait.
        on_gpu: Whether a read waits for a device as well.
    """

    def __init__(self, clock: Clock, mine: Callable[[], bool]) -> None:
        self._clock = clock
        self._mine = mine
        self._patched: list[tuple[Any, str, Any]] = []
        self._reading = False
        self._ended = 0.0
        self._read_in: tuple[str, Any] | None = None
        self.num_steps = 0
        self.of_step: dict[str, list[float]] = {}
        self.by_line: dict[tuple[str, str, str, int], list[float]] = defaultdict(lambda: [0, 0.0])
        self.waits: Counter[tuple[str, tuple[tuple[str, int], ...]]] = Counter()
        self.on_gpu = False

    def begin_step(self, timed: bool) -> None:
        """A step begins; wraps the methods if its reads are to be timed."""
        self.of_step = {}
        self.unwrap()
        if not timed:
            return
        import torch

        self.num_steps += 1
        for name in SYNCS:
            self.wrap(torch.Tensor, name)
        if self.on_gpu:
            for owner in (torch.cuda, torch.cuda.Stream, torch.cuda.Event):
                self._wrap_wait(owner, "synchronize")

    def unwrap(self) -> None:
        """Puts all methods back."""
        for owner, name, original in self._patched:
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._patched.clear()

    def _wrap_wait(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)
        self._patched.append((owner, name, owner.__dict__.get(name)))

        def counted(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            finally:
                if self._mine():
                    self._saw_wait(name, sys._getframe(1))

        setattr(owner, name, counted)

    def _saw_wait(self, name: str, frame: Any) -> None:
        self.waits[(name, tuple(own_places(frame)))] += 1

    def wrap(self, tensor: Any, name: str) -> None:
        """Times a method of a class."""
        original = getattr(tensor, name)
        self._patched.append((tensor, name, tensor.__dict__.get(name)))

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._reading or not self._mine():
                return original(*args, **kwargs)  # Within another read: that one is timed.
            self._reading = True
            began = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self._saw(name, began, time.perf_counter(), sys._getframe(1))
                self._reading = False

        setattr(tensor, name, timed)

    def _saw(self, name: str, began: float, ended: float, frame: Any) -> None:
        """Sums what a read took, and the time since the one before it if that is a loop's."""
        stage = self._clock.top
        place = own_place(frame)
        if place is None:
            return
        if self.on_gpu:
            self._saw_wait(name, frame)
        gap = began - self._ended
        in_loop = self._read_in == (stage, place[0]) and gap < READ_GAP_S
        gap = gap if in_loop else 0.0
        reads = self.of_step.setdefault(stage, [0, 0.0, 0.0])
        reads[0] += 1
        reads[1] += ended - began
        reads[2] += gap
        total = self.by_line[(name, stage, *place)]
        total[0] += 1
        total[1] += ended - began + gap
        self._read_in = stage, place[0]
        self._ended = time.perf_counter()
        self._clock.skip(self._ended - ended)  # Of no stage, and not of the step.

    def facts(self) -> dict[str, Any]:
        """What was seen, as plain values."""
        longest = sorted(self.by_line.items(), key=lambda item: -item[1][1])[:20]
        return {
            "syncs": [
                {
                    "method": method,
                    "stage": stage,
                    "file": file,
                    "line": line,
                    "calls": calls,
                    "seconds": seconds,
                }
                for (method, stage, file, line), (calls, seconds) in longest
            ],
            "num_sync_steps": self.num_steps,
            "device_waits": [
                {"method": method, "places": list(places), "calls": calls}
                for (method, places), calls in self.waits.items()
            ],
        }
