"""`events.jsonl`: what happened in a run, one JSON object a line.

Events of training: "train" (a line of the console), "canvas" (a canvas was seen for the first
time), "evaluate", and "resume". docs/reference.md lists the fields.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from anysize.errors import DataError
from anysize.files import write_atomic


class EventLog:
    """Appends events to a file; each is on disk when `write` returns."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, event: Mapping[str, Any]) -> None:
        """Appends one event."""
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


def read_events(path: Path) -> list[dict[str, Any]]:
    """Reads the events of a run; a last line that a killed process left unfinished is passed over.

    Raises:
        DataError: No such file, or a line before the last is not JSON.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}. Is {path.parent} the folder of a run?"
        ) from None
    events: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines):
                raise DataError(f"Line {number} of {path} is not JSON. Remove it.") from None
    return events


def forget_events_after(path: Path, step: int) -> None:
    """Drops what a killed run logged after its last checkpoint; the resumed run logs it again."""
    kept = [e for e in read_events(path) if e["step"] <= step]
    write_atomic(path, "".join(json.dumps(e) + "\n" for e in kept).encode())
