"""What can be wrong with a file of a data folder, as a record and as an error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from anysize.errors import DataError
from anysize.wording import count_of

FaultKind = Literal[
    "unreadable",
    "unpaired",
    "same_stem",
    "stray",
    "size",
    "rotated",
    "encoding",
    "values",
    "binary",
    "colours",
    "shapes",
    "labels",
    "joints",
]
"""unreadable: missing, damaged, truncated, too large, or of a format that is not read.
unpaired: an image without its mask, or the reverse. same_stem: two files with one stem.
stray: a folder that is no class. size: a mask of another size than its image.
rotated: a mask that was made of the image as it is stored, before its EXIF orientation is applied.
encoding: readable, but not stored as asked for. values: ids that are no classes.
binary: 0 and 255 where 0 and 1 are meant. colours: colours that are no class's.
shapes: a polygon or run-length code that is invalid. labels: a name that is not a class.
joints: a line of joints that is no joint, or gives one twice."""

MOST_LISTED = 10
"""Faults that a message lists; it counts the others."""


def listing(what: str, faults: Sequence[str]) -> str:
    """A message of many faults: `what`, their number, and the first of them."""
    lines = [f"{what}; {count_of(len(faults), 'fault')}:"]
    lines += faults[:MOST_LISTED]
    if len(faults) > MOST_LISTED:
        lines.append(f"and {len(faults) - MOST_LISTED} more")
    return "\n  ".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of one file.

    Attributes:
        kind: See `FaultKind`.
        path: The file.
        message: What is wrong, in which file, and what to do.
        found: What was found and in how many pixels: ids, colours or names.
    """

    kind: FaultKind
    path: Path
    message: str
    found: tuple[tuple[str, int], ...] = ()


class FaultError(DataError):
    """A file cannot be used; `fault` says which, and why."""

    def __init__(
        self,
        kind: FaultKind,
        path: Path,
        message: str,
        found: tuple[tuple[str, int], ...] = (),
    ) -> None:
        super().__init__(message)
        self.fault = Fault(kind=kind, path=path, message=message, found=found)


class DoubtError(DataError):
    """Labels can be read in two ways, of which the settings must name one; `kinds` are the two."""

    def __init__(self, message: str, kinds: tuple[str, str]) -> None:
        super().__init__(message)
        self.kinds = kinds
