"""What is left when no other cause was found: debugging, steps that become slower, and the bar of
health. Pure.

Healthy is a finding with a bar: nearly all time in forward, backward and optimiser, and those no
slower than the same step of a copy of the net.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from anysize_why.findings import Finding
from anysize_why.record import Found, Record, compare, control_of, ms, tried

__all__ = ["find_slowing", "find_switches", "find_unexplained"]

MAX_OUTSIDE = 0.1
"""Share of the wall clock outside forward, loss, backward and optimiser that is healthy."""

MAX_SLOWER = 1.6
"""How many times as long as the copy's a step's forward and backward may take and be healthy."""

MIN_WITHIN = 0.5
"""Share of a copy's step that its operators take at least in a healthy net."""

MIN_SLOWING = 1.3
"""How many times as long the last steps take as the first where steps become slower."""

WITHIN = ("forward", "loss", "backward", "optimiser", "compiling")


def find_switches(record: Record) -> Found:
    """Debugging that was left on."""
    findings: list[Finding] = []
    harmless: list[str] = []
    for switch in record.facts.get("switches") or {}:
        control = control_of(record, switch)
        if control is None:
            found = _switch_without_control(record, switch)
        else:
            saved = compare(control, "as it is", "off")
            said = f"{switch}: {ms(saved.before_s)} with it, {ms(saved.after_s)} without"
            found = tried(
                record,
                saved,
                cause=f"debugging left on: {switch}",
                evidence=said,
                change="switch it off where nothing is being looked for",
            )
            if not found[0]:
                found = [], [f"{said}: harmless"]
        findings += found[0]
        harmless += found[1]
    return findings, harmless


def _switch_without_control(record: Record, switch: str) -> Found:
    """A profiler or tracer cannot be tried on the copy; the copy's step shows what it costs."""
    excess = _excess_s(record)
    said = f"{switch} was at work in these steps"
    if excess is None or not record.matters(excess):
        return [], [said]
    return [
        Finding(
            cause=f"debugging left on: {switch}",
            cost_s=excess,
            evidence=f"{said}: they take {_script_step_s(record) / _copy_step_s(record):.1f} times "
            "as long as the same steps of a copy of the net without it",
            change="switch it off where nothing is being looked for",
            gain=f"{excess:.2f} s of {record.wall_s:.2f} s, {record.share(excess)}",
        )
    ], []


def _script_step_s(record: Record) -> float:
    """A quick step's seconds in what the controls repeat: a quarter of the steps are quicker."""
    stages = ["forward", "backward"] + ["optimiser"] * bool(record.controls.get("optimiser"))
    return _low([sum(s["stages"].get(g, 0.0) for g in stages) for s in record.steps])


def _copy_step_s(record: Record) -> float:
    """The same of the copy, for as many forwards as a step has; 0 where it was not measured."""
    control = control_of(record, "again")
    if control is None:
        return 0.0
    forwards = statistics.median([max(1, step["forwards"]) for step in record.steps])
    return _low(control["seconds"]["as it is"]) * forwards


def _low(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 4]


def _excess_s(record: Record) -> float | None:
    """Seconds that the script's steps take more than the copy's; None where it is not known."""
    copy_s = _copy_step_s(record)
    if not copy_s or record.facts.get("made", {}).get("nets", 1) > 1:
        return None  # The copy is of one net of several.
    if len({tuple(step["shape"] or ()) for step in record.steps}) > 1:
        return None
    script_s = _script_step_s(record)
    stages = ("forward", "backward", "optimiser")
    return sum(map(record.stage_s, stages)) * max(0.0, 1 - copy_s / script_s)


def find_slowing(record: Record) -> Found:
    """Steps that become slower: the first third against the last."""
    steps = [s for s in record.steps if not s["counts_syncs"] and not s["compiles"]]
    if len({tuple(step["shape"] or ()) for step in steps}) > 1:
        return [], []
    usual = [s for s in steps if not any(s["stages"].get(g) for g in ("evaluation", "checkpoint"))]
    early, late = usual[: len(usual) // 3], usual[-(len(usual) // 3) :]
    if len(early) < 4:
        return [], []
    before = statistics.median([s["wall_s"] for s in early])
    after = statistics.median([s["wall_s"] for s in late])
    # A busy machine slows some steps: here nearly each late one is slower than nearly each early.
    clear = (
        _low([s["wall_s"] for s in late]) > sorted(s["wall_s"] for s in early)[3 * len(early) // 4]
    )
    cpu = [statistics.median([s["cpu_s"] for s in part]) for part in (early, late)]
    grown = {
        stage: statistics.median([s["stages"].get(stage, 0.0) for s in late])
        - statistics.median([s["stages"].get(stage, 0.0) for s in early])
        for stage in {name for step in steps for name in step["stages"]}
    }
    stage = max(grown, key=lambda name: grown[name])
    # Computing must have grown too, or the others on the machine have; waiting computes nothing.
    works = cpu[1] > 1.15 * cpu[0] or stage in ("wait for data", "between steps")
    if after < MIN_SLOWING * before or not clear or not works:
        return [], []
    cost = sum(max(0.0, step["wall_s"] - before) for step in usual)
    lines = record.worst_lines(stage)[:2]
    where = f", most in {' and '.join(record.line(*line) for line in lines)}" if lines else ""
    return [
        Finding(
            cause="steps become slower",
            cost_s=cost,
            evidence=f"the first {len(early)} steps take {ms(before)}, the last {len(late)} "
            f"{ms(after)} (medians); {ms(grown[stage])} of it in {stage}{where}",
            change="look for what grows or changes there: a list that is summed again, a history "
            "in the loss, a cache that fills, a schedule that makes steps larger",
            gain=f"{cost:.2f} s of {record.wall_s:.2f} s, {record.share(cost)}: steps as the first",
        )
    ], []


def find_unexplained(record: Record, findings: Sequence[Finding]) -> list[Finding]:
    """The bar: what must be explained before a script is called healthy."""
    if any(finding.cost_s for finding in findings):
        return []
    by_stage = {
        stage: record.stage_s(stage)
        for stage in {name for step in record.steps for name in step["stages"]}
        if stage not in WITHIN
    }
    outside = sum(by_stage.values())
    if outside > MAX_OUTSIDE * record.wall_s:
        stage = max(by_stage, key=lambda name: by_stage[name])
        why = f"{outside:.2f} s, {record.share(outside)}, outside forward, backward and optimiser"
        return [_unexplained(record, stage, outside, why)]
    excess = _excess_s(record)
    if excess and _script_step_s(record) > MAX_SLOWER * _copy_step_s(record):
        why = (
            f"a step of the script takes {ms(_script_step_s(record))}, the same step of a copy of "
            f"its net {ms(_copy_step_s(record))}"
        )
        stages = {stage: record.stage_s(stage) for stage in ("forward", "backward", "optimiser")}
        stage = max(stages, key=lambda name: stages[name])
        return [_unexplained(record, stage, excess, why)]
    operators: dict[str, Any] = record.controls.get("operators") or {}
    if operators.get("step_s") and operators["within_s"] < MIN_WITHIN * operators["step_s"]:
        share = 1 - operators["within_s"] / operators["step_s"]
        why = (
            f"{share:.0%} of a step of the copy lies between the operators of PyTorch: in Python, "
            "or in libraries that it does not see"
        )
        cost = share * (record.stage_s("forward") + record.stage_s("backward"))
        return [_unexplained(record, "forward", cost, why)]
    return []


def _unexplained(record: Record, stage: str, cost: float, why: str) -> Finding:
    seconds = record.seconds_of_lines(stage)
    said = [f"{record.line(*key)} {seconds[key]:.2f} s" for key in record.worst_lines(stage)[:3]]
    evidence = f"{why}; lines: {', '.join(said)}" if said else why
    longest = (record.controls.get("operators") or {}).get("longest") or []
    if longest and stage in WITHIN:
        evidence += "; operators of a step: " + ", ".join(
            f"{each['name']} {ms(each['seconds'])} ({each['calls']} calls)" for each in longest[:4]
        )
    return Finding(
        cause=f"not explained: most time is in {stage}",
        cost_s=min(cost, record.wall_s),
        evidence=evidence,
        change="look at these lines and operators first",
        gain=f"at most {cost:.2f} s of {record.wall_s:.2f} s",
    )
