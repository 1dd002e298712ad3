"""Debugging that was left on: reads the switches while the script trains, and tries a step without.

Runs in the script's process. Reading changes nothing; the controls work on a copy of the net.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["ANOMALY", "DETERMINISTIC", "HOOKS", "PROFILER", "TRACE", "read_switches", "without"]

ANOMALY = "torch.autograd.set_detect_anomaly"
DETERMINISTIC = "torch.use_deterministic_algorithms"
HOOKS = "hooks on modules or gradients"
PROFILER = "a profiler of PyTorch"
TRACE = "a profiler or tracer of Python"


def read_switches(model: Any) -> set[str]:
    """Those that are on at this moment; hooks where they are on at least a third of the modules."""
    torch = sys.modules["torch"]
    found = {
        ANOMALY: torch.is_anomaly_enabled(),
        DETERMINISTIC: torch.are_deterministic_algorithms_enabled(),
        PROFILER: torch._C._autograd._profiler_enabled(),
        TRACE: sys.getprofile() is not None or sys.gettrace() is not None,
    }
    if model is not None:
        modules, parameters = list(model.modules())[1:], list(model.parameters())
        hooked = sum(any(map(len, _module_hooks(m))) for m in modules)
        found[HOOKS] = 3 * hooked >= max(len(modules), 3) or 3 * sum(
            bool(p._backward_hooks) for p in parameters
        ) >= max(len(parameters), 3)
    return {name for name, on in found.items() if on}


def _module_hooks(module: Any) -> list[Any]:
    return [
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    ]


def without(
    switch: str, replay: Any, original: Any
) -> tuple[Callable[[], Any], Callable[[], Any]] | None:
    """A step with a switch on, and the same with it off; None where it cannot be taken out.

    Args:
        switch: Of `read_switches`.
        replay: Takes the steps (`controls.Replay`).
        original: The script's net, whose gradient hooks the copy lacks.
    """
    torch = sys.modules["torch"]
    if switch == ANOMALY:
        return (
            lambda: _within(torch.autograd.set_detect_anomaly(True), replay.as_it_is),
            lambda: _within(torch.autograd.set_detect_anomaly(False), replay.as_it_is),
        )
    if switch == DETERMINISTIC:
        return (
            lambda: _within(_deterministic(torch, True), replay.as_it_is),
            lambda: _within(_deterministic(torch, False), replay.as_it_is),
        )
    if switch == HOOKS:
        hooked, plain = copy.deepcopy(replay.model), copy.deepcopy(replay.model)
        for ours, theirs in zip(hooked.parameters(), original.parameters(), strict=True):
            for hook in (theirs._backward_hooks or {}).values():
                ours.register_hook(hook)
        for module in plain.modules():
            for hooks in _module_hooks(module):
                hooks.clear()
        return (
            lambda: replay.step(hooked, replay.args, replay.kwargs),
            lambda: replay.step(plain, replay.args, replay.kwargs),
        )
    return None


def _within(context: Any, run: Callable[[], Any]) -> Any:
    with context:
        return run()


@contextmanager
def _deterministic(torch: Any, on: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(on, warn_only=warns)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
