"""What training, evaluation, prediction and the planner know of a net: nothing but this."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor, nn

from anysize.geometry import Layout, NetGeometry


class Net(nn.Module):
    """A net that computes images on a canvas as it computes each alone.

    `tests/parity` demands this of every net that `build_model` can build: outputs and gradients of
    each image are those of the image alone, in float64 to 1e-12.
    """

    @property
    @abstractmethod
    def geometry(self) -> NetGeometry:
        """How images must be placed so that they do not see each other."""

    @property
    def recomputes(self) -> bool:
        """Whether activations are computed again in the backward pass; a net may not know how."""
        return False

    @recomputes.setter
    def recomputes(self, value: bool) -> None:
        return

    @abstractmethod
    def forward(self, pixels: Tensor, layout: Layout) -> Tensor:
        """Logits of all images on a canvas.

        Args:
            pixels: `[n, c, h, w]`, normalised, exactly zero outside the images; `h` and `w` are
                multiples of `geometry.canvas_multiple`.
            layout: Of the images on the canvas.

        Returns:
            `[n, k, th, tw]`, the shape of `target_canvas(layout.canvas, geometry, "grid")`. The
            cells of an image are its `logits_rects`; everything else is meaningless.
        """
