"""The product's net as one writes it in plain PyTorch: the other side of the benchmark.

`nn.Conv2d`, `nn.BatchNorm2d` in eval mode with trained affine, `F.relu`, padding by the
convolutions. It takes one image size at a time, or a batch of images of one size.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from anysize.config import UNITS, ModelConfig
from anysize.models.levels import plan_units


def conv(num_in: int, num_out: int, size: int, stride: int = 1, rate: int = 1) -> nn.Conv2d:
    """A convolution without bias that keeps the extent, or halves it upwards."""
    return nn.Conv2d(
        num_in, num_out, size, stride, padding=rate * (size - 1) // 2, dilation=rate, bias=False
    )


class Unit(nn.Module):
    """A bottleneck unit."""

    def __init__(self, num_in: int, depth: int, stride: int, rate: int) -> None:
        super().__init__()
        self.stride = stride
        self.conv1, self.bn1 = conv(num_in, depth, 1), nn.BatchNorm2d(depth)
        self.conv2, self.bn2 = conv(depth, depth, 3, stride, rate), nn.BatchNorm2d(depth)
        self.conv3, self.bn3 = conv(depth, 4 * depth, 1), nn.BatchNorm2d(4 * depth)
        self.shortcut = None
        if num_in != 4 * depth:
            self.shortcut = nn.Sequential(
                conv(num_in, 4 * depth, 1, stride), nn.BatchNorm2d(4 * depth)
            )

    def forward(self, x: Tensor) -> Tensor:
        """`[n, num_in, h, w]` to `[n, 4 * depth, h / stride, w / stride]`."""
        s = self.stride
        shortcut = x[:, :, ::s, ::s] if self.shortcut is None else self.shortcut(x)
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + shortcut)


class PlainFCN(nn.Module):
    """Body and head; strides and dilations are those of the product's net."""

    def __init__(self, config: ModelConfig, num_classes: int) -> None:
        super().__init__()
        num_in = config.base_depth
        self.conv1, self.bn1 = conv(config.num_channels, num_in, 7, 2), nn.BatchNorm2d(num_in)
        units: list[Unit] = []
        for plan in plan_units(config.units or UNITS[config.depth], config.output_stride):
            depth = config.base_depth << plan.block
            units.append(Unit(num_in, depth, plan.stride, plan.rate))
            num_in = 4 * depth
        self.units = nn.Sequential(*units)
        self.head = nn.ConvTranspose2d(num_in, num_classes, 3, 2)

    def train(self, mode: bool = True) -> PlainFCN:
        """Trains all but the norms' statistics."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self

    def forward(self, pixels: Tensor) -> Tensor:
        """`[n, c, h, w]` to logits at half the output stride."""
        x = F.relu(self.bn1(self.conv1(pixels)))
        x = self.units(F.max_pool2d(x, 3, 2, padding=1))
        return self.head(x)[:, :, : 2 * x.shape[2], : 2 * x.shape[3]]
