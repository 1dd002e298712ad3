"""The canvases of a run: read, or planned for the sizes that training will meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from anysize.config import RunConfig
from anysize.data.samples import read_folder, split_samples
from anysize.data.transforms import draw, largest_size
from anysize.device import (
    select_device,
)
from anysize.geometry import Size
from anysize.models.build import geometry_of
from anysize.planning.canvases import (
    Plan,
    plan_canvases,
    worthwhile_canvases,
)
from anysize.planning.planfile import check_plan, read_plan

PLANNED_EPOCHS = 3
"""Epochs of drawn sizes that a plan is made from, where images are rescaled at random."""


def plan_for(
    config: RunConfig,
    resumed_run: Path | None,
    sizes: Sequence[Size],
    progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """Reads the run's or the named plan, or makes one for the sizes that training will meet.

    Args:
        config: Of the run; paths in it are whole.
        resumed_run: Folder of a run that goes on.
        sizes: Of the training images.
        progress: See `plan_canvases`.
    """
    largest = [largest_size(config.augment, s) for s in sizes]
    if resumed_run or config.plan.file:
        path = resumed_run / "plan.json" if resumed_run else Path(config.plan.file)
        plan = read_plan(path)
        check_plan(plan, largest, geometry=geometry_of(config.model), source=str(path))
        return plan
    drawn = drawn_sizes(config, sizes)
    return plan_canvases(
        drawn,
        geometry=geometry_of(config.model),
        images_per_step=config.plan.images_per_step,
        max_pixels_per_step=config.plan.max_pixels_per_step,
        max_canvases=most_canvases(config, drawn, num_images=len(sizes)),
        # A module's sizes are known as far as they are drawn only; later ones are hardly larger.
        must_fit=[*largest, Size(*map(max, zip(*drawn, strict=True)))]
        if config.augment.module
        else largest,
        progress=progress,
    )


def most_canvases(config: RunConfig, drawn: Sequence[Size], *, num_images: int) -> int:
    """`plan.max_canvases`, or what pays in a run that meets the drawn sizes of so many images."""
    if config.plan.max_canvases:
        return config.plan.max_canvases
    return worthwhile_canvases(
        drawn,
        epochs=config.train.epochs * num_images / max(len(drawn), 1),
        on_gpu=select_device(config.train.device).type == "cuda",
    )


def training_sizes(config: RunConfig, base: Path) -> tuple[list[Size], list[Size], tuple[str, ...]]:
    """The sizes that a `run.toml` will meet, the largest of each image, and what was found.

    Args:
        config: The settings.
        base: Folder of the TOML file.

    Raises:
        DataError: The data folder is invalid.
    """
    root = base / config.data.root
    folder = read_folder(root, config.data, config.loss.labels)
    train, _ = split_samples(
        folder.samples, config.data, root, seed=config.train.seed, listed=folder.listed
    )
    own = [s.size for s in train]
    largest = [largest_size(config.augment, s) for s in own]
    return drawn_sizes(config, own), largest, (folder.description, *folder.notes)


def drawn_sizes(config: RunConfig, sizes: Sequence[Size]) -> list[Size]:
    """The images' own sizes, or those of a few epochs of augmentation."""
    augment = config.augment
    if augment.min_scale == augment.max_scale == 1 and not augment.crop and not augment.module:
        return list(sizes)
    return [
        draw(
            augment,
            size,
            seed=config.train.seed,
            epoch=epoch,
            index=i,
            num_channels=config.model.num_channels,
        ).out_size
        for epoch in range(PLANNED_EPOCHS)
        for i, size in enumerate(sizes)
    ]
