"""The experiment: first visits, then rounds in which the arms take turns step by step.

Before the rounds one turn of all arms is timed, and tells how many turns the time holds.
"""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anysize.bench.arms import (
    NUM_CLASSES,
    Arm,
    OptimiserStep,
    Turn,
    Work,
    WorkPlan,
    arms_of,
    batch,
    shapes_of,
)
from anysize.bench.settings import BenchSettings
from anysize.bench.sizes import size_sets
from anysize.bench.slim import SlimWorker
from anysize.bench.summary import (
    BenchError,
    Measured,
    StepTime,
    summarise_arm,
    summarise_ratios,
)
from anysize.bench.worker import NetWorker, Worker
from anysize.device import select_device
from anysize.errors import first_names
from anysize.geometry import Canvas, Size
from anysize.models.build import geometry_of
from anysize.wording import count_of
from anysize_why.cores import num_cores

QUICK_SECONDS, FULL_SECONDS = 150.0, 1110.0
"""That a benchmark may take in all."""

END_SECONDS = 5.0
COMPILE_SECONDS, MOST_COMPILED = 150.0, 8
"""For torch.compile, which meets so many images at most."""

TEN_SHARE = 0.03
"""Of the time, for each arm on ten sizes."""

LIMIT_SECONDS = 0.3
"""Of each round, for the convolution that tells the device's limit."""

FEW_TURNS = 2
"""Of four images (or as many as a step has) that a slow machine measures at least."""

SLOWER, QUICK_VISITS, FULL_VISITS = 1.4, 4.0, 9.0
"""How much slower the average arm is than the plain net on one size, and how many turns of all arms
the first visits are worth; roughly, only to tell a machine that is far too slow."""

AGAIN = 0.8
"""Of a turn of all arms: about what repeating some steps adds to a round."""


def run_bench(settings: BenchSettings, say: Callable[[str], None]) -> dict[str, Any]:
    """Measures, and returns what `--json` writes.

    Args:
        settings: What to measure.
        say: Takes a line of progress.

    Raises:
        BenchError: An arm failed or died.
        DeviceError: A device was asked for that does not exist.
    """
    began = time.perf_counter()
    seconds = FULL_SECONDS if settings.full else QUICK_SECONDS
    device = select_device(settings.device)
    arms = arms_of(
        settings.precision,
        full=settings.full,
        tuning=device.type == "cuda",
        peers=settings.peers is not None,
    )
    with contextlib.ExitStack() as stack:
        # Counts operations on the plain net, measures the limit, and tells how fast the device is.
        limit = NetWorker(Arm("plain", "one", settings.precision), settings.model, device.type)
        stack.callback(limit.close)
        limit.wait_until_ready()
        one_size = batch([size_sets(settings.sizes).one] * settings.images_per_step)
        flops_a_pixel = limit.flops_a_pixel(one_size)
        step_s = min(limit.step((one_size,)) for _ in range(2))
        sizes, cut = _sizes_that_fit(settings, len(arms) * step_s, seconds)
        sets = size_sets(sizes)
        plan = WorkPlan(
            sets,
            geometry_of(settings.model),
            settings.images_per_step,
            full=settings.full,
            on_gpu=device.type == "cuda",
        )
        say(
            f"{count_of(len(sizes), 'image')} of "
            f"{statistics.fmean(s.pixels for s in sizes) / 1e6:.3f} "
            f"megapixels on average; one size: {sets.one}; canvases of the mosaics: "
            f"{first_names(map(str, plan.plans['all'].canvases))}"
        )
        run, peaks = _Run(say), dict[Arm, int]()
        if cut:
            run.note(cut)
        end = began + seconds - END_SECONDS - (COMPILE_SECONDS if settings.full else 0)
        # No ratio is between ten sizes and others, and all arms at once do not fit in memory.
        ten = [arm for arm in arms if arm.sizes == "ten"]
        others = [arm for arm in arms if arm.sizes != "ten"]
        limits: list[float] = []
        for group, until in ((others, end - seconds * TEN_SHARE * len(ten)), (ten, end)):
            if not group:
                continue
            say(f"starting {count_of(len(group), 'arm')}, each a process of its own")
            with contextlib.ExitStack() as in_group:
                started = {
                    arm: in_group.enter_context(_started(arm, settings, device.type))
                    for arm in group
                }
                working = {
                    arm: (worker, plan.work(arm.policy, arm.sizes))
                    for arm, worker in started.items()
                }
                for worker in started.values():
                    worker.wait_until_ready()
                run.first_visits(working)
                reached = run.rounds(working, settings.rounds, plan.num_turns, until, limit)
                limits = limits or reached
                peaks |= {arm: worker.peak_memory_bytes() for arm, worker in started.items()}
        if settings.full:
            arm = Arm("compile dynamic", "all", settings.precision)
            peak = run.compiled(
                arm,
                stack.enter_context(_started(arm, settings, device.type)),
                plan.work(arm.policy, arm.sizes),
                min(began + seconds - END_SECONDS, time.perf_counter() + COMPILE_SECONDS),
            )
            peaks |= {} if peak is None else {arm: peak}
    measured = Measured(
        steps=run.steps,
        epoch_pixels=sum(s.pixels for s in sizes),
        mosaic_pixels=plan.epoch_computed_pixels(),
        flops_a_pixel=flops_a_pixel,
        limits=limits,
    )
    return {
        "machine": _machine(device),
        "net": {
            **asdict(settings.model),
            "precision": settings.precision,
            "num_classes": NUM_CLASSES,
            "flops_a_pixel": flops_a_pixel,
        },
        "mode": "full" if settings.full else "quick",
        "images_per_step": settings.images_per_step,
        "images": len(sizes),
        "epoch_megapixels": measured.epoch_pixels / 1e6,
        "one_size": list(sets.one),
        "ten_sizes": [list(s) for s in sets.ten],
        "canvases": [list(c) for c in plan.plans["all"].canvases],
        "rounds": len(limits),
        "conv_limit_flops_s": limits,
        "arms": [
            {
                "name": arm.name,
                "policy": arm.policy,
                "sizes": arm.sizes,
                "precision": arm.precision,
                **summarise_arm(measured, arm.name),
                "peak_rss_bytes": peak,
            }
            for arm, peak in peaks.items()
        ],
        "ratios": summarise_ratios(measured),
        "notes": run.notes,
        "seconds": time.perf_counter() - began,
        "steps": [asdict(step) for step in run.steps],
    }


Working = Mapping[Arm, tuple[Worker, Work]]
"""Arms under way, and what each does."""


class _Run:
    """The times of all steps of all arms.

    Attributes:
        steps: All that were taken.
        notes: What was cut, or could not be measured.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.steps: list[StepTime] = []
        self.notes: list[str] = []
        self._seen: dict[Arm, set[Canvas]] = {}
        self._num_steps: dict[Arm, int] = {}

    def first_visits(self, arms: Working) -> None:
        """Every arm meets the shapes that it will meet again, for the first time; by turns."""
        most = max(len(work.visits) for _, work in arms.values())
        for number in range(most):
            for arm, (worker, work) in arms.items():
                for turn in work.visits[number : number + 1]:
                    self._turn(arm, worker, turn, None)
        self._say("first visits done")

    def rounds(
        self, arms: Working, num_rounds: int, num_turns: int, end: float, limit: NetWorker
    ) -> list[float]:
        """The arms turn by turn; returns what the limiting convolution reached in each round."""
        began = time.perf_counter()
        for arm, (worker, work) in arms.items():
            self._turn(arm, worker, work.turns[-1], None)
        a_turn = time.perf_counter() - began
        fresh = max(num_turns - 1, 1)
        num_rounds, a_round = self._that_fit(num_rounds, fresh, a_turn, end)
        limits: list[float] = []
        for number in range(num_rounds):
            round_began = time.perf_counter()
            for t in range(number * a_round, (number + 1) * a_round):
                for arm, (worker, work) in arms.items():
                    self._turn(arm, worker, work.turns[t % fresh], number)
            last = ((number + 1) * a_round - 1) % fresh
            for arm, (worker, work) in arms.items():
                if arm.sizes == "all":
                    # By turns as well, so that both times follow the work of others.
                    self._again(arm, worker, work.turns[last][-1])
            limits.append(limit.limit_flops_s(LIMIT_SECONDS))
            now = time.perf_counter()
            self._say(f"round {number + 1} of {num_rounds}: {now - round_began:.0f} s")
            if number + 1 < num_rounds and now + (now - round_began) > end:
                self.note(f"The time was over after {number + 1} of {num_rounds} rounds.")
                break
        return limits

    def compiled(self, arm: Arm, worker: Worker, work: Work, end: float) -> int | None:
        """Some images under torch.compile, each a round; returns the peak memory, None if none."""
        assert isinstance(worker, NetWorker)
        steps = [step for turn in work.turns for step in turn][:MOST_COMPILED]
        peak = None
        try:
            worker.wait_until_ready()
            for number, step in enumerate(steps):
                seconds = worker.step_within(step, end - time.perf_counter())
                if seconds is None:
                    self.note(
                        f"torch.compile(dynamic=True): time for {count_of(number, 'image')} only."
                    )
                    break
                self._record(arm, step, seconds, number)
                peak = worker.peak_memory_bytes()
        except BenchError as error:
            self.note(f"torch.compile(dynamic=True) is cut short. {error}")
        return peak

    def _that_fit(
        self, num_rounds: int, num_turns: int, a_turn: float, end: float
    ) -> tuple[int, int]:
        """Rounds and turns a round, fewer than wanted where time runs out."""
        left = end - time.perf_counter()
        wanted = max(num_turns // num_rounds, 1)
        fitting = int(left / num_rounds / a_turn - AGAIN)
        if fitting >= wanted:
            return num_rounds, wanted
        rounds = num_rounds if fitting >= 1 else max(int(left / (a_turn * (1 + AGAIN))), 1)
        turns = max(fitting, 1)
        self.note(
            f"A turn of all arms takes {a_turn:.1f} s here, so the time holds {rounds} rounds of "
            f"{turns} turns; {num_rounds} of {wanted} were wanted."
        )
        return rounds, turns

    def _turn(self, arm: Arm, worker: Worker, turn: Turn, number: int | None) -> None:
        for step in turn:
            self._record(arm, step, worker.step(step), number)

    def _again(self, arm: Arm, worker: Worker, step: OptimiserStep) -> None:
        """The last step once more, which now is no first in any way."""
        self._record(arm, step, worker.step(step), None, again_of=self._num_steps[arm] - 1)

    def _record(
        self,
        arm: Arm,
        step: OptimiserStep,
        seconds: float,
        number: int | None,
        again_of: int | None = None,
    ) -> None:
        seen, shapes = self._seen.setdefault(arm, set()), shapes_of((step,))
        taken = self._num_steps.get(arm, 0)
        self.steps.append(
            StepTime(
                arm=arm.name,
                number=taken,
                round=number,
                again_of=again_of,
                seconds=seconds,
                valid_pixels=sum(layout.valid_pixels for layout in step),
                computed_pixels=sum(layout.canvas.pixels for layout in step),
                first_visit=bool(shapes - seen),
            )
        )
        seen |= shapes
        self._num_steps[arm] = taken + 1

    def note(self, text: str) -> None:
        """Says it now, and in the result."""
        self.notes.append(text)
        self._say(text)


def _sizes_that_fit(
    settings: BenchSettings, a_turn: float, seconds: float
) -> tuple[Sequence[Size], str]:
    """All sizes, or fewer on a slow machine, with what is said then.

    Args:
        settings: Of the benchmark.
        a_turn: Seconds that all arms would take if each were as fast as the plain net on one size.
        seconds: That the benchmark may take.
    """
    few = FEW_TURNS * settings.images_per_step
    visits = FULL_VISITS if settings.full else QUICK_VISITS
    need = SLOWER * a_turn * (visits + 1 + settings.rounds * (1 + AGAIN))
    if need <= seconds or len(settings.sizes) <= few:
        return settings.sizes, ""
    kept = max(few, int(len(settings.sizes) * seconds / need))
    drawn = np.random.default_rng(0).choice(len(settings.sizes), kept, replace=False).tolist()
    return (
        [settings.sizes[i] for i in sorted(drawn)],
        f"All {len(settings.sizes)} sizes would take about {need / 60:.0f} minutes here; {kept} of "
        f"them are measured.",
    )


@contextlib.contextmanager
def _started(arm: Arm, settings: BenchSettings, device: str) -> Iterator[Worker]:
    """An arm's process, which never outlives the benchmark."""
    worker: Worker
    if arm.policy == "tf_slim":
        assert settings.peers is not None
        worker = SlimWorker(arm, settings.model, settings.peers)
    else:
        worker = NetWorker(arm, settings.model, device)
    try:
        yield worker
    finally:
        worker.close()


def _machine(device: torch.device) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cpu": _cpu_name(),
        "cores": num_cores(),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
