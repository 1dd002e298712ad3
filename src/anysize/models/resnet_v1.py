"""ResNet v1 bodies with a chosen output stride, as TF-Slim builds them.

Takes `[n, c, h, w]` pixels on a canvas and the layout of the images on it; gives `[n, 32 * base
depth, h / output_stride, w / output_stride]`, zero outside the images.

The paper's net: a 7x7/2 convolution, a 3x3/2 max-pool, then four blocks of bottleneck units (1x1,
3x3, 1x1, each with batch norm) with 3, 4, 6, 3 units for ResNet-50 and more for the others.

Three systems published weights for it, and differ in three rules, which are arguments:

- `pool_padding` (in `NetGeometry`): where the pooling starts and how it rounds.
- `stride_position`: which convolution of a block has the stride. "last_3x3": the 3x3 of the last
  unit (TF-Slim). "first_3x3": the 3x3 of the first unit (torchvision). "first_1x1": the first 1x1
  and the shortcut of the first unit (Caffe).
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
from anysize.models.levels import EXPANSION, DilationRule, StridePosition, UnitPlan, plan_units
from anysize.models.ops import ConvNorm, LevelMask, level_masks, masked_relu, max_pool

Norm = Literal["frozen", "trained"]


class Bottleneck(nn.Module):
    """A bottleneck unit: 1x1, 3x3, 1x1, added to its shortcut."""

    def __init__(
        self,
        plan: UnitPlan,
        num_in: int,
        depth: int,
        *,
        stride_in_1x1: bool,
        norm: Norm,
        norm_decay: float,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__()
        self.plan = plan
        num_out = EXPANSION * depth
        first, second = (plan.stride, 1) if stride_in_1x1 else (1, plan.stride)
        self.middle_level = plan.level_out if stride_in_1x1 else plan.level_in

        def conv(num_in: int, num_out: int, size: int, stride: int, rate: int = 1) -> ConvNorm:
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

        self.shortcut = None if num_in == num_out else conv(num_in, num_out, 1, plan.stride)
        self.conv1 = conv(num_in, depth, 1, first)
        self.conv2 = conv(depth, depth, 3, second, plan.rate)
        self.conv3 = conv(depth, num_out, 1, 1)

    def forward(self, x: Tensor, masks: list[LevelMask]) -> Tensor:
        """`[n, num_in, h, w]` to `[n, 4 * depth, h / stride, w / stride]`, before the last ReLU.

        The outside of the result holds anything: only 1x1 convolutions follow.
        """
        middle, out = masks[self.middle_level], masks[self.plan.level_out]
        if self.shortcut is not None:
            shortcut = self.shortcut(x, out)
        else:
            s = self.plan.stride
            shortcut = x[:, :, ::s, ::s]
        y = masked_relu(self.conv1(x, middle), middle)
        y = F.relu(self.conv2(y, out), inplace=True)
        return self.conv3(y, out).add_(shortcut)


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
        self.conv1 = ConvNorm(
            num_channels,
            base_depth,
            7,
            stride=2,
            norm=norm,
            norm_decay=norm_decay,
            generator=generator,
        )
        num_in = base_depth
        self.units = nn.ModuleDict()
        self.middle, self._middle_level = middle, 0
        for plan in plan_units(units, geometry.output_stride, stride_position, dilation_rule):
            depth = base_depth << plan.block
            name = f"block{plan.block + 1}_unit{plan.unit + 1}"
            self._middle_level = plan.level_out if name == middle else self._middle_level
            self.units[name] = Bottleneck(
                plan,
                num_in,
                depth,
                stride_in_1x1=stride_position == "first_1x1",
                norm=norm,
                norm_decay=norm_decay,
                generator=generator,
            )
            num_in = EXPANSION * depth
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
            x = F.relu(x, inplace=True) if i else x
            x = self._kept_or_recomputed(functools.partial(self._run_units, names), x, masks)
            if names[-1] == self.middle:  # Copied, since both ReLUs work in place.
                features.append(masked_relu(x.clone(), masks[self._middle_level]))
        return [*features, masked_relu(x, masks[-1])]

    def _kept_or_recomputed(
        self, run: Callable[[Tensor, list[LevelMask]], Tensor], x: Tensor, masks: list[LevelMask]
    ) -> Tensor:
        if self.activation_checkpointing and torch.is_grad_enabled():
            return checkpoint(run, x, masks, use_reentrant=False)
        return run(x, masks)

    def _stem(self, pixels: Tensor, masks: list[LevelMask]) -> Tensor:
        return max_pool(masked_relu(self.conv1(pixels, masks[1]), masks[1]))

    def _run_units(self, names: Sequence[str], x: Tensor, masks: list[LevelMask]) -> Tensor:
        """Units that follow each other, before the last ReLU."""
        for i, name in enumerate(names):
            x = F.relu(x, inplace=True) if i else x
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
