"""How much faster two processes train than one, with one thread each; real runs of `anysize train`.

    python benchmarks/ranks_scaling.py [--rounds 3] [--norm frozen]

Random images of all-different sizes and a ResNet-50 from scratch. Runs on one and on two ranks take
turns; each round compares the valid megapixels a second of their last epochs, in which every canvas
was seen. The ratio printed is the median of the rounds, with the least and the largest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

NUM_IMAGES, PER_STEP, EPOCHS = 20, 4, 2
CLASSES = """[[class]]
name = "a"
colour = [0, 0, 0]
[[class]]
name = "b"
colour = [255, 255, 255]
"""
SETTINGS = """[data]
root = "data"
val_fraction = 0.2
[model]
norm = "{norm}"
[optim]
lr = 1e-9
[plan]
images_per_step = {per_step}
[train]
epochs = {epochs}
evaluate_every = 0
log_every = 1
run = "{run}"
"""


def make_data(root: Path) -> None:
    """Noise with labels of noise: what is learned does not matter here, only what it costs."""
    rng = np.random.default_rng(0)
    for name in ("images", "masks"):
        (root / name).mkdir(parents=True)
    (root / "classes.toml").write_text(CLASSES)
    for i in range(NUM_IMAGES):
        height, width = rng.integers(180, 420, 2).tolist()
        image = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(image).save(root / f"images/{i:02}.png")
        Image.fromarray(image[..., 0] // 128).save(root / f"masks/{i:02}.png")


def megapixels_a_second(folder: Path, num_ranks: int, norm: str) -> float:
    """Of the steps of the last epoch of a run, the median."""
    run = f"run{len(list(folder.iterdir()))}"
    text = SETTINGS.format(norm=norm, per_step=PER_STEP, epochs=EPOCHS, run=run)
    (folder / "run.toml").write_text(text)
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}")
    command = [sys.executable, *launcher, "-m", "anysize", "train", "run.toml"]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # noqa: TID251
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    lines = (folder / run / "events.jsonl").read_text().splitlines()
    steps = [e for e in map(json.loads, lines) if e["event"] == "train"]
    return statistics.median(e["valid_megapixels_per_s"] for e in steps[len(steps) // EPOCHS :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--norm", choices=("frozen", "trained"), default="frozen")
    parsed = parser.parse_args()
    ratios: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_data(folder / "data")
        for number in range(parsed.rounds):
            order = (1, 2) if number % 2 == 0 else (2, 1)
            rate = {ranks: megapixels_a_second(folder, ranks, parsed.norm) for ranks in order}
            ratios.append(rate[2] / rate[1])
            print(f"one rank {rate[1]:.3f}, two {rate[2]:.3f} MP/s: {ratios[-1]:.2f}", flush=True)
    middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
    print(f"{parsed.norm} norms, two ranks over one: {middle:.2f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
