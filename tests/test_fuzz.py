"""Damaged files of every kind; scripts/fuzz.py says what counts as a failure."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "fuzz.py"


def fuzz(*arguments):
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_damaged_files_are_refused_by_name(count):
    done = fuzz("--count", str(count))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{count} mutated files, 0 failures." in done.stdout


def test_a_reader_that_crashes_hangs_or_does_not_name_the_file_is_seen(tmp_path):
    """The control: readers that are broken on purpose, in a copy of the script."""
    (tmp_path / "fuzz.py").write_text(SCRIPT.read_text())
    (tmp_path / "fuzz_kinds.py").write_text(BROKEN_KINDS)
    done = subprocess.run(
        [sys.executable, tmp_path / "fuzz.py", "--count", "10"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "10 mutated files, 10 failures." in done.stdout
    for seen in ("ValueError", "died", "does not name", "MB of memory", "s of computing"):
        assert seen in done.stdout


BROKEN_KINDS = """
import os
from dataclasses import dataclass

from anysize.errors import DataError


@dataclass
class Kind:
    name: str
    make: object
    read: object
    named: str = "nothing of the kind"

    def targets(self, folder):
        return sorted(folder.iterdir())


def _note(folder):
    (folder / "note.txt").write_text("whole 12345678 and long enough to be changed")
    return folder / "note.txt"


def _if_mutated(act):
    def read(path):
        if path.read_text(errors="replace") != "whole 12345678 and long enough to be changed":
            act()

    return read


def _raise(error):
    raise error


def _compute():
    import time

    until = time.process_time() + 2.2
    while time.process_time() < until:
        pass


KINDS = (
    Kind("error", _note, _if_mutated(lambda: _raise(ValueError("x")))),
    Kind("death", _note, _if_mutated(lambda: os.kill(os.getpid(), 9))),
    Kind("nameless", _note, _if_mutated(lambda: _raise(DataError("something is wrong")))),
    Kind("memory", _note, _if_mutated(lambda: bytearray(600 << 20).count(1))),
    Kind("slow", _note, _if_mutated(_compute)),
)
"""
