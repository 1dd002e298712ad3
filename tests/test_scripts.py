"""The scripts that print the figures of the documents run; the figures are not judged here."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


def run(name, *arguments):
    done = subprocess.run(
        [sys.executable, SCRIPTS / name, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_speed_of_the_check_is_printed_beside_bare_decoding():
    said = run("check_speed.py", "--photos", 8, "--rounds", 1)
    assert re.search(r"\d+ photos/s", said), said


@pytest.mark.slow
def test_the_turned_masks_that_are_seen_are_counted():
    said = run("check_rotation.py", "--crops", 20)
    assert "%" in said, said
