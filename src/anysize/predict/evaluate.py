"""Evaluation: the metrics of a net over images at their native size, each pixel counted once.

Images are packed on the canvases of a plan, and the result is that of running each of them alone:
exact padding makes the logits the same, and confusion counts and histograms add up in any order.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from anysize.config import (
    DataConfig,
    LabelKind,
    PartMaps,
    PixelConvention,
    RunConfig,
    load_config,
)
from anysize.data.batch import Batch, cut_out
from anysize.data.formats.joints import joints_of
from anysize.data.loader import load_steps
from anysize.data.record import RECORD_FILE, compare_with_record
from anysize.data.samples import Classes, Folder, Sample, read_folder, split_samples
from anysize.data.transforms import no_augmentation
from anysize.device import Precision
from anysize.errors import ConfigError, DataError
from anysize.geometry import LossAt, Size, single
from anysize.models.net import Net
from anysize.models.weights_file import Weights
from anysize.planning.canvases import Plan, read_plan
from anysize.planning.packing import Pass, Step, pack
from anysize.predict import metrics
from anysize.predict.joints import JointScores, add_joints, joint_metrics, joints_table
from anysize.predict.tiles import canvas_logits
from anysize.predict.versions import ITSELF, Versions, averaged_probabilities
from anysize.ranks import ALONE, Ranks
from anysize.wording import count_of

WORTH_SAYING = 0.0005
"""An error of average precision that the table's digits would show."""

PREFETCH_STEPS = 2
"""Steps that are made ready ahead; labels at full resolution make them large."""


def evaluate(
    model: Net,
    samples: Sequence[Sample],
    *,
    plan: Plan,
    classes: Classes,
    kind: LabelKind,
    pixels: PixelConvention,
    part_maps: PartMaps = "discs",
    precision: Precision = "float32",
    num_threads: int = 1,
    progress: Callable[[int, int], None] | None = None,
    broken: dict[str, str] | None = None,
    ranks: Ranks = ALONE,
    versions: Versions = ITSELF,
) -> dict[str, Any]:
    """Compares a net's labels with the masks, at full resolution; or joints with their labels.

    Args:
        model: Its mode is afterwards as it was before; trained norms use their running statistics.
        samples: Images and masks.
        plan: Images that fit on none of its canvases run alone.
        classes: In the order of the net's logits.
        kind: How the net's logits, and the masks, are meant.
        pixels: What the net takes.
        part_maps: What a net of joints was trained to give.
        precision: "bf16" computes the net under autocast.
        num_threads: Threads that decode images.
        progress: Called after every step with the numbers of images done and of all.
        broken: Takes images that cannot be read, by stem, with what is wrong; they do not count.
            Without it, the first of them is an error.
        ranks: That share the images; all get the result.
        versions: Test-time augmentation; not for joints.

    Returns:
        What `multiclass_metrics` or `multilabel_metrics` of `anysize.predict.metrics` returns, and
        "images": the mean IoU of each, by stem; or `joint_metrics` of `anysize.predict.joints`:
        plain numbers, as JSON takes them.

    Raises:
        ConfigError: The plan was made for a net of another geometry.
        DataError: There is no sample, or an image or mask cannot be read or is invalid.
        WeightsError: A logit is not finite.
    """
    if not samples:
        raise DataError("There is no image to evaluate on. Check the split (`data.val`).")
    if kind == "joints" and versions != ITSELF:
        raise ConfigError("Joints are not found in several versions of an image. Leave them out.")
    if plan.geometry != model.geometry:
        raise ConfigError(
            f"The plan was made for {plan.geometry}, but the net has {model.geometry}. Make a plan "
            "for this net."
        )
    sizes = [sample.size for sample in samples]
    at: LossAt = "cells" if kind == "joints" else "full"
    counts = _empty(kind, len(classes.names))
    add = functools.partial(_add, counts, classes, part_maps, plan.geometry.head_stride)
    by_stem = {sample.stem: sample for sample in samples}
    every = evaluation_steps(sizes, plan)
    steps = load_steps(
        samples,
        every[ranks.rank :: ranks.size],
        [no_augmentation(size) for size in sizes],
        classes=classes,
        geometry=plan.geometry,
        loss_at=at,
        pixels=pixels,
        num_threads=num_threads,
        prefetch_steps=PREFETCH_STEPS,
        skip_broken=broken is not None,
    )
    num_done = 0
    of_images: dict[str, float | None] = {}
    with contextlib.closing(steps):
        for _ in range(0, len(every), ranks.size):
            before = counts.num_images
            with ranks.alike():
                step = next(steps, None)
                for batch in step.batches if step else ():
                    images = (
                        canvas_logits(model, batch.pixels, batch.layout, precision=precision, at=at)
                        if versions == ITSELF
                        else _averaged(model, batch, kind, versions, plan, precision)
                    )
                    for logits, rect, stem in zip(images, batch.rects, batch.stems, strict=True):
                        target = cut_out(batch.target, rect).numpy()
                        of_images[stem] = add(logits, target, by_stem[stem])
                if step and broken is not None:
                    broken.update(step.broken)
            num_done += ranks.sum_numbers(counts.num_images - before)[0]
            if progress is not None:
                progress(num_done, len(samples))
    if broken is not None:
        for told in ranks.gather(broken):
            broken.update(told)
    _sum_over(ranks, counts)
    if isinstance(counts, JointScores):
        return joint_metrics(counts, classes.names)
    result = (
        metrics.multiclass_metrics(counts, classes.names)
        if isinstance(counts, metrics.Confusion)
        else metrics.multilabel_metrics(counts, classes.names)
    )
    images = {stem: iou for told in ranks.gather(of_images) for stem, iou in told.items()}
    return {**result, "images": images}


def _averaged(
    model: Net,
    batch: Batch,
    kind: LabelKind,
    versions: Versions,
    plan: Plan,
    precision: Precision,
) -> list[torch.Tensor]:
    """The logits of the mean probabilities of each image over its versions."""
    return [
        averaged_probabilities(
            model,
            batch.layout.crop(batch.pixels, i),
            kind=kind,
            versions=versions,
            max_pixels=plan.max_pixels_per_step,
            precision=precision,
        ).logit(1e-7)
        for i in range(len(batch.stems))
    ]


_Counts: TypeAlias = metrics.Confusion | metrics.ScoreHistograms | JointScores


def _empty(kind: LabelKind, num_classes: int) -> _Counts:
    match kind:
        case "multiclass":
            return metrics.empty_confusion(num_classes)
        case "multilabel":
            return metrics.empty_histograms(num_classes)
        case "joints":
            return JointScores()


def _add(
    counts: _Counts,
    classes: Classes,
    part_maps: PartMaps,
    stride: int,
    logits: torch.Tensor,
    target: np.ndarray,
    sample: Sample,
) -> float | None:
    """Adds one image to the counts; gives its own mean IoU, where it has one."""
    ignore_index = classes.ignore_index
    if isinstance(counts, JointScores):
        truth = joints_of(sample, len(classes.names))
        add_joints(counts, truth, logits.cpu().numpy(), classes, stride, part_maps)
        return None
    if isinstance(counts, metrics.Confusion):
        labels = logits.argmax(0).cpu().numpy()
        one = metrics.empty_confusion(len(classes.names))
        metrics.add_labels(one, target, labels, ignore_index=ignore_index)
        counts.add(one)
        return metrics.mean_iou(one.matrix)
    scores = logits.cpu().numpy()
    metrics.add_scores(counts, target, scores, ignore_index=ignore_index)
    return metrics.iou_at_half(target, scores, ignore_index=ignore_index)


def _sum_over(ranks: Ranks, counts: _Counts) -> None:
    """Adds up what each rank has counted."""
    for field in fields(counts):
        value = getattr(counts, field.name)
        if isinstance(value, np.ndarray):
            ranks.sum_(torch.from_numpy(value))
        elif isinstance(value, list):
            setattr(counts, field.name, [x for told in ranks.gather(value) for x in told])
        else:
            setattr(counts, field.name, ranks.sum_numbers(value)[0])


def evaluate_run(
    run: Path,
    weights: Weights,
    *,
    data: Path | None = None,
    precision: Precision = "float32",
    progress: Callable[[int, int], None] | None = None,
    say: Callable[[str], object] = lambda _: None,
    versions: Versions = ITSELF,
    ranks: Ranks = ALONE,
) -> dict[str, Any]:
    """Evaluates weights on the images that a run held out, or on any other labelled folder.

    Args:
        run: The run's folder; its `run.toml` names the data and the split.
        weights: Of this run, on the device to compute on.
        data: Another data folder. One that has all images of the run is its own, moved: those held
            out are evaluated. Of any other, all images are.
        precision: See `evaluate`.
        progress: See `evaluate`.
        say: Told which images are evaluated.
        versions: See `evaluate`.
        ranks: See `evaluate`.

    Returns:
        See `evaluate`.

    Raises:
        AnysizeError: What `evaluate` raises; the folder is not a run's; its data are invalid, or
            have other classes than the weights.
    """
    if not (run / "run.toml").is_file():
        raise ConfigError(f"{run} is not the folder of a run: there is no run.toml in it.")
    config = load_config(run / "run.toml")
    own = Path(run / config.data.root)
    record = run / RECORD_FILE
    root = data or own
    if data is None or _has_images_of_run(data, config.data, weights.kind, record):
        folder, samples = held_out(run, config, root, weights.kind)
        say(f"{count_of(len(samples), 'image')} of {root} that the run held out.")
    else:
        folder = _read_other(root, config.data, weights.kind)
        samples = folder.samples
        say(f"{folder.description} Scored: {count_of(len(samples), 'image')}.")
    if folder.classes.names != weights.classes.names:
        raise DataError(
            f"The weights have the classes {', '.join(weights.classes.names)}, but {root} has "
            f"{', '.join(folder.classes.names)}. Name the same classes in the same order in its "
            "classes.toml, or evaluate on other data."
        )
    return evaluate(
        weights.model,
        samples,
        plan=read_plan(run / "plan.json"),
        classes=folder.classes,
        kind=weights.kind,
        pixels=weights.pixels,
        part_maps=weights.config.part_maps,
        precision=precision,
        num_threads=config.train.loader_threads,
        progress=progress,
        versions=versions,
        ranks=ranks,
    )


def held_out(
    run: Path, config: RunConfig, root: Path, kind: LabelKind
) -> tuple[Folder, list[Sample]]:
    """The data folder of a run, and the images of it that the run evaluates on.

    Raises:
        DataError: The folder cannot be read, or images of the run are missing in it.
    """
    folder = read_folder(root, config.data, kind)
    split = split_samples(
        folder.samples, config.data, root, seed=config.train.seed, listed=folder.listed
    )
    record = run / RECORD_FILE
    if not record.exists():
        return folder, split[1]
    # A file added since would draw another split, with images that the run trained on.
    return folder, compare_with_record(record, folder.samples, *split).val


def _has_images_of_run(root: Path, data: DataConfig, kind: LabelKind, record: Path) -> bool:
    """Whether a folder is the run's own data in another place."""
    if not record.exists():
        return True
    try:
        found = compare_with_record(record, read_folder(root, data, kind).samples, [], [])
    except DataError:
        return False
    # Names and sizes alone may agree by chance, where files are numbered and of one camera.
    return 2 * len(found.changed) < len(found.train) + len(found.val)


def _read_other(root: Path, data: DataConfig, kind: LabelKind) -> Folder:
    """A folder laid out and labelled as the run's, or else by what is found in it."""
    try:
        return read_folder(root, replace(data, train="", val=""), kind)
    except DataError:
        return read_folder(root, DataConfig(root=str(root)), kind)


def evaluation_steps(sizes: Sequence[Size], plan: Plan) -> list[Step]:
    """Packs all images on the plan's canvases; those that fit on none run alone, at the end."""
    fitting: list[int] = []
    alone: list[int] = []
    for i, size in enumerate(sizes):
        needed = single(size, plan.geometry).canvas
        fits = any(c.height >= needed.height and c.width >= needed.width for c in plan.canvases)
        (fitting if fits else alone).append(i)
    return [
        *pack(sizes, fitting, plan),
        *(Step((Pass(single(sizes[i], plan.geometry), (i,)),)) for i in alone),
    ]


def format_table(result: dict[str, Any]) -> str:
    """The metrics as lines of text: one row per class, their means, and the totals; in percent."""
    if result["kind"] == "joints":
        return joints_table(result)
    totals = (
        f"{count_of(result['num_images'], 'image')}, {result['num_pixels'] / 1e6:,.2f} megapixels"
    )
    if result["kind"] == "multiclass":
        title = "IoU"
        totals = (
            f"pixel accuracy {_percent(result['pixel_accuracy'])}, "
            f"class accuracy {_percent(result['class_accuracy'])}, {totals}"
        )
    else:
        title = "AP"
        errors = [e for e in result["average_precision_error"].values() if e is not None]
        if errors and max(errors) >= WORTH_SAYING:
            totals += (
                f"\nAP is computed from binned logits; it is within ± {_percent(max(errors))} of "
                "the exact value (average_precision_error)"
            )
    scores, mean = (result[key] for key in metrics.SCORES[result["kind"]])
    rows = [
        ("class", title, "F1"),
        *((name, _percent(scores[name]), _percent(f1)) for name, f1 in result["f1"].items()),
        ("mean", _percent(mean), _percent(result["mean_f1"])),
    ]
    width = max(len(name) for name, _, _ in rows)
    return "\n".join([*(f"{a:<{width}}{b:>8}{c:>8}" for a, b, c in rows), totals])


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"
