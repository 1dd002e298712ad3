"""Lines of the script's author, as against those of libraries, and a thread that watches them."""

from __future__ import annotations

import faulthandler
import functools
import os
import re
import sys
import sysconfig
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "CONSTRUCTORS",
    "Sampler",
    "own_place",
    "own_places",
    "place_in_dump",
    "place_in_stack",
    "sources_with",
]

SAMPLE_S = 0.04
"""How often the script's line is looked at."""

CONSTRUCTORS = "torch's constructors"

MAX_DUMPED = 1 << 20
"""Bytes of stacks after which the file that takes them is emptied."""

SWITCH_S = 0.0005
"""How soon a line of Python makes way for that look; with Python's 5 ms short loops are missed."""


def place_in_dump(dumped: str, thread: int) -> tuple[tuple[str, int] | None, str]:
    """The innermost of the script's own lines in a thread's stack, and the library it is in."""
    of_thread, lines = False, []
    for line in dumped.splitlines():
        if match := _DUMPED_THREAD.match(line):
            of_thread = int(match[1], 16) == thread
        elif of_thread:
            lines.append(line)
    return place_in_stack(lines)


def place_in_stack(lines: Sequence[str]) -> tuple[tuple[str, int] | None, str]:
    """The same of the lines of one stack; `CONSTRUCTORS` where a net or an optimiser is made."""
    via, made = "", False
    for line in lines:
        made = made or bool(_CONSTRUCTOR.search(line))
        if match := _DUMPED_LINE.match(line):
            file = match[1]
            if _is_own(file):
                return (file, int(match[2])), CONSTRUCTORS if made else via
            if not file.startswith(_OURS):
                library = _LIBRARY.search(file)
                via = library[1] if library else Path(file).stem
    return None, via


_OURS = str(Path(__file__).resolve().parent)
_DUMPED_THREAD = re.compile(r"(?:Current t|T)hread 0x([0-9a-f]+)")


_DUMPED_LINE = re.compile(r'  File "(.*)", line (\d+)')


_CONSTRUCTOR = re.compile(r'/torch/(?:nn/modules|optim)/[^"]*", line \d+ in __init__$')


_LIBRARY = re.compile(r"/(?:site|dist)-packages/([^/.]+)")


_LIBRARIES = tuple(
    {
        str(Path(sysconfig.get_path(name)).resolve())
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
    }
    | {str(Path(__file__).resolve().parent)}
)


@functools.lru_cache(maxsize=4096)
def _is_own(file: str) -> bool:
    """Whether a file is of the script's author: of no library, and none of Python's."""
    if file.startswith("<") or "/site-packages/" in file or "/dist-packages/" in file:
        return False
    return not os.path.realpath(file).startswith(_LIBRARIES)


def own_place(frame: Any) -> tuple[str, int] | None:
    """The innermost line of the script that is being executed."""
    return next(iter(own_places(frame)), None)


def own_places(frame: Any) -> list[tuple[str, int]]:
    """Every line of the script that is being executed, innermost first."""
    places = []
    while frame is not None:
        if _is_own(frame.f_code.co_filename):
            places.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return places


def sources_with(*words: str, but: Path) -> dict[str, str]:
    """Texts of the script's own modules, but for the script, that have one of some words."""
    found: dict[str, str] = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py") and _is_own(file):
            path = Path(file)
            if path.is_file() and path.resolve() != but.resolve():
                text = path.read_text(encoding="utf-8", errors="replace")
                if any(word in text for word in words):
                    found[file] = text
    return found


class Sampler:
    """A thread that looks which line of the script runs, and in which stage.

    No frame is ever held here. A frame that outlives its call keeps its locals, and PyTorch has
    locals whose destructors must run in the thread that made them.

    Attributes:
        seconds: By file, line, stage and the library that was called from there.
    """

    def __init__(self, thread: int, stage: Callable[[], str | None]) -> None:
        """Gets the thread to watch, and what tells its stage; None where no look is wanted."""
        self._thread = thread
        self._stage = stage
        self._runs = False
        self._switch_s = 0.0
        self.seconds: dict[tuple[str, int, str, str], float] = defaultdict(float)

    def start(self) -> None:
        """Begins to look."""
        self._runs = True
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        threading.Thread(target=self._watch, name="anysize-why", daemon=True).start()

    def stop(self) -> None:
        """Ends it."""
        if self._runs:
            sys.setswitchinterval(self._switch_s)
        self._runs = False

    def _watch(self) -> None:
        with tempfile.TemporaryFile() as file:
            then, end = time.perf_counter(), 0
            while self._runs:
                time.sleep(SAMPLE_S)
                stage = self._stage()
                if stage is None:  # A look would hold up the reads that are timed.
                    then = time.perf_counter()
                    continue
                if end > MAX_DUMPED:  # Seldom: each call of the system may take the script's turn.
                    os.ftruncate(file.fileno(), 0)
                    end = os.lseek(file.fileno(), 0, os.SEEK_SET)
                faulthandler.dump_traceback(file.fileno(), all_threads=True)
                now = time.perf_counter()
                dumped = os.pread(file.fileno(), MAX_DUMPED, end)
                end += len(dumped)
                place, via = place_in_dump(dumped.decode(errors="replace"), self._thread)
                if place and self._runs and self._stage() is not None:
                    self.seconds[(*place, stage, via)] += now - then
                then = now
