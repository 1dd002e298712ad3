"""What a training step computes at once: a canvas with its images and labels."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import Tensor

from anysize.geometry import (
    Layout,
    LossAt,
    NetGeometry,
    Rect,
    target_canvas,
    target_rect,
)
from anysize.planning.dealing import empty_canvas


@dataclass(slots=True, kw_only=True)
class Batch:
    """A canvas with its images and labels.

    Attributes:
        pixels: float32 `[n, c, h, w]`, channels last in memory, normalised; exactly zero outside
            the images.
        target: `[n, ..., th, tw]` on `target_canvas`; entries outside the images do not count.
            Multiclass: uint8 `[n, th, tw]` of class ids and `ignore_index`. Multilabel: uint8
            `[n, k, th, tw]` of 0, 1 and `ignore_index`.
        layout: The canvas and where its images lie.
        stems: Of the images, in the order of `layout.placements`.
        geometry: Of the net that the canvas is for.
        loss_at: Where the labels lie: on the logits' grid, or at full resolution.
    """

    pixels: Tensor
    target: Tensor
    layout: Layout
    stems: tuple[str, ...]
    geometry: NetGeometry
    loss_at: LossAt

    @property
    def rects(self) -> list[Rect]:
        """Where each image's labels lie in `target`, and its logits in those that a loss is given.

        In the order of `layout.placements`; `cut_out` takes them.
        """
        return [target_rect(p, self.geometry, self.loss_at) for p in self.layout.placements]


def without_images(batch: Batch, ignore_index: int) -> Batch:
    """A batch of no images that runs through the same net and loss."""
    canvas = empty_canvas(batch.geometry)
    labels = target_canvas(canvas, batch.geometry, batch.loss_at)
    pixels = batch.pixels.new_zeros((*canvas, batch.pixels.shape[1]))
    shape = (1, *batch.target.shape[1:-2], labels.height, labels.width)
    return dataclasses.replace(
        batch,
        pixels=pixels.permute(0, 3, 1, 2),
        target=batch.target.new_full(shape, ignore_index),
        layout=Layout(canvas, ()),
        stems=(),
    )


def cut_out(tensor: Tensor, rect: Rect) -> Tensor:
    """A view of one image, `[..., height, width]`, in a tensor `[n, ..., h, w]` on a canvas."""
    rows = slice(rect.top, rect.top + rect.height)
    return tensor[rect.slot, ..., rows, rect.left : rect.left + rect.width]
