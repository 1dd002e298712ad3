"""One file of a mask as it is stored: values, a palette, or colours, in a PNG, BMP or TIFF.

What a file holds is told by its content. Labels are never guessed at: a format or a mode that may
have changed them, or that can be read in two ways, is refused with the reason.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from anysize.errors import DataError
from anysize.faults import Fault, FaultError
from anysize.geometry import Size
from anysize.images.formats import LABEL_FORMATS, format_of
from anysize.images.headers import NUM_THREADS, Frame, png_may_be_turned, read_frame
from anysize.images.opening import opened, upright

Style = Literal["grey", "palette", "colour"]

Values = NDArray[np.uint8 | np.uint16 | np.int32]

_PNG_STYLES: dict[int, Style] = {0: "grey", 2: "colour", 3: "palette", 4: "grey", 6: "colour"}
_MODE_STYLES: dict[str, Style] = {
    "1": "grey",
    "L": "grey",
    "LA": "grey",
    "I;16": "grey",
    "I;16B": "grey",
    "I": "grey",
    "P": "palette",
    "RGB": "colour",
    "RGBA": "colour",
}
_BITS, _PHOTOMETRIC, _WHITE_IS_ZERO = 258, 262, 0  # Tags of a TIFF. Source: TIFF 6.0.


class MaskHeader(NamedTuple):
    """What the header of a mask says.

    Attributes:
        frame: Its size as it is stored, and its own EXIF orientation.
        style: Values alone, indices of a palette, or red, green and blue.
        bits: Of a value.
        palette: The colour of each index, see `colour_codes`.
        num_pages: More than one only in a TIFF.
    """

    frame: Frame
    style: Style
    bits: int
    palette: tuple[int, ...]
    num_pages: int


class MaskPixels(NamedTuple):
    """A mask as it is stored, before anything is made of it.

    Attributes:
        values: Whole numbers `[h, w]`: those of a grey file, indices of a palette, or what all
            three channels of an RGB file hold; None where its channels differ.
        colours: Codes `[h, w]` of RGB files, see `colour_codes`; None for others.
    """

    values: Values | None
    colours: NDArray[np.int32] | None


def read_mask_headers(paths: Iterable[Path]) -> dict[Path, MaskHeader | Fault]:
    """The headers of many masks; in the place of one that cannot be used is what is wrong."""
    listed = list(paths)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return dict(zip(listed, pool.map(_header_or_fault, listed), strict=True))


def _header_or_fault(path: Path) -> MaskHeader | Fault:
    try:
        return read_mask_header(path)
    except FaultError as error:
        return error.fault


def read_mask_header(path: Path) -> MaskHeader:
    """Reads the header of a mask.

    Raises:
        FaultError: It cannot be read, or is of a format or a mode that labels are not read from.
    """
    try:
        found = format_of(path)
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror}."
        raise FaultError("unreadable", path, message) from None
    if found is None:
        message = f"{path} is not a PNG, BMP or TIFF file. Save the mask as one of them."
        raise FaultError("encoding", path, message)
    if found.no_labels:
        raise FaultError(
            "encoding",
            path,
            f"{path} is {found.name}, which is no format for masks. {found.no_labels}",
        )
    return _png_header(path) if found.name == "PNG" else _other_header(path)


def _png_header(path: Path) -> MaskHeader:
    """By its chunks, which takes a tenth of the time that Pillow needs."""
    with path.open("rb") as file:
        head = file.read(33)
        if len(head) < 33 or head[12:16] != b"IHDR":
            message = f"{path} is a truncated PNG. Replace it, or remove it with its partner."
            raise FaultError("unreadable", path, message)
        width, height, bits, colour_type = struct.unpack(">IIBB", head[16:26])
        palette = b""
        while len(chunk := file.read(8)) == 8:
            length, name = struct.unpack(">I4s", chunk)
            if name == b"PLTE":
                palette = file.read(min(length, 768))
            if name in {b"PLTE", b"IDAT"}:
                break
            file.seek(length + 4, 1)
    style = _PNG_STYLES.get(colour_type)
    if style is None or (bits > 8 and colour_type != 0):
        raise _refused(path, f"a PNG of colour type {colour_type} with {bits} bits")
    turned = png_may_be_turned(path)
    return MaskHeader(
        frame=_frame(path) if turned else Frame(Size(height, width), 1),
        style=style,
        bits=bits,
        palette=tuple(_codes_of(palette)) if style == "palette" else (),
        num_pages=1,
    )


def _other_header(path: Path) -> MaskHeader:
    frame = _frame(path)
    with opened(path, LABEL_FORMATS) as image:
        style = _MODE_STYLES.get(image.mode)
        if style is None:
            what = "floating point values" if image.mode == "F" else f"Pillow's mode {image.mode!r}"
            raise _refused(path, what)
        tags = getattr(image, "tag_v2", {})
        if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:
            raise _refused(path, "values of which 0 is white, so that viewers invert them")
        palette = ()
        if image.mode == "P":
            palette = tuple(_codes_of(bytes(image.getpalette("RGB") or ())))
        bits = tags.get(_BITS, (8,))
        return MaskHeader(
            frame=frame,
            style=style,
            bits=max(bits) if isinstance(bits, tuple) else bits,
            palette=palette,
            num_pages=getattr(image, "n_frames", 1),
        )


def _frame(path: Path) -> Frame:
    try:
        return read_frame(path)
    except DataError as error:
        raise FaultError("unreadable", path, str(error)) from None


def _codes_of(palette: bytes) -> list[int]:
    whole = palette[: len(palette) // 3 * 3]
    return colour_codes(np.frombuffer(whole, np.uint8).reshape(-1, 3)).tolist()


def _refused(path: Path, what: str) -> FaultError:
    return FaultError(
        "encoding",
        path,
        f"{path} has {what}. A mask is a PNG, BMP or TIFF of whole numbers (grey or palette, ids "
        f"as they are), or of colours with 8 bits a channel. Save it so.",
    )


def read_mask_pixels(path: Path, header: MaskHeader, *, turned: bool) -> MaskPixels:
    """Decodes a mask.

    Args:
        path: The file.
        header: Its own.
        turned: Whether its EXIF orientation is applied.

    Raises:
        FaultError: It cannot be decoded, or has transparent pixels that mean one or another thing.
    """
    with opened(path, LABEL_FORMATS) as image:
        array = np.array(image)
        is_tiff = image.format == "TIFF"
    # Pillow turns TIFFs on its own, and nothing else.
    orientation = header.frame.orientation
    if is_tiff and not turned:
        array = upright(array, {6: 8, 8: 6}.get(orientation, orientation))
    elif turned and not is_tiff:
        array = upright(array, orientation)
    if array.ndim == 3 and array.shape[-1] in {2, 4}:
        array = _opaque(path, array)
    if array.ndim == 2:
        return MaskPixels(_plain(array, header), None)
    colours = cast("NDArray[np.uint8]", array)
    equal = (colours[..., 0] == colours[..., 1]).all() and (
        colours[..., 1] == colours[..., 2]
    ).all()
    return MaskPixels(colours[..., 0] if equal else None, colour_codes(colours))


def _plain(array: NDArray[np.generic], header: MaskHeader) -> Values:
    """Values as the file holds them."""
    if array.dtype == np.bool_:
        return array.astype(np.uint8)
    if header.style == "grey" and header.bits in {2, 4}:
        # Pillow stretches 2 and 4 bits of grey to 0..255; PNG optimisers store small ids that way.
        return cast("NDArray[np.uint8]", array) // (255 // (2**header.bits - 1))
    return cast("Values", array)


def _opaque(path: Path, array: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Without alpha, where it changes nothing: everywhere opaque, or transparent over black."""
    alpha, rest = array[..., -1], array[..., :-1]
    doubtful = (alpha != 255) & ((alpha != 0) | rest.any(axis=-1))
    if doubtful.any():
        raise FaultError(
            "encoding",
            path,
            f"{path} has {np.count_nonzero(doubtful)} pixels that are transparent, but not over "
            f"black: they may mean their colour, or no label. Save the mask without alpha.",
        )
    return rest[..., 0] if rest.shape[-1] == 1 else rest


def colour_codes(colours: NDArray[np.uint8]) -> NDArray[np.int32]:
    """RGB `[..., 3]` as one number a colour."""
    wide = colours.astype(np.int32)
    return (wide[..., 0] << 16) | (wide[..., 1] << 8) | wide[..., 2]
