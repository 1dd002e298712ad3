"""The pixel labeller: a ResNet v1 body and a transposed convolution that doubles its resolution.

Takes `[n, c, h, w]` pixels on a canvas; gives `[n, k, 2 * ch, 2 * cw]` logits, `ch` and `cw` being
the canvas's cells at `output_stride`: stride 8 for a body of stride 16.

Source: Long et al., "Fully Convolutional Networks" (2015), with the head of pose-tensorflow:
3x3, stride 2, SAME. No activation: `slim.conv2d_transpose` adds a ReLU unless told otherwise, which
makes every logit at least 0; `head_relu` has it for weights that were trained so.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anysize.config import INTERMEDIATE_UNIT, ModelConfig
from anysize.geometry import Layout, NetGeometry
from anysize.models.levels import has_basic_units, num_out, resnet_geometry, units_of
from anysize.models.net import Net
from anysize.models.ops import conv_transpose_same
from anysize.models.resnet_v1 import ResNetV1


class UpsamplingHead(nn.Module):
    """Transposed convolution 3x3, stride 2; its output may be negative."""

    def __init__(
        self, num_in: int, num_classes: int, *, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        bound = math.sqrt(6.0 / (9 * num_in + 9 * num_classes))
        weights = torch.empty(num_in, num_classes, 3, 3)
        self.weights = nn.Parameter(weights.uniform_(-bound, bound, generator=generator))
        self.biases = nn.Parameter(torch.zeros(num_classes))

    def forward(self, x: Tensor) -> Tensor:
        """`[n, num_in, h, w]`, zero outside the images, to `[n, num_classes, 2h, 2w]`."""
        return conv_transpose_same(x, self.weights, self.biases)


class FCN(Net):
    """Body and head.

    Attributes:
        intermediate: Another head for part maps of joints, on a unit in the middle of the body. Its
            maps follow the logits in training mode only.
    """

    def __init__(
        self,
        body: ResNetV1,
        head: UpsamplingHead,
        *,
        intermediate: UpsamplingHead | None = None,
        head_relu: bool = False,
    ) -> None:
        super().__init__()
        self.head_relu = head_relu
        self.body = body
        self.head = head
        self.intermediate = intermediate

    @property
    def geometry(self) -> NetGeometry:
        """See `Net`."""
        return self.body.geometry

    @property
    def recomputes(self) -> bool:
        """See `Net`."""
        return self.body.activation_checkpointing

    @recomputes.setter
    def recomputes(self, value: bool) -> None:
        self.body.activation_checkpointing = value

    def forward(self, pixels: Tensor, layout: Layout) -> Tensor:
        """Logits on the head's grid.

        Args:
            pixels: `[n, c, h, w]`, normalised, zero outside the images; `h` and `w` multiples of 4.
            layout: Of the images on the canvas.

        Returns:
            `[n, k, 2 * ch, 2 * cw]`; the cells of an image are its `coarse_rect`, doubled, and
            everything else is meaningless.
        """
        if self.intermediate is not None and self.training:
            middle, last = self.body.features(pixels, layout)
            return torch.cat([self.head(last), self.intermediate(middle)], 1)
        logits = self.head(self.body(pixels, layout))
        return F.relu(logits) if self.head_relu else logits


def build_fcn(
    config: ModelConfig, num_classes: int, *, generator: torch.Generator | None = None
) -> FCN:
    """Builds a ResNet v1 with the upsampling head."""
    middle = f"block3_unit{INTERMEDIATE_UNIT}" if config.intermediate else ""
    body = ResNetV1(
        units_of(config),
        geometry=resnet_geometry(config),
        basic_units=has_basic_units(config),
        num_channels=config.num_channels,
        base_depth=config.base_depth,
        stride_position=config.stride_position,
        dilation_rule=config.dilation_rule,
        norm=config.norm,
        norm_decay=config.norm_decay,
        activation_checkpointing=config.activation_checkpointing,
        middle=middle,
        generator=generator,
    )
    head = UpsamplingHead(body.num_out, num_classes, generator=generator)
    intermediate = None
    if middle:
        num_in = num_out(config.base_depth, block=2, basic=has_basic_units(config))
        intermediate = UpsamplingHead(num_in, num_classes // 3, generator=generator)
    return FCN(body, head, intermediate=intermediate, head_relu=config.head_relu)
