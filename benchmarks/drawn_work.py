"""What benchmarks train on: drawn pixels, and the product's own step on them.

Pixels and labels are random: only time and memory are measured with them.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import resource
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from anysize.config import ModelConfig, OptimConfig
from anysize.data.batch import Batch
from anysize.device import Precision, prepare_process
from anysize.geometry import Layout, NetGeometry, target_canvas, target_rect
from anysize.models.build import build_model
from anysize.training.losses import CrossEntropy
from anysize.training.optim import build_optimizer
from anysize.training.step import train_step

T = TypeVar("T")

NUM_CLASSES = 15
IGNORE = 255


def draw_batch(layout: Layout, geometry: NetGeometry, generator: torch.Generator) -> Batch:
    """Random pixels and labels on a canvas, laid out as the loader does, for a loss on the grid."""
    canvas = layout.canvas
    pixels = torch.zeros(canvas.slots, canvas.height, canvas.width, 3)
    labels = target_canvas(canvas, geometry, "grid")
    target = torch.full(tuple(labels), IGNORE, dtype=torch.uint8)
    for p in layout.placements:
        image = pixels[p.slot, p.top : p.top + p.height, p.left : p.left + p.width]
        image.normal_(generator=generator)
        r = target_rect(p, geometry, "grid")
        target[r.slot, r.top : r.top + r.height, r.left : r.left + r.width].random_(
            0, NUM_CLASSES, generator=generator
        )
    return Batch(
        pixels=pixels.permute(0, 3, 1, 2),
        target=target,
        layout=layout,
        stems=(),
        geometry=geometry,
        loss_at="grid",
    )


class CanvasTraining:
    """A net in training on canvases, through the product's own `train_step`.

    The process is set up as a run sets it up, so this is for a process of its own.
    """

    def __init__(self, config: ModelConfig, precision: Precision) -> None:
        prepare_process()
        model = build_model(config, NUM_CLASSES, generator=torch.Generator().manual_seed(0))
        self.model = model.to(memory_format=torch.channels_last).train()  # pyright: ignore[reportCallIssue]
        self.optimizer = build_optimizer(self.model, OptimConfig(lr=1e-4))
        self.precision: Precision = precision

    def step(self, batches: Sequence[Batch]) -> None:
        """One optimiser step."""
        loss = CrossEntropy(ignore_index=IGNORE)
        train_step(self.model, loss, batches, self.optimizer, precision=self.precision)


def in_fresh_process(function: Callable[..., T], *arguments: object) -> T:
    """Calls a function in a new process, which holds no memory and no kernels of others."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(function, *arguments).result()


def resident_bytes() -> int:
    """Memory of this process that is in RAM, once Python's garbage is collected."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def forget_peak() -> None:
    """Lets `peak_resident_bytes` begin anew."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_resident_bytes() -> int:
    """The most that was in RAM since `forget_peak`.

    From the kernel's high-water mark of this process's memory. (`ru_maxrss` is another's as well: a
    child begins with the resident memory that its parent had when it was forked.)
    """
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM; this benchmark needs Linux.")


def parse_units(text: str) -> tuple[int, ...]:
    """`3,4,6,3` to units a block, for argparse."""
    units = tuple(int(part) for part in text.split(","))
    if len(units) != 4 or min(units) < 1:
        raise ValueError(text)
    return units


def parse_range(text: str) -> tuple[float, float]:
    """`0.03,0.09` to two numbers, the smaller first, for argparse."""
    low, high = (float(part) for part in text.split(","))
    if not 0 < low <= high:
        raise ValueError(text)
    return low, high


def write_json(result: object, path: Path | None) -> None:
    """Writes what was measured, where a file is asked for."""
    if path:
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
