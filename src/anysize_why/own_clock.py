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
        begin, end: Lines between which it measures; `begin` is 0 where that is not known.
    """

    part: str
    begin: int
    end: int

    def shows(self, seconds: float) -> float:
        """What it shows of a duration, in seconds."""
        return seconds % 1 if self.part == "microseconds" else float(int(seconds % 86400))


def suspects(source: str) -> list[Timed]:
    """The places where `.microseconds` or `.seconds` of a difference of clock times is read.

    Wherever it is read: of a name, in an argument, in a helper that is given the difference or the
    time at which it began. `.microseconds` is read of nothing else, so its place is named even
    where it is not known what is timed (`begin` is 0).
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    flow = _Flow(tree)
    found: set[Timed] = set()
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Attribute) and node.attr in PARTS):
            continue
        if not isinstance(node.ctx, ast.Load) or _uses_whole(tree, node):
            continue
        places = flow.places(node)
        if not places and node.attr == "microseconds" and "datetime" in source:
            places = [(0, node.lineno)]
        found |= {Timed(node.attr, begin, end) for begin, end in places}
    return sorted(found, key=lambda timed: (timed.end, timed.begin))


class _Flow:
    """Which names hold times of a clock, and which their differences, through calls of functions.

    Attributes:
        clocks: Lines in which a name is given the time, by the name's text.
        differences: Line and name of the time that is subtracted, by the name's text.
    """

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._functions = {
            node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
        }
        self._calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        self._inside = {
            id(inner): function
            for function in self._functions.values()
            for inner in ast.walk(function)
        }
        self.clocks: dict[str, list[int]] = {}
        self.differences: dict[str, tuple[int, str]] = {}
        assigned = [
            (target, node.value)
            for node in ast.walk(tree)
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and node.value
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        ]
        for _ in range(3):  # As deep as helpers call each other.
            for target, value in assigned:
                self._note(ast.unparse(target), value)
            for call in self._calls:
                for name, value in self._arguments(call):
                    self._note(name, value)

    def _note(self, name: str, value: ast.expr) -> None:
        if _is_clock(value):
            lines = self.clocks.setdefault(name, [])
            lines += [value.lineno] if value.lineno not in lines else []
        elif found := self.difference(value):
            self.differences[name] = found

    def _arguments(self, call: ast.Call) -> list[tuple[str, ast.expr]]:
        """The parameters of a function of the script, with what a call gives them."""
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
        function = self._functions.get(name)
        if function is None:
            return []
        names = [argument.arg for argument in function.args.args]
        names = names[1:] if names[:1] in (["self"], ["cls"]) else names
        by_name = [(keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg]
        return [*zip(names, call.args, strict=False), *by_name]

    def difference(self, value: ast.expr) -> tuple[int, str] | None:
        """Line and name of the time that is subtracted, if it is a difference of clock times."""
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Sub):
            left, right = ast.unparse(value.left), ast.unparse(value.right)
            if _is_clock(value.left) or left in self.clocks or right in self.clocks:
                return value.lineno, right
        if isinstance(value, ast.Call):
            name = ast.unparse(value.func).rpartition(".")[2]
            returned = [
                found
                for node in ast.walk(self._functions.get(name, ast.Module([], [])))
                if isinstance(node, ast.Return) and node.value
                if (found := self.difference(node.value))
            ]
            given = {name: ast.unparse(argument) for name, argument in self._arguments(value)}
            return next(((value.lineno, given.get(began, began)) for _, began in returned), None)
        return self.differences.get(ast.unparse(value))

    def places(self, node: ast.Attribute) -> list[tuple[int, int]]:
        """Lines between which the read part of a difference measures."""
        found = self.difference(node.value)
        if found is None:
            return []
        end, began = found
        function = self._inside.get(id(node))
        if function is not None and began in [a.arg for a in function.args.args]:
            given = [
                (call.lineno, ast.unparse(value))
                for call in self._calls
                for name, value in self._arguments(call)
                if name == began and self._inside.get(id(call)) is not function
            ]
        else:
            given = [(end, began)]
        return [
            (self._begin(lines, end), end)
            for end, began in given
            if (lines := self.clocks.get(began, []))
        ]

    def _begin(self, lines: list[int], end: int) -> int:
        """Which of the lines in which a clock is read comes before a line, round by round."""
        scope = scope_of(self._tree, end)
        near = [line for line in lines if scope_of(self._tree, line) == scope] or lines
        return max([line for line in near if line < end] or near)


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


def _uses_whole(tree: ast.Module, node: ast.Attribute) -> bool:
    """Whether the other part is read as well, so that nothing is dropped."""
    # What a name holds stays the same in a function; the clock's time only in a statement.
    named = isinstance(node.value, (ast.Name, ast.Attribute))
    kinds = (ast.FunctionDef, ast.Lambda) if named else (ast.stmt,)
    around = [
        scope
        for scope in ast.walk(tree)
        if isinstance(scope, kinds) and any(inner is node for inner in ast.walk(scope))
    ]
    innermost = min(around, key=lambda f: (f.end_lineno or f.lineno) - f.lineno, default=tree)
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
    """(shown, true) seconds of each step between the two lines; empty where no stage lies there.

    A clock that is read further down than the difference is taken measures whole rounds of a loop.
    """
    if timed.begin >= timed.end:
        return [(timed.shows(step["wall_s"]), step["wall_s"]) for step in steps]
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
