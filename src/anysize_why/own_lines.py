"""Causes in lines of the script: reads of values, decoding, printing, evaluation, memory. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from anysize_why.findings import Finding
from anysize_why.places import CONSTRUCTORS
from anysize_why.record import (
    DECODERS,
    MIN_SHARE,
    Found,
    Record,
    growth_bytes,
    ms,
)
from anysize_why.stages import AFTER_BACKWARD, BETWEEN, LOSS

__all__ = ["find_checkpoint", "find_evaluation", "find_lines", "find_memory", "find_printing"]


MIN_SHARE_OWN_LINES = 0.1
"""The same for lines of the script of which nothing more is known."""


GROWTH_BYTES = 50_000
"""Least growth of memory a step that is worth a word."""


OWN_STAGES = (BETWEEN, LOSS, AFTER_BACKWARD)


def find_lines(record: Record) -> Found:
    """The script's own lines: reads of single values, decoding, and what else takes long."""
    if not any(step["forwards"] for step in record.steps):
        return [], ["the forward could not be told apart from the script's own lines"]
    reading = {stage: _reading_s(record, stage) for stage in OWN_STAGES}
    findings = []
    cost = sum(reading.values())
    reads = _reads(record)
    if reads and record.matters(cost):
        worst, (method, calls) = next(iter(reads.items()))
        per_step = cost / len(record.steps)
        waits = record.facts["device"] != "cpu"
        findings.append(
            Finding(
                cause=f"{method} in each step",
                cost_s=cost,
                evidence=f"{record.where(*worst)} reads values of tensors {calls:.0f} times a "
                f"step; reads take {ms(per_step)} of it, {record.share(cost)}"
                + (", with the wait for the device" if waits else ""),
                change="compute on whole tensors, keep sums as tensors, and read one value every "
                "some steps",
                gain=f"{'at most ' if waits else ''}{cost:.2f} s of {record.wall_s:.2f} s, "
                f"{record.share(cost)}",
            )
        )
    else:
        reads, reading = {}, {}
    for stage in (BETWEEN, AFTER_BACKWARD):
        cost = record.stage_s(stage) - reading.get(stage, 0.0)
        if stage == BETWEEN:
            cost -= around_checkpoints(record)
        rest = {
            key: value
            for key, value in record.seconds_of_lines(stage).items()
            if key[:2] not in reads
        }
        findings += _between(record, stage, rest, cost)
    return findings, []


def _reading_s(record: Record, stage: str) -> float:
    """Seconds of a stage in which single values are read, with the loop around the reads.

    The steps in which reads are timed are slowed by that, so only what is beside the reads is taken
    from them: a step's usual time in the stage less that is the reads'. It is no less than the time
    within the reads, and no more than that with the loop's, as both were timed. 0 where values are
    not read in each step.
    """
    timed = [step for step in record.steps if step["counts_syncs"]]
    reads = [step["reads"][stage] for step in timed if stage in step["reads"]]
    usual = [s["stages"].get(stage, 0.0) for s in record.steps if not s["counts_syncs"]]
    if not usual or not timed or len(reads) < len(timed):
        return 0.0
    beside = [s["stages"].get(stage, 0.0) - sum(s["reads"][stage][1:]) for s in timed]
    within = statistics.median([seconds for _, seconds, _ in reads])
    looping = statistics.median([seconds + gaps for _, seconds, gaps in reads])
    middle = statistics.median(usual)
    # The least of what is beside them: whatever interrupts a timed step lands there.
    per_step = min(max(middle - min(beside), within), looping, middle)
    # A busy machine stretches a step's reads as it does the rest; far more is something else.
    stretched = statistics.mean([min(seconds / middle, 2.0) for seconds in usual]) if middle else 0
    return len(record.steps) * per_step * stretched


def _reads(record: Record) -> dict[tuple[str, int], tuple[str, float]]:
    """Lines that read single values in each step: with what, how often a step; longest first."""
    steps = max(1, record.facts["num_sync_steps"])
    found: dict[tuple[str, int], tuple[str, float]] = {}
    for read in record.facts["syncs"]:
        calls = read["calls"] / steps
        if calls >= 1 and read["stage"] in OWN_STAGES:
            method = read["method"]
            name = "a tensor made into text" if method == "__repr__" else f".{method}()"
            found.setdefault((read["file"], read["line"]), (name, calls))
    return found


def _between(
    record: Record, stage: str, seconds: Mapping[tuple[str, int, str], float], cost: float
) -> list[Finding]:
    """What lies between the steps or after the backward pass, by the lines seen there."""
    if not (seconds and record.matters(cost, MIN_SHARE_OWN_LINES)):
        return []
    sampled = sum(seconds.values())
    seconds = {key: value * cost / sampled for key, value in seconds.items()}
    decoding = sum(s for (_, _, via), s in seconds.items() if via.split(".")[0] in DECODERS)
    worst = sorted(seconds, key=lambda key: -seconds[key])[:3]
    evidence = f"{cost:.2f} s, {record.share(cost)}, in " + ", ".join(
        f"{record.line(*key)} {seconds[key]:.2f} s" for key in worst
    )
    made = {
        name: number
        for name, number in record.facts.get("made", {}).items()
        if number > max(2, len(record.steps) / 20)
    }
    cause, change = "the script's own lines between the steps", "do less there, or less often"
    if decoding > 0.5 * cost:
        cause = "slow decoding in the main thread"
        change = "decode in a DataLoader with num_workers=1 or more, while the net computes"
        evidence += f"; {decoding:.2f} s of it reading images"
    elif stage == AFTER_BACKWARD:
        cause = "the script's own lines after the backward pass"
        change = (
            "one call on all gradients instead of a loop (torch.nn.utils.clip_grad_norm_, "
            "torch._foreach_*), or less often"
        )
    elif made:
        making = sum(s for (_, _, via), s in seconds.items() if via == CONSTRUCTORS)
        cost = making or cost  # Loading what was learned into them stays.
        cause = "objects are made anew in the loop: " + ", ".join(made)
        evidence += "; made in these steps: " + ", ".join(f"{n} {k}" for k, n in made.items())
        change = "make them once before the loop, and load the state into them"
    return [
        Finding(
            cause=cause,
            cost_s=cost,
            evidence=evidence,
            change=change,
            gain=f"at most {cost:.2f} s of {record.wall_s:.2f} s",
        )
    ]


def find_printing(record: Record) -> Found:
    """Time within `print`."""
    cost = record.stage_s("printing")
    if not record.matters(cost):
        return [], []
    printing = [line for line in record.facts["lines"] if line["stage"] == "printing"]
    worst = max(printing, key=lambda line: line["seconds"], default=None)
    where = f"; most in {record.where(worst['file'], worst['line'])}" if worst else ""
    steps = sum(step["stages"].get("printing", 0.0) > 0 for step in record.steps)
    return [
        Finding(
            cause="print in each step" if steps >= 0.9 * len(record.steps) else "printing",
            cost_s=cost,
            evidence=f"{cost:.2f} s inside print in {steps} of {len(record.steps)} steps, "
            f"{record.share(cost)}{where}",
            change="print less, or every some steps; a tensor's text is made value by value",
            gain=f"{cost:.2f} s of {record.wall_s:.2f} s, {record.share(cost)}",
        )
    ], []


def find_evaluation(record: Record) -> Found:
    """Evaluation between the steps."""
    return _inside_loop(
        record, "evaluation", "evaluate less often, on fewer images, or in another process"
    )


def find_checkpoint(record: Record) -> Found:
    """Checkpoints between the steps, with the lines around them."""
    return _inside_loop(record, "checkpoint", "save less often", around_checkpoints(record))


def around_checkpoints(record: Record) -> float:
    """Seconds between the steps that only steps with a checkpoint have: copies, hashes, moves."""
    usual = [s["stages"].get(BETWEEN, 0.0) for s in record.steps if not _saves(s)]
    if not usual:
        return 0.0
    middle = statistics.median(usual)
    more = [s["stages"].get(BETWEEN, 0.0) - middle for s in record.steps if _saves(s)]
    return sum(max(0.0, seconds) for seconds in more)


def _saves(step: Mapping[str, Any]) -> bool:
    return step["stages"].get("checkpoint", 0.0) > 0


def _inside_loop(record: Record, stage: str, change: str, around: float = 0.0) -> Found:
    cost = record.stage_s(stage) + around
    steps = [step for step in record.steps if step["stages"].get(stage)]
    if not steps:
        return [], []
    said = (
        f"{len(steps)} times in {len(record.steps)} steps, {ms(cost / len(steps))} each, "
        f"{record.share(cost)}"
    )
    if around > MIN_SHARE * record.stage_s(stage):
        said += f"; {around:.2f} s of it in the script's lines around it"
    if not record.matters(cost):
        return [], [f"{stage} inside the loop: {said}"]
    return [
        Finding(
            cause=f"{stage} inside the loop",
            cost_s=cost,
            evidence=said,
            change=change,
            gain=f"{cost / 2:.2f} s of {record.wall_s:.2f} s if half as often, {cost:.2f} s if not",
        )
    ], []


def find_memory(record: Record) -> Found:
    """Memory that grows because graphs are kept."""
    sizes = [step["rss_bytes"] for step in record.steps]
    num_graphs = record.facts["graphs"] - record.facts["graphs_at_first"]
    slope = growth_bytes(record)
    if slope is None or slope < GROWTH_BYTES or num_graphs < 0.5 * len(record.steps):
        return [], []
    return [
        Finding(
            cause="memory that grows",
            cost_s=0.0,
            evidence=f"{slope / 1e6:.2f} MB more each step, {sizes[-1] / 1e6:.0f} MB at the end; "
            f"{num_graphs} more tensors that hold their graph are alive than {len(record.steps)} "
            "steps before",
            change="keep `loss.detach()` or `loss.item()` in a list, not the loss: it holds every "
            "activation of its step",
            gain=f"{slope / 1e6:.2f} MB a step",
        )
    ], []
