"""What training refuses before its first step, in the words of the check."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from anysize.check.findings import Finding
from anysize.config import RunConfig
from anysize.data.classes import Classes
from anysize.data.masks import decode_mask
from anysize.data.reading import Sample
from anysize.data.transforms import largest_size
from anysize.errors import DataError, ShapeError
from anysize.faults import FaultError, listing
from anysize.geometry import Size
from anysize.models.build import geometry_of
from anysize.planning.packing import check_fit
from anysize.planning.planfile import Plan, read_plan
from anysize.wording import count_of


def require_fit(samples: Sequence[Sample], config: RunConfig, root: Path) -> None:
    """Refuses training images that are above the memory budget, by name.

    Args:
        samples: To train on.
        config: Of the run; paths in it are whole.
        root: Of the data, for the message.

    Raises:
        DataError: Some are.
    """
    faults = over_budget(samples, config, training=True)
    if faults:
        raise DataError(
            listing(f"Images in {root} do not fit", [fault.message for fault in faults])
        )


def over_budget(samples: Sequence[Sample], config: RunConfig, *, training: bool) -> list[Finding]:
    """The images that need a larger canvas than the settings allow, by name.

    Args:
        samples: Of a split.
        config: Of the run; paths in it are whole.
        training: Whether `[augment]` applies to them.
    """
    plan = read_plan(Path(config.plan.file)) if config.plan.file else None
    findings: list[Finding] = []
    for sample in samples:
        size = largest_size(config.augment, sample.size) if training else sample.size
        message = _does_not_fit(size, sample, config, plan)
        if message:
            findings.append(
                Finding(
                    kind="budget",
                    severity="fault" if training else "warning",
                    path=sample.image,
                    message=message,
                )
            )
    return findings


def _does_not_fit(size: Size, sample: Sample, config: RunConfig, plan: Plan | None) -> str:
    grown = "" if size == sample.size else f", and {size} after the largest augmentation"
    what = f"{sample.image} is {sample.size}{grown}"
    if plan is not None:
        try:
            check_fit([size], plan)
        except ShapeError:
            return (
                f"{what}, which fits on no canvas of {config.plan.file}. Make a plan of these "
                f"images with `anysize plan`, rescale the image, or set `augment.crop`."
            )
        return ""
    geometry, budget = geometry_of(config.model), config.plan.max_pixels_per_step
    need = geometry.canvas_extent(size.height) * geometry.canvas_extent(size.width)
    if need <= budget:
        return ""
    return (
        f"{what}, which needs a canvas of {need} pixels, above `plan.max_pixels_per_step` = "
        f"{budget}. Raise it to {need} if memory allows, rescale the image, or set "
        f"`augment.crop`."
    )


def require_labels(samples: Sequence[Sample], classes: Classes, what: str) -> None:
    """Refuses samples whose labels are all ignored: nothing would be learned, or nothing scored.

    Decodes masks until one has a label, mostly the first.

    Args:
        samples: To train or to evaluate on.
        classes: Of the samples.
        what: They are for, in a word: "training" or "evaluation".

    Raises:
        DataError: No label trains or counts.
    """
    for sample in samples:
        if sample.encoding.kind == "joints":  # One without any is no sample.
            return
        try:
            if np.any(decode_mask(sample, classes) != classes.ignore_index):
                return
        except FaultError:  # Named where it is loaded, or left out.
            return
    if samples:
        raise DataError(no_labels(what, len(samples), classes))


def require_pairs(config: RunConfig, classes: Classes, root: Path) -> None:
    """Refuses to mirror joints of which nobody said which are left and right.

    Raises:
        DataError: As it says.
    """
    if config.augment.mirror and not classes.links.known:
        raise DataError(
            f"augment.mirror is on, but which joints of {root} are left and right is not known. "
            f"Write {root / 'joints.toml'}: names = {list(classes.names)} and pairs = "
            '[["left_NAME", "right_NAME"], ...], or [] if none are; or set augment.mirror to false.'
        )


def no_labels(what: str, num_images: int, classes: Classes) -> str:
    """The sentence for a split of which every label is ignored."""
    return (
        f"All labels of the {count_of(num_images, 'image')} for {what} are ignored "
        f"({classes.ignore_index}), "
        f"so there is nothing to {'learn' if what == 'training' else 'score'}. Label them, or "
        f"correct ignore_index, data.ids, or the lists."
    )
