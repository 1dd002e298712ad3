"""What a script trains: its net, and what went into it. Looks only; changes nothing."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "Subject",
    "autocast_of",
    "device_of",
    "first_tensor",
    "is_wrapper",
    "num_compiles",
    "num_graphs",
    "top_module",
]


@dataclass(slots=True)
class Subject:
    """What the controls need of the script: its net, and what went into it last."""

    model: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    autocast: tuple[str, Any] | None = None
    modes: list[bool] = field(default_factory=list)
    loader: Any = None
    optimizer: tuple[Any, dict[str, Any]] | None = None
    switches: Counter[str] = field(default_factory=Counter[str])
    step_s: float = 0.0
    wait_s: float = 0.0


def is_wrapper(model: Any) -> bool:
    """Whether a module is what `torch.compile` made of another."""
    return hasattr(model, "_orig_mod")


def num_compiles() -> int:
    """Graphs that were compiled; 0 where the compiler was not loaded."""
    utils = sys.modules.get("torch._dynamo.utils")
    counters = getattr(utils, "counters", None)
    return int(counters["stats"]["unique_graphs"]) if counters else 0


def top_module(optimizer: Any) -> Any:
    """The outermost module that holds the most of the optimiser's parameters; None without one."""
    import torch

    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    modules = [m for m in gc.get_objects() if issubclass(type(m), torch.nn.Module)]
    held = {id(m): n for m in modules if (n := sum(id(p) in wanted for p in m.parameters())) > 0}
    best = max(held.values(), default=0)
    among = [m for m in modules if held.get(id(m)) == best]
    inner = {id(child) for m in among for child in m.modules() if child is not m}
    outer = [m for m in among if id(m) not in inner]
    return outer[0] if outer else None


def first_tensor(values: Any) -> Any:
    """The first tensor in nested lists, tuples and dicts."""
    import torch

    for value in values:
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, (list, tuple)):
            found = first_tensor(value)
        elif isinstance(value, dict):
            found = first_tensor(value.values())
        else:
            found = None
        if found is not None:
            return found
    return None


def autocast_of(torch: Any, tensor: Any) -> tuple[str, Any] | None:
    """Device and precision of the autocast that is on for a tensor's device; None without one."""
    kind = tensor.device.type if tensor is not None else "cpu"
    try:
        if torch.is_autocast_enabled(kind):
            return kind, torch.get_autocast_dtype(kind)
    except (RuntimeError, TypeError):
        return None
    return None


def num_graphs() -> int:
    """Tensors that hold on to a graph, alive at the end of a step."""
    import torch

    count = 0
    for found in gc.get_objects():
        if type(found) is torch.Tensor:  # A compiler's fake tensors are of another class.
            count += found.grad_fn is not None
    return count


def device_of(model: Any) -> str:
    """The kind of device of a net's parameters."""
    if model is None:
        return "cpu"
    return next((p.device.type for p in model.parameters()), "cpu")
