"""One size against all sizes: plain PyTorch and exact canvases, in one interleaved run.

ResNet-50 at output stride 16 with frozen norm statistics, 15 classes, SGD, bf16, channels-last; 300
all-different sizes of about 65,000 pixels (45,000 to 90,000, aspect 1:2 to 2:1), four images an
optimiser step on every arm. Pixels and labels are random: only time is measured here.

    plain, one size   batches of four 256x256 images (65,536 pixels each), the usual way
    plain, all sizes  four images a step at their own sizes, gradients accumulated
    canvas, one size  the same four 256x256 images as a padded batch
    canvas, all sizes the planner's canvases, at most 8

Every arm is a process of its own, so that none meets the kernels or the memory that another one
cached, and only one works at a time: they take turns step by step, so that a slow minute of the
machine falls on all alike. First visits of a shape are timed apart on the arms that meet it again
(the plain arm over all sizes meets a new shape with every image: that is its cost).

Usage: python benchmarks/one_size_against_all.py [--images 300] [--rounds 7] [--json F]
"""

import argparse
import contextlib
import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from anysize.config import ModelConfig, OptimConfig
from anysize.data.batch import Batch
from anysize.data.batching import epoch_steps
from anysize.geometry import Canvas, NetGeometry, Size, padded_batch, target_canvas, target_rect
from anysize.models.fcn import build_model
from anysize.optim import build_optimizer
from anysize.plan.canvases import plan_canvases
from anysize.plan.packing import Pass, Step
from anysize.step import train_step
from plain_resnet import PlainFCN

NUM_CLASSES = 15
IGNORE = 255
IMAGES_PER_STEP = 4
ONE_SIZE = Size(256, 256)
GEOMETRY = NetGeometry(output_stride=16)
CPU = torch.device("cpu")


def all_different_sizes(num_images: int, seed: int = 0) -> list[Size]:
    """Distinct sizes of 45,000 to 90,000 pixels, aspect 1:2 to 2:1, scaled to a mean of 65,000."""
    rng = np.random.default_rng(seed)
    sizes: dict[Size, None] = {}
    while len(sizes) < num_images:
        pixels = rng.uniform(45_000, 85_000)
        aspect = math.exp(rng.uniform(-math.log(2), math.log(2)))
        sizes[Size(round(math.sqrt(pixels * aspect)), round(math.sqrt(pixels / aspect)))] = None
    return list(sizes)


class PlainArm:
    """Plain PyTorch: a step is one batch of one size, or four images one after the other."""

    def __init__(self) -> None:
        self.model = PlainFCN(NUM_CLASSES).to(memory_format=torch.channels_last)
        for module in self.model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.eval()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9, fused=True)

    def step(self, shapes: Sequence[tuple[int, int, int]]) -> float:
        """Seconds of one optimiser step over tensors of these (images, height, width)."""
        batches = []
        for n, height, width in shapes:
            x = torch.randn(n, 3, height, width).contiguous(memory_format=torch.channels_last)
            grid = (n, 2 * math.ceil(height / 16), 2 * math.ceil(width / 16))
            batches.append((x, torch.randint(0, NUM_CLASSES, grid)))
        count = sum(t.numel() for _, t in batches)
        start = time.monotonic()
        for x, target in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = self.model(x)
            loss = F.cross_entropy(logits.float(), target, reduction="sum") / count
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return time.monotonic() - start


class CanvasArm:
    """Exact canvases, through the product's own train_step."""

    def __init__(self) -> None:
        model = build_model(ModelConfig(depth=50), NUM_CLASSES)
        self.model = model.to(memory_format=torch.channels_last).train()
        self.optimizer = build_optimizer(self.model, OptimConfig(lr=1e-4))

    def step(self, step: Step) -> float:
        """Seconds of one optimiser step."""
        batches = [self._batch(p) for p in step.passes]
        num_valid = sum(b.num_valid for b in batches)
        start = time.monotonic()
        train_step(
            self.model,
            self.optimizer,
            batches,
            num_valid=num_valid,
            loss_at="grid",
            kind="softmax",
            ignore_index=IGNORE,
            class_weights=None,
            device=CPU,
            precision="bf16",
        )
        return time.monotonic() - start

    def _batch(self, work: Pass) -> Batch:
        canvas = work.layout.canvas
        pixels = torch.zeros(canvas.slots, canvas.height, canvas.width, 3)
        labels = target_canvas(canvas, GEOMETRY, "grid")
        target = torch.full(tuple(labels), IGNORE, dtype=torch.int64)
        for p in work.layout.placements:
            pixels[p.slot, p.top : p.top + p.height, p.left : p.left + p.width].normal_()
            r = target_rect(p, GEOMETRY, "grid")
            target[r.slot, r.top : r.top + r.height, r.left : r.left + r.width] = torch.randint(
                0, NUM_CLASSES, (r.height, r.width)
            )
        return Batch(
            pixels=pixels.permute(0, 3, 1, 2),
            target=target,
            layout=work.layout,
            stems=(),
            num_valid=int((target != IGNORE).sum()),
        )


class Worker:
    """An arm in a process of its own."""

    def __init__(self, arm: type[PlainArm] | type[CanvasArm]) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(arm, theirs), daemon=True)
        self.process.start()

    def step(self, work: object) -> float:
        """Seconds of one step."""
        self.connection.send(work)
        return self.connection.recv()


def _serve(arm: type[PlainArm] | type[CanvasArm], connection: Connection) -> None:
    built = arm()
    with contextlib.suppress(EOFError):  # The benchmark is over.
        while True:
            connection.send(built.step(connection.recv()))


def valid_pixels(step: Step) -> int:
    return sum(p.layout.valid_pixels for p in step.passes)


def run(num_images: int, num_rounds: int, say: Callable[[str], None]) -> dict[str, object]:
    sizes = all_different_sizes(num_images)
    plan = plan_canvases(
        sizes,
        geometry=GEOMETRY,
        images_per_step=IMAGES_PER_STEP,
        max_pixels_per_step=1_048_576,
        max_canvases=8,
    )
    steps = epoch_steps(plan, sizes, seed=1, epoch=0)
    computed = sum(p.layout.canvas.pixels for s in steps for p in s.passes)
    waste = 1 - sum(valid_pixels(s) for s in steps) / computed
    say(f"{num_images} sizes, mean {statistics.mean(s.pixels for s in sizes):.0f} pixels")
    say(f"{len(plan.canvases)} canvases: {', '.join(map(str, plan.canvases))}")
    say(f"waste {waste:.1%}, {len(steps)} steps an epoch")

    one_size = padded_batch([ONE_SIZE] * 4, Canvas(4, *ONE_SIZE), GEOMETRY)
    one_size_step = Step((Pass(one_size, (0, 1, 2, 3)),))
    workers = {
        "plain, one size": Worker(PlainArm),
        "plain, all sizes": Worker(PlainArm),
        "canvas, one size": Worker(CanvasArm),
        "canvas, all sizes": Worker(CanvasArm),
    }
    one_mp = IMAGES_PER_STEP * ONE_SIZE.pixels / 1e6

    def work(name: str, step: Step) -> object:
        match name:
            case "plain, one size":
                return [(IMAGES_PER_STEP, *ONE_SIZE)]
            case "plain, all sizes":
                return [(1, *p.size) for w in step.passes for p in w.layout.placements]
            case "canvas, one size":
                return one_size_step
            case _:
                return step

    first_visit_s = {
        name: workers[name].step(work(name, steps[0]))
        for name in workers
        if name != "canvas, all sizes"
    }
    first: dict[Canvas, float] = {}
    for step in steps:
        new = {p.layout.canvas for p in step.passes} - first.keys()
        if new:
            seconds = workers["canvas, all sizes"].step(step)
            first.update(dict.fromkeys(new, seconds / len(new)))
    say(f"first visits: {sum(first.values()):.1f} s for {len(first)} canvases")

    per_round = len(steps) // num_rounds
    rounds: dict[str, list[float]] = {name: [] for name in workers}
    for r in range(num_rounds):
        mine = steps[r * per_round : (r + 1) * per_round]
        mp = sum(valid_pixels(s) for s in mine) / 1e6
        seconds = dict.fromkeys(workers, 0.0)
        for step in mine:
            for name, worker in workers.items():
                seconds[name] += worker.step(work(name, step))
        for name, s in seconds.items():
            rounds[name].append(s / (mp if "all" in name else len(mine) * one_mp))
        say(
            f"round {r + 1}: "
            + ", ".join(f"{name} {values[-1]:.2f}" for name, values in rounds.items())
        )
    base = rounds["plain, one size"]
    arms = {
        name: {
            "seconds_per_valid_megapixel": {
                "median": statistics.median(values),
                "min": min(values),
                "max": max(values),
            },
            "ratio_to_plain_one_size": statistics.median(
                [v / b for v, b in zip(values, base, strict=True)]
            ),
        }
        for name, values in rounds.items()
    }
    return {
        "images": num_images,
        "canvases": [list(c) for c in plan.canvases],
        "waste": waste,
        "first_visit_s": {str(c): s for c, s in first.items()},
        "first_step_s": first_visit_s,
        "rounds": num_rounds,
        "arms": arms,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parsed = parser.parse_args()
    result = run(parsed.images, parsed.rounds, lambda line: print(line, flush=True))
    print("\n| arm | s per valid megapixel, median (min-max) | ratio |\n|---|---|---|")
    for name, arm in result["arms"].items():  # pyright: ignore[reportAttributeAccessIssue]
        s = arm["seconds_per_valid_megapixel"]
        print(
            f"| {name} | {s['median']:.2f} ({s['min']:.2f}-{s['max']:.2f}) | "
            f"{arm['ratio_to_plain_one_size']:.2f} |"
        )
    if parsed.json:
        parsed.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
