"""Splits a loaded canvas into smaller ones with the same images, for when memory ran out.

Each image's pixels and labels are moved, not changed, so the loss sums of the parts add up to that
of the whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from anysize.data.batch import Batch, cut_out
from anysize.geometry import Canvas, Layout, Rect, single, target_canvas, target_rect


def split_to_fit(batches: Sequence[Batch], max_pixels: int, ignore_index: int) -> list[Batch]:
    """Splits the batches whose canvas has more than `max_pixels`, until none can be split further.

    An image that needs a larger canvas than that is left alone on its own.

    Args:
        batches: Of a step.
        max_pixels: Most canvas pixels of a batch.
        ignore_index: What the targets of new canvases hold outside the images.
    """
    fitting: list[Batch] = []
    for batch in batches:
        parts = []
        if batch.layout.canvas.pixels > max_pixels:
            parts = smaller_batches(batch, ignore_index)
        if parts:
            fitting += split_to_fit(parts, max_pixels, ignore_index)
        else:
            fitting.append(batch)
    return fitting


def smaller_batches(batch: Batch, ignore_index: int) -> list[Batch]:
    """The images of a batch on smaller canvases; empty where there is no smaller one.

    Half of the slots make a canvas of the same height and width; the images of a last slot get a
    canvas each.
    """
    canvas = batch.layout.canvas
    if canvas.slots > 1:
        middle = canvas.slots // 2
        halves = (range(middle), range(middle, canvas.slots))
        return [
            _slots(batch, slots)
            for slots in halves
            if any(p.slot in slots for p in batch.layout.placements)
        ]
    alone = [single(p.size, batch.geometry) for p in batch.layout.placements]
    if any(layout.canvas.pixels >= canvas.pixels for layout in alone):
        return []
    return [_moved(batch, i, layout, ignore_index) for i, layout in enumerate(alone)]


def _slots(batch: Batch, slots: range) -> Batch:
    canvas = batch.layout.canvas
    members = [i for i, p in enumerate(batch.layout.placements) if p.slot in slots]
    placements = [batch.layout.placements[i] for i in members]
    return dataclasses.replace(
        batch,
        pixels=batch.pixels[slots.start : slots.stop],
        target=batch.target[slots.start : slots.stop],
        layout=Layout(
            Canvas(len(slots), canvas.height, canvas.width),
            tuple(p._replace(slot=p.slot - slots.start) for p in placements),
        ),
        stems=tuple(batch.stems[i] for i in members),
    )


def _moved(batch: Batch, index: int, layout: Layout, ignore_index: int) -> Batch:
    """One image of a batch, on another layout that holds only it."""
    canvas, (to,) = layout.canvas, layout.placements
    num_channels = batch.pixels.shape[1]
    pixels = batch.pixels.new_zeros((1, canvas.height, canvas.width, num_channels))
    pixels = pixels.permute(0, 3, 1, 2)  # Channels last, as the loader makes them.
    source = Rect(*batch.layout.placements[index])
    cut_out(pixels, Rect(*to)).copy_(cut_out(batch.pixels, source))
    labels = target_canvas(canvas, batch.geometry, batch.loss_at)
    shape = (1, *batch.target.shape[1:-2], labels.height, labels.width)
    target = batch.target.new_full(shape, ignore_index)
    rect = target_rect(to, batch.geometry, batch.loss_at)
    cut_out(target, rect).copy_(cut_out(batch.target, batch.rects[index]))
    return dataclasses.replace(
        batch, pixels=pixels, target=target, layout=layout, stems=(batch.stems[index],)
    )
