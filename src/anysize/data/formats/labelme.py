"""LabelMe's JSON files."""

from __future__ import annotations

import base64
import binascii
import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from anysize.config import DataConfig
from anysize.data.classes import BACKGROUND_NAMES, IGNORE_NAME, NAME_LISTS, Classes, read_names
from anysize.data.files import is_one_of, keys_of, read_json, some_of
from anysize.data.pairing import scan_flat
from anysize.data.reading import Encoding, Reading
from anysize.data.shapes import (
    MAX_SHAPES,
    Bitmap,
    LabelKind,
    Outline,
    Shapes,
    check_points,
    check_total,
    class_of,
    naming,
    unknown_labels,
)
from anysize.errors import DataError
from anysize.faults import FaultError
from anysize.geometry import Size
from anysize.images.decode import size_fault


def read_labelme(
    root: Path,
    images: Path,
    labels: Path,
    data: DataConfig,
    kind: LabelKind,
    classes: Classes | None,
) -> Reading:
    """LabelMe files in a folder of their own, or beside the images as LabelMe writes them."""
    if not data.labels and not labelme_files(labels):
        labels = images
    pairs = scan_flat(images, [labels], (".json",), pattern=data.mask_pattern, deep=images != root)
    named_by = "classes.toml"
    if classes is None:
        names = next(
            (f / n for f in (root, root.parent) for n in NAME_LISTS if (f / n).is_file()), None
        )
        if names is None:
            raise _unnamed(root, [pair.masks[0] for pair in pairs.pairs], kind)
        classes, named_by = read_names(names), names.name
    return Reading(
        images=images,
        labels=labels,
        pairs=pairs,
        classes=classes,
        named_by=named_by,
        encoding=Encoding(kind="labelme", labels=kind),
        because="detected by their content" if data.masks == "auto" else "",
    )


def _unnamed(root: Path, files: Sequence[Path], kind: LabelKind) -> DataError:
    """The error of labels without a list of classes, with one that can be copied."""
    counts: Counter[str] = Counter()
    for path in files:
        try:
            counts.update(str(e.get("label")) for e in labelme_entries(read_json(path)))
        except (FaultError, ValueError):
            continue
    names = sorted(n for n in counts if n.lower() not in BACKGROUND_NAMES and n != IGNORE_NAME)
    if not names:
        return DataError(f"No LabelMe file in {root} has a shape. Outline objects first.")
    if kind == "multiclass":
        names.insert(0, "_background_")
    listed = ", ".join(f"{n} ({counts[n]} shapes)" for n in names if n in counts)
    return DataError(
        f"{root} has no list of classes. Its LabelMe files name {listed}. Write {root}/labels.txt, "
        f"a name a line in the order of the ids:\n" + "\n".join(names)
    )


def labelme_files(folder: Path) -> list[Path]:
    """The JSON files of a folder, if some of them are LabelMe's."""
    files = [p for p in sorted(folder.glob("*.json")) if is_one_of(p, (".json",))]
    if not files and folder.name in {"images", "masks"}:
        files = [p for p in sorted(folder.rglob("*.json")) if is_one_of(p, (".json",))]
    return files if any("shapes" in keys_of(p) for p in some_of(files)) else []


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
    with naming(path):
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
        raise unknown_labels(path, unknown, classes)
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
