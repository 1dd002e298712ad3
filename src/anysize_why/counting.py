"""Counts what a step does beside computing: copies, conversions, primitives that oneDNN makes.

Runs in the script's process when its steps are over, on a step that is taken again: counting slows
a step far too much for one of the script's own.
"""

from __future__ import annotations

import ctypes
import os
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["count_copies", "count_primitives", "parse_log", "time_operators"]

STDOUT = 1
"""Descriptor to which oneDNN prints, whatever Python's `sys.stdout` is."""

_LINE = re.compile(rb"onednn_verbose,[^\n]*\n")
_WITH_CREATION = torch.backends.mkldnn.VERBOSE_ON_CREATION
_COPIES = ("aten::_to_copy", "aten::copy_", "aten::clone")


def count_copies(run: Callable[[], object]) -> dict[str, dict[str, int]]:
    """Copies of one step by what they change, with their calls and the bytes that are written.

    What a kernel copies within itself is not seen.

    Args:
        run: Takes the step.
    """
    with _Copies() as seen:
        run()
    return {kind: {"calls": calls, "bytes": written} for kind, (calls, written) in seen.of.items()}


def time_operators(run: Callable[[], tuple[float, int]]) -> dict[str, Any]:
    """Seconds of one step within each kind of operator, forward and backward.

    Args:
        run: Takes the step, and gives its seconds.
    """
    seconds, _ = run()
    with _Timed() as seen:
        run()
    longest = sorted(seen.of.items(), key=lambda item: -item[1][1])
    return {
        "step_s": seconds,
        "within_s": sum(spent for _, spent in seen.of.values()),
        "longest": [
            {"name": name, "calls": calls, "seconds": spent} for name, (calls, spent) in longest[:5]
        ],
    }


class _Timed(TorchDispatchMode):
    """Times every operator, those of the backward pass as well."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[str, list[Any]] = defaultdict(lambda: [0, 0.0])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        began = time.perf_counter()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            spent = self.of[func.name().partition(".")[0]]
            spent[0] += 1
            spent[1] += time.perf_counter() - began


class _Copies(TorchDispatchMode):
    """Sees every operation, those of the backward pass as well."""

    def __init__(self) -> None:
        super().__init__()
        self.of: dict[str, list[int]] = {
            kind: [0, 0]
            for kind in ("dtype", "memory format", "between devices", "copies", "reads")
        }

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]
        if name == "aten::_local_scalar_dense":
            self._note("reads", 0)
        elif name in _COPIES and isinstance(result, Tensor):
            source = args[1] if name == "aten::copy_" else args[0]
            self._note(_kind(source, result), result.numel() * result.element_size())
        return result

    def _note(self, kind: str, num_bytes: int) -> None:
        self.of[kind][0] += 1
        self.of[kind][1] += num_bytes


def _kind(source: Tensor, result: Tensor) -> str:
    """What a copy changes; of two things the first named."""
    if source.device != result.device:
        return "between devices"
    if source.dtype != result.dtype:
        return "dtype"
    if source.shape != result.shape:
        return "copies"  # Broadcast into a larger one.
    strides = [
        (old, new)
        for old, new, length in zip(source.stride(), result.stride(), result.shape, strict=True)
        if length > 1
    ]
    if any(old == 0 for old, _ in strides):
        return "copies"  # An expanded tensor has no layout.
    return "memory format" if any(old != new for old, new in strides) else "copies"


def count_primitives(run: Callable[[], object]) -> dict[str, float] | None:
    """Of one step, by oneDNN's own log: primitives made, taken from its cache, and reorders.

    The log goes to the descriptor of the script's own output. For the length of the step that is a
    file without a name; what is no line of the log is passed on behind it.

    Args:
        run: Takes the step.

    Returns:
        Counts and milliseconds; None where there is no oneDNN.
    """
    if not torch.backends.mkldnn.is_available():
        return None
    with tempfile.TemporaryFile() as file:
        log = _Log(file.fileno())
        with _output_into(log), torch.backends.mkldnn.verbose(_WITH_CREATION):
            run()
    return parse_log(b"".join(log.lines).decode(errors="replace"))


class _Log:
    """A file that takes a log, and with it whatever else is written meanwhile."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.lines: list[bytes] = []
        self._offset = 0

    def pass_on(self, output: int) -> None:
        """Keeps the lines that are new, and writes all that is none of them to where it belongs."""
        text = b""
        while data := os.pread(self.handle, 1 << 20, self._offset):
            self._offset += len(data)
            text += data
        self.lines += _LINE.findall(text)
        rest = _LINE.sub(b"", text)
        while rest:
            rest = rest[os.write(output, rest) :]


@contextmanager
def _output_into(log: _Log) -> Iterator[None]:
    """What is written to the descriptor of the output goes into a file."""
    library = ctypes.CDLL(None)
    library.fflush(None)  # What the script's libraries have printed before is no part of it.
    kept = os.dup(STDOUT)
    try:
        os.dup2(log.handle, STDOUT)
        try:
            yield
        finally:
            library.fflush(None)
            log.pass_on(kept)  # First, so that a thread of the script finds its lines in order.
            os.dup2(kept, STDOUT)
            log.pass_on(STDOUT)
    finally:
        os.close(kept)


def parse_log(text: str) -> dict[str, float]:
    """Sums up a log of oneDNN's verbose mode with creation."""
    sums: defaultdict[str, float] = defaultdict(float)
    for line in text.splitlines():
        fields = line.partition("onednn_verbose,")[2].split(",")
        if "primitive" not in fields[:3]:
            continue
        event, milliseconds = fields[fields.index("primitive") + 1], _number(fields[-1])
        if event == "create:cache_miss":
            sums["made"] += 1
            sums["made_ms"] += milliseconds
        elif event == "create:cache_hit":
            sums["from_cache"] += 1
        elif event == "exec" and "reorder" in fields:
            sums["reorders"] += 1
            sums["reorders_ms"] += milliseconds
    names = ("made", "made_ms", "from_cache", "reorders", "reorders_ms")
    return {name: sums[name] for name in names}


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
