"""`events.jsonl`: what happened in a run, one JSON object a line.

Events of training: "train" (a line of the console), "canvas" (a canvas was seen for the first
time), "skip" (a step whose loss or gradient was not finite), "broken" (an image was left out),
"memory" (memory ran out, and passes became smaller), "evaluate", "early_stop" (no better score for
`train.patience` epochs), and "resume". docs/reference.md lists the fields.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from anysize.atomic_files import append, write_atomic
from anysize.errors import DataError
from anysize.predict.metrics import SCORES

_NUMBERS = {
    "train": ("loss", "elapsed_s", "valid_megapixels_per_s", "wait_s"),
    "canvas": ("first_visit_s",),
}


class EventLog:
    """Appends events to a file; each is out of the process's hands when `write` returns.

    Without a path, as on ranks that do not write, events go nowhere.

    Attributes:
        listeners: Told each event once it is written.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path or Path(os.devnull)
        self.listeners: list[Callable[[Mapping[str, Any]], object]] = []
        self._handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, event: Mapping[str, Any]) -> None:
        """Appends one event, whole or not at all.

        Evaluations decide which weights are the best, so they outlive a power cut as well.

        Raises:
            OSError: The disk is full.
        """
        append(self._handle, self._path, (json.dumps(event) + "\n").encode())
        if event["event"] == "evaluate":
            os.fsync(self._handle)
        for tell in self.listeners:
            tell(event)

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._handle)


def read_events(path: Path) -> list[dict[str, Any]]:
    """Reads the events of a run; a last line that a killed process left unfinished is passed over.

    Raises:
        DataError: No such file, or a line before the last is not an event.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}. Is {path.parent} the folder of a run?"
        ) from None
    events: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        event = _event(line)
        if event is not None:
            events.append(event)
        elif number < len(lines):
            raise DataError(f"Line {number} of {path} is not a whole event of a run. Remove it.")
    return events


def read_metrics(run: Path) -> dict[str, Any] | None:
    """The evaluation of the best weights; None where a run has none yet, or its file is damaged."""
    try:
        table: object = json.loads((run / "metrics.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return _checked({**table, "event": "evaluate"}) if isinstance(table, dict) else None


def forget_events_after(path: Path, step: int) -> None:
    """Drops what a killed run logged after its last checkpoint; the resumed run logs it again."""
    kept = [e for e in read_events(path) if e["step"] <= step]
    write_atomic(path, "".join(json.dumps(e) + "\n" for e in kept).encode())


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        value: object = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    return _checked(cast("dict[str, Any]", value))


def _checked(event: dict[str, Any]) -> dict[str, Any] | None:
    """An event that has what readers of its kind go by, or None."""
    if not isinstance(event.get("event"), str) or type(event.get("step")) is not int:
        return None
    return event if _is_whole(event) else None


def _is_whole(event: dict[str, Any]) -> bool:
    if not all(_is_number(event.get(key)) for key in _NUMBERS.get(event["event"], ())):
        return False
    if event["event"] != "evaluate":
        return event.get("elapsed_s", 1) > 0
    if event.get("kind") not in SCORES:
        return False
    by_class, mean = SCORES[event["kind"]]
    scores = event.get(by_class)
    return isinstance(scores, dict) and all(
        score is None or _is_number(score)
        for score in (event.get(mean, ""), *cast("dict[str, Any]", scores).values())
    )


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(cast("float", value))
