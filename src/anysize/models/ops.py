"""Operations that keep an image on a canvas the same as alone: masked ReLU, norms, pooling.

Each operation whose kernel is larger than 1 must see zeros outside every image, as it would see the
padding of the image alone. Convolution, bias and norm make the outside non-zero; `masked_relu` sets
it back to zero where such an operation follows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anysize.geometry import (
    Canvas,
    Layout,
    NetGeometry,
    Rect,
    level_canvas,
    level_rects,
    logits_rects,
    outside,
)
from anysize.ranks import Lockstep, Ranks


class LevelMask:
    """Where the images lie on a canvas at one level.

    Attributes:
        strips: Rectangles that cover the outside.
        num_valid: Cells that belong to images.
    """

    __slots__ = ("_canvas", "_tensor", "num_valid", "strips")

    def __init__(self, canvas: Canvas, rects: list[Rect]) -> None:
        self.strips: Sequence[Rect] = outside(canvas, rects)
        self.num_valid = sum(r.height * r.width for r in rects)
        self._canvas = canvas
        self._tensor: Tensor | None = None

    def fill_(self, x: Tensor, value: float | Tensor, axes: tuple[int, int] = (2, 3)) -> Tensor:
        """Writes outside all images, in place.

        Args:
            x: Slots first.
            value: A number, or with the usual axes one for each channel: `[c]` or `[n, c]`.
            axes: Of `x`: height and width of the level.
        """
        if not self.strips:
            return x
        return (self._fill_strips if x.device.type == "cpu" else self._fill)(x, value, axes)

    def _fill_strips(self, x: Tensor, value: float | Tensor, axes: tuple[int, int]) -> Tensor:
        """Touches nothing but the outside: as fast as memory is."""
        index: list[int | slice] = [slice(None)] * x.ndim
        for r in self.strips:
            index[0] = r.slot
            index[axes[0]] = slice(r.top, r.top + r.height)
            index[axes[1]] = slice(r.left, r.left + r.width)
            if isinstance(value, Tensor):
                own = value if value.ndim == 1 else value[r.slot]
                x[tuple(index)] = own[:, None, None]
            else:
                x[tuple(index)].fill_(value)
        return x

    def _fill(self, x: Tensor, value: float | Tensor, axes: tuple[int, int]) -> Tensor:
        """One operation, where launching many costs more than the memory that it passes over."""
        if self._tensor is None or self._tensor.device != x.device:
            mask = torch.zeros(self._canvas, dtype=torch.bool)
            for r in self.strips:
                mask[r.slot, r.top : r.top + r.height, r.left : r.left + r.width] = True
            self._tensor = mask.to(x.device)
        shape = [1] * x.ndim
        shape[0], shape[axes[0]], shape[axes[1]] = self._canvas
        outside = self._tensor.view(shape)
        if isinstance(value, Tensor):
            return x.copy_(torch.where(outside, value[..., None, None], x))
        return x.masked_fill_(outside, value)


def level_masks(layout: Layout, geometry: NetGeometry) -> list[LevelMask]:
    """The masks of a layout at strides 1, 2, 4, ... `output_stride`."""
    return [
        LevelMask(level_canvas(layout, level), level_rects(layout, geometry, level))
        for level in range(geometry.num_levels)
    ]


def zero_outside_(x: Tensor, mask: LevelMask) -> Tensor:
    """Sets the outside of all images to zero, in place.

    Args:
        x: `[n, c, h, w]` at the level of the mask.
        mask: Of the same level.
    """
    return mask.fill_(x, 0.0)


class _MaskedReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: LevelMask) -> Tensor:  # noqa: ANN401
        y = zero_outside_(torch.relu_(x), mask)
        ctx.mark_dirty(y)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        (y,) = ctx.saved_tensors
        # The plain ReLU's backward: y is zero outside, so the gradient is cut there at no cost.
        return torch.ops.aten.threshold_backward(grads[0], y, 0), None


def masked_relu(x: Tensor, mask: LevelMask) -> Tensor:
    """ReLU that also zeroes the outside of all images; works in place.

    Args:
        x: `[n, c, h, w]`; overwritten.
        mask: Of the level of `x`.
    """
    return _MaskedReLU.apply(x, mask)


def _precise(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _valid_moments(
    x: Tensor, mask: LevelMask, count: Tensor | int, *, per_slot: bool
) -> tuple[Tensor, Tensor]:
    """Mean and variance of each channel's valid cells, in float32 at least.

    No copy of `x` is made: its outside holds the mean for a while, so that it adds nothing to the
    squares, and zeros afterwards.

    Args:
        x: `[n, c, h, w]`.
        mask: Of its level.
        count: Valid cells of each channel, `[c]` or `[n, c]`.
        per_slot: Whether each slot has moments of its own.

    Returns:
        Both `[c]`, or `[n, c]` where each slot has its own.
    """
    data = zero_outside_(x.data, mask)
    mean = data.sum((2, 3) if per_slot else (0, 2, 3), dtype=_precise(x)) / count
    filling = mean.to(x.dtype)
    mask.fill_(data, filling)
    channels = data.reshape(1, -1, *x.shape[2:]) if per_slot else data
    unused = (torch.zeros_like(mean).flatten(), torch.zeros_like(mean).flatten())
    _, variance = torch.batch_norm_update_stats(channels, *unused, 0.0)
    zero_outside_(data, mask)
    total = channels.shape[0] * x.shape[2] * x.shape[3]
    # The mean was rounded where it was filled in: what that added to the squares.
    rounded = (mean - filling).square() * ((total - count) / total)
    variance = (variance.view_as(mean) * (total / count) - rounded).clamp(min=0)
    return mean, variance


class _ValidNorm(torch.autograd.Function):
    """`(x - mean) / std * gamma + beta` of each channel, where both follow from the valid cells.

    Keeps `x` and numbers of each channel, as the plain norm does.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        x: Tensor,
        gamma: Tensor,
        beta: Tensor,
        moments: tuple[Tensor, Tensor],
        count: Tensor | int,
        num_together: int,
        mask: LevelMask,
        epsilon: float,
        lockstep: Lockstep | None,
    ) -> Tensor:
        ctx.save_for_backward(x, gamma, *moments)
        ctx.rest = (count, num_together, mask, epsilon, lockstep)
        return _affine(x, moments, gamma, beta, epsilon)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore
        ctx: Any,  # noqa: ANN401
        *grads: Tensor,
    ) -> tuple[Tensor | None, ...]:
        x, gamma, *moments = ctx.saved_tensors
        count, num_together, mask, epsilon, lockstep = ctx.rest
        grad = grads[0].contiguous() if 0 in grads[0].stride() else grads[0]
        per_slot = len(gamma) != x.shape[1]
        zero_outside_(grad, mask)
        shape = (1, len(gamma), *x.shape[2:]) if per_slot else x.shape
        inverse_std = torch.rsqrt(moments[1] + epsilon)
        dx, d_gamma, d_beta = torch.ops.aten.native_batch_norm_backward(
            grad.reshape(shape),
            x.reshape(shape),
            gamma,
            *moments,
            *(moments[0], inverse_std),
            False,
            epsilon,
            [True, True, True],
        )

        # The input's gradient follows from sums over all ranks; gamma's and beta's are summed later
        # with those of all other parameters.
        sums = (d_gamma, d_beta)
        if lockstep is not None:
            sums = lockstep.sum_(torch.stack(sums)).unbind()

        def mean_of(d: Tensor) -> Tensor:
            groups = (d * gamma).view(-1, num_together)
            return groups.sum(1, keepdim=True).expand_as(groups).reshape(-1) * inverse_std / count

        # Through mean and variance; written as a norm, it needs no copy in float32.
        dx += _affine(x, tuple(moments), -mean_of(sums[0]), -mean_of(sums[1]), epsilon).view(shape)
        return zero_outside_(dx.view_as(x), mask), d_gamma, d_beta, *(None,) * 6


def _affine(
    x: Tensor, moments: tuple[Tensor, ...], gamma: Tensor, beta: Tensor, epsilon: float
) -> Tensor:
    shape = x.shape if len(gamma) == x.shape[1] else (1, len(gamma), *x.shape[2:])
    mean, variance = moments
    cudnn = torch.backends.cudnn.enabled
    made = torch.batch_norm(
        x.reshape(shape), gamma, beta, mean, variance, False, 0.0, epsilon, cudnn
    )
    return made if made.shape == x.shape else torch.ops.aten._unsafe_view(made, list(x.shape))


def _merged(
    lockstep: Lockstep, num_valid: int, mean: Tensor, variance: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and variance of the valid cells of all ranks.

    Source: Chan et al., "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances"
    (1979).
    """
    told = lockstep.gather(torch.cat((mean, variance, mean.new_full((1,), num_valid))))
    means, variances = told[:, :-1].chunk(2, dim=1)
    counts = told[:, -1:]
    count = counts.sum()
    mean = (counts * means).sum(0) / count
    return count, mean, (counts * (variances + (means - mean).square())).sum(0) / count


def valid_batch_norm(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    mask: LevelMask,
    epsilon: float,
    lockstep: Lockstep | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch norm with the mean and the variance of the valid cells.

    Gives the result, the mean, and the variance as moving statistics take it: without bias.

    Args:
        x: `[n, c, h, w]`; its outside is overwritten with zeros.
        gamma: `[c]`.
        beta: `[c]`.
        mask: Of the level of `x`.
        epsilon: Added to the variance.
        lockstep: With other ranks, whose valid cells count too.
    """
    x = x.contiguous() if 0 in x.stride() else x
    count: int | Tensor = max(mask.num_valid, 1)  # A rank without images has none.
    mean, variance = _valid_moments(x, mask, count, per_slot=False)
    if lockstep is None:
        unbiased = variance * (count / max(count - 1, 1))
    else:
        count, mean, variance = _merged(lockstep, mask.num_valid, mean, variance)
        unbiased = variance * (count / (count - 1).clamp(min=1))
    gamma, beta = gamma.to(mean.dtype), beta.to(mean.dtype)
    moments = (mean, variance)
    y = _ValidNorm.apply(x, gamma, beta, moments, count, 1, mask, epsilon, lockstep)
    return y, mean, unbiased


def valid_group_norm(
    x: Tensor,
    num_groups: int,
    gamma: Tensor | None,
    beta: Tensor | None,
    mask: LevelMask,
    cells: Tensor,
    epsilon: float,
) -> Tensor:
    """Group norm with the mean and the variance of each slot's valid cells.

    Args:
        x: `[n, c, h, w]`; its outside is overwritten with zeros.
        num_groups: Groups of channels.
        gamma: `[c]`; None: 1.
        beta: `[c]`; None: 0.
        mask: Of the level of `x`.
        cells: Valid cells of each slot, `[n]`, at least 1.
        epsilon: Added to the variance.
    """
    x = x.contiguous()
    together = x.shape[1] // num_groups
    count = cells.to(_precise(x))[:, None].expand(x.shape[:2])
    means, variances = _valid_moments(x, mask, count, per_slot=True)
    groups = (len(x), num_groups, together)
    mean = means.view(groups).mean(2, keepdim=True)
    apart = (means.view(groups) - mean).square()
    variance = (variances.view(groups) + apart).mean(2, keepdim=True)
    moments = (mean.expand(groups).reshape(-1), variance.expand(groups).reshape(-1))
    gamma = mean.new_ones(x.shape[1]) if gamma is None else gamma.to(mean.dtype)
    beta = mean.new_zeros(x.shape[1]) if beta is None else beta.to(mean.dtype)
    each = (gamma.repeat(len(x)), beta.repeat(len(x)))
    counts = count.reshape(-1) * together
    return _ValidNorm.apply(x, *each, moments, counts, together, mask, epsilon, None)


class ConvNorm(nn.Module):
    """A convolution without bias, and the batch norm after it, as in TF-Slim's `slim.conv2d`.

    With frozen statistics, and in eval mode, the norm is folded into the convolution: its scale
    multiplies the weights and its shift is the bias. That is the same function, gradients of gamma
    and beta included; it saves two passes over the activations, and in bf16 it rounds differently.

    With trained statistics, mean and variance are those of the valid pixels on the canvas. The
    moving ones follow when `update_moving_statistics` is called, so that a forward pass that is
    recomputed (activation checkpointing) does not count twice.

    Parameters are named as in TF-Slim: `weights`, `gamma`, `beta`, and the buffers `moving_mean`
    and `moving_variance`.

    Source: tf_slim 1.1.0 `resnet_arg_scope` (epsilon 1e-5, decay 0.997 as `norm_decay`).
    """

    EPSILON = 1e-5

    weights: nn.Parameter
    gamma: nn.Parameter
    beta: nn.Parameter
    moving_mean: Tensor
    moving_variance: Tensor

    def __init__(
        self,
        num_in: int,
        num_out: int,
        kernel_size: int,
        *,
        stride: int = 1,
        rate: int = 1,
        norm: Literal["frozen", "trained"],
        norm_decay: float,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__()
        self.stride = stride
        self.rate = rate
        # conv2d_same pads k_eff - 1 in total, the smaller half first: symmetric for odd kernels.
        self.padding = rate * (kernel_size - 1) // 2
        self.norm = norm
        self.norm_decay = norm_decay
        weights = torch.empty(num_out, num_in, kernel_size, kernel_size)
        sigma = math.sqrt(1.3 * 2.0 / (num_in * kernel_size * kernel_size))
        nn.init.trunc_normal_(weights, std=sigma, a=-2 * sigma, b=2 * sigma, generator=generator)
        self.weights = nn.Parameter(weights)
        self.gamma = nn.Parameter(torch.ones(num_out))
        self.beta = nn.Parameter(torch.zeros(num_out))
        self.register_buffer("moving_mean", torch.zeros(num_out))
        self.register_buffer("moving_variance", torch.ones(num_out))
        self._last_statistics: tuple[Tensor, Tensor] | None = None
        self.lockstep: Lockstep | None = None

    def forward(self, x: Tensor, mask: LevelMask) -> Tensor:
        """Convolves and normalises.

        Args:
            x: `[n, num_in, h, w]`, zero outside the images where the kernel is larger than 1.
            mask: Of the level of the output.

        Returns:
            `[n, num_out, ceil(h / stride), ceil(w / stride)]`; the outside holds anything.
        """
        if self.norm == "trained" and self.training:
            return self._normalise_by_step(self._convolve(x, self.weights, None), mask)
        scale = self.gamma * torch.rsqrt(self.moving_variance + self.EPSILON)
        return self._convolve(
            x, self.weights * scale[:, None, None, None], self.beta - self.moving_mean * scale
        )

    def _convolve(self, x: Tensor, weights: Tensor, bias: Tensor | None) -> Tensor:
        if not _corrupts_memory(x, weights):
            return F.conv2d(x, weights, bias, self.stride, self.padding, self.rate)
        rows = x[:, :, :: self.stride, :: self.stride].permute(0, 2, 3, 1)
        return F.linear(rows, weights[:, :, 0, 0], bias).permute(0, 3, 1, 2)

    def _normalise_by_step(self, x: Tensor, mask: LevelMask) -> Tensor:
        y, mean, unbiased = valid_batch_norm(
            x, self.gamma, self.beta, mask, self.EPSILON, self.lockstep
        )
        self._last_statistics = (mean, unbiased)
        return y

    @torch.no_grad()
    def update_moving_statistics(self) -> None:
        """Moves the moving statistics towards those of the last forward pass in training."""
        if self._last_statistics is None:
            return
        mean, unbiased = self._last_statistics
        self._last_statistics = None
        momentum = 1 - self.norm_decay
        self.moving_mean.lerp_(mean.to(self.moving_mean.dtype), momentum)
        self.moving_variance.lerp_(unbiased.to(self.moving_variance.dtype), momentum)


def _corrupts_memory(x: Tensor, weights: Tensor) -> bool:
    """Whether a convolution must run as a matrix product.

    On CPUs, oneDNN 3.12 (PyTorch 2.13) writes beyond its buffers in the backward pass of 1x1
    convolutions with fewer than 16 channels, in float32 and in bf16: nets of 4 and 8 base channels
    died of a corrupted heap within some hundred steps, nets of 16 did not. Multiples of 16 are
    taken for safe. float64 does not use oneDNN.
    """
    num_out, num_in, size, _ = weights.shape
    few = num_in % 16 != 0 or num_out % 16 != 0
    return size == 1 and few and x.device.type == "cpu" and x.dtype != torch.float64


def update_moving_statistics(model: nn.Module) -> None:
    """Updates every norm of a net; to be called once after each training pass."""
    for module in model.modules():
        if isinstance(module, ConvNorm):
            module.update_moving_statistics()


def moving_buffers(model: nn.Module) -> list[Tensor]:
    """The buffers that a training pass may change: those of frozen norms are none of them."""
    return [
        buffer
        for module in model.modules()
        if module.training and not (isinstance(module, ConvNorm) and module.norm == "frozen")
        for buffer in module.buffers(recurse=False)
    ]


def set_lockstep(model: nn.Module, ranks: Ranks) -> Lockstep | None:
    """Lets norms with statistics of the step take them over all ranks.

    Returns:
        What each pass must begin with (`Lockstep.start`), and each rank take part in; None where
        there is one rank, or no such norm.
    """
    if ranks.size == 1:
        return None
    batch_norm = nn.modules.batchnorm._BatchNorm
    expected = any(
        m.training
        and (isinstance(m, batch_norm) or (isinstance(m, ConvNorm) and m.norm != "frozen"))
        for m in model.modules()
    )
    lockstep = Lockstep(ranks, expected)
    for module in model.modules():
        if hasattr(module, "lockstep"):
            vars(module)["lockstep"] = lockstep
    return lockstep if expected else None


def max_pool(x: Tensor) -> Tensor:
    """3x3 max-pool with stride 2 whose first window starts at cell 0 of the canvas.

    Images are placed so that this is their own window position (`NetGeometry.shift`). Zeros outside
    act as minus infinity, since the input is not negative.

    Args:
        x: `[n, c, h, w]` with even `h` and `w`, not negative, zero outside the images.

    Returns:
        `[n, c, h / 2, w / 2]`.
    """
    return F.max_pool2d(x, 3, 2, ceil_mode=True)


def conv_transpose_same(x: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
    """3x3 transposed convolution with stride 2 and SAME alignment.

    Args:
        x: `[n, num_in, h, w]`, zero outside the images.
        weights: `[num_in, num_out, 3, 3]`.
        bias: `[num_out]`.

    Returns:
        `[n, num_out, 2h, 2w]`: the full result without its last row and column. (`padding=1,
        output_padding=1` has the same size, and is one pixel off.)

    Source: `tf.nn.conv2d_transpose` with SAME: the crop begins at max(k - stride, 0) // 2 = 0.
    """
    full = F.conv_transpose2d(x, weights, bias, stride=2)
    return full[:, :, : 2 * x.shape[2], : 2 * x.shape[3]]


def upsample(logits: Tensor, layout: Layout, geometry: NetGeometry) -> Tensor:
    """Bilinear upsampling of the head's logits to full resolution, clamped at each image's border.

    Every image's outermost cells are first copied one cell outwards, so that interpolation near a
    border reads the image's own cells only. Alone, this is `F.interpolate(align_corners=False)`.

    Args:
        logits: `[n, k, th, tw]` on the canvas of `target_canvas(..., "grid")`.
        layout: Of the images.
        geometry: Of the net.

    Returns:
        `[n, k, th * head_stride, tw * head_stride]` float32 or float64; the pixels of an image are
        at `geometry.target_rect(placement, geometry, "full")`.
    """
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    if geometry.head_stride == 1:
        return logits
    num_slots, num_classes, height, width = logits.shape
    source = torch.arange(height * width).view(1, height, width).repeat(num_slots, 1, 1)
    for rect in logits_rects(layout, geometry):
        top, left = rect.top, rect.left
        bottom, right = top + rect.height, left + rect.width
        rows = torch.arange(max(top - 1, 0), min(bottom + 1, height))
        columns = torch.arange(max(left - 1, 0), min(right + 1, width))
        source[rect.slot, rows[:, None], columns] = rows.clamp(top, bottom - 1)[
            :, None
        ] * width + columns.clamp(left, right - 1)
    index = source.view(num_slots, 1, -1).expand(-1, num_classes, -1).to(logits.device)
    clamped = logits.reshape(num_slots, num_classes, -1).gather(2, index)
    return F.interpolate(
        clamped.view(num_slots, num_classes, height, width),
        scale_factor=geometry.head_stride,
        mode="bilinear",
        align_corners=False,
    )
