"""Labels of an image, from masks or shapes of any kind, as arrays of class ids or of 0 and 1."""

from __future__ import annotations

import tokenize
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from anysize.config import LabelKind, MaskKind
from anysize.data.classes import Classes
from anysize.data.formats.coco import coco_shapes
from anysize.data.formats.labelme import labelme_shapes
from anysize.data.formats.ultralytics import polygon_shapes
from anysize.data.mask_files import (
    MaskHeader,
    MaskPixels,
    Values,
    colour_codes,
    read_mask_header,
    read_mask_pixels,
)
from anysize.data.reading import STACK_SUFFIXES, Sample
from anysize.data.shapes import Objects, Shapes, paint
from anysize.errors import first_names
from anysize.faults import MOST_LISTED, FaultError
from anysize.geometry import Size
from anysize.images.decode import size_fault
from anysize.images.headers import ORIENTATION
from anysize.images.opening import opened, readable, stand_upright
from anysize.wording import count_of


def label_kind(sample: Sample, classes: Classes) -> LabelKind:
    """Whether a sample has one class per pixel or any number of them.

    Where its encoding does not say, one mask per class is "multilabel"; so is a single class
    always, since `find_samples` refuses softmax over one.
    """
    if sample.encoding.labels is not None:
        return sample.encoding.labels
    return "multilabel" if len(sample.masks) == len(classes.names) else "multiclass"


def decode_mask(sample: Sample, classes: Classes) -> NDArray[np.uint8]:
    """Decodes a sample's labels; see `decode_labels`.

    Returns:
        multiclass: `[h, w]`, class ids and `ignore_index`.
        multilabel: `[k, h, w]`, 0, 1 and `ignore_index`, in the order of the classes.

    Raises:
        FaultError: Not readable as the sample's encoding says, of another size than the image, or
            with values, colours or names that are no classes'; these are listed with their counts.
        DataError: A library that the encoding needs is not installed.
    """
    return decode_labels(sample, classes).values


def decode_labels(sample: Sample, classes: Classes) -> Labels:
    """Decodes a sample's labels, and counts its objects.

    Raises:
        FaultError, DataError: As `decode_mask`.
    """
    kind = label_kind(sample, classes)
    assert sample.encoding.kind != "joints", "joints have no pixels"
    planes: Sequence[NDArray[np.uint8]]
    match sample.encoding.kind:
        case "labelme" | "coco" | "polygons":
            return _decode_shapes(sample, classes, kind)
        case "colours":
            return Labels(_decode_colours(sample, classes), None)
        case "stack":
            stack = _decode_stack(sample, classes, len(classes.names), binary=False)
            return Labels(stack, None)
        case "binary" if is_stack(sample.masks[0]) and _has_pages(sample.masks[0]):
            stack = _decode_stack(sample, classes, len(classes.names), binary=True)
            return Labels(stack, None)
        case "binary":
            planes = [_binary(_whole_numbers(p, sample), p) for p in sample.masks]
        case "index" | "folders":
            table = value_table(classes, kind, sample.encoding.lookup)
            planes = [_to_labels(_whole_numbers(p, sample), table, p) for p in sample.masks]
    return Labels(np.stack(planes) if kind == "multilabel" else planes[0], None)


def _decode_shapes(sample: Sample, classes: Classes, kind: LabelKind) -> Labels:
    read = _SHAPES[sample.encoding.kind]
    shapes = read(sample, classes)
    labels = paint(shapes.drawn, shapes.frame.stored, classes, kind)
    return Labels(stand_upright(labels, shapes.frame.orientation), shapes.objects)


_SHAPES: dict[MaskKind, Callable[[Sample, Classes], Shapes]] = {
    "coco": coco_shapes,
    "labelme": labelme_shapes,
    "polygons": polygon_shapes,
}


class Labels(NamedTuple):
    """What `decode_labels` gives.

    Attributes:
        values: As of `decode_mask`.
        objects: How they were taken, where labels are drawn from shapes.
    """

    values: NDArray[np.uint8]
    objects: Objects | None


# One mask


def is_turned(path: Path, header: MaskHeader, sample: Sample) -> bool:
    """Whether a mask's own EXIF orientation is applied: as the settings say, or as its size shows.

    Raises:
        FaultError: It has the image's size as it is stored, so that the orientation may have been
            left behind, or the mask transposed; and the settings do not say which is meant.
    """
    frame = header.frame
    if frame.orientation == 1 or sample.encoding.orientation == "ignore":
        return False
    if sample.encoding.orientation == "apply" or frame.stored != sample.size:
        return True
    raise FaultError(
        "rotated",
        path,
        f"mask {path} has an EXIF orientation of its own, {frame.orientation}, and its size does "
        f'not show whether its labels are turned by it. Set data.mask_orientation to "apply" if '
        f'viewers show it as it lies over image {sample.image}, or to "ignore" if its labels fit '
        f"as they are stored.",
    )


def check_header(path: Path, header: MaskHeader, sample: Sample) -> None:
    """Holds what a mask's header says against its image and against how labels are stored.

    Raises:
        FaultError: It has another size, or several pages.
    """
    turned = is_turned(path, header, sample)
    check_size(path, header.frame.seen if turned else header.frame.stored, sample)
    stacked = sample.encoding.kind == "stack" or (
        sample.encoding.kind == "binary" and header.num_pages > 1
    )
    if header.num_pages > 1 and not stacked:
        raise FaultError(
            "encoding",
            path,
            f"{path} has {header.num_pages} pages, but a mask of one class per pixel has one. Save "
            f"the page that is meant, or set loss.kind to sigmoid if each page is a class.",
        )


def check_size(path: Path, size: Size, sample: Sample) -> None:
    """Holds a mask's size against its image's.

    Raises:
        FaultError: They differ.
    """
    if size != sample.size:
        raise size_fault(f"mask {path}", path, size, sample.image, sample.size)


def _read(path: Path, sample: Sample) -> tuple[MaskHeader, MaskPixels]:
    header = read_mask_header(path)
    check_header(path, header, sample)
    pixels = read_mask_pixels(path, header, turned=is_turned(path, header, sample))
    return header, pixels


def _whole_numbers(path: Path, sample: Sample) -> Values:
    _, pixels = _read(path, sample)
    if pixels.values is None:
        raise not_ids(path)
    return pixels.values


def not_ids(path: Path) -> FaultError:
    """The fault of a mask of colours among ids."""
    return FaultError(
        "encoding",
        path,
        f"{path} is stored as RGB, and its three channels differ, so it holds colours and not ids. "
        f'Save the ids, or set data.masks to "colours" if all masks are so.',
    )


def value_table(
    classes: Classes, kind: LabelKind, lookup: tuple[int, ...] = ()
) -> NDArray[np.int16]:
    """The label of each value of a mask of ids, at least 256 long; -1 for values that are none.

    Args:
        classes: Their `ids`, where they have some, say what values mean.
        kind: What labels become; 0 and 1 are the values of "multilabel".
        lookup: As in `Encoding`, over all others.
    """
    if lookup:
        return np.array(lookup, np.int16)
    ids = classes.ids
    if kind == "multilabel" or not ids:
        num_values = 2 if kind == "multilabel" else len(classes.names)
        own = (classes.ignore_index, classes.ignore_index)
        ids = (own, *((value, value) for value in range(num_values)))
    table = np.full(max(256, 1 + max(value for value, _ in ids)), -1, np.int16)
    for value, label in ids:
        table[value] = label
    return table


def _to_labels(values: Values, table: NDArray[np.int16], path: Path) -> NDArray[np.uint8]:
    if values.dtype == np.uint8 and values.ndim == 2:
        # Pillow's histogram takes a fraction of what looking each pixel up takes.
        found = np.flatnonzero(Image.fromarray(values).histogram())
        if (table[found] == found).all():
            return values.astype(np.uint8, copy=False)
    inside = values.clip(0, len(table) - 1)
    labels = table[inside]
    wrong = (labels < 0) | (inside != values)
    if wrong.any():
        raise _wrong_values(path, values, wrong, table)
    return labels.astype(np.uint8)


def _wrong_values(
    path: Path, values: Values, wrong: NDArray[np.bool_], table: NDArray[np.int16]
) -> FaultError:
    found, counts = (a.tolist() for a in np.unique(values[wrong], return_counts=True))
    known = np.flatnonzero(table >= 0).tolist()
    if found == [255] and set(np.unique(values[~wrong]).tolist()) <= {0} and 0 in known:
        return FaultError(
            "binary",
            path,
            f"{path} holds 0 ({count_of(values.size - int(counts[0]), 'pixel')}) and 255 "
            f"({count_of(int(counts[0]), 'pixel')}), "
            f'where 0 and 1 are labels. Divide it by 255, or set data.masks to "binary".',
            (("255", counts[0]),),
        )
    return _unlisted(
        path,
        found,
        counts,
        f"Labels are {_ranges(known)} (classes.toml, with ignore_index). Correct the mask or the "
        f'classes, or set data.ids to what each value means, such as {{{found[0]} = "ignore"}}.',
    )


def _ranges(values: list[int]) -> str:
    """Whole numbers in words: 0 to 4, 9 and 255."""
    parts: list[list[int]] = []
    for value in values:
        if parts and value == parts[-1][-1] + 1:
            parts[-1].append(value)
        else:
            parts.append([value])
    words = [f"{part[0]} to {part[-1]}" if len(part) > 1 else str(part[0]) for part in parts]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _unlisted(path: Path, found: list[int], counts: list[int], rule: str) -> FaultError:
    named = zip(found, counts, strict=True)
    listed = first_names((f"{v} ({count_of(n, 'pixel')})" for v, n in named), MOST_LISTED)
    return FaultError(
        "values",
        path,
        f"{path} holds values that are not labels: {listed}. {rule}",
        tuple((str(v), n) for v, n in zip(found, counts, strict=True)),
    )


def _binary(plane: Values, path: Path) -> NDArray[np.uint8]:
    """0 and 255 as 0 and 1. (A mask of 1 bit holds 0 and 1 already.)"""
    found, counts = (a.tolist() for a in np.unique(plane, return_counts=True))
    wrong = [i for i, value in enumerate(found) if value not in {0, 255}]
    if set(found) <= {0, 1}:
        return plane.astype(np.uint8)
    if wrong:
        rule = 'data.masks "binary" takes 0 and 255 only. Correct the mask, or data.masks.'
        raise _unlisted(path, [found[i] for i in wrong], [counts[i] for i in wrong], rule)
    return (plane // 255).astype(np.uint8)


# Colours


def _decode_colours(sample: Sample, classes: Classes) -> NDArray[np.uint8]:
    (path,) = sample.masks
    header, pixels = _read(path, sample)
    if pixels.colours is not None:
        labels, codes = labels_of_colours(pixels.colours, classes), pixels.colours
    else:
        assert pixels.values is not None
        labels, codes = _by_palette(path, header, pixels.values, classes)
    if (labels < 0).any():
        raise _unknown_colours(path, codes[labels < 0], classes)
    return labels.astype(np.uint8)


def _by_palette(
    path: Path, header: MaskHeader, values: Values, classes: Classes
) -> tuple[NDArray[np.int16], NDArray[np.int32]]:
    """The label of each value's colour, and its code; values of a grey file are shades."""
    if header.style == "palette":
        palette = np.array(header.palette, np.int32)
    else:
        palette = np.arange(256, dtype=np.int32) * 0x010101
    if values.min() < 0 or values.max() >= len(palette):
        message = f"{path} holds values up to {values.max()}, of which nothing tells the colour."
        raise FaultError("encoding", path, f"{message} Save it as RGB.")
    labels = labels_of_colours(palette, classes)[values]
    if header.style == "grey":
        by_id = value_table(classes, "multiclass")[values]
        if (by_id >= 0).all() and (labels >= 0).all() and (by_id != labels).any():
            raise FaultError(
                "encoding",
                path,
                f"{path} is grey among masks of colours, and its values are ids of classes as well "
                f"as shades that are colours of others. Save it as RGB like the others.",
            )
    return labels, palette[values]


def labels_of_colours(codes: NDArray[np.int32], classes: Classes) -> NDArray[np.int16]:
    """The label of each colour, -1 for colours of no class; any shape."""
    table, labels = colour_table(classes)
    places = np.searchsorted(table, codes).clip(max=len(table) - 1)
    return np.where(table[places] == codes, labels[places].astype(np.int16), np.int16(-1))


def colour_table(classes: Classes) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """The codes of all colours that stand for a label, rising, and the label of each."""
    colours = [*classes.colours, *classes.ignore_colours]
    labels = [*range(len(classes.names))] + [classes.ignore_index] * len(classes.ignore_colours)
    codes = colour_codes(np.array(colours, np.uint8))
    order = np.argsort(codes)
    return codes[order], np.array(labels, np.uint8)[order]


def _unknown_colours(path: Path, codes: NDArray[np.int32], classes: Classes) -> FaultError:
    found, counts = np.unique(codes, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    lines: list[str] = []
    for code, count in zip(found[order][:MOST_LISTED], counts[order], strict=False):
        colour = _colour(int(code))
        near = min(
            range(len(classes.names)),
            key=lambda i: sum(
                (a - b) ** 2 for a, b in zip(classes.colours[i], colour, strict=True)
            ),
        )
        lines.append(
            f"{list(colour)} ({count_of(count, 'pixel')}; nearest: {classes.names[near]} "
            f"{list(classes.colours[near])})"
        )
    more = f" and {len(found) - MOST_LISTED} more" if len(found) > MOST_LISTED else ""
    return FaultError(
        "colours",
        path,
        f"{path} holds colours of no class: {', '.join(lines)}{more}. Correct the mask, or the "
        f"colours or ignore_colours of classes.toml.",
        tuple((str(list(_colour(int(c)))), int(n)) for c, n in zip(found, counts, strict=True)),
    )


def _colour(code: int) -> tuple[int, int, int]:
    return code >> 16, code >> 8 & 255, code & 255


# Stacks


def is_stack(path: Path) -> bool:
    """Whether a file has one plane per class."""
    return path.suffix.lower() in STACK_SUFFIXES


def _has_pages(path: Path) -> bool:
    return path.suffix.lower() == ".npy" or read_mask_header(path).num_pages > 1


def _decode_stack(
    sample: Sample, classes: Classes, num_planes: int, *, binary: bool
) -> NDArray[np.uint8]:
    (path,) = sample.masks
    read = _read_npy if path.suffix.lower() == ".npy" else _read_tiff_pages
    with readable(path):
        planes = read(path, num_planes, sample)
    if binary:
        return np.stack([_binary(plane, path) for plane in planes])
    return _to_labels(planes, value_table(classes, "multilabel"), path)


def _read_tiff_pages(path: Path, num_planes: int, sample: Sample) -> NDArray[np.uint8]:
    with opened(path, ("TIFF",)) as image:
        num_frames = getattr(image, "n_frames", 1)
        if num_frames != num_planes:
            raise _wrong_stack(path, count_of(num_frames, "page"), num_planes)
        planes: list[NDArray[np.uint8]] = []
        for page in range(num_planes):
            image.seek(page)
            if image.mode not in {"1", "L", "P"}:
                raise _wrong_stack(path, f"a page of Pillow's mode {image.mode!r}", num_planes)
            if image.getexif().get(ORIENTATION, 1) != 1:
                # Pillow would turn each page by its own, if at all.
                raise _wrong_stack(path, "a page with an orientation of its own", num_planes)
            check_size(path, Size(image.height, image.width), sample)
            planes.append(np.array(image).astype(np.uint8, copy=False))
    return np.stack(planes)


def _read_npy(path: Path, num_planes: int, sample: Sample) -> NDArray[np.uint8]:
    # Mapped, so that a header that claims too much is refused before anything is read.
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except (tokenize.TokenError, OverflowError) as error:
        raise ValueError(f"its header is damaged: {error}") from None
    if array.dtype not in (np.bool_, np.uint8) or array.ndim != 3 or len(array) != num_planes:
        raise _wrong_stack(path, f"an array {list(array.shape)} of {array.dtype}", num_planes)
    check_size(path, Size(*array.shape[1:]), sample)
    return np.array(array).astype(np.uint8, copy=False)


def _wrong_stack(path: Path, what: str, num_planes: int) -> FaultError:
    return FaultError(
        "encoding",
        path,
        f"{path} has {what}; a stack holds a plane for each of the {num_planes} classes, of 1 or 8 "
        f"bits: the pages of a TIFF, or an .npy array [classes, height, width].",
    )
