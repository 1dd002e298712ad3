"""Losses on a canvas: a sum over what counts in a step, to be divided by one count.

Never a mean of means: images, canvases, passes and ranks differ in size, so each pass gives its sum
and its count, and `train_step` divides by the count of the whole step. A loss is then the same
however the images were shared out, which tests/training/test_losses.py demands of every one here.

To add a loss: write it here, give it a name in `config.LABELS_OF`, and build it in `build_loss`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from anysize.config import LossConfig
from anysize.data.batch import Batch


class Loss(Protocol):
    """What training minimises: the sum over a step's batches, divided by their count.

    Both must be additive: a batch that is split into batches of fewer images has the same sum and
    the same count. A loss may read logits and labels inside `batch.rects` only, one rectangle per
    image; what lies outside them belongs to no image.
    """

    @property
    def ignore_index(self) -> int:
        """Value of target entries that do not count, and of all entries outside the images."""
        ...

    def sum(self, logits: Tensor, batch: Batch) -> Tensor:
        """The loss of a batch before the division.

        Args:
            logits: `[n, k, th, tw]`, at the resolution of `batch.target` and on the same device.
            batch: Its target is uint8.

        Returns:
            A scalar, in float32 or in the logits' float64.
        """
        ...

    def count(self, batch: Batch) -> int:
        """What this batch adds to the step's divisor; known before the net runs."""
        ...


def build_loss(config: LossConfig, ignore_index: int) -> Loss:
    """The loss that `[loss]` describes."""
    match config.kind:
        case "softmax":
            return CrossEntropy(ignore_index=ignore_index, class_weights=config.class_weights)
        case "sigmoid":
            return SigmoidCrossEntropy(
                ignore_index=ignore_index, class_weights=config.class_weights
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEntropy:
    """One class per pixel: the mean of `-weight[target] * log softmax(logits)[target]`.

    Attributes:
        ignore_index: Value of pixels that do not count.
        class_weights: One number per class, or empty. The divisor stays the number of pixels.
    """

    ignore_index: int = 255
    class_weights: tuple[float, ...] = ()

    def sum(self, logits: Tensor, batch: Batch) -> Tensor:
        """See `Loss`; the target is `[n, th, tw]`, classes 0 to k - 1."""
        logits = _at_least_float32(logits)
        return F.cross_entropy(
            logits,
            batch.target.long(),
            weight=logits.new_tensor(self.class_weights) if self.class_weights else None,
            ignore_index=self.ignore_index,
            reduction="sum",
        )

    def count(self, batch: Batch) -> int:
        """Pixels that are not ignored."""
        return _num_valid(batch.target, self.ignore_index)


@dataclass(frozen=True, slots=True, kw_only=True)
class SigmoidCrossEntropy:
    """Any number of classes per pixel: the mean of `weight[class] * binary cross-entropy`.

    Attributes:
        ignore_index: Value of entries that do not count: a pixel is ignored in all its classes or
            in some of them.
        class_weights: One number per class, or empty. The divisor stays the number of entries.

    Source: `tf.nn.sigmoid_cross_entropy_with_logits`.
    """

    ignore_index: int = 255
    class_weights: tuple[float, ...] = ()

    def sum(self, logits: Tensor, batch: Batch) -> Tensor:
        """See `Loss`; the target is `[n, k, th, tw]`: 1 where a class is present, 0 where not."""
        logits = _at_least_float32(logits)
        weight = (batch.target != self.ignore_index).to(logits.dtype)
        if self.class_weights:
            weight = weight * logits.new_tensor(self.class_weights)[:, None, None]
        return F.binary_cross_entropy_with_logits(
            logits, (batch.target == 1).to(logits.dtype), weight=weight, reduction="sum"
        )

    def count(self, batch: Batch) -> int:
        """Pairs of pixel and class that are not ignored."""
        return _num_valid(batch.target, self.ignore_index)


def _num_valid(target: Tensor, ignore_index: int) -> int:
    return int(torch.count_nonzero(target != ignore_index))


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
