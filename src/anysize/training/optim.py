"""Optimisers and learning rates, as pure functions of the step."""

from __future__ import annotations

import bisect

import torch
from torch import nn

from anysize.config import OptimConfig


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Builds the optimiser that `[optim]` names.

    Weight decay acts on the weights of convolutions and matrices only, never on norms and biases.

    Source: PARITY "weight decay"; momentum as in TensorFlow: v = mu * v + g; w -= lr * v, which is
    torch's SGD as well.
    """
    decayed, free = [], []
    for parameter in model.parameters():
        (decayed if parameter.ndim > 1 else free).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": free, "weight_decay": 0.0},
    ]
    match config.kind:
        case "sgd":
            return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=True)
        case "adamw":
            return torch.optim.AdamW(groups, lr=config.lr, fused=True)


def learning_rate(config: OptimConfig, step: int, num_steps: int) -> float:
    """The learning rate of a step.

    Args:
        config: `[optim]`.
        step: From 0.
        num_steps: Of the whole run.
    """
    rate = config.lr
    match config.schedule:
        case "constant":
            pass
        case "multistep":
            rate *= config.gamma ** bisect.bisect_right(sorted(config.milestones), step)
        case "poly":
            rate *= (1.0 - step / num_steps) ** config.power
    if step < config.warmup_steps:
        rate *= (step + 1) / (config.warmup_steps + 1)
    return rate


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
