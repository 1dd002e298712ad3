"""Settings of the process, each in a process of its own, beside one without them."""

import subprocess
import sys

import pytest
import torch

from anysize.device import is_out_of_memory, require_precision, select_device, set_tf32
from anysize.errors import DeviceError

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


@pytest.mark.parametrize(
    ("text", "means_memory"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB", True),
        ("CUDA error: out of memory", True),
        ("MPS backend out of memory (MPS allocated: 1 GB)", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", True),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes", True),
        ("could not create a primitive", True),
        ("could not create a primitive descriptor for a convolution", False),
        ("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", False),
        ("CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_memory_that_ran_out_is_known_by_its_words(text, means_memory):
    assert is_out_of_memory(RuntimeError(text)) == means_memory
    assert not is_out_of_memory(ValueError(text))


def test_bf16_is_refused_on_a_gpu_without_units_for_it(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla V100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 0))
    with pytest.raises(DeviceError, match=r"Tesla V100 has compute capability 7\.0; bf16 needs 8"):
        require_precision(gpu, "bf16")
    require_precision(gpu, "float32")
    require_precision(torch.device("cpu"), "bf16")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    require_precision(gpu, "bf16")


def test_apples_gpu_is_a_device_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="Apple's GPU was asked for"):
        select_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert select_device("mps").type == "mps"


def test_float32_means_float32_unless_tf32_is_asked_for():
    set_tf32(True)
    assert (torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()) == (True, "high")
    select_device("cpu")
    allowed = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    assert allowed == (False, "highest")


def test_each_rank_takes_the_gpu_of_its_number(monkeypatch):
    torchrun = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "a"}
    for name, value in {**torchrun, "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    taken = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert select_device("auto") == torch.device("cuda", 1)
    assert taken == [1]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(DeviceError, match="Rank 1 of this machine has no GPU of its own"):
        select_device("auto")
    assert select_device("cpu").type == "cpu"
