"""Reads shapes from text: LabelMe's JSON, COCO's JSON, and Ultralytics' lists of polygons."""

from __future__ import annotations

import base64
import binascii
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from anysize.data.classes import BACKGROUND_NAMES, IGNORE_NAME, Classes, background_id
from anysize.data.shapes import MAX_SHAPES, Bitmap, Outline, area, check_points, check_total
from anysize.errors import DataError
from anysize.faults import FaultError
from anysize.geometry import Size
from anysize.images.decode import size_fault
from anysize.images.headers import DECODER_ERRORS

Shapes = list[Outline | Bitmap]

MAX_FILE_BYTES = 256 << 20
"""Of a LabelMe file, which may hold its image; other files of one image are far smaller."""

MAX_COCO_BYTES = 2 << 30
"""COCO's own training file has 0.45 GB."""


def read_json(path: Path, max_bytes: int = MAX_FILE_BYTES) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        FaultError: It cannot be read, is too large, or is no object.
    """
    try:
        if path.stat().st_size > max_bytes:
            raise ValueError(f"it has more than {max_bytes >> 20} MiB")
        table = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        what = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise FaultError(
            "unreadable", path, f"{path} cannot be read as JSON: {what}. Replace or remove it."
        ) from None
    if not isinstance(table, dict):
        raise FaultError("unreadable", path, f"{path} holds no JSON object. Replace or remove it.")
    return cast("dict[str, Any]", table)


# LabelMe


def labelme_shapes(path: Path, image: Path, size: Size, classes: Classes) -> Shapes:
    """The shapes of a LabelMe file, in its order.

    Raises:
        FaultError: The file does not hold, is of an image of another size, or names a label that
            is no class.
    """
    table = read_json(path)
    _check_labelme_size(table, path, image, size)
    shapes: Shapes = []
    unknown: dict[str, int] = {}
    total = 0
    with _holding(path):
        for entry in labelme_entries(table):
            label = entry.get("label")
            class_id = class_of(label, classes) if isinstance(label, str) else None
            if label != IGNORE_NAME and class_id is None:
                unknown[str(label)] = unknown.get(str(label), 0) + 1
                continue
            shapes.append(_labelme_shape(entry, class_id, size))
            total += shapes[-1].inside.size if isinstance(shapes[-1], Bitmap) else 0
            check_total(total, size)
    if unknown:
        raise _unknown_labels(path, unknown, classes)
    return shapes


def labelme_entries(table: dict[str, Any]) -> list[dict[str, Any]]:
    """The list of shapes of a LabelMe file.

    Raises:
        ValueError: There is none, or it is longer than any image needs.
    """
    entries = table.get("shapes")
    if not isinstance(entries, list) or not all(
        isinstance(e, dict) for e in cast("list[object]", entries)
    ):
        raise ValueError("`shapes` is no list of objects")
    if len(cast("list[object]", entries)) > MAX_SHAPES:
        raise ValueError(f"it has more than {MAX_SHAPES} shapes")
    return cast("list[dict[str, Any]]", entries)


def class_of(label: str, classes: Classes) -> int | None:
    """The class that a label names; any name of the background stands for the class of it."""
    if label in classes.names:
        return classes.names.index(label)
    return background_id(classes) if label.lower() in BACKGROUND_NAMES else None


def _check_labelme_size(table: dict[str, Any], path: Path, image: Path, size: Size) -> None:
    height, width = table.get("imageHeight"), table.get("imageWidth")
    if type(height) is int and type(width) is int and (height, width) != size:
        what = f"the image that {path} was drawn over"
        raise size_fault(what, path, Size(height, width), image, size)


def _labelme_shape(entry: dict[str, Any], class_id: int | None, size: Size) -> Outline | Bitmap:
    ignored = class_id is None
    form = entry.get("shape_type") or "polygon"
    points = _points(entry.get("points"))
    check_points(points, size)
    if form == "mask":
        return _labelme_bitmap(entry.get("mask"), points, class_id, size)
    if form in {"polygon", "oriented_rectangle"}:
        if len(points) < 3:
            raise ValueError(f"a polygon has {len(points)} points")
        form = "polygon"
    elif form in {"rectangle", "circle"}:
        if len(points) != 2:
            raise ValueError(f"a {form} has {len(points)} points instead of 2")
    else:
        raise ValueError(
            f"a shape is a {form!r}, which has no area; draw it as a polygon, or take it out"
        )
    return Outline(class_id=class_id, ignored=ignored, form=form, points=points)


def _labelme_bitmap(
    text: object, points: NDArray[np.float64], class_id: int | None, size: Size
) -> Bitmap:
    if len(points) != 2 or not isinstance(text, str):
        raise ValueError("a mask needs two corners and an image")
    (left, top), (right, bottom) = points.astype(int).tolist()
    extent = Size(bottom - top + 1, right - left + 1)
    if top < 0 or left < 0 or bottom >= size.height or right >= size.width or min(extent) < 1:
        raise ValueError(f"a mask from {points[0]} to {points[1]} lies outside the image")
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"the image of a mask cannot be read: {error}") from None
    with Image.open(io.BytesIO(data), formats=("PNG",)) as picture:
        if picture.size != (extent.width, extent.height):
            raise ValueError(f"a mask is {picture.height}x{picture.width}, its corners {extent}")
        inside = np.array(picture.convert("L")) > 0
    return Bitmap(class_id=class_id, ignored=class_id is None, top=top, left=left, inside=inside)


def _points(value: object) -> NDArray[np.float64]:
    if not isinstance(value, list) or not value:
        raise ValueError("a shape has no points")
    points = np.array(value, np.float64)
    if points.ndim != 2 or points.shape[1] != 2:
        raise ValueError("the points of a shape are no pairs of x and y")
    return points


def _unknown_labels(path: Path, unknown: Mapping[str, int], classes: Classes) -> FaultError:
    listed = ", ".join(f"{name!r} ({count} shapes)" for name, count in list(unknown.items())[:10])
    return FaultError(
        "labels",
        path,
        f"{path} names what is no class: {listed}. Classes are {', '.join(classes.names)}. Correct "
        f"the labels, or add them to the classes.",
        tuple(unknown.items()),
    )


@contextmanager
def _holding(path: Path) -> Iterator[None]:
    """What reading shapes raises inside the block becomes a FaultError that names the file."""
    try:
        yield
    except (*DECODER_ERRORS, OverflowError, RecursionError) as error:
        raise FaultError(
            "shapes", path, f"{path} does not hold: {error}. Correct it, or remove it."
        ) from None


# COCO


def coco_shapes(
    entries: Sequence[Mapping[str, Any]],
    categories: Mapping[int, str],
    path: Path,
    size: Size,
    classes: Classes,
) -> Shapes:
    """The shapes of one image of a COCO file: crowds first, then from large to small.

    So a small object is seen before a large one behind it, and a crowd, whose members nobody told
    apart, is ignored where no object was outlined.

    Raises:
        FaultError: An annotation does not hold, or its category is no class.
        DataError: pycocotools, which draws the polygons, is not installed.
    """
    unknown: dict[str, int] = {}
    found: list[tuple[bool, float, Bitmap]] = []
    total = 0
    with _holding(path):
        if len(entries) > MAX_SHAPES:
            raise ValueError(f"an image has more than {MAX_SHAPES} shapes")
        for entry in entries:
            name = categories.get(cast("int", entry.get("category_id")), "")
            class_id = class_of(name, classes)
            if class_id is None:
                name = name or f"category {entry.get('category_id')!r}"
                unknown[name] = unknown.get(name, 0) + 1
                continue
            try:
                top, left, inside = coco_bitmap(entry.get("segmentation"), size)
            except (ValueError, TypeError) as error:
                raise ValueError(f"annotation {entry.get('id')!r}: {error}") from None
            crowd = bool(entry.get("iscrowd"))
            bitmap = Bitmap(class_id=class_id, ignored=crowd, top=top, left=left, inside=inside)
            found.append((not crowd, -float(np.count_nonzero(inside)), bitmap))
            total += inside.size
            check_total(total, size)
    if unknown:
        raise _unknown_labels(path, unknown, classes)
    return [bitmap for _, _, bitmap in sorted(found, key=lambda f: f[:2])]


def coco_bitmap(segmentation: object, size: Size) -> tuple[int, int, NDArray[np.bool_]]:
    """A segmentation as pixels: top, left, and which of a rectangle are inside.

    Raises:
        ValueError: It does not hold, or not for an image of this size.
        DataError: pycocotools is not installed.
    """
    if isinstance(segmentation, dict):
        code = cast("dict[str, Any]", segmentation)
        if code.get("size") != [size.height, size.width]:
            raise ValueError(f"a run-length code of size {code.get('size')} in an image of {size}")
        counts = code.get("counts")
        numbers = _unpack(counts) if isinstance(counts, str) else _whole(counts)
        if sum(numbers) != size.pixels or min(numbers, default=0) < 0:
            raise ValueError(f"a run-length code of {sum(numbers)} pixels in an image of {size}")
        return _trimmed(_expanded(numbers, size))
    if not isinstance(segmentation, list) or not segmentation:
        raise ValueError("no segmentation")
    rings: list[NDArray[np.float64]] = []
    for ring in cast("list[object]", segmentation):
        flat = np.array(ring, np.float64)
        if flat.ndim != 1 or len(flat) < 6 or len(flat) % 2:
            raise ValueError("a polygon is no list of at least three pairs of x and y")
        rings.append(flat.reshape(-1, 2))
        check_points(rings[-1], size)
    return _coco_polygons(rings, size)


def _trimmed(inside: NDArray[np.bool_]) -> tuple[int, int, NDArray[np.bool_]]:
    """Cut to the rows and columns in which anything is inside, so that many fit into memory."""
    rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
    if not len(rows):
        return 0, 0, inside[:1, :1]
    top, left = int(rows[0]), int(columns[0])
    return top, left, inside[top : rows[-1] + 1, left : columns[-1] + 1].copy()


def _coco_polygons(
    rings: Sequence[NDArray[np.float64]], size: Size
) -> tuple[int, int, NDArray[np.bool_]]:
    """Polygons as pycocotools draws them, in the rectangle around them only."""
    try:
        from pycocotools import mask as coco  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise DataError(
            "COCO polygons are drawn by pycocotools, which is not installed. Install it: "
            "pip install 'anysize[coco]'."
        ) from None
    points = np.concatenate(rings)
    left, top = np.clip(np.floor(points.min(0)) - 1, 0, [size.width - 1, size.height - 1])
    right, bottom = np.clip(np.ceil(points.max(0)) + 2, 1, [size.width, size.height])
    left, top = int(left), int(top)
    height, width = max(int(bottom) - top, 1), max(int(right) - left, 1)
    flat = [(ring - (left, top)).ravel().tolist() for ring in rings]
    codes: Any = coco.frPyObjects(cast("Any", flat), height, width)
    counts: Any = coco.merge(codes)["counts"]
    return top, left, _expanded(_unpack(counts.decode("ascii")), Size(height, width))


def _expanded(counts: list[int], size: Size) -> NDArray[np.bool_]:
    """Runs go down the columns, outside and inside in turn."""
    inside = np.repeat(np.arange(len(counts)) % 2 == 1, counts)
    return inside.reshape(size.width, size.height).T


def _whole(counts: object) -> list[int]:
    if not isinstance(counts, list) or not all(
        type(c) is int for c in cast("list[object]", counts)
    ):
        raise ValueError("the counts of a run-length code are no list of whole numbers")
    return cast("list[int]", counts)


def _unpack(text: str) -> list[int]:
    """Unpacks the text form of a run-length code.

    Five bits a character, lowest first; the sixth says that more follow. From the fourth number on,
    what is stored is the difference from the number two before. Source: COCO's maskApi.c.
    """
    counts: list[int] = []
    value = shift = 0
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64 or shift > 35:
            raise ValueError("a run-length code is damaged")
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            value -= 1 << shift
        counts.append(value + counts[-2] if len(counts) > 2 else value)
        value = shift = 0
    if shift:
        raise ValueError("a run-length code is cut off")
    return counts


# Ultralytics


def polygon_shapes(
    path: Path, categories: Mapping[int, str], size: Size, classes: Classes
) -> Shapes:
    """The polygons of an Ultralytics file, from large to small.

    A line is a class and the corners, x and y by turns, as shares of the image's width and height.

    Raises:
        FaultError: The file does not hold.
    """
    unknown: dict[str, int] = {}
    found: list[tuple[float, Outline]] = []
    with _holding(path):
        if path.stat().st_size > MAX_FILE_BYTES >> 3:
            raise ValueError("it is too large")
        lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
        if len(lines) > MAX_SHAPES:
            raise ValueError(f"it has more than {MAX_SHAPES} lines")
        for number, fields in enumerate(lines, start=1):
            if not fields:
                continue
            if len(fields) == 5:
                raise ValueError(f"line {number} is a box; segmentation needs polygons")
            if len(fields) < 7 or len(fields) % 2 == 0:
                raise ValueError(f"line {number} is no class and three or more corners")
            name = categories.get(int(fields[0]), "")
            class_id = class_of(name, classes)
            if class_id is None:
                name = name or f"class {fields[0]}"
                unknown[name] = unknown.get(name, 0) + 1
                continue
            points = np.array(fields[1:], np.float64).reshape(-1, 2) * (size.width, size.height)
            check_points(points, size)
            outline = Outline(class_id=class_id, ignored=False, form="polygon", points=points)
            found.append((-area(points), outline))
    if unknown:
        raise _unknown_labels(path, unknown, classes)
    return [outline for _, outline in sorted(found, key=lambda f: f[0])]
