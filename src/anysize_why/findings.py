"""What a diagnosis says: findings, most costly first, each with its measurement. Pure; no clock.

A finding is not a guess: it carries what was measured, what removing the cause was measured or
computed to save, and the change to make.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["Finding", "Verdict", "WhyError", "format_verdict", "in_units", "to_json", "verdict"]


class WhyError(Exception):
    """A script or run that cannot be measured; the message says what was tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause.

    Attributes:
        cause: A stable name, such as "every step a new size".
        cost_s: Wall-clock seconds that it costs in what was measured (of a run: in an epoch).
            0 for a finding that costs no time: a clock that is wrong, memory that grows.
        evidence: The measurement, in one line.
        change: What to do about it; of a run, the very key and value.
        gain: What that is expected to save, with how it is known.
        settings: Keys of `run.toml` and their new values, where a run is diagnosed.
    """

    cause: str
    cost_s: float
    evidence: str
    change: str
    gain: str
    settings: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """All that is said about one program.

    Attributes:
        wall_s: That the findings are about.
        stages: (name, seconds), which add up to `wall_s`; the last is "unaccounted".
        findings: Most costly first; empty where the program is healthy.
        harmless: What was looked into and found to cost next to nothing, a line each with its
            measurement.
        limit_share: Share of the device's measured limit that is reached, from 0 to 1; None where
            it could not be measured.
        not_measured: What there was no time to look into; empty where there is no such thing.
    """

    wall_s: float
    stages: tuple[tuple[str, float], ...]
    findings: tuple[Finding, ...]
    harmless: tuple[str, ...] = ()
    limit_share: float | None = None
    not_measured: str = ""

    @property
    def healthy(self) -> bool:
        """Whether all was looked into, and nothing was found."""
        return not self.findings and not self.not_measured


def verdict(
    wall_s: float,
    stages: Sequence[tuple[str, float]],
    findings: Sequence[Finding],
    *,
    harmless: Sequence[str] = (),
    limit_share: float | None = None,
    not_measured: str = "",
) -> Verdict:
    """Orders findings by cost, and adds what no stage accounts for."""
    rest = wall_s - sum(seconds for _, seconds in stages)
    return Verdict(
        wall_s=wall_s,
        stages=(*stages, ("unaccounted", rest)),
        findings=tuple(sorted(findings, key=lambda finding: -finding.cost_s)),
        harmless=tuple(harmless),
        limit_share=limit_share,
        not_measured=not_measured,
    )


def format_verdict(found: Verdict, *, over: Literal["epoch", "measurement"]) -> str:
    """The verdict for a console, most costly finding first."""
    lines = [f"Of {found.wall_s:.2f} s of wall clock:"]
    for name, seconds in found.stages:
        share = seconds / found.wall_s if found.wall_s else 0.0
        lines.append(f"  {name:<16} {seconds:>9.2f} s  {share:>6.1%}")
    if found.healthy:
        reached = ""
        if found.limit_share is not None:
            reached = f" It reaches {found.limit_share:.0%} of the device's measured limit."
        lines.append(f"Healthy: nothing was found that costs time.{reached}")
    unit = "s an epoch" if over == "epoch" else "s of what was measured"
    for number, finding in enumerate(found.findings, 1):
        cost = f"{finding.cost_s:.2f} {unit}" if finding.cost_s else "no time, but mind it"
        lines += [
            f"{number}. {finding.cause}: {cost}",
            f"   measured: {finding.evidence}",
            f"   change:   {finding.change}",
            f"   gain:     {finding.gain}",
        ]
    lines += [f"Harmless: {line}" for line in found.harmless]
    if found.not_measured:
        lines.append(f"Not measured: {found.not_measured}.")
    return "\n".join(lines)


def in_units(seconds: float) -> str:
    """Seconds, milliseconds or microseconds, with three digits."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 0.9995:
            value = seconds * scale
            return f"{value:.{max(0, 2 - len(str(int(value))) + 1)}f} {unit}"
    return f"{1e6 * seconds:.0f} µs"


def to_json(found: Verdict) -> dict[str, Any]:
    """The verdict as plain values."""
    return {**asdict(found), "healthy": found.healthy}
