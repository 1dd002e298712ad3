"""Nets as people write them; tests of the command copy this file beside a run.toml."""

import torch
import torch.nn.functional as F
from torch import nn


def block(num_in, num_out):
    return nn.Sequential(
        nn.Conv2d(num_in, num_out, 3, padding=1, bias=False), nn.BatchNorm2d(num_out), nn.ReLU()
    )


class SmallUnet(nn.Module):
    """Images must be multiples of 4."""

    def __init__(self, num_classes, num_channels=3, width=16, dropout=0.0):
        super().__init__()
        self.down1 = block(num_channels, width)
        self.down2 = block(width, 2 * width)
        self.down3 = block(2 * width, 4 * width)
        self.up2 = block(6 * width, 2 * width)
        self.up1 = block(3 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Conv2d(width, num_classes, 3, padding=1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.down3(F.max_pool2d(b, 2))
        b = self.up2(torch.cat([b, F.interpolate(c, scale_factor=2.0)], 1))
        a = self.up1(torch.cat([a, F.interpolate(b, scale_factor=2.0)], 1))
        return self.head(self.dropout(a))


class Lister(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.conv = nn.Conv2d(3, num_classes, 3, padding=1)

    def forward(self, x):
        return [self.conv(x)]


class Classifier(Lister):
    def forward(self, x):
        return self.conv(x).mean((2, 3))


class Pooler(Lister):
    """A norm behind global pooling, as DeepLab's image branch has it."""

    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.branch = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(num_classes, num_classes, 1),
            nn.BatchNorm2d(num_classes),
        )
        self.norm = nn.BatchNorm2d(num_classes)

    def forward(self, x):
        y = self.norm(self.conv(x))
        return y + self.branch(y)


class Resizer(Lister):
    """Exact on canvases; traced, it has the extents of one image."""

    def forward(self, x):
        small = self.conv(F.avg_pool2d(x, 2))
        size = [int(n) for n in x.shape[2:]] if torch.jit.is_tracing() else x.shape[2:]
        return F.interpolate(small, size=size)


class Pyramid(Lister):
    """Pools to 2x2 cells, which ONNX has no operation for."""

    def forward(self, x):
        y = self.conv(x)
        return y + F.interpolate(F.adaptive_avg_pool2d(y, 2), size=x.shape[2:])


def two_classes():
    return nn.Conv2d(3, 2, 3, padding=1)


def broken(num_classes):
    raise RuntimeError("no such layer")


def number():
    return 3


a_net = nn.Conv2d(3, 2, 3)
