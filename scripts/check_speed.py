"""Photos a second of `anysize check`, beside those of only decoding the same files with Pillow.

Draws JPEG photographs of about 0.2 MP with grain, and index masks, and reads them in turn: bare
decoding of image and mask in as many threads, then `check_data`. Both rates depend on the machine
and on what else runs on it; their ratio much less. The median over the rounds is printed.

    python scripts/check_speed.py --photos 240
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from anysize.check.folder import check_data, folder_config

CLASSES = """
[[class]]
name = "ground"
colour = [90, 120, 90]

[[class]]
name = "disc"
colour = [200, 80, 60]

[[class]]
name = "stripe"
colour = [60, 80, 200]
"""


def draw_photos(root: Path, num_photos: int, seed: int) -> float:
    """Draws a data folder; returns the mean megapixels of an image."""
    rng = np.random.default_rng(seed)
    (root / "images").mkdir()
    (root / "masks").mkdir()
    (root / "classes.toml").write_text(CLASSES)
    pixels = 0
    for i in range(num_photos):
        height, width = (int(v) for v in rng.integers(380, 520, 2))
        coarse = rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)
        smooth = np.array(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
        grain = rng.normal(0, 6, smooth.shape)
        photo = Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8))
        photo.save(root / f"images/{i:04}.jpg", quality=90)
        rows, columns = np.mgrid[:height, :width]
        labels = np.zeros((height, width), np.uint8)
        for label in (1, 2):
            for _ in range(4):
                y, x, r = rng.uniform(0, height), rng.uniform(0, width), rng.uniform(20, 100)
                wave = 1 + 0.2 * np.sin(9 * np.arctan2(rows - y, columns - x))
                labels[(rows - y) ** 2 + (columns - x) ** 2 < (r * wave) ** 2] = label
        Image.fromarray(labels).save(root / f"masks/{i:04}.png")
        pixels += height * width
    return pixels / num_photos / 1e6


def decode_only(root: Path, num_threads: int) -> None:
    """Decodes all files, and does nothing with them."""

    def decode(image: Path) -> None:
        with Image.open(image) as opened:
            np.array(opened.convert("RGB"))
        with Image.open(root / "masks" / f"{image.stem}.png") as opened:
            np.array(opened)

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(decode, sorted((root / "images").iterdir())))


def main() -> None:
    """Prints both rates and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--photos", type=int, default=240)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        megapixels = draw_photos(root, parsed.photos, parsed.seed)
        shares: list[float] = []
        rates: dict[str, list[float]] = {"bare": [], "check": []}
        for _ in range(parsed.rounds):
            start, start_cpu = time.perf_counter(), time.process_time()
            decode_only(root, parsed.threads)
            middle, middle_cpu = time.perf_counter(), time.process_time()
            report = check_data(folder_config(root), root, None, num_threads=parsed.threads)
            end, end_cpu = time.perf_counter(), time.process_time()
            assert not report.findings, report.findings
            shares.append((middle_cpu - start_cpu) / (end_cpu - middle_cpu))
            rates["bare"].append(parsed.photos / (middle - start))
            rates["check"].append(parsed.photos / (end - middle))
    bare, check = (statistics.median(rates[name]) for name in ("bare", "check"))
    ratio = statistics.median(c / b for c, b in zip(rates["check"], rates["bare"], strict=True))
    print(f"{parsed.photos} photos of {megapixels:.2f} MP, {parsed.threads} threads")
    print(f"bare decoding of image and mask: {bare:.0f} photos/s")
    print(f"anysize check:                   {check:.0f} photos/s ({ratio:.2f} of bare)")
    print(f"share of its processor time that bare decoding takes: {statistics.median(shares):.2f}")


if __name__ == "__main__":
    main()
