"""From the record of a script to findings. Pure: no clock, no PyTorch, no process.

No finding is a guess. What a stage takes was measured in the script; what a change saves was
measured by a control, and must be clear of the control's own spread.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anysize_why.findings import Finding, Verdict, WhyError, verdict
from anysize_why.own_clock import intervals, shown_by, stages_within, suspects

__all__ = ["STAGES", "Record", "counted", "first_visits", "growth_bytes", "judge"]

MIN_SHARE = 0.05
"""Share of the wall clock from which a cause is a finding."""

MIN_SHARE_OWN_LINES = 0.1
"""The same for lines of the script of which nothing more is known."""

MIN_SHARE_BATCH = 0.25
"""Share of a step that a larger batch must save: every net gains a little."""

STAGES = (
    "wait for data",
    "workers",
    "forward",
    "loss",
    "backward",
    "after backward",
    "optimiser",
    "evaluation",
    "checkpoint",
    "printing",
    "compiling",
    "between steps",
)

DECODERS = ("PIL", "cv2", "imageio", "skimage", "torchvision", "tifffile", "rasterio", "matplotlib")
"""Libraries that read images."""

MAX_SHOWN = 0.8
"""Share of a step's forward and backward that a clock which waits for the device shows at least."""

GROWTH_BYTES = 50_000
"""Least growth of memory a step that is worth a word."""


@dataclass(frozen=True, slots=True)
class Record:
    """What the probe wrote.

    Attributes:
        script: Its path.
        source: Its text; "" where it cannot be read.
        steps: A row for each optimiser step after the first.
        facts: All that is not of one step.
        controls: What was tried when the steps were over.
    """

    script: str
    source: str
    steps: Sequence[Mapping[str, Any]]
    facts: Mapping[str, Any]
    controls: Mapping[str, Any]

    @property
    def wall_s(self) -> float:
        """From the end of the first step to the end of the last."""
        return sum(step["wall_s"] for step in self.steps)

    @property
    def computing_s(self) -> float:
        """Forward, loss and backward: what the controls repeat."""
        return sum(self.stage_s(stage) for stage in ("forward", "loss", "backward"))

    def stage_s(self, stage: str) -> float:
        """Seconds of a stage in all steps."""
        return sum(step["stages"].get(stage, 0.0) for step in self.steps)

    def share(self, seconds: float) -> str:
        """Of the wall clock, in words."""
        return f"{seconds / self.wall_s:.0%} of the wall clock"

    def matters(self, seconds: float, share: float = MIN_SHARE) -> bool:
        """Whether it is enough for a finding."""
        return seconds >= share * self.wall_s

    def where(self, file: str, line: int) -> str:
        """A line of the script in words."""
        return f"{Path(file).name}:{line}"


Found = tuple[list[Finding], list[str]]
"""Findings, and what was looked into and found harmless."""


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
        _sizes,
        _compiling,
        _waiting,
        _workers,
        _lines,
        _printing,
        _evaluation,
        _checkpoint,
        _memory,
        _channels_last,
        _float64,
        _batch,
        _threads,
        _clock,
        _waitless_clock,
    ):
        found, fine = look(record)
        findings += found
        harmless += fine
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


@dataclass(frozen=True, slots=True)
class Saved:
    """What a control saved of a step's forward and backward.

    Attributes:
        share: From 0 to 1; the median over the rounds.
        error: Of that median.
        before_s, after_s: Medians of the two sides.
        rounds: How often both took turns.
    """

    share: float
    error: float
    before_s: float
    after_s: float
    rounds: int

    @property
    def certain(self) -> bool:
        """Whether it is clear of its own spread."""
        return self.share > 2.5 * self.error


def _saved(control: Mapping[str, Any], before: str, after: str, scale: float = 1.0) -> Saved:
    """Compares the sides round by round, each by the element where sizes differ.

    Args:
        control: Times and sizes by side.
        before: Side as the script does it.
        after: Side with the one change.
        scale: What an element of `after` counts.
    """
    per: dict[str, list[float]] = {
        side: [
            seconds / size
            for seconds, size in zip(control["seconds"][side], control["sizes"][side], strict=True)
        ]
        for side in (before, after)
    }
    shares = [1 - scale * b / a for a, b in zip(per[before], per[after], strict=True)]
    middle = statistics.median(shares)
    spread = statistics.median([abs(s - middle) for s in shares])
    typical = statistics.median(control["sizes"][before])
    return Saved(
        share=middle,
        error=1.86 * spread / math.sqrt(len(shares)),
        before_s=typical * statistics.median(per[before]),
        after_s=typical * scale * statistics.median(per[after]),
        rounds=len(shares),
    )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


def _control(record: Record, name: str) -> Mapping[str, Any] | None:
    control = record.controls.get(name)
    return control if control and "seconds" in control else None


def _sizes(record: Record) -> Found:
    shapes = [tuple(step["shape"]) for step in record.steps if step["shape"]]
    visits = Counter(shapes)
    if len(visits) < 2:
        return [], []
    first = first_visits(record)
    control = _control(record, "sizes")
    if control is None:
        return [], []
    one = _saved(control, "new", "one")
    again = _saved(control, "new", "again")
    of_first = sum(
        sum(step["stages"].get(s, 0.0) for s in ("forward", "loss", "backward"))
        for step, is_first in zip(record.steps, first, strict=True)
        if is_first
    )
    num_first = sum(first)
    tuned = sum(
        1 for step, new in zip(record.steps, first, strict=True) if new and step.get("tunes")
    )
    size = "x".join(map(str, control["one"]))
    measured = (
        f"a shape never seen takes {_ms(one.before_s)} forward and backward, the same at once "
        f"again {_ms(again.after_s)}, as many elements in one shape ({size}) {_ms(one.after_s)} "
        f"({one.rounds} rounds in turn)"
        f"{_made(record)}"
    )
    if tuned:
        measured += f"; cuDNN tuned its kernels anew in {tuned} steps (its `benchmark` flag is on)"
    if num_first < 0.5 * len(shapes):
        cost = max(0.0, again.share) * of_first
        if record.matters(cost) and again.certain:
            measured = f"{measured}; the first visits are over once all shapes were seen"
        return [], [
            f"{len(visits)} sizes in {len(shapes)} steps: harmless after the first visits, which "
            f"cost {cost:.2f} s in all, {record.share(cost)}; {measured}"
        ]
    cost = one.share * of_first
    what = "every step a new size" if num_first >= 0.9 * len(shapes) else "most steps a new size"
    if not (record.matters(cost) and one.certain):
        said = f"{max(cost, 0.0):.2f} s, {record.share(max(cost, 0.0))}"
        return [], [f"{what}: costs next to nothing here, {said}; {measured}"]
    return [
        Finding(
            cause=what,
            cost_s=cost,
            evidence=f"{num_first} of {len(shapes)} steps had a new shape; {measured}",
            change="bring the images onto a few planned canvases (`anysize plan`, exact), or pad, "
            "crop or group them to a few sizes",
            gain=f"{cost:.2f} s of {record.wall_s:.2f} s, {record.share(cost)}; as many "
            "elements in one shape, without padding",
        )
    ], []


def _made(record: Record) -> str:
    """Primitives that oneDNN makes for a new shape, in words; "" where its log was not read."""
    new, again = counted(record, "primitives new"), counted(record, "primitives again")
    if not (new and again):
        return ""
    return (
        f"; by its own log oneDNN makes {new['made']:.0f} primitives in {new['made_ms']:.1f} ms "
        f"for a shape never seen, {again['made']:.0f} for one seen before"
    )


def counted(record: Record, name: str) -> Mapping[str, Any]:
    """What a step taken again was counted to do; empty where that could not be counted."""
    found = record.controls.get(name) or {}
    return {} if "failed" in found else found


def first_visits(record: Record) -> list[bool]:
    """Of each step, whether its input has a shape for the first time."""
    seen: set[tuple[int, ...]] = set()
    first = []
    for step in record.steps:
        shape = tuple(step["shape"] or ())
        first.append(bool(shape) and shape not in seen)
        seen.add(shape)
    return first


def _compiling(record: Record) -> Found:
    cost = record.stage_s("compiling")
    steps = [i for i, step in enumerate(record.steps) if step["compiles"]]
    if not steps:
        return [], []
    said = f"{len(steps)} of {len(record.steps)} steps compiled, {cost:.2f} s in all"
    lasting = len(steps) >= 3 or steps[-1] >= len(record.steps) / 2
    if not (lasting and record.matters(cost)):
        return [], [f"torch.compile: {said}, {record.share(cost)}, and was done with it"]
    first = first_visits(record)
    with_new = sum(first[i] for i in steps)
    by_size = with_new >= 0.9 * len(steps)
    if by_size:
        always = sum(first) >= 0.9 * len(record.steps)
        cause = f"{'every step' if always else 'a step of'} a new size: torch.compile recompiles"
        change = (
            "bring the inputs onto a few planned shapes (`anysize plan`, exact), or pad them; or "
            "let one graph serve all (`torch.compile(dynamic=True)`)"
        )
    else:
        cause = "torch.compile recompiles"
        change = (
            "what changes between steps is a guard of the graph, and no shape: a number or flag of "
            "Python; make it a tensor. TORCH_LOGS=recompiles names each guard that failed"
        )
    return [
        Finding(
            cause=cause,
            cost_s=cost,
            evidence=f"{said}, after the first step; {with_new} of these steps had a shape for the "
            "first time",
            change=change,
            gain=f"{cost:.2f} s of {record.wall_s:.2f} s, {record.share(cost)}: the time in the "
            "compiler",
        )
    ], []


def _main_loader(record: Record) -> Mapping[str, Any] | None:
    loaders = record.facts.get("loaders") or []
    return loaders[0] if loaders else None


def _waiting(record: Record) -> Found:
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
            f"; a batch takes {_ms(alone)} to fetch alone, {_ms(busy)} of it computing, and the "
            f"rest of a step {_ms(per_step)}"
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


def _workers(record: Record) -> Found:
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


def _line_seconds(record: Record) -> dict[tuple[str, int, str, str], float]:
    """Seconds of each of the script's lines; samples are scaled to the stages, which are exact."""
    sampled: dict[str, float] = defaultdict(float)
    for line in record.facts["lines"]:
        sampled[line["stage"]] += line["seconds"]
    return {
        (line["file"], line["line"], line["stage"], line["via"]): line["seconds"]
        * record.stage_s(line["stage"])
        / sampled[line["stage"]]
        for line in record.facts["lines"]
        if sampled[line["stage"]]
    }


OWN_STAGES = ("between steps", "loss", "after backward")


def _lines(record: Record) -> Found:
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
                f"step; reads take {_ms(per_step)} of it, {record.share(cost)}"
                + (", with the wait for the device" if waits else ""),
                change="compute on whole tensors, keep sums as tensors, and read one value every "
                "some steps",
                gain=f"{'at most ' if waits else ''}{cost:.2f} s of {record.wall_s:.2f} s, "
                f"{record.share(cost)}",
            )
        )
    else:
        reads, reading = {}, {}
    cost = record.stage_s("between steps") - reading.get("between steps", 0.0)
    rest = {
        key: value
        for key, value in _line_seconds(record).items()
        if key[2] == "between steps" and key[:2] not in reads
    }
    return findings + _between(record, rest, cost), []


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
    record: Record, seconds: Mapping[tuple[str, int, str, str], float], cost: float
) -> list[Finding]:
    """What lies between the steps, by the lines that were seen there."""
    if not (seconds and record.matters(cost, MIN_SHARE_OWN_LINES)):
        return []
    sampled = sum(seconds.values())
    seconds = {key: value * cost / sampled for key, value in seconds.items()}
    by_line: dict[tuple[str, int], float] = defaultdict(float)
    decoding = 0.0
    for (file, line, _, via), value in seconds.items():
        by_line[(file, line)] += value
        decoding += value * (via.split(".")[0] in DECODERS)
    worst = sorted(by_line, key=lambda place: -by_line[place])[:3]
    said = ", ".join(f"{record.where(*place)} {by_line[place]:.2f} s" for place in worst)
    if decoding > 0.5 * cost:
        cause = "slow decoding in the main thread"
        change = "decode in a DataLoader with num_workers=1 or more, while the net computes"
    else:
        cause = "the script's own lines between the steps"
        change = "do less there, less often, or in a DataLoader's workers"
    return [
        Finding(
            cause=cause,
            cost_s=cost,
            evidence=f"{cost:.2f} s, {record.share(cost)}, in {said}"
            + (f"; {decoding:.2f} s of it reading images" if decoding > 0.5 * cost else ""),
            change=change,
            gain=f"at most {cost:.2f} s of {record.wall_s:.2f} s",
        )
    ]


def _printing(record: Record) -> Found:
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


def _evaluation(record: Record) -> Found:
    return _inside_loop(
        record, "evaluation", "evaluate less often, on fewer images, or in another process"
    )


def _checkpoint(record: Record) -> Found:
    return _inside_loop(record, "checkpoint", "save less often")


def _inside_loop(record: Record, stage: str, change: str) -> Found:
    cost = record.stage_s(stage)
    steps = [step for step in record.steps if step["stages"].get(stage)]
    if not steps:
        return [], []
    said = (
        f"{len(steps)} times in {len(record.steps)} steps, {_ms(cost / len(steps))} each, "
        f"{record.share(cost)}"
    )
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


def _memory(record: Record) -> Found:
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


def growth_bytes(record: Record) -> float | None:
    """By how much memory grows a step; None for too few steps. The first third is start-up."""
    sizes = [step["rss_bytes"] for step in record.steps]
    later = sizes[len(sizes) // 3 :]
    if len(later) < 6:
        return None
    return statistics.linear_regression(range(len(later)), later).slope


def _tried(
    record: Record,
    saved: Saved,
    *,
    cause: str,
    evidence: str,
    change: str,
    share: float = MIN_SHARE,
    also_s: float = 0.0,
) -> Found:
    """A finding of a control, if what it saved is enough and certain.

    `also_s` is what the change saves beside the forward and backward that the control repeats.
    """
    cost = saved.share * record.computing_s + also_s
    if not (saved.certain and record.matters(cost, share)):
        return [], []
    return [
        Finding(
            cause=cause,
            cost_s=cost,
            evidence=f"{evidence} ({saved.rounds} rounds in turn, forward and backward)",
            change=change,
            gain=f"{cost:.2f} s of {record.wall_s:.2f} s, {record.share(cost)}",
        )
    ], []


def _channels_last(record: Record) -> Found:
    control = _control(record, "channels last")
    if control is None:
        return [], []
    saved = _saved(control, "as it is", "kept")
    lost = ", ".join(f"`{name}`" for name in control["lost by"][:3])
    turned = counted(record, "copies").get("memory format")
    said = ""
    if turned:
        megabytes = turned["bytes"] / 1e6
        said = f"; {turned['calls']} conversions of memory format a step, {megabytes:.1f} MB"
    return _tried(
        record,
        saved,
        cause="channels-last lost by one layer",
        evidence=f"{lost} takes channels-last and gives another layout: {_ms(saved.before_s)}, "
        f"{_ms(saved.after_s)} where it is kept{said}",
        change=f"let {lost} keep the layout, or `.contiguous(memory_format=torch.channels_last)` "
        "behind it",
    )


def _float64(record: Record) -> Found:
    control = _control(record, "float64")
    if control is None:
        return [], []
    saved = _saved(control, "as it is", "float32")
    return _tried(
        record,
        saved,
        cause="float64 by accident",
        evidence=f"parameters are float64: {_ms(saved.before_s)}, {_ms(saved.after_s)} in float32",
        change="make the net and its inputs float32 (numpy's arrays are float64: `.float()`)",
    )


def _threads(record: Record) -> Found:
    control = _control(record, "threads")
    if control is None:
        return [], []
    saved = _saved(control, "as it is", "cores")
    return _tried(
        record,
        saved,
        cause="more threads than cores",
        evidence=f"{control['threads']} threads on {control['cores']} cores: "
        f"{_ms(saved.before_s)}, {_ms(saved.after_s)} with {control['cores']} threads",
        change=f"torch.set_num_threads({control['cores']}), or OMP_NUM_THREADS={control['cores']}",
    )


def _batch(record: Record) -> Found:
    control = _control(record, "batch")
    if control is None:
        return [], []
    saved = _saved(control, "as it is", "larger")
    # A step of the optimiser takes as long for any batch, and a larger one needs fewer of them.
    optimiser_s = record.stage_s("optimiser") * (1 - control["batch"] / control["larger"])
    return _tried(
        record,
        saved,
        cause="tiny batch",
        evidence=f"{control['batch']} a batch: {_ms(saved.before_s)}, and {_ms(saved.after_s)} for "
        f"as many in a batch of {control['larger']}; and {optimiser_s:.2f} s in the optimiser, for "
        "fewer steps",
        change=f"a batch of {control['larger']} or more, with the learning rate to match",
        share=MIN_SHARE_BATCH,
        also_s=optimiser_s,
    )


def _clock(record: Record) -> Found:
    """Timers of the script that drop whole seconds."""
    findings, harmless = [], []
    for timed in suspects(record.source):
        pairs = shown_by(timed, record.steps, record.facts["call_lines"], record.script)
        if not pairs:
            continue
        shown, true = (statistics.mean(values) for values in zip(*pairs, strict=True))
        line = record.where(record.script, timed.end)
        if abs(shown - true) < 0.1 * true:
            harmless.append(
                f"{line} reads `.{timed.part}` alone, which drops whole seconds; no step was long "
                f"enough to show it ({true:.3f} s)"
            )
            continue
        findings.append(
            Finding(
                cause="the script's own clock is wrong",
                cost_s=0.0,
                evidence=f"{line} takes `.{timed.part}` of a timedelta for all of it: from line "
                f"{timed.begin} on it shows {shown:.2f} s a step, the wall clock {true:.2f} s "
                f"(mean of {len(pairs)} steps)",
                change="`.total_seconds()`, or `time.perf_counter()`, or `anysize.timing.Timer`",
                gain=f"the truth, of which {abs(true - shown):.2f} s a step are hidden; see "
                "docs/why-your-timer-lies.md",
            )
        )
    return findings, harmless


def _waitless_clock(record: Record) -> Found:
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
                evidence=f"{record.where(record.script, timed.end)} shows {_ms(shown)} from "
                f"line {timed.begin} on, a step of the wall clock takes {_ms(wall)}, and no line "
                f"between waits for the device: forward and backward return after "
                f"{_ms(returned)}, and are done after {_ms(done)} (median of "
                f"{len(control['done'])} rounds)",
                change="torch.cuda.synchronize() before each read of the clock, or "
                "`anysize.timing.Timer(synchronise=torch.cuda.synchronize)`",
                gain=f"the truth, of which {_ms(done - shown)} a step are hidden; see "
                "docs/why-your-timer-lies.md",
            )
        ], []
    return [], []
