"""Labels of an image, from masks or shapes of any kind, as arrays of class ids or of 0 and 1."""

from __future__ import annotations

import struct
import tokenize
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from anysize.config import LabelKind
from anysize.data.classes import Classes
from anysize.data.formats.coco import coco_shapes
from anysize.data.formats.labelme import labelme_shapes
from anysize.data.formats.ultralytics import polygon_shapes
from anysize.data.reading import STACK_SUFFIXES, Sample
from anysize.data.shapes import paint
from anysize.errors import first_names
from anysize.faults import MOST_LISTED, FaultError
from anysize.geometry import Size
from anysize.images.decode import size_fault
from anysize.images.headers import ORIENTATION
from anysize.images.opening import opened, readable

_PNG_COLOUR_TYPES = {0: "grey", 2: "RGB", 3: "palette", 4: "grey with alpha", 6: "RGBA"}


def label_kind(sample: Sample, classes: Classes) -> LabelKind:
    """Whether a sample has one class per pixel or any number of them.

    Where its encoding does not say, one mask per class is "multilabel"; so is a single class
    always, since `find_samples` refuses softmax over one.
    """
    if sample.encoding.labels is not None:
        return sample.encoding.labels
    return "multilabel" if len(sample.masks) == len(classes.names) else "multiclass"


def decode_mask(sample: Sample, classes: Classes) -> NDArray[np.uint8]:
    """Decodes a sample's labels.

    Returns:
        softmax: `[h, w]`, class ids and `ignore_index`.
        sigmoid: `[k, h, w]`, 0, 1 and `ignore_index`, in the order of the classes.

    Raises:
        FaultError: Not readable as the sample's encoding says, of another size than the image, or
            with values, colours or names that are no classes'; these are listed with their counts.
        DataError: A library that the encoding needs is not installed.
    """
    kind = label_kind(sample, classes)
    num_values = 2 if kind == "multilabel" else len(classes.names)
    match sample.encoding.kind:
        case "labelme" | "coco" | "polygons":
            return _decode_shapes(sample, classes, kind)
        case "colours":
            return _decode_colours(sample, classes)
        case "stack":
            return _decode_stack(sample, classes, len(classes.names), binary=False)
        case "binary" if is_stack(sample.masks[0]):
            return _decode_stack(sample, classes, len(classes.names), binary=True)
        case "binary":
            planes = [_binary(decode_mask_file(p, sample), p) for p in sample.masks]
        case "index" | "folders":
            lookup = np.array(sample.encoding.lookup, np.uint8)
            planes = [decode_mask_file(path, sample) for path in sample.masks]
            planes = [lookup[plane] for plane in planes] if len(lookup) else planes
            for path, plane in zip(sample.masks, planes, strict=True):
                _check_values(plane, num_values, classes.ignore_index, path)
    return np.stack(planes) if kind == "multilabel" else planes[0]


def _decode_shapes(sample: Sample, classes: Classes, kind: LabelKind) -> NDArray[np.uint8]:
    encoding, size = sample.encoding, sample.size
    if encoding.kind == "coco":
        assert encoding.file is not None
        shapes = coco_shapes(sample.annotations, encoding.categories, encoding.file, size, classes)
    elif encoding.kind == "labelme":
        shapes = labelme_shapes(sample.masks[0], sample.image, size, classes)
    else:
        # An image without a file has no objects, by Ultralytics' rule.
        shapes = [
            shape
            for path in sample.masks
            for shape in polygon_shapes(path, encoding.categories, size, classes)
        ]
    return paint(shapes, size, classes, kind)


# One mask


def decode_mask_file(path: Path, sample: Sample) -> NDArray[np.uint8]:
    """The values of an index PNG of a sample's size, palettes as their indices.

    Raises:
        FaultError: It is none, or has another size.
    """
    header = read_mask_header(path)
    with opened(path, ("PNG",)) as image:
        plane = np.array(image).astype(np.uint8, copy=False)
    if header.is_grey and header.bit_depth in {2, 4}:
        # Pillow stretches 2 and 4 bits of grey to 0..255; PNG optimisers store small ids that way.
        plane //= 255 // (2**header.bit_depth - 1)
    check_size(path, Size(*plane.shape), sample)
    return plane


def read_mask_header(path: Path) -> MaskHeader:
    """Reads the header of an index PNG.

    Raises:
        FaultError: It is not one.
    """
    header = read_png_header(path)
    if not header.is_index:
        colour = _PNG_COLOUR_TYPES.get(header.colour_type, f"unknown ({header.colour_type})")
        raise FaultError(
            "encoding",
            path,
            f"{path} is a PNG of colour type {colour} with {header.bit_depth} bits. A mask must be "
            f"an index PNG: grey or palette, at most 8 bits, whose values are labels.",
        )
    return header


def read_png_header(path: Path) -> MaskHeader:
    """Reads the header of a PNG.

    Raises:
        FaultError: It is none.
    """
    try:
        with path.open("rb") as file:
            head = file.read(26)
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror}."
        raise FaultError("unreadable", path, message) from None
    if len(head) < 26 or not head.startswith(b"\x89PNG\r\n\x1a\n") or head[12:16] != b"IHDR":
        message = f"{path} is not a PNG. Masks must be index PNGs."
        raise FaultError("encoding", path, message)
    width, height, bit_depth, colour_type = struct.unpack(">IIBB", head[16:26])
    return MaskHeader(Size(height, width), bit_depth, colour_type)


def check_size(path: Path, size: Size, sample: Sample) -> None:
    """Holds a mask's size against its image's.

    Raises:
        FaultError: They differ.
    """
    if size != sample.size:
        raise size_fault(f"mask {path}", path, size, sample.image, sample.size)


def _check_values(plane: NDArray[np.uint8], num_values: int, ignore_index: int, path: Path) -> None:
    if plane.max() < num_values:
        return
    counts = np.bincount(plane.ravel(), minlength=256)
    wrong = [v for v in range(num_values, 256) if v != ignore_index and counts[v]]
    if wrong == [255] and not counts[1:255].any():
        raise FaultError(
            "binary",
            path,
            f"{path} holds 0 ({counts[0]} pixels) and 255 ({counts[255]} pixels), where 0 and 1 "
            f'are labels. Divide it by 255, or set data.masks to "binary".',
            (("255", int(counts[255])),),
        )
    if wrong:
        raise _wrong_values(
            path,
            counts,
            wrong,
            f"Labels are 0 to {num_values - 1}, and "
            f"{ignore_index} for pixels to ignore (classes.toml). Correct the mask "
            f"or the classes.",
        )


def _wrong_values(path: Path, counts: NDArray[np.intp], wrong: list[int], rule: str) -> FaultError:
    listed = first_names((f"{v} ({counts[v]} pixels)" for v in wrong), MOST_LISTED)
    return FaultError(
        "values",
        path,
        f"{path} holds values that are not labels: {listed}. {rule}",
        tuple((str(v), int(counts[v])) for v in wrong),
    )


def _binary(plane: NDArray[np.uint8], path: Path) -> NDArray[np.uint8]:
    """0 and 255 as 0 and 1. (A mask of 1 bit holds 0 and 1 already.)"""
    counts = np.bincount(plane.ravel(), minlength=256)
    wrong = [v for v in range(1, 255) if counts[v]]
    if wrong == [1] and not counts[255]:
        return plane
    if wrong:
        rule = 'data.masks "binary" takes 0 and 255 only. Correct the mask, or data.masks.'
        raise _wrong_values(path, counts, wrong, rule)
    return plane // 255


# Colours


def _decode_colours(sample: Sample, classes: Classes) -> NDArray[np.uint8]:
    (path,) = sample.masks
    header = read_png_header(path)
    if header.bit_depth > 8:
        message = f"{path} has {header.bit_depth} bits a channel; a mask of colours must have 8."
        raise FaultError("encoding", path, message)
    with opened(path, ("PNG",)) as image:
        if image.mode == "P":
            image = image.convert("RGBA")
        colours = np.array(image.convert("RGB"))
    check_size(path, Size(*colours.shape[:2]), sample)
    codes = colour_codes(colours)
    table, labels = colour_table(classes)
    places = np.searchsorted(table, codes).clip(max=len(table) - 1)
    unknown = table[places] != codes
    if unknown.any():
        raise _unknown_colours(path, codes[unknown], classes)
    return labels[places]


def colour_codes(colours: NDArray[np.uint8]) -> NDArray[np.int32]:
    """RGB `[..., 3]` as one number a colour."""
    wide = colours.astype(np.int32)
    return (wide[..., 0] << 16) | (wide[..., 1] << 8) | wide[..., 2]


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
            f"{list(colour)} ({count} pixels; nearest: {classes.names[near]} "
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
    """Whether a file holds a plane a class."""
    return path.suffix.lower() in STACK_SUFFIXES


def _decode_stack(
    sample: Sample, classes: Classes, num_planes: int, *, binary: bool
) -> NDArray[np.uint8]:
    (path,) = sample.masks
    read = _read_npy if path.suffix.lower() == ".npy" else _read_tiff_pages
    with readable(path):
        planes = read(path, num_planes, sample)
    if binary:
        return np.stack([_binary(plane, path) for plane in planes])
    _check_values(planes, 2, classes.ignore_index, path)
    return planes


def _read_tiff_pages(path: Path, num_planes: int, sample: Sample) -> NDArray[np.uint8]:
    with opened(path, ("TIFF",)) as image:
        num_frames = getattr(image, "n_frames", 1)
        if num_frames != num_planes:
            raise _wrong_stack(path, f"{num_frames} pages", num_planes)
        planes: list[NDArray[np.uint8]] = []
        for page in range(num_planes):
            image.seek(page)
            if image.mode not in {"1", "L", "P"}:
                raise _wrong_stack(path, f"a page of Pillow's mode {image.mode!r}", num_planes)
            if image.getexif().get(ORIENTATION, 1) != 1:
                # Pillow would turn the page, and labels are never turned.
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


class MaskHeader(NamedTuple):
    """What the header of a PNG says."""

    size: Size
    bit_depth: int
    colour_type: int

    @property
    def is_grey(self) -> bool:
        """Whether it has neither colours nor alpha."""
        return self.colour_type == 0

    @property
    def is_index(self) -> bool:
        """Whether its values can be labels."""
        return self.colour_type in {0, 3} and self.bit_depth <= 8
