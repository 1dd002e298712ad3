"""Times the forwards of a script's nets, and keeps what went into the last of them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from anysize_why.places import own_places
from anysize_why.stages import BETWEEN, LOSS, Clock
from anysize_why.subject import Subject, autocast_of, first_tensor, is_wrapper, num_compiles
from anysize_why.switches import read_switches

__all__ = ["MAX_SWITCH_STEPS", "Forwards"]


MAX_SWITCH_STEPS = 10
"""Steps in which debugging switches are read."""


class Forwards:
    """The forward of the optimiser's net; if need be, of every module that is called outermost.

    Frameworks call a method of their own instead of the net, a script may have several nets or make
    new ones: then every call of a module is looked at, which a compiler would not bear.

    Attributes:
        subject: The net with most parameters, and what last went into it.
        shape: Of its first input in the running step; None before it.
        shapes: The same of all steps that are over.
        num_forwards, num_evaluated: Calls in the running step, training and else.
        nets: Those that were called outermost, by their ids.
        lines: The script's lines around the last call.
    """

    def __init__(self, clock: Clock, mine: Callable[[], bool], subject: Subject) -> None:
        self._clock = clock
        self._mine = mine
        self._depth = 0
        self._entered = ""
        self._handles: list[Any] = []
        self._original: Any = None
        self.subject = subject
        self.shape: list[int] | None = None
        self.shapes: list[list[int]] = []
        self.num_forwards = 0
        self.num_evaluated = 0
        self.nets: dict[int, int] = {}
        self.lines: list[tuple[str, int]] = []

    @property
    def everywhere(self) -> bool:
        """Whether every call of a module is looked at."""
        return self._original is not None

    def begin_step(self) -> None:
        """A step begins."""
        self.shape = None
        self.num_forwards = self.num_evaluated = 0

    def hook(self, model: Any) -> None:
        """Times the calls of one net."""
        self.subject.model = model
        if model is None:
            return
        compiled_elsewhere = "torch._dynamo.eval_frame" in sys.modules and not is_wrapper(model)
        compiles = getattr(model, "_compiled_call_impl", None) is not None
        if compiles or (compiled_elsewhere and num_compiles()):
            return  # A hook within a compiled region would make it compile again.
        self._handles += [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, always_call=True),
        ]

    def hook_everywhere(self) -> None:
        """Times the outermost calls of all modules from now on; not where anything is compiled."""
        if self.everywhere or num_compiles():
            return
        import torch

        self.remove()
        self._original = original = torch.nn.Module.__call__

        @functools.wraps(original)
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if self._depth or not self._mine():
                return original(module, *args, **kwargs)
            self._depth = 1
            self._before(module, args, kwargs)
            try:
                return original(module, *args, **kwargs)
            finally:
                self._after(module, args, None)
                self._depth = 0

        torch.nn.Module.__call__ = call

    def remove(self) -> None:
        """Takes all hooks out."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._original is not None:
            sys.modules["torch"].nn.Module.__call__ = self._original
            self._original = None

    def _before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._mine():
            return
        import torch

        if self.everywhere and not self._num_parameters(model):  # A criterion.
            self._entered = LOSS if torch.is_grad_enabled() else "evaluation"
            self._clock.enter(self._entered)
            return
        trains = model.training and torch.is_grad_enabled()
        if trains:
            self.num_forwards += 1
            self.lines = own_places(sys._getframe(1))
            self._keep(torch, model, args, kwargs)
        else:
            self.num_evaluated += 1
        self._entered = "forward" if trains else "evaluation"
        self._clock.enter(self._entered)

    def _keep(self, torch: Any, model: Any, args: Any, kwargs: Any) -> None:
        """What the controls need of a call."""
        subject = self.subject
        if subject.model is not model:
            known = self.nets.get(id(subject.model), 0) if subject.args or subject.kwargs else 0
            if self._num_parameters(model) < known:
                return
            if type(subject.model) is not type(model):
                self.shapes.clear()
            subject.model, subject.modes = model, []
        tensor = first_tensor((*args, *kwargs.values()))
        if tensor is not None and self.shape is None:
            self.shape = list(tensor.shape)
        subject.args, subject.kwargs = args, kwargs
        if not subject.modes:
            subject.modes = [m.training for m in model.modules()]
        subject.autocast = autocast_of(torch, tensor)
        if len(self.shapes) < MAX_SWITCH_STEPS:
            subject.switches.update(read_switches(model))

    def _num_parameters(self, model: Any) -> int:
        if id(model) not in self.nets:
            count = sum(p.numel() for p in model.parameters() if p.requires_grad)
            self.nets[id(model)] = count
        return self.nets[id(model)]

    def _after(self, model: Any, args: Any, output: Any) -> None:
        if self._mine():
            after = {"forward": LOSS, "evaluation": BETWEEN}.get(self._entered)
            self._clock.leave(self._entered, after)
