"""Where the images lie in a tensor of a net that runs on a canvas, and how its outside is zeroed.

Every tensor that depends on the pixels carries a `Field`. Values outside the images mean nothing
and may be overwritten at any time; gradients outside are zero, since whatever mixes positions cuts
them. So an operation that needs zeros there gets them in the tensor's own memory, without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, cast

import torch
from torch import Tensor

from anysize.errors import ShapeError, UnsupportedNetError
from anysize.geometry import Canvas, Layout, Rect, round_up
from anysize.models.extents import Extent, of_canvas, per_image
from anysize.models.ops import LevelMask
from anysize.ranks import Lockstep

ATTRIBUTE = "_anysize_field"


@dataclass
class Trace:
    """What placements must keep to, noted while a net runs.

    Attributes:
        scales: Pixels per cell of each level.
        gaps: Pixels per cell, axis, and for each image the cells from its first to where the next
            may begin.
        one_per_slot: Operations that look at a whole image, so that no two share a slot.
        lockstep: With other ranks, whose statistics of a batch are shared.
    """

    scales: set[Fraction] = field(default_factory=set)
    gaps: list[tuple[Fraction, int, tuple[int, ...]]] = field(default_factory=list)
    one_per_slot: list[str] = field(default_factory=list)
    lockstep: Lockstep | None = None

    @property
    def stride(self) -> int:
        """Pixels; where images start at multiples of it, they start at whole cells everywhere."""
        if self.one_per_slot:  # they all start at 0
            return max(s.numerator for s in self.scales if s.denominator == 1)
        return math.lcm(*(s.numerator for s in self.scales))


class Level:
    """The images' rectangles on the canvas at one level.

    Attributes:
        canvas: Slots, height and width in cells.
        rects: Of each image, in the layout's order.
        scale: Pixels per cell.
        constant: Whether all images have this extent whatever their size, as after global pooling.
        trace: Of the whole run.
    """

    def __init__(
        self,
        canvas: Canvas,
        rects: tuple[Rect, ...],
        scale: Fraction,
        trace: Trace,
        *,
        constant: bool = False,
    ) -> None:
        self.canvas = canvas
        self.rects = rects
        self.scale = scale
        self.trace = trace
        self.constant = constant
        self._memo: dict[Any, Any] = {}
        self.shared = len({r.slot for r in rects}) < len(rects)
        if not constant:
            trace.scales.add(scale)
        small = [i for i, r in enumerate(rects) if r.height < 1 or r.width < 1]
        if small:
            raise ShapeError(
                f"Image {small[0]} of the batch is too small for the net: no cell of it is left at "
                f"{scale} pixels per cell. Enlarge it, or leave it out."
            )
        self._demand_apart([(r.height, r.width) for r in rects], 0, "its own cells")

    def once(self, key: Any, build: Callable[[], Any]) -> Any:  # noqa: ANN401
        """What `build` gives, built on first use."""
        if key not in self._memo:
            self._memo[key] = build()
        return self._memo[key]

    @property
    def mask(self) -> LevelMask:
        """The rectangles outside all images."""
        return self.once("mask", lambda: LevelMask(self.canvas, list(self.rects)))

    def extents(self, axis: int) -> tuple[int, ...]:
        """Of each image along the height (0) or the width (1)."""
        return tuple(r[3 + axis] for r in self.rects)

    def size(self, axis: int) -> int:
        """Cells of the canvas along the height (0) or the width (1), as the net reads them."""
        if self.constant:
            return self.canvas[1 + axis]
        return Extent(self.canvas[1 + axis], self.extents(axis), (self, axis))

    def same_as(self, other: Level) -> bool:
        """Whether images lie at the same cells of equal canvases."""
        return self is other or (self.canvas == other.canvas and self.rects == other.rects)

    def cells(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Valid cells of each slot, at least 1: `[slots]`."""

        def build() -> Tensor:
            counts = torch.zeros(self.canvas.slots, dtype=torch.float64)
            for r in self.rects:
                counts[r.slot] += r.height * r.width
            return counts.clamp(min=1).to(device, dtype)

        return self.once(("cells", device, dtype), build)

    def numbers(self, value: Any, beside: Tensor) -> Tensor:  # noqa: ANN401
        """A number computed from extents, for each image: `[slots, 1, ...]` as `beside` has."""
        if not beside.is_floating_point():
            raise UnsupportedNetError(f"a number computed from an extent, with {beside.dtype}")
        self.one_per_slot("a number computed from the extents")
        each = [float(of_canvas(value))] * self.canvas.slots
        for r, own in zip(self.rects, per_image(value, len(self.rects)), strict=True):
            each[r.slot] = float(own)
        made = torch.tensor(each, dtype=beside.dtype).to(beside.device)
        return made.view(-1, *(1,) * (beside.ndim - 1))

    def inside(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """1 inside the images and 0 outside: `[slots, 1, h, w]`."""

        def build() -> Tensor:
            mask = torch.zeros(self.canvas.slots, 1, *self.canvas[1:], dtype=dtype)
            for r in self.rects:
                mask[r.slot, :, r.top : r.top + r.height, r.left : r.left + r.width] = 1
            return mask.to(device)

        return self.once(("inside", device, dtype), build)

    def one_per_slot(self, operation: str) -> None:
        """Notes, or refuses, that no two images may share a slot, and that they start at 0.

        Raises:
            ShapeError: Some do.
        """
        if operation not in self.trace.one_per_slot:
            self.trace.one_per_slot.append(operation)
        if self.shared or any(r.top or r.left for r in self.rects):
            raise ShapeError(
                f"`{operation}` looks at a whole image, so every image must have a slot of its own "
                "and start at its upper left corner. Plan with a geometry that has no mosaics "
                "(`anysize.geometry_of_net`)."
            )

    def demand_room(
        self,
        before: int,
        after: tuple[Sequence[int], Sequence[int]],
        what: str,
        *,
        together: bool = False,
    ) -> None:
        """Demands free cells around every image.

        Args:
            before: Cells that must be free above and left of each.
            after: For each image, how many cells from its first must be free of others, along the
                height and the width.
            what: For the message.
            together: Whether the cells around two images must be apart, as where they are written.
        """
        spans = [*zip(*after, strict=True)]

        def demand() -> None:
            if together:
                self._demand_apart(spans, before, what)
                return
            self._demand_apart(spans, 0, what)
            self._demand_apart([(r.height, r.width) for r in self.rects], before, what)

        self.once(("room", before, tuple(spans), together), demand)

    def _demand_apart(self, spans: list[tuple[int, int]], before: int, what: str) -> None:
        if self.constant:
            return
        for axis in (0, 1):
            reach = tuple(
                max(span[axis], r[3 + axis]) + before
                for span, r in zip(spans, self.rects, strict=True)
            )
            self.trace.gaps.append((self.scale, axis, reach))
        if not self.shared:
            return
        for i, a in enumerate(self.rects):
            for j, b in enumerate(self.rects):
                if i == j or a.slot != b.slot:
                    continue
                height = max(spans[i][0], a.height) + before
                width = max(spans[i][1], a.width) + before
                apart = (
                    b.top >= a.top + height
                    or b.left >= a.left + width
                    or a.top >= b.top + max(spans[j][0], b.height) + before
                    or a.left >= b.left + max(spans[j][1], b.width) + before
                )
                if not apart:
                    raise ShapeError(
                        f"Two images in slot {a.slot} are too close for {what} at {self.scale} "
                        "pixels per cell. Plan with the net's own gutter "
                        "(`anysize.geometry_of_net`)."
                    )

    def derived(
        self,
        size: tuple[int, int],
        extents: tuple[Sequence[int], Sequence[int]],
        factor: tuple[Fraction, Fraction] = (Fraction(1), Fraction(1)),
        *,
        constant: bool = False,
    ) -> Level:
        """The level that an operation leads to.

        Args:
            size: Height and width of the canvas there.
            extents: Heights and widths of the images.
            factor: Cells of this level per cell of that one, along the height and the width.
            constant: See `Level`.

        Raises:
            ShapeError: An image's first cell falls between two cells.
            UnsupportedNetError: The two axes have different strides, in a mosaic.
        """
        rects: list[Rect] = []
        for r, height, width in zip(self.rects, *extents, strict=True):
            top, left = r.top / factor[0], r.left / factor[1]
            if top.denominator != 1 or left.denominator != 1:
                raise ShapeError(
                    f"An image starts at cell ({r.top}, {r.left}) of a level with {self.scale} "
                    f"pixels per cell, and a stride of {factor[0]} follows. Images must start at "
                    "multiples of the net's stride (`anysize.geometry_of_net`)."
                )
            rects.append(Rect(r.slot, int(top), int(left), height, width))
        if factor[0] != factor[1]:
            self.one_per_slot(f"stride {factor[0]} by {factor[1]}")
        return Level(
            Canvas(self.canvas.slots, *size),
            tuple(rects),
            self.scale * max(factor),
            self.trace,
            constant=constant,
        )

    def resized(self, height: Any, width: Any) -> Level:  # noqa: ANN401
        """The level whose extents are `height` and `width`, which a net computed from shapes."""
        sources = [e.source for e in (height, width) if isinstance(e, Extent) and e.source]
        if len(sources) == 2:
            (level, first), (other, second) = sources
            as_it_is = (first, second) == (0, 1)
            if as_it_is and isinstance(level, Level) and level.same_as(cast("Level", other)):
                return level
        if not isinstance(height, Extent) or not isinstance(width, Extent):
            raise UnsupportedNetError(
                f"A size given in plain numbers, ({height}, {width}), would be that of every image "
                "whatever its own. Give `scale_factor`, or the shape of another tensor."
            )
        self.one_per_slot("a computed size")
        canvas = (int.__int__(height), int.__int__(width))
        factor = Fraction(max(self.canvas.height, 1), max(canvas[0], 1))
        rects = tuple(
            Rect(r.slot, 0, 0, h, w)
            for r, h, w in zip(self.rects, height.images, width.images, strict=True)
        )
        return Level(Canvas(self.canvas.slots, *canvas), rects, self.scale * factor, self.trace)


def root_level(layout: Layout, trace: Trace, multiple: int = 1) -> Level:
    """The level of the pixels; images have the padding to a multiple that their net demands."""
    rects = tuple(
        Rect(p.slot, p.top, p.left, round_up(p.height, multiple), round_up(p.width, multiple))
        for p in layout.placements
    )
    canvas = layout.canvas
    if any(r.top + r.height > canvas.height or r.left + r.width > canvas.width for r in rects):
        raise ShapeError(
            f"An image leaves the canvas {canvas} when it is padded to a multiple of {multiple} "
            "pixels, as its net demands. Use a larger canvas."
        )
    return Level(layout.canvas, rects, Fraction(1), trace)


@dataclass(frozen=True, slots=True)
class Field:
    """Where the images lie in one tensor.

    Attributes:
        level: Their rectangles.
        dims: The tensor's dimensions of height and width. Empty: it has none, and dimension 0 is
            the slot, as after global pooling and flattening.
        clean: The tensor's version at which it was zero outside; None: it may hold anything.
        cut: Whether whatever made the tensor gives no gradient where the tensor is zero.
        stacked: Whether a new dimension 0 stands before all others, of which the rest speaks; only
            a reduction over it may follow.
    """

    level: Level
    dims: tuple[int, int] | tuple[()] = (2, 3)
    clean: int | None = None
    cut: bool = False
    stacked: bool = False


def field_of(value: object) -> Field | None:
    """The field of a tensor, or None of anything else."""
    return getattr(value, ATTRIBUTE, None) if isinstance(value, Tensor) else None


def put(tensor: Tensor, found: Field, *, clean: bool = False, cut: bool = False) -> Tensor:
    """Gives a tensor its field.

    Raises:
        UnsupportedNetError: It cannot be the tensor's.
    """
    canvas = found.level.canvas
    places = (0, *found.dims)
    given = [tensor.shape[d] if d < tensor.ndim else None for d in places]
    if not found.stacked and given != [*canvas][: len(places)]:
        raise UnsupportedNetError(
            f"a result of {tuple(tensor.shape)}, whose dimensions {places} should be {canvas}"
        )
    version = None if not clean or tensor.is_inference() else tensor._version
    setattr(tensor, ATTRIBUTE, replace(found, clean=version, cut=cut))
    return tensor


def is_clean(tensor: Tensor, found: Field) -> bool:
    """Whether the tensor is known to be zero outside the images."""
    return found.clean is not None and found.clean == tensor._version


def _fill(tensor: Tensor, found: Field, value: float) -> Tensor:
    return found.level.mask.fill_(tensor, value, cast("tuple[int, int]", found.dims))


class _Cut(torch.autograd.Function):
    """The same tensor, and no gradient outside the images."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, found: Field, own: bool) -> Tensor:  # noqa: ANN401
        ctx.found, ctx.own = found, own
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        grad = grads[0]
        # A gradient that only this node was given may be overwritten.
        if not ctx.own or 0 in grad.stride() or torch.is_grad_enabled():
            grad = grad.clone(memory_format=torch.contiguous_format)
        return _fill(grad, ctx.found, 0.0), None, None


def zero_outside(x: Tensor, found: Field, *, own_gradient: bool = True) -> Tensor:
    """`x` with zeros outside the images and no gradient there; its own memory is overwritten.

    Args:
        x: Anything with a field.
        found: Its field, with a height and a width.
        own_gradient: Whether the one operation that reads the result gives a gradient in memory of
            its own, as convolutions and poolings do.
    """
    if not found.level.mask.strips:
        return x
    if any(s == 0 and n > 1 for s, n in zip(x.stride(), x.shape, strict=True)):
        x = x.contiguous()
        found = replace(found, clean=None, cut=False)
    if not is_clean(x, found):
        _fill(x.data, found, 0.0)
        put(x, found, clean=True, cut=found.cut)
    if found.cut or not (x.requires_grad and torch.is_grad_enabled()):
        return x
    return _Cut.apply(x, found, own_gradient)


class _Filled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, found: Field, value: float) -> Tensor:  # noqa: ANN401
        ctx.found = found
        return _fill(x.clone(), found, value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        return _fill(grads[0].clone(), ctx.found, 0.0), None, None


def filled_outside(x: Tensor, found: Field, value: float) -> Tensor:
    """A copy of `x` with `value` outside the images, and no gradient there."""
    if not found.level.mask.strips:
        return x
    return _Filled.apply(x, found, value)


def zero_fresh(x: Tensor, found: Field) -> Tensor:
    """Zeroes the outside of a tensor that nothing else has read yet."""
    _fill(x.data, found, 0.0)
    return x
