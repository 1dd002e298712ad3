"""The machine: which device a run uses, how it computes, and how much memory it took."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from contextlib import AbstractContextManager
from typing import Literal

import torch

from anysize.config import DeviceName
from anysize.errors import DeviceError

Precision = Literal["float32", "bf16"]


_PRIMITIVES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
_MOST_PRIMITIVES = 65_536
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
"""Parameters of glibc's mallopt."""


def prepare_process() -> None:
    """Settings of the whole process for steps on many canvases; to be called before the first.

    - oneDNN keeps 1,024 kernels. A canvas of ResNet-50 needs over a hundred, so from ten canvases
      on each visit would make them anew, for some 45 ms. `ONEDNN_PRIMITIVE_CACHE_CAPACITY`, if
      the environment has it, stays.
    - glibc gives what a step frees back to the system, and the next step takes it anew, page by
      page: 3 to 8% of a step. It keeps up to 2 GiB now. Other C libraries are left alone.

    Sources: oneDNN's "Primitive Cache"; mallopt(3). Figures: docs/log.md, 2026-11-30.
    """
    os.environ.setdefault(_PRIMITIVES, str(_MOST_PRIMITIVES))  # noqa: TID251
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
        mallopt(_M_TOP_PAD, 64 << 20)


_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launched_ranks() -> int:
    """How many processes `torchrun` started together; 1 without it."""
    found = [os.environ.get(name, "") for name in _OF_TORCHRUN]  # noqa: TID251
    return int(found[2]) if all(found) else 1


def select_device(name: DeviceName) -> torch.device:
    """The device that `train.device` names; of several GPUs, that of this rank on its machine.

    Raises:
        DeviceError: A GPU was asked for and there is none, or none for this rank.
    """
    set_tf32(False)
    if name == "mps":
        if not torch.backends.mps.is_available():
            raise DeviceError(
                "Apple's GPU was asked for (mps), and PyTorch finds none. Set the device to auto."
            )
        return torch.device("mps")
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise DeviceError(
            "A GPU was asked for (train.device or --device is cuda), and PyTorch finds none. "
            "Install a CUDA build of PyTorch, or set the device to auto or cpu."
        )
    if not available or name == "cpu":
        return torch.device("cpu")
    if launched_ranks() == 1:
        return torch.device("cuda")
    local = int(os.environ["LOCAL_RANK"])  # noqa: TID251
    if local >= torch.cuda.device_count():
        raise DeviceError(
            f"Rank {local} of this machine has no GPU of its own: PyTorch finds "
            f"{torch.cuda.device_count()}. Start as many processes per machine as it has GPUs "
            "(torchrun --nproc-per-node), or set the device to cpu."
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


_BF16_CAPABILITY = (8, 0)
"""Compute capability of the first NVIDIA GPUs with bf16 units (Ampere)."""


def require_precision(device: torch.device, precision: Precision) -> None:
    """Refuses bf16 on a GPU that has no units for it, where it would be emulated or fail late.

    Raises:
        DeviceError: The GPU is too old for bf16.
    """
    if device.type != "cuda" or precision != "bf16":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < _BF16_CAPABILITY:
        raise DeviceError(
            f"{torch.cuda.get_device_name(device)} has compute capability "
            f"{'.'.join(map(str, capability))}; bf16 needs 8.0. Set train.precision (or "
            "--precision) to float32."
        )


def set_tf32(allowed: bool) -> None:
    """Whether float32 convolutions and products on GPUs may round their inputs to 10 bits (TF32).

    PyTorch allows it for convolutions by default; here "float32" means float32.
    """
    torch.backends.cudnn.allow_tf32 = allowed
    torch.set_float32_matmul_precision("high" if allowed else "highest")


def computing(device: torch.device, precision: Precision) -> AbstractContextManager[object]:
    """The context that forward passes run in: autocast for "bf16", nothing for "float32"."""
    if precision == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()


def synchronise(device: torch.device) -> None:
    """Waits until the device has done what it was given, so that a clock tells the truth."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory held so far: resident memory of the process, or allocations on a GPU.

    0 on systems that do not tell (Windows).
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows has no such module.
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


_OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "std::bad_alloc",
    "could not create a memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "CUFFT_ALLOC_FAILED",
    "cudaErrorMemoryAllocation",
)
"""Of PyTorch's allocators, of oneDNN, and of CUDA's libraries, which raise plain RuntimeErrors."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a GPU or in the process.

    Source: the messages of PyTorch's allocators, of oneDNN, cuBLAS, cuDNN and cuFFT.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    said = str(error)
    if said == "could not create a primitive":
        # oneDNN found no room for its code. Words behind these say that it knows no such primitive.
        return isinstance(error, RuntimeError)
    return isinstance(error, RuntimeError) and any(words in said for words in _OUT_OF_MEMORY)


def release_memory(device: torch.device) -> None:
    """Gives the memory that PyTorch keeps for later back to the device, after some ran out."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
