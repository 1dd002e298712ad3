"""The share of a run that steps wait for data, as `anysize train` itself logs it.

Draws a folder of JPEG photos (gradients, edges and grain) and PNG masks, 0.03 to 0.3 megapixels
each, and trains on it for two epochs by the product's own `train`: ResNet-50 at output stride 16,
bf16, with augmentation. What is printed is the sum of `wait_s` over the sum of `elapsed_s` of the
"train" events, so that the first step's wait, with nothing made ready yet, counts.

    all       of both epochs
    steady    without the first event of the run

Usage: python benchmarks/loader_stall.py [--photos 120] [--units 3,4,6,3] [--json F]
"""

from __future__ import annotations

import argparse
import io
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console

from anysize.bench.sizes import draw_sizes
from anysize.geometry import Size
from anysize.training.events import read_events
from anysize.training.run import train
from drawn_work import parse_range, parse_units, write_json

CLASSES = """
[[class]]
name = "ground"
colour = [90, 120, 90]

[[class]]
name = "disc"
colour = [200, 80, 60]
"""

RUN = """
[data]
root = "data"
val_fraction = 0.05

[model]
units = {units}
base_depth = {base_depth}

[augment]
brightness = 0.2
contrast = 0.2
saturation = 0.2

[optim]
lr = 1e-9               # of fresh weights; only time is measured

[train]
epochs = {epochs}
log_every = {log_every}
checkpoint_every = 1000000
evaluate_every = 0
loader_threads = {threads}
"""


def draw_folder(root: Path, sizes: Sequence[Size]) -> None:
    """Photos and masks in the layout of Anysize."""
    rng = np.random.default_rng(0)
    (root / "images").mkdir(parents=True)
    (root / "masks").mkdir()
    (root / "classes.toml").write_text(CLASSES, encoding="utf-8")
    for i, (height, width) in enumerate(sizes):
        coarse = rng.integers(0, 256, (9, 9, 3), dtype=np.uint8)
        smooth = np.array(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
        rows, columns = np.mgrid[:height, :width]
        y, x, radius = rng.uniform(0, height), rng.uniform(0, width), min(height, width) / 3
        disc = (rows - y) ** 2 + (columns - x) ** 2 < radius**2
        photo = np.where(disc[..., None], 255 - smooth, smooth) + rng.normal(0, 6, smooth.shape)
        Image.fromarray(photo.clip(0, 255).astype(np.uint8)).save(
            root / f"images/{i:04}.jpg", quality=90
        )
        Image.fromarray(disc.astype(np.uint8)).save(root / f"masks/{i:04}.png")


def wait_share(events: Sequence[dict[str, Any]]) -> float:
    """Seconds waited over seconds elapsed."""
    return sum(e["wait_s"] for e in events) / sum(e["elapsed_s"] for e in events)


def measure(parsed: argparse.Namespace) -> dict[str, object]:
    """Draws the folder, trains, and reads the run's own events."""
    sizes = draw_sizes(parsed.photos, parsed.areas)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        draw_folder(base / "data", sizes)
        text = RUN.format(
            units=list(parsed.units),
            base_depth=parsed.base_depth,
            epochs=parsed.epochs,
            log_every=parsed.log_every,
            threads=parsed.threads,
        )
        (base / "run.toml").write_text(text, encoding="utf-8")
        run = train(base / "run.toml", console=Console(file=io.StringIO()))
        events = [e for e in read_events(run / "events.jsonl") if e["event"] == "train"]
    return {
        "photos": len(sizes),
        "units": list(parsed.units),
        "loader_threads": parsed.threads,
        "steps": events[-1]["step"],
        "elapsed_s": sum(e["elapsed_s"] for e in events),
        "wait_s": sum(e["wait_s"] for e in events),
        "wait_share": wait_share(events),
        "wait_share_steady": wait_share(events[1:]) if len(events) > 1 else None,
        "windows": [{k: e[k] for k in ("step", "elapsed_s", "wait_s")} for e in events],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--photos", type=int, default=120)
    parser.add_argument("--areas", type=parse_range, default=(0.03, 0.3), help="MP, 0.03,0.3")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--units", type=parse_units, default=(3, 4, 6, 3), help="3,4,6,3")
    parser.add_argument("--base-depth", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1, help="loader threads")
    parser.add_argument("--log-every", type=int, default=4)
    parser.add_argument("--json", type=Path)
    parsed = parser.parse_args()
    result = measure(parsed)
    steady = result["wait_share_steady"]
    print(
        f"{result['steps']} steps in {result['elapsed_s']:.1f} s, of which they waited "
        f"{result['wait_s']:.2f} s for data: {result['wait_share']:.2%}"
        + ("" if steady is None else f"; {steady:.2%} without the first {parsed.log_every} steps")
    )
    write_json(result, parsed.json)


if __name__ == "__main__":
    main()
