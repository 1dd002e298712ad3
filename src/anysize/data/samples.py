"""The data folder: finds pairs of image and mask, splits them, and decodes them.

    images/<stem>.jpg          any 8-bit image
    masks/<stem>.png           softmax: an index PNG, values are class ids
    masks/<class>/<stem>.png   sigmoid: a PNG a class, values 0 and 1
    classes.toml               names, colours, ignore_index

Finding reads headers only. Every fault of a stage is in one message, so that a folder is put right
in few rounds. docs/data-folder.md describes the folder for its makers.
"""

from __future__ import annotations

import struct
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from anysize.config import DataConfig
from anysize.errors import DataError
from anysize.geometry import Size
from anysize.plan.fingerprint import DECODER_ERRORS, IMAGE_FORMATS, fingerprint

LabelKind = Literal["softmax", "sigmoid"]

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp")
"""Files that count as images, in lower or upper case; other files are passed over."""

EIGHT_BIT_MODES = frozenset(
    {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr"}
)
"""Pillow's modes that convert to RGB without clipping."""

MOST_LISTED = 10
"""Faults that a message lists; it counts the others."""

_PNG_COLOUR_TYPES = {0: "grey", 2: "RGB", 3: "palette", 4: "grey with alpha", 6: "RGBA"}

_ADD_OR_REMOVE = "Add what is missing, or remove the other half."


def read_classes(path: Path) -> Classes:
    """Reads `classes.toml`: an optional `ignore_index` and a `[[class]]` table a class.

    Raises:
        DataError: No such file, not TOML, an unknown or missing key, a value of the wrong type or
            range, or a name or colour given twice.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"No such file: {path}. Write it; docs/data-folder.md has one to start from."
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise DataError(f"{path} cannot be read as TOML: {error}.") from None
    _check_keys(table, {"ignore_index", "class"}, "", path)
    entries = table.get("class")
    if not isinstance(entries, list) or not entries:
        raise DataError(f"{path} names no classes. Add a [[class]] table for each.")
    names: list[str] = []
    colours: list[tuple[int, int, int]] = []
    for number, entry in enumerate(cast("list[object]", entries)):
        name, colour = _read_class(entry, number, path)
        names.append(name)
        colours.append(colour)
    for what, values in (("name", names), ("colour", colours)):
        twice = [str(v) for v, count in Counter[object](values).items() if count > 1]
        if twice:
            raise DataError(
                f"{path} gives the same {what} to several classes: {', '.join(twice)}. "
                f"Each class needs its own."
            )
    return Classes(
        names=tuple(names),
        colours=tuple(colours),
        ignore_index=_read_ignore_index(table, len(names), path),
    )


def _read_class(entry: object, number: int, path: Path) -> tuple[str, tuple[int, int, int]]:
    if not isinstance(entry, dict):
        raise DataError(f"Class {number} is {entry!r}; it must be a [[class]] table ({path}).")
    table = cast("dict[str, Any]", entry)
    _check_keys(table, {"name", "colour"}, f"class {number}: ", path)
    name = table.get("name")
    if not isinstance(name, str) or not name.strip():
        raise DataError(f"The name of class {number} is {name!r}; it must be a text ({path}).")
    colour = table.get("colour")
    is_colour = (
        isinstance(colour, list)
        and len(cast("list[object]", colour)) == 3
        and all(type(c) is int and 0 <= c <= 255 for c in cast("list[object]", colour))
    )
    if not is_colour:
        raise DataError(
            f"The colour of class {name!r} is {colour!r}; it must be [red, green, blue], each a "
            f"whole number from 0 to 255 ({path})."
        )
    red, green, blue = cast("list[int]", colour)
    return name, (red, green, blue)


def _read_ignore_index(table: dict[str, Any], num_classes: int, path: Path) -> int:
    ignore_index = table.get("ignore_index", 255)
    # 0 and 1 are the values of a sigmoid mask, whatever the number of classes.
    lowest = max(num_classes, 2)
    if type(ignore_index) is not int or not lowest <= ignore_index <= 255:
        raise DataError(
            f"`ignore_index` is {ignore_index!r}; it must be a whole number from {lowest} to 255, "
            f"since lower ones are ids of the {num_classes} classes or mask values ({path})."
        )
    return ignore_index


def _check_keys(table: dict[str, Any], known: set[str], where: str, path: Path) -> None:
    unknown = sorted(set(table) - known)
    if unknown:
        raise DataError(
            f"{where}unknown key {', '.join(f'`{k}`' for k in unknown)} ({path}). "
            f"Known: {', '.join(f'`{k}`' for k in sorted(known))}."
        )


def list_images(folder: Path) -> list[Path]:
    """The image files directly in a folder, sorted by name.

    Raises:
        DataError: No such folder, or no image in it.
    """
    return _list_files(folder, IMAGE_SUFFIXES)


def _list_files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    kinds = ", ".join(suffixes)
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise DataError(
            f"The folder {folder} cannot be read: {error.strerror}. "
            f"Put the {kinds} files there; docs/data-folder.md shows the folder."
        ) from None
    # Names with a leading dot are files that macOS leaves beside each copied one.
    files = [
        e
        for e in entries
        if e.suffix.lower() in suffixes and not e.name.startswith(".") and e.is_file()
    ]
    if not files:
        raise DataError(
            f"The folder {folder} holds no {kinds} files. Put them directly into it, not into "
            f"folders below it."
        )
    return files


def find_samples(root: Path, classes: Classes, kind: LabelKind) -> list[Sample]:
    """Finds the pairs of image and mask in a data folder, sorted by stem.

    Reads headers only, so labels are not checked here; `decode_mask` does.

    Args:
        root: Folder with `images/` and `masks/`.
        classes: Of `classes.toml`.
        kind: "softmax" takes a mask an image, "sigmoid" one for each class.

    Raises:
        DataError: A folder is missing or empty, an image or mask lacks its partner, two files share
            a stem, a header cannot be read, or a mask has another size than its image.
    """
    mask_folders = _mask_folders(root, classes, kind)
    faults = _stray_class_folders(root, classes) if kind == "sigmoid" else []
    images = _by_stem(list_images(root / "images"), faults)
    masks = [_by_stem(_list_files(folder, (".png",)), faults) for folder in mask_folders]
    for folder, found in zip(mask_folders, masks, strict=True):
        faults += [
            f"image {image} has no mask {folder / stem}.png"
            for stem, image in images.items()
            if stem not in found
        ]
        faults += [
            f"mask {mask} has no image {root / 'images' / stem}.*"
            for stem, mask in found.items()
            if stem not in images
        ]
    if faults:
        raise DataError(_listing(f"{root} does not pair up", faults) + f"\n{_ADD_OR_REMOVE}")

    stems = sorted(images)
    sizes = fingerprint([images[stem] for stem in stems])
    samples = [
        Sample(stem=stem, image=images[stem], masks=tuple(m[stem] for m in masks), size=size)
        for stem, size in zip(stems, sizes, strict=True)
    ]
    faults = [fault for sample in samples for fault in _mask_header_faults(sample)]
    if faults:
        raise DataError(_listing(f"Masks in {root / 'masks'} do not hold", faults))
    return samples


def _mask_folders(root: Path, classes: Classes, kind: LabelKind) -> list[Path]:
    if kind == "softmax":
        if len(classes.names) < 2:
            raise DataError(
                f"{root / 'classes.toml'} names {len(classes.names)} class; softmax chooses "
                f"between at least 2. Add the background as a class, or set loss.kind to sigmoid."
            )
        return [root / "masks"]
    for name in classes.names:
        if name in {".", ".."} or "/" in name or "\\" in name:
            raise DataError(
                f"The class {name!r} cannot name a folder of sigmoid masks "
                f"({root / 'classes.toml'}). Rename it."
            )
    return [root / "masks" / name for name in classes.names]


def _stray_class_folders(root: Path, classes: Classes) -> list[str]:
    folder = root / "masks"
    if not folder.is_dir():
        return []
    return [
        f"folder {entry} is not a class of {root / 'classes.toml'}"
        for entry in sorted(folder.iterdir())
        if entry.is_dir() and not entry.name.startswith(".") and entry.name not in classes.names
    ]


def _by_stem(paths: Sequence[Path], faults: list[str]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in paths:
        if path.stem in found:
            faults.append(f"{found[path.stem]} and {path} have the same stem")
        found[path.stem] = path
    return found


def _mask_header_faults(sample: Sample) -> list[str]:
    faults: list[str] = []
    for path in sample.masks:
        try:
            header = _read_mask_header(path)
        except DataError as error:
            faults.append(str(error))
            continue
        if header.size != sample.size:
            faults.append(_size_fault(path, header.size, sample))
    return faults


def _size_fault(mask: Path, size: Size, sample: Sample) -> str:
    return (
        f"mask {mask} is {size}, but image {sample.image} is {sample.size} once its EXIF "
        f"orientation is applied. Make them the same size."
    )


def _listing(what: str, faults: Sequence[str]) -> str:
    lines = [f"{what}; {len(faults)} {'fault' if len(faults) == 1 else 'faults'}:"]
    lines += faults[:MOST_LISTED]
    if len(faults) > MOST_LISTED:
        lines.append(f"and {len(faults) - MOST_LISTED} more")
    return "\n  ".join(lines)


def split_samples(
    samples: Sequence[Sample], config: DataConfig, root: Path, *, seed: int
) -> tuple[list[Sample], list[Sample]]:
    """Splits samples for training and evaluation.

    With `config.train` and `config.val`: by these lists, in their order; samples in neither list
    are left out. Without: `config.val_fraction` of the sorted stems, at least one, is drawn for
    evaluation; it depends on the seed and the stems only.

    Args:
        samples: Of `find_samples`.
        config: `[data]` of the run.
        root: The data folder, which the lists' paths are relative to.
        seed: Of the drawn split.

    Raises:
        DataError: A list cannot be read, is empty, repeats a stem or names one that is not there;
            a stem is in both lists; there are too few samples to draw from.
    """
    by_stem = {sample.stem: sample for sample in samples}
    if config.train:
        train = _read_list(root / config.train, by_stem)
        val = _read_list(root / config.val, by_stem)
        shared = sorted(set(train) & set(val))
        if shared:
            what = f"{root / config.train} and {root / config.val} share stems"
            raise DataError(
                _listing(what, shared) + "\nTake them out of one list, or scores flatter the net."
            )
    else:
        train, val = _draw_split(sorted(by_stem), config.val_fraction, root, seed)
    return [by_stem[stem] for stem in train], [by_stem[stem] for stem in val]


def _read_list(path: Path, by_stem: dict[str, Sample]) -> list[str]:
    try:
        # utf-8-sig passes over the mark that Windows editors put at the start.
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"The list {path} cannot be read: {error}.") from None
    stems = [line.strip() for line in lines if line.strip()]
    if not stems:
        raise DataError(f"The list {path} is empty. Write a stem a line into it.")
    missing = [stem for stem in stems if stem not in by_stem]
    if missing:
        raise DataError(
            _listing(f"{path} names stems that no image has", missing)
            + "\nA stem is the file's name without its folder and suffix."
        )
    twice = [stem for stem, count in Counter(stems).items() if count > 1]
    if twice:
        raise DataError(_listing(f"{path} repeats stems", twice) + "\nName each once.")
    return stems


def _draw_split(
    stems: list[str], val_fraction: float, root: Path, seed: int
) -> tuple[list[str], list[str]]:
    if len(stems) < 2:
        raise DataError(
            f"{root} holds {len(stems)} sample; a split into training and evaluation needs at "
            f"least 2. Add images."
        )
    num_val = min(max(1, round(len(stems) * val_fraction)), len(stems) - 1)
    # The last word keeps this stream apart from those of the order (seed, epoch) and of the
    # augmentation: numpy fills a short seed up with zeros.
    order = np.random.default_rng((seed, 0, 0, 2)).permutation(len(stems))
    val = {stems[i] for i in order[:num_val]}
    return [s for s in stems if s not in val], [s for s in stems if s in val]


def label_kind(sample: Sample, classes: Classes) -> LabelKind:
    """Whether a sample has one mask ("softmax") or a mask a class ("sigmoid").

    A single class is always "sigmoid": `find_samples` refuses softmax over one class.
    """
    return "sigmoid" if len(sample.masks) == len(classes.names) else "softmax"


def decode_image(path: Path) -> NDArray[np.uint8]:
    """Decodes an image to RGB `[h, w, 3]`, upright by its EXIF orientation.

    Grey, palette and CMYK become RGB; alpha is dropped, so what is stored beneath it counts; of
    several frames the first is taken; colour profiles are not applied.

    Raises:
        DataError: Not a readable image of `IMAGE_FORMATS`, truncated, more than 8 bits a channel,
            or larger than Pillow's guard against decompression bombs allows.
    """
    with _opened(path, IMAGE_FORMATS) as image:
        if image.mode not in EIGHT_BIT_MODES:
            raise DataError(
                f"{path} has Pillow's mode {image.mode!r}, which is not 8 bits a channel. "
                f"Convert it to 8-bit grey or RGB, scaled as you see fit."
            )
        upright = ImageOps.exif_transpose(image)
        if upright.mode == "P":
            # By way of RGBA: a palette with transparency warns otherwise.
            upright = upright.convert("RGBA")
        return np.array(upright.convert("RGB"))


def decode_mask(sample: Sample, classes: Classes) -> NDArray[np.uint8]:
    """Decodes a sample's labels.

    Returns:
        softmax: `[h, w]`, class ids and `ignore_index`.
        sigmoid: `[k, h, w]`, 0, 1 and `ignore_index`, in the order of the classes.

    Raises:
        DataError: Not a readable index PNG, of another size than the image, or with values that are
            neither labels nor `ignore_index`; these are listed with their pixel counts.
    """
    kind = label_kind(sample, classes)
    num_values = 2 if kind == "sigmoid" else len(classes.names)
    planes = [_decode_mask_file(path, sample) for path in sample.masks]
    for path, plane in zip(sample.masks, planes, strict=True):
        _check_values(plane, num_values, classes.ignore_index, path)
    return np.stack(planes) if kind == "sigmoid" else planes[0]


def _decode_mask_file(path: Path, sample: Sample) -> NDArray[np.uint8]:
    header = _read_mask_header(path)
    with _opened(path, ("PNG",)) as image:
        plane = np.array(image).astype(np.uint8, copy=False)
    if header.is_grey and header.bit_depth in {2, 4}:
        # Pillow stretches 2 and 4 bits of grey to 0..255; PNG optimisers store small ids that way.
        plane //= 255 // (2**header.bit_depth - 1)
    size = Size(*plane.shape)
    if size != sample.size:
        raise DataError(_size_fault(path, size, sample))
    return plane


def _check_values(plane: NDArray[np.uint8], num_values: int, ignore_index: int, path: Path) -> None:
    if plane.max() < num_values:
        return
    counts = np.bincount(plane.ravel(), minlength=256)
    wrong = [v for v in range(num_values, 256) if v != ignore_index and counts[v]]
    if wrong:
        listed = ", ".join(f"{v} ({counts[v]} pixels)" for v in wrong[:MOST_LISTED])
        more = f" and {len(wrong) - MOST_LISTED} more" if len(wrong) > MOST_LISTED else ""
        raise DataError(
            f"{path} holds values that are not labels: {listed}{more}. Labels are 0 to "
            f"{num_values - 1}, and {ignore_index} for pixels to ignore (classes.toml). "
            f"Correct the mask or the classes."
        )


def _read_mask_header(path: Path) -> _MaskHeader:
    try:
        with path.open("rb") as file:
            head = file.read(26)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None
    if len(head) < 26 or not head.startswith(b"\x89PNG\r\n\x1a\n") or head[12:16] != b"IHDR":
        raise DataError(f"{path} is not a PNG. Masks must be index PNGs.")
    width, height, bit_depth, colour_type = struct.unpack(">IIBB", head[16:26])
    if colour_type not in {0, 3} or bit_depth > 8:
        colour = _PNG_COLOUR_TYPES.get(colour_type, f"unknown ({colour_type})")
        raise DataError(
            f"{path} is a PNG of colour type {colour} with {bit_depth} bits. A mask must be an "
            f"index PNG: grey or palette, at most 8 bits, whose values are labels."
        )
    return _MaskHeader(Size(height, width), bit_depth, colour_type == 0)


@contextmanager
def _opened(path: Path, formats: tuple[str, ...]) -> Iterator[Image.Image]:
    """An open image; what its decoder raises inside the block becomes a DataError."""
    try:
        with Image.open(path, formats=formats) as image:
            limit = Image.MAX_IMAGE_PIXELS
            if limit is not None and image.width * image.height > limit:
                raise Image.DecompressionBombError(
                    f"{image.width * image.height} pixels are more than the {limit} that Pillow "
                    f"takes for harmless; cut it into tiles"
                )
            yield image
    except DECODER_ERRORS as error:
        raise DataError(
            f"{path} cannot be decoded: {error}. Replace it, or remove it with its partner."
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Classes:
    """The classes of a data folder.

    Attributes:
        names: By class id.
        colours: (red, green, blue) of each class in pictures.
        ignore_index: The mask value of pixels that neither train nor count.
    """

    names: tuple[str, ...]
    colours: tuple[tuple[int, int, int], ...]
    ignore_index: int = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """An image and its labels, on disk.

    Attributes:
        stem: File name without suffix, the same of image and masks.
        image: The image file.
        masks: One index mask, or a mask for each class in the order of the classes.
        size: Of the image with its EXIF orientation applied, and of the masks.
    """

    stem: str
    image: Path
    masks: tuple[Path, ...]
    size: Size


class _MaskHeader(NamedTuple):
    size: Size
    bit_depth: int
    is_grey: bool
