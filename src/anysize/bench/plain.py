"""The product's net as one writes it in plain PyTorch: the other side of the benchmark.

`nn.Conv2d`, `nn.BatchNorm2d` in eval mode with trained affine, `F.relu`, padding by the
convolutions. It takes one image size at a time, or a batch of images of one size.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from anysize.config import ModelConfig
from anysize.models.levels import EXPANSION, UnitPlan, has_basic_units, plan_units, units_of


def conv(num_in: int, num_out: int, size: int, stride: int = 1, rate: int = 1) -> nn.Conv2d:
    """A convolution without bias that keeps the extent, or halves it upwards."""
    return nn.Conv2d(
        num_in, num_out, size, stride, padding=rate * (size - 1) // 2, dilation=rate, bias=False
    )


class Unit(nn.Module):
    """A bottleneck unit, or a basic one."""

    def __init__(self, num_in: int, depth: int, plan: UnitPlan, *, basic: bool) -> None:
        super().__init__()
        self.stride = plan.stride
        if basic:
            convs = [
                conv(num_in, depth, 3, plan.stride, plan.rate),
                conv(depth, depth, 3, 1, plan.rate_out),
            ]
        else:
            convs = [
                conv(num_in, depth, 1),
                conv(depth, depth, 3, plan.stride, plan.rate),
                conv(depth, EXPANSION * depth, 1),
            ]
        self.convs = nn.ModuleList(convs)
        self.norms = nn.ModuleList(nn.BatchNorm2d(c.out_channels) for c in convs)
        self.num_out = convs[-1].out_channels
        self.shortcut = None
        if num_in != self.num_out:
            self.shortcut = nn.Sequential(
                conv(num_in, self.num_out, 1, plan.stride), nn.BatchNorm2d(self.num_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        """`[n, num_in, h, w]` to `[n, num_out, h / stride, w / stride]`."""
        s = self.stride
        y = x[:, :, ::s, ::s] if self.shortcut is None else self.shortcut(x)
        for i, (convolution, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = norm(convolution(F.relu(x) if i else x))
        return F.relu(x + y)


class PlainFCN(nn.Module):
    """Body and head; strides and dilations are those of the product's net."""

    def __init__(self, config: ModelConfig, num_classes: int) -> None:
        super().__init__()
        num_in = config.base_depth
        self.conv1, self.bn1 = conv(config.num_channels, num_in, 7, 2), nn.BatchNorm2d(num_in)
        units: list[Unit] = []
        basic = has_basic_units(config)
        for plan in plan_units(units_of(config), config.output_stride):
            units.append(Unit(num_in, config.base_depth << plan.block, plan, basic=basic))
            num_in = units[-1].num_out
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
