"""Holds Anysize against what the real tf_slim gave: `python -m parity.compare_slim FOLDER`.

Converts the checkpoints that `parity.slim_live` wrote in FOLDER with `anysize convert`, runs our
net on the same images, prints a table, and ends with 1 where a bound is broken or where a control,
which takes one fact wrongly on purpose, stays unseen.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from parity.ours import (
    Difference,
    Outputs,
    alone,
    decided_alike,
    difference,
    largest,
    output_padding,
    rebuild,
    run,
    together,
    with_one_kernel_transposed,
    worst,
)
from rich import box
from rich.console import Console
from rich.table import Table

from anysize.config import OptimConfig
from anysize.data.batch import Batch
from anysize.data.loader import normalise
from anysize.geometry import Size, coarse_rect, single, target_canvas
from anysize.models.weights_file import Weights, load_weights
from anysize.training.losses import SigmoidCrossEntropy
from anysize.training.optim import build_optimizer
from anysize.training.step import train_step

NETS = ("resnet_v1_50", "resnet_v1_101")
BOUNDS = {"float32": 1e-4, "float64": 1e-9}
OUTPUT_STRIDES = (8, 16, 32)

OTHERWISE_BOUND = 1e-2
"""Of gradients in float32 where a ReLU or a pooling window decided otherwise; see `decisions`."""

CONTROL_NET = "resnet_v1_50"
CONTROL_IMAGES = (0, 5, 10, 15)
MARGIN = 50.0
"""Logits of a control must be this many times beyond the bound."""

TRAINING_BOUND = 1e-3

NOTES = f"""\
Differences are the largest of all images, relative to the largest value of each array. In brackets:
images on which both nets decided alike at every ReLU and pooling window. Their gradients are held
to the bound; in float32 a value next to zero may fall on the other side, where the gradient jumps,
and those of the other images are held to {OTHERWISE_BOUND:.0e}.
"""


def main() -> int:
    """Compares everything in the folder that the command line names."""
    folder = Path(sys.argv[1])
    rows: list[Row] = []
    for net in NETS:
        weights = converted(folder / f"{net}.ckpt")
        for dtype in BOUNDS:
            for output_stride in OUTPUT_STRIDES:
                theirs = Recorded(folder / f"{net}-{dtype}-{output_stride}.npz")
                rows += compare(net, weights, dtype, output_stride, theirs)
                if net == CONTROL_NET and dtype == "float32":
                    rows += controls(net, weights, output_stride, theirs)
    rows += continued_training(folder)
    print_table(rows)
    print(NOTES)
    failed = [row for row in rows if not row.ok]
    print(f"{len(rows) - len(failed)} of {len(rows)} rows hold." if failed else "All hold.")
    return 1 if failed else 0


def converted(checkpoint: Path) -> Weights:
    """Runs `anysize convert` on a checkpoint, as a user would, and reads what it wrote."""
    out = checkpoint.with_suffix(".safetensors")
    out.unlink(missing_ok=True)
    anysize = Path(sys.executable).with_name("anysize")
    command = [anysize, "convert", checkpoint, "-o", out, "--loss", "sigmoid"]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    print("anysize ", *command[1:4], "...", said.splitlines()[0], flush=True)
    return load_weights(out, torch.device("cpu"))


def compare(
    net: str, weights: Weights, dtype: str, output_stride: int, theirs: Recorded
) -> list[Row]:
    """Each image alone, then all on one canvas."""
    model = rebuild(weights, getattr(torch, dtype), output_stride=output_stride)
    everything = range(len(theirs.images))
    layouts = alone(theirs.sizes, model.geometry)
    singles, alike = [], []
    for i in everything:
        ours = run(model, weights.pixels, layouts[i], *theirs.pairs([i]))
        singles.append(difference(ours, theirs.of([i])))
        alike += [i] * len(decided_alike(ours, theirs.of([i])))
    gradients = largest([singles[i].gradients for i in alike])
    otherwise = largest([singles[i].gradients for i in everything if i not in alike])
    first = worst(singles)._replace(gradients=gradients)
    case = (net, dtype, str(output_stride))
    rows = [row_of(*case, "alone", len(everything), len(alike), first, otherwise)]

    layout = together(theirs.sizes, model.geometry)
    ours = run(model, weights.pixels, layout, *theirs.pairs(everything))
    alike = decided_alike(ours, theirs.of(everything))
    if len(alike) < len(everything):
        ours = run(model, weights.pixels, layout, *theirs.pairs(everything), learn_from=alike)
    mosaic = difference(ours, theirs.of(everything, learn_from=alike))
    return [*rows, row_of(*case, "one canvas", len(everything), len(alike), mosaic)]


def row_of(
    net: str,
    dtype: str,
    output_stride: str,
    placed: str,
    num_images: int,
    num_alike: int,
    differences: Difference,
    otherwise: float = 0.0,
) -> Row:
    """A row that holds if all is within the bound, and gradients of enough images were compared.

    `otherwise` is the largest difference of the gradients of the other images.
    """
    bound = BOUNDS[dtype]
    enough = num_alike >= (num_images if dtype == "float64" else num_images / 2)
    ok = differences.largest <= bound and enough and otherwise <= OTHERWISE_BOUND
    images = f"{num_images} ({num_alike})"
    return Row(net, dtype, output_stride, placed, images, differences, bound, ok)


def controls(net: str, weights: Weights, output_stride: int, theirs: Recorded) -> list[Row]:
    """Facts taken wrongly, one at a time; logits must leave the bound by far."""
    float32 = torch.float32
    stride = {"output_stride": output_stride}
    right = rebuild(weights, float32, **stride)
    kernel = with_one_kernel_transposed(rebuild(weights, float32, **stride))
    position = rebuild(weights, float32, **stride, stride_position="first_3x3")
    pool = rebuild(weights, float32, **stride, pool_padding="torchvision")
    plain = contextlib.nullcontext
    cases = [
        ("one kernel transposed", kernel, plain, False),
        ("red and blue not exchanged", right, plain, True),
        ("stride in the first unit's 3x3", position, plain, False),
        ("pooling starts at -1", pool, plain, False),
        ("output_padding=1", right, output_padding, False),
    ]
    if output_stride < 32:
        # Caffe's place of the stride is the same function as Slim's, so only the rule is wrong.
        rule = rebuild(
            weights, float32, **stride, stride_position="first_1x1", dilation_rule="previous"
        )
        cases.append(("torchvision's dilation rule", rule, plain, False))
    rows = []
    for name, model, wrongly, exchanged in cases:
        layouts = alone(theirs.sizes, model.geometry)
        found = []
        for i in CONTROL_IMAGES:
            images, targets = theirs.pairs([i])
            if exchanged:
                images = [images[0][..., ::-1]]
            with wrongly():
                ours = run(model, weights.pixels, layouts[i], images, targets)
            found.append(difference(ours, theirs.of([i])))
        seen = worst(found)
        ok = seen.logits > MARGIN * BOUNDS["float32"]
        case = (f"control: {name}", "float32", str(output_stride))
        rows.append(Row(*case, "alone", str(len(found)), seen, BOUNDS["float32"], ok, control=True))
    return rows


def continued_training(folder: Path) -> list[Row]:
    """Trains on from tf_slim's checkpoint, and as a control from before its training."""
    with np.load(folder / "trained.npz") as file:
        samples = [(file[f"{i}/image"], file[f"{i}/target"]) for i in range(count_images(file))]
        losses, rate = file["losses"], float(file["learning_rate"])
    half = len(losses) // 2
    rows = []
    for name, checkpoint in (("", "trained"), ("control: not the trained weights", CONTROL_NET)):
        ours = train_on(converted(folder / f"{checkpoint}.ckpt"), samples, half, rate)
        apart = float(np.max(np.abs(ours - losses[half:]) / losses[half:]))
        nothing = float("nan")
        differences = Difference(nothing, nothing, apart, nothing)
        ok = apart > 10 * TRAINING_BOUND if name else apart <= TRAINING_BOUND
        what = name or f"{CONTROL_NET}, {half} steps further"
        row = Row(
            what, "float32", "16", "alone", str(len(samples)), differences, TRAINING_BOUND, ok
        )
        rows.append(row._replace(control=bool(name)))
        print(f"loss of steps {half} to {2 * half - 1}, {what}")
        for system, curve in (("tf_slim", losses[half:]), ("anysize", ours)):
            print(f"  {system}", *(f"{x:.5f}" for x in curve))
    return rows


def train_on(
    weights: Weights, samples: list[tuple[np.ndarray, np.ndarray]], num_steps: int, rate: float
) -> np.ndarray:
    """Our own `train_step`, from where the other system stopped; gives the loss of each step."""
    model = weights.model.train()
    loss = SigmoidCrossEntropy(ignore_index=weights.classes.ignore_index)
    optimizer = build_optimizer(model, OptimConfig(lr=rate, momentum=0.0))
    losses = []
    for number in range(num_steps, 2 * num_steps):
        batch = batch_of(weights, *samples[number % len(samples)])
        losses.append(float(train_step(model, loss, [batch], optimizer).loss))
    return np.array(losses)


def batch_of(weights: Weights, image: np.ndarray, target: np.ndarray) -> Batch:
    """One image on the smallest canvas, labelled on all of its logits' grid."""
    geometry = weights.model.geometry
    layout = single(Size(*image.shape[:2]), geometry)
    (p,), grid = layout.placements, target_canvas(layout.canvas, geometry, "grid")
    pixels = torch.zeros(1, 3, *layout.canvas[1:])
    values = torch.from_numpy(normalise(image, weights.pixels)).permute(2, 0, 1)
    pixels[0, :, p.top : p.top + p.height, p.left : p.left + p.width] = values
    shape = (1, target.shape[2], *grid[1:])
    labels = torch.full(shape, weights.classes.ignore_index, dtype=torch.uint8)
    r = coarse_rect(p, geometry)
    rows, columns = 2 * r.top, 2 * r.left
    labels[0, :, rows : rows + target.shape[0], columns : columns + target.shape[1]] = torch.tensor(
        target
    ).permute(2, 0, 1)
    return Batch(
        pixels=pixels, target=labels, layout=layout, stems=("",), geometry=geometry, loss_at="grid"
    )


def count_images(file: np.lib.npyio.NpzFile) -> int:
    """Images in a file that `parity.slim_live` wrote."""
    return sum(name.endswith("/image") for name in file.files)


def print_table(rows: list[Row]) -> None:
    """Prints what was found, a line a row."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for column in ("against tf_slim 1.1.0", "type", "stride", "placed"):
        table.add_column(column, no_wrap=True)
    for column in ("images", "block ends", "logits", "loss", "gradients", "bound"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for row in rows:
        figures = [f"{x:.1e}" if x == x else "-" for x in row.differences]
        verdict = (
            ("seen" if row.ok else "NOT SEEN") if row.control else ("ok" if row.ok else "FAILS")
        )
        table.add_row(*row[:5], *figures, f"{row.bound:.0e}", verdict)
    Console(width=200, highlight=False).print(table)


class Recorded:
    """What tf_slim gave for images of many sizes."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as file:
            self.images = [file[f"{i}/image"] for i in range(count_images(file))]
            everything = range(len(self.images))
            self.targets = [file[f"{i}/target"] for i in everything]
            self.ends = [[file[f"{i}/block{b}"] for b in (1, 2, 3, 4)] for i in everything]
            self.logits = [file[f"{i}/logits"] for i in everything]
            self.losses = [float(file[f"{i}/loss"]) for i in everything]
            self.conv1 = [file[f"{i}/conv1"] for i in everything]
            self.upconv = [file[f"{i}/upconv"] for i in everything]
            self.decisions = [file[f"{i}/decisions"] for i in everything]
        self.sizes = [Size(*image.shape[:2]) for image in self.images]

    def pairs(self, which: Sequence[int]) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Images and targets."""
        return [self.images[i] for i in which], [self.targets[i] for i in which]

    def of(self, which: Sequence[int], *, learn_from: Sequence[int] | None = None) -> Outputs:
        """Outputs of some images; gradients are those of the sum of the losses of `learn_from`."""
        learnt = which if learn_from is None else learn_from
        return Outputs(
            [self.ends[i] for i in which],
            [self.logits[i] for i in which],
            [self.losses[i] for i in which],
            np.sum([self.conv1[i] for i in learnt], axis=0),
            np.sum([self.upconv[i] for i in learnt], axis=0),
            [self.decisions[i] for i in which],
        )


class Row(NamedTuple):
    """A line of the table."""

    what: str
    dtype: str
    output_stride: str
    placed: str
    num_images: str
    differences: Difference
    bound: float
    ok: bool
    control: bool = False


if __name__ == "__main__":
    sys.exit(main())
