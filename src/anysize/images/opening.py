"""Opens image files safely, and turns what is read upright."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from anysize.faults import FaultError
from anysize.geometry import Size
from anysize.images.headers import DECODER_ERRORS, check_not_a_bomb, why_unreadable

Pixels = NDArray[np.uint8 | np.uint16]
Value = TypeVar("Value", bound=np.generic)

LARGEST_WHOLE = 1 << 29
"""Most pixels of an image that is decoded at once where a person named it: 1.6 GB as RGB."""


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """What a decoder raises inside the block becomes a FaultError that names the file.

    Memory that runs out is no fault of the file; its error only gets a note.
    """
    try:
        yield
    except DECODER_ERRORS as error:
        raise FaultError(
            "unreadable", path, f"{path} cannot be decoded: {why_unreadable(path, error)}"
        ) from error
    except MemoryError as error:
        error.add_note(f"while reading {path}")
        raise


@contextmanager
def opened(path: Path, formats: tuple[str, ...]) -> Iterator[Image.Image]:
    """An open image whose header claims no more pixels than are harmless; see `readable`."""
    with readable(path), Image.open(path, formats=formats) as image:
        check_not_a_bomb(Size(image.height, image.width))
        # Without a name Pillow maps no file: it would map the rows of a TIFF that its orientation
        # turns by a quarter at the length that they have afterwards.
        image.filename = ""
        yield image


@contextmanager
def larger_images(limit: int | None) -> Iterator[None]:
    """Changes how many pixels count as harmless; for one thread that reads what a person named."""
    before = Image.MAX_IMAGE_PIXELS
    Image.MAX_IMAGE_PIXELS = limit
    try:
        yield
    finally:
        Image.MAX_IMAGE_PIXELS = before


def upright(pixels: NDArray[Value], orientation: int) -> NDArray[Value]:
    """Stands `[h, w, ...]` upright. Source: TIFF 6.0, tag 274."""
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


def stand_upright(labels: NDArray[Value], orientation: int) -> NDArray[Value]:
    """Turns `[..., h, w]` from the frame of the stored image to that of the upright one."""
    turned = upright(np.moveaxis(labels, (-2, -1), (0, 1)), orientation)
    return np.ascontiguousarray(np.moveaxis(turned, (0, 1), (-2, -1)))
