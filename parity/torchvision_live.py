"""What torchvision and timm compute, with their own nets, savers and image conventions.

Run in the side venv (`make parity-torchvision`); knows nothing of Anysize:

    python parity/torchvision_live.py OUT

writes state dicts with random weights and statistics, and for every output stride and precision the
block ends, logits, loss and gradients of 16 small images, one of each class of (H mod 4, W mod 4).

Each net is drawn twice. Where a ReLU's input is within rounding of zero, its gradient is there in
one program and not in the other, and few such places move the gradient of the first convolution:
torchvision's own, in float32, was 8e-3 of the range off its own in float64, while its logits were
8e-6 off. So float64 runs on lively weights, whose activations cross zero everywhere, and float32 on
calm ones, which keep them away from zero as far as random weights can.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn.functional as F
import torchvision
from safetensors.torch import save_file
from torch import Tensor, nn

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZES = [(29 + i, 38 + j) for i in range(4) for j in range(4)]
STRIDES = (8, 16, 32)
NETS = (
    "torchvision-resnet50",
    "timm-resnet50",
    "torchvision-resnet101",
    "torchvision-resnet18",
    "timm-resnet34",
)
NUM_CLASSES = 15


def strides_of(name: str) -> tuple[int, ...]:
    """Output strides to compare: for basic units torchvision itself has no dilation."""
    return (32,) if name == "torchvision-resnet18" else STRIDES


def build(name: str, output_stride: int) -> nn.Module:
    """A net of one of the two systems, with its own way to ask for an output stride."""
    system, _, arch = name.partition("-")
    if system == "timm":
        return timm.create_model(arch, output_stride=output_stride)
    replaced = [False, output_stride == 8, output_stride <= 16]
    net = getattr(torchvision.models, arch)
    return net(weights=None, replace_stride_with_dilation=replaced)


def randomise(net: nn.Module, generator: torch.Generator, *, calm: bool) -> None:
    """Random weights whose activations keep a sensible range through all units.

    Statistics are first measured on noise, then moved away from what was measured.
    """
    norms = {n: m for n, m in net.named_modules() if isinstance(m, nn.BatchNorm2d)}
    bottlenecks = any(n.endswith("bn3") for n in norms)
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.Conv2d):
                std = (2.0 / module.weight[0].numel()) ** 0.5
                module.weight.normal_(std=std, generator=generator)
        for name, norm in norms.items():
            norm.weight.uniform_(0.5, 1.5, generator=generator)
            norm.bias.uniform_(-0.5, 0.5, generator=generator)
            norm.momentum = 1.0
            if calm:
                calm_down(name, norm, generator, last="bn3" if bottlenecks else "bn2")
        net.train()
        net(torch.randn(4, 3, 96, 96, generator=generator))
        for norm in norms.values():
            shift = torch.empty_like(norm.running_mean).uniform_(-0.3, 0.3, generator=generator)
            norm.running_mean += shift * norm.running_var.sqrt()
            norm.running_var *= torch.empty_like(shift).uniform_(0.6, 1.6, generator=generator)
            norm.num_batches_tracked += 41
    net.eval()


def calm_down(name: str, norm: nn.BatchNorm2d, generator: torch.Generator, *, last: str) -> None:
    """Weak branches on a strong trunk, and inside a unit channels that are on or off."""
    if ".bn" in name and name.endswith(last):
        norm.weight *= 0.2
        norm.bias *= 0.2
    elif ".bn" in name:
        off = torch.rand(norm.bias.shape, generator=generator) < 0.3
        norm.bias.copy_(torch.where(off, -3.0, 3.0) * norm.weight)
    elif "downsample" in name:
        norm.bias += 3 * norm.weight


def block_ends(net: nn.Module, pixels: Tensor) -> list[Tensor]:
    """The four feature maps, by the net's own modules."""
    x = net.conv1(pixels)
    x = net.bn1(x)
    x = net.act1(x) if hasattr(net, "act1") else net.relu(x)
    x = net.maxpool(x)
    ends = []
    for layer in (net.layer1, net.layer2, net.layer3, net.layer4):
        x = layer(x)
        ends.append(x)
    return ends


def run(
    net: nn.Module, head: nn.ConvTranspose2d, images: list[np.ndarray], dtype: torch.dtype
) -> dict[str, np.ndarray]:
    """One training step's forward and backward pass: one loss over all images."""
    net.to(dtype).zero_grad()
    head.to(dtype).zero_grad()
    mean, std = (torch.tensor(v, dtype=dtype).view(3, 1, 1) for v in (MEAN, STD))
    out: dict[str, np.ndarray] = {}
    targets, logits = [], []
    generator = torch.Generator().manual_seed(11)
    for i, image in enumerate(images):
        pixels = torch.from_numpy(image).permute(2, 0, 1).to(dtype) / 255
        ends = block_ends(net, ((pixels - mean) / std)[None])
        height, width = ends[-1].shape[2:]
        # SAME: the full result, whose first cell is the first, and as many as twice the input has.
        scores = head(ends[-1])[:, :, : 2 * height, : 2 * width]
        targets.append(torch.rand(scores.shape, generator=generator).round())
        logits.append(scores)
        for k, end in enumerate(ends, 1):
            out[f"{i}/block{k}"] = end.detach().numpy()
        out[f"{i}/logits"] = scores.detach().numpy()
        out[f"{i}/target"] = targets[-1].numpy().astype(np.uint8)
    count = sum(t.numel() for t in targets)
    loss = sum(
        F.binary_cross_entropy_with_logits(x, t.to(dtype), reduction="sum")
        for x, t in zip(logits, targets, strict=True)
    )
    loss = loss / count
    loss.backward()
    out["loss"] = loss.detach().numpy()
    out["grad/conv1"] = net.conv1.weight.grad.numpy().copy()
    out["grad/head"] = head.weight.grad.numpy().copy()
    return out


def write_files(net: nn.Module, out: Path, name: str) -> None:
    """The state dict in the three forms that are in use."""
    torch.save(net.state_dict(), out / f"{name}.pth")
    legacy = out / f"{name}.legacy.pth"
    torch.save(net.state_dict(), legacy, _use_new_zipfile_serialization=False)
    save_file(net.state_dict(), out / f"{name}.safetensors")


def main() -> None:
    """Writes everything to the folder named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--nets", nargs="+", default=list(NETS))
    arguments = parser.parse_args()
    out = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    rng = np.random.default_rng(5)
    images = [rng.integers(0, 256, (*s, 3), dtype=np.uint8) for s in SIZES]
    np.savez(out / "images.npz", *images)
    for seed, name in enumerate(arguments.nets):
        generator = torch.Generator().manual_seed(seed)
        num_out = build(name, 32).fc.in_features
        head = nn.ConvTranspose2d(num_out, NUM_CLASSES, 3, stride=2, padding=0)
        with torch.no_grad():
            head.weight.normal_(std=0.02, generator=generator)
            head.bias.normal_(std=0.5, generator=generator)
        own = {n: t.clone() for n, t in head.state_dict().items()}
        np.savez(out / f"{name}-head.npz", weights=own["weight"], biases=own["bias"])
        for precision, dtype in (("float64", torch.float64), ("float32", torch.float32)):
            net = build(name, 32)
            randomise(net, generator, calm=precision == "float32")
            write_files(net, out, f"{name}-{precision}")
            state = {n: t.clone() for n, t in net.state_dict().items()}
            for stride in strides_of(name):
                net = build(name, stride).eval()
                net.load_state_dict(state)
                head.float().load_state_dict(own)
                results = run(net, head, images, dtype)
                np.savez(out / f"{name}-{stride}-{precision}.npz", **results)
                print(f"{name}, output stride {stride}, {precision}: loss {results['loss']:.6f}")


if __name__ == "__main__":
    main()
