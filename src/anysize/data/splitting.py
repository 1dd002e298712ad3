"""Splits a loaded canvas into smaller ones with the same images, for when memory ran out.

Each image's pixels and labels are moved, not changed, so the loss sums of the parts add up to that
of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from anysize.data.batch import Batch
from anysize.geometry import (
    Canvas,
    Layout,
    LossAt,
    NetGeometry,
    Placement,
    Rect,
    single,
    target_canvas,
    target_rect,
)


def split_to_fit(
    batches: Sequence[Batch],
    max_pixels: int,
    *,
    geometry: NetGeometry,
    loss_at: LossAt,
    ignore_index: int,
) -> list[Batch]:
    """Splits the batches whose canvas has more than `max_pixels`, until none can be split further.

    An image that needs a larger canvas than that is left alone on its own.
    """
    fitting: list[Batch] = []
    for batch in batches:
        parts = []
        if batch.layout.canvas.pixels > max_pixels:
            parts = smaller_batches(batch, geometry, loss_at, ignore_index)
        if parts:
            fitting += split_to_fit(
                parts, max_pixels, geometry=geometry, loss_at=loss_at, ignore_index=ignore_index
            )
        else:
            fitting.append(batch)
    return fitting


def smaller_batches(
    batch: Batch, geometry: NetGeometry, loss_at: LossAt, ignore_index: int
) -> list[Batch]:
    """The images of a batch on smaller canvases; empty where there is no smaller one.

    Half of the slots make a canvas of the same height and width; the images of a last slot get a
    canvas each.
    """
    canvas = batch.layout.canvas
    if canvas.slots > 1:
        middle = canvas.slots // 2
        halves = (range(middle), range(middle, canvas.slots))
        return [
            _slots(batch, slots, ignore_index)
            for slots in halves
            if any(p.slot in slots for p in batch.layout.placements)
        ]
    alone = [single(p.size, geometry) for p in batch.layout.placements]
    if any(layout.canvas.pixels >= canvas.pixels for layout in alone):
        return []
    return [
        _moved(batch, i, layout, geometry, loss_at, ignore_index) for i, layout in enumerate(alone)
    ]


def _slots(batch: Batch, slots: range, ignore_index: int) -> Batch:
    canvas = batch.layout.canvas
    members = [i for i, p in enumerate(batch.layout.placements) if p.slot in slots]
    placements = [batch.layout.placements[i] for i in members]
    target = batch.target[slots.start : slots.stop]
    return Batch(
        pixels=batch.pixels[slots.start : slots.stop],
        target=target,
        layout=Layout(
            Canvas(len(slots), canvas.height, canvas.width),
            tuple(p._replace(slot=p.slot - slots.start) for p in placements),
        ),
        stems=tuple(batch.stems[i] for i in members),
        num_valid=_num_valid(target, ignore_index),
    )


def _moved(
    batch: Batch,
    index: int,
    layout: Layout,
    geometry: NetGeometry,
    loss_at: LossAt,
    ignore_index: int,
) -> Batch:
    """One image of a batch, on another layout that holds only it."""
    canvas, (to,) = layout.canvas, layout.placements
    source = batch.layout.placements[index]
    num_channels = batch.pixels.shape[1]
    pixels = batch.pixels.new_zeros((1, canvas.height, canvas.width, num_channels))
    pixels = pixels.permute(0, 3, 1, 2)  # Channels last, as the loader makes them.
    pixels[_cells(to)] = batch.pixels[_cells(source)]
    labels = target_canvas(canvas, geometry, loss_at)
    shape = (1, *batch.target.shape[1:-2], labels.height, labels.width)
    target = batch.target.new_full(shape, ignore_index)
    target[_cells(target_rect(to, geometry, loss_at))] = batch.target[
        _cells(target_rect(source, geometry, loss_at))
    ]
    return Batch(
        pixels=pixels,
        target=target,
        layout=layout,
        stems=(batch.stems[index],),
        num_valid=_num_valid(target, ignore_index),
    )


def _cells(rect: Placement | Rect) -> tuple[Any, ...]:
    return (
        rect.slot,
        ...,
        slice(rect.top, rect.top + rect.height),
        slice(rect.left, rect.left + rect.width),
    )


def _num_valid(target: torch.Tensor, ignore_index: int) -> int:
    return int((target != ignore_index).sum())
