"""Runs someone else's training script in a process of its own, and says why it is slow.

The script runs unchanged: same interpreter, same input, output and errors. `probe` watches it from
within; this side opens the record, stops what does not end by itself, and judges.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from anysize_why.causes import judge
from anysize_why.counts import counts_json
from anysize_why.findings import Verdict, WhyError, format_verdict, in_units, to_json
from anysize_why.record import Record
from anysize_why.running import MODULE, script_text

__all__ = ["Watched", "before_and_after", "describe", "explain", "watch", "watched_json"]

NUM_STEPS, LEAST_S = 60, 5.0
"""Optimiser steps and seconds for which a script is watched unless told otherwise."""

LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "mpirun", "horovodrun", "srun", "jupyter")
"""Programs that start a script in processes of their own."""

GRACE_S = 10.0
"""Time that a script has to end once it was stopped, and again after SIGTERM."""

STARTUP_S = 600.0
"""Longest wait for a first optimiser step; longer if more seconds are asked for."""

CONTROLS_SHARE = 0.75
"""Time for the controls, of the time for the steps."""

_BOOTSTRAP = (  # As `python SCRIPT`, it has no folder of ours on its path.
    "import sys; from anysize_why.probe import main; "
    "sys.path.pop(0) if not getattr(sys.flags, 'safe_path', False) else None; main(sys.argv[1:])"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What became of a script.

    Attributes:
        script: Its path.
        code: Its own exit code; 0 where it was stopped.
        ended: "stopped" by us at the end of a step, "by itself", "killed" as it would not end, or
            "hung" as no batch came.
        first_step_s: From the import of PyTorch to the end of the first step; None without a step.
        record: What was measured.
    """

    script: Path
    code: int
    ended: str
    first_step_s: float | None
    record: Record


def watch(
    script: Path,
    arguments: Sequence[str] = (),
    *,
    num_steps: int | None = None,
    seconds: float = 120.0,
    controls: bool = True,
    module: bool = False,
) -> Watched:
    """Runs a script for some optimiser steps, or some seconds after the first.

    Args:
        script: Run as `python SCRIPT` would.
        arguments: Of the script.
        num_steps: Optimiser steps, with the first; by default 60, and as many as 5 s hold.
        seconds: Most seconds after the first step.
        module: Whether `script` is the name of a module, as for `python -m`.
        controls: Whether a copy of the net is tried when the steps are over.

    Raises:
        WhyError: There is no such script, or nothing is asked for.
    """
    if not (module or script.is_file()):
        raise WhyError(
            f"{script} starts processes of its own, and `why` watches one. Give the script that "
            "it would start; a step takes the same there but for the exchange between processes."
            if script.name in LAUNCHERS
            else f"{script} does not exist. Give the script as you would give it to python."
        )
    steps = NUM_STEPS if num_steps is None else num_steps
    if steps < 2 or seconds <= 0:
        raise WhyError(
            f"--steps is {steps} and --seconds {seconds:g}; at least 2 steps and some time are "
            "needed."
        )
    least_s = min(LEAST_S, seconds) if num_steps is None else 0.0
    controls_s = min(60.0, CONTROLS_SHARE * seconds) if controls else 0.0
    with tempfile.TemporaryFile() as file:
        command = [
            *(sys.executable, "-c", _BOOTSTRAP),
            *(str(file.fileno()), str(steps), str(seconds), str(least_s)),
            *(str(controls_s), f"{MODULE}{script}" if module else str(script)),
            *arguments,
        ]
        began = time.monotonic()
        child = subprocess.Popen(command, pass_fds=(file.fileno(),))
        lines = _Lines(file)
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # The script's own to answer.
        try:
            killed = _wait(child, lines, seconds, controls_s, began)
        finally:
            signal.signal(signal.SIGINT, previous)
            if child.poll() is None:
                child.kill()
                child.wait()
        lines.read()
    return _watched(script, child.returncode, lines.values, killed=killed)


class _Lines:
    """The record, as far as it was written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._handle = file.fileno()
        self._offset = 0
        self._rest = b""
        self.values: list[dict[str, Any]] = []
        self.kinds: dict[str, float] = {}

    def read(self) -> None:
        """Takes what is new; a line that is not whole yet waits."""
        while data := os.pread(self._handle, 1 << 20, self._offset):
            self._offset += len(data)
            *whole, self._rest = (self._rest + data).split(b"\n")
            for line in whole:
                value = json.loads(line)
                self.kinds.setdefault(value["is"], time.monotonic())
                self.values.append(value)


def _wait(
    child: subprocess.Popen[bytes], lines: _Lines, seconds: float, controls_s: float, began: float
) -> bool:
    """Waits until the script has ended; whether it had to be ended from without."""
    pause = 0.02
    while True:
        try:
            child.wait(pause)
        except subprocess.TimeoutExpired:
            pass
        else:
            return False
        lines.read()
        if time.monotonic() > _deadline(lines.kinds, seconds, controls_s, began):
            break
        pause = min(0.2, 1.5 * pause)
    for end in (child.terminate, child.kill):
        end()
        try:
            child.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            continue
        break
    return True


def _deadline(kinds: dict[str, float], seconds: float, controls_s: float, began: float) -> float:
    """When the script has had its time, by what it last wrote."""
    if "hung" in kinds:
        return kinds["hung"] + GRACE_S
    if "stopped" in kinds:
        return kinds["stopped"] + GRACE_S
    # A control that has begun takes its fewest rounds, whatever its budget.
    until_stopped = 3 * controls_s + 60.0 + GRACE_S
    for ending in ("stopping", "ended"):
        if ending in kinds:
            return kinds[ending] + until_stopped
    if "first step" in kinds:
        # The last step may be a long one, and an evaluation may lie before it.
        return kinds["first step"] + 2 * seconds + until_stopped
    return began + max(STARTUP_S, 2 * seconds)


def _watched(script: Path, code: int, lines: list[dict[str, Any]], *, killed: bool) -> Watched:
    by_kind: dict[str, dict[str, Any]] = {}
    steps = []
    for line in lines:
        if line["is"] == "step" and "stopping" not in by_kind:
            steps.append(line)
        by_kind.setdefault(line["is"], line)
    if "hung" in by_kind:
        ended, code = "hung", 128 + signal.SIGTERM
    elif killed:
        ended, code = "killed", 0 if "stopped" in by_kind else 128 + signal.SIGTERM
    elif "stopped" in by_kind:
        ended = "stopped"
    else:
        ended, code = "by itself", code if code >= 0 else 128 - code
    path = Path(by_kind.get("script", {}).get("path", script)).resolve()
    return Watched(
        script=script,
        code=code,
        ended=ended,
        first_step_s=by_kind.get("first step", {}).get("seconds"),
        record=Record(
            script=str(path),
            source=script_text(path) if path.is_file() else "",
            steps=steps,
            facts={
                **_NOTHING_KNOWN,
                **by_kind.get("facts", {}),
                "hung": by_kind.get("hung", {}),
            },
            controls=by_kind.get("controls", {}),
        ),
    )


_NOTHING_KNOWN: dict[str, Any] = {
    "num_steps": 0,
    "seen": {},
    "loaders": [],
    "lines": [],
    "syncs": [],
    "num_sync_steps": 0,
    "call_lines": {},
    "threads": 0,
    "cores": os.cpu_count() or 1,
    "device": "cpu",
    "model": None,
    "graphs": 0,
    "graphs_at_first": 0,
    "cudnn": {"benchmark": False, "deterministic": False},
    "reserved_bytes": 0,
    "reserved_bytes_at_first": 0,
    "device_waits": [],
    "worker_lines": [],
    "hung": {},
}
"""Facts of a script that was killed before it could tell."""


def explain(watched: Watched) -> Verdict:
    """The verdict.

    Raises:
        WhyError: The script trained too little to say anything; says what was seen.
    """
    if watched.ended == "killed" and not watched.record.steps:
        raise WhyError(
            f"{watched.script}: no optimiser step was seen in {STARTUP_S:g} s, and the script was "
            "ended. Only scripts that step a torch.optim optimiser can be watched."
        )
    return judge(watched.record)


def describe(watched: Watched, found: Verdict) -> str:
    """The verdict for a console, under what was done."""
    steps = len(watched.record.steps)
    how = {
        "stopped": "stopped at the end of a step",
        "by itself": f"ended by itself, exit code {watched.code}",
        "killed": "would not end when it was stopped, and was ended",
        "hung": "no further batch came, and it was ended",
    }[watched.ended]
    first = (
        "" if watched.first_step_s is None else f" The first step ({watched.first_step_s:.1f} s "
    )
    first += "after PyTorch was imported) is not counted." if first else ""
    return (
        f"anysize why {watched.script}: {steps} steps, "
        f"{1000 * found.wall_s / steps:.1f} ms each; {how}.{first}\n"
        f"{format_verdict(found, over='measurement')}{_before_and_after_in_words(watched, found)}"
    )


def before_and_after(watched: Watched, found: Verdict) -> tuple[float, float] | None:
    """Seconds of 100 samples as it is, and without the most costly cause; None where none costs."""
    steps = watched.record.steps
    samples = sum(step["shape"][0] for step in steps if step["shape"])
    if found.healthy or not found.findings[0].cost_s or not samples:
        return None
    before = 100 * found.wall_s / samples
    return before, before - 100 * found.findings[0].cost_s / samples


def _before_and_after_in_words(watched: Watched, found: Verdict) -> str:
    seconds = before_and_after(watched, found)
    if seconds is None:
        return ""
    shapes = [step["shape"] for step in watched.record.steps if step["shape"]]
    what = "images" if all(len(shape) == 4 for shape in shapes) else "samples"
    before, after = seconds
    return (
        f"\n100 {what} take {in_units(before)}; after the change of finding 1, {in_units(after)} "
        f"are expected: {before / max(after, 1e-9):.1f} times as fast."
    )


def watched_json(watched: Watched, found: Verdict) -> dict[str, Any]:
    """Verdict and raw record as plain values."""
    record = watched.record
    return {
        "script": str(watched.script),
        "ended": watched.ended,
        "exit_code": watched.code,
        "first_step_s": watched.first_step_s,
        "verdict": to_json(found),
        "seconds_of_100": before_and_after(watched, found),
        "counts": counts_json(record),
        "steps": list(record.steps),
        "facts": dict(record.facts),
        "controls": dict(record.controls),
    }
