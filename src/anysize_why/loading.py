"""Controls of a DataLoader: how long its data set takes alone, and whether more workers help.

Runs in the script's process when its steps are over, as `controls` does.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils import worker as torch_worker

__all__ = ["MOST_WORKERS", "fetch", "repeats_samples", "try_workers"]

MOST_FETCHED = 20
MOST_WORKERS = 16
TURNS = 3


def fetch(loader: Any, budget_s: float) -> dict[str, Any] | None:
    """How long the data set takes for a batch in this thread, with nothing beside it.

    Args:
        loader: Of the script.
        budget_s: Seconds that it may take; three batches are fetched anyway.

    Returns:
        Seconds and processor seconds of each batch, and its size; None for another kind of loader.
    """
    if not hasattr(loader, "dataset"):
        return None
    size, batches = _batch_size(loader), _batches(loader)
    walls: list[float] = []
    cpus: list[float] = []
    until = time.perf_counter() + budget_s
    while len(walls) < 3 or (time.perf_counter() < until and len(walls) < MOST_FETCHED):
        began, cpu = time.perf_counter(), time.thread_time()
        samples = next(batches, None)
        if samples is None:
            break
        if loader.batch_sampler is not None or loader.batch_size:
            loader.collate_fn(samples)
        walls.append(time.perf_counter() - began)
        cpus.append(time.thread_time() - cpu)
    return {"seconds": walls, "cpu_s": cpus, "batch": size} if walls else None


def _batch_size(loader: Any) -> int:
    """Samples of a batch, also where a batch sampler decides."""
    if loader.batch_size:
        return int(loader.batch_size)
    sampler = loader.batch_sampler
    if sampler is None:
        return 1
    return int(getattr(sampler, "batch_size", 0) or len(next(iter(sampler))))


def _batches(loader: Any) -> Iterator[Any]:
    """The samples of batch after batch, as a worker would fetch them."""
    dataset, size = loader.dataset, _batch_size(loader)
    if isinstance(dataset, IterableDataset):
        samples = iter(dataset)
        while found := list(islice(samples, size)):
            yield found
        return
    chosen = random.Random(0)
    many = getattr(dataset, "__getitems__", None)
    while True:
        indices = [chosen.randrange(len(dataset)) for _ in range(size)]
        yield many(indices) if callable(many) else [dataset[index] for index in indices]


def try_workers(
    loader: Any, workers: int, step: Callable[[], object], budget_s: float
) -> dict[str, Any]:
    """The loop with another number of workers, by turns with that which is set.

    Args:
        loader: Of the script.
        workers: To try.
        step: Takes a step of the net's copy, which computes while workers fetch.
        budget_s: Seconds of all turns.

    Returns:
        Seconds a step of each turn and side, in the form of the other controls.
    """
    times: dict[str, list[float]] = {"as it is": [], "more": []}
    a_turn = budget_s / TURNS / 2
    for _ in range(TURNS):
        times["as it is"].append(_step_s(loader, int(loader.num_workers), step, a_turn))
        times["more"].append(_step_s(loader, workers, step, a_turn))
    return {"workers": workers, "seconds": times, "sizes": {s: [1] * TURNS for s in times}}


def _step_s(loader: Any, workers: int, step: Callable[[], object], seconds: float) -> float:
    """Seconds a step of a loop that is under way."""
    iterator = iter(_with_workers(loader, workers))
    done, began = 0, time.perf_counter()
    until = began + seconds
    try:
        for _ in range(1 + workers):  # The first batches wait for the workers to start.
            next(iterator)
            step()
        began = time.perf_counter()
        while done < 3 + workers or time.perf_counter() < until:
            next(iterator)
            step()
            done += 1
    except StopIteration:
        if not done:
            raise ValueError("an epoch has too few batches to try workers") from None
    finally:
        del iterator  # Ends its workers.
    return (time.perf_counter() - began) / done


def _with_workers(loader: Any, workers: int) -> DataLoader[Any]:
    batching: dict[str, Any] = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if loader.batch_sampler is not None and not isinstance(loader.dataset, IterableDataset):
        batching = {"batch_sampler": loader.batch_sampler}
    return DataLoader(
        loader.dataset,
        num_workers=workers,
        collate_fn=loader.collate_fn,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context if workers else None,
        **batching,
    )


def repeats_samples(loader: Any) -> bool | None:
    """Whether each worker of an iterable data set gives the same samples; None for another kind.

    The first samples are taken as worker 0 of 2 and as worker 1 of 2, with random states that
    differ as theirs would.
    """
    dataset = getattr(loader, "dataset", None)
    if not isinstance(dataset, IterableDataset):
        return None
    firsts = []
    previous = torch_worker._worker_info
    try:
        for number in range(2):
            seed = 1000 + number
            random.seed(seed)  # noqa: TID251 - put back by who runs the controls
            torch.manual_seed(seed)  # noqa: TID251
            torch_worker._worker_info = torch_worker.WorkerInfo(
                id=number, num_workers=2, seed=seed, dataset=dataset
            )
            if loader.worker_init_fn is not None:
                loader.worker_init_fn(number)
            firsts.append(next(iter(dataset)))
    finally:
        torch_worker._worker_info = previous
    return _same(*firsts)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return bool(one is other or (type(one) is type(other) and str(one) == str(other)))
