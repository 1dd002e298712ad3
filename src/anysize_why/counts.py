"""What was counted of a script, a step. Pure: from the record alone.

A count is no finding: it says how often something happens, and a finding says what it costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from anysize_why.record import Record, counted, first_visits, growth_bytes

__all__ = ["Count", "counts", "counts_json"]

WITHIN = ("forward", "loss", "backward", "after backward", "optimiser", "compiling")
"""Stages of a step; all others lie outside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """Something counted, as a mean over steps; None for what does not apply or was not measured.

    Attributes:
        name: What.
        calls: How often a step.
        num_bytes: How much of memory a step.
        seconds: Of wall clock a step.
        measured: How.
    """

    name: str
    calls: float | None = None
    num_bytes: float | None = None
    seconds: float | None = None
    measured: str


def counts(record: Record) -> list[Count]:
    """All that was counted; a count whose tool was missing is left out."""
    return [*_of_steps(record), *_of_reads(record), *_of_replay(record)] if record.steps else []


def counts_json(record: Record) -> dict[str, dict[str, Any]]:
    """The same by name, as plain values."""
    return {
        count.name: {k: v for k, v in asdict(count).items() if k != "name" and v is not None}
        for count in counts(record)
    }


def _of_steps(record: Record) -> Iterator[Count]:
    steps, number = record.steps, len(record.steps)
    yield Count(
        name="recompiles",
        calls=sum(step["compiles"] for step in steps) / number,
        seconds=record.stage_s("compiling") / number,
        measured="PyTorch's compiler, in each step after the first",
    )
    if "cudnn" in record.facts:
        yield _tuning(record)
    growth = growth_bytes(record)
    if growth is not None:
        yield Count(
            name="growth of memory",
            num_bytes=growth,
            measured="memory of the process by step, its slope behind the first third",
        )
    if record.facts.get("reserved_bytes"):
        grown = record.facts["reserved_bytes"] - record.facts["reserved_bytes_at_first"]
        yield Count(
            name="growth of the device's memory",
            num_bytes=grown / number,
            measured="what PyTorch's allocator holds, at the end less at the first step",
        )
    yield Count(
        name="page faults",
        calls=sum(step["faults"] for step in steps) / number,
        measured="getrusage, in each step; those that read no disk",
    )
    waits = record.facts["seen"].get("wait for data", 0)
    yield Count(
        name="waits for the loader",
        calls=waits / max(1, record.facts["num_steps"]),
        seconds=record.stage_s("wait for data") / number,
        measured="`next` of the DataLoader, each call",
    )
    yield Count(
        name="time outside the step",
        seconds=sum(
            seconds
            for step in steps
            for stage, seconds in step["stages"].items()
            if stage not in WITHIN
        )
        / number,
        measured="all but forward, loss, backward, optimiser and compiler",
    )


def _tuning(record: Record) -> Count:
    flags = record.facts["cudnn"]
    said = ", ".join(f"{name} {'on' if on else 'off'}" for name, on in flags.items())
    tuned = [
        new and step.get("tunes", False)
        for step, new in zip(record.steps, first_visits(record), strict=True)
    ]
    on = "" if record.facts["device"] == "cuda" else "; no GPU is used, so nothing is tuned"
    return Count(
        name="kernel tuning",
        calls=sum(tuned) / len(record.steps),
        measured=f"steps of a new shape with cuDNN's benchmark on; {said}{on}",
    )


def _of_reads(record: Record) -> Iterator[Count]:
    steps = record.facts["num_sync_steps"]
    if not steps:
        return  # A compiled net: nothing is wrapped.
    syncs = record.facts["syncs"]
    waits = [w for w in record.facts.get("device_waits", []) if w["method"] == "synchronize"]
    yield Count(
        name="synchronisations",
        calls=(sum(s["calls"] for s in syncs) + sum(w["calls"] for w in waits)) / steps,
        seconds=sum(s["seconds"] for s in syncs) / steps,
        measured=f"reads of single values and waits for the device, in {steps} steps",
    )


COPIES = {
    "dtype": "conversions of dtype",
    "memory format": "conversions of memory format",
    "between devices": "copies between devices",
    "copies": "other copies",
}


def _of_replay(record: Record) -> Iterator[Count]:
    copies = counted(record, "copies")
    for kind, name in COPIES.items():
        if kind in copies:
            yield Count(
                name=name,
                calls=copies[kind]["calls"],
                num_bytes=copies[kind]["bytes"],
                measured="forward and backward of a copy of the net, taken again",
            )
    log = "oneDNN's own log of forward and backward of a copy of the net"
    again, new = counted(record, "primitives again"), counted(record, "primitives new")
    if again:
        yield Count(
            name="primitives made, shape seen before",
            calls=again["made"],
            seconds=again["made_ms"] / 1000,
            measured=log,
        )
        yield Count(
            name="reorders of oneDNN",
            calls=again["reorders"],
            seconds=again["reorders_ms"] / 1000,
            measured=f"{log}; conversions within its kernels",
        )
    if new:
        yield Count(
            name="primitives made, new shape",
            calls=new["made"],
            seconds=new["made_ms"] / 1000,
            measured=log,
        )
