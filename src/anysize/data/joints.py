"""Joints: the maps that a net learns from them.

A joint is a point of a person, or of an animal: x to the right and y down, in pixels; (0, 0) is the
middle of the first pixel. The logits of a net of J joints are J part maps, which say where each
joint is, and 2J location maps: at J + 2j and J + 2j + 1 the way from a cell's centre to joint j in
x and y, in units of `LOCATION_STDEV`.

Source: pose-tensorflow `dataset/pose_dataset.py`; DeepLabCut's `heatmap_targets.py` for Gaussians.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from anysize.config import LabelKind, PartMaps
from anysize.geometry import NetGeometry, Size

Joints = NDArray[np.float64]
"""`[people, joints, 2]` of x and y; NaN where a joint is not labelled."""

LOCATION_STDEV = 7.2801
"""Pixels that are 1 in a location map. Source: pose-tensorflow's `locref_stdev`."""


class JointMaps(NamedTuple):
    """Which part maps a net is trained to give, see `joint_targets`; `radius` at scale 1."""

    maps: PartMaps = "discs"
    radius: float = 17.0


ORIGINAL_MAPS = JointMaps()
"""As pose-tensorflow has them."""


def num_logits(kind: LabelKind, num_classes: int) -> int:
    """Channels of the logits: one a class; of joints a part map each, and locations in x and y."""
    return 3 * num_classes if kind == "joints" else num_classes


def joint_targets(
    joints: Joints,
    size: Size,
    geometry: NetGeometry,
    *,
    maps: PartMaps,
    radius: float,
    ignore_index: int,
) -> NDArray[np.float32]:
    """The maps of one image that a net is to give, on all cells of its logits.

    Of several people, the one whose joint is nearest to a cell's centre has the cell.

    Args:
        joints: In the image that the net gets.
        size: Of this image.
        geometry: Of the net.
        maps: "discs": 1 in cells whose centre is within `radius` of the joint, else 0. "gaussians":
            `exp(-d^2 / 2s^2)` of the distance, s being two thirds of `radius`.
        radius: Pixels of this image.
        ignore_index: What location maps hold farther away than `radius`.

    Returns:
        `[3 * joints, h, w]`: part maps, then location maps.
    """
    stride, num_joints = geometry.head_stride, joints.shape[1]
    shape = geometry.logits_extent(size.height), geometry.logits_extent(size.width)
    rows, columns = (np.arange(extent) * stride + stride / 2 for extent in shape)
    nearest = np.full((num_joints, *shape), np.inf)
    ways = np.zeros((num_joints, 2, *shape))
    for person in joints:
        for j, (x, y) in enumerate(person):
            squared = (rows[:, None] - y) ** 2 + (columns - x) ** 2
            closer = squared < nearest[j]  # Never where the joint is NaN.
            nearest[j][closer] = squared[closer]
            ways[j, 0][closer] = np.broadcast_to(x - columns, shape)[closer]
            ways[j, 1][closer] = np.broadcast_to(y - rows[:, None], shape)[closer]
    near = nearest <= radius**2
    stdev = 2 * radius / 3
    scores = near if maps == "discs" else np.exp(-nearest / (2 * stdev**2))
    located = np.where(near[:, None], ways / LOCATION_STDEV, ignore_index)
    return np.concatenate([scores, located.reshape(-1, *shape)]).astype(np.float32)
