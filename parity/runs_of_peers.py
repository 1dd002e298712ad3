"""Trains and uses nets of smp, torchvision and timm by the command; compares with the plain nets.

    python -m parity.runs_of_peers [part of a name ...]

Each run starts from a file that the library's own net wrote for another number of classes. The
probabilities of `anysize predict` are compared with those of the plain net on each image alone.
Exits with 1 where something differs.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import parity.torchvision_on_cpu  # noqa: F401  # before torchvision
import segmentation_models_pytorch as smp
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from torchvision.models import get_model

from anysize.config import ModelConfig
from anysize.models.build import build_model
from anysize.models.ops import conv_transpose_same

COMMAND = (
    "import sys, parity.torchvision_on_cpu; from anysize.cli.main import main; sys.exit(main())"
)
NUM_CLASSES = 3
TOLERANCE = 2e-3
"""Of probabilities, which are written as float16."""

# The net of [model], its arguments, and the library's own whose weights it starts from.
RUNS: dict[str, tuple[dict[str, str], Callable[[], nn.Module], str]] = {
    "smp:Unet": (
        {"encoder_name": "resnet18"},
        lambda: smp.Unet("resnet18", encoder_weights=None, classes=7),
        "starting afresh: segmentation_head",
    ),
    "torchvision:fcn_resnet50": (
        {},
        lambda: get_model("fcn_resnet50", weights=None, weights_backbone=None, num_classes=7),
        "starting afresh: classifier.4.weight, classifier.4.bias",
    ),
    "timm:convnext_atto": (
        {},
        lambda: timm.create_model("convnext_atto", num_classes=1000),
        "as body; starting afresh: head.weights, head.biases; left out: head.fc",
    ),
    "smp:FPN": (
        {"encoder_name": "resnet18"},
        lambda: get_model("resnet18", weights=None),
        "as encoder; starting afresh",
    ),
}


def anysize(*arguments: object, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMMAND, *map(str, arguments)],
        cwd=folder,
        env={"PYTHONPATH": f"{Path.cwd()}:{Path.cwd() / 'src'}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return done.stdout + done.stderr


def write_data(folder: Path) -> None:
    """Images of ten sizes; the class is the brightness of a block."""
    rng = np.random.default_rng(0)
    for name in ("images", "masks"):
        (folder / "data" / name).mkdir(parents=True)
    for i in range(10):
        height, width = 60 + 7 * i, 130 - 5 * i
        mask = np.kron(rng.integers(0, NUM_CLASSES, (5, 5)), np.ones((40, 40), int))
        mask = mask[:height, :width].astype(np.uint8)
        image = (80 * mask[..., None] + rng.integers(0, 60, (height, width, 3))).astype(np.uint8)
        Image.fromarray(image).save(folder / f"data/images/{i}.png")
        Image.fromarray(mask).save(folder / f"data/masks/{i}.png")
    (folder / "data/classes.toml").write_text(
        "".join(f'[[class]]\nname = "{c}"\ncolour = [{i}, 0, 0]\n' for i, c in enumerate("abc"))
    )


def alone(net: nn.Module, image: np.ndarray, multiple: int) -> np.ndarray:
    """Probabilities of the plain net, the image padded as its users pad it."""
    mean, std = (np.float32(v) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    x = torch.from_numpy((image.astype(np.float32) / 255 - mean) / std).permute(2, 0, 1)[None]
    height, width = x.shape[2:]
    x = F.pad(x, (0, -width % multiple, 0, -height % multiple))
    y = net(x)
    y = y["out"] if isinstance(y, dict) else y
    scale = round(x.shape[2] / y.shape[2])
    if scale > 1:
        y = F.interpolate(y, scale_factor=scale, mode="bilinear", align_corners=False)
    return y[0, :, :height, :width].softmax(0).numpy()


def plain_net(name: str, weights: Path) -> nn.Module:
    """The library's net with the weights of a run, built without Anysize."""
    tensors = load_file(weights)
    library, _, own = name.partition(":")
    if library == "smp":
        net = getattr(smp, own)("resnet18", encoder_weights=None, classes=NUM_CLASSES)
    elif library == "torchvision":
        net = get_model(own, weights=None, weights_backbone=None, num_classes=NUM_CLASSES)
    else:
        body = timm.create_model(own, num_classes=0, global_pool="")
        body.load_state_dict(
            {n.removeprefix("body."): t for n, t in tensors.items() if n.startswith("body.")}
        )
        head = (tensors["head.weights"], tensors["head.biases"])
        return _Headed(body, *head).eval()
    net.load_state_dict(tensors)
    return net.eval()


class _Headed(nn.Module):
    def __init__(self, body: nn.Module, weights: torch.Tensor, biases: torch.Tensor) -> None:
        super().__init__()
        self.body, self.weights, self.biases = body, weights, biases

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return conv_transpose_same(self.body(x), self.weights, self.biases)


def check(name: str) -> str:
    """Trains, uses and compares; what was found, in a line."""
    arguments, build, expected = RUNS[name]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_data(folder)
        suffix = "safetensors" if name.startswith("timm") else "pth"
        start = folder / f"library.{suffix}"
        state = build().state_dict()
        save_file(state, start) if suffix == "safetensors" else torch.save(state, start)
        table = "\n".join(f'{key} = "{value}"' for key, value in arguments.items())
        (folder / "run.toml").write_text(
            f'[data]\nroot = "data"\n[plan]\nimages_per_step = 2\nmax_canvases = 2\n[model]\n'
            f'net = "{name}"\n[model.arguments]\n{table}\n[train]\nepochs = 1\n'
            f'precision = "float32"\nweights = "{start.name}"\n[optim]\nkind = "adamw"\n'
        )
        said = anysize("train", "run.toml", folder=folder)
        if expected not in said:
            raise RuntimeError(f"{expected!r} was not said:\n{said}")
        anysize("evaluate", "run", folder=folder)
        anysize("predict", "run", "data/images", "-o", "out", "--probabilities", folder=folder)
        try:
            exported = anysize("export", "run", "-o", "net.onnx", folder=folder).strip()
        except RuntimeError as error:
            exported = str(error).strip()
            if "was not written" not in exported:
                raise
        net = plain_net(name, folder / "run" / "weights.safetensors")
        config = ModelConfig(net=name, arguments=arguments)
        multiple = build_model(config, NUM_CLASSES).geometry.size_multiple
        off = 0.0
        with torch.no_grad():
            for path in sorted((folder / "data/images").iterdir()):
                theirs = alone(net, np.array(Image.open(path)), multiple)
                ours = np.load(next((folder / "out").rglob(f"{path.stem}.npy")))
                off = max(off, float(np.abs(ours - theirs).max()))
        if not off < TOLERANCE:
            raise RuntimeError(f"{name}: probabilities differ by {off}")
        return f"{name}: probabilities within {off:.1e}; export: {exported.splitlines()[-1]}"


if __name__ == "__main__":
    failed = 0
    for one in RUNS:
        if len(sys.argv) > 1 and not any(part in one for part in sys.argv[1:]):
            continue
        try:
            print(check(one), flush=True)
        except Exception as error:  # noqa: BLE001  # a peer may fail in any way; that is a finding
            failed += 1
            print(f"{one}: FAILED: {type(error).__name__}: {error}", flush=True)
    sys.exit(1 if failed else 0)
