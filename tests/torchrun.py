"""Processes that `torchrun` starts, for tests."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def command(num_ranks, *arguments):
    """The command line that starts so many ranks."""
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}")
    return [sys.executable, *launcher, *map(str, arguments)]


def environment():
    """One thread a rank, and the tests' own modules within reach."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}  # noqa: TID251


def torchrun(num_ranks, *arguments, cwd=ROOT, code=0, timeout=300):
    """Runs a script or module on some ranks; gives all that they printed."""
    done = subprocess.run(
        command(num_ranks, *arguments),
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr
