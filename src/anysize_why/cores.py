"""How many cores a process has."""

from __future__ import annotations

import os
from pathlib import Path


def num_cores() -> int:
    """Cores that this process may use, whatever the machine has."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):
        return cores
