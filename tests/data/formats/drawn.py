"""What the tests of shapes share: a small image, its classes, and labels as they should be."""

import numpy as np
import pytest

from anysize.data.classes import named_classes
from anysize.data.masks import decode_mask
from anysize.faults import FaultError
from anysize.geometry import Size

SIZE = Size(12, 16)
CLASSES = named_classes(("_background_", "cat", "dog"), "a test")
NO_BACKGROUND = named_classes(("cat", "dog"), "a test")


def box(top, left, bottom, right):
    return [[left, top], [right, top], [right, bottom], [left, bottom]]


def fault_of(sample, classes=CLASSES):
    with pytest.raises(FaultError) as caught:
        decode_mask(sample, classes)
    return caught.value.fault


def filled(*rects, start=0):
    """Labels with rectangles (top, left, bottom, right, value), bounds inside."""
    labels = np.full(SIZE, start, np.uint8)
    for top, left, bottom, right, value in rects:
        labels[top : bottom + 1, left : right + 1] = value
    return labels
