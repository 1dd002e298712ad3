"""Causes in the way of the data: waits for a DataLoader and its workers. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from anysize_why.findings import Finding
from anysize_why.record import (
    Found,
    Record,
    ms,
)

__all__ = ["find_waiting", "find_workers"]


def _main_loader(record: Record) -> Mapping[str, Any] | None:
    loaders = record.facts.get("loaders") or []
    return loaders[0] if loaders else None


def find_waiting(record: Record) -> Found:
    """Waits for a DataLoader."""
    loader = _main_loader(record)
    if loader is None:
        return [], []
    steady = [s for s in record.steps if not s["stages"].get("workers")]
    num_workers = loader["num_workers"]
    rows = steady if num_workers else record.steps
    cost = sum(step["stages"].get("wait for data", 0.0) for step in rows)
    if not record.matters(cost):
        return [], []
    fetch = record.controls.get("fetch") or {}
    alone, busy = (
        (statistics.median(fetch["seconds"]), statistics.median(fetch["cpu_s"]))
        if fetch.get("seconds")
        else (None, None)
    )
    per_step = (record.wall_s - record.stage_s("wait for data")) / len(record.steps)
    needed = None if alone is None else max(1, math.ceil(1.1 * alone / max(per_step, 1e-6)))
    cores = record.facts["cores"]
    evidence = (
        f"{cost:.2f} s of waits for the DataLoader in {len(rows)} steps, {record.share(cost)}"
    )
    if alone is not None and busy is not None:
        evidence += (
            f"; a batch takes {ms(alone)} to fetch alone, {ms(busy)} of it computing, and the "
            f"rest of a step {ms(per_step)}"
        )
    enough = needed or num_workers + 1
    if busy is not None and alone is not None and busy > 0.5 * alone:
        enough = min(enough, cores)
        gain = (
            f"at most {cost:.2f} s; the fetching computes, so it shares the {cores} cores with the "
            "net: making it cheaper (smaller files, decoding smaller, a cache) gains it all"
        )
    else:
        gain = f"up to {cost:.2f} s of {record.wall_s:.2f} s: the waits"
    if num_workers == 0:
        cause = "slow decoding in the main thread"
        change = f"DataLoader(num_workers={max(1, enough)}), so that the net does not wait for it"
    else:
        cause = "too few workers"
        change = f"DataLoader(num_workers={max(enough, num_workers + 1)}) instead of {num_workers}"
    return [Finding(cause=cause, cost_s=cost, evidence=evidence, change=change, gain=gain)], []


def find_workers(record: Record) -> Found:
    """Workers that are started again and again."""
    loader = _main_loader(record)
    if loader is None or not loader["num_workers"]:
        return [], []
    starts = [step for step in record.steps if step["stages"].get("workers")]
    spent = sum(
        step["stages"]["workers"] + step["stages"].get("wait for data", 0.0) for step in starts
    )
    fetch = record.controls.get("fetch") or {}
    if not record.matters(spent):
        return [], []
    num_workers, cores = loader["num_workers"], record.facts["cores"]
    per_step = (record.wall_s - spent) / len(record.steps)
    needed = num_workers
    if fetch.get("seconds"):
        alone = statistics.median(fetch["seconds"])
        needed = max(1, math.ceil(alone / max(per_step, 1e-6)))
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
