"""Colours for classes that people tell apart, also those who see red and green alike."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Colour = tuple[int, int, int]

_FIRST: tuple[Colour, ...] = (
    (230, 159, 0),
    (86, 180, 233),
    (0, 158, 115),
    (240, 228, 66),
    (0, 114, 178),
    (213, 94, 0),
    (204, 121, 167),
)
"""Source: Okabe and Ito, Color Universal Design (2008), without black, which a background takes."""

_SIGHTS = np.array(
    [
        np.eye(3),
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ],
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ],
    ]
)
"""Linear RGB as most people see it, without red cones, and without green ones.
Source: Machado et al., A Physiologically-based Model (2009), severity 1."""

_TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
_WHITE = _TO_XYZ.sum(axis=1)
"""Source: IEC 61966-2-1 (sRGB), white D65."""


def distinct_colours(num: int) -> list[Colour]:
    """Colours far apart for every sight, black first.

    After eight known ones, each further colour is the one of a grid that is farthest from all
    before it, by the sight that tells it least.
    """
    chosen: list[Colour] = [(0, 0, 0), *_FIRST][:num]
    if len(chosen) == num:
        return chosen
    levels = np.arange(20, 256, 26)
    grid = np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), -1).reshape(-1, 3)
    seen = _as_seen(grid)
    nearest = np.full(len(grid), np.inf)
    for colour in chosen:
        nearest = np.minimum(nearest, _distance(seen, _as_seen(np.array([colour]))))
    while len(chosen) < num:
        best = int(nearest.argmax())
        red, green, blue = grid[best].tolist()
        chosen.append((red, green, blue))
        nearest = np.minimum(nearest, _distance(seen, seen[:, best : best + 1]))
    return chosen


def least_difference(colours: list[Colour]) -> float:
    """CIE76 difference of the two colours that are nearest to each other for any sight."""
    seen = _as_seen(np.array(colours))
    distances = [
        _distance(seen[:, i + 1 :], seen[:, i : i + 1]).min() for i in range(len(colours) - 1)
    ]
    return float(min(distances))


def _as_seen(colours: NDArray[np.int64]) -> NDArray[np.float64]:
    """CIELAB by sight, `[3, n, 3]`, of sRGB of 8 bits."""
    values = colours / 255
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    xyz = (linear @ _SIGHTS.transpose(0, 2, 1)).clip(0, 1) @ _TO_XYZ.T / _WHITE
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    x, y, z = f[..., 0], f[..., 1], f[..., 2]
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], -1)


def _distance(seen: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of each colour to one other, by the sight that tells them least."""
    return np.sqrt(((seen - other) ** 2).sum(axis=-1)).min(axis=0)
