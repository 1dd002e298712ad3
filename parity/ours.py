"""Our net, run so that another system's outputs can be laid beside its own.

Everything is taken per image and at the image's own size, whether it was alone on its canvas or
among others.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from parity.decisions import decisions
from torch import Tensor, nn

from anysize.config import PixelConvention
from anysize.data.loader import normalise
from anysize.geometry import (
    Canvas,
    Layout,
    NetGeometry,
    Placement,
    Size,
    check_layout,
    coarse_rect,
    level_rects,
    place,
    round_up,
    single,
)
from anysize.models import fcn
from anysize.models.build import build_model
from anysize.models.fcn import FCN
from anysize.models.resnet_v1 import Bottleneck
from anysize.models.weights_file import Weights

IMAGES_PER_SHELF = 4


class Outputs(NamedTuple):
    """What a net gives for one image, or for several.

    Attributes:
        ends: Of the four blocks for each image, `[h, w, c]`.
        logits: For each image, `[h, w, k]`.
        losses: Mean sigmoid cross-entropy over each image's grid and the classes.
        conv1: Gradient of the sum of the losses by the stem's weights, `[7, 7, 3, c]`.
        upconv: The same by the head's weights, `[3, 3, k, c]`.
        decisions: For each image; see `parity.decisions`.
    """

    ends: list[list[np.ndarray]]
    logits: list[np.ndarray]
    losses: list[float]
    conv1: np.ndarray
    upconv: np.ndarray
    decisions: list[np.ndarray]


class Difference(NamedTuple):
    """Largest differences, each relative to the largest value of the array that it is in."""

    ends: float
    logits: float
    loss: float
    gradients: float

    @property
    def largest(self) -> float:
        """Of them all; infinite where something is not a number."""
        return max(x if x == x else float("inf") for x in self)


def rebuild(weights: Weights, dtype: torch.dtype, **rules: object) -> FCN:
    """The net of a weights file with another output stride, or other rules.

    Only the first and the last convolution keep a gradient.
    """
    config = dataclasses.replace(weights.config, **rules)  # pyright: ignore[reportArgumentType]
    model = build_model(config, len(weights.classes.names))
    model.load_state_dict(weights.model.state_dict())
    model.to(dtype).eval().requires_grad_(requires_grad=False)
    model.body.conv1.weights.requires_grad_()
    model.head.weights.requires_grad_()
    return model


def run(
    model: FCN,
    pixels: PixelConvention,
    layout: Layout,
    images: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
    *,
    learn_from: Sequence[int] | None = None,
) -> Outputs:
    """Runs a net forwards and backwards on a canvas.

    Args:
        model: From `rebuild`; its type is that of the computation.
        pixels: What it takes.
        layout: Of the images.
        images: uint8 RGB `[h, w, 3]`, one a placement.
        targets: 0 and 1 `[h, w, k]` on the logits' grid, one a placement.
        learn_from: Images whose losses the gradients are of; `None` takes all.
    """
    geometry = model.geometry
    dtype = model.head.weights.dtype
    canvas = torch.zeros(layout.canvas.slots, 3, *layout.canvas[1:], dtype=dtype)
    for p, image in zip(layout.placements, images, strict=True):
        values = torch.from_numpy(_input(image, pixels, dtype)).permute(2, 0, 1)
        canvas[p.slot, :, p.top : p.top + p.height, p.left : p.left + p.width] = values
    model.zero_grad()
    with _recorded(model) as recorded:
        logits = model(canvas, layout)
    found, losses = [], []
    for p, target in zip(layout.placements, targets, strict=True):
        own = _grid(logits, p, geometry)
        labels = torch.tensor(target).permute(2, 0, 1)[None]
        losses.append(F.binary_cross_entropy_with_logits(own, labels.to(own.dtype)))
        found.append(own[0].detach().permute(1, 2, 0).numpy())
    learnt = range(len(images)) if learn_from is None else learn_from
    torch.stack([losses[i] for i in learnt]).sum().backward()
    activations = [_cut(recorded, layout, geometry, i) for i in range(len(images))]
    ends = _positions_of_ends(model)
    return Outputs(
        [[values[k] for k in ends] for values in activations],
        found,
        [float(loss.detach()) for loss in losses],
        _in_their_layout(model.body.conv1.weights),
        _in_their_layout(model.head.weights),
        [decisions(values) for values in activations],
    )


def _input(image: np.ndarray, pixels: PixelConvention, dtype: torch.dtype) -> np.ndarray:
    if dtype == torch.float32:
        return normalise(image, pixels)
    ordered = image[..., ::-1] if pixels.channel_order == "BGR" else image
    values = ordered.astype(np.float64) * (pixels.max_value / 255)
    return (values - np.array(pixels.mean)) / np.array(pixels.std)


@contextlib.contextmanager
def _recorded(model: FCN) -> Iterator[list[tuple[int, Tensor]]]:
    """What every ReLU gives, with its level, in the order of computation.

    The ReLUs come after these modules and work in place, so each output is copied.
    """
    recorded: list[tuple[int, Tensor]] = []

    def record(level: int) -> Callable[[nn.Module, object, Tensor], None]:
        return lambda _, __, output: recorded.append((level, output.detach().clamp(min=0)))

    hooks = [model.body.conv1.register_forward_hook(record(1))]
    for unit in _units(model):
        for module, level in (
            (unit.conv1, unit.middle_level),
            (unit.conv2, unit.plan.level_out),
            (unit, unit.plan.level_out),
        ):
            hooks.append(module.register_forward_hook(record(level)))
    try:
        yield recorded
    finally:
        for hook in hooks:
            hook.remove()


def _units(model: FCN) -> list[Bottleneck]:
    return [unit for unit in model.body.units.values() if isinstance(unit, Bottleneck)]


def _positions_of_ends(model: FCN) -> list[int]:
    """Which of the recorded outputs are those of the last unit of each block."""
    last = {unit.plan.block: i for i, unit in enumerate(_units(model))}
    return [3 * (i + 1) for i in last.values()]


def _cut(
    recorded: list[tuple[int, Tensor]], layout: Layout, geometry: NetGeometry, index: int
) -> list[np.ndarray]:
    """What was recorded, of one image and at its own size."""
    found = []
    for level, values in recorded:
        r = level_rects(layout, geometry, level)[index]
        own = values[r.slot, :, r.top : r.top + r.height, r.left : r.left + r.width]
        found.append(own.permute(1, 2, 0).numpy())
    return found


def _grid(logits: Tensor, placement: Placement, geometry: NetGeometry) -> Tensor:
    r = coarse_rect(placement, geometry)
    rows, columns = (
        slice(2 * r.top, 2 * (r.top + r.height)),
        slice(2 * r.left, 2 * (r.left + r.width)),
    )
    return logits[r.slot : r.slot + 1, :, rows, columns]


def _in_their_layout(weights: Tensor) -> np.ndarray:
    """A gradient, `[out, in, h, w]` or transposed `[in, out, h, w]`, as TensorFlow has it."""
    assert weights.grad is not None
    return weights.grad.permute(2, 3, 1, 0).numpy().copy()


def alone(sizes: Sequence[Size], geometry: NetGeometry) -> list[Layout]:
    """A canvas an image, each the smallest that holds it."""
    return [single(size, geometry) for size in sizes]


def together(sizes: Sequence[Size], geometry: NetGeometry) -> Layout:
    """All images on one canvas in shelves, as close as exact padding allows."""
    gap = geometry.gutter_cells
    placements: list[Placement] = []
    top = 0
    for start in range(0, len(sizes), IMAGES_PER_SHELF):
        shelf, left = sizes[start : start + IMAGES_PER_SHELF], 0
        for size in shelf:
            placements.append(place(size, geometry, slot=0, cell_top=top, cell_left=left))
            left += geometry.cells(size.width) + gap
        top += max(geometry.cells(size.height) for size in shelf) + gap
    height = max(p.top + p.height for p in placements)
    width = max(p.left + p.width for p in placements)
    layout = Layout(Canvas(1, round_up(height, 4), round_up(width, 4)), tuple(placements))
    check_layout(layout, geometry)
    return layout


def decided_alike(ours: Outputs, theirs: Outputs) -> list[int]:
    """Images on which both nets decided alike at every ReLU and every pooling window."""
    pairs = zip(ours.decisions, theirs.decisions, strict=True)
    return [i for i, (mine, their) in enumerate(pairs) if np.array_equal(mine, their)]


def difference(ours: Outputs, theirs: Outputs) -> Difference:
    """How far two nets are apart; infinite where their outputs are not even of one shape."""
    ends = [
        _relative(a, b)
        for mine, their in zip(ours.ends, theirs.ends, strict=True)
        for a, b in zip(mine, their, strict=True)
    ]
    losses = zip(ours.losses, theirs.losses, strict=True)
    return Difference(
        largest(ends),
        largest([_relative(a, b) for a, b in zip(ours.logits, theirs.logits, strict=True)]),
        largest([abs(a - b) / abs(b) for a, b in losses]),
        largest([_relative(ours.conv1, theirs.conv1), _relative(ours.upconv, theirs.upconv)]),
    )


def largest(values: Sequence[float]) -> float:
    """The largest, 0 of none; not a number if one of them is not, which `max` may pass over."""
    return float(np.max(values, initial=0.0))


def _relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    if ours.shape != theirs.shape:
        return float("inf")
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def worst(differences: Sequence[Difference]) -> Difference:
    """The largest of each kind."""
    return Difference(*(largest(column) for column in zip(*differences, strict=True)))


# Controls: each takes one fact wrongly.


def with_one_kernel_transposed(model: FCN) -> FCN:
    """One 3x3 convolution read with `permute(3, 2, 1, 0)` in place of `permute(3, 2, 0, 1)`."""
    weights = model.get_parameter("body.units.block1_unit1.conv2.weights")
    with torch.no_grad():
        weights.copy_(weights.transpose(2, 3).clone())
    return model


@contextlib.contextmanager
def output_padding() -> Iterator[None]:
    """`padding=1, output_padding=1` in place of the crop: the right size, one pixel off."""
    original = fcn.conv_transpose_same

    def padded(x: Tensor, weights: Tensor, bias: Tensor) -> Tensor:
        return F.conv_transpose2d(x, weights, bias, stride=2, padding=1, output_padding=1)

    fcn.conv_transpose_same = padded
    try:
        yield
    finally:
        fcn.conv_transpose_same = original
