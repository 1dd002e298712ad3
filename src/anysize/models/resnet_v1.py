"""ResNet v1 bodies with a chosen output stride, as TF-Slim builds them.

Takes `[n, c, h, w]` pixels on a canvas and the layout of the images on it; gives `[n, 32 * base
depth, h / output_stride, w / output_stride]`, with basic units `8 * base depth`, zero outside the
images.

The paper's net: a 7x7/2 convolution, a 3x3/2 max-pool, then four blocks of bottleneck units (1x1,
3x3, 1x1, each with batch norm) with 3, 4, 6, 3 units for ResNet-50 and more for the others; or of
basic units (3x3, 3x3) for ResNet-18 and 34.

Three systems published weights for it, and differ in three rules, which are arguments:

- `pool_padding` (in `NetGeometry`): where the pooling starts and how it rounds.
- `stride_position`: which convolution of a block has the stride. "last_3x3": the 3x3 of the last
  unit (TF-Slim). "first_3x3": the 3x3 of the first unit (torchvision). "first_1x1": the first 1x1
  and the shortcut of the first unit (Caffe). In a basic unit it is always its first 3x3.
- `dilation_rule`: the rate of the first unit of a dilated block. "new": that of the whole block
  (TF-Slim, Caffe). "previous": that of the block before (torchvision).

Sources: He et al., "Deep Residual Learning for Image Recognition" (2015); tf_slim 1.1.0
`nets/resnet_v1.py`, `nets/resnet_utils.py`; KaimingHe's prototxts; torchvision `models/resnet.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anysize.geometry import Layout, NetGeometry
from anysize.models.levels import (
    EXPANSION,
    DilationRule,
    StridePosition,
    UnitPlan,
    num_out,
    plan_units,
)
from anysize.models.ops import ConvNorm, LevelMask, level_masks, masked_relu, max_pool

Norm = Literal["frozen", "trained"]


ConvBuilder = Callable[[int, int, int, int, int], ConvNorm]
"""Builds a convolution: channels in and out, size, stride, rate."""


class Unit(nn.Module):
    """A residual unit: convolutions, added to their shortcut."""

    def __init__(self, plan: UnitPlan, num_in: int, num_out: int, conv: ConvBuilder) -> None:
        super().__init__()
        self.plan = plan
        self.shortcut = None if num_in == num_out else conv(num_in, num_out, 1, plan.stride, 1)

    def forward(self, x: Tensor, masks: list[LevelMask]) -> Tensor:
        """`[n, num_in, h, w]` to `[n, num_out, h / stride, w / stride]`, before the last ReLU.

        The outside of the result holds anything.
        """
        out = masks[self.plan.level_out]
        if self.shortcut is not None:
            shortcut = self.shortcut(x, out)
        else:
            s = self.plan.stride
            shortcut = x[:, :, ::s, ::s]
        return self._residual(x, masks).add_(shortcut)

    def _residual(self, x: Tensor, masks: list[LevelMask]) -> Tensor:
        raise NotImplementedError


class Bottleneck(Unit):
    """1x1, 3x3, 1x1. The outside of its input may hold anything."""

    def __init__(
        self, plan: UnitPlan, num_in: int, depth: int, conv: ConvBuilder, *, stride_in_1x1: bool
    ) -> None:
        num_out = EXPANSION * depth
        super().__init__(plan, num_in, num_out, conv)
        first, second = (plan.stride, 1) if stride_in_1x1 else (1, plan.stride)
        self.middle_level = plan.level_out if stride_in_1x1 else plan.level_in
        self.conv1 = conv(num_in, depth, 1, first, 1)
        self.conv2 = conv(depth, depth, 3, second, plan.rate)
        self.conv3 = conv(depth, num_out, 1, 1, 1)

    def _residual(self, x: Tensor, masks: list[LevelMask]) -> Tensor:
        middle, out = masks[self.middle_level], masks[self.plan.level_out]
        y = masked_relu(self.conv1(x, middle), middle)
        y = F.relu(self.conv2(y, out), inplace=True)
        return self.conv3(y, out)


class BasicUnit(Unit):
    """3x3, 3x3. Its input must be zero outside the images."""

    def __init__(self, plan: UnitPlan, num_in: int, depth: int, conv: ConvBuilder) -> None:
        super().__init__(plan, num_in, depth, conv)
        self.conv1 = conv(num_in, depth, 3, plan.stride, plan.rate)
        self.conv2 = conv(depth, depth, 3, 1, plan.rate_out)

    def _residual(self, x: Tensor, masks: list[LevelMask]) -> Tensor:
        out = masks[self.plan.level_out]
        return self.conv2(masked_relu(self.conv1(x, out), out), out)


class ResNetV1(nn.Module):
    """The body; see the module's docstring.

    Attributes:
        geometry: What placements need to know of the net.
        num_out: Channels of the output.
        middle: A unit whose output `features` gives as well; empty for none.
    """

    def __init__(
        self,
        units: tuple[int, ...],
        *,
        geometry: NetGeometry,
        basic_units: bool = False,
        num_channels: int = 3,
        base_depth: int = 64,
        stride_position: StridePosition = "last_3x3",
        dilation_rule: DilationRule = "new",
        norm: Norm = "frozen",
        norm_decay: float = 0.997,
        activation_checkpointing: bool = False,
        middle: str = "",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.geometry = geometry
        self.activation_checkpointing = activation_checkpointing

        def conv(num_in: int, num_out: int, size: int, stride: int, rate: int) -> ConvNorm:
            return ConvNorm(
                num_in,
                num_out,
                size,
                stride=stride,
                rate=rate,
                norm=norm,
                norm_decay=norm_decay,
                generator=generator,
            )

        self.basic_units = basic_units
        self.conv1 = conv(num_channels, base_depth, 7, 2, 1)
        num_in = base_depth
        self.units = nn.ModuleDict()
        self.middle, self._middle_level = middle, 0
        for plan in plan_units(units, geometry.output_stride, stride_position, dilation_rule):
            depth, in_1x1 = base_depth << plan.block, stride_position == "first_1x1"
            name = f"block{plan.block + 1}_unit{plan.unit + 1}"
            self._middle_level = plan.level_out if name == middle else self._middle_level
            self.units[name] = (
                BasicUnit(plan, num_in, depth, conv)
                if basic_units
                else Bottleneck(plan, num_in, depth, conv, stride_in_1x1=in_1x1)
            )
            num_in = num_out(base_depth, plan.block, basic=basic_units)
        self.num_out = num_in
        self._segments = segments(units, middle)

    def forward(self, pixels: Tensor, layout: Layout) -> Tensor:
        """Runs the body on a canvas.

        Args:
            pixels: `[n, c, h, w]`, normalised, zero outside the images; `h` and `w` multiples of 4.
            layout: Of the images on the canvas.

        Returns:
            `[n, num_out, ceil(h / output_stride), ceil(w / output_stride)]`, zero outside.
        """
        return self.features(pixels, layout)[-1]

    def features(self, pixels: Tensor, layout: Layout) -> list[Tensor]:
        """The output of the unit `middle`, if there is one, and that of the body; as `forward`."""
        features: list[Tensor] = []
        masks = level_masks(layout, self.geometry)
        x = self._kept_or_recomputed(self._stem, pixels, masks)
        for i, names in enumerate(self._segments):
            x = self._activated(x, masks, names[0]) if i else x
            x = self._kept_or_recomputed(functools.partial(self._run_units, names), x, masks)
            if names[-1] == self.middle:  # Copied, since both ReLUs work in place.
                features.append(masked_relu(x.clone(), masks[self._middle_level]))
        return [*features, masked_relu(x, masks[-1])]

    def _kept_or_recomputed(
        self, run: Callable[[Tensor, list[LevelMask]], Tensor], x: Tensor, masks: list[LevelMask]
    ) -> Tensor:
        if self.activation_checkpointing and torch.is_grad_enabled():
            # Nothing is drawn, so no state of a generator need be kept.
            return checkpoint(run, x, masks, use_reentrant=False, preserve_rng_state=False)
        return run(x, masks)

    def _stem(self, pixels: Tensor, masks: list[LevelMask]) -> Tensor:
        x = max_pool(masked_relu(self.conv1(pixels, masks[1]), masks[1]))
        # Windows of the pooling reach out of an image. ReLU changes nothing here.
        return masked_relu(x, masks[2]) if self.basic_units else x

    def _activated(self, x: Tensor, masks: list[LevelMask], unit: str) -> Tensor:
        """What a unit takes: zero outside where its first convolution is a 3x3."""
        if self.basic_units:
            level: int = self.units[unit].plan.level_in  # pyright: ignore[reportAssignmentType, reportAttributeAccessIssue]
            return masked_relu(x, masks[level])
        return F.relu(x, inplace=True)

    def _run_units(self, names: Sequence[str], x: Tensor, masks: list[LevelMask]) -> Tensor:
        """Units that follow each other, before the last ReLU."""
        for i, name in enumerate(names):
            x = self._activated(x, masks, name) if i else x
            x = self.units[name](x, masks)
        return x


def segments(units: tuple[int, ...], middle: str = "") -> list[tuple[str, ...]]:
    """Names of the units that activation checkpointing recomputes together.

    One at a time in the first block, whose units hold most; in the others as many as a block has
    segments, so that what is kept and what is recomputed at once are both small. The unit `middle`
    is the last of a segment.

    Source: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016).
    """
    found: list[tuple[str, ...]] = []
    for block, num_units in enumerate(units):
        names = [f"block{block + 1}_unit{unit + 1}" for unit in range(num_units)]
        size = 1 if block == 0 else max(round(math.sqrt(num_units)), 1)
        end = names.index(middle) + 1 if middle in names else num_units
        for part in (names[:end], names[end:]):
            found.extend(tuple(part[i : i + size]) for i in range(0, len(part), size))
    return found
