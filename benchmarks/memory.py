"""Memory of a training run over many sizes: does it grow, what does a megapixel take, what fits.

Three questions, each side of each in a process of its own:

    growth      resident memory that a run on the planner's canvases gains over `--sizes` further
                distinct sizes, after each canvas was visited twice; read after a garbage collection
    peak        the most that is resident in steps of one image of `--megapixels`, beyond what was
                resident before the first step: plain PyTorch, exact canvas, and exact canvas with
                `model.activation_checkpointing`
    largest     the image that activation checkpointing trains in the peak that plain PyTorch takes:
                from the line through its peaks at `--megapixels` and at four times as many

Pixels and labels are random. The net is ResNet-50 at output stride 16 with frozen norms, in bf16.

Usage: python benchmarks/memory.py [--units 3,4,6,3] [--sizes 500] [--megapixels 1] [--json F]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F

from anysize.bench.plain import PlainFCN
from anysize.bench.sizes import draw_sizes
from anysize.config import ModelConfig
from anysize.data.batching import epoch_steps
from anysize.geometry import Canvas, NetGeometry, Size, padded_batch, single
from anysize.planning.canvases import plan_canvases
from drawn_work import (
    NUM_CLASSES,
    CanvasTraining,
    draw_batch,
    forget_peak,
    in_fresh_process,
    parse_range,
    parse_units,
    peak_resident_bytes,
    resident_bytes,
    write_json,
)

GEOMETRY = NetGeometry(output_stride=16)
IMAGES_PER_STEP = 4
NUM_LOOKS = 10
ASPECTS = (1.0, 0.64, 1.5625)
"""Of the images whose peak is measured: memory must not hang on one shape."""

Side = Literal["plain", "canvas", "checkpointing"]


def growth(
    config: ModelConfig, num_sizes: int, megapixels: tuple[float, float], max_canvases: int
) -> dict[str, Any]:
    """Trains on many sizes and looks at the resident memory now and then."""
    sizes = draw_sizes(num_sizes, megapixels)
    plan = plan_canvases(
        sizes,
        geometry=GEOMETRY,
        images_per_step=IMAGES_PER_STEP,
        max_pixels_per_step=1_048_576,
        max_canvases=max_canvases,
    )
    steps = epoch_steps(plan, sizes, seed=1, epoch=0)
    generator = torch.Generator().manual_seed(0)
    training = CanvasTraining(config, "bf16")
    for _ in range(2):
        for canvas in plan.canvases:
            layout = padded_batch([_inside(canvas)] * canvas.slots, canvas, GEOMETRY)
            training.step([draw_batch(layout, GEOMETRY, generator)])
    looks = [resident_bytes()]
    every = math.ceil(len(steps) / NUM_LOOKS)
    for i, step in enumerate(steps, 1):
        training.step([draw_batch(p.layout, GEOMETRY, generator) for p in step.passes])
        if i % every == 0 or i == len(steps):
            looks.append(resident_bytes())
    return {
        "sizes": len(sizes),
        "steps": len(steps),
        "canvases": [list(c) for c in plan.canvases],
        "resident_bytes": looks,
        "growth_bytes": looks[-1] - looks[0],
    }


def _inside(canvas: Canvas) -> Size:
    """A size that fits in a slot of a canvas, wherever the pooling wants it to start."""
    return Size(canvas.height - GEOMETRY.canvas_multiple, canvas.width - GEOMETRY.canvas_multiple)


def peak(side: Side, config: ModelConfig, megapixels: float) -> int:
    """The most that steps of one image take beyond what was resident before the first, in bytes."""
    generator = torch.Generator().manual_seed(0)
    pixels = 1e6 * megapixels
    sizes = [Size(round(math.sqrt(pixels * a)), round(math.sqrt(pixels / a))) for a in ASPECTS]
    if side == "plain":
        prepared = _plain_steps(config, generator)
    else:
        prepared = _canvas_steps(config, side, generator)
    steps = [prepared(size) for size in sizes]
    forget_peak()
    before = resident_bytes()
    for run in steps:
        run()
    return peak_resident_bytes() - before


def _canvas_steps(
    config: ModelConfig, side: Side, generator: torch.Generator
) -> Callable[[Size], Callable[[], None]]:
    checkpointing = side == "checkpointing"
    training = CanvasTraining(replace(config, activation_checkpointing=checkpointing), "bf16")

    def prepared(size: Size) -> Callable[[], None]:
        batch = draw_batch(single(size, GEOMETRY), GEOMETRY, generator)
        return lambda: training.step([batch])

    return prepared


def _plain_steps(
    config: ModelConfig, generator: torch.Generator
) -> Callable[[Size], Callable[[], None]]:
    model = PlainFCN(config, NUM_CLASSES).train()
    model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, fused=True)

    def prepared(size: Size) -> Callable[[], None]:
        x = torch.randn(1, 3, *size, generator=generator)
        x = x.contiguous(memory_format=torch.channels_last)
        grid = (1, 2 * math.ceil(size.height / 16), 2 * math.ceil(size.width / 16))
        target = torch.randint(0, NUM_CLASSES, grid, generator=generator)

        def run() -> None:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(x)
            F.cross_entropy(logits.float(), target).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return run

    return prepared


def measure(parsed: argparse.Namespace) -> dict[str, object]:
    """Answers all three questions."""
    config = ModelConfig(units=parsed.units, base_depth=parsed.base_depth)
    megapixels = parsed.megapixels
    grown = in_fresh_process(growth, config, parsed.sizes, parsed.areas, parsed.max_canvases)
    _say(f"growth over {grown['sizes']} sizes: {_mb(grown['growth_bytes'])}")
    sides: tuple[Side, ...] = ("plain", "canvas", "checkpointing")
    peaks = {side: in_fresh_process(peak, side, config, megapixels) for side in sides}
    for side, value in peaks.items():
        _say(
            f"peak of {megapixels:g} MP, {side}: {_mb(value)}, {_mb(value / megapixels)} per MP, "
            f"{value / peaks['plain']:.2f} of plain"
        )
    four_times = in_fresh_process(peak, "checkpointing", config, 4 * megapixels)
    _say(f"peak of {4 * megapixels:g} MP, checkpointing: {_mb(four_times)}")
    times = _times_as_large(peaks["plain"], peaks["checkpointing"], four_times)
    largest = "more than was measured" if times is None else f"{times:.2f} times as large"
    _say(f"in the {_mb(peaks['plain'])} of plain, checkpointing trains an image {largest}")
    return {
        "units": list(parsed.units),
        "megapixels": megapixels,
        "growth": grown,
        "peak_bytes": peaks,
        "peak_bytes_per_megapixel": {s: round(v / megapixels) for s, v in peaks.items()},
        "canvas_peak_to_plain": peaks["canvas"] / peaks["plain"],
        "checkpointing_four_times_bytes": four_times,
        "largest_to_plain": times,
        "four_times_fits": four_times <= peaks["plain"],
    }


def _times_as_large(budget: int, once: int, four_times: int) -> float | None:
    """How many times as large an image may be, by the line through two peaks; None: any."""
    per_once = (four_times - once) / 3
    return 1 + (budget - once) / per_once if per_once > 0 else None


def _say(line: str) -> None:
    print(line, flush=True)


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.0f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--units", type=parse_units, default=(3, 4, 6, 3), help="3,4,6,3")
    parser.add_argument("--base-depth", type=int, default=64)
    parser.add_argument("--sizes", type=int, default=500, help="distinct sizes of the growth")
    parser.add_argument("--areas", type=parse_range, default=(0.03, 0.09), help="MP, 0.03,0.09")
    parser.add_argument("--max-canvases", type=int, default=8)
    parser.add_argument("--megapixels", type=float, default=1.0, help="of the image of the peak")
    parser.add_argument("--json", type=Path)
    parsed = parser.parse_args()
    write_json(measure(parsed), parsed.json)


if __name__ == "__main__":
    main()
