"""A copy of a script's net, whose steps are taken again."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch

__all__ = ["Replay", "mapped", "synchronise", "tensors_in", "works_ahead"]


class Replay:
    """Forward, backward and optimiser step of a copy of the net.

    Attributes:
        model, args, kwargs, autocast: The copy, and what it is called with.
        first, shape: The first tensor among the inputs, and its shape.
        is_compiled: Whether the script's net is a compiled one; the copy is not.
        steps_optimizer: Whether its steps have one of an optimiser as the script's.
    """

    def __init__(self, subject: Any) -> None:
        self.is_compiled = hasattr(subject.model, "_orig_mod")
        self.model = copy.deepcopy(getattr(subject.model, "_orig_mod", subject.model))
        for module, training in zip(_modules(self.model, subject), subject.modes, strict=True):
            module.training = training
        self.args = _detached(subject.args)
        self.kwargs = _detached(subject.kwargs)
        self.autocast = subject.autocast
        self.original = getattr(subject.model, "_orig_mod", subject.model)
        self.switches = sorted(subject.switches)
        first = next(tensors_in((self.args, self.kwargs)))
        self.shape = list(first.shape)
        self.first = first
        self._optimizer = subject.optimizer
        self._optimizers: dict[int, Any] = {}
        self.steps_optimizer = self._can_step()

    def _can_step(self) -> bool:
        """Whether an optimiser as the script's can be made for the copy."""
        if self._optimizer is None:
            return False
        try:
            self.step(self.model, self.args, self.kwargs)
        except Exception:  # noqa: BLE001 - optimisers of other people take what they like
            self._optimizer = None
            self._optimizers.clear()
            return False
        return True

    def _step_optimizer(self, model: Any) -> None:
        """A step of an optimiser as the script's, with a learning rate of 0."""
        if self._optimizer is None:
            return
        kind, defaults = self._optimizer
        if id(model) not in self._optimizers:
            parameters = [p for p in model.parameters() if p.requires_grad]
            self._optimizers[id(model)] = kind(parameters, **{**defaults, "lr": 0.0})
        self._optimizers[id(model)].step()

    def step(self, model: Any, args: Any, kwargs: Any) -> tuple[float, int]:
        """One forward, backward and optimiser step; the loss is the mean square of the output."""
        size = next(tensors_in((args, kwargs))).numel()
        synchronise(self.first)
        began = time.perf_counter()
        self._queue(model, args, kwargs)
        self._step_optimizer(model)
        synchronise(self.first)
        seconds = time.perf_counter() - began
        model.zero_grad(set_to_none=True)
        return seconds, size

    def queued(self) -> tuple[float, float]:
        """Seconds after which a step's calls have returned, and after which the device is done."""
        synchronise(self.first)
        began = time.perf_counter()
        self._queue(self.model, self.args, self.kwargs)
        returned = time.perf_counter() - began
        synchronise(self.first)
        done = time.perf_counter() - began
        self.model.zero_grad(set_to_none=True)
        return returned, done

    def _queue(self, model: Any, args: Any, kwargs: Any) -> None:
        casting = torch.autocast(self.autocast[0], self.autocast[1]) if self.autocast else None
        with casting or nullcontext():
            output = model(*args, **kwargs)
        loss = sum(t.square().mean() for t in tensors_in(output) if t.requires_grad)
        loss.backward()  # pyright: ignore[reportAttributeAccessIssue]

    def as_it_is(self) -> tuple[float, int]:
        """The step that the script took last, once more."""
        return self.step(self.model, self.args, self.kwargs)

    def resized(self, shape: list[int]) -> tuple[Any, Any]:
        """The inputs at another shape, made of the same values."""
        changes = {
            (dim, old): new
            for dim, (old, new) in enumerate(zip(self.shape, shape, strict=True))
            if old != new
        }

        def resize(tensor: torch.Tensor) -> torch.Tensor:
            channels_last = tensor.dim() == 4 and tensor.is_contiguous(
                memory_format=torch.channels_last
            )
            for (dim, old), new in changes.items():
                if dim < tensor.dim() and tensor.shape[dim] == old:
                    index = torch.arange(new, device=tensor.device) % old
                    tensor = tensor.index_select(dim, index)
            if channels_last:
                tensor = tensor.contiguous(memory_format=torch.channels_last)
            return tensor

        return mapped(self.args, resize), mapped(self.kwargs, resize)


def _modules(model: torch.nn.Module, subject: Any) -> list[torch.nn.Module]:
    """The copy's modules in the order in which the script's modes were noted."""
    wrapper = [torch.nn.Module()] if hasattr(subject.model, "_orig_mod") else []
    return [*wrapper, *model.modules()]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, tuples, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from tensors_in(inner)
    elif hasattr(value, "__dataclass_fields__"):
        yield from tensors_in(vars(value))


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same nesting with every tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: mapped(inner, change) for key, inner in value.items()}
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(mapped(inner, change) for inner in value)
    if isinstance(value, list):
        return [mapped(inner, change) for inner in value]
    return value


def _detached(value: Any) -> Any:
    """Copies that need no gradient, so that nothing of the script is written to."""
    return mapped(value, lambda tensor: tensor.detach().clone())


def works_ahead(tensor: torch.Tensor) -> bool:
    """Whether calls on its device return before the work is done."""
    return tensor.device.type == "cuda"


def synchronise(tensor: torch.Tensor) -> None:
    """Waits until a tensor's device is done."""
    if works_ahead(tensor):
        torch.cuda.synchronize(tensor.device)
