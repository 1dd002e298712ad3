"""The exact rules of padding, cropping and resizing; see `anysize.models.canvas_ops`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from anysize.errors import UnsupportedNetError
from anysize.models.canvas_ops import Call, constant_level, pair, resample, spatial
from anysize.models.extents import of_canvas, per_image, varies
from anysize.models.field import (
    Field,
    Level,
    field_of,
    filled_outside,
    is_clean,
    put,
    zero_fresh,
    zero_outside,
)

_MOST_DOUBLED = 2048
"""Cells; above it, resizing goes by `_matrices`. PyTorch takes other cells from 2,095 on."""


def pad(call: Call) -> Tensor:
    """Constant padding and cropping; amounts may be those of each image."""
    a = call.bound(input=None, pad=None, mode="constant", value=None)
    x, amounts = a["input"], list(a["pad"])
    found = field_of(x)
    assert found is not None
    if a["mode"] != "constant":
        raise UnsupportedNetError(f"padding of mode {a['mode']!r}")
    by_dim = {x.ndim - 1 - i // 2: (amounts[i], amounts[i + 1]) for i in range(0, len(amounts), 2)}
    if 0 in by_dim and any(of_canvas(v) for v in by_dim[0]):
        raise UnsupportedNetError("padding of the batch")
    if not found.dims or not any(d in by_dim for d in found.dims):
        return put(call.run(), found)
    level = found.level
    edges = [by_dim.get(d, (0, 0)) for d in found.dims]
    return padded(x, found, (edges[0], edges[1]), a["value"] or 0.0, level.constant, by_dim)


def padded(
    x: Tensor,
    found: Field,
    edges: tuple[tuple[Any, Any], tuple[Any, Any]],
    value: float,
    constant: bool,
    by_dim: dict[int, tuple[Any, Any]] | None = None,
) -> Tensor:
    """`x` with cells added to each image's edges, or taken from them where negative."""
    level = found.level
    count = len(level.rects)
    each = [[per_image(v, count) for v in edge] for edge in edges]
    if value == 0.0:
        x = zero_outside(x, found, own_gradient=False)
    else:
        x = filled_outside(x, found, value)
    # The canvas must hold what any image asks for.
    amounts = [
        [max(of_canvas(v), *own) for v, own in zip(e, o, strict=True)]
        for e, o in zip(edges, each, strict=True)
    ]
    starts_differ = [any(v != amounts[i][0] for v in each[i][0]) for i in (0, 1)]
    plain = dict(by_dim or {})
    for d, amount in zip(found.dims, amounts, strict=True):
        plain[d] = (amount[0], amount[1])
    flat: list[int] = []
    for d in range(x.ndim - 1, -1, -1):
        flat += [of_canvas(v) for v in plain.get(d, (0, 0))]
    y = F.pad(x, flat, value=value)
    if y.data_ptr() == x.data_ptr():
        y = y.clone()
    sizes = [
        [n + b + e for n, b, e in zip(level.extents(i), *each[i], strict=True)] for i in (0, 1)
    ]
    for i, d in enumerate(found.dims):
        if starts_differ[i]:
            level.one_per_slot("padding that depends on the size")
            y = _moved_back(y, found, d, [amounts[i][0] - b for b in each[i][0]])
        # The canvas's own extent, as the net reads it, is what its arithmetic says.
        wanted = level.canvas[1 + i] + sum(of_canvas(v) for v in edges[i])
        wanted = max(wanted, *sizes[i])
        y = y.narrow(d, 0, wanted) if y.shape[d] > wanted else y
    key = ("pad", tuple(map(tuple, (each[0][0], each[0][1], each[1][0], each[1][1]))))

    def leads_to() -> Level:
        # Cells that are added must not be those that a neighbour loses.
        ends = [
            [n + max(e, 0) for n, e in zip(level.extents(i), each[i][1], strict=True)]
            for i in (0, 1)
        ]
        level.demand_room(max(0, amounts[0][0], amounts[1][0]), (ends[0], ends[1]), "padding")
        return level.derived(
            (y.shape[rows], y.shape[columns]), (sizes[0], sizes[1]), constant=constant
        )

    # What was cut off an image at its end still lies there.
    clean = value == 0.0 and not any(starts_differ) and min(map(min, *each[0], *each[1])) >= 0
    rows, columns = found.dims  # pyright: ignore[reportAssignmentType]
    new = level.once((key, y.shape[rows], y.shape[columns]), leads_to)
    return put(y, Field(new, found.dims), clean=clean)


def _moved_back(y: Tensor, found: Field, dim: int, by: Sequence[int]) -> Tensor:
    """Every slot moved towards its start along one dimension; its last cell fills the end."""
    index = torch.arange(y.shape[dim]).repeat(y.shape[0], 1)
    for r, amount in zip(found.level.rects, by, strict=True):
        index[r.slot] = (index[r.slot] + amount).clamp(max=y.shape[dim] - 1)
    shape = [y.shape[0] if d == 0 else y.shape[dim] if d == dim else 1 for d in range(y.ndim)]
    return y.gather(dim, index.to(y.device).view(shape).expand(y.shape))


class _Replicated(torch.autograd.Function):
    """Each image's outermost cells copied one cell outwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, found: Field, edge: tuple[Tensor, ...]) -> Tensor:  # noqa: ANN401
        ctx.found, ctx.edge = found, edge
        slot, to_row, to_column, row, column = edge
        y = x.clone()
        y[slot, :, to_row, to_column] = x[slot, :, row, column]
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        slot, to_row, to_column, row, column = ctx.edge
        grad = grads[0].clone()
        moved = grad[slot, :, to_row, to_column]
        zero_fresh(grad, ctx.found)
        grad.permute(0, 2, 3, 1).index_put_((slot, row, column), moved, accumulate=True)
        return grad, None, None


def _edge(level: Level, device: torch.device) -> tuple[Tensor, ...]:
    """Cells around the images and the cells they copy: slot, row, column; row, column."""

    def build() -> tuple[Tensor, ...]:
        found: list[Tensor] = []
        for r in level.rects:
            rows = torch.arange(max(r.top - 1, 0), min(r.top + r.height + 1, level.canvas.height))
            columns = torch.arange(
                max(r.left - 1, 0), min(r.left + r.width + 1, level.canvas.width)
            )
            own_rows = rows.clamp(r.top, r.top + r.height - 1)
            own_columns = columns.clamp(r.left, r.left + r.width - 1)
            copied = (own_rows != rows)[:, None] | (own_columns != columns)
            i, j = copied.nonzero(as_tuple=True)
            found.append(
                torch.stack(
                    [torch.full_like(i, r.slot), rows[i], columns[j], own_rows[i], own_columns[j]]
                )
            )
        return tuple(torch.cat(found, 1).to(device))

    return level.once(("edge", device), build)


def interpolate(call: Call) -> Tensor:
    """Nearest and bilinear resizing, with both rules for corners, of each image by itself."""
    a = call.bound(
        input=None,
        size=None,
        scale_factor=None,
        mode="nearest",
        align_corners=None,
        recompute_scale_factor=None,
        antialias=False,
    )
    x, mode = a["input"], a["mode"]
    found = spatial(x)
    level = found.level
    if mode not in ("nearest", "bilinear") or a["antialias"]:
        raise UnsupportedNetError(f"resizing of mode {mode!r}")
    corners = bool(a["align_corners"])
    if a["size"] is not None:
        size = pair(a["size"])
        scales: tuple[float | None, ...] = (None, None)
        new = _sized(level, size)
    else:
        scales = tuple(float(s) for s in pair(a["scale_factor"]))
        extents = [[math.floor(n * scales[i]) for n in level.extents(i)] for i in (0, 1)]
        canvas = [math.floor(level.canvas[1 + i] * scales[i]) for i in (0, 1)]
        factor = tuple(Fraction(1) / Fraction(s).limit_denominator(4096) for s in scales)
        new = level.once(
            ("scaled", scales),
            lambda: level.derived(
                (canvas[0], canvas[1]),
                (extents[0], extents[1]),
                (factor[0], factor[1]),
                constant=level.constant,
            ),
        )
        if a["recompute_scale_factor"]:
            scales = (None, None)
    if new.same_as(level):
        return put(x.clone(), found, clean=is_clean(x, found))
    if level.constant and level.canvas[1:] == (1, 1):
        return put(x.expand(-1, -1, *new.canvas[1:]).contiguous(), Field(new))
    whole = [_whole_factor(level, new, i) for i in (0, 1)]
    if all(whole) and not corners:
        powers = all(w & (w - 1) == 0 for w in whole)
        factors = [float(w) for w in whole]
        if mode == "nearest" and powers:
            return put(F.interpolate(x, scale_factor=factors, mode=mode), Field(new))
        if mode == "bilinear":
            ones = [[n + 1 for n in level.extents(i)] for i in (0, 1)]
            level.demand_room(1, (ones[0], ones[1]), "bilinear upsampling", together=True)
            if level.mask.strips:
                x = _Replicated.apply(x, found, _edge(level, x.device))
            return put(
                F.interpolate(x, scale_factor=factors, mode=mode, align_corners=False), Field(new)
            )
    if mode == "nearest" and scales == (None, None) and _doubles(level, new):
        y = F.interpolate(x, scale_factor=2.0)[:, :, : new.canvas.height, : new.canvas.width]
        return put(y, Field(new))
    return _by_matrices(x, found, new, mode, corners=corners, scales=scales)


def _by_matrices(
    x: Tensor,
    found: Field,
    new: Level,
    mode: str,
    *,
    corners: bool,
    scales: tuple[float | None, ...],
) -> Tensor:
    """Any resizing: a product with the weights of each image's rows, and one with its columns'."""
    level = found.level
    if not level.constant:
        level.one_per_slot(f"resizing by no whole factor ({mode})")

    def matrices() -> tuple[Tensor, Tensor]:
        rows, columns = (
            _matrices(level, new, i, mode, corners=corners, scale=scales[i]) for i in (0, 1)
        )
        return rows, columns

    key = ("matrices", mode, corners, scales, new.canvas, new.rects)
    y = resample(
        x if level.constant else zero_outside(x, found), level, key, level.once(key, matrices)
    )
    return put(y, Field(new), clean=True)


def _sized(level: Level, size: tuple[Any, Any]) -> Level:
    if level.constant and not any(isinstance(s, int) and varies(s) for s in size):
        plain = not any(hasattr(s, "images") for s in size)
        if plain:
            return constant_level(level, (of_canvas(size[0]), of_canvas(size[1])))
    return level.resized(size[0], size[1])


def _whole_factor(level: Level, new: Level, axis: int) -> int:
    """By which one axis of every image and of the canvas grows; 0 where there is none."""
    if level.constant:
        return 0
    factor = new.canvas[1 + axis] // level.canvas[1 + axis]
    pairs = [*zip(level.extents(axis), new.extents(axis), strict=True)]
    pairs.append((level.canvas[1 + axis], new.canvas[1 + axis]))
    pairs += [(a[1 + axis], b[1 + axis]) for a, b in zip(level.rects, new.rects, strict=True)]
    return factor if factor >= 1 and all(b == a * factor for a, b in pairs) else 0


def _doubles(level: Level, new: Level) -> bool:
    """Whether every image and the canvas are doubled, but perhaps for their last row or column.

    As decoders do to meet an encoder's odd extent. A cell's value then comes from where doubling
    takes it; PyTorch finds that in float32, which agrees up to `_MOST_DOUBLED`.
    """
    before = [level.canvas[1:], *(r[3:] for r in level.rects)]
    after = [new.canvas[1:], *(r[3:] for r in new.rects)]
    extents = [pair for a, b in zip(before, after, strict=True) for pair in zip(a, b, strict=True)]
    starts = zip(level.rects, new.rects, strict=True)
    return (
        not level.constant
        and all(b in (2 * a - 1, 2 * a) and a <= _MOST_DOUBLED for a, b in extents)
        and all(b[1:3] == (2 * a.top, 2 * a.left) for a, b in starts)
    )


def _matrices(
    level: Level, new: Level, axis: int, mode: str, *, corners: bool, scale: float | None
) -> Tensor:
    """The weights of each slot's image along one axis: `[slots, out, in]`.

    Source: ATen `area_pixel_compute_source_index`, `nearest_idx`; the latter counts in float32.
    """
    made = torch.zeros(
        level.canvas.slots, new.canvas[1 + axis], level.canvas[1 + axis], dtype=torch.float64
    )
    for old, r in zip(level.rects, new.rects, strict=True):
        n, out = old[3 + axis], r[3 + axis]
        to = torch.arange(out)
        if mode == "nearest":
            if out == n:
                source = to
            elif out == 2 * n and scale is None:
                source = to // 2
            else:
                step = np.float32(1.0 / scale) if scale else np.float32(n) / np.float32(out)
                found = np.floor(np.arange(out, dtype=np.float32) * step)
                source = torch.from_numpy(found.astype(np.int64)).clamp(max=n - 1)
            made[r.slot, to, source] = 1
            continue
        if corners:
            position = to.double() * ((n - 1) / (out - 1) if out > 1 else 0.0)
        else:
            step = 1.0 / scale if scale else n / out
            position = ((to.double() + 0.5) * step - 0.5).clamp(min=0)
        low = position.floor().long().clamp(max=n - 1)
        high = (low + 1).clamp(max=n - 1)
        weight = (position - low).clamp(0, 1)
        made[r.slot].index_put_((to, low), 1 - weight, accumulate=True)
        made[r.slot].index_put_((to, high), weight, accumulate=True)
    return made


def pixel_shuffle(call: Call) -> Tensor:
    """Channels to cells."""
    a = call.bound(input=None, upscale_factor=None)
    found, factor, y = spatial(a["input"]), a["upscale_factor"], call.run()
    level = found.level
    sizes = [[n * factor for n in level.extents(i)] for i in (0, 1)]
    grown = Fraction(1, factor)
    new = level.derived(
        (y.shape[2], y.shape[3]), (sizes[0], sizes[1]), (grown, grown), constant=level.constant
    )
    return put(y, Field(new), clean=is_clean(a["input"], found))
