"""How much of what is computed belongs to no image, for some distributions of sizes.

    python benchmarks/plan_waste.py [name ...]

Waste is 1 - valid / computed pixels, over packings in five random orders. No net runs.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable

import numpy as np

from anysize.geometry import NetGeometry, Size
from anysize.planning.canvases import plan_canvases
from anysize.planning.packing import pack

NUM_ORDERS = 5
IMAGES_PER_STEP = 4


def voc_like(num: int, *, seed: int) -> list[Size]:
    """Four frequent sizes for four fifths of the images, then a tail with one side of 500."""
    rng = np.random.default_rng(seed)
    frequent = (Size(375, 500), Size(500, 375), Size(333, 500), Size(500, 333))
    sizes: list[Size] = []
    for kind in rng.choice(7, size=num, p=(0.45, 0.15, 0.12, 0.06, 0.11, 0.08, 0.03)).tolist():
        short, other = rng.integers(200, 481, size=2).tolist()
        tail = (Size(short, 500), Size(500, short), Size(short, other))
        sizes.append((frequent + tail)[kind])
    return sizes


def spread(num: int, *, pixels: tuple[float, float], seed: int) -> list[Size]:
    """All-different sizes: areas uniform, aspects log-uniform from 1:2 to 2:1."""
    rng = np.random.default_rng(seed)
    sizes: dict[Size, None] = {}
    while len(sizes) < num:
        area = rng.uniform(*pixels)
        aspect = math.exp(rng.uniform(-math.log(2), math.log(2)))
        sizes[Size(round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect)))] = None
    return list(sizes)


CASES: dict[str, tuple[Callable[[], list[Size]], tuple[int, ...], int]] = {
    "voc_1000": (lambda: voc_like(1_000, seed=0), (8, 16), 1_048_576),
    "voc_10000": (lambda: voc_like(10_000, seed=0), (8,), 1_048_576),
    "spread_1000": (lambda: spread(1_000, pixels=(3e4, 3e5), seed=0), (8, 16), 2_097_152),
    "spread_200": (lambda: spread(200, pixels=(3e4, 3e5), seed=0), (16, 32, 64), 2_097_152),
    "even_300": (lambda: spread(300, pixels=(4.5e4, 9e4), seed=0), (8, 16), 1_048_576),
}


def measure(sizes: list[Size], max_canvases: int, max_pixels: int) -> str:
    start = time.perf_counter()
    plan = plan_canvases(
        sizes,
        geometry=NetGeometry(),
        images_per_step=IMAGES_PER_STEP,
        max_pixels_per_step=max_pixels,
        max_canvases=max_canvases,
    )
    plan_s = time.perf_counter() - start
    wastes: list[float] = []
    num_passes = num_steps = 0
    start = time.perf_counter()
    for seed in range(NUM_ORDERS):
        steps = pack(sizes, np.random.default_rng(seed).permutation(len(sizes)).tolist(), plan)
        layouts = [p.layout for p in itertools.chain.from_iterable(s.passes for s in steps)]
        computed = sum(layout.canvas.pixels for layout in layouts)
        wastes.append(1 - sum(layout.valid_pixels for layout in layouts) / computed)
        num_passes += len(layouts)
        num_steps += len(steps)
    pack_s = (time.perf_counter() - start) / NUM_ORDERS
    kinds = " ".join(str(c) for c in plan.canvases) if "-v" in sys.argv else ""
    return (
        f"{len(set(sizes)):>6} {max_canvases:>4} {len(plan.canvases):>8} "
        f"{100 * np.mean(wastes):>6.1f}% {100 * min(wastes):>5.1f}-{100 * max(wastes):.1f}% "
        f"{num_passes / num_steps:>6.2f} {plan_s:>7.1f} {pack_s:>7.2f} {kinds}"
    )


def main() -> None:
    wanted = [a for a in sys.argv[1:] if not a.startswith("-")] or list(CASES)
    print("images          sizes most canvases   waste  min-max     passes  plan_s  pack_s")
    for name in wanted:
        make, limits, max_pixels = CASES[name]
        sizes = make()
        for max_canvases in limits:
            print(f"{name:<14} {measure(sizes, max_canvases, max_pixels)}", flush=True)


if __name__ == "__main__":
    main()
