"""Ultralytics' layout, and its lists of polygons."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from anysize.config import DataConfig
from anysize.data.classes import (
    BACKGROUND_NAMES,
    Classes,
    named_classes,
    read_classes,
    with_background,
)
from anysize.data.files import (
    MAX_FILE_BYTES,
    by_stem,
    composed,
    files_below,
    is_one_of,
    unpaired_mask,
    whole_number,
)
from anysize.data.frames import frame_of
from anysize.data.reading import Encoding, Pair, Pairs, Reading, Sample
from anysize.data.shapes import (
    MAX_SHAPES,
    LabelKind,
    LeftOut,
    Outline,
    Shapes,
    area,
    as_points,
    class_of,
    is_cut,
    naming,
    shapes_of,
    unknown_labels,
)
from anysize.errors import DataError
from anysize.faults import Fault
from anysize.images.formats import IMAGE_SUFFIXES
from anysize.wording import count_of

MAX_SHARE = 16
"""Of width or height that a corner may be at; a larger one is a number of pixels."""

MAX_YAML_BYTES = 1 << 16
"""Names of a thousand classes take a third of it; PyYAML takes seconds for a megabyte."""


def read_ultralytics(root: Path, data: DataConfig, kind: LabelKind) -> Reading:
    """Reads a folder of Ultralytics.

    Raises:
        DataError: It holds no label, or nothing names the classes.
    """
    pairs = scan_ultralytics(root, data)
    toml = root / "classes.toml"
    listed = ultralytics_names(root)
    if toml.is_file():
        classes, named_by = read_classes(toml), toml.name
    elif listed is not None:
        named_by = listed[1].name
        classes = with_background(listed[0]) if kind == "multiclass" else listed[0]
    else:
        raise DataError(
            f"{root} has no data.yaml, which names the classes. Add it, or write classes.toml."
        )
    # Without a YAML file, a class's number is its place among the classes but the background.
    names = (
        listed[0].names
        if listed
        else [n for n in classes.names if n.lower() not in BACKGROUND_NAMES]
    )
    return Reading(
        images=root,
        labels=root / (data.labels or "labels"),
        pairs=pairs,
        classes=classes,
        named_by=named_by,
        encoding=Encoding(kind="polygons", labels=kind, categories=dict(enumerate(names))),
        because="labels/*.txt",
    )


def scan_ultralytics(root: Path, data: DataConfig) -> Pairs:
    """images/<split>/ and labels/<split>/ with a text file an image; or both without splits.

    An image without a text file has no objects.
    """
    images_folder, labels_folder = (
        root / (data.images or "images"),
        root / (data.labels or "labels"),
    )
    faults: list[Fault] = []
    pairs: list[Pair] = []
    listed: dict[str, list[str]] = {}
    num_without = 0
    splits = [s for s in ("train", "val") if (images_folder / s).is_dir()] or [""]
    for split in splits:
        prefix = f"{split}/" if split else ""
        images = by_stem(
            files_below(images_folder / split, IMAGE_SUFFIXES, deep=False),
            faults,
            stem=lambda p, prefix=prefix: prefix + p.stem,
        )
        folder = labels_folder / split
        texts = {
            composed(prefix + p.stem): p
            for p in sorted(folder.glob("*.txt"))
            if is_one_of(p, (".txt",)) and p.is_file()
        }
        faults += [
            unpaired_mask(text, f"{images_folder / stem}.*")
            for stem, text in texts.items()
            if stem not in images
        ]
        num_without += len(set(images) - set(texts))
        listed[split] = sorted(images)
        pairs += [
            Pair(stem, images[stem], (texts[stem],) if stem in texts else ())
            for stem in listed[split]
        ]
    if num_without == len(pairs):
        raise DataError(
            f"{labels_folder} holds no label of an image of {images_folder}. Labels are text "
            f"files with the stems of the images."
        )
    notes: list[str] = []
    if num_without:
        notes.append(f"All background: {count_of(num_without, 'image')} without a text file.")
    train, val = listed.get("train"), listed.get("val")
    return Pairs(
        pairs=sorted(pairs, key=lambda p: p.stem),
        faults=faults,
        listed=(train, val) if train and val else None,
        notes=notes,
    )


def ultralytics_names(root: Path) -> tuple[Classes, Path] | None:
    """The classes of the YAML file in a folder that has `names`; None where there is no such file.

    Raises:
        DataError: The file cannot be read, or PyYAML is not installed.
    """
    files = sorted([*root.glob("*.yaml"), *root.glob("*.yml")])
    if not files:
        return None
    path = root / "data.yaml" if root / "data.yaml" in files else files[0]
    try:
        import yaml  # pyright: ignore[reportMissingModuleSource, reportMissingImports]
    except ImportError:
        raise DataError(
            f"{path} names the classes in YAML, which needs PyYAML. Install it: "
            f"pip install 'anysize[ultralytics]'; or write classes.toml."
        ) from None
    try:
        if path.stat().st_size > MAX_YAML_BYTES:
            raise ValueError(f"it has more than {MAX_YAML_BYTES} bytes")
        table = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        what = " ".join(str(error).split())
        raise DataError(f"{path} cannot be read as YAML: {what}. Correct it.") from None
    names = cast("dict[str, Any]", table).get("names") if isinstance(table, dict) else None
    if isinstance(names, dict):
        numbered = cast("dict[object, object]", names)
        if set(numbered) != set(range(len(numbered))):
            raise DataError(f"The names in {path} are not numbered 0 to {len(numbered) - 1}.")
        names = [numbered[i] for i in range(len(numbered))]
    if not isinstance(names, list) or not all(
        isinstance(n, str) for n in cast("list[object]", names)
    ):
        raise DataError(f"{path} has no list of `names`. Add it, or write classes.toml.")
    return named_classes(cast("list[str]", names), str(path)), path


def polygon_shapes(sample: Sample, classes: Classes) -> Shapes:
    """The polygons of an Ultralytics file, from large to small.

    A line is a class and the corners, x and y by turns, as shares of the image's width and height.
    An image without a file has no objects.

    Raises:
        FaultError: The file cannot be read, names a class that there is not, or none of its
            polygons can be drawn.
    """
    unknown: dict[str, int] = {}
    found: list[tuple[float, Outline]] = []
    left_out: list[LeftOut] = []
    path = sample.masks[0] if sample.masks else sample.image
    frame = frame_of(sample, None, (), path)
    extent = (frame.stored.width, frame.stored.height)
    num_cut = 0
    with naming(path):
        for number, fields in _lines(path) if sample.masks else ():
            which = f"line {number}"
            class_number = whole_number(fields[0], f"the class in {which}")
            name = sample.encoding.categories.get(-1 if class_number is None else class_number, "")
            class_id = class_of(name, classes)
            if class_id is None:
                name = name or f"class {fields[0]}"
                unknown[name] = unknown.get(name, 0) + 1
                continue
            try:
                points = _corners(fields[1:]) * extent
                outline = Outline(class_id=class_id, ignored=False, form="polygon", points=points)
                num_cut += is_cut(outline, frame.stored)
                found.append((-area(points), outline))
            except ValueError as error:
                left_out.append(LeftOut(which, str(error)))
        if unknown:
            raise unknown_labels(path, unknown, classes)
        found.sort(key=lambda f: f[0])
        return shapes_of([outline for _, outline in found], num_cut, left_out, frame)


def _lines(path: Path) -> list[tuple[int, list[str]]]:
    """The words of each line that has any, with its number.

    Raises:
        ValueError: The file is too large.
    """
    if path.stat().st_size > MAX_FILE_BYTES >> 3:
        raise ValueError("it is too large")
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    if len(lines) > MAX_SHAPES:
        raise ValueError(f"it has more than {MAX_SHAPES} lines")
    return [(i, words) for i, line in enumerate(lines, start=1) if (words := line.split())]


def _corners(words: list[str]) -> NDArray[np.float64]:
    """Corners `[n, 2]` as shares of width and height.

    Raises:
        ValueError: They are none, or those of a box.
    """
    if len(words) == 4:
        raise ValueError("is a box, and not a polygon")
    if len(words) < 6 or len(words) % 2:
        raise ValueError("is not a class and three or more corners")
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        raise ValueError("has corners that are no numbers") from None
    points = as_points(numbers)
    if points.max() > MAX_SHARE:
        raise ValueError("has corners in pixels; they must be shares of width and height, 0 to 1")
    return points
