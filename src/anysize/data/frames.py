"""Over which image shapes were drawn: as it is stored, or turned by its EXIF orientation.

Some tools turn a photograph, others do not, and either may write the size of the other into its
file. Only where the shapes lie tells; where they fit both, a person must say.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from anysize.data.reading import Sample
from anysize.data.shapes import TOLERANCE
from anysize.errors import DataError
from anysize.faults import FaultError
from anysize.geometry import Size
from anysize.images.decode import size_fault
from anysize.images.headers import Frame, read_frame


class Reach(NamedTuple):
    """How far down and right an object reaches; a bitmap of a whole image tells its size."""

    bottom: float
    right: float
    whole: bool = False

    def fits(self, size: Size) -> bool:
        """Whether the object may have been drawn over an image of this size."""
        if self.whole:
            return size == (self.bottom, self.right)
        return self.bottom <= size.height + TOLERANCE and self.right <= size.width + TOLERANCE


def frame_of(sample: Sample, claimed: Size | None, reaches: Sequence[Reach], path: Path) -> Frame:
    """The image that a sample's shapes were drawn over.

    Args:
        sample: Its image, and `data.mask_orientation` in its encoding.
        claimed: The size of the image, as the labels have it.
        reaches: Of the objects.
        path: Of the labels, for messages.

    Raises:
        FaultError: `claimed` is the size of another image; or the shapes may have been drawn over
            the image as it is stored, or turned, and the settings do not say.
    """
    seen, setting = sample.size, sample.encoding.orientation
    turned = Size(seen.width, seen.height)
    what = f"the image that {path} was drawn over"
    place = path if path in sample.masks else sample.image
    if claimed not in (None, seen, turned):
        raise size_fault(what, place, claimed, sample.image, seen)
    as_seen = Frame(seen, 1)
    if setting == "ignore":
        return as_seen
    only_seen = any(r.fits(seen) and not r.fits(turned) for r in reaches)
    only_turned = any(r.fits(turned) and not r.fits(seen) for r in reaches)
    says_turned = claimed is not None and claimed != seen
    if setting == "auto" and (
        (only_seen and not only_turned) or (not says_turned and (only_seen or not only_turned))
    ):
        return as_seen
    try:
        stored = read_frame(sample.image)
    except DataError:  # The image's own fault is named where it is decoded.
        stored = as_seen
    if setting == "apply":
        return stored
    if stored.orientation < 5:
        # What reaches out is cut; but labels of a turned image are those of another.
        if says_turned and claimed is not None:
            raise size_fault(what, place, claimed, sample.image, seen)
        return as_seen
    if not reaches:
        return as_seen
    if says_turned and only_turned and not only_seen:
        return stored
    fit = "fit both" if only_seen == only_turned else "fit it only as it is stored"
    raise FaultError(
        "rotated",
        place,
        f"{path} says that image {sample.image} is {claimed or 'of no size'}; it is {turned} as it "
        f"is stored, and {seen} by its EXIF orientation {stored.orientation}. Its shapes {fit}. "
        f'Set data.mask_orientation to "apply" if they were drawn over the image as it is stored, '
        f'or to "ignore" if they were drawn over it as one sees it.',
    )
