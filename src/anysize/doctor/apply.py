"""Writes what a diagnosis would change into a new `run.toml`, beside the old one.

The file is changed line by line, so that a person's comments and order stay. It opens with what an
epoch took and should take; a diagnosis of the new file says what came of it.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anysize.atomic_files import write_atomic
from anysize.doctor.measure import Subject
from anysize.errors import DoctorError
from anysize.training.settings import MAY_CHANGE
from anysize_why.findings import Finding

__all__ = ["Promise", "changes_of", "faster_file", "read_promise", "with_settings", "write_faster"]

PATHS = ("data.root", "plan.file", "train.run", "train.weights")
_PROMISE = re.compile(
    r"# anysize doctor: an epoch took ([0-9.]+) s; with these changes ([0-9.]+) s are expected\."
)


@dataclass(frozen=True, slots=True)
class Promise:
    """Seconds of an epoch: before the changes of a file, and as they were expected."""

    before_s: float
    expected_s: float


def faster_file(subject: Subject, given: Path | None) -> Path:
    """Where the changed file goes: where it was asked for, or beside the file or the run folder.

    Raises:
        DoctorError: It already exists, its folder does not, or it is not named `.toml`.
    """
    path = given
    if path is None and subject.run is not None:
        path = subject.run.parent / f"{subject.run.name}-faster.toml"
    elif path is None:
        path = subject.source.with_name(f"{subject.source.stem}-faster.toml")
    if path.suffix != ".toml":
        raise DoctorError(f"--apply is {path}; the file of a run ends with .toml.")
    if path.exists():
        raise DoctorError(
            f"{path} already exists and is never overwritten. Remove it, or name another file "
            "with --apply."
        )
    if not path.parent.is_dir():
        raise DoctorError(f"There is no folder {path.parent} to write {path.name} to. Make it.")
    return path


def changes_of(findings: Sequence[Finding]) -> list[tuple[str, Any]]:
    """All keys that the findings would change, the most costly finding first."""
    changes: dict[str, Any] = {}
    for finding in findings:
        for key, value in finding.settings:
            changes.setdefault(key, value)
    return list(changes.items())


def write_faster(
    subject: Subject, findings: Sequence[Finding], path: Path, *, promise: Promise
) -> str:
    """Writes the changed file; says in a sentence how to go on with it.

    Args:
        subject: What was diagnosed.
        findings: Their settings are applied.
        path: Of `faster_file`.
        promise: Written into the file for a later diagnosis.

    Raises:
        DoctorError: The file cannot be changed line by line.
        OSError: It cannot be written.
    """
    text = subject.source.read_text(encoding="utf-8")
    changes = changes_of(findings)
    all_may_change = all(key in MAY_CHANGE for key, _ in changes)
    goes_on = subject.run is not None and all_may_change
    run = subject.folder
    settings = [*_paths_elsewhere(subject, path), *changes]
    if goes_on:
        settings.append(("train.run", str(run)))  # It may have moved.
    elif run.is_dir() and any(run.iterdir()):
        settings.append(("train.run", f"{run}-faster"))
    said = "\n".join(f"#   {key} = {json.dumps(value)}" for key, value in changes)
    head = (
        f"# anysize doctor: an epoch took {promise.before_s:.3f} s; with these changes "
        f"{promise.expected_s:.3f} s are expected.\n{said}\n\n"
    )
    text = _PROMISE.sub("# An earlier diagnosis was here.", text)
    write_atomic(path, (head + with_settings(text, settings, str(subject.source))).encode())
    if goes_on:
        return f"Wrote {path}. Go on with: anysize train {path} --resume"
    return f"Wrote {path}. Start with: anysize train {path}"


def read_promise(path: Path) -> Promise | None:
    """What `write_faster` promised in a file, if it made the file."""
    found = _PROMISE.match(path.read_text(encoding="utf-8"))
    return Promise(float(found[1]), float(found[2])) if found else None


def with_settings(text: str, settings: Sequence[tuple[str, Any]], source: str) -> str:
    """A TOML file with some keys set; all else, comments too, stays.

    Args:
        text: Of the file.
        settings: `section.key` and value; the last of a key counts.
        source: Names the file in messages.

    Raises:
        DoctorError: The file is written in a way that this cannot change.
    """
    wanted = tomllib.loads(text)
    lines = text.splitlines()
    for name, value in dict(settings).items():
        section, key = name.split(".")
        wanted.setdefault(section, {})[key] = value
        _set(lines, section, key, json.dumps(value, ensure_ascii=False))
    changed = "\n".join(lines) + "\n"
    try:
        came_out = tomllib.loads(changed)
    except tomllib.TOMLDecodeError:
        came_out = None
    if came_out != wanted:
        by_hand = ", ".join(f"{name} = {json.dumps(value)}" for name, value in settings)
        raise DoctorError(
            f"{source} is written in a way that cannot be changed line by line. Set by hand: "
            f"{by_hand}."
        )
    return changed


def _set(lines: list[str], section: str, key: str, value: str) -> None:
    """Sets a key in its section, or adds the key, or the section."""
    header = re.compile(rf"\s*\[\s*{section}\s*\]\s*(#.*)?$")
    start = next((i for i, line in enumerate(lines) if header.match(line)), None)
    if start is None:
        lines += ["", f"[{section}]", f"{key} = {value}"]
        return
    own = re.compile(rf"(\s*{key}\s*=\s*)[^#]*?(\s*#.*)?$")
    for i in range(start + 1, len(lines)):
        if lines[i].lstrip().startswith("["):
            break
        found = own.match(lines[i])
        if found:
            lines[i] = f"{found[1]}{value}{found[2] or ''}"
            return
    lines.insert(start + 1, f"{key} = {value}")


def _paths_elsewhere(subject: Subject, path: Path) -> list[tuple[str, Any]]:
    """Paths made whole where the new file is in another folder."""
    if path.resolve().parent == subject.source.resolve().parent:
        return []
    whole = {
        name: getattr(getattr(subject.config, section), key)
        for name in PATHS
        for section, key in [name.split(".")]
    }
    return [(name, value) for name, value in whole.items() if value]
