"""Decodes TIFFs that Pillow would not open or would cut: 16 bits, many bands, floats; also by rows.

The strips or tiles of the file are put into another TIFF in memory, whose tags call each plane one
wide grey image; Pillow's decoders then restore the bytes. Only those strips and tiles are read that
the rows asked for lie in, so an image may be larger than memory.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from anysize.faults import FaultError
from anysize.geometry import Size, ceil_div
from anysize.images.headers import MAX_VALUES_A_PIXEL, check_not_a_bomb, tiff_frame
from anysize.images.opening import Pixels, upright

# Tags of a TIFF. Source: TIFF 6.0.
_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC = 256, 257, 258, 259, 262
_OFFSETS, _NUM_BANDS, _ROWS_PER_STRIP, _COUNTS, _PLANAR = 273, 277, 278, 279, 284
_PREDICTOR, _TILE_WIDTH, _TILE_HEIGHT, _TILE_OFFSETS, _TILE_COUNTS = 317, 322, 323, 324, 325
_EXTRA, _FORMAT = 338, 339
_FILL_ORDER = 266
_BLACK_IS_ZERO, _RGB, _WHITE_IS_ZERO = 1, 2, 0
_PREMULTIPLIED = 1
_LOSSLESS = {1, 5, 8, 32773, 32946, 34925, 50000}
"""None, LZW, Deflate, PackBits, old Deflate, LZMA, Zstandard: what restores bytes as they were."""

_FLOAT, _FLOAT_WHITE = 3, 65535

_DOUBLE, _ASCII, _SHORT = 12, 2, 3
GEO_TAGS = {33550: _DOUBLE, 33922: _DOUBLE, 34264: _DOUBLE, 34735: _SHORT, 34736: _DOUBLE}
GEO_TAGS[34737] = _ASCII
"""Tags that tie an image to the ground, and their types. Source: OGC GeoTIFF 1.1, section 7."""


def needs_bands(tags: ImageFileDirectory_v2, num_channels: int) -> bool:
    """Whether Pillow would not open a TIFF, or lose bits, a band or which end is white."""
    _check_tiles(tags)
    photometric, num_bands = tags.get(_PHOTOMETRIC, _BLACK_IS_ZERO), tags.get(_NUM_BANDS, 1)
    if photometric not in {_WHITE_IS_ZERO, _BLACK_IS_ZERO, _RGB}:
        return False
    if _numbers(tags, _FORMAT, (1,))[0] == _FLOAT:
        return True
    if num_bands == 1:
        return photometric == _WHITE_IS_ZERO and _bits(tags) == {16}
    if _bits(tags) != {8} or photometric != _RGB:
        return True
    return num_bands != 3 and (num_bands - _num_alpha(tags) != 3 or num_channels != 3)


def can_read_rows(tags: ImageFileDirectory_v2) -> bool:
    """Whether some rows of a TIFF can be read without the others."""
    return (
        tags.get(_PHOTOMETRIC, _BLACK_IS_ZERO) in {_WHITE_IS_ZERO, _BLACK_IS_ZERO, _RGB}
        and (_bits(tags) in ({8}, {16}) or _numbers(tags, _FORMAT, (1,))[0] == _FLOAT)
        and tags.get(_COMPRESSION, 1) in _LOSSLESS
        and tiff_frame(tags).orientation == 1
    )


def decode_bands(
    path: Path,
    tags: ImageFileDirectory_v2,
    num_channels: int,
    *,
    float_range: Sequence[float] = (),
    rows: tuple[int, int] | None = None,
) -> tuple[Pixels, int]:
    """The bands of a TIFF, upright, and how many of them are not alpha.

    Args:
        path: The file.
        tags: Of its first image.
        num_channels: That are wanted: colours are divided by an alpha that is not among them, where
            they were multiplied by it.
        float_range: The values of black and of white in files of floating point; see
            `PixelConvention.float_range`.
        rows: Only rows from the first to before the second, of an image that is stored upright.

    Raises:
        FaultError: Values of another kind than 8 or 16 bits, or floating point without a range.
        DECODER_ERRORS: The file is damaged.
    """
    bits, kinds = _bits(tags), set(_numbers(tags, _FORMAT, (1,)))
    is_float = _FLOAT in kinds
    if is_float and not float_range:
        raise FaultError(
            "encoding",
            path,
            f"{path} has floating point values, and nothing says which are black and white. Set "
            f"pixels.float_range to both, such as [0.0, 1.0], or convert it to 8 or 16 bits.",
        )
    if bits != {32} if is_float else (bits not in ({8}, {16}) or kinds - {1, 4}):
        what = "floating point" if is_float else "signed values, or values"
        raise unsupported(path, f"{what} of {max(bits)} bits")
    compression = tags.get(_COMPRESSION, 1)
    if compression not in _LOSSLESS:
        raise FaultError(
            "encoding",
            path,
            f"{path} has bands that are stored by compression {compression}, which is not read for "
            f"several bands. Save it with LZW, Deflate or no compression.",
        )
    if is_float and tags.get(_PREDICTOR, 1) != 1:
        raise unsupported(path, "floating point values stored with a predictor")
    stored = _bands(path, tags, bits.pop(), rows or (0, tags[_HEIGHT]))
    pixels = _scaled(path, stored, float_range) if is_float else cast("Pixels", stored)
    if tags.get(_PHOTOMETRIC, _BLACK_IS_ZERO) == _WHITE_IS_ZERO:
        pixels = np.iinfo(pixels.dtype).max - pixels
    num_colours = pixels.shape[-1] - _num_alpha(tags)
    dropped = num_colours < pixels.shape[-1] != num_channels
    if dropped and _numbers(tags, _EXTRA, ()) == (_PREMULTIPLIED,):
        pixels = _without_premultiplication(pixels)
    return upright(pixels, tiff_frame(tags).orientation), num_colours


def geo_tags(tags: ImageFileDirectory_v2) -> dict[int, object]:
    """What ties a TIFF to the ground, by tag; empty where it is turned, so that it ties no mask."""
    if tiff_frame(tags).orientation != 1:
        return {}
    return {tag: tags[tag] for tag in GEO_TAGS if tag in tags}


def unsupported(path: Path, what: str) -> FaultError:
    """The fault of an image whose values cannot be taken as they are."""
    return FaultError(
        "encoding",
        path,
        f"{path} has {what}, which is neither 8 nor 16 bits a channel. Convert it to 8 or 16 bits, "
        f"scaled as you see fit.",
    )


def _scaled(path: Path, values: NDArray[np.generic], float_range: Sequence[float]) -> Pixels:
    """Floats as 16 bits, from black to white of the range; what lies outside is cut to it."""
    floats = values.astype(np.float64)
    missing = np.count_nonzero(~np.isfinite(floats))
    if missing:
        raise FaultError(
            "encoding",
            path,
            f"{path} has {missing} values that are not finite, such as NaN for missing data. Fill "
            f"them before training.",
        )
    black, white = float_range
    floats = (floats - black) * (_FLOAT_WHITE / (white - black))
    return np.rint(floats.clip(0, _FLOAT_WHITE)).astype(np.uint16)


def _without_premultiplication(pixels: Pixels) -> Pixels:
    """Colours as they were before they were multiplied by the alpha behind them."""
    most = np.iinfo(pixels.dtype).max
    alpha = pixels[..., -1:].astype(np.float64)
    colours = pixels[..., :-1] * (most / np.where(alpha == 0, most, alpha))
    whole = np.rint(colours.clip(0, most)).astype(pixels.dtype)
    return np.concatenate([whole, pixels[..., -1:]], axis=-1)


def _bits(tags: ImageFileDirectory_v2) -> set[int]:
    return set(_numbers(tags, _BITS, (1,)))


def _numbers(tags: ImageFileDirectory_v2, tag: int, default: tuple[int, ...]) -> tuple[int, ...]:
    value = tags.get(tag, default)
    return value if isinstance(value, tuple) else (value,)


def _check_tiles(tags: ImageFileDirectory_v2) -> None:
    """A decoder makes room for a whole tile, whatever the image's size."""
    for tile, extent in ((_TILE_WIDTH, _WIDTH), (_TILE_HEIGHT, _HEIGHT)):
        if tile in tags and not 1 <= tags[tile] <= tags[extent] + 4096:
            raise ValueError(f"tiles of {tags[tile]} in an image of {tags[extent]} pixels")


def _num_alpha(tags: ImageFileDirectory_v2) -> int:
    """Bands that are alpha: one marked so, and a fourth of RGB that is not marked at all.

    An extra band marked as "unspecified" is data, such as near infrared.
    """
    is_rgb = tags.get(_PHOTOMETRIC, _BLACK_IS_ZERO) == _RGB
    extra = _numbers(tags, _EXTRA, ())
    if tags.get(_NUM_BANDS, 1) != (4 if is_rgb else 2) or 0 in extra:
        return 0
    return 1 if extra or is_rgb else 0


def _bands(
    path: Path, tags: ImageFileDirectory_v2, bits: int, rows: tuple[int, int]
) -> NDArray[np.generic]:
    """Rows of a TIFF as they are stored, `[h, w, bands]`."""
    _check_tiles(tags)
    num_bands, width, height = tags.get(_NUM_BANDS, 1), tags[_WIDTH], tags[_HEIGHT]
    if type(num_bands) is not int or not 1 <= num_bands <= MAX_VALUES_A_PIXEL:
        raise ValueError(f"a TIFF of {num_bands} bands; at most {MAX_VALUES_A_PIXEL} are read")
    check_not_a_bomb(Size(rows[1] - rows[0], width * num_bands))
    with path.open("rb") as file:
        little = file.read(1) == b"I"
    # One plane of chunky pixels, or one plane per band.
    planes = num_bands if tags.get(_PLANAR, 1) == 2 and num_bands > 1 else 1
    bands = num_bands // planes
    dtype = {8: np.uint8, 16: np.uint16, 32: np.float32}[bits]
    piece_height, across = _grid(tags)
    first, last = rows[0] // piece_height, ceil_div(rows[1], piece_height)
    begin, end = first * piece_height, min(last * piece_height, height)
    places = _places(tags, planes)
    decoded: list[NDArray[np.generic]] = []
    for plane in range(planes):
        wanted = places[plane][first * across : last * across]
        most = 2 * (end - begin) * width * bands * bits // 8
        data, offsets, counts = _pieces(path, wanted, most)
        wide = _as_grey(data, offsets, counts, tags, bands, bits, end - begin, little=little)
        with Image.open(io.BytesIO(wide), formats=("TIFF",)) as image:
            values = np.array(image)
        values = values.astype(dtype, copy=False).reshape(end - begin, width, bands)
        if tags.get(_PREDICTOR, 1) == 2:
            tile_width = tags.get(_TILE_WIDTH, width)
            for left in range(0, width, tile_width):
                part = values[:, left : left + tile_width]
                np.cumsum(part, axis=1, dtype=dtype, out=part)
        decoded.append(values[rows[0] - begin : rows[1] - begin])
    return decoded[0] if planes == 1 else np.concatenate(decoded, axis=-1)


def _grid(tags: ImageFileDirectory_v2) -> tuple[int, int]:
    """Rows of a strip or tile, and how many of them lie side by side."""
    if _TILE_WIDTH in tags:
        return tags[_TILE_HEIGHT], ceil_div(tags[_WIDTH], tags[_TILE_WIDTH])
    rows = min(tags.get(_ROWS_PER_STRIP, tags[_HEIGHT]), tags[_HEIGHT])
    if type(rows) is not int or rows < 1:
        raise ValueError(f"strips of {rows} rows")
    return rows, 1


def _places(tags: ImageFileDirectory_v2, planes: int) -> list[list[tuple[int, int]]]:
    """Where the strips or tiles of each plane begin in the file, and their lengths.

    Raises:
        ValueError: The tags do not list all of them.
    """
    tiled = _TILE_WIDTH in tags
    places = _numbers(tags, _TILE_OFFSETS if tiled else _OFFSETS, ())
    counts = _numbers(tags, _TILE_COUNTS if tiled else _COUNTS, ())
    if not places or len(places) != len(counts):
        raise ValueError(f"{len(places)} strips or tiles of {len(counts)} lengths")
    if len(places) % planes:
        raise ValueError(f"{len(places)} strips or tiles for {planes} planes")
    share = len(places) // planes
    pieces = list(zip(places, counts, strict=True))
    return [pieces[i * share : (i + 1) * share] for i in range(planes)]


def _pieces(
    path: Path, wanted: Sequence[tuple[int, int]], most: int
) -> tuple[bytes, list[int], list[int]]:
    """Strips or tiles, behind room for a header; where they begin now; their lengths.

    Raises:
        ValueError: They are not within the file, or more than `most` bytes and some.
    """
    # Tiles reach over the edge, and a codec may make noise longer.
    total = sum(count for _, count in wanted)
    if total > most + (1 << 24):
        raise ValueError(f"strips of {total} bytes for rows of {most // 2}")
    pieces, offsets, end = [bytes(8)], list[int](), 8
    with path.open("rb") as file:
        for place, count in wanted:
            file.seek(place)
            pieces.append(file.read(count))
            if len(pieces[-1]) != count:
                raise ValueError("the file ends before its strips do")
            offsets.append(end)
            end += count
    return b"".join(pieces), offsets, [count for _, count in wanted]


def _as_grey(
    data: bytes,
    offsets: Sequence[int],
    counts: Sequence[int],
    tags: ImageFileDirectory_v2,
    bands: int,
    bits: int,
    height: int,
    *,
    little: bool,
) -> bytes:
    """A TIFF that calls a plane of `bands` values a pixel a wide grey image of `height` rows.

    Strips and tiles hold the same bytes either way. A predictor is left for us to undo, since it
    works over the distance of a pixel, which the tags no longer tell.
    """
    if tags.get(_FILL_ORDER, 1) != 1:
        raise ValueError("bits in reverse order (FillOrder 2) are not read")
    tiled = _TILE_WIDTH in tags
    wide: dict[int, Sequence[int]] = {
        _WIDTH: (tags[_WIDTH] * bands,),
        _HEIGHT: (height,),
        _BITS: (bits,),
        _COMPRESSION: (tags.get(_COMPRESSION, 1),),
        _PHOTOMETRIC: (_BLACK_IS_ZERO,),
        _NUM_BANDS: (1,),
        _FORMAT: (_FLOAT if bits == 32 else 1,),
        _TILE_OFFSETS if tiled else _OFFSETS: offsets,
        _TILE_COUNTS if tiled else _COUNTS: counts,
    }
    if tiled:
        wide[_TILE_WIDTH] = (tags[_TILE_WIDTH] * bands,)
        wide[_TILE_HEIGHT] = (tags[_TILE_HEIGHT],)
    else:
        wide[_ROWS_PER_STRIP] = (min(_grid(tags)[0], height),)
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
