"""Images of any size on planned canvases in a training loop of one's own.

batches = anysize.CanvasBatches(dataset, anysize.geometry_of_net(net), images_per_batch=8)
loader = DataLoader(dataset, batch_sampler=batches, collate_fn=batches.collate)
for pixels, target, layout in loader:
    logits = model(pixels, layout)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anysize.data.batching import epoch_steps
from anysize.errors import ConfigError, DataError
from anysize.geometry import Layout, NetGeometry, Size, round_up
from anysize.planning.canvases import plan_canvases
from anysize.planning.packing import Plan, to_passes

MAX_CANVASES = 8


class CanvasBatch(NamedTuple):
    """What one pass of a net reads.

    Attributes:
        pixels: `[slots, c, h, w]`, zero outside the images.
        target: `[slots, ..., h, w]`, `ignore_index` outside the images.
        layout: Of the images; `layout.crop(tensor, i)` cuts one out.
    """

    pixels: Tensor
    target: Tensor
    layout: Layout


class CanvasBatches:
    """A batch sampler of images that share a canvas, and the `collate` that puts them on it.

    Attributes:
        plan: The canvases, the only shapes the net meets.
    """

    def __init__(
        self,
        images: Any,  # noqa: ANN401
        plan: Plan | NetGeometry,
        *,
        images_per_batch: int = 8,
        ignore_index: int = 255,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        """Plans canvases, where only a geometry is given.

        Args:
            images: Sizes as (height, width), or a map-style dataset of (image, target) pairs, which
                is then read once for them.
            plan: Canvases, or what placements need to know of the net (`geometry_of_net`).
            images_per_batch: Most images on one canvas.
            ignore_index: The target where no image is.
            seed: Of the order of an epoch.
            shuffle: Whether every epoch has an order of its own.

        Raises:
            ConfigError: There are no images.
            DataError: An item of the dataset is not an image and a target.
        """
        self.sizes = _sizes(images)
        if isinstance(plan, NetGeometry):
            edges = [round_up(max(s[i] for s in self.sizes), 64) for i in (0, 1)]
            plan = plan_canvases(
                self.sizes,
                geometry=plan,
                images_per_step=images_per_batch,
                max_pixels_per_step=2 * images_per_batch * edges[0] * edges[1],
                max_canvases=MAX_CANVASES,
            )
        self.plan = plan
        self.ignore_index = ignore_index
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self._batches: tuple[int, list[list[int]]] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Makes the next pass over the data that of an epoch, from 0."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._of_epoch())

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._of_epoch())

    def _of_epoch(self) -> list[list[int]]:
        epoch = self.epoch if self.shuffle else 0
        if self._batches is None or self._batches[0] != epoch:
            steps = epoch_steps(self.plan, self.sizes, seed=self.seed, epoch=epoch)
            found: list[list[int]] = []
            for work in (p for step in steps for p in step.passes):
                # `collate` sees sizes only, so a batch is what they alone are packed into.
                again = to_passes(work.images, self.sizes, self.plan)
                found.extend(list(p.images) for p in again)
            self._batches = (epoch, found)
        return self._batches[1]

    def collate(self, samples: Sequence[tuple[Any, Any]]) -> CanvasBatch:
        """Puts (image, target) pairs on a canvas; to be given to the `DataLoader`.

        Args:
            samples: Images `[c, h, w]`, and targets `[..., h, w]` of the same extent.

        Raises:
            DataError: A target has another extent than its image, or the samples fit on no canvas.
        """
        images = [torch.as_tensor(image) for image, _ in samples]
        targets = [torch.as_tensor(target) for _, target in samples]
        for image, target in zip(images, targets, strict=True):
            if image.ndim != 3 or tuple(image.shape[1:]) != tuple(target.shape[-2:]):
                raise DataError(
                    f"An image of {tuple(image.shape)} has a target of {tuple(target.shape)}. Give "
                    "images [c, h, w] and targets [..., h, w] of the same height and width."
                )
        sizes = [Size(*image.shape[1:]) for image in images]
        passes = to_passes(range(len(samples)), sizes, self.plan)
        if len(passes) != 1:
            raise DataError(
                f"Images of {', '.join(map(str, sizes))} share no canvas. Their sizes must be "
                "those that the batches were planned with; augmentations may not change them."
            )
        layout, order = passes[0].layout, passes[0].images
        canvas = layout.canvas
        pixels = images[0].new_zeros((canvas.slots, images[0].shape[0], *canvas[1:]))
        shape = (canvas.slots, *targets[0].shape[:-2], *canvas[1:])
        target = targets[0].new_full(shape, self.ignore_index)
        for i, k in enumerate(order):
            layout.crop(pixels, i).copy_(images[k])
            layout.crop(target, i).copy_(targets[k])
        return CanvasBatch(pixels, target, layout)


def _sizes(images: Any) -> list[Size]:  # noqa: ANN401
    if len(images) == 0:
        raise ConfigError("There are no images to plan canvases for.")
    first = images[0]
    if isinstance(first, tuple) and len(first) == 2 and all(isinstance(v, int) for v in first):
        return [Size(*s) for s in images]
    sizes: list[Size] = []
    for i in range(len(images)):
        image = images[i][0]
        shape = getattr(image, "shape", ())
        if len(shape) != 3:
            raise DataError(
                f"Item {i} of the dataset does not begin with an image [c, h, w]. Give sizes, as "
                "(height, width), if the dataset's items are others."
            )
        sizes.append(Size(int(shape[1]), int(shape[2])))
    return sizes
