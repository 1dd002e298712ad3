"""One optimiser step: what a run does over and over, and what a benchmark or a diagnosis times.

Needs PyTorch and nothing else outside the standard library, so that it can be timed anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from anysize.data.batch import Batch
from anysize.device import Precision, computing, is_out_of_memory, release_memory
from anysize.geometry import LossAt
from anysize.models.fcn import FCN, upsample
from anysize.models.ops import update_moving_statistics
from anysize.timing import Stage, untimed
from anysize.training.losses import loss_sum
from anysize.training.memory import PassLimit


def train_step(
    model: FCN,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Batch],
    *,
    num_valid: int,
    loss_at: LossAt,
    kind: Literal["softmax", "sigmoid"],
    ignore_index: int,
    class_weights: Tensor | None,
    device: torch.device,
    precision: Precision,
    pass_limit: PassLimit | None = None,
    stage: Stage = untimed,
) -> Tensor:
    """One optimiser step over one or more canvases.

    Each canvas adds the gradient of its loss sum divided by `num_valid`, the one count of the step,
    so that the result does not depend on how the images were shared out among canvases.

    Where the loss or its gradient is not finite, nothing is updated.

    Args:
        model: In training mode.
        optimizer: Of the model's parameters; its gradients are cleared afterwards.
        batches: The canvases of the step.
        num_valid: Valid target entries over all of them; 0 leaves the loss at zero.
        loss_at: "grid" or "full", as the targets are.
        kind: Of the loss.
        ignore_index: Value of target entries that do not count.
        class_weights: `[k]` on the device.
        device: Where to compute.
        precision: "bf16" computes under autocast.
        pass_limit: Splits what memory does not hold, and remembers it; without it, that is raised.
        stage: What its parts run in, for one who times them.

    Returns:
        The loss, a scalar on the device; not a number where the step was skipped.

    Raises:
        DeviceError: Memory does not even hold an image alone; nothing was updated.
    """
    with stage("optimiser"):
        statistics = [buffer.clone() for buffer in model.buffers()]

    def backward(batch: Batch) -> Tensor:
        with stage("transfer"):
            pixels = batch.pixels.to(device, non_blocking=True)
            target = batch.target.to(device, non_blocking=True)
        with stage("forward"):
            with computing(device, precision):
                logits = model(pixels, batch.layout)
            if loss_at == "full":
                logits = upsample(logits, batch.layout, model.geometry)
            loss = loss_sum(
                kind, logits, target, ignore_index=ignore_index, class_weights=class_weights
            ) / max(num_valid, 1)
        with stage("backward"):
            loss.backward()
            update_moving_statistics(model)
        return loss.detach()

    while True:
        passes = batches if pass_limit is None else pass_limit.fitting(batches)
        total, too_large = _add_up(backward, passes, split=pass_limit is not None)
        if pass_limit is None or too_large is None:
            break
        _forget_passes(model, optimizer, statistics)
        release_memory(device)
        pass_limit.lower(too_large)
    with stage("optimiser"):
        if _is_step_finite(total, model):
            optimizer.step()
        else:
            _forget_passes(model, optimizer, statistics)
            total = torch.full_like(total, math.nan)
        optimizer.zero_grad(set_to_none=True)
    return total


def _add_up(
    backward: Callable[[Batch], Tensor], batches: Sequence[Batch], *, split: bool
) -> tuple[Tensor, Batch | None]:
    """The sum over the batches; with `split`, the first batch that memory did not hold as well."""
    total = torch.zeros(())
    for batch in batches:
        try:
            loss = backward(batch)
        except (RuntimeError, MemoryError) as error:
            if not (split and is_out_of_memory(error)):
                raise
            return total, batch
        total = total.to(loss.device) + loss
    return total, None


def _forget_passes(
    model: FCN, optimizer: torch.optim.Optimizer, statistics: Sequence[Tensor]
) -> None:
    """Undoes the passes of a step: their gradients, and what moved the norms' statistics."""
    optimizer.zero_grad(set_to_none=True)
    for buffer, before in zip(model.buffers(), statistics, strict=True):
        buffer.copy_(before)


def _is_step_finite(total: Tensor, model: FCN) -> bool:
    """Whether loss and gradient are finite; waits for the device once."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    return bool(torch.isfinite(total) & torch.isfinite(norm))
