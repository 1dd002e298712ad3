"""Losses on a canvas: a sum over the valid entries of a step, to be divided by one count.

Never a mean of means: images, canvases and micro-batches differ in size, so each pass gives its
sum, and the caller divides by the number of valid entries of the whole step.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor


def loss_sum(
    kind: Literal["softmax", "sigmoid"],
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int,
    class_weights: Tensor | None = None,
) -> Tensor:
    """The loss that `[loss]` names; see `softmax_cross_entropy` and `sigmoid_cross_entropy`."""
    match kind:
        case "softmax":
            return softmax_cross_entropy(
                logits, target, ignore_index=ignore_index, class_weights=class_weights
            )
        case "sigmoid":
            return sigmoid_cross_entropy(
                logits, target, ignore_index=ignore_index, class_weights=class_weights
            )


def softmax_cross_entropy(
    logits: Tensor, target: Tensor, *, ignore_index: int, class_weights: Tensor | None = None
) -> Tensor:
    """Sum over pixels of `-weight[target] * log softmax(logits)[target]`.

    Args:
        logits: `[n, k, h, w]`.
        target: uint8 or int64 `[n, h, w]`, classes 0 to k - 1; `ignore_index` at ignored pixels and
            outside the images.
        ignore_index: Value of pixels that do not count.
        class_weights: `[k]`. The count that the sum is divided by stays the number of pixels.

    Returns:
        A scalar, in float32 or in the logits' float64.
    """
    return F.cross_entropy(
        _at_least_float32(logits),
        target.long(),
        weight=class_weights,
        ignore_index=ignore_index,
        reduction="sum",
    )


def sigmoid_cross_entropy(
    logits: Tensor, target: Tensor, *, ignore_index: int, class_weights: Tensor | None = None
) -> Tensor:
    """Sum over pixels and classes of `weight[class] * binary cross-entropy`.

    Args:
        logits: `[n, k, h, w]`.
        target: uint8 `[n, k, h, w]`: 1 where the class is present, 0 where it is not, and
            `ignore_index` at entries that do not count: a pixel is ignored in all its classes or
            in some of them.
        ignore_index: Value of entries that do not count.
        class_weights: `[k]`. The count that the sum is divided by stays the number of entries.

    Returns:
        A scalar, in float32 or in the logits' float64.

    Source: `tf.nn.sigmoid_cross_entropy_with_logits`.
    """
    logits = _at_least_float32(logits)
    weight = (target != ignore_index).to(logits.dtype)
    if class_weights is not None:
        weight = weight * class_weights[:, None, None].to(logits.dtype)
    return F.binary_cross_entropy_with_logits(
        logits, (target == 1).to(logits.dtype), weight=weight, reduction="sum"
    )


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
