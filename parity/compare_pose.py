"""Holds a net of joints against what tf_slim gave: `python -m parity.compare_pose FOLDER`.

Converts the checkpoint that `parity.pose_live` wrote, trains the same steps on the same joints in
float64, prints the differences, and ends with 1 where one is too large, or where a control stays
unseen: joints that are one pixel off.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from anysize.config import OptimConfig
from anysize.data.batch import Batch, cut_out
from anysize.data.joints import joint_targets
from anysize.geometry import Size, single, target_canvas
from anysize.models.weights_file import Weights, load_weights
from anysize.training.losses import PoseLoss
from anysize.training.optim import build_optimizer
from anysize.training.step import train_step

BOUND = 1e-6
"""Targets are float32 here, and float64 there."""


def main() -> int:
    """Compares everything in the folder that the command line names."""
    folder = Path(sys.argv[1])
    out = folder / "pose.safetensors"
    out.unlink(missing_ok=True)
    command = [Path(sys.executable).with_name("anysize"), "convert", folder / "pose.ckpt"]
    subprocess.run([*command, "-o", out, "--loss", "pose"], check=True)
    theirs = np.load(folder / "pose.npz")
    right = differences(load_weights(out, torch.device("cpu")), theirs, 0.0)
    control = differences(load_weights(out, torch.device("cpu")), theirs, 1.0)
    for what, found in right.items():
        seen = control[what] > 100 * BOUND or what == "logits"
        print(f"{what:24} {found:.1e}  control {control[what]:.1e}")
        if found > BOUND or not seen:
            print("FAILS")
            return 1
    print("All hold.")
    return 0


def differences(weights: Weights, theirs: np.lib.npyio.NpzFile, off: float) -> dict[str, float]:
    """The largest ones, relative to the largest value, with all joints off by some pixels."""
    model = weights.model.double().train()
    batches = [batch_of(weights, theirs, i, off) for i in range(len(theirs["losses"]))]
    found = {"logits": apart(model, batches, theirs, "logits")}
    config = OptimConfig(
        lr=float(theirs["learning_rate"]), momentum=float(theirs["momentum"]), weight_decay=0.0
    )
    optimizer = build_optimizer(model, config)
    losses = [float(train_step(model, PoseLoss(), [b], optimizer).loss) for b in batches]
    wanted = theirs["losses"]
    found["losses of three steps"] = float(np.abs(losses / wanted - 1).max())
    return found | {"logits after them": apart(model, batches, theirs, "after")}


def apart(
    model: torch.nn.Module, batches: list[Batch], theirs: np.lib.npyio.NpzFile, name: str
) -> float:
    """The largest relative difference of logits over all images."""
    worst = 0.0
    for i, batch in enumerate(batches):
        wanted = theirs[f"{i}/{name}"].transpose(2, 0, 1)
        with torch.no_grad():
            logits = cut_out(model(batch.pixels, batch.layout), batch.rects[0])[: len(wanted)]
        worst = max(worst, float(np.abs(logits.numpy() - wanted).max() / np.abs(wanted).max()))
    return worst


def batch_of(weights: Weights, theirs: np.lib.npyio.NpzFile, i: int, off: float) -> Batch:
    """One image with its joints."""
    image, geometry = theirs[f"{i}/image"], weights.model.geometry
    size = Size(*image.shape[:2])
    layout = single(size, geometry)
    (p,), grid = layout.placements, target_canvas(layout.canvas, geometry, "cells")
    pixels = torch.zeros(1, 3, *layout.canvas[1:], dtype=torch.float64)
    values = (image.astype(np.float64) - np.array(weights.pixels.mean)).transpose(2, 0, 1)
    pixels[0, :, p.top : p.top + p.height, p.left : p.left + p.width] = torch.from_numpy(values)
    wanted = joint_targets(
        theirs[f"{i}/joints"] + off, size, geometry, maps="discs", radius=17, ignore_index=255
    )
    batch = Batch(
        pixels=pixels,
        target=torch.full((1, len(wanted), *grid[1:]), 255.0),
        layout=layout,
        stems=("",),
        geometry=geometry,
        loss_at="cells",
    )
    cut_out(batch.target, batch.rects[0]).copy_(torch.from_numpy(wanted))
    return batch


if __name__ == "__main__":
    sys.exit(main())
