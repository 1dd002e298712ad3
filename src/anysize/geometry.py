"""Sizes, levels, canvases and placements: the arithmetic of exact padding, on integers only.

An image of any size is put on a canvas, and every level of the net knows which of its cells belong
to the image ("valid") and which lie outside. Three facts carry everything:

- A 3x3 or 7x7 convolution with stride 2 and symmetric padding turns an extent `n` into
  `ceil(n / 2)`, whatever the parity of `n`.
- The pooling window starts at 0 or at -1 from the image's own first cell, depending on the rule and
  on the image's extent. On the canvas it always starts at 0, so an image of the second kind is put
  two pixels further in (`NetGeometry.shift`), and its windows fall where they fall alone.
- Two images in one slot do not see each other if `NetGeometry.gutter` pixels lie between them, the
  farthest that one operation of the net reaches. They are counted in whole cells of the coarsest
  level, so that finer levels have at least as much.

A net describes itself by a `NetGeometry`; planner, loader, training and prediction know no more.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from anysize.errors import ShapeError
from anysize.tables import Count, Index

PoolPadding = Literal["same", "caffe", "torchvision"]
LossAt = Literal["grid", "full", "cells"]

NO_ROOM = 1 << 24
"""Pixels; more than any canvas has. A step this wide lets nothing lie beside an image."""


class Size(NamedTuple):
    """Height and width in pixels, in this order everywhere."""

    height: int
    width: int

    @property
    def pixels(self) -> int:
        """Number of pixels."""
        return self.height * self.width

    def __str__(self) -> str:
        return f"{self.height}x{self.width}"


class Rect(NamedTuple):
    """A rectangle of cells in one slot of a canvas, at some level."""

    slot: int
    top: int
    left: int
    height: int
    width: int


class Placement(NamedTuple):
    """Where one image lies on a canvas: slot, origin and size in pixels."""

    slot: int
    top: int
    left: int
    height: int
    width: int

    @property
    def size(self) -> Size:
        """The image's own size."""
        return Size(self.height, self.width)


class Canvas(NamedTuple):
    """The shape of a tensor that images are put on: `slots` x `height` x `width` pixels.

    A padded batch has one image per slot; a mosaic has several images in a slot.
    """

    slots: Count
    height: Count
    width: Count

    @property
    def pixels(self) -> int:
        """Number of computed pixels, over all slots."""
        return self.slots * self.height * self.width

    def __str__(self) -> str:
        return f"{self.slots}x{self.height}x{self.width}"


@dataclass(frozen=True, slots=True)
class Layout:
    """A canvas and the images on it."""

    canvas: Canvas
    placements: tuple[Placement, ...]

    @property
    def valid_pixels(self) -> int:
        """Number of pixels that belong to images."""
        return sum(p.height * p.width for p in self.placements)

    def crop(self, tensor: Any, i: int) -> Any:  # noqa: ANN401
        """One image's part of a tensor on the canvas, such as pixels, labels or a net's output.

        Args:
            tensor: `[slots, ..., h, w]` of the canvas's height and width, or the output of a net
                from `anysize.on_canvas` at any stride.
            i: The image's place in `placements`.

        Returns:
            `[..., h, w]` of the image, without its slot.

        Raises:
            ShapeError: The tensor has other extents, and where images lie in it is not known.
        """
        p = self.placements[i]
        if tuple(tensor.shape[-2:]) == tuple(self.canvas[1:]):
            return tensor[p.slot, ..., p.top : p.top + p.height, p.left : p.left + p.width]
        found = getattr(tensor, "_anysize_field", None)
        if found is None:
            raise ShapeError(
                f"A tensor of {tuple(tensor.shape)} is neither of the canvas {self.canvas} nor the "
                "output of a net on it. Crop the output before other operations."
            )
        if not found.dims:
            return tensor[p.slot]
        r = found.level.rects[i]
        return tensor[r.slot, ..., r.top : r.top + r.height, r.left : r.left + r.width]


def ceil_div(a: int, b: int) -> int:
    """`a / b` rounded up."""
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `a`."""
    return ceil_div(a, multiple) * multiple


@dataclass(frozen=True, slots=True)
class NetGeometry:
    """What placements need to know of a net.

    Attributes:
        output_stride: Pixels per cell of the coarsest level; origins are multiples of it, plus
            `shift`.
        pool_padding: Where the 3x3/2 max-pool after the stem starts, and how it rounds.
            "none": every window starts where its own padding puts it, on a canvas as well.
            "same": TF-Slim; starts at 0 for even extents of its input and at -1 for odd ones.
            "caffe": no padding, rounds up, clips the last window (loses a cell at odd extents).
            "torchvision": one cell of padding on both sides, always starts at -1.
            Source: PARITY rules of tf_slim 1.1.0, KaimingHe's prototxts, torchvision's resnet.
        gutter: Pixels between two images in one slot: the farthest that one operation reaches.
        mosaic: Whether several images may share a slot at all.
        canvas_multiple: Pixels; extents of canvases are multiples of it.
        size_multiple: Pixels; alone, an image is padded with zeros below and to the right to a
            multiple of it, and that padding belongs to the image.
        logits_per_cell: Cells of the logits along a cell of the coarsest level: 2 where a head
            doubles the resolution, `output_stride` where logits have the image's resolution.
        logits_cover: Pixels; the logits of an image cover its extent rounded up to a multiple of
            it. 0: they cover its cells of the coarsest level.
    """

    output_stride: Count = 16
    pool_padding: Literal["same", "caffe", "torchvision", "none"] = "same"
    gutter: Index = 32
    mosaic: bool = True
    canvas_multiple: Count = 4
    size_multiple: Count = 1
    logits_per_cell: Count = 2
    logits_cover: Index = 0

    def to_table(self) -> dict[str, Any]:
        """For JSON: stride and pooling, and what is not at its default; see `read_geometry`."""
        always = ("output_stride", "pool_padding")
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name in always or getattr(self, field.name) != field.default
        }

    @property
    def num_levels(self) -> int:
        """Levels with strides 1, 2, 4, ... `output_stride`."""
        return self.output_stride.bit_length()

    @property
    def gutter_cells(self) -> int:
        """Cells of the coarsest level that must lie between two images in one slot."""
        return ceil_div(self.gutter, self.output_stride)

    def shift(self, extent: int) -> int:
        """Pixels, 0 or 2, by which an image's origin must differ from a multiple of the stride."""
        match self.pool_padding:
            case "torchvision":
                return 2
            case "same":
                return 0 if ceil_div(extent, 2) % 2 == 0 else 2
            case "caffe" | "none":
                return 0

    def extents(self, extent: int) -> tuple[int, ...]:
        """Valid cells along one axis at every level, from stride 1 to `output_stride`.

        Raises:
            ShapeError: The extent is below 1, or so small that nothing is left at some level
                (Caffe's pooling needs at least 3 pixels).
        """
        levels = [extent]
        for level in range(1, self.num_levels):
            n = levels[-1]
            if level == 2 and self.pool_padding == "caffe":
                levels.append(n // 2)
            else:
                levels.append(ceil_div(n, 2))
        if min(levels) < 1:
            raise ShapeError(
                f"An image extent of {extent} pixels is too small for {self.pool_padding} pooling: "
                f"no cell is left at stride {self.output_stride}. Remove the image or enlarge it."
            )
        return tuple(levels)

    def cells(self, extent: int) -> int:
        """Valid cells along one axis at the coarsest level."""
        if self.pool_padding == "none":
            return ceil_div(self.padded(extent), self.output_stride)
        return self.extents(extent)[-1]

    def logits_extent(self, extent: int) -> int:
        """Cells of an image's logits along one axis."""
        if not self.logits_cover:
            return self.cells(extent) * self.logits_per_cell
        return round_up(self.padded(extent), self.logits_cover) // self.head_stride

    def canvas_extent(self, extent: int) -> int:
        """The smallest canvas extent that holds one image of this extent."""
        return round_up(self.shift(extent) + self.padded(extent), self.canvas_multiple)

    def padded(self, extent: int) -> int:
        """The extent with the padding that belongs to the image."""
        return round_up(extent, self.size_multiple)

    def step(self, extent: int) -> int:
        """Pixels from an image's first cell to where that of a neighbour in its slot may lie."""
        if not self.mosaic:
            return NO_ROOM
        return (self.cells(extent) + self.gutter_cells) * self.output_stride

    def origin(self, cell: int, extent: int) -> int:
        """The pixel at which an image starts whose first coarsest cell is `cell`."""
        return cell * self.output_stride + self.shift(extent)

    def canvas_cells(self, canvas: Canvas) -> Size:
        """Cells of the canvas at the coarsest level; every level rounds up."""
        return Size(
            ceil_div(canvas.height, self.output_stride), ceil_div(canvas.width, self.output_stride)
        )

    @property
    def head_stride(self) -> int:
        """Pixels per cell of the logits."""
        return self.output_stride // self.logits_per_cell


def single(size: Size, geometry: NetGeometry) -> Layout:
    """The simplest layout: one image on the smallest canvas that holds it."""
    canvas = Canvas(1, geometry.canvas_extent(size.height), geometry.canvas_extent(size.width))
    return Layout(canvas, (place(size, geometry, slot=0, cell_top=0, cell_left=0),))


def padded_batch(sizes: list[Size], canvas: Canvas, geometry: NetGeometry) -> Layout:
    """One image a slot, each in its slot's upper left corner.

    Raises:
        ShapeError: More images than slots, or an image larger than the canvas.
    """
    placements = [place(s, geometry, slot=i, cell_top=0, cell_left=0) for i, s in enumerate(sizes)]
    layout = Layout(canvas, tuple(placements))
    check_layout(layout, geometry)
    return layout


def place(
    size: Size, geometry: NetGeometry, *, slot: int, cell_top: int, cell_left: int
) -> Placement:
    """Puts an image's first coarsest cell at `(cell_top, cell_left)` of a slot."""
    return Placement(
        slot,
        geometry.origin(cell_top, size.height),
        geometry.origin(cell_left, size.width),
        size.height,
        size.width,
    )


def coarse_rect(placement: Placement, geometry: NetGeometry) -> Rect:
    """The cells of an image at the coarsest level."""
    return Rect(
        placement.slot,
        placement.top // geometry.output_stride,
        placement.left // geometry.output_stride,
        geometry.cells(placement.height),
        geometry.cells(placement.width),
    )


def check_layout(layout: Layout, geometry: NetGeometry) -> None:
    """Holds a layout against the rules of exact padding.

    Raises:
        ShapeError: A canvas extent is not a multiple of `canvas_multiple`, an image leaves the
            canvas, its origin is of the wrong class for the pooling, or two images are closer than
            the gutter.
    """
    canvas, multiple = layout.canvas, geometry.canvas_multiple
    if canvas.slots < 1 or canvas.height < multiple or canvas.width < multiple:
        raise ShapeError(f"Canvas {canvas} is empty. Use at least 1x{multiple}x{multiple}.")
    if canvas.height % multiple or canvas.width % multiple:
        raise ShapeError(
            f"Canvas {canvas} has an extent that is not a multiple of {multiple}. Round it up."
        )
    rects: list[Rect] = []
    for p in layout.placements:
        inside = (
            0 <= p.slot < canvas.slots
            and p.top >= 0
            and p.left >= 0
            and p.top + geometry.padded(p.height) <= canvas.height
            and p.left + geometry.padded(p.width) <= canvas.width
        )
        if not inside:
            raise ShapeError(
                f"An image of {p.size} at slot {p.slot}, ({p.top}, {p.left}) leaves the canvas "
                f"{canvas}. Use a larger canvas, or rescale the image."
            )
        for origin, extent in ((p.top, p.height), (p.left, p.width)):
            if origin % geometry.output_stride != geometry.shift(extent):
                raise ShapeError(
                    f"An image of {p.size} starts at ({p.top}, {p.left}); an extent of {extent} "
                    f"must start at a multiple of {geometry.output_stride} plus "
                    f"{geometry.shift(extent)}, or its pooling windows fall differently than alone."
                )
        rects.append(coarse_rect(p, geometry))
    gap = geometry.gutter_cells if geometry.mosaic else NO_ROOM
    for i, a in enumerate(rects):
        for b in rects[:i]:
            apart = (
                a.slot != b.slot
                or a.top >= b.top + b.height + gap
                or b.top >= a.top + a.height + gap
                or a.left >= b.left + b.width + gap
                or b.left >= a.left + a.width + gap
            )
            if not apart:
                raise ShapeError(
                    f"Two images in slot {a.slot} of canvas {canvas} are closer than "
                    f"{gap} cells of {geometry.output_stride} pixels. Move them apart."
                    if geometry.mosaic
                    else f"Two images are in slot {a.slot} of canvas {canvas}, but this net takes "
                    "one image per slot."
                )


def level_rects(layout: Layout, geometry: NetGeometry, level: int) -> list[Rect]:
    """The valid rectangle of each image at a level (0 is the canvas, then stride 2, 4, ...)."""
    return [
        Rect(
            p.slot,
            p.top >> level,
            p.left >> level,
            geometry.extents(p.height)[level],
            geometry.extents(p.width)[level],
        )
        for p in layout.placements
    ]


def level_canvas(layout: Layout, level: int) -> Canvas:
    """The canvas at a level."""
    c = layout.canvas
    return Canvas(c.slots, ceil_div(c.height, 1 << level), ceil_div(c.width, 1 << level))


def outside(canvas: Canvas, rects: list[Rect]) -> list[Rect]:
    """Rectangles that together cover everything but `rects`, none of them twice.

    Rows between two neighbouring horizontal edges form a band; what a band leaves free of images is
    a strip, and equal strips of bands that touch are one.
    """
    strips: list[Rect] = []
    for slot in range(canvas.slots):
        inside = [r for r in rects if r.slot == slot]
        edges = sorted(
            {0, canvas.height, *(r.top for r in inside), *(r.top + r.height for r in inside)}
        )
        open_strips: dict[tuple[int, int], int] = {}
        for top, bottom in itertools.pairwise(edges):
            free = _free_columns(
                canvas.width,
                sorted(
                    (r.left, r.left + r.width)
                    for r in inside
                    if r.top <= top and r.top + r.height >= bottom
                ),
            )
            for columns in [c for c in open_strips if c not in free]:
                strips.append(_strip(slot, open_strips.pop(columns), top, columns))
            for columns in free:
                open_strips.setdefault(columns, top)
        for columns, top in open_strips.items():
            strips.append(_strip(slot, top, canvas.height, columns))
    return strips


def _free_columns(width: int, taken: list[tuple[int, int]]) -> list[tuple[int, int]]:
    free: list[tuple[int, int]] = []
    left = 0
    for start, stop in taken:
        if start > left:
            free.append((left, start))
        left = max(left, stop)
    if left < width:
        free.append((left, width))
    return free


def _strip(slot: int, top: int, bottom: int, columns: tuple[int, int]) -> Rect:
    return Rect(slot, top, columns[0], bottom - top, columns[1] - columns[0])


def target_canvas(canvas: Canvas, geometry: NetGeometry, loss_at: LossAt) -> Canvas:
    """The canvas that labels lie on: the logits' ("grid", "cells"), or full resolution ("full").

    At full resolution it covers whole coarsest cells, so it may be larger than the image's canvas.
    """
    cells = geometry.canvas_cells(canvas)
    scale = geometry.output_stride if loss_at == "full" else geometry.logits_per_cell
    return Canvas(canvas.slots, cells.height * scale, cells.width * scale)


def target_rect(placement: Placement, geometry: NetGeometry, loss_at: LossAt) -> Rect:
    """The labels of one image on `target_canvas`.

    "full": the image's pixels. They start at a multiple of the stride, without the pooling's shift,
    since that is where the image's own first cell lies on the canvas.
    "grid": the cells `i` whose first pixel `i * head_stride` is in the image. Each is labelled by
    the pixel at its centre `i * head_stride + head_stride // 2`, or by the last pixel where the
    image ends before it (`grid_centres`).
    "cells": all cells of the image's logits, also those that begin behind its end.
    """
    coarse = coarse_rect(placement, geometry)
    if loss_at == "full":
        stride = geometry.output_stride
        return Rect(
            placement.slot,
            coarse.top * stride,
            coarse.left * stride,
            placement.height,
            placement.width,
        )
    scale, (height, width) = geometry.logits_per_cell, placement.size
    if loss_at == "cells":
        extents = geometry.logits_extent(height), geometry.logits_extent(width)
    else:
        extents = len(grid_centres(height, geometry)), len(grid_centres(width, geometry))
    return Rect(placement.slot, coarse.top * scale, coarse.left * scale, *extents)


def num_cells(layout: Layout, geometry: NetGeometry) -> int:
    """Valid cells of the coarsest level, over all images."""
    return sum(geometry.cells(p.height) * geometry.cells(p.width) for p in layout.placements)


def logits_rects(layout: Layout, geometry: NetGeometry) -> list[Rect]:
    """The cells of each image's logits, on the canvas's logits."""
    return [target_rect(p, geometry, "cells") for p in layout.placements]


def grid_centres(extent: int, geometry: NetGeometry) -> list[int]:
    """The pixel that labels each cell of the logits' grid along one axis of an image.

    Source: cell centres `i * 8 + 4` at head stride 8, as in pose-tensorflow's target grid.
    """
    stride = geometry.head_stride
    num_cells = min(ceil_div(extent, stride), geometry.logits_extent(extent))
    return [min(i * stride + stride // 2, extent - 1) for i in range(num_cells)]
