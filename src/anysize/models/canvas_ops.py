"""The exact rule of each operation that mixes positions: convolution, pooling, norms, resizing.

Each takes the function, the arguments it was called with, and gives the result with its field: see
`anysize.models.field`. Extents of images follow the operation's own formula, whatever those of the
canvas do.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anysize.errors import UnsupportedNetError
from anysize.geometry import ceil_div
from anysize.models.extents import of_canvas, varies
from anysize.models.field import (
    Field,
    Level,
    field_of,
    filled_outside,
    put,
    zero_fresh,
    zero_outside,
)
from anysize.models.ops import valid_batch_norm, valid_group_norm

Pair = tuple[int, int]
Extents = tuple[Sequence[int], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a torch function.

    Attributes:
        function: What was called.
        name: Its name without a trailing underscore.
        args: As given.
        kwargs: As given.
    """

    function: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> Any:  # noqa: ANN401
        """The plain function."""
        return self.function(*self.args, **self.kwargs)

    def bound(self, **parameters: Any) -> dict[str, Any]:  # noqa: ANN401
        """The arguments by name.

        Args:
            parameters: The function's own, in order, with their defaults.
        """
        found = dict(parameters)
        names = list(parameters)
        for name, value in zip(names, self.args, strict=False):
            found[name] = value
        if len(self.args) > len(names) or set(self.kwargs) - set(names):
            raise UnsupportedNetError(f"`{self.name}` with arguments {list(self.kwargs)}")
        return found | self.kwargs


def pair(value: Any) -> Pair:  # noqa: ANN401
    """One number, or one for each axis, as two."""
    if isinstance(value, Sequence):
        return (value[0], value[0]) if len(value) == 1 else (value[0], value[1])
    return (value, value)


def spatial(x: Tensor) -> Field:
    """The field of `[n, c, h, w]`.

    Raises:
        UnsupportedNetError: The tensor's dimensions are others.
    """
    found = field_of(x)
    if found is None or found.dims != (2, 3) or x.ndim != 4:
        raise UnsupportedNetError("an input that is not [n, c, h, w] with its images in place")
    return found


def _stepped(n: int, kernel: int, stride: int, before: int, after: int, dilation: int) -> int:
    return (n + before + after - dilation * (kernel - 1) - 1) // stride + 1


def conv2d(call: Call) -> Tensor:
    """Convolution: any kernel, stride, padding, dilation and groups."""
    a = call.bound(input=None, weight=None, bias=None, stride=1, padding=0, dilation=1, groups=1)
    x, weight = a["input"], a["weight"]
    found = spatial(x)
    level, (stride, dilation) = found.level, (pair(a["stride"]), pair(a["dilation"]))
    kernel: Pair = tuple(weight.shape[2:])
    if a["padding"] == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        before, after = [t // 2 for t in totals], [t - t // 2 for t in totals]
    else:
        before = after = list(pair(0 if a["padding"] == "valid" else a["padding"]))
    if kernel == (1, 1) and not any(before):
        y = call.run()
    else:
        x = zero_outside(x, found)
        y = F.conv2d(x, weight, a["bias"], stride, a["padding"], dilation, a["groups"])

    def leads_to() -> Level:
        out = [
            [_stepped(n, kernel[i], stride[i], before[i], after[i], dilation[i]) for n in ns]
            for i, ns in enumerate((level.extents(0), level.extents(1)))
        ]
        ends = [
            [(n - 1) * stride[i] - before[i] + dilation[i] * (kernel[i] - 1) + 1 for n in out[i]]
            for i in (0, 1)
        ]
        level.demand_room(max(before), (ends[0], ends[1]), f"a {kernel[0]}x{kernel[1]} convolution")
        return level.derived(
            (y.shape[2], y.shape[3]),
            (out[0], out[1]),
            (Fraction(stride[0]), Fraction(stride[1])),
            constant=level.constant,
        )

    key = ("conv", kernel, stride, tuple(before), tuple(after), dilation)
    return put(y, Field(level.once(key, leads_to)))


def conv_transpose2d(call: Call) -> Tensor:
    """Transposed convolution."""
    a = call.bound(
        input=None,
        weight=None,
        bias=None,
        stride=1,
        padding=0,
        output_padding=0,
        groups=1,
        dilation=1,
    )
    x, weight = a["input"], a["weight"]
    found = spatial(x)
    level, kernel = found.level, tuple(weight.shape[2:])
    stride, padding, dilation = pair(a["stride"]), pair(a["padding"]), pair(a["dilation"])
    extra = pair(a["output_padding"])
    y = F.conv_transpose2d(
        zero_outside(x, found),
        weight,
        a["bias"],
        stride,
        padding,
        extra,
        a["groups"],
        dilation,
    )

    def leads_to() -> Level:
        def out(n: int, i: int) -> int:
            reach = dilation[i] * (kernel[i] - 1)
            return (n - 1) * stride[i] - 2 * padding[i] + reach + extra[i] + 1

        sizes = [[out(n, i) for n in level.extents(i)] for i in (0, 1)]
        reached = [
            [ceil_div(m + 2 * padding[i] + extra[i], stride[i]) for m in sizes[i]] for i in (0, 1)
        ]
        level.demand_room(0, (reached[0], reached[1]), "a transposed convolution")
        return level.derived(
            (y.shape[2], y.shape[3]),
            (sizes[0], sizes[1]),
            (Fraction(1, stride[0]), Fraction(1, stride[1])),
            constant=level.constant,
        )

    key = ("transposed", kernel, stride, padding, extra, dilation)
    return put(y, Field(level.once(key, leads_to)))


def _pooled(n: int, kernel: int, stride: int, padding: int, dilation: int, *, ceil: bool) -> int:
    """Source: ATen `pooling_output_shape`: the last window starts in the image or its padding."""
    span = n + 2 * padding - dilation * (kernel - 1) - 1
    out = (span + (stride - 1 if ceil else 0)) // stride + 1
    return out - 1 if ceil and (out - 1) * stride >= n + padding else out


def _pool_level(
    level: Level,
    y: Tensor,
    kernel: Pair,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    ceil: bool,
) -> Level:
    def leads_to() -> Level:
        out = [
            [
                _pooled(n, kernel[i], stride[i], padding[i], dilation[i], ceil=ceil)
                for n in level.extents(i)
            ]
            for i in (0, 1)
        ]
        ends = [
            [(n - 1) * stride[i] - padding[i] + dilation[i] * (kernel[i] - 1) + 1 for n in out[i]]
            for i in (0, 1)
        ]
        level.demand_room(max(padding), (ends[0], ends[1]), f"{kernel[0]}x{kernel[1]} pooling")
        return level.derived(
            (y.shape[2], y.shape[3]),
            (out[0], out[1]),
            (Fraction(stride[0]), Fraction(stride[1])),
            constant=level.constant,
        )

    return level.once(("pool", kernel, stride, padding, dilation, ceil), leads_to)


def max_pool2d(call: Call) -> Tensor:
    """Max-pooling, ceil mode too; the outside is never the largest."""
    a = call.bound(
        input=None,
        kernel_size=None,
        stride=None,
        padding=0,
        dilation=1,
        ceil_mode=False,
        return_indices=False,
    )
    if a["return_indices"]:
        raise UnsupportedNetError("pooling that gives positions on the canvas (`return_indices`)")
    x, kernel = a["input"], pair(a["kernel_size"])
    found = spatial(x)
    stride = pair(a["stride"]) if a["stride"] not in (None, [], ()) else kernel
    padding, dilation = pair(a["padding"]), pair(a["dilation"])
    # A ReLU's zeros outside never beat a value inside, and where they tie there is no gradient.
    zeros = found.cut and dilation == (1, 1)
    x = zero_outside(x, found) if zeros else filled_outside(x, found, -math.inf)
    y = F.max_pool2d(x, kernel, stride, padding, dilation, a["ceil_mode"])
    new = _pool_level(found.level, y, kernel, stride, padding, dilation, a["ceil_mode"])
    if zeros:
        return put(y, Field(new))
    return put(zero_fresh(y, Field(new)), Field(new), clean=True)


def avg_pool2d(call: Call) -> Tensor:
    """Average pooling with its divisors: those of each image's own border."""
    a = call.bound(
        input=None,
        kernel_size=None,
        stride=None,
        padding=0,
        ceil_mode=False,
        count_include_pad=True,
        divisor_override=None,
    )
    x, kernel = a["input"], pair(a["kernel_size"])
    found = spatial(x)
    level = found.level
    stride = pair(a["stride"]) if a["stride"] not in (None, [], ()) else kernel
    padding, ceil, override = pair(a["padding"]), a["ceil_mode"], a["divisor_override"]
    include = a["count_include_pad"]
    x = zero_outside(x, found)
    same_divisor = override or (kernel[0] * kernel[1] if include and not ceil else None)
    same_divisor = same_divisor or (kernel[0] * kernel[1] if not ceil and not any(padding) else 0)
    y = F.avg_pool2d(x, kernel, stride, padding, ceil, divisor_override=same_divisor or 1)
    new = _pool_level(level, y, kernel, stride, padding, (1, 1), ceil)
    if same_divisor:
        return put(y, Field(new))

    def counts(n: int, out: int, i: int) -> torch.Tensor:
        start = torch.arange(out) * stride[i] - padding[i]
        end = (start + kernel[i]).clamp(max=n + padding[i])
        return (end - start if include else end.clamp(max=n) - start.clamp(min=0)).double()

    def inverse() -> Tensor:
        made = torch.ones(new.canvas.slots, 1, *new.canvas[1:], dtype=torch.float64)
        for old, r in zip(level.rects, new.rects, strict=True):
            rows = counts(old.height, r.height, 0)
            columns = counts(old.width, r.width, 1)
            made[r.slot, 0, r.top : r.top + r.height, r.left : r.left + r.width] = 1.0 / (
                rows[:, None] * columns
            )
        return made.to(y.device, y.dtype)

    key = ("divisors", kernel, stride, padding, ceil, include, y.device, y.dtype)
    return put(y * level.once(key, inverse), Field(new))


def adaptive_avg_pool2d(call: Call) -> Tensor:
    """Adaptive average pooling, global pooling among it: of each image."""
    a = call.bound(input=None, output_size=None)
    x = a["input"]
    found = spatial(x)
    level = found.level
    if isinstance(a["output_size"], Sequence):
        size = tuple(a["output_size"])
    else:
        size = (a["output_size"],) * 2
    if any(not isinstance(s, int) or varies(s) for s in size):
        raise UnsupportedNetError(f"adaptive pooling to {size}")
    size = (of_canvas(size[0]), of_canvas(size[1]))
    if level.constant:
        return put(call.run(), Field(constant_level(level, size)))
    level.one_per_slot(call.name)
    if size == (1, 1):
        return put(mean_inside(x, found, keepdim=True), Field(constant_level(level, size)))

    def bins(i: int) -> Tensor:
        made = torch.zeros(level.canvas.slots, size[i], level.canvas[1 + i], dtype=torch.float64)
        for r, n in zip(level.rects, level.extents(i), strict=True):
            for j in range(size[i]):
                start, end = j * n // size[i], ceil_div((j + 1) * n, size[i])
                made[r.slot, j, start:end] = 1.0 / (end - start)
        return made

    y = resample(zero_outside(x, found), level, ("bins", size), (bins(0), bins(1)))
    return put(y, Field(constant_level(level, size)))


def adaptive_max_pool2d(call: Call) -> Tensor:
    """Global max-pooling of each image."""
    a = call.bound(input=None, output_size=None, return_indices=False)
    found = spatial(a["input"])
    if pair(a["output_size"]) != (1, 1) or a["return_indices"]:
        raise UnsupportedNetError(f"adaptive max-pooling to {a['output_size']}")
    found.level.one_per_slot(call.name)
    y = F.adaptive_max_pool2d(filled_outside(a["input"], found, -math.inf), 1)
    with torch.no_grad():  # slots without an image
        y.data[y.data == -math.inf] = 0
    return put(y, Field(constant_level(found.level, (1, 1))))


def constant_level(level: Level, size: Pair) -> Level:
    """The level after pooling to a fixed size: all images have it."""

    def build() -> Level:
        count = len(level.rects)
        if not level.constant:
            level.one_per_slot("global pooling")
        return level.derived(size, ((size[0],) * count, (size[1],) * count), constant=True)

    return level.once(("constant", size), build)


def mean_inside(x: Tensor, found: Field, *, keepdim: bool) -> Tensor:
    """The mean over height and width of each slot's image."""
    rows, columns = found.dims  # pyright: ignore[reportAssignmentType]
    x = zero_outside(x, found, own_gradient=False)
    precise = torch.float64 if x.dtype == torch.float64 else torch.float32
    total = x.sum((rows, columns), keepdim=keepdim, dtype=precise)
    cells = found.level.cells(x.device, precise)
    return (total / cells.view(-1, *(1,) * (total.ndim - 1))).to(x.dtype)


def resample(x: Tensor, level: Level, key: Any, weights: tuple[Tensor, Tensor]) -> Tensor:  # noqa: ANN401
    """Both axes resampled by a matrix for each slot: `[slots, out, in]`."""

    def placed() -> tuple[Tensor, Tensor]:
        rows = weights[0].to(x.device, x.dtype)[:, None]
        columns = weights[1].to(x.device, x.dtype).transpose(1, 2)[:, None]
        return rows, columns

    rows, columns = level.once(("placed", key, x.device, x.dtype), placed)
    # A dry run's device knows no autocast.
    plain = contextlib.nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
    with plain:
        shrinks = columns.shape[3] < columns.shape[2]
        if shrinks:
            return torch.matmul(rows, torch.matmul(x, columns))
        return torch.matmul(torch.matmul(rows, x), columns)


def batch_norm(call: Call) -> Tensor:
    """Batch norm: frozen, or with the statistics of the valid cells of all images."""
    a = call.bound(
        input=None,
        running_mean=None,
        running_var=None,
        weight=None,
        bias=None,
        training=False,
        momentum=0.1,
        eps=1e-5,
    )
    x, mean, variance = a["input"], a["running_mean"], a["running_var"]
    found = field_of(x)
    assert found is not None
    if not a["training"]:
        return put(call.run(), found)
    if not found.dims:
        if len({r.slot for r in found.level.rects}) < found.level.canvas.slots:
            raise UnsupportedNetError("statistics over slots of which some have no image")
        if found.level.trace.lockstep is not None:
            raise UnsupportedNetError("statistics over slots, of which other ranks have some")
        return put(call.run(), found)
    spatial(x)
    mask = found.level.mask
    lockstep = found.level.trace.lockstep
    if mask.num_valid == 1 and lockstep is None:
        raise ValueError(f"Expected more than 1 value per channel when training, got {x.shape}")
    weight = x.new_ones(x.shape[1]) if a["weight"] is None else a["weight"]
    bias = x.new_zeros(x.shape[1]) if a["bias"] is None else a["bias"]
    y, own_mean, unbiased = valid_batch_norm(x, weight, bias, mask, a["eps"], lockstep)
    if mean is not None and variance is not None:
        with torch.no_grad():
            mean.lerp_(own_mean.to(mean.dtype), a["momentum"])
            variance.lerp_(unbiased.to(variance.dtype), a["momentum"])
    return put(y, found)


def group_norm(call: Call) -> Tensor:
    """Group norm with the statistics of each image's own cells."""
    a = call.bound(input=None, num_groups=1, weight=None, bias=None, eps=1e-5)
    found = field_of(a["input"])
    if found is None or found.level.constant or not found.dims:
        return put(call.run(), found) if found else call.run()
    return _normalised(a["input"], a["num_groups"], a["weight"], a["bias"], a["eps"], call.name)


def instance_norm(call: Call) -> Tensor:
    """Instance norm with the statistics of each image's own cells."""
    a = call.bound(
        input=None,
        running_mean=None,
        running_var=None,
        weight=None,
        bias=None,
        use_input_stats=True,
        momentum=0.1,
        eps=1e-5,
    )
    x = a["input"]
    if not a["use_input_stats"]:
        return put(call.run(), spatial(x))
    if a["running_mean"] is not None:
        raise UnsupportedNetError("instance norm with moving statistics in training mode")
    return _normalised(x, x.shape[1], a["weight"], a["bias"], a["eps"], call.name)


def _normalised(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, name: str
) -> Tensor:
    found = spatial(x)
    found.level.one_per_slot(name)
    if x.is_meta:  # a dry run, which computes nothing
        return put(torch.empty_like(x), found)
    cells = found.level.cells(x.device, torch.float64)
    y = valid_group_norm(x, groups, weight, bias, found.level.mask, cells, eps)
    return put(y, found)


def layer_norm(call: Call) -> Tensor:
    """Layer norm over dimensions that are not those of space."""
    a = call.bound(input=None, normalized_shape=None, weight=None, bias=None, eps=1e-5)
    x, found = a["input"], field_of(a["input"])
    first = x.ndim - len(tuple(a["normalized_shape"]))
    if found is not None and not found.level.constant and any(d >= first for d in found.dims):
        raise UnsupportedNetError("layer norm over height or width")
    return put(call.run(), found) if found else call.run()


def linear(call: Call) -> Tensor:
    """A linear map of the last dimension, which must be one of channels."""
    a = call.bound(input=None, weight=None, bias=None)
    found = field_of(a["input"])
    if found is None or any(d == a["input"].ndim - 1 for d in found.dims):
        raise UnsupportedNetError("a linear map over height or width")
    return put(call.run(), found)
