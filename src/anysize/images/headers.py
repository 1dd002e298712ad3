"""Sizes of images, read from their headers only: what a plan is made from."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from PIL import Image
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from anysize.errors import DataError
from anysize.geometry import Size
from anysize.images.formats import IMAGE_FORMATS, format_of
from anysize.wording import count_of

DECODER_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    LookupError,
    TypeError,
    struct.error,
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)
"""What Pillow raises on damaged files; found by feeding it damaged files."""

MAX_VALUES_A_PIXEL = 64
"""Most bands of a TIFF; a header may claim 65535."""

NUM_THREADS = 4
MAX_NAMED = 10
"""Unreadable files that an error names; further ones are counted."""

_PNG_TEXTS = (b"Raw profile type exif", b"XML:com.adobe.xmp")
"""Starts of the text chunks in which ImageMagick keeps EXIF data, and Adobe XMP."""

ORIENTATION = 0x0112
"""EXIF's tag for how an image is to be turned. Source: TIFF 6.0, tag 274."""

_WIDTH, _HEIGHT, _XMP = 0x0100, 0x0101, 0x02BC
_TURNED = (5, 6, 7, 8)
"""EXIF orientations that swap height and width. Source: TIFF 6.0, tag 274."""


def read_size(path: Path) -> Size:
    """Reads an image's size as it is seen, that is with the EXIF orientation applied.

    Raises:
        DataError: The file is missing, is not an image, or its header is damaged.
    """
    size = read_frame(path).seen
    try:
        check_not_a_bomb(size)
    except Image.DecompressionBombError as error:
        raise DataError(
            f"{path} cannot be read as an image: {why_unreadable(path, error)}"
        ) from None
    return size


def read_frame(path: Path) -> Frame:
    """Reads an image's size as it is stored, and how it is turned to be seen.

    Raises:
        DataError: The file is missing, is not an image, or its header is damaged.
    """
    try:
        tiff = read_tiff_header(path)
        if tiff is not None:
            frame = tiff_frame(tiff)
        else:
            with Image.open(path, formats=IMAGE_FORMATS) as image:
                frame = Frame(Size(image.height, image.width), _orientation_of_image(image, path))
        check_not_a_bomb(frame.stored)
    except FileNotFoundError:
        raise DataError(f"No such image: {path}. Restore it, or take it off the list.") from None
    except DECODER_ERRORS as error:
        raise DataError(
            f"{path} cannot be read as an image: {why_unreadable(path, error)}"
        ) from None
    return frame


def why_unreadable(path: Path, error: Exception) -> str:
    """What is wrong with a file that no decoder takes, and what to do, in a sentence or two."""
    try:
        found = format_of(path)
    except OSError:
        found = None
    if found is not None and found.no_image:
        return f"it is {found.name}. {found.no_image}"
    return f"{_one_line(error)}. Replace or remove it."


def _orientation_of_image(image: Image.Image, path: Path) -> int:
    """The EXIF orientation, wherever in the file it is: behind the pixels too, or in XMP data."""
    if image.format == "PNG" and not png_may_be_turned(path):
        return 1
    return _valid(image.getexif().get(ORIENTATION, 1))


def _valid(orientation: object) -> int:
    return orientation if isinstance(orientation, int) and 1 <= orientation <= 8 else 1


def check_not_a_bomb(size: Size) -> None:
    """Holds a header's size against what Pillow takes for harmless, before anything is decoded.

    Raises:
        DecompressionBombError: It has more pixels.
    """
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and size.pixels > limit:
        raise Image.DecompressionBombError(
            f"{size.pixels} pixels are more than the {limit} that Pillow takes for harmless; cut "
            f"it into tiles (`anysize predict` reads larger images in parts)"
        )


def read_tiff_header(path: Path) -> ImageFileDirectory_v2 | None:
    """The tags of a TIFF's first image; None for a file that is no TIFF.

    Pillow opens TIFFs of one to four bands only, so those of more are read by their tags.

    Raises:
        DECODER_ERRORS: The header is damaged.
    """
    with path.open("rb") as file:
        head = file.read(8)
        if head[:4] not in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
            return None
        if b"+" in head[:4]:  # BigTIFF
            head += file.read(8)
        tags = ImageFileDirectory_v2(head)
        file.seek(tags.next)
        tags.load(file)
    return tags


def tiff_frame(tags: ImageFileDirectory_v2) -> Frame:
    """The size of a TIFF as it is stored, and how it is turned to be seen.

    Raises:
        ValueError: The tags hold no size.
    """
    width, height = tags.get(_WIDTH), tags.get(_HEIGHT)
    if type(width) is not int or type(height) is not int or width < 1 or height < 1:
        raise ValueError(f"a TIFF of {width} by {height} pixels")
    orientation = tags.get(ORIENTATION)
    if orientation is None and isinstance(xmp := tags.get(_XMP), bytes):
        match = re.search(rb'tiff:Orientation(?:="|>)([0-9])', xmp)
        orientation = int(match[1]) if match else 1
    return Frame(Size(height, width), _valid(orientation))


def fingerprint(paths: Sequence[Path]) -> list[Size]:
    """Reads the sizes of many images, in the order of `paths`.

    Raises:
        DataError: Some files cannot be read; all of them were tried, and the message says how many
            failed and names the first ten.
    """
    results = read_sizes(paths)
    errors = [r for r in results if isinstance(r, DataError)]
    if errors:
        raise unreadable(errors, len(paths))
    return [r for r in results if isinstance(r, Size)]


def read_sizes(paths: Sequence[Path]) -> list[Size | DataError]:
    """Reads the sizes of many images; in the place of one that cannot be read is what is wrong."""
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return list(pool.map(_size_or_error, paths))


def unreadable(errors: Sequence[DataError], num_images: int) -> DataError:
    """One error for the images that cannot be read."""
    if len(errors) == 1:
        return errors[0]
    named = "".join(f"\n  {e}" for e in errors[:MAX_NAMED])
    more = f"\n  and {len(errors) - MAX_NAMED} more." if len(errors) > MAX_NAMED else ""
    return DataError(
        f"{len(errors)} of {count_of(num_images, 'image')} cannot be read:{named}{more}"
    )


def png_may_be_turned(path: Path) -> bool:
    """Whether a PNG holds EXIF or XMP data anywhere, so that it is worth to decode it for them."""
    with path.open("rb") as file:
        file.seek(8)
        while len(chunk := file.read(8)) == 8:
            length, kind = struct.unpack(">I4s", chunk)
            start = file.read(min(length, max(map(len, _PNG_TEXTS))))
            if kind == b"eXIf" or start.startswith(_PNG_TEXTS):
                return True
            file.seek(length + 4 - len(start), os.SEEK_CUR)
    return False


def _size_or_error(path: Path) -> Size | DataError:
    try:
        return read_size(path)
    except DataError as error:
        return error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class Frame(NamedTuple):
    """An image's size as it is stored, and its EXIF orientation, 1 for upright."""

    stored: Size
    orientation: int

    @property
    def seen(self) -> Size:
        """The size once the orientation is applied."""
        turned = self.orientation in _TURNED
        return Size(self.stored.width, self.stored.height) if turned else self.stored
