"""Writes `torchvision_*` and `timm_basic_*` beside it: narrow ResNets, and what they compute.

The first is torchvision's, of bottlenecks; the second timm's, of basic units, for which torchvision
has no dilation.

From the repository's root, in the side venv of `make parity-torchvision`:

    .parity/torchvision/bin/python -m tests.golden.make_torchvision_golden

Each state dict is saved by the older of `torch.save`'s formats and in half precision, which keeps
it small; the net runs in float64 on these values, on 16 images, one of each class of (H mod 4, W
mod 4), at output strides 8, 16 and 32.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import timm.models.resnet
import torch
from parity.torchvision_live import randomise, run
from torch import Tensor, nn
from torchvision.models.resnet import Bottleneck, ResNet

HERE = Path(__file__).parent
BASE_DEPTH = 2
UNITS = [1, 1, 1, 2]
NUM_CLASSES = 2
SIZES = [(17 + i, 21 + j) for i in range(4) for j in range(4)]
ENDS_OF = 6
"""The image whose block ends are kept."""


class NarrowResNet(ResNet):
    """torchvision's own construction, with 2 channels for every 64."""

    def __init__(self, output_stride: int) -> None:
        replaced = [False, output_stride == 8, output_stride <= 16]
        super().__init__(Bottleneck, UNITS, replace_stride_with_dilation=replaced)
        self.fc = nn.Linear(32 * BASE_DEPTH, NUM_CLASSES)

    @property
    def inplanes(self) -> int:
        return self.__dict__["_inplanes"]

    @inplanes.setter
    def inplanes(self, channels: int) -> None:
        # The constructor's first assignment is the stem's 64; later ones are made from `planes`.
        first = "_inplanes" not in self.__dict__
        self.__dict__["_inplanes"] = BASE_DEPTH if first else channels

    def _make_layer(self, block, planes, *args, **options):
        return super()._make_layer(block, planes * BASE_DEPTH // 64, *args, **options)


class NarrowBasicResNet(nn.Module):
    """timm's own blocks and its names, with 2 channels for every 64."""

    def __init__(self, output_stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, BASE_DEPTH, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(BASE_DEPTH)
        self.act1 = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        stages, _ = timm.models.resnet.make_blocks(
            (timm.models.resnet.BasicBlock,) * 4,
            tuple(BASE_DEPTH << block for block in range(4)),
            tuple(UNITS),
            BASE_DEPTH,
            output_stride=output_stride,
        )
        for name, stage in stages:
            self.add_module(name, stage)
        self.fc = nn.Linear(8 * BASE_DEPTH, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.act1(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


def main() -> None:
    torch.set_num_threads(1)
    write("torchvision", NarrowResNet, num_out=32 * BASE_DEPTH)
    write("timm_basic", NarrowBasicResNet, num_out=8 * BASE_DEPTH)


def write(name: str, build: Callable[[int], nn.Module], *, num_out: int) -> None:
    generator = torch.Generator().manual_seed(3)
    net = build(32)
    randomise(net, generator, calm=False)
    net.half()
    path = HERE / f"{name}_resnet.pth"
    torch.save(net.state_dict(), path, _use_new_zipfile_serialization=False)
    state = net.state_dict()
    head = nn.ConvTranspose2d(num_out, NUM_CLASSES, 3, stride=2)
    with torch.no_grad():
        head.weight.normal_(std=0.1, generator=generator)
        head.bias.normal_(generator=generator)
    weights, biases = head.weight.detach().clone().numpy(), head.bias.detach().clone().numpy()
    rng = np.random.default_rng(3)
    images = [rng.integers(0, 256, (*s, 3), dtype=np.uint8) for s in SIZES]
    np.savez_compressed(
        HERE / f"{name}_inputs.npz",
        weights=weights,
        biases=biases,
        **{f"image{i:02}": image for i, image in enumerate(images)},
    )
    for stride in (8, 16, 32):
        net = build(stride).double().eval()
        net.load_state_dict(state)
        results = run(net, head, images, torch.float64)
        kept = {
            n: v for n, v in results.items() if "/block" not in n or n.startswith(f"{ENDS_OF}/")
        }
        np.savez_compressed(HERE / f"{name}_stride{stride}.npz", **kept)


if __name__ == "__main__":
    main()
