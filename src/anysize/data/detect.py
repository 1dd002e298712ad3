"""Tells how labels are stored, where the settings do not: by the files that are there.

Several files are looked at, since one is often an exception: an empty mask, a single class. Where
they can be read in two ways, the settings must say which.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from anysize.config import DataConfig, MaskKind
from anysize.data.annotations import read_json
from anysize.data.classes import Classes
from anysize.data.layouts import is_one_of
from anysize.data.masks import STACK_SUFFIXES, colour_codes, colour_table, read_png_header
from anysize.data.shapes import LabelKind
from anysize.faults import DoubtError, FaultError
from anysize.images.decode import opened

NUM_FILES = 8
"""Masks that are looked at, spread over all."""

Container = Literal["png", "folders", "stack", "labelme", "coco"]

_NAMES: dict[Container, str] = {
    "png": "PNGs",
    "folders": "a folder a class",
    "stack": "stacks of planes",
    "labelme": "LabelMe files",
    "coco": "a COCO file",
}
_KINDS: dict[Container, MaskKind] = {
    "png": "index",
    "folders": "folders",
    "stack": "stack",
    "labelme": "labelme",
    "coco": "coco",
}


class Detected(NamedTuple):
    """How labels are stored, and a few words on what that was told by."""

    kind: MaskKind
    because: str


def some_of(paths: Sequence[Path]) -> list[Path]:
    """Up to `NUM_FILES` of the files, spread evenly."""
    num = min(NUM_FILES, len(paths))
    return [paths[i * len(paths) // num] for i in range(num)]


def find_container(
    root: Path,
    images: Path,
    labels: Path,
    data: DataConfig,
    classes: Classes | None,
    kind: LabelKind,
) -> Container | None:
    """What files hold the labels of a folder of our own layout; None where there are none.

    Raises:
        DataError: There are labels of several kinds.
    """
    if data.train.endswith(".json") or labels.is_file():
        return "coco"
    found: list[Container] = []
    if labels.is_dir():
        files = [p for p in labels.iterdir() if not p.name.startswith(".")]
        names = classes.names if classes else ()
        has_folders = any(p.is_dir() and (p.name in names or not names) for p in files)
        if has_folders and (kind == "sigmoid" or not any(is_one_of(p, (".png",)) for p in files)):
            found.append("folders")
        elif any(is_one_of(p, (".png",)) for p in files):
            found.append("png")
        if any(is_one_of(p, STACK_SUFFIXES) for p in files):
            found.append("stack")
        if labelme_files(labels):
            found.append("labelme")
    if images != labels and not data.labels and labelme_files(images):
        found.append("labelme")
    if not data.labels and coco_files(root):
        found.append("coco")
    if len(found) > 1:
        raise in_doubt(
            root,
            "holds labels of several kinds",
            (_KINDS[found[0]], _KINDS[found[1]]),
            (_NAMES[found[0]], _NAMES[found[1]]),
        )
    return found[0] if found else None


def labelme_files(folder: Path) -> list[Path]:
    """The JSON files of a folder, if some of them are LabelMe's."""
    files = [p for p in sorted(folder.glob("*.json")) if is_one_of(p, (".json",))]
    return files if any("shapes" in _keys(p) for p in some_of(files)) else []


def coco_files(root: Path) -> list[Path]:
    """The COCO files of a data folder: those of instances, where other kinds lie beside them."""
    files = sorted([*root.glob("*.json"), *root.glob("annotations/*.json")])
    files = [p for p in files if is_one_of(p, (".json",))][:100]
    named = [p for p in files if p.name.startswith("instances_")]
    return [p for p in named or files if {"images", "annotations", "categories"} <= _keys(p)]


def _keys(path: Path) -> set[str]:
    try:
        return set(read_json(path))
    except FaultError:
        return set()


def in_doubt(
    root: Path, what: str, kinds: tuple[str, str], meanings: tuple[str, str]
) -> DoubtError:
    """The question that a person must answer."""
    return DoubtError(
        f"{root} {what}: {meanings[0]}, or {meanings[1]}. Say which: set data.masks to "
        f'"{kinds[0]}" or to "{kinds[1]}".',
        kinds,
    )


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
    two = kind == "sigmoid" or len(classes.names) == 2
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
