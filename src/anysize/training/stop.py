"""Ctrl-C, SIGTERM and SIGHUP as a request, which a run follows where it can stop without loss."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

from anysize.errors import StoppedByUserError
from anysize.ranks import ALONE, Ranks


class Stop:
    """Whether the user asked to stop; with several ranks, whether one of them was asked."""

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks
        self.is_requested = False
        self.is_harmless = False

    def raise_if_requested(self, *_: int) -> None:
        """Called between steps, and between the images of an evaluation.

        Raises:
            StoppedByUserError: The user asked to stop.
        """
        if self.ranks.any(self.is_requested):
            raise StoppedByUserError("Stopped; a checkpoint was written. Go on with --resume.")

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """For work that may be broken off anywhere, such as packing the images of an epoch.

        Raises:
            StoppedByUserError: The user asked to stop, before or while it runs.
        """
        self.raise_if_requested()
        self.is_harmless = self.ranks.size == 1
        try:
            yield
        finally:
            self.is_harmless = False


def _stopping_signals() -> list[int]:
    """Windows has no SIGHUP, and `nohup` asks to ignore it."""
    hangup: list[int] = [signal.SIGHUP] if hasattr(signal, "SIGHUP") else []
    obeyed = [n for n in hangup if signal.getsignal(n) != signal.SIG_IGN]
    return [signal.SIGINT, signal.SIGTERM, *obeyed]


@contextlib.contextmanager
def stop_requests(ranks: Ranks = ALONE) -> Iterator[Stop]:
    """Turns the first Ctrl-C, SIGTERM or SIGHUP into a request; a second one interrupts at once.

    Not so with several ranks: `torchrun` passes on what the terminal has sent them already.
    """
    stop = Stop(ranks)
    before: dict[int, Any] = {}

    def request(number: int, frame: FrameType | None) -> None:
        stop.is_requested = True
        for n, handler in before.items() if ranks.size == 1 else ():
            signal.signal(n, handler)
        if stop.is_harmless:
            stop.raise_if_requested()

    try:
        for number in _stopping_signals():
            before[number] = signal.signal(number, request)
    except ValueError:  # Not in the main thread: signals are the caller's business.
        before.clear()
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
