"""Decodes images: 8 and 16 bits, grey, colour, palette, alpha, CMYK, and TIFFs of any bands.

What Pillow reads whole goes through Pillow. It cuts 16-bit colour down to 8 bits, and does not open
TIFFs of five bands, so these take two detours through the same decoders:

- A 16-bit PNG or TIFF is decoded as what it is not, so that no byte is lost: twice, for the high
  and the low bytes (PNG), or as one wide grey image (TIFF).
- For a TIFF, its strips or tiles are put into another one in memory, whose tags say so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from anysize.config import PixelConvention
from anysize.errors import DataError
from anysize.faults import FaultError
from anysize.geometry import Size
from anysize.images.formats import IMAGE_FORMATS
from anysize.images.headers import ORIENTATION, Frame, read_frame, read_tiff_header, tiff_frame
from anysize.images.opening import (
    LARGEST_WHOLE,
    Pixels,
    larger_images,
    opened,
    readable,
    upright,
)
from anysize.images.tiff import can_read_rows, decode_bands, needs_bands, unsupported
from anysize.wording import count_of

EIGHT_BIT_MODES = frozenset(
    {"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr"}
)
"""Pillow's modes that convert to RGB without clipping."""


def decode_image(path: Path, num_channels: int = 3, float_range: Sequence[float] = ()) -> Pixels:
    """Decodes an image to `[h, w, num_channels]`, upright by its EXIF orientation.

    For three channels, grey, palette and CMYK become RGB. Alpha is dropped, so what is stored
    beneath it counts, unless the channels asked for include it; colours that were multiplied by it
    are divided again. Any other number must be that of the file. Of several frames the first is
    taken; colour profiles are not applied.

    Args:
        path: The file.
        num_channels: That the net takes.
        float_range: See `PixelConvention.float_range`.

    Returns:
        uint8, or uint16 for files of more than 8 bits, as they are: white is 65535, or less where
        the camera has fewer bits (`PixelConvention.white`).

    Raises:
        FaultError: Not a readable image of `IMAGE_FORMATS`, truncated, too large, of 32 bits, of
            floating point without a range, or of another number of channels.
    """
    with readable(path):
        tiff = read_tiff_header(path)
        if tiff is not None and needs_bands(tiff, num_channels):
            pixels, num_colours = decode_bands(path, tiff, num_channels, float_range=float_range)
        else:
            pixels, num_colours = _decode_with_pillow(path, num_channels)
    return _with_channels(pixels, num_colours, num_channels, path)


def image_rows(path: Path, num_channels: int = 3, float_range: Sequence[float] = ()) -> Rows:
    """An image of any size, of which rows can be read; arguments of `decode_image`.

    One that counts as harmless is decoded whole, a larger TIFF by the strips or tiles that the rows
    lie in, and another large file whole up to `LARGEST_WHOLE` pixels.

    Raises:
        FaultError: As `decode_image`; larger ones, where no part can be read alone.
    """
    harmless = Image.MAX_IMAGE_PIXELS or LARGEST_WHOLE
    with larger_images(None), readable(path):
        tiff = read_tiff_header(path)
        frame = tiff_frame(tiff) if tiff is not None else read_frame(path)
    pixels = frame.stored.pixels
    if tiff is None or pixels <= harmless or not can_read_rows(tiff):
        if pixels > LARGEST_WHOLE:
            raise FaultError("unreadable", path, _too_large(path, frame))
        with larger_images(LARGEST_WHOLE):
            return as_rows(decode_image(path, num_channels, float_range))

    def read(top: int, bottom: int) -> Pixels:
        with larger_images(LARGEST_WHOLE), readable(path):
            pixels, num_colours = decode_bands(
                path, tiff, num_channels, float_range=float_range, rows=(top, bottom)
            )
        return _with_channels(pixels, num_colours, num_channels, path)

    return Rows(frame.stored, read)


def as_rows(image: Pixels | Rows) -> Rows:
    """The rows of an image in memory, `[h, w, c]`; rows as they are."""
    if isinstance(image, Rows):
        return image
    return Rows(Size(*image.shape[:2]), lambda top, bottom: image[top:bottom])


def _too_large(path: Path, frame: Frame) -> str:
    return (
        f"{path} is {frame.seen}, more than the {LARGEST_WHOLE} pixels that are decoded at once. "
        f"Save it as an upright TIFF of 8 or 16 bits with LZW, Deflate or no compression, which is "
        f"read in parts."
    )


def _decode_with_pillow(path: Path, num_channels: int) -> tuple[Pixels, int]:
    """Pixels, and how many of their channels are not alpha."""
    with opened(path, IMAGE_FORMATS) as image:
        raw_mode = _raw_mode(image)
        if image.format == "PNG" and "16" in raw_mode:
            return _decode_png_16(path, image, raw_mode)
        if image.mode in {"I", "I;16", "I;16B", "I;16L"}:
            return _whole_numbers(path, image), 1
        if image.mode not in EIGHT_BIT_MODES:
            raise unsupported(path, f"Pillow's mode {image.mode!r}")
        without_adobe = image.format == "JPEG" and "adobe" not in image.info
        # In place, and below without converting RGB: each copy takes a tenth of the decoding.
        ImageOps.exif_transpose(image, in_place=True)
        turned: Image.Image = image
        if turned.mode == "CMYK" and without_adobe:
            # Pillow takes every CMYK JPEG for one of Adobe's, which store ink inverted.
            turned = Image.merge("CMYK", [ImageOps.invert(ink) for ink in turned.split()])
        if num_channels == 3:
            if turned.mode == "P":
                # By way of RGBA: a palette with transparency warns otherwise.
                turned = turned.convert("RGBA")
            return np.array(turned if turned.mode == "RGB" else turned.convert("RGB")), 3
        return _channels_of(turned)


def _channels_of(image: Image.Image) -> tuple[Pixels, int]:
    if image.mode in {"1", "L"}:
        return np.array(image.convert("L"))[..., None], 1
    if image.mode in {"LA", "RGBA"}:
        array = np.array(image)
        return array, array.shape[-1] - 1
    if image.mode == "P":
        image = image.convert("RGBA")
    return np.array(image.convert("RGB")), 3


def _raw_mode(image: Image.Image) -> str:
    """How the pixels lie in the file, in Pillow's words; "" where it does not say so."""
    tiles = cast("list[Any]", getattr(image, "tile", []))
    arguments = tiles[0][3] if tiles else ""
    return arguments if isinstance(arguments, str) else ""


def _decode_png_16(path: Path, image: Image.Image, raw_mode: str) -> tuple[Pixels, int]:
    orientation = image.getexif().get(ORIENTATION, 1)
    if raw_mode.startswith("LA"):
        # Four bytes a pixel, as 8-bit RGBA has.
        values = _decode_as(path, "RGBA").view(">u2")
        return upright(values.astype(np.uint16), orientation), 1
    if raw_mode.startswith("RGB"):
        # Pillow keeps the high byte of each value; of the same bytes in the other order, the low.
        high = _decode_as(path, raw_mode).astype(np.uint16)
        high <<= 8
        high |= _decode_as(path, raw_mode.replace("16B", "16L"))
        return upright(high, orientation), 3
    with opened(path, ("PNG",)) as again:
        return upright(_whole_numbers(path, again), orientation), 1


def _decode_as(path: Path, raw_mode: str) -> NDArray[np.uint8]:
    with opened(path, ("PNG",)) as image:
        tiles = cast("list[Any]", getattr(image, "tile", []))
        image.tile = [(*tuple(tile)[:3], raw_mode) for tile in tiles]  # pyright: ignore[reportAttributeAccessIssue]
        return np.array(image)


def _whole_numbers(path: Path, image: Image.Image) -> NDArray[np.uint16]:
    values = np.array(image)
    if values.dtype != np.uint16 and values.size and (values.min() < 0 or values.max() > 65535):
        raise unsupported(
            path, f"whole numbers from {values.min()} to {values.max()}, more than 16 bits hold"
        )
    return values.astype(np.uint16)[..., None]


def _with_channels(pixels: Pixels, num_colours: int, num_channels: int, path: Path) -> Pixels:
    stored = pixels.shape[-1]
    if stored == num_channels:
        return pixels
    if num_colours == num_channels:
        return np.ascontiguousarray(pixels[..., :num_colours])
    if num_colours == 1 and num_channels == 3:
        return np.repeat(pixels[..., :1], 3, axis=-1)
    what = count_of(num_colours, "channel")
    if stored > num_colours:
        what += " and alpha"
    raise FaultError(
        "encoding",
        path,
        f"{path} has {what}, but model.num_channels is {num_channels}. Convert the image, or set "
        f"model.num_channels, pixels.mean and pixels.std to what the images have.",
    )


def size_fault(what: str, path: Path, size: Size, image: Path, image_size: Size) -> FaultError:
    """The fault of labels of another size than their image: by how much, or that they lie turned.

    Args:
        what: The labels, in words.
        path: Their file, or the image where they share one.
        size: Theirs.
        image: Its file.
        image_size: As it is seen.
    """
    if size == Size(image_size.width, image_size.height):
        try:
            orientation = read_frame(image).orientation
        except DataError:
            orientation = 1
        if orientation >= 5:
            return FaultError(
                "rotated",
                path,
                f"{what} is {size}, as image {image} is stored, before its EXIF orientation "
                f"{orientation} makes it {image_size}. Turn the mask like the image.",
            )
        return FaultError(
            "size",
            path,
            f"{what} is {size}, but image {image} is {image_size}: height and width are exchanged. "
            f"Transpose or turn it; how, only its picture shows.",
        )
    parts: list[str] = []
    for number, wanted, one in (
        (size.height, image_size.height, "row"),
        (size.width, image_size.width, "column"),
    ):
        if number != wanted:
            off = abs(number - wanted)
            off_by = f"{off} {one}{'' if off == 1 else 's'}"
            parts.append(f"{off_by} {'missing' if number < wanted else 'too many'}")
    return FaultError(
        "size",
        path,
        f"{what} is {size}, but image {image} is {image_size} once its EXIF orientation is "
        f"applied: {', '.join(parts)}. Make them the same size.",
    )


def viewable(image: Pixels, pixels: PixelConvention) -> NDArray[np.uint8]:
    """An image as RGB of 8 bits, to look at: its first three channels, or the first as grey."""
    if image.shape[-1] != 3:
        image = image[..., :3] if image.shape[-1] > 3 else np.repeat(image[..., :1], 3, axis=-1)
    if image.dtype == np.uint8:
        return cast("NDArray[np.uint8]", image)
    scaled = image.astype(np.float32) * np.float32(255 / pixels.white)
    return np.rint(scaled.clip(0, 255)).astype(np.uint8)


@dataclass(frozen=True, slots=True)
class Rows:
    """An image of which any rows can be read.

    Attributes:
        size: As it is seen.
        read: Rows from the first to before the second, as `decode_image` gives them.
    """

    size: Size
    read: Callable[[int, int], Pixels]
