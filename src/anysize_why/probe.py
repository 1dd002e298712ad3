"""Runs inside the process of someone else's script: times its steps, and changes nothing else.

The script is run as `__main__`, as `python SCRIPT.py` would. Nothing here draws a random number,
touches a gradient or a buffer, writes to the console or leaves a file: what was seen goes as JSON
lines into a file without a name, which the parent process opened.

PyTorch is not imported before the script imports it, since a script may set the environment first.
Only the main thread of the script's own process is timed; forked workers drop the probe.
"""

from __future__ import annotations

import builtins
import functools
import json
import linecache
import logging
import os
import resource
import signal
import sys
import threading
import time
import types
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anysize_why.cores import num_cores
from anysize_why.forwards import MAX_SWITCH_STEPS, Forwards
from anysize_why.places import Sampler, own_places, sources_with
from anysize_why.reads import SYNC_STEPS, Reads
from anysize_why.running import MODULE, AfterTorch, StopScript, find_module, run_script
from anysize_why.stages import AFTER_BACKWARD, BETWEEN, LOSS, Clock, with_evaluation
from anysize_why.subject import (
    Subject,
    device_of,
    num_compiles,
    num_graphs,
    top_module,
)
from anysize_why.switches import read_switches
from anysize_why.workers import LoaderWatch

__all__ = ["Options", "Probe", "main"]


@dataclass(frozen=True, slots=True)
class Options:
    """How long to look.

    Attributes:
        num_steps: Optimiser steps after which the script is stopped.
        seconds: The same in seconds from the first step's end.
        least_s: Seconds for which it is watched whatever the number of steps.
        controls_s: Most seconds that the controls may take; 0 for none.
        record: Descriptor of the file that takes the record.
    """

    num_steps: int
    seconds: float
    controls_s: float
    record: int
    least_s: float = 0.0


@dataclass(slots=True)
class Row:
    """What is gathered between the ends of two optimiser steps."""

    num_compiles: int = 0
    num_closures: int = 0
    num_backwards: int = 0
    nodes: set[Any] = field(default_factory=set[Any])
    walked: int = 0
    repeated: int = 0
    usage: Any = None
    counts_syncs: bool = False


class _Fallback(logging.Handler):
    """Hears the compiler say that it has compiled too often and goes on without."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Notes the line that names the limit."""
        text = record.getMessage()
        if "recompile_limit" in text or "cache_size_limit" in text:
            self.said = text.strip().splitlines()[0][:200]


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
        self.reads = Reads(self.clock, self.mine)
        self.sampler = Sampler(
            self.thread, lambda: None if self.row.counts_syncs else self.clock.top
        )
        self.watch = LoaderWatch(self._give_up)
        self.hung: dict[str, Any] = {}
        self.subject = Subject()
        self.forwards = Forwards(self.clock, self.mine, self.subject)
        self.num_steps = 0
        self.first_ended = 0.0
        self.began = time.perf_counter()
        self.main_optimizer: weakref.ref[Any] | None = None
        self.last_optimizer: weakref.ref[Any] | None = None
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.num_optimizers = 0
        self.seen: Counter[str] = Counter()
        self.loaders: dict[int, dict[str, Any]] = {}
        self.call_lines: dict[str, list[tuple[str, int]]] = {}
        self.patched: list[tuple[Any, str, Any]] = []
        self.reserved_at_first = 0
        self.handles: list[Any] = []
        self.unlisten: Callable[[], None] | None = None
        self.fallback = _Fallback()
        self.stopping = False
        self.graphs_at_first = 0

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
        self.reads.unwrap()
        self.forwards.remove()
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
            if stage == "backward":
                probe.saw_backward(args, kwargs)
            waits = stage == "wait for data"
            if waits:
                probe.watch.begin(args[0])
            try:
                return original(*args, **kwargs)
            except RuntimeError:
                if probe.hung:  # A worker that hung was ended.
                    raise StopScript from None
                raise
            finally:
                if waits:
                    probe.watch.end()
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

    def saw_backward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Counts the nodes of a graph that is kept for another backward pass."""
        row = self.row
        row.num_backwards += 1
        if self.num_steps < MAX_SWITCH_STEPS:
            self.subject.switches.update(read_switches(None))
        keeps = kwargs.get("retain_graph", args[2] if len(args) > 2 else None)
        if self.clock.stack.count("backward") > 1 or not (keeps or row.nodes):
            return
        began = time.perf_counter()
        of = args[0] if args else kwargs.get("tensors")
        tensors: list[Any] = list(of) if isinstance(of, (list, tuple)) else [of]
        waiting = [t.grad_fn for t in tensors if t is not None and t.grad_fn is not None]
        walked: set[Any] = set()
        while waiting:
            node = waiting.pop()
            if node not in walked:
                walked.add(node)
                waiting += [n for n, _ in node.next_functions if n is not None and n.next_functions]
        row.walked += len(walked)
        row.repeated += len(walked & row.nodes)
        row.nodes |= walked
        self.clock.skip(time.perf_counter() - began)

    def _saw_line(self, stage: str) -> None:
        self.call_lines[stage] = own_places(sys._getframe(2))

    def _saw_loader(self, loader: Any) -> None:
        known = self.loaders.setdefault(
            id(loader),
            {
                "num_workers": int(loader.num_workers),
                "batch_size": loader.batch_size,
                "persistent": bool(loader.persistent_workers),
                "dataset": type(loader.dataset).__name__,
                "iterations": 0,
            },
        )
        known["iterations"] += 1
        if self.subject.loader is None or not self.num_steps:
            self.subject.loader = loader

    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        if not self.mine():
            return None
        self.clock.enter("optimiser")
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            return None
        timed = self._timed_closure(closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": timed}
        return (optimizer, timed, *args[2:]), kwargs

    def _timed_closure(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """A closure's own lines belong to the loss, not to the optimiser that calls it."""

        @functools.wraps(closure)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.row.num_closures += 1
            self.clock.enter(LOSS)
            try:
                return closure(*args, **kwargs)
            finally:
                self.clock.leave(LOSS)

        return timed

    def _after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self.mine():
            return
        self.clock.leave("optimiser", BETWEEN)
        self.seen["optimiser"] += 1
        if optimizer not in self.optimizers:
            self.optimizers.add(optimizer)
            self.num_optimizers += 1
        if self.num_optimizers > 1:
            self.forwards.hook_everywhere()
        if not self._ends_step(optimizer):
            return
        self.num_steps += 1
        if self.num_steps < 4:
            self._saw_line("optimiser")
        if self.num_steps == 1:
            self._first_step(optimizer)
        else:
            self._end_row()
        elapsed = time.perf_counter() - self.first_ended
        enough = self.num_steps >= self.options.num_steps and elapsed >= self.options.least_s
        if enough or elapsed >= self.options.seconds:
            self.stop()
        self._begin_row()

    def _ends_step(self, optimizer: Any) -> bool:
        """Of several optimisers, one ends the steps: until it is gone, or another goes on alone."""
        main = self.main_optimizer() if self.main_optimizer else None
        again = self.last_optimizer is not None and self.last_optimizer() is optimizer
        self.last_optimizer = weakref.ref(optimizer)
        if main is None or (main is not optimizer and again):
            self.main_optimizer = self.last_optimizer
            return True
        return main is optimizer

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
        self.reads.unwrap()
        self.forwards.remove()
        self.sampler.stop()
        self.watch.stop()
        self.alive = False
        self.write("facts", **self.facts())
        if self.options.controls_s and self.num_steps > 5:
            from anysize_why.controls import run_controls

            rows = max(1, self.num_steps - 1)
            if self.seen["backward"] > 1.5 * self.seen["optimiser"]:
                self.subject.optimizer = None  # It is not stepped each time.
            self.subject.step_s /= rows
            self.subject.wait_s /= rows

            self.write(
                "controls",
                **run_controls(self.subject, self.forwards.shapes, self.options.controls_s),
            )

    def _give_up(self, hung: dict[str, Any]) -> None:
        """Called from another thread: a wait does not end. Writes all that is known."""
        self.hung = hung
        self.stopping = True
        if self.num_steps:
            self._end_row()
        self.write("hung", **hung)
        self.write("facts", **self.facts())
        for worker in hung["workers"]:
            os.kill(worker["pid"], signal.SIGKILL)

    # Rows.

    def _first_step(self, optimizer: Any) -> None:
        """Finds the net, and starts what needs a running script."""
        now = time.perf_counter()
        self.write("first step", seconds=now - self.began)
        if not self.forwards.everywhere:
            self.forwards.hook(top_module(optimizer))
        self.subject.optimizer = (type(optimizer), dict(optimizer.defaults))
        self._listen_to_compiler()
        self.graphs_at_first = num_graphs()
        self.reads.on_gpu = device_of(self.subject.model) == "cuda"
        self.reserved_at_first = self._reserved_bytes()
        self.sampler.start()
        self.clock.cut()
        self.clock.begin()
        self.first_ended = time.perf_counter()

    def _listen_to_compiler(self) -> None:
        if self.unlisten or "torch._dynamo.callback" not in sys.modules:
            return
        handler = getattr(sys.modules["torch._dynamo.callback"], "callback_handler", None)
        if handler is None:
            return
        log = logging.getLogger("torch._dynamo")
        log.addHandler(self.fallback)
        handler.register_start_callback(self._compiler_began)
        handler.register_end_callback(self._compiler_ended)

        def unlisten() -> None:
            log.removeHandler(self.fallback)
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
            usage=resource.getrusage(resource.RUSAGE_SELF),
            counts_syncs=self.num_steps in SYNC_STEPS and not self.seen_compiler(),
        )
        self.forwards.begin_step()
        self.reads.begin_step(self.row.counts_syncs)
        self.clock.begin()

    def seen_compiler(self) -> bool:
        """Whether anything is compiled here: then no method of a tensor is wrapped."""
        return num_compiles() > 0

    def _end_row(self) -> None:
        row = self.row
        stages, segments = self.clock.cut()
        wall = self.clock.mark - self.clock.began
        forwards = self.forwards
        if forwards.num_evaluated:
            stages = with_evaluation(segments)
        self.subject.step_s += wall
        self.subject.wait_s += stages.get("wait for data", 0.0)
        if forwards.shape is not None:
            forwards.shapes.append(forwards.shape)
        if self.num_steps < 5 and forwards.lines:
            self.call_lines["forward"] = forwards.lines
        before, after = row.usage, resource.getrusage(resource.RUSAGE_SELF)
        self.write(
            "step",
            wall_s=wall,
            stages=stages,
            shape=forwards.shape,
            forwards=forwards.num_forwards,
            evaluated=forwards.num_evaluated,
            closures=row.num_closures,
            walked=row.walked,
            repeated=row.repeated,
            compiles=row.num_compiles,
            counts_syncs=row.counts_syncs,
            reads=self.reads.of_step,
            cpu_s=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            faults=after.ru_minflt - before.ru_minflt,
            switches=after.ru_nivcsw - before.ru_nivcsw,
            rss_bytes=_rss_bytes(),
            tunes=self.reads.on_gpu and bool(sys.modules["torch.backends.cudnn"].benchmark),
        )
        if row.num_backwards and not forwards.num_forwards:
            forwards.hook_everywhere()
        self._listen_to_compiler()

    def facts(self) -> dict[str, Any]:
        """All that is not of one step."""
        import torch

        lines = sorted(self.sampler.seconds.items(), key=lambda item: -item[1])[:50]
        places = {key[:2] for key in self.sampler.seconds} | {key[:2] for key in self.watch.lines}
        places |= {tuple(w["place"]) for w in self.hung.get("workers", []) if w["place"]}
        return {
            "texts": {f"{f}:{n}": linecache.getline(f, n).strip()[:80] for f, n in places},
            "num_steps": self.num_steps,
            "seen": dict(self.seen),
            "loaders": list(self.loaders.values()),
            "lines": [
                {"file": file, "line": line, "stage": stage, "via": via, "seconds": seconds}
                for (file, line, stage, via), seconds in lines
            ],
            **self.reads.facts(),
            "worker_lines": [
                {"file": file, "line": line, "via": via, "looks": looks}
                for (file, line, via), looks in self.watch.lines.most_common(20)
            ],
            "call_lines": self.call_lines,
            "fallback": self.fallback.said,
            "sources": sources_with(".microseconds", ".seconds", but=self.script),
            "switches": dict(self.subject.switches),
            "made": {
                "optimisers": self.num_optimizers,
                "nets": sum(count > 0 for count in self.forwards.nets.values()),
                "loaders": len(self.loaders),
            },
            "threads": torch.get_num_threads(),
            "cores": num_cores(),
            "device": device_of(self.subject.model),
            "model": type(self.subject.model).__name__ if self.subject.model is not None else None,
            "graphs": num_graphs(),
            "graphs_at_first": self.graphs_at_first,
            "cudnn": {
                "benchmark": bool(torch.backends.cudnn.benchmark),
                "deterministic": bool(torch.backends.cudnn.deterministic),
            },
            "reserved_bytes": self._reserved_bytes(),
            "reserved_bytes_at_first": self.reserved_at_first,
        }

    def _reserved_bytes(self) -> int:
        """What PyTorch's allocator holds of the device's memory; 0 without a GPU."""
        return int(sys.modules["torch"].cuda.memory_reserved()) if self.reads.on_gpu else 0


def _rss_bytes() -> int:
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY)  # A file object would take twice as long.
    except OSError:
        return 0
    try:
        return int(os.read(file, 128).split()[1]) * resource.getpagesize()
    finally:
        os.close(file)


def main(arguments: list[str]) -> None:
    """The child process: `RECORD STEPS SECONDS LEAST_S CONTROLS_S SCRIPT [ARGS...]`."""
    record, num_steps, seconds, least_s, controls_s, script = arguments[:6]
    os.set_inheritable(int(record), False)
    options = Options(
        int(num_steps), float(seconds), float(controls_s), int(record), float(least_s)
    )
    spec = find_module(script.removeprefix(MODULE)) if script.startswith(MODULE) else None
    path = Path(spec.origin if spec and spec.origin else script)
    probe = Probe(options, path)
    probe.write("script", path=str(path))
    sys.meta_path.insert(0, AfterTorch(probe.install))
    code = run_script(path, arguments[6:], spec)
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
