"""What a training step computes at once: a canvas with its images and labels."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from anysize.geometry import Layout


@dataclass(slots=True)
class Batch:
    """A canvas with its images and labels.

    Attributes:
        pixels: float32 `[n, c, h, w]`, channels last in memory, normalised; exactly zero outside
            the images.
        target: uint8 on `target_canvas`, `ignore_index` outside the images: `[n, th, tw]` of class
            ids (softmax), or `[n, k, th, tw]` of 0 and 1 (sigmoid).
        layout: The canvas and where its images lie.
        stems: Of the images, in the order of `layout.placements`.
        num_valid: Entries of `target` other than `ignore_index`.
    """

    pixels: Tensor
    target: Tensor
    layout: Layout
    stems: tuple[str, ...]
    num_valid: int
