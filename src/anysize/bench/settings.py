"""What is measured: the net, the sizes and how often."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from anysize.bench.sizes import draw_sizes, folder_sizes
from anysize.config import DeviceName, ModelConfig, check_model
from anysize.errors import ConfigError
from anysize.geometry import Size

if TYPE_CHECKING:
    from anysize.device import Precision

MOST_MEGAPIXELS, MOST_IMAGES = 16.0, 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """What is measured.

    Attributes:
        model: The net.
        sizes: Of the images.
        images_per_step: Images an optimiser step, but for the arms of batch size 1.
        rounds: In which the arms take turns.
        precision: Of all arms but TF-Slim's, which computes in float32.
        device: Where.
        full: More arms, torch.compile and more time.
        peers: The Python of a venv with tf_slim; None leaves TF-Slim out.
    """

    model: ModelConfig
    sizes: Sequence[Size]
    images_per_step: int
    rounds: int
    precision: Precision
    device: DeviceName
    full: bool
    peers: Path | None


def bench_settings(
    model: ModelConfig,
    *,
    data: Path | None,
    megapixels: Sequence[float] | None,
    images: int | None,
    rounds: int | None,
    images_per_step: int,
    precision: Precision,
    device: DeviceName,
    full: bool,
    peers: Path | None,
) -> BenchSettings:
    """The settings that the options of the command mean; None stands for the mode's default.

    Raises:
        ConfigError: An option is invalid.
        DataError: The folder has no images, or one cannot be read.
    """
    check_model(model, "command line")
    images = (200 if full else 52) if images is None else images
    rounds = (7 if full else 3) if rounds is None else rounds
    for name, value in (
        ("--images", images),
        ("--rounds", rounds),
        ("--images-per-step", images_per_step),
    ):
        if not 1 <= value <= MOST_IMAGES:
            raise ConfigError(f"{name} is {value}; it must be from 1 to {MOST_IMAGES}.")
    if data is not None:
        if megapixels is not None:
            raise ConfigError("--megapixels draws sizes, and --data takes them. Leave one out.")
        sizes = folder_sizes(data, images)
    else:
        low, high = megapixels or ((0.03, 0.3) if full else (0.02, 0.08))
        if not (math.isfinite(high) and 0 < low < high <= MOST_MEGAPIXELS):
            raise ConfigError(
                f"--megapixels is {low} {high}; the first must be above 0 and below the second, "
                f"which may be {MOST_MEGAPIXELS:.0f} at most."
            )
        sizes = draw_sizes(images, (low, high))
    if len(sizes) < images_per_step:
        raise ConfigError(
            f"There are {len(sizes)} images, and --images-per-step is {images_per_step}. Take more "
            "images, or lower it."
        )
    return BenchSettings(
        model=model,
        sizes=sizes,
        images_per_step=images_per_step,
        rounds=rounds,
        precision=precision,
        device=device,
        full=full,
        peers=peers,
    )
