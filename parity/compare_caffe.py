"""Holds Anysize against Caffe: in numpy to float64's last digits, and live where it installs.

    python parity/compare_caffe.py [--python PYTHON3.9]

Random nets of ResNet-50, 101 and 152 in full width, and a narrow one. First our converted nets
against a plain-numpy forward pass of Caffe's layers, float64, of files that were written byte by
byte. Then against Caffe itself (Kendryte's build of 1.0.0, which installs under Python 3.8 and
3.9): files from Caffe's own saver, taken over with `anysize convert`; block ends, logits, sigmoid
loss, gradients. Prints the largest differences, relative to the largest value of each array, then
the controls, which must be far off; exits with 1 if a bound does not hold or a control is not seen.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray
from torch import Tensor, nn

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.conversion import caffe_net  # noqa: E402
from tests.conversion.test_caffe import compare as compare_with_numpy  # noqa: E402
from tests.parity.test_exact_canvases import mosaic  # noqa: E402

from anysize.config import PixelConvention  # noqa: E402
from anysize.conversion.caffe import MEAN_PIXEL  # noqa: E402
from anysize.conversion.caffemodel import read_caffemodel  # noqa: E402
from anysize.data.loader import normalise  # noqa: E402
from anysize.geometry import (  # noqa: E402
    Layout,
    NetGeometry,
    Size,
    coarse_rect,
    level_rects,
    single,
)
from anysize.models.build import build_model  # noqa: E402
from anysize.models.fcn import FCN  # noqa: E402
from anysize.models.resnet_v1 import Bottleneck  # noqa: E402
from anysize.models.weights_file import Weights, load_weights  # noqa: E402

VENV = ROOT / ".parity" / "caffe"
PACKAGES = ("numpy==1.23.5", "protobuf==3.20.3", "scipy==1.10.1", "six==1.16.0")
CAFFE = "kendryte-caffe==1.0.0.20210829"
Archives = tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]
"""What Caffe gave, and what it was given."""

STRIDES = (32, 16, 8)
SIZES = [Size(37 + i, 46 + j) for i in range(4) for j in range(4)]
LIVE = ("end0", "end1", "end2", "end3", "logits", "loss", "active", "stem")
NETS = ("narrow", "ResNet-50", "ResNet-101", "ResNet-152")
FLOAT64, FLOAT32 = 1e-9, 1e-4
SEEN = 1e-2
"""A control must differ by at least this share of the range."""


def net(name: str, output_stride: int = 32) -> list[caffe_net.L]:
    """The layers of a random net; the same weights at every stride."""
    rules: dict[str, Any] = {"output_stride": output_stride, "seed": zlib.crc32(name.encode())}
    if name == "narrow":
        return caffe_net.resnet((2, 3, 2, 2), 8, eps=1e-4, **rules)
    depth = int(name.removeprefix("ResNet-"))
    units, numbered = caffe_net.KAIMING[depth]
    return caffe_net.resnet(units, 64, numbered=numbered, conv1_bias=depth == 50, **rules)


def against_numpy(name: str, folder: Path) -> bool:
    """Our converted net in float64 against the numpy forward pass, one row a stride."""
    path = folder / "net.caffemodel"
    path.write_bytes(caffe_net.encode_net(net(name)))
    sizes = SIZES if name == "narrow" else SIZES[:: {"ResNet-50": 1, "ResNet-101": 5}.get(name, 7)]
    fine = True
    for stride in STRIDES:
        layers = net(name, stride)
        exact = compare_with_numpy(path, layers, output_stride=stride, sizes=sizes)
        single = compare_with_numpy(
            path, layers, output_stride=stride, sizes=sizes[:2], dtype=torch.float32
        )
        passed = exact < FLOAT64 and single < FLOAT32
        row(name, "numpy", stride, len(sizes), f"{exact:.1e}", f"float32 {single:.1e}", passed)
        fine &= passed
    return fine


def row(*cells: object) -> None:
    """Prints a line of the table."""
    *values, passed = cells
    print("  ".join(f"{v!s:<10}" for v in values) + ("  ok" if passed else "  FAILED"), flush=True)


def find_python() -> str | None:
    """A Python that Kendryte's build of Caffe is for; pyenv may have one off the path."""
    for name in ("python3.9", "python3.8"):
        found = shutil.which(name)
        if found and subprocess.run([found, "--version"], capture_output=True).returncode == 0:
            return found
        if found and shutil.which("pyenv"):
            versions = _output("pyenv", "whence", name).split()
            if versions:
                return str(Path(_output("pyenv", "prefix", versions[-1]).strip()) / "bin" / name)
    return None


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def install(python: str | None) -> Path:
    """The side venv, made once."""
    inside = VENV / "bin" / "python"
    if not (VENV / "installed").exists():
        if python is None:
            raise SystemExit(f"{CAFFE} needs Python 3.8 or 3.9 (--python).")
        subprocess.run([python, "-m", "venv", "--clear", str(VENV)], check=True)
        pip = [str(inside), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *PACKAGES], check=True)
        # Its scikit-image is for resizing images, which is not used.
        subprocess.run([*pip, "--no-deps", CAFFE], check=True)
        (VENV / "installed").touch()
    return inside


def run_live(
    python: Path,
    net_at: Callable[[int], list[caffe_net.L]],
    folder: Path,
    images: Sequence[NDArray[np.uint8]],
) -> Archives:
    """Has Caffe run a net at all strides, and write its file; gives the images' targets as well.

    Args:
        python: Of the side venv.
        net_at: The layers for an output stride; the weights must be the same.
        folder: For everything that goes to and fro.
        images: RGB `[h, w, 3]`.
    """
    layers, rng = net_at(32), np.random.default_rng(7)
    weights = {f"{la.name}/{i}": b for la in layers for i, b in enumerate(la.blobs)}
    np.savez(folder / "weights.npz", **weights)
    data: dict[str, Any] = {f"image{i}": image for i, image in enumerate(images)}
    num_classes = layers[-1].blobs[0].shape[1]
    for stride in STRIDES:
        geometry = NetGeometry(output_stride=stride, pool_padding="caffe")
        text = caffe_net.prototxt(net_at(stride), images[0].shape[:2], loss=True)
        (folder / f"{stride}.prototxt").write_text(text)
        for i, image in enumerate(images):
            cells = [2 * geometry.cells(n) for n in image.shape[:2]]
            target = rng.integers(0, 2, (num_classes, *cells))
            data[f"target{stride}_{i}"] = target.astype(np.uint8)
    units = [la.name for la in layers if la.type == "Eltwise"]
    ends = np.array([[u for u in units if u.startswith(f"res{b}")][-1] for b in (2, 3, 4, 5)])
    data["mean"], data["ends"] = np.array(MEAN_PIXEL, np.float32), ends
    data["relus"] = np.array([la.tops[0] for la in layers if la.type == "ReLU"])
    np.savez(folder / "data.npz", count=len(images), **data)
    live = Path(__file__).parent / "caffe_live.py"
    done = subprocess.run([str(python), str(live), str(folder)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"Caffe failed:\n{done.stderr[-3000:]}")
    with np.load(folder / "live.npz") as found:
        return {n: found[n] for n in found.files}, data


def run_ours(
    model: FCN,
    pixels: PixelConvention,
    layout: Layout,
    images: Sequence[NDArray[np.uint8]],
    targets: Sequence[NDArray[np.uint8]],
) -> list[dict[str, Any]]:
    """Our net on one canvas: what `caffe_live.py` gives for each image, the losses as tensors."""
    canvas = torch.zeros(layout.canvas.slots, 3, *layout.canvas[1:])
    for p, image in zip(layout.placements, images, strict=True):
        values = torch.from_numpy(normalise(image, pixels)).permute(2, 0, 1)
        canvas[p.slot, :, p.top : p.top + p.height, p.left : p.left + p.width] = values
    relus: list[tuple[int, Tensor]] = []

    def record(module: nn.Module, level: int) -> Any:  # noqa: ANN401
        # The ReLU comes after the module and works in place: this is a copy of what it gives.
        return module.register_forward_hook(
            lambda _m, _i, y: relus.append((level, y.detach().clamp(min=0)))
        )

    units = [u for u in model.body.units.values() if isinstance(u, Bottleneck)]
    hooks = [record(model.body.conv1, 1)]
    for unit in units:
        out = unit.plan.level_out
        hooks += [record(unit.conv1, unit.middle_level), record(unit.conv2, out)]
        hooks.append(record(unit, out))
    logits = model(canvas, layout)
    for hook in hooks:
        hook.remove()
    ends = [3 * (i + 1) for i in {u.plan.block: i for i, u in enumerate(units)}.values()]
    results: list[dict[str, Any]] = []
    for i, (p, target) in enumerate(zip(layout.placements, targets, strict=True)):
        own = []
        for level, values in relus:
            r = level_rects(layout, model.geometry, level)[i]
            rows, columns = slice(r.top, r.top + r.height), slice(r.left, r.left + r.width)
            own.append(values[r.slot, :, rows, columns].numpy())
        r = coarse_rect(p, model.geometry)
        rows = slice(2 * r.top, 2 * (r.top + r.height))
        mine = logits[r.slot, :, rows, 2 * r.left : 2 * (r.left + r.width)]
        result: dict[str, Any] = {f"end{b}": own[k] for b, k in enumerate(ends)}
        result["stem"], result["logits"] = own[0], mine.detach().numpy()
        result["active"] = np.packbits(np.concatenate([a.ravel() > 0 for a in own]))
        if mine.shape == target.shape:
            labels = torch.from_numpy(target).to(mine.dtype)
            result["loss"] = functional.binary_cross_entropy_with_logits(mine, labels)
        results.append(result)
    return results


def largest_in_window(stem: NDArray[Any]) -> NDArray[Any]:
    """Which cell of each pooling window is the largest."""
    rows, columns = (2 * (n // 2) for n in stem.shape[1:])
    padded = np.pad(stem, ((0, 0), (0, 1), (0, 1)), constant_values=-1)
    cells = [padded[:, i : i + rows : 2, j : j + columns : 2] for i in range(3) for j in range(3)]
    smallest = [min(c.shape[k] for c in cells) for k in (1, 2)]
    return np.argmax([c[:, : smallest[0], : smallest[1]] for c in cells], axis=0)


def decided_alike(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether every ReLU let the same values through, and every pooling window chose the same.

    The gradient jumps where they did not: in float32 two correct nets decide otherwise at about one
    value in ten million, and each is then as far from its own float64.
    """
    return np.array_equal(ours["active"], theirs["active"]) and np.array_equal(
        largest_in_window(ours["stem"]), largest_in_window(theirs["stem"])
    )


def relative(ours: Any, theirs: Any) -> float:  # noqa: ANN401
    """The largest difference, of the largest value; infinite for another shape or no number."""
    if np.shape(ours) != np.shape(theirs):
        return float("inf")
    difference = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
    return difference if np.isfinite(difference) else float("inf")


def differences(
    weights: Weights,
    images: Sequence[NDArray[np.uint8]],
    archives: Archives,
    stride: int,
    *,
    one_canvas: bool = False,
    pixels: PixelConvention | None = None,
    change: Callable[[FCN], None] | None = None,
    **rules: str,
) -> tuple[dict[str, float], int]:
    """Largest differences from Caffe, and on how many images the gradients were compared."""
    live, data = archives
    model = build_model(
        dataclasses.replace(weights.config, output_stride=stride, **rules),  # pyright: ignore
        len(weights.classes.names),
    ).eval()
    model.load_state_dict(weights.model.state_dict())
    if change:
        change(model)
    sizes = [Size(*image.shape[:2]) for image in images]
    if one_canvas:
        groups = [
            (mosaic(sizes, model.geometry, model.geometry.gutter_cells), [*range(len(sizes))])
        ]
    else:
        groups = [(single(size, model.geometry), [i]) for i, size in enumerate(sizes)]
    worst: dict[str, float] = {"ends": 0.0, "logits": 0.0, "loss": 0.0, "gradients": 0.0}
    watched = {"conv1": model.body.conv1, "upconv": model.head}
    watched["conv3"] = list(model.body.units.values())[-1].conv3  # pyright: ignore
    expected = dict.fromkeys(watched, np.zeros(()))
    model.zero_grad()
    num_alike = 0
    for layout, which in groups:
        targets = [data[f"target{stride}_{i}"] for i in which]
        results = run_ours(
            model, pixels or weights.pixels, layout, [images[i] for i in which], targets
        )
        alike: list[Tensor] = []
        for i, ours in zip(which, results, strict=True):
            theirs = {k: live[f"{stride}/{i}/{k}"] for k in LIVE}
            theirs = {k: v[0] if v.ndim == 4 else v for k, v in theirs.items()}
            loss = ours.pop("loss", torch.tensor(float("nan")))
            ours["loss"] = float(loss.detach())
            for key in ("end0", "end1", "end2", "end3", "logits", "loss"):
                kind = "ends" if key.startswith("end") else key
                worst[kind] = max(worst[kind], relative(ours[key], theirs[key]))
            if decided_alike(ours, theirs):
                alike.append(loss)
                for key in watched:
                    gradient = live[f"{stride}/{i}/gradient_{key}"]
                    expected[key] = expected[key] + gradient
        num_alike += len(alike)
        if alike:
            torch.stack(alike).sum().backward()
    for key, module in watched.items():
        gradient = module.weights.grad  # pyright: ignore
        if gradient is not None:
            worst["gradients"] = max(
                worst["gradients"],
                relative(gradient.numpy(), expected[key]),  # pyright: ignore
            )
    return worst, num_alike


def against_caffe(python: Path, name: str, folder: Path) -> bool:
    """Caffe's own file converted by the command line, and both nets on the same images."""
    rng = np.random.default_rng(9)
    sizes = SIZES[::5] if name == "ResNet-152" else SIZES
    images = [rng.integers(0, 256, (*s, 3), np.uint8) for s in sizes]
    archives = run_live(python, functools.partial(net, name), folder, images)
    written, target = folder / "written.caffemodel", folder / "w.safetensors"
    arguments = ["convert", str(written), "-o", str(target), "--loss", "sigmoid"]
    command = [str(Path(sys.executable).with_name("anysize")), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"anysize convert failed:\n{done.stdout}{done.stderr}")
    same = {la.name: la.blobs for la in read_caffemodel(written)[1]}
    for layer in net(name):
        for mine, read in zip(layer.blobs, same[layer.name], strict=True):
            assert np.array_equal(mine, read), layer.name
    weights = load_weights(target, torch.device("cpu"))
    fine = True
    for stride in STRIDES:
        for one_canvas in (False, True):
            found, alike = differences(weights, images, archives, stride, one_canvas=one_canvas)
            passed = max(found.values()) < FLOAT32 and alike >= len(images) // 4
            cells = "  ".join(f"{key} {value:.1e}" for key, value in found.items())
            placed = "canvas" if one_canvas else "alone"
            row(name, "caffe", stride, placed, f"{cells} ({alike} of {len(images)})", passed)
            fine &= passed
    if name == "narrow":
        fine &= controls(weights, images, archives)
    return fine


def controls(weights: Weights, images: list[NDArray[np.uint8]], archives: Archives) -> bool:
    """Each takes one fact of Caffe wrongly, at output stride 8, and must be seen."""
    found: dict[str, float] = {}

    def take(what: str, **wrong: Any) -> None:  # noqa: ANN401
        found[what] = differences(weights, images, archives, 8, **wrong)[0]["logits"]

    def undivided(model: FCN) -> None:
        with torch.no_grad():
            for key, tensor in model.state_dict().items():
                if key.endswith(("moving_mean", "moving_variance")):
                    tensor *= 1000

    def without_bias(model: FCN) -> None:
        bias = torch.from_numpy(net("narrow")[0].blobs[1])
        model.body.conv1.moving_mean += bias

    def padded(model: FCN) -> None:
        head = model.head
        head.forward = lambda x: functional.conv_transpose2d(
            x, head.weights, head.biases, stride=2, padding=1, output_padding=1
        )

    take("BGR not flipped", pixels=dataclasses.replace(weights.pixels, channel_order="RGB"))
    take("factor f not divided", change=undivided)
    take("bias of conv1 not folded", change=without_bias)
    take("stride in the 3x3", stride_position="first_3x3")
    take("pooling of TensorFlow", pool_padding="same")
    take("dilation rule of torchvision", dilation_rule="previous")
    take("output_padding=1", change=padded)
    for what, far in found.items():
        row("control", f"{what:<30}", f"{far:.1e}", far > SEEN)
    return min(found.values()) > SEEN


def main() -> int:
    """Runs everything; 0 if all bounds hold and all controls are seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default="", help="a Python 3.8 or 3.9 for the side venv")
    parser.add_argument("--only", default="", help="one net: narrow, ResNet-50, ...")
    arguments = parser.parse_args()
    names = [arguments.only] if arguments.only else list(NETS)
    python = arguments.python or find_python()
    fine = True
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            fine &= against_numpy(name, Path(folder))
    if python is None:
        print(f"Caffe itself: not run. {CAFFE} needs Python 3.8 or 3.9 (--python).")
        return 0 if fine else 1
    inside = install(python)
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            fine &= against_caffe(inside, name, Path(folder))
    print("Caffe: all within bounds." if fine else "Caffe: FAILED.")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
