"""The sizes that are met: one, ten that repeat, or every image another."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from anysize.config import DataConfig
from anysize.data.samples import images_of
from anysize.errors import ConfigError
from anysize.geometry import Size
from anysize.images.headers import fingerprint

MOST_ELONGATED = 2
_TRIES_A_SIZE = 100
_MULTIPLE = 16
"""Of the extents of the one size, as people choose them for speed."""


def draw_sizes(num: int, megapixels: tuple[float, float], *, seed: int = 0) -> list[Size]:
    """Distinct sizes: areas uniform between two numbers, aspects log-uniform from 1:2 to 2:1.

    Raises:
        ConfigError: There are not as many.
    """
    rng = np.random.default_rng(seed)
    low, high = (1e6 * mp for mp in megapixels)
    sizes: dict[Size, None] = {}
    for _ in range(_TRIES_A_SIZE * num):
        area = rng.uniform(low, high)
        aspect = math.exp(rng.uniform(-math.log(MOST_ELONGATED), math.log(MOST_ELONGATED)))
        size = Size(round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect)))
        if low <= size.pixels <= high and max(size) <= MOST_ELONGATED * min(size):
            sizes[size] = None
        if len(sizes) == num:
            return list(sizes)
    raise ConfigError(
        f"There are hardly {num} different sizes of {megapixels[0]} to {megapixels[1]} megapixels. "
        "Lower --images, or widen --megapixels."
    )


def folder_sizes(root: Path, most: int, *, seed: int = 0) -> list[Size]:
    """The sizes of a data folder's images, read from their headers; some of them if they are many.

    Raises:
        DataError: There are no images, or one cannot be read.
    """
    paths = images_of(root, DataConfig(root=""))
    if len(paths) > most:
        drawn = np.random.default_rng(seed).choice(len(paths), size=most, replace=False)
        paths = [paths[i] for i in sorted(drawn.tolist())]
    return fingerprint(paths)


@dataclass(frozen=True, slots=True)
class SizeSets:
    """Images of one size, of ten sizes, and of all sizes; as many, and about as many pixels.

    Attributes:
        one: About the mean of all.
        ten: Ten of them (or as many as there are), from small to large.
        all: Every image's size.
    """

    one: Size
    ten: tuple[Size, ...]
    all: tuple[Size, ...]


def size_sets(sizes: Sequence[Size]) -> SizeSets:
    """The three sets of an experiment on these sizes."""
    height = statistics.fmean(s.height for s in sizes)
    width = statistics.fmean(s.width for s in sizes)
    scale = math.sqrt(statistics.fmean(s.pixels for s in sizes) / (height * width))
    one = Size(*(max(round(scale * e / _MULTIPLE), 1) * _MULTIPLE for e in (height, width)))
    ordered = sorted(set(sizes), key=lambda s: (s.pixels, s))
    num = min(10, len(ordered))
    # The middles of ten equal parts, so that their mean is about that of all.
    ten = tuple(ordered[(2 * i + 1) * len(ordered) // (2 * num)] for i in range(num))
    return SizeSets(one, ten, tuple(sizes))
