"""Blocks of images that share a slot, and what part of a canvas they cost; on whole arrays at once.

A block is one image, or two blocks side by side or one above the other, with a gutter between. All
that its surroundings need to know of it are four extents in pixels:

- `end_h`, `end_w`: where its last pixel ends, counted from its first coarsest cell;
- `step_h`, `step_w`: where the first cell of a neighbour below or to the right may lie.

They compose: side by side, the steps add up, and the end is the step of the first plus the end of
the second; across, both take the larger one. The order of two neighbours is free, so it is the
shorter of two ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from anysize.geometry import Canvas, NetGeometry, Size, ceil_div

Index: TypeAlias = npt.NDArray[np.intp]
Floats: TypeAlias = npt.NDArray[np.float32]
Extents: TypeAlias = tuple[Floats, Floats, Floats, Floats]
"""`step_h`, `end_h`, `step_w`, `end_w`: whole pixels, in the type that costs are counted in."""

PASS_OVERHEAD = 50_000
"""What one more pass costs beside its pixels, in pixels; see docs/plan-file.md."""

MAX_CONTENT = 4
"""Most images that share one slot; beyond it, gutters cost more than slots."""

STRICT = 1e6
"""A slope so steep that overflowing a canvas by one pixel costs more than any canvas."""

NEVER = np.float32(1e15)
"""The cost of what cannot be, small enough to be added up."""


def extents_of(sizes: Sequence[Size], geometry: NetGeometry) -> Extents:
    """The four extents of each image on its own."""
    known: dict[int, tuple[int, int]] = {}
    for extent in {e for size in sizes for e in size}:
        known[extent] = (geometry.step(extent), geometry.shift(extent) + geometry.padded(extent))
    rows = np.array([known[s.height] for s in sizes], np.float32).reshape(-1, 2)
    columns = np.array([known[s.width] for s in sizes], np.float32).reshape(-1, 2)
    return rows[:, 0], rows[:, 1], columns[:, 0], columns[:, 1]


def take(extents: Extents, index: Index | tuple[Index, Index]) -> Extents:
    """The extents at an index array, in its shape."""
    return extents[0][index], extents[1][index], extents[2][index], extents[3][index]


def side_by_side(a: Extents, b: Extents) -> Extents:
    """Two blocks in a row; arrays broadcast."""
    return (
        np.maximum(a[0], b[0]),
        np.maximum(a[1], b[1]),
        a[2] + b[2],
        np.minimum(a[2] + b[3], b[2] + a[3]),
    )


def one_above_other(a: Extents, b: Extents) -> Extents:
    """Two blocks in a column; arrays broadcast."""
    return (
        a[0] + b[0],
        np.minimum(a[0] + b[1], b[0] + a[1]),
        np.maximum(a[2], b[2]),
        np.maximum(a[3], b[3]),
    )


def joined(a: Sequence[Extents], b: Sequence[Extents]) -> tuple[Extents, ...]:
    """All ways to put two blocks into one, given the ways to arrange each; arrays broadcast."""
    return tuple(put(x, y) for x in a for y in b for put in (side_by_side, one_above_other))


def content_of(canvas: Canvas, num_images: int) -> int:
    """Images a slot, as a power of two, when `num_images` share a canvas."""
    return 1 << (ceil_div(num_images, canvas.slots) - 1).bit_length()


def slot_cost(options: Sequence[Extents], canvas: Canvas, slope: float) -> Floats:
    """What a canvas costs if each block has a slot: its pixels, and more where a block overflows.

    While a search is under way, overflowing by 1% costs `slope` percent more, so that it is led
    towards what nearly fits; at `STRICT` it costs more than any canvas.
    """
    cost = np.float32(canvas.pixels + PASS_OVERHEAD)
    by_height = np.float32(slope * cost / canvas.height)
    by_width = np.float32(slope * cost / canvas.width)
    best: Floats | None = None
    for _, end_h, _, end_w in options:
        over = _beyond(end_h, canvas.height, by_height)
        over += _beyond(end_w, canvas.width, by_width)
        best = over if best is None else np.minimum(best, over, out=best)
    assert best is not None
    best += cost
    return best


def _beyond(end: Floats, extent: int, price: np.float32) -> Floats:
    """What blocks that end beyond an extent pay for it; in place, since searches live in here."""
    over = np.maximum(end, np.float32(extent))
    over -= np.float32(extent)
    over *= price
    return over


def shelf_cost(
    options: Sequence[Extents], canvas: Canvas, slope: float, geometry: NetGeometry
) -> Floats:
    """What half a slot's content costs: a row that spans the width or a column the height.

    The other half is not known yet; it is taken to fill the slot.
    """
    cost = canvas.pixels + PASS_OVERHEAD
    gutter = geometry.gutter_cells * geometry.output_stride
    by_height = np.float32(slope * cost / canvas.height)
    by_width = np.float32(slope * cost / canvas.width)
    best: Floats | None = None
    for step_h, end_h, step_w, end_w in options:
        row = _beyond(end_w, canvas.width, by_width)
        row += step_h * np.float32(2 * cost / (canvas.height + gutter))
        column = _beyond(end_h, canvas.height, by_height)
        column += step_w * np.float32(2 * cost / (canvas.width + gutter))
        both = np.minimum(row, column, out=row)
        best = both if best is None else np.minimum(best, both, out=best)
    assert best is not None
    return best
