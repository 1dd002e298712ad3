"""Runs inside the process of someone else's script: times its steps, and changes nothing else.

The script is run as `__main__`, as `python SCRIPT.py` would. Nothing here draws a random number,
touches a gradient or a buffer, writes to the console or leaves a file: what was seen goes as JSON
lines into a file without a name, which the parent process opened.

PyTorch is not imported before the script imports it, since a script may set the environment first.
Only the main thread of the script's own process is timed; forked workers drop the probe.
"""

from __future__ import annotations

import builtins
import faulthandler
import functools
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import re
import resource
import sys
import sysconfig
import tempfile
import threading
import time
import types
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anysize_why.cores import num_cores

__all__ = ["Options", "Probe", "StopScript", "main", "run_script"]

MAX_SEGMENTS = 2000
"""Stages that a step remembers in their order; a step with more keeps only the sums."""

SAMPLE_S = 0.04
"""How often the script's line is looked at."""

MAX_DUMPED = 1 << 20
"""Bytes of stacks after which the file that takes them is emptied."""

SWITCH_S = 0.0005
"""How soon a line of Python makes way for that look; with Python's 5 ms short loops are missed."""

SYNC_STEPS = (3, 8, 14)
"""Steps in which reads of single values are timed; in the others nothing wraps them.

Whatever happens every second step, or less often, does not happen in all three.
"""

READ_GAP_S = 2e-5
"""Longest time between two reads that still is the loop around them: picking the next value."""

SYNCS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__repr__")
"""Methods of a tensor that wait for its value."""

BETWEEN, LOSS, AFTER_BACKWARD = "between steps", "loss", "after backward"
"""Where the script's own lines are: after the optimiser, after the forward, after the backward."""


class StopScript(BaseException):
    """Raised at the end of an optimiser step; no `Exception`, so that few handlers swallow it."""


@dataclass(frozen=True, slots=True)
class Options:
    """How long to look.

    Attributes:
        num_steps: Optimiser steps after which the script is stopped.
        seconds: The same in seconds from the first step's end.
        controls_s: Most seconds that the controls may take; 0 for none.
        record: Descriptor of the file that takes the record.
    """

    num_steps: int
    seconds: float
    controls_s: float
    record: int


class Clock:
    """Exclusive times of nested stages: what lies within a stage counts only there."""

    def __init__(self) -> None:
        self.base = BETWEEN
        self.stack: list[str] = []
        self.mark = time.perf_counter()
        self.sums: dict[str, float] = defaultdict(float)
        self.segments: list[tuple[str, float]] = []

    @property
    def top(self) -> str:
        """The stage that runs now."""
        return self.stack[-1] if self.stack else self.base

    def enter(self, name: str) -> None:
        """A stage begins."""
        self._charge()
        self.stack.append(name)

    def leave(self, name: str, base: str | None = None) -> None:
        """A stage ends, and with it all that had begun within it; `base` is what follows."""
        self._charge()
        if name in self.stack:
            while self.stack.pop() != name:
                pass
        if base is not None:
            self.base = base

    def cut(self) -> tuple[dict[str, float], list[tuple[str, float]]]:
        """What was charged since the last cut: the sums, and the stages in their order."""
        self._charge()
        cut = dict(self.sums), self.segments
        self.sums, self.segments = defaultdict(float), []
        return cut

    def restart(self) -> None:
        """Forgets the time since the last charge: it was the probe's own."""
        self.mark = time.perf_counter()

    def _charge(self) -> None:
        now = time.perf_counter()
        name, seconds = self.top, now - self.mark
        self.mark = now
        self.sums[name] += seconds
        if self.segments and self.segments[-1][0] == name:
            self.segments[-1] = (name, self.segments[-1][1] + seconds)
        elif len(self.segments) < MAX_SEGMENTS:
            self.segments.append((name, seconds))


@dataclass(slots=True)
class Subject:
    """What the controls need of the script: its net, and what went into it last."""

    model: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    autocast: tuple[str, Any] | None = None
    modes: list[bool] = field(default_factory=list)
    loader: Any = None


@dataclass(slots=True)
class Row:
    """What is gathered between the ends of two optimiser steps."""

    began: float = 0.0
    shape: list[int] | None = None
    num_forwards: int = 0
    num_evaluated: int = 0
    num_compiles: int = 0
    usage: Any = None
    counts_syncs: bool = False
    reads: dict[str, list[float]] = field(default_factory=dict)


class Probe:
    """All that is hooked into PyTorch, and the rows that come of it."""

    def __init__(self, options: Options, script: Path) -> None:
        self.options = options
        self.script = script
        self.pid = os.getpid()
        self.thread = threading.get_ident()
        self.alive = True
        self.clock = Clock()
        self.row = Row()
        self.subject = Subject()
        self.num_steps = 0
        self.first_ended = 0.0
        self.began = time.perf_counter()
        self.main_optimizer: int | None = None
        self.others_since = 0
        self.seen: Counter[str] = Counter()
        self.loaders: dict[int, dict[str, Any]] = {}
        self.lines: dict[tuple[str, int, str, str], float] = defaultdict(float)
        self.syncs: dict[tuple[str, str, str, int], list[float]] = defaultdict(lambda: [0, 0.0])
        self.reading = False
        self.read_ended = 0.0
        self.read_in: tuple[str, Any] | None = None
        self.num_sync_steps = 0
        self.call_lines: dict[str, list[tuple[str, int]]] = {}
        self.patched: list[tuple[Any, str, Any]] = []
        self.sync_patched: list[tuple[Any, str, Any]] = []
        self.on_gpu = False
        self.reserved_at_first = 0
        self.device_waits: Counter[tuple[str, tuple[tuple[str, int], ...]]] = Counter()
        self.handles: list[Any] = []
        self.unlisten: Callable[[], None] | None = None
        self.stopping = False
        self.shapes: list[list[int]] = []
        self.graphs_at_first = 0
        self.switch_s = 0.0

    # What is written.

    def write(self, kind: str, **values: Any) -> None:
        """One line of the record."""
        if os.getpid() == self.pid:
            text = json.dumps({"is": kind, **values}, default=str) + "\n"
            os.write(self.options.record, text.encode())

    # Hooks into PyTorch.

    def install(self, torch: types.ModuleType) -> None:
        """Hooks all that is hooked before the script has made anything."""
        import torch.optim.optimizer as optimizer
        import torch.utils.data.dataloader as dataloader

        self.write("start", torch=str(torch.__version__))
        os.register_at_fork(after_in_child=self.uninstall)
        self.handles += [
            optimizer.register_optimizer_step_pre_hook(self._before_optimizer),
            optimizer.register_optimizer_step_post_hook(self._after_optimizer),
        ]
        self._wrap(torch.Tensor, "backward", "backward", after=AFTER_BACKWARD)
        self._wrap(torch.autograd, "backward", "backward", after=AFTER_BACKWARD)
        self._wrap(torch, "save", "checkpoint")
        self._wrap(builtins, "print", "printing")
        self._wrap(dataloader._BaseDataLoaderIter, "__next__", "wait for data")
        self._wrap(dataloader.DataLoader, "__iter__", "workers")
        multi = dataloader._MultiProcessingDataLoaderIter
        self._wrap(multi, "_shutdown_workers", "workers")

    def uninstall(self) -> None:
        """Takes every hook out again; in a forked child as well."""
        self.alive = False
        for owner, name, original in reversed(self.patched):
            setattr(owner, name, original)
        self.patched.clear()
        self._count_syncs(False)
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        if self.unlisten:
            self.unlisten()
            self.unlisten = None

    def mine(self) -> bool:
        """Whether this call is of the thread and process that are timed."""
        return self.alive and threading.get_ident() == self.thread

    def _wrap(self, owner: Any, name: str, stage: str, after: str | None = None) -> None:
        original = getattr(owner, name, None)
        if original is None:
            return
        probe, clock = self, self.clock

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not probe.mine():
                return original(*args, **kwargs)
            clock.enter(stage)
            try:
                return original(*args, **kwargs)
            finally:
                clock.leave(stage, after)
                probe.saw(stage, args)

        self.patched.append((owner, name, original))
        setattr(owner, name, timed)

    def saw(self, stage: str, args: tuple[Any, ...]) -> None:
        """Counts a call."""
        self.seen[stage] += 1
        if stage == "workers" and hasattr(args[0], "dataset"):
            self._saw_loader(args[0])
        if self.num_steps < 4 and stage in ("backward", "wait for data"):
            self._saw_line(stage)

    def _saw_line(self, stage: str) -> None:
        self.call_lines[stage] = _own_places(sys._getframe(2))

    def _saw_loader(self, loader: Any) -> None:
        known = self.loaders.setdefault(
            id(loader),
            {
                "num_workers": int(loader.num_workers),
                "batch_size": loader.batch_size,
                "persistent": bool(loader.persistent_workers),
                "iterations": 0,
            },
        )
        known["iterations"] += 1
        if self.subject.loader is None or not self.num_steps:
            self.subject.loader = loader

    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.mine():
            self.clock.enter("optimiser")

    def _after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self.mine():
            return
        self.clock.leave("optimiser", BETWEEN)
        self.seen["optimiser"] += 1
        if self.main_optimizer is None or self.others_since >= 3:
            self.main_optimizer = id(optimizer)
        if id(optimizer) != self.main_optimizer:
            self.others_since += 1
            return
        self.others_since = 0
        self.num_steps += 1
        if self.num_steps < 4:
            self._saw_line("optimiser")
        if self.num_steps == 1:
            self._first_step(optimizer)
        else:
            self._end_row()
        elapsed = time.perf_counter() - self.first_ended
        if self.num_steps >= self.options.num_steps or elapsed >= self.options.seconds:
            self.stop()
        self._begin_row()

    def stop(self) -> None:
        """Runs the controls, while the script's objects are alive, and raises `StopScript`."""
        if not self.stopping:
            self.stopping = True
            self.write("stopping")
            self.finish()
            self.write("stopped")
        else:
            self.write("stopped again")
        self.alive = True
        raise StopScript

    def finish(self) -> None:
        """Takes the hooks out, and writes all that is known."""
        handles, self.handles = self.handles[2:], self.handles[:2]
        for handle in handles:
            handle.remove()
        self._count_syncs(False)
        if self.switch_s:
            sys.setswitchinterval(self.switch_s)
        self.alive = False
        self.write("facts", **self.facts())
        if self.options.controls_s and self.num_steps > 5:
            from anysize_why.controls import run_controls

            self.write(
                "controls", **run_controls(self.subject, self.shapes, self.options.controls_s)
            )

    # Rows.

    def _first_step(self, optimizer: Any) -> None:
        """Finds the net, and starts what needs a running script."""
        now = time.perf_counter()
        self.write("first step", seconds=now - self.began)
        self.subject.model = _top_module(optimizer)
        if self.subject.model is not None:
            self._hook_model(self.subject.model)
        self._listen_to_compiler()
        self.graphs_at_first = _num_graphs()
        self.on_gpu = _device_of(self.subject.model) == "cuda"
        self.reserved_at_first = self._reserved_bytes()
        self.switch_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        threading.Thread(target=self._sample, name="anysize-why", daemon=True).start()
        self.clock.restart()
        self.clock.cut()
        self.first_ended = time.perf_counter()

    def _hook_model(self, model: Any) -> None:
        compiled_elsewhere = "torch._dynamo.eval_frame" in sys.modules and not _is_wrapper(model)
        if getattr(model, "_compiled_call_impl", None) is not None or compiled_elsewhere:
            compiles = _num_compiles()
            if compiles or getattr(model, "_compiled_call_impl", None) is not None:
                return  # A hook within a compiled region would make it compile again.
        self.handles += [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward, always_call=True),
        ]

    def _before_forward(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.mine():
            return
        import torch

        trains = model.training and torch.is_grad_enabled()
        if trains:
            row = self.row
            row.num_forwards += 1
            tensor = _first_tensor((*args, *kwargs.values()))
            if tensor is not None and row.shape is None:
                row.shape = list(tensor.shape)
            subject = self.subject
            subject.args, subject.kwargs = args, kwargs
            if not subject.modes:
                subject.modes = [m.training for m in model.modules()]
            subject.autocast = _autocast(torch, tensor)
            if self.num_steps < 4:
                self.call_lines["forward"] = _own_places(sys._getframe(1))
        else:
            self.row.num_evaluated += 1
        self.clock.enter("forward" if trains else "evaluation")

    def _after_forward(self, model: Any, args: Any, output: Any) -> None:
        if self.mine():
            stage = "evaluation" if "evaluation" in self.clock.stack else "forward"
            self.clock.leave(stage, BETWEEN if stage == "evaluation" else LOSS)

    def _listen_to_compiler(self) -> None:
        if self.unlisten or "torch._dynamo.callback" not in sys.modules:
            return
        handler = getattr(sys.modules["torch._dynamo.callback"], "callback_handler", None)
        if handler is None:
            return
        handler.register_start_callback(self._compiler_began)
        handler.register_end_callback(self._compiler_ended)

        def unlisten() -> None:
            handler.remove_start_callback(self._compiler_began)
            handler.remove_end_callback(self._compiler_ended)

        self.unlisten = unlisten

    def _compiler_began(self, args: Any) -> None:
        if self.mine():
            self.row.num_compiles += 1
            self.clock.enter("compiling")

    def _compiler_ended(self, args: Any) -> None:
        if self.mine():
            self.clock.leave("compiling")

    def _begin_row(self) -> None:
        self.row = Row(
            began=self.clock.mark,
            usage=resource.getrusage(resource.RUSAGE_SELF),
            counts_syncs=self.num_steps in SYNC_STEPS and not self.seen_compiler(),
        )
        self._count_syncs(self.row.counts_syncs)
        self.num_sync_steps += self.row.counts_syncs
        self.row.began = time.perf_counter()
        self.clock.restart()

    def seen_compiler(self) -> bool:
        """Whether anything is compiled here: then no method of a tensor is wrapped."""
        return _num_compiles() > 0

    def _end_row(self) -> None:
        row = self.row
        stages, segments = self.clock.cut()
        wall = self.clock.mark - row.began
        if row.num_evaluated:
            stages = _with_evaluation(segments)
        if row.shape is not None:
            self.shapes.append(row.shape)
        before, after = row.usage, resource.getrusage(resource.RUSAGE_SELF)
        self.write(
            "step",
            wall_s=wall,
            stages=stages,
            shape=row.shape,
            forwards=row.num_forwards,
            evaluated=row.num_evaluated,
            compiles=row.num_compiles,
            counts_syncs=row.counts_syncs,
            reads=row.reads,
            cpu_s=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            faults=after.ru_minflt - before.ru_minflt,
            switches=after.ru_nivcsw - before.ru_nivcsw,
            rss_bytes=_rss_bytes(),
            tunes=self.on_gpu and bool(sys.modules["torch.backends.cudnn"].benchmark),
        )
        self._listen_to_compiler()

    def facts(self) -> dict[str, Any]:
        """All that is not of one step."""
        import torch

        lines = sorted(self.lines.items(), key=lambda item: -item[1])[:50]
        syncs = sorted(self.syncs.items(), key=lambda item: -item[1][1])[:20]
        return {
            "num_steps": self.num_steps,
            "seen": dict(self.seen),
            "loaders": list(self.loaders.values()),
            "lines": [
                {"file": file, "line": line, "stage": stage, "via": via, "seconds": seconds}
                for (file, line, stage, via), seconds in lines
            ],
            "syncs": [
                {
                    "method": method,
                    "stage": stage,
                    "file": file,
                    "line": line,
                    "calls": calls,
                    "seconds": seconds,
                }
                for (method, stage, file, line), (calls, seconds) in syncs
            ],
            "num_sync_steps": self.num_sync_steps,
            "call_lines": self.call_lines,
            "threads": torch.get_num_threads(),
            "cores": num_cores(),
            "device": _device_of(self.subject.model),
            "model": type(self.subject.model).__name__ if self.subject.model is not None else None,
            "graphs": _num_graphs(),
            "graphs_at_first": self.graphs_at_first,
            "cudnn": {
                "benchmark": bool(torch.backends.cudnn.benchmark),
                "deterministic": bool(torch.backends.cudnn.deterministic),
            },
            "reserved_bytes": self._reserved_bytes(),
            "reserved_bytes_at_first": self.reserved_at_first,
            "device_waits": [
                {"method": method, "places": list(places), "calls": calls}
                for (method, places), calls in self.device_waits.items()
            ],
        }

    def _reserved_bytes(self) -> int:
        """What PyTorch's allocator holds of the device's memory; 0 without a GPU."""
        return int(sys.modules["torch"].cuda.memory_reserved()) if self.on_gpu else 0

    # Reads of single values.

    def _count_syncs(self, on: bool) -> None:
        if not on and not self.sync_patched:
            return
        import torch

        for owner, name, original in self.sync_patched:
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self.sync_patched.clear()
        if on:
            for name in SYNCS:
                self._count_sync(torch.Tensor, name)
        if on and self.on_gpu:
            for owner in (torch.cuda, torch.cuda.Stream, torch.cuda.Event):
                self._count_wait(owner, "synchronize")

    def _count_wait(self, owner: Any, name: str) -> None:
        original, probe = getattr(owner, name), self
        self.sync_patched.append((owner, name, owner.__dict__.get(name)))

        def counted(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            finally:
                if probe.mine():
                    probe.saw_wait(name, sys._getframe(1))

        setattr(owner, name, counted)

    def saw_wait(self, name: str, frame: Any) -> None:
        """Notes which lines of the script wait for the device."""
        self.device_waits[(name, tuple(_own_places(frame)))] += 1

    def _count_sync(self, tensor: Any, name: str) -> None:
        original, probe = getattr(tensor, name), self
        self.sync_patched.append((tensor, name, tensor.__dict__.get(name)))

        def timed(*args: Any, **kwargs: Any) -> Any:
            if probe.reading or not probe.mine():
                return original(*args, **kwargs)  # Within another read: that one is timed.
            probe.reading = True
            began = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                probe.saw_read(name, began, time.perf_counter(), sys._getframe(1))
                probe.reading = False

        setattr(tensor, name, timed)

    def saw_read(self, name: str, began: float, ended: float, frame: Any) -> None:
        """Sums what a read took, and the time since the one before it if that is a loop's."""
        stage = self.clock.top
        place = _own_place(frame)
        if place is None:
            return
        if self.on_gpu:
            self.saw_wait(name, frame)
        gap = began - self.read_ended
        in_loop = self.read_in == (stage, place[0]) and gap < READ_GAP_S
        gap = gap if in_loop else 0.0
        reads = self.row.reads.setdefault(stage, [0, 0.0, 0.0])
        reads[0] += 1
        reads[1] += ended - began
        reads[2] += gap
        total = self.syncs[(name, stage, *place)]
        total[0] += 1
        total[1] += ended - began + gap
        self.read_in = stage, place[0]
        self.read_ended = time.perf_counter()
        own = self.read_ended - ended  # Of no stage, and not of the step.
        self.clock.mark += own
        self.row.began += own

    # The script's own lines.

    def _sample(self) -> None:
        """In a thread of its own: which line of the script runs, and in which stage.

        No frame is ever held here. A frame that outlives its call keeps its locals, and PyTorch
        has locals whose destructors must run in the thread that made them.
        """
        with tempfile.TemporaryFile() as file:
            then, end = time.perf_counter(), 0
            while self.alive:
                time.sleep(SAMPLE_S)
                if self.row.counts_syncs:  # A look would hold up the reads that are timed.
                    then = time.perf_counter()
                    continue
                if end > MAX_DUMPED:  # Seldom: each call of the system may take the script's turn.
                    os.ftruncate(file.fileno(), 0)
                    end = os.lseek(file.fileno(), 0, os.SEEK_SET)
                stage = self.clock.top
                faulthandler.dump_traceback(file.fileno(), all_threads=True)
                now = time.perf_counter()
                dumped = os.pread(file.fileno(), MAX_DUMPED, end)
                end += len(dumped)
                place, via = _place_in_dump(dumped.decode(errors="replace"), self.thread)
                if place and self.alive and not self.row.counts_syncs:
                    self.lines[(*place, stage, via)] += now - then
                then = now


def _place_in_dump(dumped: str, thread: int) -> tuple[tuple[str, int] | None, str]:
    """The innermost of the script's own lines in a thread's stack, and the library it is in."""
    via, of_thread = "", False
    for line in dumped.splitlines():
        if match := _DUMPED_THREAD.match(line):
            of_thread = int(match[1], 16) == thread
        elif of_thread and (match := _DUMPED_LINE.match(line)):
            file = match[1]
            if _is_own(file):
                return (file, int(match[2])), via
            if file != __file__:
                library = _LIBRARY.search(file)
                via = library[1] if library else Path(file).stem
    return None, via


_DUMPED_THREAD = re.compile(r"(?:Current t|T)hread 0x([0-9a-f]+)")
_DUMPED_LINE = re.compile(r'  File "(.*)", line (\d+)')
_LIBRARY = re.compile(r"/(?:site|dist)-packages/([^/.]+)")


def _with_evaluation(segments: list[tuple[str, float]]) -> dict[str, float]:
    """The sums of a step that evaluates: what lies around its evaluation belongs to it.

    That is all between the training steps but the wait for the training's own batch, which comes
    before the evaluation or after it.
    """
    names = [name for name, _ in segments]
    evaluated = [i for i, name in enumerate(names) if name == "evaluation"]
    first, last = (evaluated[0], evaluated[-1]) if evaluated else (len(names), len(names))
    end = next((i for i in range(last, len(names)) if names[i] == "forward"), len(names))
    before = [i for i in range(first) if names[i] == "wait for data"]
    after = [i for i in range(last, end) if names[i] == "wait for data"]
    own_is_before = len(before) > 1 or (len(before) == 1 and not after)
    begin = before[0] + 1 if own_is_before else 0
    if after and not own_is_before:
        end = after[-1]
    sums: dict[str, float] = defaultdict(float)
    for i, (name, seconds) in enumerate(segments):
        kept = name in ("checkpoint", "printing") or not begin <= i < end
        sums[name if kept else "evaluation"] += seconds
    return dict(sums)


def _is_wrapper(model: Any) -> bool:
    return hasattr(model, "_orig_mod")


def _num_compiles() -> int:
    utils = sys.modules.get("torch._dynamo.utils")
    counters = getattr(utils, "counters", None)
    return int(counters["stats"]["unique_graphs"]) if counters else 0


def _top_module(optimizer: Any) -> Any:
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


def _first_tensor(values: Any) -> Any:
    import torch

    for value in values:
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(value, (list, tuple)):
            found = _first_tensor(value)
        elif isinstance(value, dict):
            found = _first_tensor(value.values())
        else:
            found = None
        if found is not None:
            return found
    return None


def _autocast(torch: Any, tensor: Any) -> tuple[str, Any] | None:
    kind = tensor.device.type if tensor is not None else "cpu"
    try:
        if torch.is_autocast_enabled(kind):
            return kind, torch.get_autocast_dtype(kind)
    except (RuntimeError, TypeError):
        return None
    return None


def _num_graphs() -> int:
    """Tensors that hold on to a graph, alive at the end of a step."""
    import torch

    count = 0
    for found in gc.get_objects():
        if type(found) is torch.Tensor:  # A compiler's fake tensors are of another class.
            count += found.grad_fn is not None
    return count


def _device_of(model: Any) -> str:
    if model is None:
        return "cpu"
    return next((p.device.type for p in model.parameters()), "cpu")


def _rss_bytes() -> int:
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY)  # A file object would take twice as long.
    except OSError:
        return 0
    try:
        return int(os.read(file, 128).split()[1]) * resource.getpagesize()
    finally:
        os.close(file)


_LIBRARIES = tuple(
    {
        str(Path(sysconfig.get_path(name)).resolve())
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
    }
    | {str(Path(__file__).resolve().parent)}
)


@functools.lru_cache(maxsize=4096)
def _is_own(file: str) -> bool:
    """Whether a file is of the script's author: of no library, and none of Python's."""
    if file.startswith("<") or "/site-packages/" in file or "/dist-packages/" in file:
        return False
    return not os.path.realpath(file).startswith(_LIBRARIES)


def _own_place(frame: Any) -> tuple[str, int] | None:
    return next(iter(_own_places(frame)), None)


def _own_places(frame: Any) -> list[tuple[str, int]]:
    """Every line of the script that is being executed, innermost first."""
    places = []
    while frame is not None:
        if _is_own(frame.f_code.co_filename):
            places.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return places


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Calls the probe once PyTorch has been imported, whenever the script does so."""

    def __init__(self, installed: Callable[[types.ModuleType], None]) -> None:
        self._installed = installed

    def find_spec(
        self, name: str, path: Any, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Only `torch`, and only once."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        loader, installed = spec.loader, self._installed

        class Loader(importlib.abc.Loader):
            def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
                return loader.create_module(spec)

            def exec_module(self, module: types.ModuleType) -> None:
                assert module.__spec__ is not None
                module.__spec__.loader = module.__loader__ = loader
                loader.exec_module(module)
                installed(module)

        spec.loader = Loader()
        return spec


def run_script(script: Path, arguments: list[str]) -> int:
    """Runs a script as `python SCRIPT.py` would; its error is shown, its exit code returned."""
    sys.argv = [str(script), *arguments]
    path = str(script.resolve())
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, str(Path(path).parent))
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__dict__["__builtins__"] = builtins
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    module.__dict__["__cached__"] = None
    sys.modules["__main__"] = module
    try:
        code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
        exec(code, module.__dict__)
    except StopScript:
        return 0
    except SystemExit as leaving:
        return _exit_code(leaving)
    except BaseException as error:  # noqa: BLE001 - whatever the script raises is shown as its own
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _exit_code(leaving: SystemExit) -> int:
    if leaving.code is None:
        return 0
    if isinstance(leaving.code, int):
        return leaving.code & 0xFF
    sys.stderr.write(f"{leaving.code}\n")
    return 1


def main(arguments: list[str]) -> None:
    """The child process: `RECORD STEPS SECONDS CONTROLS_S SCRIPT [ARGS...]`."""
    record, num_steps, seconds, controls_s, script = arguments[:5]
    os.set_inheritable(int(record), False)
    options = Options(int(num_steps), float(seconds), float(controls_s), int(record))
    probe = Probe(options, Path(script))
    sys.meta_path.insert(0, _AfterTorch(probe.install))
    code = run_script(Path(script), arguments[5:])
    if os.getpid() != probe.pid:
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    if not probe.stopping and "torch" in sys.modules:
        probe.write("ended", code=code)
        probe.finish()
    elif not probe.stopping:
        probe.write("ended", code=code)
    probe.uninstall()
    sys.exit(code)
