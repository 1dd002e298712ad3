"""Strides, dilations and reach of a ResNet v1, and the geometry that follows from them.

Needs no PyTorch, so that canvases can be planned for a net before it is built.

Sources: tf_slim 1.1.0 `nets/resnet_utils.py`; torchvision `models/resnet.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from anysize.config import BASIC_DEPTHS, UNITS, ModelConfig
from anysize.geometry import NetGeometry, round_up

StridePosition = Literal["last_3x3", "first_3x3", "first_1x1"]
DilationRule = Literal["new", "previous"]

EXPANSION = 4
"""Channels of a bottleneck unit's output, over those of its 3x3 convolution; 1 in a basic unit."""

STEM_REACH = 4
"""Pixels: 3 of the 7x7 convolution, and 2 cells of 2 pixels of the pooling."""


def units_of(config: ModelConfig) -> tuple[int, ...]:
    """Units in each of the four blocks."""
    return config.units or UNITS[config.depth]


def has_basic_units(config: ModelConfig) -> bool:
    """Whether units are two 3x3 convolutions, not a bottleneck."""
    return config.basic_units or (not config.units and config.depth in BASIC_DEPTHS)


def resnet_geometry(config: ModelConfig) -> NetGeometry:
    """What placements need to know of the ResNet that `[model]` describes, with its head."""
    plans = plan_units(
        units_of(config), config.output_stride, config.stride_position, config.dilation_rule
    )
    reach = reach_pixels(plans, basic=has_basic_units(config))
    reach = max(reach, config.output_stride)  # The head's 3x3 reaches one cell.
    return NetGeometry(
        output_stride=config.output_stride,
        pool_padding=config.pool_padding,
        gutter=round_up(reach, config.output_stride),
    )


def num_out(base_depth: int, block: int, *, basic: bool = False) -> int:
    """Channels of a block's output; blocks count from 0."""
    return (1 if basic else EXPANSION) * base_depth << block


def reach_pixels(plans: Sequence[UnitPlan], *, basic: bool = False) -> int:
    """The farthest that one operation of the body reads beyond an image, in pixels."""
    second = (plan.rate_out << plan.level_out for plan in plans if basic)
    return max(STEM_REACH, *(plan.rate << plan.level_in for plan in plans), *second)


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """Stride and dilations of one unit, and the level of its input and output.

    `rate` is that of the 3x3 convolution, in a basic unit of the first; `rate_out` of its second.
    """

    block: int
    unit: int
    stride: int
    rate: int
    rate_out: int
    level_in: int
    level_out: int


def plan_units(
    units: tuple[int, ...],
    output_stride: int,
    stride_position: StridePosition = "last_3x3",
    dilation_rule: DilationRule = "new",
) -> list[UnitPlan]:
    """Strides and dilations of all units for an output stride.

    Once the target stride is reached, a unit that would have a stride gets none, and the stride
    multiplies the dilation instead: from the next unit on, where the unit is the last of its block;
    from this unit on, where the rule is "new"; and where it is "previous", from the next unit on,
    in a basic unit from its second convolution on.

    Source: tf_slim `stack_blocks_dense`; torchvision `_make_layer`; timm `make_blocks`.
    """
    in_last = stride_position == "last_3x3"
    nominal = (2, 2, 2, 1) if in_last else (1, 2, 2, 2)
    plans: list[UnitPlan] = []
    level, rate = 2, 1
    for block, (num_units, block_stride) in enumerate(zip(units, nominal, strict=True)):
        for unit in range(num_units):
            stride = block_stride if unit == (num_units - 1 if in_last else 0) else 1
            if stride == 1 or 1 << level < output_stride:
                level_in, level = level, level + (stride == 2)
                plans.append(UnitPlan(block, unit, stride, rate, rate, level_in, level))
                continue
            previous, rate = rate, rate * stride
            first = rate if dilation_rule == "new" and not in_last else previous
            plans.append(
                UnitPlan(block, unit, 1, first, previous if in_last else rate, level, level)
            )
    return plans
