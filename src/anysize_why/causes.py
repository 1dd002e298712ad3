"""From the record of a script to findings. Pure: no clock, no PyTorch, no process.

No finding is a guess. What a stage takes was measured in the script; what a change saves was
measured by a control, and must be clear of the control's own spread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anysize_why.clocks import find_dropped_seconds, find_waitless_clock
from anysize_why.computing import (
    find_batch,
    find_channels_last,
    find_compiling,
    find_float64,
    find_retained,
    find_sizes,
    find_threads,
)
from anysize_why.findings import Finding, Verdict, WhyError, verdict
from anysize_why.own_lines import (
    find_checkpoint,
    find_evaluation,
    find_lines,
    find_memory,
    find_printing,
)
from anysize_why.record import (
    STAGES,
    Record,
)
from anysize_why.unexplained import find_slowing, find_switches, find_unexplained
from anysize_why.waiting import find_hang, find_repeats, find_waiting, find_workers

__all__ = ["judge"]


def judge(record: Record) -> Verdict:
    """The verdict.

    Raises:
        WhyError: Too few steps were seen to say anything.
    """
    if not record.steps:
        raise WhyError(
            f"{record.script}: fewer than two optimiser steps were seen, so there is nothing to "
            f"measure. Seen: {_seen(record.facts)}."
        )
    findings: list[Finding] = []
    harmless: list[str] = []
    for look in (
        find_slowing,
        find_switches,
        find_sizes,
        find_compiling,
        find_hang,
        find_waiting,
        find_repeats,
        find_workers,
        find_lines,
        find_printing,
        find_evaluation,
        find_checkpoint,
        find_memory,
        find_channels_last,
        find_retained,
        find_float64,
        find_batch,
        find_threads,
        find_dropped_seconds,
        find_waitless_clock,
    ):
        found, fine = look(record)
        findings += found
        harmless += fine
    findings += find_unexplained(record, findings)
    harmless += [
        f"not tried, {name}: {control['failed']}"
        for name, control in record.controls.items()
        if isinstance(control, dict) and "failed" in control
    ]
    return verdict(
        record.wall_s,
        [(stage, record.stage_s(stage)) for stage in STAGES if record.stage_s(stage)],
        findings,
        harmless=harmless,
        limit_share=_limit_share(record),
    )


def _seen(facts: Mapping[str, Any]) -> str:
    seen = facts.get("seen") or {}
    names = {
        "optimiser": "optimiser step",
        "backward": "backward call",
        "wait for data": "wait for a DataLoader",
        "checkpoint": "torch.save",
    }
    said = [f"{seen[key]} x {name}" for key, name in names.items() if seen.get(key)]
    return ", ".join(said) or "no optimiser step, no backward call, no DataLoader"


def _limit_share(record: Record) -> float | None:
    limit = record.controls.get("limit")
    if not limit or not limit.get("flops") or not limit.get("most_flops_a_second"):
        return None
    a_second = limit["flops"] * len(record.steps) / record.wall_s
    return min(1.0, a_second / limit["most_flops_a_second"])
