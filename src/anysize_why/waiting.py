"""Causes in the way of the data: waits for a DataLoader and its workers. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from anysize_why.findings import Finding
from anysize_why.record import DECODERS, Found, Record, compare, control_of, ms

__all__ = ["find_hang", "find_repeats", "find_waiting", "find_workers", "num_workers_needed"]

MIN_GAIN = 0.05
"""Share of a step that other workers must have saved where they were tried."""


def find_hang(record: Record) -> Found:
    """A wait that did not end."""
    hung = record.facts.get("hung")
    if not hung:
        return [], []
    workers = [
        f"worker {w['pid']} in {record.line(*w['place'])}" for w in hung["workers"] if w["place"]
    ]
    if not hung["workers"]:
        workers = [record.line(*place) for place in record.worst_lines("wait for data")[:1]]
    where = "; ".join(workers) or "its stack could not be read (workers that are not forked)"
    return [
        Finding(
            cause="a loader worker hangs" if hung["workers"] else "the data set hangs",
            cost_s=min(record.stage_s("wait for data"), hung["seconds"]),
            evidence=f"no batch came for {hung['seconds']:.0f} s, while neither the script nor a "
            f"worker computed: {where}",
            change="find out what that line waits for (a lock, a socket, a disk, a queue), and "
            "give the DataLoader a `timeout`, so that it fails instead",
            gain="the script goes on; the workers were ended",
        )
    ], []


@dataclass(frozen=True, slots=True)
class Fetching:
    """What fetching a batch takes in one thread, in seconds.

    Attributes:
        alone_s: Wall clock.
        busy_s: Of that, computing.
        rest_s: Of a step, all but its wait.
    """

    alone_s: float
    busy_s: float
    rest_s: float

    @property
    def computes(self) -> bool:
        """Whether fetching computes rather than sleeps."""
        return self.busy_s > 0.5 * self.alone_s


def _main_loader(record: Record) -> Mapping[str, Any] | None:
    loaders = record.facts.get("loaders") or []
    return max(loaders, key=lambda loader: loader.get("batches", 0), default=None)


def _fetching(record: Record) -> Fetching | None:
    fetch = record.controls.get("fetch") or {}
    if not fetch.get("seconds"):
        return None
    rest = record.wall_s - record.stage_s("wait for data") - record.stage_s("workers")
    return Fetching(
        statistics.median(fetch["seconds"]),
        statistics.median(fetch["cpu_s"]),
        rest / len(record.steps),
    )


def num_workers_needed(alone_s: float, rest_s: float) -> int:
    """Workers that fetch batches as fast as the rest of a step takes, with a tenth to spare."""
    return max(1, math.ceil(1.1 * alone_s / max(rest_s, 1e-6)))


def find_waiting(record: Record) -> Found:
    """Waits for a DataLoader."""
    loader = _main_loader(record)
    if loader is None or record.facts.get("hung"):
        return [], []
    steady = [s for s in record.steps if not s["stages"].get("workers")]
    num_workers, cores = loader["num_workers"], record.facts["cores"]
    rows = steady if num_workers else record.steps
    cost = sum(step["stages"].get("wait for data", 0.0) for step in rows)
    if not record.matters(cost):
        return [], []
    evidence = (
        f"{cost:.2f} s of waits for the DataLoader in {len(rows)} steps, {record.share(cost)}"
    )
    fetching = _fetching(record)
    enough = num_workers + 1
    if fetching is not None:
        evidence += (
            f"; a batch takes {ms(fetching.alone_s)} to fetch alone, {ms(fetching.busy_s)} of it "
            f"computing and the rest sleeping, and the rest of a step {ms(fetching.rest_s)}"
        )
        enough = num_workers_needed(fetching.alone_s, fetching.rest_s)
        enough = min(enough, cores) if fetching.computes else enough
    lines = _lines_of_data(record)
    if lines:
        evidence += f"; most in {lines}"
    cause = _cause(record, num_workers)
    enough = max(enough, num_workers + 1) if num_workers else max(1, enough)
    more = f"DataLoader(num_workers={enough})"
    more += f" instead of {num_workers}" if num_workers else ", so that the net does not wait"
    cheaper = "make that line cheaper (whole arrays instead of loops, smaller files, a cache)"
    said = f"{cost:.2f} s of {record.wall_s:.2f} s"
    computes = fetching is not None and fetching.computes
    tried = control_of(record, "workers")
    if tried is not None:
        return _tried_workers(record, tried, cause, cost, evidence, cheaper), []
    if computes:
        gain = (
            f"at most {cost:.2f} s; the fetching computes, so it shares the {cores} cores with the "
            "net: making it cheaper (smaller files, decoding smaller, a cache) gains it all"
        )
    else:
        gain = f"up to {said}: the waits; not tried"
    return [Finding(cause=cause, cost_s=cost, evidence=evidence, change=more, gain=gain)], []


def _tried_workers(
    record: Record,
    tried: Mapping[str, Any],
    cause: str,
    cost: float,
    evidence: str,
    cheaper: str,
) -> list[Finding]:
    """More workers are advised only where they were tried and helped."""
    saved = compare(tried, "as it is", "more")
    helps = saved.certain and saved.share >= MIN_GAIN
    evidence += (
        f"; tried: a step of loader and net takes {ms(saved.before_s)} as it is, "
        f"{ms(saved.after_s)} with num_workers={tried['workers']} ({saved.rounds} rounds in turn)"
    )
    gained = min(saved.share * record.wall_s, cost)
    if helps:
        change = f"DataLoader(num_workers={tried['workers']}, persistent_workers=True)"
        if gained < 0.8 * cost:
            change += f"; for the rest of the waits {cheaper}"
        gain = f"{gained:.2f} s of {record.wall_s:.2f} s, {record.share(gained)}, as it was tried"
    else:
        change = f"{cheaper}; more workers were tried and do not help here"
        gain = f"at most {cost:.2f} s of {record.wall_s:.2f} s: all waits"
    finding = Finding(
        cause=cause, cost_s=gained if helps else cost, evidence=evidence, change=change, gain=gain
    )
    return [finding]


def _cause(record: Record, num_workers: int) -> str:
    """What the wait is called: decoding only where a decoder was seen at work."""
    if num_workers:
        return "too few workers"
    lines = record.seconds_of_lines("wait for data")
    decoding = sum(s for (_, _, via), s in lines.items() if via.split(".")[0] in DECODERS)
    if decoding > 0.5 * sum(lines.values()) > 0:
        return "slow decoding in the main thread"
    return "waiting for data that the main thread fetches"


def _lines_of_data(record: Record) -> str:
    """The lines of the data set that were seen most while the script waited."""
    looks = record.facts.get("worker_lines") or []
    if looks:
        total = sum(look["looks"] for look in looks)
        return ", ".join(
            f"{record.line(look['file'], look['line'], look['via'])} "
            f"({look['looks'] / total:.0%} of {total} looks at the workers)"
            for look in looks[:3]
        )
    seconds = record.seconds_of_lines("wait for data")
    worst = sorted(seconds, key=lambda key: -seconds[key])[:3]
    return ", ".join(f"{record.line(*key)} {seconds[key]:.2f} s" for key in worst)


def find_repeats(record: Record) -> Found:
    """An iterable data set of which every worker gives the same samples."""
    loader = _main_loader(record)
    if loader is None or not record.controls.get("repeats"):
        return [], []
    if not loader["num_workers"]:
        return [], [
            "the IterableDataset does not share its samples out: with more than one worker each "
            "would give all of them; see torch.utils.data.get_worker_info"
        ]
    return [
        Finding(
            cause="every worker gives the same samples",
            cost_s=0.0,
            evidence=f"as worker 0 and as worker 1 of 2 the IterableDataset starts with the same "
            f"sample; {loader['num_workers']} workers are set",
            change="share the samples out by `torch.utils.data.get_worker_info()`",
            gain=f"an epoch that is {loader['num_workers']} times as short, and no repeats",
        )
    ], []


def find_workers(record: Record) -> Found:
    """Workers that are started again and again."""
    loader = _main_loader(record)
    if loader is None or not loader["num_workers"]:
        return [], []
    starts = [step for step in record.steps if step["stages"].get("workers")]
    spent = sum(
        step["stages"]["workers"] + step["stages"].get("wait for data", 0.0) for step in starts
    )
    if not record.matters(spent) or record.facts.get("hung"):
        return [], []
    num_workers, cores = loader["num_workers"], record.facts["cores"]
    per_step = (record.wall_s - spent) / len(record.steps)
    fetching = _fetching(record)
    needed = num_workers
    if fetching is not None:
        needed = max(1, math.ceil(fetching.alone_s / max(per_step, 1e-6)))
    evidence = (
        f"{num_workers} workers on {cores} cores were started {len(starts)} times: {spent:.2f} s "
        f"in starting, stopping and waiting for their first batch"
    )
    if needed < num_workers and num_workers > cores:
        cost = spent * (1 - needed / num_workers)
        return [
            Finding(
                cause="too many workers",
                cost_s=cost,
                evidence=f"{evidence}; {needed} keep up with the net",
                change=f"DataLoader(num_workers={needed}, persistent_workers=True)",
                gain=f"{cost:.2f} s of {record.wall_s:.2f} s by the workers alone, "
                f"{spent:.2f} s if they also stay alive between epochs",
            )
        ], []
    return [
        Finding(
            cause="workers are started anew each epoch",
            cost_s=spent,
            evidence=evidence,
            change="DataLoader(persistent_workers=True)",
            gain=f"{spent:.2f} s of {record.wall_s:.2f} s but for the first epoch",
        )
    ], []
