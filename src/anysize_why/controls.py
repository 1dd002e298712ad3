"""Separates causes by trying: a copy of a script's net is stepped with one thing changed at a time.

Runs in the script's process when its steps are over. Works on a copy, puts every random state back,
and takes turns between what is compared, so that a busy machine hits all alike. A control that
fails is left out, with what was said; a finding needs its control.
"""

from __future__ import annotations

import copy
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from anysize_why.cores import num_cores
from anysize_why.counting import count_copies, count_primitives, time_operators
from anysize_why.loading import MOST_WORKERS, fetch, repeats_samples, try_workers
from anysize_why.replay import Replay, mapped, synchronise, works_ahead
from anysize_why.subject import Subject
from anysize_why.switches import without
from anysize_why.waiting import num_workers_needed

__all__ = ["run_controls"]


Run = Callable[[], tuple[float, int]]
"""Takes one step; gives its seconds, and how many elements of input it had."""


MIN_ROUNDS = 4


MAX_ROUNDS = 40


SMALL_BATCH = 8


LARGER = 4
"""How many times larger a batch is tried."""


WORTH_TRYING = 0.05
"""Share of a step's time that waits take from which other numbers of workers are tried."""


MAX_COUNTED_SHARE = 0.1
"""Share of the time for controls that one step may take for some more to be counted."""


def run_controls(subject: Subject, shapes: list[list[int]], budget_s: float) -> dict[str, Any]:
    """All controls that apply.

    Args:
        subject: The net and what last went into it.
        shapes: Of the first input at every step.
        budget_s: Seconds in all; a control that has begun takes its fewest rounds.

    Returns:
        For each control the times of its sides, or `failed` with what was said.
    """
    found: dict[str, Any] = {}
    deadline = time.perf_counter() + budget_s
    with _random_states_kept(), torch.enable_grad():
        loader = subject.loader
        if loader is not None:
            _attempt(found, "fetch", lambda: fetch(loader, 0.15 * budget_s))
            _attempt(found, "repeats", lambda: repeats_samples(loader))
        if subject.model is None or not (subject.args or subject.kwargs):
            return found
        try:
            replay = Replay(subject)
        except Exception as error:  # noqa: BLE001 - copying runs the script's own code
            return {**found, "failed": f"the net cannot be copied: {error}"[:300]}
        found["optimiser"] = replay.steps_optimizer
        unseen = Unseen(replay.shape, shapes)
        planned = list(_planned(replay, unseen))
        for i, (name, control) in enumerate(planned):
            left = (deadline - time.perf_counter()) / (len(planned) - i)
            _attempt(found, name, lambda run=control, left=left: run(max(left, 0.5)))
        rest_s = subject.step_s - subject.wait_s
        fetched = (found.get("fetch") or {}).get("seconds")
        if loader is not None and fetched and subject.wait_s > WORTH_TRYING * subject.step_s:
            workers = _workers_to_try(found["fetch"], rest_s, int(loader.num_workers))
            _attempt(
                found,
                "workers",
                lambda: try_workers(loader, workers, replay.as_it_is, 0.25 * budget_s),
            )
        for name, count in _counted(replay, unseen, budget_s):
            _attempt(found, name, count)
    return found


def _workers_to_try(fetched: dict[str, Any], rest_s: float, now: int) -> int:
    """As many as keep up with the rest of a step; no more than cores where fetching computes."""
    alone, busy = (statistics.median(fetched[key]) for key in ("seconds", "cpu_s"))
    most = num_cores() if busy > 0.5 * alone else MOST_WORKERS
    return max(min(num_workers_needed(alone, rest_s), most), now + 1)


class Unseen:
    """Shapes close to the script's own that have not been visited, without end.

    Attributes:
        shapes: Of the script's steps, of as many dimensions as the last.
        varying: Dimensions in which they differ; none where there is nothing to draw.
        multiple: Of these dimensions, what a net may ask for.
    """

    def __init__(self, last: list[int], shapes: list[list[int]]) -> None:
        self.shapes = [s for s in shapes if len(s) == len(last)]
        self.varying = [d for d in range(1, len(last)) if len({s[d] for s in self.shapes}) > 1]
        self.multiple = {d: _common_multiple([s[d] for s in self.shapes]) for d in self.varying}
        self._seen = {tuple(s) for s in self.shapes}
        self._chosen = random.Random(0)
        self._reach = 2

    def draw(self) -> list[int]:
        """The next one."""
        while True:
            shape = list(self._chosen.choice(self.shapes))
            for d, step in self.multiple.items():
                offset = self._chosen.randint(-self._reach, self._reach)
                shape[d] = max(step, shape[d] + step * offset)
            if tuple(shape) not in self._seen:
                self._seen.add(tuple(shape))
                return shape
            self._reach += 1


def _planned(replay: Replay, unseen: Unseen) -> Iterator[tuple[str, Callable[[float], Any]]]:
    """The controls that apply, by name; each is given its seconds."""
    cores = num_cores()
    if unseen.varying and not replay.is_compiled:
        yield "sizes", lambda budget: _sizes(replay, unseen, budget)
    if any(p.dtype == torch.float64 for p in replay.model.parameters()):
        yield "float64", lambda budget: _float64(replay, budget)
    if torch.get_num_threads() > cores:
        yield "threads", lambda budget: _threads(replay, cores, budget)
    if _is_channels_last(replay.model):
        yield "channels last", lambda budget: _channels_last(replay, budget)
    if replay.shape and replay.shape[0] <= SMALL_BATCH and len(replay.shape) > 1:
        yield "batch", lambda budget: _batch(replay, budget)
    if works_ahead(replay.first):
        yield "queued", lambda budget: _queued(replay, min(budget, 2.0))
    for switch in replay.switches:
        if sides := without(switch, replay, replay.original):
            named: dict[str, Run] = {"as it is": sides[0], "off": sides[1]}
            yield switch, lambda budget, named=named: _take_turns(named, budget)
    yield "again", lambda budget: _take_turns({"as it is": replay.as_it_is}, min(budget, 2.0))
    if not works_ahead(replay.first):
        yield "operators", lambda _: time_operators(replay.as_it_is)
    yield "limit", lambda budget: _limit(replay, min(budget, 2.0))


def _attempt(found: dict[str, Any], name: str, control: Callable[[], Any]) -> None:
    try:
        result = control()
    except Exception as error:  # noqa: BLE001 - a net may refuse any change; then there is no finding
        result = {"failed": f"{type(error).__name__}: {error}"[:300]}
    if result is not None:
        found[name] = result


def _take_turns(sides: dict[str, Run], budget_s: float) -> dict[str, Any]:
    """Runs all sides in turn, first once unmeasured, until the time is up."""
    for run in sides.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in sides}
    sizes: dict[str, list[int]] = {name: [] for name in sides}
    until = time.perf_counter() + budget_s
    for done in range(MAX_ROUNDS):
        if done >= MIN_ROUNDS and time.perf_counter() > until:
            break
        for name, run in sides.items():
            seconds, size = run()
            times[name].append(seconds)
            sizes[name].append(size)
    return {"seconds": times, "sizes": sizes}


def _sizes(replay: Replay, unseen: Unseen, budget_s: float) -> dict[str, Any]:
    """Shapes never seen, each once more at once, and one shape of as many elements."""
    shapes = unseen.shapes
    one = list(replay.shape)
    for d, multiple in unseen.multiple.items():
        middle = (sum(s[d] ** 2 for s in shapes) / len(shapes)) ** 0.5
        grid = multiple if multiple >= 16 else 16 if middle >= 32 else 1
        one[d] = max(grid, round(middle / grid) * grid)
    one_inputs = replay.resized(one)
    last: list[Any] = []

    def new() -> tuple[float, int]:
        last[:] = replay.resized(unseen.draw())
        return replay.step(replay.model, *last)

    return {
        "one": one,
        **_take_turns(
            {
                "new": new,
                "again": lambda: replay.step(replay.model, *last),
                "one": lambda: replay.step(replay.model, *one_inputs),
            },
            budget_s,
        ),
    }


def _common_multiple(lengths: list[int]) -> int:
    """The largest power of two that divides all, since a net may ask for it."""
    step = 1
    while step < 64 and all(n % (2 * step) == 0 for n in lengths):
        step *= 2
    return step


def _float64(replay: Replay, budget_s: float) -> dict[str, Any]:
    single = copy.deepcopy(replay.model).float()

    def narrow(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.dtype == torch.float64 else tensor

    args, kwargs = mapped(replay.args, narrow), mapped(replay.kwargs, narrow)
    return _take_turns(
        {"as it is": replay.as_it_is, "float32": lambda: replay.step(single, args, kwargs)},
        budget_s,
    )


def _threads(replay: Replay, cores: int, budget_s: float) -> dict[str, Any]:
    threads = torch.get_num_threads()

    def with_threads(count: int) -> tuple[float, int]:
        torch.set_num_threads(count)
        replay.as_it_is()  # The pool is made anew: not what is measured.
        return replay.as_it_is()

    try:
        times = _take_turns(
            {"as it is": lambda: with_threads(threads), "cores": lambda: with_threads(cores)},
            budget_s,
        )
    finally:
        torch.set_num_threads(threads)
    return {"threads": threads, "cores": cores, **times}


def _is_channels_last(model: torch.nn.Module) -> bool:
    return any(
        p.dim() == 4
        and p.is_contiguous(memory_format=torch.channels_last)
        and not p.is_contiguous()
        for p in model.parameters()
    )


def _channels_last(replay: Replay, budget_s: float) -> dict[str, Any] | None:
    """Finds the modules that take channels-last and give something else, and does without."""
    losers: list[str] = []
    same: dict[str, bool] = {}
    handles = []
    for name, module in replay.model.named_modules():

        def look(module: Any, args: Any, output: Any, name: str = name) -> None:
            if not (args and _is_image(args[0]) and _is_image(output)):
                return
            if _is_wide(args[0]) and not _is_wide(output):
                losers.append(name)
                same[name] = args[0].shape == output.shape and torch.equal(args[0], output)

        handles.append(module.register_forward_hook(look))
    replay.as_it_is()
    for handle in handles:
        handle.remove()
    inner = [n for n in losers if not any(o != n and o.startswith(f"{n}.") for o in losers)]
    if not inner:
        return {"lost by": []}
    mended = copy.deepcopy(replay.model)
    for name in set(inner):
        if same[name]:
            mended.set_submodule(name, torch.nn.Identity())
        else:
            mended.get_submodule(name).register_forward_hook(
                lambda module, args, output: output.contiguous(memory_format=torch.channels_last)
            )
    return {
        "lost by": sorted(set(inner)),
        **_take_turns(
            {
                "as it is": replay.as_it_is,
                "kept": lambda: replay.step(mended, replay.args, replay.kwargs),
            },
            budget_s,
        ),
    }


def _is_image(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 4 and value.shape[1] > 1


def _is_wide(image: torch.Tensor) -> bool:
    """Whether an image is channels-last; one of a single pixel is both."""
    single = image.shape[2] == image.shape[3] == 1
    return single or image.is_contiguous(memory_format=torch.channels_last)


def _batch(replay: Replay, budget_s: float) -> dict[str, Any]:
    shape = [replay.shape[0] * LARGER, *replay.shape[1:]]
    larger = replay.resized(shape)
    return {
        "batch": replay.shape[0],
        "larger": shape[0],
        **_take_turns(
            {"as it is": replay.as_it_is, "larger": lambda: replay.step(replay.model, *larger)},
            budget_s,
        ),
    }


def _queued(replay: Replay, budget_s: float) -> dict[str, Any]:
    """What a clock that does not wait for the device shows of a step, and what it takes."""
    replay.queued()
    times: list[tuple[float, float]] = []
    until = time.perf_counter() + budget_s
    while len(times) < MIN_ROUNDS or (time.perf_counter() < until and len(times) < MAX_ROUNDS):
        times.append(replay.queued())
    returned, done = zip(*times, strict=True)
    return {"returned": list(returned), "done": list(done)}


def _counted(
    replay: Replay, unseen: Unseen, budget_s: float
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Counts of a step taken again, and of one of a new shape; none where steps are very long."""
    seconds, _ = replay.as_it_is()
    if seconds > MAX_COUNTED_SHARE * budget_s:
        return
    yield "copies", lambda: count_copies(replay.as_it_is)
    yield "primitives again", lambda: count_primitives(replay.as_it_is)
    if unseen.varying:
        inputs = replay.resized(unseen.draw())
        yield "primitives new", lambda: count_primitives(lambda: replay.step(replay.model, *inputs))


def _limit(replay: Replay, budget_s: float) -> dict[str, Any]:
    """Floating-point operations of a step, and the most a second that this device did."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        replay.as_it_is()
    dtype = replay.autocast[1] if replay.autocast else next(replay.model.parameters()).dtype
    generator = torch.Generator(device=replay.first.device).manual_seed(0)
    square = torch.rand(1024, 1024, generator=generator, device=replay.first.device).to(dtype)
    best = 0.0
    until = time.perf_counter() + budget_s
    with torch.no_grad():
        while True:
            synchronise(square)
            began = time.perf_counter()
            _ = square @ square
            synchronise(square)
            best = max(best, 2 * 1024**3 / (time.perf_counter() - began))
            if time.perf_counter() > until:
                break
    return {"flops": counter.get_total_flops(), "most_flops_a_second": best}


@contextmanager
def _random_states_kept() -> Iterator[None]:
    states = torch.get_rng_state(), random.getstate()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    numpy = sys.modules.get("numpy")
    of_numpy = numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        if numpy is not None:
            numpy.random.set_state(of_numpy)
