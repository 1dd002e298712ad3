"""Sizes of images, read from their headers only: what a plan is made from."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from PIL import Image

from anysize.errors import DataError
from anysize.geometry import Size

IMAGE_FORMATS = ("JPEG", "PNG", "BMP", "TIFF", "WEBP")
"""What Pillow may decode, by a file's content; each further decoder is one more way to fail."""

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

NUM_THREADS = 4
MAX_NAMED = 10
"""Unreadable files that an error names; further ones are counted."""

_PNG_EXIF_TEXT = b"Raw profile type exif"
"""Start of the text chunk in which ImageMagick keeps EXIF data."""

_ORIENTATION = 0x0112
_TURNED = (5, 6, 7, 8)
"""EXIF orientations that swap height and width. Source: TIFF 6.0, tag 274."""


def read_size(path: Path) -> Size:
    """Reads an image's size as it is seen, that is with the EXIF orientation applied.

    Raises:
        DataError: The file is missing, is not an image, or its header is damaged.
    """
    try:
        with Image.open(path, formats=IMAGE_FORMATS) as image:
            width, height = image.size
            turned = _may_be_turned(image.format, path) and (
                image.getexif().get(_ORIENTATION) in _TURNED
            )
    except FileNotFoundError:
        raise DataError(f"No such image: {path}. Restore it, or take it off the list.") from None
    except DECODER_ERRORS as error:
        raise DataError(
            f"{path} cannot be read as an image: {_one_line(error)}. Replace or remove it."
        ) from None
    return Size(width, height) if turned else Size(height, width)


def fingerprint(paths: Sequence[Path]) -> list[Size]:
    """Reads the sizes of many images, in the order of `paths`.

    Raises:
        DataError: Some files cannot be read; all of them were tried, and the message says how many
            failed and names the first ten.
    """
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        results = list(pool.map(_size_or_error, paths))
    errors = [r for r in results if isinstance(r, DataError)]
    if len(errors) == 1:
        raise errors[0]
    if errors:
        named = "".join(f"\n  {e}" for e in errors[:MAX_NAMED])
        more = f"\n  and {len(errors) - MAX_NAMED} more." if len(errors) > MAX_NAMED else ""
        raise DataError(f"{len(errors)} of {len(paths)} images cannot be read:{named}{more}")
    return [r for r in results if isinstance(r, Size)]


def _may_be_turned(image_format: str | None, path: Path) -> bool:
    """Whether to ask for the orientation, which for PNGs may decode the whole image."""
    if image_format == "TIFF":
        return False  # Pillow turns TIFFs, and their size, by itself.
    if image_format != "PNG":
        return True
    with path.open("rb") as file:
        file.seek(8)
        while len(chunk := file.read(8)) == 8:
            length, kind = struct.unpack(">I4s", chunk)
            start = file.read(min(length, len(_PNG_EXIF_TEXT)))
            if kind == b"eXIf" or start == _PNG_EXIF_TEXT:
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
