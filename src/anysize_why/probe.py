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
import os
import resource
import signal
import sys
import threading
import time
import types
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anysize_why.cores import num_cores
from anysize_why.places import Sampler, own_places
from anysize_why.reads import SYNC_STEPS, Reads
from anysize_why.running import AfterTorch, StopScript, run_script
from anysize_why.stages import AFTER_BACKWARD, BETWEEN, LOSS, Clock, with_evaluation
from anysize_why.subject import (
    Subject,
    autocast_of,
    device_of,
    first_tensor,
    is_wrapper,
    num_compiles,
    num_graphs,
    top_module,
)
from anysize_why.workers import LoaderWatch

__all__ = ["Options", "Probe", "main"]


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


@dataclass(slots=True)
class Row:
    """What is gathered between the ends of two optimiser steps."""

    shape: list[int] | None = None
    num_forwards: int = 0
    num_evaluated: int = 0
    num_compiles: int = 0
    usage: Any = None
    counts_syncs: bool = False


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
        self.num_steps = 0
        self.first_ended = 0.0
        self.began = time.perf_counter()
        self.main_optimizer: int | None = None
        self.others_since = 0
        self.seen: Counter[str] = Counter()
        self.loaders: dict[int, dict[str, Any]] = {}
        self.call_lines: dict[str, list[tuple[str, int]]] = {}
        self.patched: list[tuple[Any, str, Any]] = []
        self.reserved_at_first = 0
        self.handles: list[Any] = []
        self.unlisten: Callable[[], None] | None = None
        self.stopping = False
        self.shapes: list[list[int]] = []
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
        self.reads.unwrap()
        self.sampler.stop()
        self.watch.stop()
        self.alive = False
        self.write("facts", **self.facts())
        if self.options.controls_s and self.num_steps > 5:
            from anysize_why.controls import run_controls

            rows = max(1, self.num_steps - 1)
            self.subject.step_s /= rows
            self.subject.wait_s /= rows

            self.write(
                "controls", **run_controls(self.subject, self.shapes, self.options.controls_s)
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
        self.subject.model = top_module(optimizer)
        if self.subject.model is not None:
            self._hook_model(self.subject.model)
        self._listen_to_compiler()
        self.graphs_at_first = num_graphs()
        self.reads.on_gpu = device_of(self.subject.model) == "cuda"
        self.reserved_at_first = self._reserved_bytes()
        self.sampler.start()
        self.clock.cut()
        self.clock.begin()
        self.first_ended = time.perf_counter()

    def _hook_model(self, model: Any) -> None:
        compiled_elsewhere = "torch._dynamo.eval_frame" in sys.modules and not is_wrapper(model)
        if getattr(model, "_compiled_call_impl", None) is not None or compiled_elsewhere:
            compiles = num_compiles()
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
            tensor = first_tensor((*args, *kwargs.values()))
            if tensor is not None and row.shape is None:
                row.shape = list(tensor.shape)
            subject = self.subject
            subject.args, subject.kwargs = args, kwargs
            if not subject.modes:
                subject.modes = [m.training for m in model.modules()]
            subject.autocast = autocast_of(torch, tensor)
            if self.num_steps < 4:
                self.call_lines["forward"] = own_places(sys._getframe(1))
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
            usage=resource.getrusage(resource.RUSAGE_SELF),
            counts_syncs=self.num_steps in SYNC_STEPS and not self.seen_compiler(),
        )
        self.reads.begin_step(self.row.counts_syncs)
        self.clock.begin()

    def seen_compiler(self) -> bool:
        """Whether anything is compiled here: then no method of a tensor is wrapped."""
        return num_compiles() > 0

    def _end_row(self) -> None:
        row = self.row
        stages, segments = self.clock.cut()
        wall = self.clock.mark - self.clock.began
        if row.num_evaluated:
            stages = with_evaluation(segments)
        self.subject.step_s += wall
        self.subject.wait_s += stages.get("wait for data", 0.0)
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
            reads=self.reads.of_step,
            cpu_s=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
            faults=after.ru_minflt - before.ru_minflt,
            switches=after.ru_nivcsw - before.ru_nivcsw,
            rss_bytes=_rss_bytes(),
            tunes=self.reads.on_gpu and bool(sys.modules["torch.backends.cudnn"].benchmark),
        )
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
    """The child process: `RECORD STEPS SECONDS CONTROLS_S SCRIPT [ARGS...]`."""
    record, num_steps, seconds, controls_s, script = arguments[:5]
    os.set_inheritable(int(record), False)
    options = Options(int(num_steps), float(seconds), float(controls_s), int(record))
    probe = Probe(options, Path(script))
    sys.meta_path.insert(0, AfterTorch(probe.install))
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
