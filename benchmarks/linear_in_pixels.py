"""Seconds a training step takes, over images from 0.03 to 4 megapixels: is it linear in pixels?

One image a step, each size on a canvas of its own, through the product's own `train_step`:
ResNet-50 at output stride 16 with frozen norms, bf16. Every size is visited once before the clock
counts; then they take turns, round by round, so that a slow minute of the machine falls on all.

Printed for each size: the median seconds a step and a megapixel. Then the slope of log seconds over
log pixels (1 is linear; below 1, small images pay a fixed cost), and the line `a + b * pixels` that
fits best relatively, with the worst relative deviation of a size from it. A cost that grows faster
than pixels shows in both: in a slope above 1 at the large end, and in deviations.

Usage: python benchmarks/linear_in_pixels.py [--rounds 7] [--plot F.png] [--json F]
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from anysize.config import ModelConfig
from anysize.geometry import NetGeometry, Size, single
from drawn_work import (
    CanvasTraining,
    draw_batch,
    in_fresh_process,
    parse_range,
    parse_units,
    write_json,
)

GEOMETRY = NetGeometry(output_stride=16)
ASPECT = 0.75


def spaced_sizes(num: int, megapixels: tuple[float, float]) -> list[Size]:
    """Sizes of one aspect whose areas are spaced evenly in their logarithm."""
    areas = np.geomspace(1e6 * megapixels[0], 1e6 * megapixels[1], num).tolist()
    return [Size(round(math.sqrt(a * ASPECT)), round(math.sqrt(a / ASPECT))) for a in areas]


def time_steps(
    config: ModelConfig, sizes: Sequence[Size], num_rounds: int
) -> tuple[list[float], list[list[float]]]:
    """Seconds of the first visit of each size, and of each round of all sizes."""
    generator = torch.Generator().manual_seed(0)
    training = CanvasTraining(config, "bf16")
    batches = [draw_batch(single(size, GEOMETRY), GEOMETRY, generator) for size in sizes]

    def all_sizes() -> list[float]:
        seconds: list[float] = []
        for batch in batches:
            start = time.perf_counter()
            training.step([batch])
            seconds.append(time.perf_counter() - start)
        return seconds

    return all_sizes(), [all_sizes() for _ in range(num_rounds)]


def describe(sizes: Sequence[Size], seconds: Sequence[float]) -> dict[str, float]:
    """The slope in logarithms, and the line with its worst relative deviation.

    The line is fitted to ratios, each size weighing the same; in seconds, the largest size alone
    would decide.
    """
    pixels = np.array([s.pixels for s in sizes], np.float64)
    measured = np.array(seconds, np.float64)
    slope = float(np.polyfit(np.log(pixels), np.log(measured), 1)[0])
    terms = np.stack([np.ones_like(pixels), pixels], axis=1) / measured[:, None]
    (fixed, per_pixel), *_ = np.linalg.lstsq(terms, np.ones_like(pixels), rcond=None)
    line = fixed + per_pixel * pixels
    return {
        "slope": slope,
        "fixed_s": float(fixed),
        "seconds_per_megapixel": float(1e6 * per_pixel),
        "worst_deviation": float(np.abs(measured / line - 1).max()),
    }


def plot(sizes: Sequence[Size], rounds: Sequence[Sequence[float]], path: Path) -> None:
    """Seconds over megapixels, both in logarithms, with the line."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    megapixels = [s.pixels / 1e6 for s in sizes]
    medians = [statistics.median(column) for column in zip(*rounds, strict=True)]
    found = describe(sizes, medians)
    figure, axes = plt.subplots(figsize=(6, 4.5), layout="constrained")
    for seconds in rounds:
        axes.loglog(megapixels, seconds, ".", color="0.7", markersize=4)
    axes.loglog(megapixels, medians, "o", label="median of the rounds")
    xs = np.geomspace(megapixels[0], megapixels[-1], 100)
    axes.loglog(
        xs,
        found["fixed_s"] + found["seconds_per_megapixel"] * xs,
        label=f"{found['fixed_s']:.3f} s + {found['seconds_per_megapixel']:.2f} s/MP",
    )
    axes.set_xlabel("megapixels of the image")
    axes.set_ylabel("seconds a training step")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--units", type=parse_units, default=(3, 4, 6, 3), help="3,4,6,3")
    parser.add_argument("--base-depth", type=int, default=64)
    parser.add_argument("--megapixels", type=parse_range, default=(0.03, 4.0), help="0.03,4")
    parser.add_argument("--sizes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    parsed = parser.parse_args()
    sizes = spaced_sizes(parsed.sizes, parsed.megapixels)
    config = ModelConfig(units=parsed.units, base_depth=parsed.base_depth)
    first, rounds = in_fresh_process(time_steps, config, sizes, parsed.rounds)
    columns = list(zip(*rounds, strict=True))
    medians = [statistics.median(column) for column in columns]
    print(
        "| size | MP | s a step, median (min-max) | s/MP | first visit, s |\n|---|---|---|---|---|"
    )
    for size, column, median, visit in zip(sizes, columns, medians, first, strict=True):
        print(
            f"| {size} | {size.pixels / 1e6:.3f} | {median:.3f} ({min(column):.3f}-"
            f"{max(column):.3f}) | {median / size.pixels * 1e6:.2f} | {visit:.3f} |"
        )
    found = describe(sizes, medians)
    print(
        f"slope of log seconds over log pixels {found['slope']:.3f}; line {found['fixed_s']:.3f} s "
        f"+ {found['seconds_per_megapixel']:.2f} s/MP, worst deviation "
        f"{found['worst_deviation']:.1%}"
    )
    if parsed.plot:
        plot(sizes, rounds, parsed.plot)
    result = {
        "units": list(parsed.units),
        "sizes": [
            {
                "size": list(size),
                "pixels": size.pixels,
                "seconds": {"median": median, "min": min(column), "max": max(column)},
                "seconds_per_megapixel": median / size.pixels * 1e6,
                "first_visit_s": visit,
            }
            for size, column, median, visit in zip(sizes, columns, medians, first, strict=True)
        ],
        **found,
    }
    write_json(result, parsed.json)


if __name__ == "__main__":
    main()
