"""One optimiser step: what a run does over and over, and what a benchmark or a diagnosis times.

Needs PyTorch and nothing else outside the standard library, so that it can be timed anywhere.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anysize.data.batch import Batch, without_images
from anysize.device import Precision, computing, is_out_of_memory, release_memory
from anysize.errors import RankLostError
from anysize.geometry import Canvas
from anysize.models.net import Net
from anysize.models.ops import moving_buffers, update_moving_statistics, upsample
from anysize.ranks import ALONE, Lockstep, Ranks
from anysize.timing import Stage, untimed
from anysize.training.losses import Loss
from anysize.training.memory import PassLimit


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step did.

    Attributes:
        loss: Scalar on the host.
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
    ranks: Ranks = ALONE,
    lockstep: Lockstep | None = None,
    stage: Stage = untimed,
) -> StepResult:
    """One optimiser step over one or more canvases.

    Each canvas adds the gradient of its loss sum divided by the one count of the step, so that the
    result does not depend on how the images were shared out among canvases and ranks.

    Args:
        net: In training mode, on the device to compute on.
        loss: See `Loss`.
        batches: The canvases of the step, or those that this rank computes. With `lockstep`, ranks
            have as many, parts of the same passes.
        optimizer: Of the net's parameters; its gradients are cleared afterwards.
        precision: "bf16" computes under autocast.
        count: What the loss sums are divided by; None takes `loss.count` of the batches of all
            ranks. A count of 0 leaves the loss at zero.
        pass_limit: Splits passes for which memory is too small, and remembers that; without it,
            the error is raised.
        ranks: That take this step together.
        lockstep: Of `set_lockstep`, where norms take their statistics over all ranks.
        stage: What its parts run in, for one who times them.

    Raises:
        DeviceError: Memory is too small for one image alone; nothing was updated.
        RankLostError: Another rank ended; nothing was updated.
    """
    device = next(net.parameters()).device
    if count is None:
        (count,) = ranks.sum_numbers(sum(loss.count(batch) for batch in batches))
    with stage("optimiser"):
        statistics = [(buffer, buffer.clone()) for buffer in moving_buffers(net)]
    backward = functools.partial(_backward, net, loss, count, device, precision, stage)
    try:
        while True:
            passes = _fitting(batches, pass_limit, lockstep, loss.ignore_index)
            total, too_large = _accumulate(
                passes, backward, pass_limit, lockstep, device, loss.ignore_index
            )
            failed = too_large is not None
            if ranks.size > 1:
                with stage("gradients of all ranks"):
                    total, failed = _sum_gradients(net, total, failed, ranks)
            if pass_limit is None or not failed:
                break
            # Outside of `except`, whose error keeps the tensors of the failed pass alive.
            _forget_passes(optimizer, statistics)
            release_memory(device)
            _lower(pass_limit, too_large, ranks)
    except RankLostError:
        _forget_passes(optimizer, statistics)
        raise
    with stage("optimiser"):
        total, skipped = _on_host(total, net)
        if skipped:
            _forget_passes(optimizer, statistics)
        else:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    canvases = tuple(batch.layout.canvas for batch in passes)
    return StepResult(loss=total, skipped=skipped, canvases=canvases)


def _fitting(
    batches: Sequence[Batch],
    pass_limit: PassLimit | None,
    lockstep: Lockstep | None,
    ignore_index: int,
) -> Sequence[Batch]:
    """The passes that memory holds; in lockstep, of each batch as many on every rank."""
    if pass_limit is None or pass_limit.tally.max_pass_pixels is None:
        return batches
    if lockstep is None:
        return pass_limit.fitting(batches)
    parts = [pass_limit.fitting([batch]) for batch in batches]
    most = [max(n) for n in zip(*lockstep.ranks.gather([len(p) for p in parts]), strict=True)]
    empty = without_images(batches[0], ignore_index)
    return [
        p for own, n in zip(parts, most, strict=True) for p in (*own, *[empty] * (n - len(own)))
    ]


def _accumulate(
    passes: Sequence[Batch],
    backward: Callable[[Batch], Tensor],
    pass_limit: PassLimit | None,
    lockstep: Lockstep | None,
    device: torch.device,
    ignore_index: int,
) -> tuple[Tensor, Batch | None]:
    """Adds up the gradients of all passes; gives their loss, and the pass that memory was short of.

    A rank that fails goes through the rest without images where others wait for its statistics.
    """
    total = torch.zeros((), device=device)
    too_large = None
    for batch in passes:
        if lockstep is not None:
            lockstep.start()
        try:
            if too_large is None:
                total = total + backward(batch)
        except (RuntimeError, MemoryError) as error:
            if pass_limit is None or pass_limit.is_fixed or not is_out_of_memory(error):
                raise
            too_large = batch
        if too_large is not None:
            if lockstep is None:
                break
            release_memory(device)
            lockstep.resume()
            backward(without_images(batch, ignore_index))
    return total, too_large


def _sum_gradients(net: Net, total: Tensor, failed: bool, ranks: Ranks) -> tuple[Tensor, bool]:
    """Adds up gradients, loss, and whether memory ran out, over all ranks in one exchange.

    A parameter has a gradient afterwards where it has one on some rank.
    """
    parameters = [p for p in net.parameters() if p.requires_grad]
    tail = [total, total.new_tensor(float(failed))]
    tail += [total.new_tensor(float(p.grad is not None)) for p in parameters]
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in (total, *parts)))
    flat = ranks.sum_(torch.cat([t.flatten().to(dtype) for t in (*tail, *parts)]))
    flags = flat[1 : len(tail)].tolist()
    rest = flat[len(tail) :].split([p.numel() for p in parameters])
    for parameter, gradient, has in zip(parameters, rest, flags[1:], strict=True):
        if has:
            parameter.grad = torch.empty_like(parameter).copy_(gradient.view_as(parameter))
    return flat[0], flags[0] > 0


def _lower(pass_limit: PassLimit, too_large: Batch | None, ranks: Ranks) -> None:
    """Lowers the limit on all ranks to the lowest of those on which memory ran out."""
    with ranks.alike():
        if too_large is not None:
            pass_limit.lower(too_large)
    limits = ranks.gather(None if too_large is None else pass_limit.tally.max_pass_pixels)
    pass_limit.tally.max_pass_pixels = min(limit for limit in limits if limit is not None)


def _backward(
    net: Net,
    loss: Loss,
    count: int,
    device: torch.device,
    precision: Precision,
    stage: Stage,
    batch: Batch,
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
        if batch.layout.placements:
            summed = loss.sum(logits, dataclasses.replace(batch, pixels=pixels, target=target))
        else:  # Nothing is learned, but norms talk to those of other ranks, here and backwards.
            summed = 0.0 * logits.sum()
        part = summed / max(count, 1)
    with stage("backward"):
        part.backward()
        update_moving_statistics(net)
    return part.detach()


def _forget_passes(
    optimizer: torch.optim.Optimizer, statistics: Sequence[tuple[Tensor, Tensor]]
) -> None:
    """Undoes the passes of a step: their gradients, and what moved the norms' statistics."""
    optimizer.zero_grad(set_to_none=True)
    for buffer, before in statistics:
        buffer.copy_(before)


def _on_host(total: Tensor, net: Net) -> tuple[Tensor, bool]:
    """The loss on the host, and whether it or the gradient is not finite: one wait for the device.

    Args:
        total: Of the step.
        net: With its gradients.
    """
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    told = torch.stack((total, norm.to(total))).cpu()
    return told[0], not bool(told.isfinite().all())
