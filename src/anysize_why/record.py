"""What the probe wrote of a script, and what its controls saved. Pure: no clock, no PyTorch."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anysize_why.findings import Finding

__all__ = [
    "DECODERS",
    "MIN_SHARE",
    "STAGES",
    "Found",
    "Record",
    "Saved",
    "compare",
    "control_of",
    "counted",
    "first_visits",
    "growth_bytes",
    "ms",
    "tried",
]


DECODERS = ("PIL", "cv2", "imageio", "skimage", "torchvision", "tifffile", "rasterio")
"""Libraries that read images."""

MIN_SHARE = 0.05
"""Share of the wall clock from which a cause is a finding."""


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
        """Forward, loss and backward."""
        return sum(self.stage_s(stage) for stage in ("forward", "loss", "backward"))

    @property
    def repeated_s(self) -> float:
        """Seconds of what the controls repeat: with the optimiser where they step one."""
        return self.computing_s + self.controls.get("optimiser", False) * self.stage_s("optimiser")

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

    def line(self, file: str, line: int, via: str = "") -> str:
        """The same with its text, and the library that is called there."""
        text = self.facts.get("texts", {}).get(f"{file}:{line}", "")
        text = f" `{text}`" if text else ""
        return f"{self.where(file, line)}{text}{f' (in {via})' if via else ''}"

    def seconds_of_lines(self, *stages: str) -> dict[tuple[str, int, str], float]:
        """Seconds of each of the script's lines; samples are scaled to the stages, which are exact.

        Args:
            *stages: In which they were seen.

        Returns:
            By file, line and the library that was called there.
        """
        found: dict[tuple[str, int, str], float] = defaultdict(float)
        for stage in stages:
            lines = [line for line in self.facts["lines"] if line["stage"] == stage]
            sampled = sum(line["seconds"] for line in lines)
            for line in lines:
                share = line["seconds"] / sampled if sampled else 0.0
                found[(line["file"], line["line"], line["via"])] += share * self.stage_s(stage)
        return dict(found)

    def worst_lines(self, *stages: str) -> list[tuple[str, int, str]]:
        """The same lines, longest first."""
        seconds = self.seconds_of_lines(*stages)
        return sorted(seconds, key=lambda key: -seconds[key])


Found = tuple[list[Finding], list[str]]
"""Findings, and what was looked into and found harmless."""


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


def compare(control: Mapping[str, Any], before: str, after: str, scale: float = 1.0) -> Saved:
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


def ms(seconds: float) -> str:
    """Seconds as milliseconds in words."""
    return f"{1000 * seconds:.1f} ms"


def control_of(record: Record, name: str) -> Mapping[str, Any] | None:
    """A control that was measured; None otherwise."""
    control = record.controls.get(name)
    return control if control and "seconds" in control else None


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


def growth_bytes(record: Record) -> float | None:
    """By how much memory grows a step; None for too few steps. The first third is start-up."""
    sizes = [step["rss_bytes"] for step in record.steps]
    later = sizes[len(sizes) // 3 :]
    if len(later) < 6:
        return None
    return statistics.linear_regression(range(len(later)), later).slope


def tried(
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

    `also_s` is what the change saves beside what the control repeats.
    """
    cost = saved.share * record.repeated_s + also_s
    if not (saved.certain and record.matters(cost, share)):
        return [], []
    return [
        Finding(
            cause=cause,
            cost_s=cost,
            evidence=f"{evidence} ({saved.rounds} rounds in turn)",
            change=change,
            gain=f"{cost:.2f} s of {record.wall_s:.2f} s, {record.share(cost)}",
        )
    ], []
