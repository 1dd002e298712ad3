"""Prediction: an image of any size in, labels of exactly that size out, whole or in blended tiles.

An image of at most `max_pixels` runs whole, at its own size. A larger one runs in tiles that
overlap, and whose probabilities are blended:

- All tiles of an image have one size, congruent to the image's modulo the output stride, and start
  at multiples of it. So every tile's cells and pooling windows fall where the whole image's do.
- A tile's outermost quarter of the overlap has no weight, since what the net says there is
  distorted by the border that the tile has and the image has not. Then the weight rises as a cosine
  over half of the overlap. The weights of all tiles at a pixel add up to 1.
- Probabilities are blended rather than logits: a mean of distributions is a distribution, and one
  tile's extreme logit cannot outvote the others.

Where the net sees no further than a quarter of the overlap, tiles give what the whole image gives.
ResNets see further, so there it is an approximation.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from anysize.config import LabelKind, PixelConvention
from anysize.data.batch import cut_out
from anysize.data.loader import normalise
from anysize.device import Precision, computing, require_precision
from anysize.errors import ConfigError, WeightsError
from anysize.geometry import (
    Layout,
    LossAt,
    NetGeometry,
    Size,
    ceil_div,
    round_up,
    single,
    target_rect,
)
from anysize.images.decode import Rows, as_rows
from anysize.models.net import Net
from anysize.models.ops import upsample

DEFAULT_MAX_PIXELS = 4_194_304
"""2048 x 2048: ResNet-50 at output stride 16 with 21 classes takes 1.0 GB for it on a CPU."""

BAND_PIXELS = 1 << 25
"""Most pixels of a row of tiles, all of whose probabilities are in memory: 2.8 GB of 21 classes."""

OVERLAP = 128
"""Pixels by which neighbouring tiles overlap at least."""

NO_CLASS = 255
"""Label of a pixel at which no class of a sigmoid net reaches a probability of one half."""


@dataclass(frozen=True, slots=True)
class TileAxis:
    """The tiles along one axis of an image.

    Attributes:
        extent: Of every tile.
        starts: First pixel of each tile, rising.
    """

    extent: int
    starts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a net says about one image.

    Attributes:
        labels: uint8 `[h, w]`, the most probable class; for sigmoid `NO_CLASS` where none reaches a
            probability of one half.
        present: uint8 `[k, h, w]`, for sigmoid only: 1 where a class reaches one half.
        probabilities: float16 `[k, h, w]` if they were asked for.
        num_tiles: 1 for an image that ran whole.
    """

    labels: np.ndarray
    present: np.ndarray | None
    probabilities: np.ndarray | None
    num_tiles: int


def canvas_logits(
    model: Net,
    pixels: Tensor,
    layout: Layout,
    *,
    precision: Precision = "float32",
    at: LossAt = "full",
) -> list[Tensor]:
    """Runs the net on a canvas, in eval mode, and cuts out each image.

    Args:
        model: Its mode is afterwards as it was before.
        pixels: `[n, 3, h, w]`, normalised, zero outside the images, on any device.
        layout: Of the images on the canvas.
        precision: "bf16" computes the net under autocast; upsampling is in float32 in any case.
        at: "full": upsampled to the image's own size. "cells": as the net gives them.

    Returns:
        float32 `[k, h, w]` for each image of the layout, on the model's device.

    Raises:
        WeightsError: A logit is not finite.
        DeviceError: The GPU does not compute in bf16.
    """
    device = next(model.parameters()).device
    require_precision(device, precision)
    pixels = pixels.to(device, memory_format=torch.channels_last)
    with _evaluating(model), torch.inference_mode(), computing(device, precision):
        logits = model(pixels, layout).float()
    with torch.inference_mode():
        if at == "full":
            logits = upsample(logits, layout, model.geometry)
        rects = [target_rect(p, model.geometry, at) for p in layout.placements]
        images = [cut_out(logits, rect) for rect in rects]
        for image, placement in zip(images, layout.placements, strict=True):
            if not torch.isfinite(image).all():
                raise WeightsError(
                    "The net gives logits that are not finite on an image of "
                    f"{placement.size}, in {precision}. Its weights have "
                    "diverged: use those of an earlier step."
                )
    return images


def predict_logits(
    model: Net,
    image: np.ndarray,
    pixels: PixelConvention,
    *,
    precision: Precision = "float32",
    at: LossAt = "full",
) -> Tensor:
    """The logits of one image, whole.

    Args:
        model: The net.
        image: uint8 RGB `[h, w, 3]`.
        pixels: What the net takes.
        precision: See `canvas_logits`.
        at: See `canvas_logits`.

    Returns:
        float32 `[k, h, w]` on the model's device.
    """
    layout = single(Size(image.shape[0], image.shape[1]), model.geometry)
    canvas, (place,) = layout.canvas, layout.placements
    array = np.zeros((1, canvas.height, canvas.width, image.shape[2]), np.float32)
    inside = array[0, place.top : place.top + place.height, place.left : place.left + place.width]
    inside[:] = normalise(image, pixels)
    return canvas_logits(
        model, torch.from_numpy(array).permute(0, 3, 1, 2), layout, precision=precision, at=at
    )[0]


def predict_probabilities(
    model: Net,
    image: np.ndarray,
    pixels: PixelConvention,
    *,
    kind: LabelKind,
    precision: Precision = "float32",
) -> Tensor:
    """The probabilities of one image, whole: float32 `[k, h, w]`; arguments of `predict_logits`.

    They add up to 1 over the classes for softmax, and are each class's own for sigmoid.
    """
    return to_probabilities(predict_logits(model, image, pixels, precision=precision), kind)


def to_probabilities(logits: Tensor, kind: LabelKind) -> Tensor:
    """Logits `[k, h, w]` as probabilities of the same shape."""
    return logits.softmax(0) if kind == "multiclass" else logits.sigmoid()


def predict_image(
    model: Net,
    image: np.ndarray | Rows,
    pixels: PixelConvention,
    *,
    kind: LabelKind,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    overlap: int = OVERLAP,
    precision: Precision = "float32",
    keep_probabilities: bool = False,
) -> Prediction:
    """Labels one image, in tiles if it has more than `max_pixels`.

    Args:
        model: The net.
        image: uint8 RGB `[h, w, 3]`, or the rows of a larger one.
        pixels: What the net takes.
        kind: How the net's logits are meant.
        max_pixels: Most pixels that run at once.
        overlap: Pixels, above 0, by which neighbouring tiles overlap at least; rounded up to whole
            cells.
        precision: See `canvas_logits`.
        keep_probabilities: Also return them. Without, memory holds those of one row of tiles only.

    Raises:
        ConfigError: `max_pixels` is too small for tiles that overlap.
        WeightsError: A logit is not finite.
    """
    return predict_tiled(
        lambda tile: predict_probabilities(model, tile, pixels, kind=kind, precision=precision),
        image,
        model.geometry,
        kind=kind,
        max_pixels=max_pixels,
        overlap=overlap,
        keep_probabilities=keep_probabilities,
    )


def predict_tiled(
    run: Callable[[np.ndarray], Tensor],
    image: np.ndarray | Rows,
    geometry: NetGeometry,
    *,
    kind: LabelKind,
    max_pixels: int,
    overlap: int = OVERLAP,
    keep_probabilities: bool = False,
) -> Prediction:
    """Labels one image by anything that gives the probabilities of a tile; see `predict_image`.

    Args:
        run: From a tile, uint8 RGB `[h, w, 3]`, to its probabilities, float32 `[k, h, w]`.
        image: uint8 RGB `[h, w, 3]`, or the rows of a larger one.
        geometry: Of the net behind `run`.
        kind: What the probabilities are.
        max_pixels: Most pixels of a tile.
        overlap: As in `predict_image`.
        keep_probabilities: As in `predict_image`.

    Raises:
        ConfigError: `max_pixels` is too small for tiles that overlap.
    """
    source = as_rows(image)
    size = source.size
    rows, columns = plan_tiles(size, geometry, max_pixels=max_pixels, overlap=overlap)
    labels: list[Tensor] = []
    present: list[Tensor] = []
    kept: list[Tensor] = []
    row_weights = _axis_weights(rows, size.height, overlap)
    column_weights = _axis_weights(columns, size.width, overlap)
    unfinished: Tensor | None = None
    for i, top in enumerate(rows.starts):
        band: Tensor | None = None
        strip = source.read(top, top + rows.extent)
        for j, left in enumerate(columns.starts):
            tile = strip[:, left : left + columns.extent]
            blended = run(tile).cpu() * (row_weights[i][:, None] * column_weights[j])
            if band is None:
                band = torch.zeros(len(blended), rows.extent, size.width)
            band[:, :, left : left + columns.extent] += blended
        assert band is not None
        if unfinished is not None:
            band[:, : unfinished.shape[1]] += unfinished
        end = rows.starts[i + 1] - top if i + 1 < len(rows.starts) else rows.extent
        finished, unfinished = band[:, :end], band[:, end:]
        labels.append(_most_probable(finished, kind))
        if kind == "multilabel":
            present.append((finished >= 0.5).to(torch.uint8))
        if keep_probabilities:
            kept.append(finished.half())
    return Prediction(
        labels=torch.cat(labels).numpy(),
        present=torch.cat(present, 1).numpy() if present else None,
        probabilities=torch.cat(kept, 1).numpy() if kept else None,
        num_tiles=len(rows.starts) * len(columns.starts),
    )


def predict_cells(
    model: Net,
    image: np.ndarray | Rows,
    pixels: PixelConvention,
    *,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    overlap: int = OVERLAP,
    precision: Precision = "float32",
) -> Tensor:
    """The logits of one image of any size as the net gives them, `[k, cells, cells]` on the CPU.

    In tiles if it has more than `max_pixels`, whose logits are blended. Arguments and errors of
    `predict_image`.
    """
    source, geometry = as_rows(image), model.geometry
    size, stride = source.size, model.geometry.head_stride
    rows, columns = plan_tiles(size, geometry, max_pixels=max_pixels, overlap=overlap)
    shape = geometry.logits_extent(size.height), geometry.logits_extent(size.width)
    whole: Tensor | None = None
    row_weights, column_weights = (
        [_at_cells(weight, geometry) for weight in _axis_weights(axis, extent, overlap)]
        for axis, extent in ((rows, size.height), (columns, size.width))
    )
    for i, top in enumerate(rows.starts):
        strip = source.read(top, top + rows.extent)
        for j, left in enumerate(columns.starts):
            tile = strip[:, left : left + columns.extent]
            cells = predict_logits(model, tile, pixels, precision=precision, at="cells").cpu()
            whole = cells.new_zeros(len(cells), *shape) if whole is None else whole
            _, height, width = cells.shape
            part = whole[:, top // stride :, left // stride :][:, :height, :width]
            part += cells * (row_weights[i][:, None] * column_weights[j])
    assert whole is not None
    return whole


def _at_cells(weight: Tensor, geometry: NetGeometry) -> Tensor:
    """The weight of each cell of a tile along an axis: that of the pixel at its centre."""
    stride, extent = geometry.head_stride, len(weight)
    centres = torch.arange(geometry.logits_extent(extent)) * stride + stride // 2
    return weight[centres.clamp(max=extent - 1)]


def plan_tiles(
    size: Size, geometry: NetGeometry, *, max_pixels: int, overlap: int = OVERLAP
) -> tuple[TileAxis, TileAxis]:
    """Chooses the tiles, along rows and columns, that compute the fewest pixels in all.

    A row of them has at most `BAND_PIXELS`, if tiles so low overlap at all.

    An extent of `q` strides and a rest is covered by `n` tiles of `t` strides and the same rest, at
    least `o` strides over one another, if `q + o (n - 1) <= t n`.

    Raises:
        ConfigError: `max_pixels` is too small for tiles that overlap.
    """
    if size.pixels <= max_pixels:
        return TileAxis(size.height, (0,)), TileAxis(size.width, (0,))
    check_max_pixels(max_pixels, geometry, overlap)
    stride = geometry.output_stride
    overlap = round_up(overlap, stride)
    choices: list[tuple[int, TileAxis, TileAxis]] = []
    for num_rows in range(1, max(size.height // stride - overlap // stride, 1) + 1):
        rows = _spread(size.height, num_rows, stride, overlap)
        num_columns = _fewest(size.width, max_pixels // rows.extent, stride, overlap)
        if num_columns:
            columns = _spread(size.width, num_columns, stride, overlap)
            computed = num_rows * rows.extent * num_columns * columns.extent
            choices.append((computed, rows, columns))
    narrow = [c for c in choices if c[1].extent * size.width <= BAND_PIXELS]
    _, rows, columns = min(narrow or choices, key=lambda choice: choice[0])
    return rows, columns


def check_max_pixels(max_pixels: int, geometry: NetGeometry, overlap: int = OVERLAP) -> None:
    """Makes sure that an image of any size can be tiled within `max_pixels`.

    Raises:
        ConfigError: Tiles of so few pixels cannot overlap.
    """
    # The smallest tile has the overlap, a stride of its own, and the image's rest below a stride.
    least = (round_up(overlap, geometry.output_stride) + 2 * geometry.output_stride) ** 2
    if max_pixels < least:
        raise ConfigError(
            f"`max_pixels` is {max_pixels}; tiles that overlap by {overlap} pixels need at least "
            f"{least}."
        )


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _most_probable(probabilities: Tensor, kind: LabelKind) -> Tensor:
    best, labels = probabilities.max(0)
    labels = labels.to(torch.uint8)
    return labels if kind == "multiclass" else labels.masked_fill_(best < 0.5, NO_CLASS)


def _spread(extent: int, num: int, stride: int, overlap: int) -> TileAxis:
    strides, rest = divmod(extent, stride)
    tile = ceil_div(strides + overlap // stride * (num - 1), num)
    starts = tuple(i * (strides - tile) // max(num - 1, 1) * stride for i in range(num))
    return TileAxis(tile * stride + rest, starts)


def _fewest(extent: int, longest: int, stride: int, overlap: int) -> int | None:
    """The fewest tiles of at most `longest` pixels along an extent; None where there are none."""
    if extent <= longest:
        return 1
    strides, rest = divmod(extent, stride)
    advance = (longest - rest) // stride - overlap // stride
    return ceil_div(strides - overlap // stride, advance) if advance > 0 else None


def _axis_weights(axis: TileAxis, extent: int, overlap: int) -> list[Tensor]:
    """The share of each tile at each of its pixels; those of all tiles add up to 1."""
    margin = overlap / 4
    inside = torch.arange(axis.extent, dtype=torch.float64) + 0.5
    total = torch.zeros(extent, dtype=torch.float64)
    weights: list[Tensor] = []
    for start in axis.starts:
        weight = torch.ones(axis.extent, dtype=torch.float64)
        if start > 0:
            weight *= _ramp((inside - margin) / (2 * margin))
        if start + axis.extent < extent:
            weight *= _ramp((axis.extent - inside - margin) / (2 * margin))
        total[start : start + axis.extent] += weight
        weights.append(weight)
    return [
        (weight / total[start : start + axis.extent]).float()
        for start, weight in zip(axis.starts, weights, strict=True)
    ]


def _ramp(x: Tensor) -> Tensor:
    return (1 - torch.cos(math.pi * x.clamp(0, 1))) / 2
