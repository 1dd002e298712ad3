"""Watches a script that waits for its DataLoader: what the workers do, and whether one hangs.

A forked worker writes its stack into a file without a name when it is sent a signal that nothing
else uses; the handler is C, so a worker that is stuck in a call answers as well.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anysize_why.places import place_in_stack

__all__ = ["LoaderWatch", "worker_pids"]

LOOK_S = 0.1
"""How often a worker is asked for its line while the script waits."""

HANG_S = 30.0
"""A wait as long as this, in which no process computes, is a hang."""

IDLE_S = 8.0
"""How long nothing must have computed, at the end of such a wait."""

IDLE_SHARE = 0.05
"""Share of a core up to which a process counts as idle."""


class LoaderWatch:
    """Looks at the workers of a loader for which the script waits.

    Attributes:
        lines: How often a worker was seen in a line, by file, line and the library called there.
    """

    def __init__(self, hung: Callable[[dict[str, Any]], None]) -> None:
        self._hung = hung
        self._number = getattr(signal, "SIGRTMAX", 0) - 5
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._end = 0
        self._turn = 0
        self._thread: threading.Thread | None = None
        self._wait: tuple[Any, float] | None = None
        self._longest = 0.0
        self._idle_since: float | None = None
        self._then = (0.0, 0.0)
        self.lines: Counter[tuple[str, int, str]] = Counter()
        if self._number > 0 and hasattr(faulthandler, "register"):
            faulthandler.register(self._number, self._file, all_threads=False)

    def begin(self, iterator: Any) -> None:
        """The script waits for a batch."""
        self._wait = iterator, time.monotonic()
        self._idle_since = None
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._watch, name="anysize-why-loader", daemon=True
            )
            self._thread.start()

    def end(self) -> None:
        """It has one."""
        if self._wait:
            self._longest = max(self._longest, time.monotonic() - self._wait[1])
        self._wait = None

    def stop(self) -> None:
        """Ends the watch."""
        self._wait, self._thread = None, None

    def _watch(self) -> None:
        mine = self._thread
        while mine is self._thread:
            time.sleep(LOOK_S)
            wait = self._wait
            now = time.monotonic()
            if wait is None or now - wait[1] < LOOK_S / 2:
                continue
            pids = worker_pids(wait[0])
            if pids:
                self._turn += 1
                place, via = self._stack_of(pids[self._turn % len(pids)])
                if place and self._wait is wait:
                    self.lines[(*place, via)] += 1
            if self._is_stuck(now, now - wait[1], pids) and self._wait is wait:
                self._hung(
                    {"seconds": now - wait[1], "workers": [self._describe(pid) for pid in pids]}
                )
                return

    def _is_stuck(self, now: float, waited: float, pids: list[int]) -> bool:
        """Whether the wait is a long one, and neither the script nor a worker computes."""
        then, used_then = self._then
        if now - then >= 1.0:
            used = sum(map(_cpu_s, [os.getpid(), *pids]))
            idle = used - used_then < IDLE_SHARE * (now - then)
            self._then = now, used
            if not idle:
                self._idle_since = None
            elif self._idle_since is None:
                self._idle_since = then
        idle_s = now - self._idle_since if self._idle_since is not None else 0.0
        return waited > max(HANG_S, 5 * self._longest) and idle_s > IDLE_S

    def _describe(self, pid: int) -> dict[str, Any]:
        place, via = self._stack_of(pid)
        return {"pid": pid, "place": place, "via": via}

    def _stack_of(self, pid: int) -> tuple[tuple[str, int] | None, str]:
        """A worker's innermost line of the script; none where it cannot be asked."""
        if not _catches(pid, self._number):
            return None, ""
        try:
            os.kill(pid, self._number)
        except OSError:
            return None, ""
        text = b""
        for _ in range(20):
            time.sleep(0.002)
            size = len(text)
            text = os.pread(self._file.fileno(), 1 << 20, self._end)
            if text and len(text) == size:
                break
        self._end += len(text)
        return place_in_stack(text.decode(errors="replace").splitlines())


def worker_pids(iterator: Any) -> list[int]:
    """Process ids of the workers of a DataLoader's iterator."""
    return [worker.pid for worker in getattr(iterator, "_workers", ()) if worker.pid]


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal; without one it would end it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line for line in status.splitlines() if line.startswith("SigCgt:")), "0:0")
    return bool(int(caught.split(":")[1], 16) >> (number - 1) & 1)


def _cpu_s(pid: int) -> float:
    """Seconds that a process has computed."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
