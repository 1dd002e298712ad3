"""Whether a mask lies turned against its image, judged by their edges.

An image with an EXIF orientation has two frames: as it is stored, and upright. A mask that was
drawn over the stored pixels fits the upright image only once it is turned as well. Where height and
width differ, sizes show that; in a square image, or after half a turn or a mirror, only the content
does. Borders of labels mostly run along edges of the image, so the strength of the image's edges is
compared between the border pixels of the mask as it is and those of the mask turned.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from anysize.data.classes import Classes
from anysize.data.masks import decode_mask
from anysize.data.reading import Sample
from anysize.faults import FaultError
from anysize.images.formats import format_by_suffix
from anysize.images.headers import read_frame
from anysize.images.opening import Pixels, stand_upright

MIN_BORDER = 100
"""Border pixels that each way must have of its own; fewer say nothing."""

SUSPECTED, CLEAR = 0.65, 0.8
"""Agreement from which a mask is suspected to be turned, and from which it is taken to be;
docs/check.md has the error rates on real images that they were chosen by."""

WORTH = 0.6
"""Share of a random pixel's edges that those under the turned borders must surpass."""

_LONGEST_SIDE = 1024


def turn_of(
    sample: Sample, image: Pixels, labels: NDArray[np.uint8], classes: Classes
) -> Turn | None:
    """What the image's edges say of the mask; None where there is nothing to be turned by."""
    orientation = read_frame(sample.image).orientation
    if orientation == 1 or any(_own_orientation(path) != 1 for path in sample.masks):
        return None
    turned = labels_turned(sample, labels, orientation, classes)
    agreement = None if turned is None else compare_edges(image, labels, turned)
    return None if agreement is None else Turn(orientation, agreement)


def labels_turned(
    sample: Sample, labels: NDArray[np.uint8], orientation: int, classes: Classes
) -> NDArray[np.uint8] | None:
    """A sample's labels as if they had been made over the image as it is stored.

    Shapes have no size of their own, so they are drawn again at that of the stored image.
    """
    if sample.encoding.kind in {"labelme", "coco", "polygons"}:
        if sample.encoding.orientation != "auto":
            return None
        encoding = replace(sample.encoding, orientation="apply")
        with contextlib.suppress(FaultError):
            return decode_mask(replace(sample, encoding=encoding), classes)
        return None
    square = sample.size.height == sample.size.width
    return stand_upright(labels, orientation) if orientation < 5 or square else None


def _own_orientation(path: Path) -> int:
    return 1 if format_by_suffix(path) is None else read_frame(path).orientation


class Turn(NamedTuple):
    """How a mask would be turned by its image's EXIF orientation, and what speaks for it."""

    orientation: int
    agreement: Agreement


class Agreement(NamedTuple):
    """How well the turned mask fits, against the mask as it is.

    Attributes:
        turned: Probability that the image's edge under a border of the turned mask is stronger than
            one under a border of the mask as it is; 0.5 where nothing speaks for either.
        over_chance: Probability that it is stronger than one under any pixel.
    """

    turned: float
    over_chance: float


def compare_edges(
    image: NDArray[np.uint8 | np.uint16],
    labels: NDArray[np.uint8],
    turned: NDArray[np.uint8],
) -> Agreement | None:
    """Compares a mask as it is with the same mask turned, by the edges of the image.

    Args:
        image: `[h, w, c]`, upright.
        labels: `[h, w]` or `[k, h, w]`, as they are.
        turned: The same, turned.

    Returns:
        None where the two ways differ in too few border pixels, or in size.
    """
    if labels.shape != turned.shape:
        return None
    step = -(-max(image.shape[:2]) // _LONGEST_SIDE)
    strength = _edges(image[::step, ::step])
    as_is = _borders(labels[..., ::step, ::step])
    other = _borders(turned[..., ::step, ::step])
    only_as_is, only_turned = as_is & ~other, other & ~as_is
    if min(np.count_nonzero(only_as_is), np.count_nonzero(only_turned)) < MIN_BORDER:
        return None
    found = strength[only_turned]
    return Agreement(
        turned=_stronger(found, strength[only_as_is]),
        over_chance=_stronger(found, strength[::3, ::3]),
    )


def says(agreement: Agreement | None, threshold: float) -> bool:
    """Whether the edges say, this clearly, that the mask lies turned."""
    return (
        agreement is not None and agreement.turned >= threshold and agreement.over_chance >= WORTH
    )


def _edges(image: NDArray[np.uint8 | np.uint16]) -> NDArray[np.float32]:
    """Strength of the strongest edge within a pixel of each pixel: masks are rarely exact."""
    grey = image.astype(np.float32).sum(axis=-1)
    smooth = _over_three(grey, np.add)
    strength = np.zeros_like(smooth)
    strength[:, 1:-1] += np.abs(smooth[:, 2:] - smooth[:, :-2])
    strength[1:-1] += np.abs(smooth[2:] - smooth[:-2])
    return _over_three(strength, np.maximum)


def _over_three(array: NDArray[np.float32], combine: np.ufunc) -> NDArray[np.float32]:
    padded = np.pad(array, 1, mode="edge")
    rows = combine(combine(padded[:-2], padded[1:-1]), padded[2:])
    return combine(combine(rows[:, :-2], rows[:, 1:-1]), rows[:, 2:])


def _borders(labels: NDArray[np.uint8]) -> NDArray[np.bool_]:
    border = np.zeros(labels.shape, np.bool_)
    border[..., 1:, :] |= labels[..., 1:, :] != labels[..., :-1, :]
    border[..., 1:] |= labels[..., 1:] != labels[..., :-1]
    return border if border.ndim == 2 else np.logical_or.reduce(border, axis=0)


def _stronger(first: NDArray[np.float32], second: NDArray[np.float32]) -> float:
    """Probability that a value of `first` is above one of `second`, ties counted half."""
    second = np.sort(second, axis=None)
    below = np.searchsorted(second, first, side="left")
    below_or_equal = np.searchsorted(second, first, side="right")
    return float((below + below_or_equal).mean() / (2 * second.size))
