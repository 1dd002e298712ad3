"""LabelMe's JSON files."""

from __future__ import annotations

import base64
import binascii
import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from anysize.config import DataConfig
from anysize.data.classes import BACKGROUND_NAMES, IGNORE_NAME, NAME_LISTS, Classes, read_names
from anysize.data.files import is_one_of, keys_of, read_json, size_of, some_of
from anysize.data.frames import Reach, frame_of
from anysize.data.pairing import scan_flat
from anysize.data.reading import Encoding, Reading, Sample
from anysize.data.shapes import (
    MAX_SHAPES,
    Bitmap,
    LabelKind,
    LeftOut,
    Outline,
    Shapes,
    as_points,
    check_total,
    class_of,
    is_cut,
    naming,
    shapes_of,
    unknown_labels,
)
from anysize.errors import DataError
from anysize.faults import Fault, FaultError
from anysize.geometry import Size
from anysize.images.headers import DECODER_ERRORS, check_not_a_bomb
from anysize.wording import count_of

_WITHOUT_AREA = {"line", "linestrip", "point", "points"}


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
    pairs.faults[:] = [_with_image(fault) for fault in pairs.faults]
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


def _with_image(fault: Fault) -> Fault:
    """Says of a file without its image that it holds the image itself, where it does."""
    if fault.kind != "unpaired" or fault.path.suffix.lower() != ".json":
        return fault
    try:
        held = isinstance(read_json(fault.path).get("imageData"), str)
    except FaultError:
        held = False
    if not held:
        return fault
    more = f"; the file holds it: LabelMe's labelme_export_json {fault.path} writes it"
    return replace(fault, message=fault.message + more)


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
    listed = ", ".join(f"{n} ({count_of(counts[n], 'shape')})" for n in names if n in counts)
    return DataError(
        f"{root} has no list of classes. Its LabelMe files name {listed}. Write {root}/labels.txt, "
        f"one name per line in the order of the ids:\n" + "\n".join(names)
    )


def labelme_files(folder: Path) -> list[Path]:
    """The JSON files of a folder, if some of them are LabelMe's."""
    files = [p for p in sorted(folder.glob("*.json")) if is_one_of(p, (".json",))]
    if not files and folder.name in {"images", "masks"}:
        files = [p for p in sorted(folder.rglob("*.json")) if is_one_of(p, (".json",))]
    return files if any("shapes" in keys_of(p) for p in some_of(files)) else []


def labelme_shapes(sample: Sample, classes: Classes) -> Shapes:
    """The objects of a LabelMe file, in its order.

    Raises:
        FaultError: The file is invalid, is of another image, names a label that is no class, or
            none of its objects can be drawn.
    """
    (path,) = sample.masks
    table = read_json(path)
    unknown: dict[str, int] = {}
    found: list[tuple[str, Outline | Bitmap]] = []
    left_out: list[LeftOut] = []
    with naming(path):
        for number, entry in enumerate(labelme_entries(table), start=1):
            label = entry.get("label")
            class_id = class_of(label, classes) if isinstance(label, str) else None
            if label != IGNORE_NAME and class_id is None:
                unknown[str(label)] = unknown.get(str(label), 0) + 1
                continue
            which = f"shape {number} ({label!r})"
            form = entry.get("shape_type") or "polygon"
            if form in _WITHOUT_AREA:
                left_out.append(LeftOut(which, f"is a {form}, which has no area", harmless=True))
                continue
            try:
                found.append((which, _labelme_shape(entry, form, class_id)))
            except DECODER_ERRORS as error:
                left_out.append(LeftOut(which, str(error)))
        if unknown:
            raise unknown_labels(path, unknown, classes)
        claimed = size_of(table.get("imageHeight"), table.get("imageWidth"))
        frame = frame_of(sample, claimed, [_reach(shape) for _, shape in found], path)
        drawn: list[Outline | Bitmap] = []
        num_cut = total = 0
        for which, shape in found:
            try:
                if isinstance(shape, Bitmap):
                    kept, cut = _within(shape, frame.stored)
                    total += kept.inside.size
                else:
                    kept, cut = shape, is_cut(shape, frame.stored)
            except ValueError as error:
                left_out.append(LeftOut(which, str(error)))
                continue
            check_total(total, frame.stored)
            drawn.append(kept)
            num_cut += cut
        return shapes_of(drawn, num_cut, left_out, frame)


def labelme_entries(table: dict[str, Any]) -> list[dict[str, Any]]:
    """The list of shapes of a LabelMe file.

    Raises:
        ValueError: There is none, or it is longer than any image needs.
    """
    entries = table.get("shapes")
    if not isinstance(entries, list) or not all(
        isinstance(e, dict) for e in cast("list[object]", entries)
    ):
        raise ValueError("`shapes` is not a list of objects")
    if len(cast("list[object]", entries)) > MAX_SHAPES:
        raise ValueError(f"it has more than {MAX_SHAPES} shapes")
    return cast("list[dict[str, Any]]", entries)


def _labelme_shape(entry: dict[str, Any], form: object, class_id: int | None) -> Outline | Bitmap:
    points = as_points(entry.get("points"))
    if form == "mask":
        return _labelme_bitmap(entry.get("mask"), points, class_id)
    if form in {"polygon", "oriented_rectangle"}:
        if len(points) < 3:
            raise ValueError(f"is a polygon of {len(points)} points, fewer than 3")
        form = "polygon"
    elif form in {"rectangle", "circle"}:
        if len(points) != 2:
            raise ValueError(f"is a {form} of {len(points)} points instead of 2")
    else:
        raise ValueError(f"is a {form!r}, which is not known")
    kind = cast("Literal['polygon', 'rectangle', 'circle']", form)
    return Outline(class_id=class_id, ignored=class_id is None, form=kind, points=points)


def _labelme_bitmap(text: object, points: NDArray[np.float64], class_id: int | None) -> Bitmap:
    if len(points) != 2 or not isinstance(text, str) or np.abs(points).max() > 1 << 20:
        raise ValueError("is a mask without two corners and an image")
    (left, top), (right, bottom) = points.astype(int).tolist()
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"is a mask whose image cannot be read: {error}") from None
    with Image.open(io.BytesIO(data), formats=("PNG",)) as picture:
        if picture.size != (right - left + 1, bottom - top + 1):
            raise ValueError(
                f"is a mask of {picture.height}x{picture.width} between corners for "
                f"{bottom - top + 1}x{right - left + 1}"
            )
        check_not_a_bomb(Size(picture.height, picture.width))
        inside = np.array(picture.convert("L")) > 0
    return Bitmap(class_id=class_id, ignored=class_id is None, top=top, left=left, inside=inside)


def _within(bitmap: Bitmap, size: Size) -> tuple[Bitmap, bool]:
    """The part of a bitmap that lies in the image, and whether there is another.

    Raises:
        ValueError: None of it does, or it covers nothing.
    """
    height, width = bitmap.inside.shape
    rows = slice(max(-bitmap.top, 0), max(min(height, size.height - bitmap.top), 0))
    columns = slice(max(-bitmap.left, 0), max(min(width, size.width - bitmap.left), 0))
    inside = bitmap.inside[rows, columns]
    if not inside.any():
        outside = bitmap.inside.any()
        raise ValueError(f"lies outside the image of {size}" if outside else "covers no pixel")
    top, left = max(bitmap.top, 0), max(bitmap.left, 0)
    cut = inside.shape != bitmap.inside.shape
    return replace(bitmap, top=top, left=left, inside=inside), cut


def _reach(shape: Outline | Bitmap) -> Reach:
    if isinstance(shape, Bitmap):
        height, width = shape.inside.shape
        return Reach(shape.top + height, shape.left + width)
    right, bottom = shape.points.max(0).tolist()
    return Reach(bottom, right)
