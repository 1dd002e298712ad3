"""Decodes images: 8 and 16 bits, grey, colour, palette, alpha, CMYK, and TIFFs of any bands.

What Pillow reads whole goes through Pillow. It cuts 16-bit colour down to 8 bits, and does not open
TIFFs of five bands, so these take two detours through the same decoders:

- A 16-bit PNG or TIFF is decoded as what it is not, so that no byte is lost: twice, for the high
  and the low bytes (PNG), or as one wide grey image (TIFF).
- For a TIFF, its strips or tiles are put into another one in memory, whose tags say so.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from anysize.config import PixelConvention
from anysize.errors import DataError
from anysize.faults import FaultError
from anysize.geometry import Size
from anysize.images.headers import (
    DECODER_ERRORS,
    IMAGE_FORMATS,
    MAX_VALUES_A_PIXEL,
    ORIENTATION,
    check_not_a_bomb,
    read_size,
    read_tiff_header,
    tiff_size,
)

Pixels = NDArray[np.uint8 | np.uint16]

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp")
"""Files that count as images, in lower or upper case; other files are passed over."""

EIGHT_BIT_MODES = frozenset(
    {"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr"}
)
"""Pillow's modes that convert to RGB without clipping."""

# Tags of a TIFF. Source: TIFF 6.0.
_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC = 256, 257, 258, 259, 262
_OFFSETS, _NUM_BANDS, _ROWS_PER_STRIP, _COUNTS, _PLANAR = 273, 277, 278, 279, 284
_PREDICTOR, _TILE_WIDTH, _TILE_HEIGHT, _TILE_OFFSETS, _TILE_COUNTS = 317, 322, 323, 324, 325
_EXTRA, _FORMAT = 338, 339
_FILL_ORDER = 266
_BLACK_IS_ZERO, _RGB, _WHITE_IS_ZERO = 1, 2, 0
_LOSSLESS = {1, 5, 8, 32773, 32946, 34925, 50000}
"""None, LZW, Deflate, PackBits, old Deflate, LZMA, Zstandard: what restores bytes as they were."""


def decode_image(path: Path, num_channels: int = 3) -> Pixels:
    """Decodes an image to `[h, w, num_channels]`, upright by its EXIF orientation.

    For three channels, grey, palette and CMYK become RGB. Alpha is dropped, so what is stored
    beneath it counts, unless the channels asked for include it. Any other number must be that of
    the file. Of several frames the first is taken; colour profiles are not applied.

    Returns:
        uint8, or uint16 for files of more than 8 bits, as they are: white is 65535, or less where
        the camera has fewer bits (`PixelConvention.white`).

    Raises:
        FaultError: Not a readable image of `IMAGE_FORMATS`, truncated, too large, of 32 bits or
            floating point, or of another number of channels.
    """
    with readable(path):
        tiff = read_tiff_header(path)
        if tiff is not None and _needs_detour(tiff, num_channels):
            pixels, num_colours = _decode_tiff(path, tiff)
        else:
            pixels, num_colours = _decode_with_pillow(path, num_channels)
    return _with_channels(pixels, num_colours, num_channels, path)


def _decode_with_pillow(path: Path, num_channels: int) -> tuple[Pixels, int]:
    """Pixels, and how many of their channels are not alpha."""
    with opened(path, IMAGE_FORMATS) as image:
        raw_mode = _raw_mode(image)
        if image.format == "PNG" and "16" in raw_mode:
            return _decode_png_16(path, image, raw_mode)
        if image.mode in {"I", "I;16", "I;16B", "I;16L"}:
            return _whole_numbers(path, image), 1
        if image.mode not in EIGHT_BIT_MODES:
            raise _unsupported(path, f"Pillow's mode {image.mode!r}")
        without_adobe = image.format == "JPEG" and "adobe" not in image.info
        # In place, and below without converting RGB: each copy takes a tenth of the decoding.
        ImageOps.exif_transpose(image, in_place=True)
        upright: Image.Image = image
        if upright.mode == "CMYK" and without_adobe:
            # Pillow takes every CMYK JPEG for one of Adobe's, which store ink inverted.
            upright = Image.merge("CMYK", [ImageOps.invert(ink) for ink in upright.split()])
        if num_channels == 3:
            if upright.mode == "P":
                # By way of RGBA: a palette with transparency warns otherwise.
                upright = upright.convert("RGBA")
            return np.array(upright if upright.mode == "RGB" else upright.convert("RGB")), 3
        return _channels_of(upright)


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
        return _oriented(values.astype(np.uint16), orientation), 1
    if raw_mode.startswith("RGB"):
        # Pillow keeps the high byte of each value; of the same bytes in the other order, the low.
        high = _decode_as(path, raw_mode).astype(np.uint16)
        high <<= 8
        high |= _decode_as(path, raw_mode.replace("16B", "16L"))
        return _oriented(high, orientation), 3
    with opened(path, ("PNG",)) as again:
        return _oriented(_whole_numbers(path, again), orientation), 1


def _decode_as(path: Path, raw_mode: str) -> NDArray[np.uint8]:
    with opened(path, ("PNG",)) as image:
        tiles = cast("list[Any]", getattr(image, "tile", []))
        image.tile = [(*tuple(tile)[:3], raw_mode) for tile in tiles]  # pyright: ignore[reportAttributeAccessIssue]
        return np.array(image)


def _whole_numbers(path: Path, image: Image.Image) -> NDArray[np.uint16]:
    values = np.array(image)
    if values.dtype != np.uint16 and values.size and (values.min() < 0 or values.max() > 65535):
        raise _unsupported(
            path, f"whole numbers from {values.min()} to {values.max()}, more than 16 bits hold"
        )
    return values.astype(np.uint16)[..., None]


def _oriented(pixels: Pixels, orientation: int) -> Pixels:
    """Stands `[h, w, c]` upright. Source: TIFF 6.0, tag 274."""
    match orientation:
        case 2:
            pixels = pixels[:, ::-1]
        case 3:
            pixels = pixels[::-1, ::-1]
        case 4:
            pixels = pixels[::-1]
        case 5:
            pixels = pixels.swapaxes(0, 1)
        case 6:
            pixels = pixels[::-1].swapaxes(0, 1)
        case 7:
            pixels = pixels[::-1, ::-1].swapaxes(0, 1)
        case 8:
            pixels = pixels[:, ::-1].swapaxes(0, 1)
        case _:
            pass
    return np.ascontiguousarray(pixels)


def _with_channels(pixels: Pixels, num_colours: int, num_channels: int, path: Path) -> Pixels:
    stored = pixels.shape[-1]
    if stored == num_channels:
        return pixels
    if num_colours == num_channels:
        return np.ascontiguousarray(pixels[..., :num_colours])
    if num_colours == 1 and num_channels == 3:
        return np.repeat(pixels[..., :1], 3, axis=-1)
    what = f"{num_colours} channel{'s' if num_colours > 1 else ''}"
    if stored > num_colours:
        what += " and alpha"
    raise FaultError(
        "encoding",
        path,
        f"{path} has {what}, but model.num_channels is {num_channels}. Convert the image, or set "
        f"model.num_channels, pixels.mean and pixels.std to what the images have.",
    )


def _unsupported(path: Path, what: str) -> FaultError:
    return FaultError(
        "encoding",
        path,
        f"{path} has {what}, which is neither 8 nor 16 bits a channel. Convert it to 8 or 16 bits, "
        f"scaled as you see fit.",
    )


# TIFF


def _bits(tags: ImageFileDirectory_v2) -> set[int]:
    return set(_numbers(tags, _BITS, (1,)))


def _numbers(tags: ImageFileDirectory_v2, tag: int, default: tuple[int, ...]) -> tuple[int, ...]:
    value = tags.get(tag, default)
    return value if isinstance(value, tuple) else (value,)


def _needs_detour(tags: ImageFileDirectory_v2, num_channels: int) -> bool:
    """Whether Pillow would not open a TIFF, or lose bits, a band or which end is white."""
    _check_tiles(tags)
    photometric, num_bands = tags.get(_PHOTOMETRIC, _BLACK_IS_ZERO), tags.get(_NUM_BANDS, 1)
    if photometric not in {_WHITE_IS_ZERO, _BLACK_IS_ZERO, _RGB}:
        return False
    if num_bands == 1:
        return photometric == _WHITE_IS_ZERO and _bits(tags) == {16}
    if _bits(tags) != {8} or photometric != _RGB:
        return True
    return num_bands != 3 and (num_bands - _num_alpha(tags) != 3 or num_channels != 3)


def _check_tiles(tags: ImageFileDirectory_v2) -> None:
    """A decoder makes room for a whole tile, whatever the image's size."""
    for tile, extent in ((_TILE_WIDTH, _WIDTH), (_TILE_HEIGHT, _HEIGHT)):
        if tile in tags and not 1 <= tags[tile] <= tags[extent] + 4096:
            raise ValueError(f"tiles of {tags[tile]} in an image of {tags[extent]} pixels")


def _decode_tiff(path: Path, tags: ImageFileDirectory_v2) -> tuple[Pixels, int]:
    """The bands of a TIFF, and how many of them are not alpha."""
    bits, compression = _bits(tags), tags.get(_COMPRESSION, 1)
    if _numbers(tags, _FORMAT, (1,))[0] == 3:
        raise _unsupported(path, "floating point values")
    if bits not in ({8}, {16}) or set(_numbers(tags, _FORMAT, (1,))) - {1, 4}:
        raise _unsupported(path, f"signed values, or values of {max(bits)} bits")
    if compression not in _LOSSLESS:
        raise FaultError(
            "encoding",
            path,
            f"{path} has bands that are stored by compression {compression}, which is not read for "
            f"several bands. Save it with LZW, Deflate or no compression.",
        )
    pixels = _tiff_bands(path, tags, bits.pop())
    if tags.get(_PHOTOMETRIC, _BLACK_IS_ZERO) == _WHITE_IS_ZERO:
        pixels = np.iinfo(pixels.dtype).max - pixels
    return pixels, pixels.shape[-1] - _num_alpha(tags)


def _num_alpha(tags: ImageFileDirectory_v2) -> int:
    """Bands that are alpha: one marked so, and a fourth of RGB that is not marked at all.

    An extra band marked as "unspecified" is data, such as near infrared.
    """
    is_rgb = tags.get(_PHOTOMETRIC, _BLACK_IS_ZERO) == _RGB
    extra = _numbers(tags, _EXTRA, ())
    if tags.get(_NUM_BANDS, 1) != (4 if is_rgb else 2) or 0 in extra:
        return 0
    return 1 if extra or is_rgb else 0


def _tiff_bands(path: Path, tags: ImageFileDirectory_v2, bits: int) -> Pixels:
    size, num_bands = tiff_size(tags), tags.get(_NUM_BANDS, 1)
    if type(num_bands) is not int or not 1 <= num_bands <= MAX_VALUES_A_PIXEL:
        raise ValueError(f"a TIFF of {num_bands} bands; at most {MAX_VALUES_A_PIXEL} are read")
    check_not_a_bomb(Size(size.height, size.width * num_bands))
    height, width = tags[_HEIGHT], tags[_WIDTH]
    with path.open("rb") as file:
        little = file.read(1) == b"I"
    data, offsets, counts = _pieces(path, tags, 2 * height * width * num_bands * bits // 8)
    # One plane of chunky pixels, or a plane a band.
    planes = num_bands if tags.get(_PLANAR, 1) == 2 and num_bands > 1 else 1
    bands = num_bands // planes
    if len(offsets) % planes:
        raise ValueError(f"{len(offsets)} strips or tiles for {planes} planes")
    decoded: list[Pixels] = []
    for plane in range(planes):
        wide = _as_grey(
            data,
            _share(offsets, plane, planes),
            _share(counts, plane, planes),
            tags,
            bands,
            bits,
            little=little,
        )
        with Image.open(io.BytesIO(wide), formats=("TIFF",)) as image:
            values = np.array(image)
        dtype = np.uint8 if bits == 8 else np.uint16
        values = values.astype(dtype, copy=False).reshape(height, width, bands)
        if tags.get(_PREDICTOR, 1) == 2:
            tile_width = tags.get(_TILE_WIDTH, width)
            for left in range(0, width, tile_width):
                part = values[:, left : left + tile_width]
                np.cumsum(part, axis=1, dtype=dtype, out=part)
        decoded.append(values)
    pixels = decoded[0] if planes == 1 else np.concatenate(decoded, axis=-1)
    return _oriented(pixels, tags.get(ORIENTATION, 1))


def _share(values: Sequence[int], plane: int, num_planes: int) -> Sequence[int]:
    share = len(values) // num_planes
    return values[plane * share : (plane + 1) * share]


def _pieces(
    path: Path, tags: ImageFileDirectory_v2, num_bytes: int
) -> tuple[bytes, list[int], list[int]]:
    """The strips or tiles of the first image, behind room for a header; where they begin; lengths.

    Raises:
        ValueError: They are not within the file, or more than `num_bytes` and some.
    """
    tiled = _TILE_WIDTH in tags
    places = _numbers(tags, _TILE_OFFSETS if tiled else _OFFSETS, ())
    counts = _numbers(tags, _TILE_COUNTS if tiled else _COUNTS, ())
    if not places or len(places) != len(counts):
        raise ValueError(f"{len(places)} strips or tiles of {len(counts)} lengths")
    # Tiles reach over the edge, and a codec may make noise longer.
    if sum(counts) > num_bytes + (1 << 24):
        raise ValueError(f"strips of {sum(counts)} bytes for an image of {num_bytes // 2}")
    pieces, offsets, end = [bytes(8)], list[int](), 8
    with path.open("rb") as file:
        for place, count in zip(places, counts, strict=True):
            file.seek(place)
            pieces.append(file.read(count))
            if len(pieces[-1]) != count:
                raise ValueError("the file ends before its strips do")
            offsets.append(end)
            end += count
    return b"".join(pieces), offsets, list(counts)


def _as_grey(
    data: bytes,
    offsets: Sequence[int],
    counts: Sequence[int],
    tags: ImageFileDirectory_v2,
    bands: int,
    bits: int,
    *,
    little: bool,
) -> bytes:
    """A TIFF that calls a plane of `bands` values a pixel a wide grey image.

    Strips and tiles hold the same bytes either way. A predictor is left for us to undo, since it
    works over the distance of a pixel, which the tags no longer tell.
    """
    if tags.get(_FILL_ORDER, 1) != 1:
        raise ValueError("bits in reverse order (FillOrder 2) are not read")
    tiled = _TILE_WIDTH in tags
    wide: dict[int, Sequence[int]] = {
        _WIDTH: (tags[_WIDTH] * bands,),
        _HEIGHT: (tags[_HEIGHT],),
        _BITS: (bits,),
        _COMPRESSION: (tags.get(_COMPRESSION, 1),),
        _PHOTOMETRIC: (_BLACK_IS_ZERO,),
        _NUM_BANDS: (1,),
        _TILE_OFFSETS if tiled else _OFFSETS: offsets,
        _TILE_COUNTS if tiled else _COUNTS: counts,
    }
    if tiled:
        wide[_TILE_WIDTH] = (tags[_TILE_WIDTH] * bands,)
        wide[_TILE_HEIGHT] = (tags[_TILE_HEIGHT],)
    else:
        wide[_ROWS_PER_STRIP] = (min(tags.get(_ROWS_PER_STRIP, tags[_HEIGHT]), tags[_HEIGHT]),)
    order = "<" if little else ">"
    body = data + bytes(len(data) % 2)
    head = struct.pack(f"{order}2sHI", b"II" if little else b"MM", 42, len(body))
    return head + body[8:] + _directory(wide, len(body), order)


def _directory(tags: dict[int, Sequence[int]], start: int, order: str) -> bytes:
    """Tags of 32-bit numbers as they lie in a file, from `start` on."""
    entries, arrays = b"", b""
    behind = start + 2 + 12 * len(tags) + 4
    for tag, values in sorted(tags.items()):
        packed = struct.pack(f"{order}{len(values)}I", *values)
        entries += struct.pack(f"{order}HHI", tag, 4, len(values))
        if len(values) == 1:
            entries += packed
        else:
            entries += struct.pack(f"{order}I", behind + len(arrays))
            arrays += packed
    return struct.pack(f"{order}H", len(tags)) + entries + bytes(4) + arrays


# Opening


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """What a decoder raises inside the block becomes a FaultError that names the file."""
    try:
        yield
    except DECODER_ERRORS as error:
        raise FaultError(
            "unreadable",
            path,
            f"{path} cannot be decoded: {error}. Replace it, or remove it with its partner.",
        ) from error


@contextmanager
def opened(path: Path, formats: tuple[str, ...]) -> Iterator[Image.Image]:
    """An open image whose header claims no more pixels than are harmless; see `readable`."""
    with readable(path), Image.open(path, formats=formats) as image:
        check_not_a_bomb(Size(image.height, image.width))
        # Without a name Pillow maps no file: it would map the rows of a TIFF that its orientation
        # turns by a quarter at the length that they have afterwards.
        image.filename = ""
        yield image


def describe_image(path: Path) -> ImageFacts:
    """What an image's header says of it.

    Raises:
        DataError: The header cannot be read.
    """
    size = read_size(path)
    with readable(path):
        tiff = read_tiff_header(path)
        if tiff is not None:
            return ImageFacts(
                size=size,
                orientation=tiff.get(ORIENTATION, 1),
                num_frames=_num_frames(path),
                bits=max(_bits(tiff)),
            )
        with opened(path, IMAGE_FORMATS) as image:
            raw_mode = _raw_mode(image)
            return ImageFacts(
                size=size,
                orientation=image.getexif().get(ORIENTATION, 1),
                num_frames=getattr(image, "n_frames", 1),
                bits=16 if "16" in raw_mode and image.format == "PNG" else 8,
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
    orientation = 1
    if size == Size(image_size.width, image_size.height):
        with suppress(DataError):
            orientation = describe_image(image).orientation
    if orientation in {5, 6, 7, 8}:
        return FaultError(
            "rotated",
            path,
            f"{what} is {size}, as image {image} is stored, before its EXIF orientation "
            f"{orientation} makes it {image_size}. Turn the mask like the image.",
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


def _num_frames(path: Path) -> int:
    try:
        with Image.open(path, formats=("TIFF",)) as image:
            return getattr(image, "n_frames", 1)
    except DECODER_ERRORS:  # Bands that Pillow does not open.
        return 1


def viewable(image: Pixels, pixels: PixelConvention) -> NDArray[np.uint8]:
    """An image as RGB of 8 bits, to look at: its first three channels, or the first as grey."""
    if image.shape[-1] != 3:
        image = image[..., :3] if image.shape[-1] > 3 else np.repeat(image[..., :1], 3, axis=-1)
    if image.dtype == np.uint8:
        return cast("NDArray[np.uint8]", image)
    scaled = image.astype(np.float32) * np.float32(255 / pixels.white)
    return np.rint(scaled.clip(0, 255)).astype(np.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """What a header says of an image.

    Attributes:
        size: As it is seen.
        orientation: Its EXIF orientation, 1 for upright.
        num_frames: The first of them is read.
        bits: Of a channel.
    """

    size: Size
    orientation: int
    num_frames: int
    bits: int
