"""Settings of the process, each in a process of its own, beside one without them."""

import subprocess
import sys

import pytest
import torch

MANY_SHAPES = """
import torch
{prepare}
weights = torch.zeros(16, 16, 3, 3, dtype=torch.bfloat16)
images = [torch.zeros(1, 16, 3, n, dtype=torch.bfloat16) for n in range(3, 403)]
for image in images:
    torch.conv2d(image, weights)
with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON_CREATION):
    for image in images[:20]:
        torch.conv2d(image, weights)
"""

FREED = """
from pathlib import Path
import torch
{prepare}
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1])
before = resident()
for _ in range(2):
    held = [torch.ones(1 << 20) for _ in range(64)]
    del held
print(resident() - before)
"""

PREPARE = "from anysize.device import prepare_process; prepare_process()"


def printed(script: str, prepare: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script.format(prepare=prepare)],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    return done.stdout


with_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="about oneDNN")


@with_onednn
def test_kernels_of_many_shapes_are_kept():
    assert printed(MANY_SHAPES, "").count("cache_miss") > 20
    assert printed(MANY_SHAPES, PREPARE).count("cache_miss") == 0


@with_onednn
def test_a_capacity_of_the_environment_stays():
    few = printed(MANY_SHAPES, PREPARE, ONEDNN_PRIMITIVE_CACHE_CAPACITY="10")
    assert few.count("cache_miss") > 20


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="about glibc")
def test_what_a_step_frees_is_kept_for_the_next():
    # The system may take pages from an idle process, so the two are held against each other.
    pages = 64 * (1 << 22) // 4096
    # glibc's own default, written down: left alone, it grows with the first tensor that is freed,
    # and where the heap happens to end then decides whether anything goes back.
    default = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
    kept, given_back = (int(printed(FREED, code, **default)) for code in (PREPARE, ""))
    assert kept > given_back + pages / 4
