"""`samples.json`: which images a run trains and evaluates on, as they were when it began.

A data folder changes while runs go on. The record lets a run go on with the images that it began
with, and tells which have come, gone or changed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from anysize.atomic_files import write_atomic
from anysize.data.samples import Sample
from anysize.errors import DataError, first_names
from anysize.geometry import Size
from anysize.wording import count_of

RECORD_FILE = "samples.json"


def write_record(path: Path, train: Sequence[Sample], val: Sequence[Sample]) -> None:
    """Writes stems, sizes and bytes of the samples, in their order; a line each.

    Raises:
        OSError: The disk is full or the folder cannot be written.
    """
    lists = ",\n".join(
        f'"{name}": [\n' + ",\n".join(json.dumps(_entry(s)) for s in samples) + "\n]"
        for name, samples in (("train", train), ("val", val))
    )
    write_atomic(path, f"{{\n{lists}\n}}\n".encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The samples of a record as they are found now.

    Attributes:
        train, val: The samples of the record, in its order.
        added: Stems that a new run would take and the record does not have.
        same_lists: Whether a new run would take these samples in this order.
        changed: Stems whose files have another length now, but images of the same size.
    """

    train: list[Sample]
    val: list[Sample]
    added: tuple[str, ...]
    same_lists: bool
    changed: tuple[str, ...]


def compare_with_record(
    path: Path, samples: Sequence[Sample], train: Sequence[Sample], val: Sequence[Sample]
) -> Comparison:
    """Finds the samples of a record again.

    Args:
        path: Of the record.
        samples: All of the data folder as it is now.
        train: Those of them that a new run would train on.
        val: Those of them that a new run would evaluate on.

    Raises:
        DataError: The record cannot be read; samples of it are missing, or their images have
            another size.
    """
    by_stem = {sample.stem: sample for sample in samples}
    recorded = [_read_list(path, name) for name in ("train", "val")]
    entries = {stem: (size, lengths) for part in recorded for stem, size, lengths in part}
    missing = [stem for stem in entries if stem not in by_stem]
    if missing:
        raise DataError(
            f"The run was started with images that are no longer there: {first_names(missing)} "
            f"({path}). Put them back, or start a new run; train.weights can start it from this "
            "run's weights.safetensors."
        )
    resized = [
        f"{stem} ({by_stem[stem].size}, was {size})"
        for stem, (size, _) in entries.items()
        if by_stem[stem].size != size
    ]
    if resized:
        raise DataError(
            f"Images have another size than when the run was started: {first_names(resized)} "
            f"({path}). Put the old ones back, or start a new run; train.weights can start it from "
            "this run's weights.safetensors."
        )
    of_run = [[by_stem[stem] for stem, _, _ in part] for part in recorded]
    return Comparison(
        train=of_run[0],
        val=of_run[1],
        added=tuple(s.stem for s in (*train, *val) if s.stem not in entries),
        same_lists=of_run == [list(train), list(val)],
        changed=tuple(
            stem for stem, (_, lengths) in entries.items() if _lengths(by_stem[stem]) != lengths
        ),
    )


def describe_changes(found: Comparison) -> str:
    """Which images have come since the run began, in a sentence; empty where none did."""
    if found.same_lists:
        return ""
    if found.added:
        count = count_of(len(found.added), "image")
        names = first_names(found.added)
        return f"The data folder has {count} that the run did not begin with: {names}."
    return "The lists of images differ from those that the run began with."


def _entry(sample: Sample) -> list[object]:
    return [sample.stem, list(sample.size), _lengths(sample)]


def _lengths(sample: Sample) -> list[int]:
    return [path.stat().st_size for path in (sample.image, *sample.masks)]


def _read_list(path: Path, name: str) -> list[tuple[str, Size, list[int]]]:
    try:
        table = json.loads(path.read_bytes())
        entries = [(stem, Size(*size), lengths) for stem, size, lengths in table[name]]
        if not all(isinstance(stem, str) for stem, _, _ in entries):
            raise ValueError("a stem is not a string")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"{path}, the run's list of images, cannot be read: {error}. Put it back, or start a "
            "new run."
        ) from None
    return entries
