"""State dicts in files of PyTorch and safetensors, read without running anything that they hold.

A `.pth` is a pickle, which may name any function and its arguments. PyTorch's restricted reader
(`weights_only`) builds tensors and plain containers and stops at everything else. What it does not
look at is checked here: sizes against the file, compressed or doubled records, checksums, and
objects that take memory out of all proportion.
"""

from __future__ import annotations

import argparse
import json
import pickle
import pickletools
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from anysize.errors import WeightsError

__all__ = ["TorchFile", "is_torch_file", "read_torch_file"]

MAX_HEADER_BYTES = 100_000_000
"""Of a safetensors file. Source: the limit of the safetensors library."""

MAX_SHARED_BYTES = 1 << 30
"""That tensors may have beyond the file's size, by sharing memory; each becomes a copy."""

_HOW_TO_SAVE = (
    "Save its tensors alone, in the program that made it: torch.save(model.state_dict(), "
    '"weights.pth").'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFile:
    """What a file holds.

    Attributes:
        tensors: By name; those of floating point as float32, whatever the file has. Tensors of an
            entry of a training checkpoint are called after it: "state_dict.conv1.weight".
        others: Names of what is no tensor: "epoch", "optimizer", "state_dict.version".
    """

    tensors: Mapping[str, NDArray[Any]]
    others: tuple[str, ...] = ()


class _NumPyNumber:
    """Stands for NumPy's numbers and their types, which are saved beside weights and not needed."""

    def __init__(self, *_: object) -> None:
        return

    def __setstate__(self, _: object) -> None:
        return


def is_torch_file(path: Path) -> bool:
    """Whether a file looks like one of `torch.save`, TorchScript, pickle or safetensors.

    Decided by the content. A truncated file still counts, so that reading it can say so.
    """
    return _kind(path) is not None


def read_torch_file(path: Path) -> TorchFile:
    """Reads the tensors in a `.pth` (either format of `torch.save`) or `.safetensors` file.

    Raises:
        WeightsError: No tensors by name in it, or a program's own objects, or it is damaged.
    """
    others: tuple[str, ...] = ()
    try:
        match _kind(path):
            case "safetensors":
                tensors = _read_safetensors(path)
            case "zip":
                _check_zip(path)
                tensors, others = _tables(_load(path, in_zip=True), path)
            case "pickle":
                _check_pickles(path)
                tensors, others = _tables(_load(path, in_zip=False), path)
            case None:
                raise _not_a_state_dict(path, "it is no file of PyTorch or safetensors")
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error}.") from None
    _check_sizes(tensors, path)
    arrays = {name: _as_array(name, tensor, path) for name, tensor in tensors.items()}
    return TorchFile(tensors=arrays, others=others)


def _kind(path: Path) -> Literal["zip", "pickle", "safetensors"] | None:
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except OSError:
        return None
    if start[:4] == b"PK\x03\x04":
        return "zip" if _is_torch_zip(path, start) else None
    if start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return "pickle"
    return "safetensors" if start[8:9] == b"{" else None


def _is_torch_zip(path: Path, start: bytes) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return any(n.rpartition("/")[2] == "data.pkl" for n in archive.namelist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        # Without its directory only the first record's name is left, at byte 30.
        return b"/" in start[30:] and b".npy" not in start[30:]


def _not_a_state_dict(path: Path, what: str) -> WeightsError:
    return WeightsError(f"{path} is not a state dict: {what}. Nothing was executed. {_HOW_TO_SAVE}")


def _damaged(path: Path, what: str) -> WeightsError:
    return WeightsError(f"{path} is damaged: {what}. Was it downloaded or copied whole?")


def _check_zip(path: Path) -> None:
    """`torch.save` stores every record as it is; anything else in the archive is not its own."""
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            names = [r.filename for r in records]
            if len(set(names)) < len(names):
                raise _damaged(path, "two records of its archive have the same name")
            leaves = {n.partition("/")[2] for n in names}
            if "constants.pkl" in leaves or any(n.startswith("code/") for n in leaves):
                raise _not_a_state_dict(path, "it is a TorchScript archive, which holds a program")
            if any(r.compress_type != zipfile.ZIP_STORED for r in records):
                raise _damaged(path, "its archive is compressed, which torch.save never does")
            if sum(r.file_size for r in records) > path.stat().st_size:
                raise _damaged(path, "its records together are larger than the file")
            broken = archive.testzip()
            if broken is not None:
                raise _damaged(path, f"the checksum of its record {broken} does not match")
            for name in names:
                if name.endswith("/data.pkl"):
                    with archive.open(name) as file:
                        _check_pickle(file, path)
    except (zipfile.BadZipFile, ValueError, EOFError, RuntimeError) as error:
        raise _damaged(path, f"its archive cannot be read ({_first_line(error)})") from None


def _check_pickles(path: Path) -> None:
    """The older format is pickles in a row: magic number, version, machine, objects, keys."""
    with path.open("rb") as file:
        for _ in range(5):
            _check_pickle(file, path)


def _check_pickle(file: IO[bytes], path: Path) -> None:
    """Refuses what the restricted reader allows and no state dict needs: `bytearray(10**10)`."""
    try:
        for opcode, argument, _ in pickletools.genops(file):
            if opcode.name == "GLOBAL" and str(argument).endswith(" bytearray"):
                raise _not_a_state_dict(path, "it holds a bytearray")
    except (ValueError, MemoryError, OverflowError):
        return  # Reading it proper says what is wrong.


def _load(path: Path, *, in_zip: bool) -> object:
    try:
        # Training scripts save their arguments and scores beside the weights. A Namespace is
        # nothing but named values; NumPy itself is not called.
        scores = [
            (_NumPyNumber, name)
            for name in (
                "numpy.dtype",
                "numpy.core.multiarray.scalar",
                "numpy._core.multiarray.scalar",
            )
        ]
        with (
            torch.serialization.safe_globals([argparse.Namespace, *scores]),
            warnings.catch_warnings(action="ignore"),
        ):
            # Mapped, optimiser states and the like are never read.
            return torch.load(path, map_location="cpu", weights_only=True, mmap=in_zip)
    except OSError:
        raise
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL `?([\w.]+)", str(error))
        what = f"objects of `{found[1]}`" if found else "objects that are not tensors"
        raise _not_a_state_dict(path, f"it holds {what}, which are a program's own") from None
    except Exception as error:  # noqa: BLE001 - a broken pickle can raise anything.
        raise _damaged(path, f"PyTorch cannot read it ({_first_line(error)})") from None


def _first_line(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    return text.splitlines()[0][:200]


def _tables(loaded: object, path: Path) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The tensors of a state dict, or of the entries of a checkpoint; and what is not a tensor."""
    if not isinstance(loaded, Mapping):
        raise _not_a_state_dict(path, f"it holds a {type(loaded).__name__}")
    entries: dict[str, object] = {}
    for key, value in loaded.items():
        if isinstance(key, str) and isinstance(value, Mapping) and any(_named_tensors(value)):
            found = {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            found = {str(key): value if isinstance(key, str) else None}
        if twice := found.keys() & entries.keys():
            raise _not_a_state_dict(path, f"it holds two entries called {min(twice)[:80]}")
        entries |= found
    tensors = {name: value for name, value in entries.items() if isinstance(value, Tensor)}
    if not tensors:
        some = ", ".join(name[:60] for name in list(entries)[:6]) or "nothing"
        raise _not_a_state_dict(path, f"among its entries ({some}) is no table of tensors by name")
    return tensors, tuple(name for name in entries if name not in tensors)


def _named_tensors(table: Mapping[Any, Any]) -> Iterator[str]:
    return (n for n, t in table.items() if isinstance(n, str) and isinstance(t, Tensor))


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    _check_header(path)
    try:
        with safe_open(path, framework="pt") as file:  # pyright: ignore[reportArgumentType]
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise _damaged(path, f"safetensors cannot read it ({_first_line(error)})") from None


def _check_header(path: Path) -> None:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(path.stat().st_size - 8, MAX_HEADER_BYTES):
            raise _damaged(path, f"its header is said to be {length} bytes long")
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is invalid ({_first_line(error)})") from None
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    if isinstance(metadata, dict) and str(metadata.get("format")).startswith("anysize-"):
        raise WeightsError(f"{path} is a file of Anysize already. Use it as it is.")


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for name, value in pairs:
        if name in seen:
            raise ValueError(f"the name {name[:80]!r} occurs twice")
        seen[name] = value
    return seen


def _check_sizes(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Views may claim any size without a byte behind them; a copy would be made of it all."""
    claimed = sum(t.numel() * t.element_size() for t in tensors.values())
    size = path.stat().st_size
    if claimed > size + MAX_SHARED_BYTES:
        raise WeightsError(
            f"{path} has {size:,} bytes, but its tensors claim {claimed:,}, so they share memory "
            "or repeat it. Save copies: torch.save({n: t.clone() for n, t in "
            'model.state_dict().items()}, "weights.pth").'
        )


def _as_array(name: str, tensor: Tensor, path: Path) -> NDArray[Any]:
    if (
        tensor.layout != torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.is_meta
        or tensor.is_complex()
    ):
        raise WeightsError(
            f"{name} in {path} is not a plain tensor of numbers (quantised, sparse or the like). "
            "Save the weights of the net as it was trained."
        )
    if tensor.is_floating_point():
        tensor = tensor.detach().to(torch.float32)
    # A copy, since the file that it is mapped from may change.
    return np.array(tensor.detach().contiguous().numpy())
