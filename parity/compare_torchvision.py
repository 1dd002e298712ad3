"""Holds Anysize against what `torchvision_live.py` wrote: converts the files, runs, compares.

    python parity/compare_torchvision.py RUN_FOLDER

Every image runs alone and beside others on one canvas. Prints a table of the largest differences,
each as a share of the range of the live values, then the controls, which must be far off; exits
with 1 if a bound does not hold or a control is not seen.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from anysize.config import ModelConfig, PixelConvention, from_table
from anysize.data.loader import normalise
from anysize.geometry import (
    Canvas,
    Layout,
    NetGeometry,
    Size,
    check_layout,
    coarse_rect,
    level_rects,
    place,
    round_up,
    single,
)
from anysize.models.build import build_model
from anysize.models.fcn import FCN
from anysize.models.ops import conv_transpose_same

NETS = (
    "torchvision-resnet50",
    "timm-resnet50",
    "torchvision-resnet101",
    "torchvision-resnet18",
    "timm-resnet34",
)
BOUNDS = {"float32": 1e-4, "float64": 1e-9}
FORMS = (".pth", ".legacy.pth", ".safetensors")
FORMS_AGREE = ".pth, .legacy.pth and .safetensors convert to the same tensors"
SEEN = 1e-2
"""A control must differ by at least this share of the range."""

Upsampling = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Converted:
    """What `anysize convert` made of a file."""

    config: ModelConfig
    pixels: PixelConvention
    tensors: dict[str, Tensor]


def convert(path: Path) -> Converted:
    """Runs the command line on a file, and reads what it wrote."""
    target = path.with_name(path.name + ".anysize.safetensors")
    anysize = Path(sys.executable).with_name("anysize")
    subprocess.run([anysize, "convert", path, "-o", target], check=True, stdout=subprocess.DEVNULL)
    with safe_open(target, framework="pt") as file:
        metadata = file.metadata()
        tensors = {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
    target.unlink()
    return Converted(
        from_table(ModelConfig, json.loads(metadata["model"]), str(target)),
        from_table(PixelConvention, json.loads(metadata["pixels"]), str(target)),
        tensors,
    )


def convert_all(folder: Path, name: str) -> tuple[Converted, list[str]]:
    """Converts the three forms of a state dict; names those that give other tensors."""
    first, *others = (convert(folder / (name + f)) for f in FORMS)
    differing = [
        form
        for form, other in zip(FORMS[1:], others, strict=True)
        if set(other.tensors) != set(first.tensors)
        or not all(torch.equal(t, other.tensors[n]) for n, t in first.tensors.items())
    ]
    return first, differing


def build(converted: Converted, head: dict[str, NDArray[Any]], output_stride: int) -> FCN:
    """Our net, with the body of the file and the head of the live system."""
    config = dataclasses.replace(converted.config, output_stride=output_stride)
    net = build_model(config, head["biases"].shape[0])
    own = {f"head.{n}": torch.from_numpy(head[n]) for n in ("weights", "biases")}
    net.load_state_dict({**converted.tensors, **own})
    return net.eval()


def net_input(image: NDArray[np.uint8], pixels: PixelConvention, dtype: torch.dtype) -> Tensor:
    """Our normalisation; for float64 its formula, which it is held against."""
    ours = normalise(image, pixels)
    if dtype == torch.float32:
        return torch.from_numpy(ours).permute(2, 0, 1)
    ordered = image[..., ::-1] if pixels.channel_order == "BGR" else image
    values = ordered.astype(np.float64) * (pixels.max_value / 255)
    values = (values - np.array(pixels.mean)) / np.array(pixels.std)
    assert np.abs(values - ours).max() < 1e-5
    return torch.from_numpy(values).permute(2, 0, 1)


def beside_each_other(sizes: list[Size], geometry: NetGeometry) -> Layout:
    """Shelves of four images on one canvas, apart by the gutter and no more."""
    placements, top = [], 0
    for k in range(0, len(sizes), 4):
        shelf, left = sizes[k : k + 4], 0
        for size in shelf:
            placements.append(place(size, geometry, slot=0, cell_top=top, cell_left=left))
            left += geometry.cells(size.width) + geometry.gutter_cells
        top += max(geometry.cells(s.height) for s in shelf) + geometry.gutter_cells
    height = max(p.top + p.height for p in placements)
    width = max(p.left + p.width for p in placements)
    layout = Layout(Canvas(1, round_up(height, 4), round_up(width, 4)), tuple(placements))
    check_layout(layout, geometry)
    return layout


def run(
    net: FCN,
    layouts: list[tuple[Layout, list[int]]],
    inputs: list[Tensor],
    live: dict[str, NDArray[Any]],
    upsampling: Upsampling = conv_transpose_same,
) -> dict[str, NDArray[Any]]:
    """Our forward and backward pass over all layouts, in the live run's names."""
    out: dict[str, NDArray[Any]] = {}
    ends: dict[int, Tensor] = {}
    units = list(net.body.units.values())
    last = {u.plan.block: u for u in units}
    hooks = [
        unit.register_forward_hook(lambda _m, _i, y, b=b: ends.update({b: F.relu(y.detach())}))
        for b, unit in last.items()
    ]
    geometry = net.geometry
    count = sum(live[f"{i}/target"].size for _, indices in layouts for i in indices)
    net.zero_grad()
    loss = torch.zeros((), dtype=inputs[0].dtype)
    for layout, indices in layouts:
        pixels = inputs[0].new_zeros(layout.canvas.slots, 3, *layout.canvas[1:])
        for p, i in zip(layout.placements, indices, strict=True):
            pixels[p.slot, :, p.top : p.top + p.height, p.left : p.left + p.width] = inputs[i]
        logits = upsampling(net.body(pixels, layout), net.head.weights, net.head.biases)
        total = torch.zeros_like(loss)
        for k, (p, i) in enumerate(zip(layout.placements, indices, strict=True)):
            for block, unit in last.items():
                r = level_rects(layout, geometry, unit.plan.level_out)[k]
                end = ends[block][r.slot, :, r.top : r.top + r.height, r.left : r.left + r.width]
                out[f"{i}/block{block + 1}"] = end[None].numpy()
            r = coarse_rect(p, geometry)
            rows = slice(2 * r.top, 2 * (r.top + r.height))
            own = logits[r.slot, None, :, rows, 2 * r.left : 2 * (r.left + r.width)]
            out[f"{i}/logits"] = own.detach().numpy()
            target = torch.from_numpy(live[f"{i}/target"]).to(own.dtype)
            if target.shape == own.shape:
                total = total + F.binary_cross_entropy_with_logits(own, target, reduction="sum")
        (total / count).backward()
        loss += total.detach() / count
    for hook in hooks:
        hook.remove()
    out["loss"] = loss.numpy()
    assert net.body.conv1.weights.grad is not None
    assert net.head.weights.grad is not None
    out["grad/conv1"] = net.body.conv1.weights.grad.numpy()
    out["grad/head"] = net.head.weights.grad.numpy()
    return out


def differences(ours: dict[str, NDArray[Any]], live: dict[str, NDArray[Any]]) -> dict[str, float]:
    """The largest difference of each kind of value, as a share of its range; inf for a shape."""
    worst: dict[str, float] = {}
    for name, theirs in live.items():
        kind = name.partition("/")[2] if name[0].isdigit() else name
        if kind == "target":
            continue
        if ours[name].shape != theirs.shape:
            worst[kind] = np.inf
            continue
        scale = np.ptp(theirs) if theirs.size > 1 else abs(theirs)
        difference = float(np.abs(ours[name] - theirs).max() / scale)
        # Unlike `max`, it lets a NaN through, which is above every bound.
        worst[kind] = float(np.maximum(worst.get(kind, 0.0), difference))
    return worst


def layouts_of(sizes: list[Size], geometry: NetGeometry) -> dict[str, Any]:
    """Each image alone, and all on one canvas."""
    alone = [(single(s, geometry), [i]) for i, s in enumerate(sizes)]
    together = [(beside_each_other(sizes, geometry), list(range(len(sizes))))]
    return {"alone": alone, "canvas": together}


def compare(
    converted: Converted, folder: Path, name: str, output_stride: int, precision: str
) -> list[tuple[str, dict[str, float]]]:
    """Differences alone and on a canvas."""
    dtype = getattr(torch, precision)
    images, head, live = load_live(folder, name, output_stride, precision)
    net = build(converted, head, output_stride).to(dtype)
    inputs = [net_input(i, converted.pixels, dtype) for i in images]
    sizes = [Size(*i.shape[:2]) for i in images]
    return [
        (kind, differences(run(net, layouts, inputs, live), live))
        for kind, layouts in layouts_of(sizes, net.geometry).items()
    ]


def load_live(
    folder: Path, name: str, output_stride: int, precision: str
) -> tuple[list[NDArray[np.uint8]], dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Images, head and results of a live run."""
    images = list(np.load(folder / "images.npz").values())
    head = dict(np.load(folder / f"{name}-head.npz"))
    return images, head, dict(np.load(folder / f"{name}-{output_stride}-{precision}.npz"))


def one_pixel_off(x: Tensor, weights: Tensor, biases: Tensor) -> Tensor:
    """The wrong transposed convolution that has the right size."""
    return F.conv_transpose2d(x, weights, biases, stride=2, padding=1, output_padding=1)


def controls(converted: Converted, folder: Path, name: str) -> dict[str, float]:
    """The largest difference of each wrong rule, at output stride 8 in float64."""
    images, head, live = load_live(folder, name, 8, "float64")
    rules = converted.config
    flipped = dataclasses.replace(converted.pixels, channel_order="BGR")
    wrong: dict[str, tuple[ModelConfig, PixelConvention, Upsampling]] = {
        "dilation rule of TF-Slim": (
            dataclasses.replace(rules, dilation_rule="new"),
            converted.pixels,
            conv_transpose_same,
        ),
        "pooling of TF-Slim": (
            dataclasses.replace(rules, pool_padding="same"),
            converted.pixels,
            conv_transpose_same,
        ),
        "stride position of TF-Slim": (
            dataclasses.replace(rules, stride_position="last_3x3"),
            converted.pixels,
            conv_transpose_same,
        ),
        "channels flipped": (rules, flipped, conv_transpose_same),
        "output_padding=1": (rules, converted.pixels, one_pixel_off),
    }
    sizes = [Size(*i.shape[:2]) for i in images]
    found: dict[str, float] = {}
    for title, (config, pixels, upsampling) in wrong.items():
        net = build(dataclasses.replace(converted, config=config), head, 8).double()
        inputs = [net_input(i, pixels, torch.float64) for i in images]
        alone = layouts_of(sizes, net.geometry)["alone"]
        found[title] = differences(run(net, alone, inputs, live, upsampling), live)["logits"]
    return found


def main() -> int:
    """Prints the table; 1 if anything does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nets", nargs="+", default=list(NETS))
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    torch.set_num_threads(1)
    kinds = ("block1", "block2", "block3", "block4", "logits", "loss", "grad/conv1", "grad/head")
    print(
        f"{'net':22}{'stride':>7} {'precision':10}{'images':8}" + "".join(f"{k:>11}" for k in kinds)
    )
    failed = 0
    for name in arguments.nets:
        for precision, bound in BOUNDS.items():
            converted, differing = convert_all(folder, f"{name}-{precision}")
            failed += len(differing)
            print(f"{name}-{precision}: " + (f"{differing} DIFFER" if differing else FORMS_AGREE))
            strides = [s for s in (8, 16, 32) if (folder / f"{name}-{s}-{precision}.npz").exists()]
            failed += not strides
            for stride in strides:
                for kind, found in compare(converted, folder, name, stride, precision):
                    worst = float(np.max(list(found.values())))
                    failed += not worst <= bound
                    print(
                        f"{name:22}{stride:7} {precision:10}{kind:8}"
                        + "".join(f"{found[k]:11.1e}" for k in kinds)
                        + ("" if worst <= bound else f"  ABOVE {bound}")
                    )
    print(f"Controls (logits, float64, output stride 8); each must be above {SEEN}:")
    first = arguments.nets[0]
    converted, _ = convert_all(folder, f"{first}-float64")
    for title, found in controls(converted, folder, first).items():
        failed += not found > SEEN
        print(f"  {title:28}{found:11.1e}" + ("" if found > SEEN else "  NOT SEEN"))
    print("All hold." if not failed else f"{failed} do not hold.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
