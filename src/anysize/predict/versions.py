"""Test-time augmentation: an image labelled in several versions of itself, mirrored and rescaled.

The versions share a canvas where memory allows, each with the logits that it has alone; their
probabilities are brought back to the image's size and averaged.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from anysize.config import LabelKind
from anysize.device import Precision
from anysize.errors import ConfigError
from anysize.geometry import Canvas, Layout, NetGeometry, Size, place, round_up, single
from anysize.models.net import Net
from anysize.predict.tiles import DEFAULT_MAX_PIXELS, canvas_logits, to_probabilities

LEAST_SCALE, MOST_SCALE = 0.1, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """The versions of an image that are averaged.

    Attributes:
        scales: Factors of height and width; 1 is the image's own size.
        mirror: Each scale also mirrored, left and right.

    Raises:
        ConfigError: There is no scale, one occurs twice, or one is out of range.
    """

    scales: tuple[float, ...] = (1.0,)
    mirror: bool = False

    def __post_init__(self) -> None:
        in_range = all(LEAST_SCALE <= s <= MOST_SCALE for s in self.scales)
        if not self.scales or not in_range or len(set(self.scales)) < len(self.scales):
            raise ConfigError(
                f"The scales are {', '.join(map(str, self.scales)) or 'none'}; give different "
                f"numbers from {LEAST_SCALE} to {MOST_SCALE}, such as 0.75 1 1.25."
            )

    def tile_pixels(self, max_pixels: int) -> int:
        """Most pixels of an image of which no version has more than `max_pixels`."""
        return int(max_pixels / max(1.0, *self.scales) ** 2)


ITSELF = Versions()
"""An image as it is, and nothing else."""


def averaged_probabilities(
    model: Net,
    image: Tensor,
    *,
    kind: LabelKind,
    versions: Versions,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    precision: Precision = "float32",
) -> Tensor:
    """The mean probabilities of an image over its versions: float32 `[k, h, w]`.

    Args:
        model: The net.
        image: `[c, h, w]`, normalised.
        kind: How the net's logits are meant.
        versions: See `Versions`.
        max_pixels: Canvas pixels above which versions run one by one.
        precision: See `canvas_logits`.

    Raises:
        WeightsError: A logit is not finite.
    """
    size = Size(*image.shape[-2:])
    scaled = [_rescaled(image, _scaled(size, scale)) for scale in versions.scales]
    sizes = [Size(*s.shape[-2:]) for s in scaled]
    flips = (False, True) if versions.mirror else (False,)
    every = [(s.flip(-1) if flip else s, flip) for flip in flips for s in scaled]
    together = _together(sizes, len(flips), model.geometry)
    groups = [(together, every)]
    if len(every) > 1 and together.canvas.pixels > max_pixels:
        alone = [single(s, model.geometry) for s in sizes * len(flips)]
        groups = [(layout, [version]) for layout, version in zip(alone, every, strict=True)]
    total: Tensor | None = None
    for layout, members in groups:
        canvas = layout.canvas
        pixels = image.new_zeros((canvas.slots, len(image), canvas.height, canvas.width))
        for i, (version, _) in enumerate(members):
            layout.crop(pixels, i).copy_(version)
        logits = canvas_logits(model, pixels, layout, precision=precision)
        for own, (_, flip) in zip(logits, members, strict=True):
            back = _rescaled(to_probabilities(own, kind), size)
            back = back.flip(-1) if flip else back
            total = back if total is None else total + back
    assert total is not None
    return total / len(every)


def _scaled(size: Size, scale: float) -> Size:
    return Size(*(max(1, round(extent * scale)) for extent in size))


def _rescaled(values: Tensor, size: Size) -> Tensor:
    """`[c, h, w]` of another size, bilinearly, with an antialiasing filter where it shrinks."""
    if values.shape[-2:] == size:
        return values
    return F.interpolate(values[None], size, mode="bilinear", antialias=True)[0]


def _together(sizes: Sequence[Size], num_slots: int, geometry: NetGeometry) -> Layout:
    """All sizes in a row, the same in each slot."""
    steps = [geometry.step(s.width) for s in sizes]
    lefts = list(itertools.accumulate(steps[:-1], initial=0))
    ends = [
        left + geometry.shift(s.width) + geometry.padded(s.width)
        for left, s in zip(lefts, sizes, strict=True)
    ]
    height = max(geometry.shift(s.height) + geometry.padded(s.height) for s in sizes)
    multiple = geometry.canvas_multiple
    canvas = Canvas(num_slots, round_up(height, multiple), round_up(max(ends), multiple))
    return Layout(
        canvas,
        tuple(
            place(s, geometry, slot=slot, cell_top=0, cell_left=left // geometry.output_stride)
            for slot in range(num_slots)
            for s, left in zip(sizes, lefts, strict=True)
        ),
    )
