"""ResNet-50 at output stride 16 with the upsampling head, as one writes it in plain PyTorch.

`nn.Conv2d`, `nn.BatchNorm2d` in eval mode with trained affine, `F.relu`, padding by the
convolutions: the other side of the benchmarks. It takes one image size at a time, or a batch of
images of one size.
"""

import torch.nn.functional as F
from torch import Tensor, nn


def conv(num_in: int, num_out: int, size: int, stride: int = 1, rate: int = 1) -> nn.Conv2d:
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
    """Body and head; the stride is in the last unit of a block, as in TF-Slim."""

    def __init__(self, num_classes: int, units: tuple[int, ...] = (3, 4, 6, 3)) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(3, 64, 7, 2), nn.BatchNorm2d(64)
        num_in, bodies = 64, []
        for block, num_units in enumerate(units):
            depth, rate = 64 << block, 2 if block == 3 else 1
            for unit in range(num_units):
                stride = 2 if block < 2 and unit == num_units - 1 else 1
                bodies.append(Unit(num_in, depth, stride, rate))
                num_in = 4 * depth
        self.units = nn.Sequential(*bodies)
        self.head = nn.ConvTranspose2d(num_in, num_classes, 3, 2)

    def forward(self, pixels: Tensor) -> Tensor:
        """`[n, 3, h, w]` to logits at stride 8."""
        x = F.relu(self.bn1(self.conv1(pixels)))
        x = self.units(F.max_pool2d(x, 3, 2, padding=1))
        return self.head(x)[:, :, : 2 * x.shape[2], : 2 * x.shape[3]]
