"""A script's own clock, held against the measured stages. Pure."""

from __future__ import annotations

import statistics

from anysize_why.findings import Finding
from anysize_why.own_clock import intervals, shown_by, stages_within, suspects
from anysize_why.record import (
    Found,
    Record,
    ms,
)

__all__ = ["find_dropped_seconds", "find_waitless_clock"]


MAX_SHOWN = 0.8
"""Share of a step's forward and backward that a clock which waits for the device shows at least."""


def find_dropped_seconds(record: Record) -> Found:
    """Timers of the script and its modules that drop whole seconds."""
    findings: list[Finding] = []
    harmless: list[str] = []
    sources = {record.script: record.source, **record.facts.get("sources", {})}
    for file, source in sources.items():
        for timed in suspects(source):
            line = record.where(file, timed.end)
            pairs = shown_by(timed, record.steps, record.facts["call_lines"], file)
            is_known = bool(timed.begin and pairs)
            if not is_known:
                wall = [step["wall_s"] for step in record.steps]
                pairs = [(timed.shows(seconds), seconds) for seconds in wall]
            shown, true = (statistics.mean(values) for values in zip(*pairs, strict=True))
            drops = "whole seconds" if timed.part == "microseconds" else "what is below a second"
            if abs(shown - true) < 0.1 * true:
                harmless.append(
                    f"{line} reads `.{timed.part}` alone, which drops {drops}; no step was "
                    f"{'long' if timed.part == 'microseconds' else 'short'} enough to show it "
                    f"({true:.3f} s)"
                )
                continue
            said = f"from line {timed.begin} on it shows" if is_known else "of a step it would show"
            findings.append(
                Finding(
                    cause="the script's own clock is wrong",
                    cost_s=0.0,
                    evidence=f"{line} takes `.{timed.part}` of a timedelta for all of it, which "
                    f"drops {drops}: {said} {shown:.2f} s a step, the wall clock {true:.2f} s "
                    f"(mean of {len(pairs)} steps)",
                    change="`.total_seconds()`, or `time.perf_counter()`, or "
                    "`anysize.timing.Timer`",
                    gain=f"the truth, of which {abs(true - shown):.2f} s a step are hidden: a "
                    "timedelta keeps days, seconds and microseconds apart",
                )
            )
    return findings, harmless


def find_waitless_clock(record: Record) -> Found:
    """Timers that are read before the device is done: what they show is how long queueing took.

    What they show was measured: it is the time of the stages between their lines, which nothing
    synchronises. So was what they miss: the same forward and backward until the device is done.
    """
    control, waits = record.controls.get("queued") or {}, record.facts.get("device_waits", [])
    steps = [step for step in record.steps if not step["counts_syncs"]]
    if "done" not in control or not record.facts["num_sync_steps"] or not steps:
        return [], []
    returned, done = (statistics.median(control[side]) for side in ("returned", "done"))
    for timed in intervals(record.source):
        inside = stages_within(timed, record.source, record.facts["call_lines"], record.script)
        waited = any(
            file == record.script and timed.begin < line <= timed.end
            for wait in waits
            for file, line in wait["places"]
        )
        shown = statistics.median(
            [sum(step["stages"].get(stage, 0.0) for stage in inside) for step in steps]
        )
        if waited or not {"forward", "backward"} <= inside or shown > MAX_SHOWN * done:
            continue
        wall = statistics.median([step["wall_s"] for step in steps])
        return [
            Finding(
                cause="the script's own clock is wrong: it does not wait for the device",
                cost_s=0.0,
                evidence=f"{record.where(record.script, timed.end)} shows {ms(shown)} from "
                f"line {timed.begin} on, a step of the wall clock takes {ms(wall)}, and no line "
                f"between waits for the device: forward and backward return after "
                f"{ms(returned)}, and are done after {ms(done)} (median of "
                f"{len(control['done'])} rounds)",
                change="torch.cuda.synchronize() before each read of the clock, or "
                "`anysize.timing.Timer(synchronise=torch.cuda.synchronize)`",
                gain=f"the truth, of which {ms(done - shown)} a step are hidden: calls "
                "return once the work is queued",
            )
        ], []
    return [], []
