"""Finds timers in a script that drop whole seconds, and what they would have shown.

From the source text and the measured stages; nothing is run.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Timed", "shown_by", "suspects"]

PARTS = ("microseconds", "seconds")
CLOCKS = ("now", "utcnow", "today")


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
    inside = {
        stage
        for stage, places in call_lines.items()
        if any(file == script and timed.begin < line <= timed.end for file, line in places)
    }
    if {"forward", "backward"} <= inside:
        inside.add("loss")
    if {"backward", "optimiser"} <= inside:
        inside.add("after backward")
    if inside & {"forward", "backward"}:
        inside.add("compiling")
    true = [sum(step["stages"].get(stage, 0.0) for stage in inside) for step in steps]
    return [(timed.shows(seconds), seconds) for seconds in true] if inside else []
