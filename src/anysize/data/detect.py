"""Tells how labels are stored, where the settings do not: by the files that are there.

Several files are looked at, since one is often an exception: an empty mask, a single class. Where
they can be read in two ways, the settings must say which.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from anysize.config import LabelKind, MaskKind
from anysize.data.classes import Classes
from anysize.data.files import some_of
from anysize.data.masks import colour_codes, colour_table, read_png_header
from anysize.data.reading import in_doubt
from anysize.faults import FaultError
from anysize.images.opening import opened


class Detected(NamedTuple):
    """How labels are stored, and a few words on what that was told by."""

    kind: MaskKind
    because: str


# PNGs


def detect_pngs(
    root: Path, masks: Sequence[Path], classes: Classes, kind: LabelKind, *, in_folders: bool
) -> Detected:
    """Tells what the values of PNGs mean: ids, colours, or 0 and 255.

    Args:
        root: The data folder, for messages.
        masks: All of them.
        classes: Their ids and colours.
        kind: What labels are to become.
        in_folders: Whether the masks lie in a folder a class.

    Raises:
        DataError: They can be read in two ways.
    """
    seen = [look for path in some_of(masks) if (look := _look(path)) is not None]
    plain: MaskKind = "folders" if in_folders else "index"
    because = f"detected from {len(seen)} files"
    if not seen:
        return Detected(plain, "no mask could be read")
    num_colour = sum(look.is_colour for look in seen)
    if num_colour and not in_folders:
        if num_colour < len(seen):
            raise in_doubt(
                root,
                f"has masks of both kinds, {num_colour} of {len(seen)} in RGB",
                ("index", "colours"),
                ("values are ids, and RGB is a mistake", "colours are classes"),
            )
        return Detected("colours", f"RGB, {because}")
    values = {v for look in seen for v in look.values}
    two = kind == "multilabel" or len(classes.names) == 2
    if two and values == {0, 255}:
        if classes.ignore_index != 255:
            return Detected("binary", f"0 and 255, {because}")
        raise in_doubt(
            root,
            f"has masks of 0 and 255 ({because})",
            ("binary", plain),
            ("255 is the class", "255 is ignored"),
        )
    if not in_folders and all(look.palette for look in seen):
        return _palette(root, seen, classes, because)
    return Detected(plain, f"{'palette' if seen[0].palette else 'grey'}, {because}")


def _palette(root: Path, seen: Sequence[_Look], classes: Classes, because: str) -> Detected:
    """Indices that are ids, unless only the palette's colours are those of the classes."""
    table, labels = colour_table(classes)
    allowed = {*range(len(classes.names)), classes.ignore_index}
    are_ids = all(v in allowed for look in seen for v in look.values)
    by_colour: list[tuple[int, int | None]] = []
    for look in seen:
        codes = colour_codes(np.array(look.palette, np.uint8).reshape(-1, 3))
        for value in look.values:
            found = np.flatnonzero(table == codes[value]) if value < len(codes) else []
            by_colour.append((value, int(labels[found[0]]) if len(found) else None))
    are_colours = all(label is not None for _, label in by_colour)
    differ = any(value != label for value, label in by_colour)
    if are_colours and not are_ids:
        return Detected("colours", f"colours of a palette, {because}")
    if are_colours and differ:
        raise in_doubt(
            root,
            f"has palette masks whose indices and colours name different classes ({because})",
            ("index", "colours"),
            ("indices are ids", "colours are classes"),
        )
    return Detected("index", f"palette, {because}")


class _Look(NamedTuple):
    is_colour: bool
    values: tuple[int, ...]
    palette: tuple[int, ...]


def _look(path: Path) -> _Look | None:
    try:
        header = read_png_header(path)
        if header.colour_type in {2, 6}:
            return _Look(is_colour=True, values=(), palette=())
        if not header.is_index:
            return None
        with opened(path, ("PNG",)) as image:
            plane = np.array(image).astype(np.uint8, copy=False)
            palette = tuple(image.getpalette("RGB") or ()) if image.mode == "P" else ()
    except FaultError:
        return None
    if header.is_grey and header.bit_depth in {2, 4}:
        plane = plane // (255 // (2**header.bit_depth - 1))
    values = np.flatnonzero(np.bincount(plane.ravel(), minlength=256))
    return _Look(is_colour=False, values=tuple(values.tolist()), palette=palette)
