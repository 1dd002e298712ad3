"""What a device can do at its best, and what a net asks of it: operations, and a second's worth."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode

from anysize.device import Precision, synchronise


def convolution_flops_s(
    num_channels: int, *, precision: Precision, device: torch.device, seconds: float
) -> float:
    """What a 3x3 convolution of so many channels reaches at a good shape, operations a second.

    Args:
        num_channels: In and out.
        precision: Of pixels and weights.
        device: Where to compute.
        seconds: To spend; the best of all tries counts.
    """
    slots, extent = (8, 128) if device.type == "cuda" else (1, 64)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    x = torch.ones(slots, num_channels, extent, extent, dtype=dtype, device=device)
    x = x.contiguous(memory_format=torch.channels_last)
    weights = torch.ones(num_channels, num_channels, 3, 3, dtype=dtype, device=device)
    weights = weights.contiguous(memory_format=torch.channels_last)
    flops = 2 * 9 * num_channels * num_channels * slots * extent * extent
    best, deadline = math.inf, time.perf_counter() + seconds
    with torch.inference_mode():
        while time.perf_counter() < deadline or best == math.inf:
            for _ in range(2):  # The first of all pays for what is done once.
                synchronise(device)
                began = time.perf_counter()
                torch.nn.functional.conv2d(x, weights, padding=1)
                synchronise(device)
                best = min(best, time.perf_counter() - began)
    return flops / best


def count_flops(work: Callable[[], object]) -> int:
    """Multiplications and additions of convolutions and matrix products, backward passes too."""
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()
