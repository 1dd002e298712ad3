"""Finds a script's timers, those that drop whole seconds, and what they would have shown.

From the source text and the measured stages; nothing is run.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Interval", "Timed", "intervals", "shown_by", "stages_within", "suspects"]

PARTS = ("microseconds", "seconds")
CLOCKS = ("now", "utcnow", "today")
TIMES = ("time", "perf_counter", "monotonic", "time_ns", "perf_counter_ns", "monotonic_ns")


@dataclass(frozen=True, slots=True)
class Timed:
    """A part of a `timedelta` that a script takes for all of it.

    Attributes:
        part: `microseconds` or `seconds`.
        begin, end: Lines between which it measures.
    """

    part: str
    begin: int
    end: int

    def shows(self, seconds: float) -> float:
        """What it shows of a duration, in seconds."""
        return seconds % 1 if self.part == "microseconds" else float(int(seconds % 86400))


def suspects(source: str) -> list[Timed]:
    """The places where `.microseconds` or `.seconds` of a difference of clock times is read."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    clocks: dict[str, list[int]] = {}
    differences: dict[str, tuple[int, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if _is_clock(node.value):
                clocks.setdefault(name, []).append(node.lineno)
            elif began := _difference(node.value):
                differences[name] = (node.lineno, began)
    found = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Attribute) and node.attr in PARTS):
            continue
        end, began = node.lineno, _difference(node.value)
        if isinstance(node.value, ast.Name) and node.value.id in differences:
            end, began = differences[node.value.id]
        begins = [line for line in clocks.get(began or "", []) if line < end]
        if begins and not _uses_whole(tree, node):
            found.append(Timed(node.attr, max(begins), end))
    return found


@dataclass(frozen=True, slots=True)
class Interval:
    """What a script's clock measures in one round of a loop.

    Attributes:
        begin, end: Lines in which the clock is read.
        scope: First and last line of the loop or function that both lie in, and no deeper one.
    """

    begin: int
    end: int
    scope: tuple[int, int]


def intervals(source: str) -> list[Interval]:
    """The places where the difference of two clock times of one round is taken.

    A clock that is read before a loop and again within it measures many steps, and is none.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    reads: dict[str, list[int]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _reads_clock(node.value):
            for target in node.targets:
                reads.setdefault(ast.unparse(target), []).append(node.lineno)
    found: set[Interval] = set()
    for node in ast.walk(tree):
        if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub)):
            continue
        ends = [node.lineno] if _reads_clock(node.left) else reads.get(ast.unparse(node.left), [])
        end = max((line for line in ends if line <= node.lineno), default=0)
        begin = max(
            (line for line in reads.get(ast.unparse(node.right), []) if line < end), default=0
        )
        if begin and scope_of(tree, begin) == scope_of(tree, end):
            found.add(Interval(begin, end, scope_of(tree, end)))
    return sorted(found, key=lambda interval: interval.end)


def _reads_clock(value: ast.expr) -> bool:
    for node in ast.walk(value):
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Attribute) and called.attr in (*CLOCKS, *TIMES):
                return True
            if isinstance(called, ast.Name) and called.id in TIMES:
                return True
    return False


def scope_of(tree: ast.Module, line: int) -> tuple[int, int]:
    """First and last line of the innermost loop or function around a line; all for none."""
    around = [
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, (ast.For, ast.While, ast.FunctionDef, ast.AsyncFunctionDef))
        and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    return min(around, key=lambda scope: scope[1] - scope[0], default=(0, 0))


def stages_within(
    interval: Interval,
    source: str,
    call_lines: Mapping[str, Sequence[Sequence[Any]]],
    script: str,
) -> set[str]:
    """The stages that begin between two reads of a clock, in the same round of the same loop."""
    tree = ast.parse(source)
    places = {
        stage: [
            [file, line]
            for file, line in places
            if file == script and scope_of(tree, line) == interval.scope
        ]
        for stage, places in call_lines.items()
    }
    return _stages_between(interval.begin, interval.end, places, script)


def _is_clock(value: ast.expr) -> bool:
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and value.func.attr in CLOCKS
    )


def _difference(value: ast.expr) -> str | None:
    """The name of what is subtracted, where that is a name."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Sub):
        return value.right.id if isinstance(value.right, ast.Name) else None
    return None


def _uses_whole(tree: ast.Module, node: ast.Attribute) -> bool:
    """Whether the same statement also reads the other part, and so drops nothing."""
    around = [
        statement
        for statement in ast.walk(tree)
        if isinstance(statement, ast.stmt) and any(inner is node for inner in ast.walk(statement))
    ]
    innermost = min(around, key=lambda s: (s.end_lineno or s.lineno) - s.lineno)
    return any(
        isinstance(other, ast.Attribute)
        and other.attr in PARTS
        and other.attr != node.attr
        and ast.dump(other.value) == ast.dump(node.value)
        for other in ast.walk(innermost)
    )


def shown_by(
    timed: Timed,
    steps: Sequence[Mapping[str, Any]],
    call_lines: Mapping[str, Sequence[Sequence[Any]]],
    script: str,
) -> list[tuple[float, float]]:
    """(shown, true) seconds of each step between the two lines; empty where no stage lies there."""
    inside = _stages_between(timed.begin, timed.end, call_lines, script)
    true = [sum(step["stages"].get(stage, 0.0) for stage in inside) for step in steps]
    return [(timed.shows(seconds), seconds) for seconds in true] if inside else []


def _stages_between(
    begin: int, end: int, call_lines: Mapping[str, Sequence[Sequence[Any]]], script: str
) -> set[str]:
    inside = {
        stage
        for stage, places in call_lines.items()
        if any(file == script and begin < line <= end for file, line in places)
    }
    if {"forward", "backward"} <= inside:
        inside.add("loss")
    if {"backward", "optimiser"} <= inside:
        inside.add("after backward")
    if inside & {"forward", "backward"}:
        inside.add("compiling")
    return inside
