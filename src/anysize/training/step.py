"""One optimiser step: what a run does over and over, and what a benchmark or a diagnosis times.

Needs PyTorch and nothing else outside the standard library, so that it can be timed anywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anysize.data.batch import Batch
from anysize.device import Precision, computing, is_out_of_memory, release_memory
from anysize.geometry import Canvas
from anysize.models.net import Net
from anysize.models.ops import update_moving_statistics, upsample
from anysize.timing import Stage, untimed
from anysize.training.losses import Loss
from anysize.training.memory import PassLimit


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step did.

    Attributes:
        loss: Scalar on the net's device.
        skipped: The loss or its gradient was not finite, so nothing was updated.
        canvases: That were computed, in order; smaller ones than those of the batches where memory
            ran out.
    """

    loss: Tensor
    skipped: bool
    canvases: tuple[Canvas, ...]


def train_step(
    net: Net,
    loss: Loss,
    batches: Sequence[Batch],
    optimizer: torch.optim.Optimizer,
    *,
    precision: Precision = "float32",
    count: int | None = None,
    pass_limit: PassLimit | None = None,
    stage: Stage = untimed,
) -> StepResult:
    """One optimiser step over one or more canvases.

    Each canvas adds the gradient of its loss sum divided by the one count of the step, so that the
    result does not depend on how the images were shared out among canvases.

    Args:
        net: In training mode, on the device to compute on.
        loss: See `Loss`.
        batches: The canvases of the step.
        optimizer: Of the net's parameters; its gradients are cleared afterwards.
        precision: "bf16" computes under autocast.
        count: What the loss sums are divided by; None takes `loss.count` of these batches. A count
            of 0 leaves the loss at zero.
        pass_limit: Splits passes for which memory is too small, and remembers that; without it,
            the error is raised.
        stage: What its parts run in, for one who times them.

    Raises:
        DeviceError: Memory is too small for one image alone; nothing was updated.
    """
    device = next(net.parameters()).device
    if count is None:
        count = sum(loss.count(batch) for batch in batches)
    with stage("optimiser"):
        statistics = [buffer.clone() for buffer in net.buffers()]
    while True:
        passes = batches if pass_limit is None else pass_limit.fitting(batches)
        total = torch.zeros((), device=device)
        too_large = None
        for batch in passes:
            try:
                part = _backward(net, loss, batch, count, device, precision, stage)
            except (RuntimeError, MemoryError) as error:
                if pass_limit is None or pass_limit.is_fixed or not is_out_of_memory(error):
                    raise
                too_large = batch
                break
            total = total + part
        if pass_limit is None or too_large is None:
            break
        # Outside of `except`, whose error keeps the tensors of the failed pass alive.
        _forget_passes(net, optimizer, statistics)
        release_memory(device)
        pass_limit.lower(too_large)
    with stage("optimiser"):
        skipped = not _is_finite(total, net)
        if skipped:
            _forget_passes(net, optimizer, statistics)
        else:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    canvases = tuple(batch.layout.canvas for batch in passes)
    return StepResult(loss=total, skipped=skipped, canvases=canvases)


def _backward(
    net: Net,
    loss: Loss,
    batch: Batch,
    count: int,
    device: torch.device,
    precision: Precision,
    stage: Stage,
) -> Tensor:
    """Adds the gradients of one canvas; returns its share of the step's loss."""
    with stage("transfer"):
        pixels = batch.pixels.to(device, non_blocking=True)
        target = batch.target.to(device, non_blocking=True)
    with stage("forward"):
        with computing(device, precision):
            logits = net(pixels, batch.layout)
        if batch.loss_at == "full":
            logits = upsample(logits, batch.layout, net.geometry)
        summed = loss.sum(logits, dataclasses.replace(batch, pixels=pixels, target=target))
        part = summed / max(count, 1)
    with stage("backward"):
        part.backward()
        update_moving_statistics(net)
    return part.detach()


def _forget_passes(
    net: Net, optimizer: torch.optim.Optimizer, statistics: Sequence[Tensor]
) -> None:
    """Undoes the passes of a step: their gradients, and what moved the norms' statistics."""
    optimizer.zero_grad(set_to_none=True)
    for buffer, before in zip(net.buffers(), statistics, strict=True):
        buffer.copy_(before)


def _is_finite(total: Tensor, net: Net) -> bool:
    """Whether loss and gradient are finite; waits for the device once."""
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    return bool(torch.isfinite(total) & torch.isfinite(norm))
