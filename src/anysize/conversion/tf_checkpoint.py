"""Reads TensorFlow checkpoints without TensorFlow, and without trusting the file.

Both versions keep their records in a sorted table (LevelDB's format: blocks of keys that share
prefixes, each block with a checksum, an index block, a footer of 48 bytes with a magic number):

- V1, one file: the record of the empty key lists all tensors, every other record is one tensor, or
  a slice of one, as a protobuf message.
- V2: `PREFIX.index` is such a table; its records say where a tensor lies in the data files,
  `PREFIX.data-00000-of-00001` and so on. A partitioned variable has a record, and one a slice.

Whatever a file claims is held against its size before anything is allocated, and checksums are
verified. No torch here.

Sources: LevelDB `doc/table_format.md`; TensorFlow `core/util/saved_tensor_slice.proto`,
`core/protobuf/tensor_bundle.proto`, `core/framework/tensor.proto`, `core/lib/strings/ordered_code`.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from anysize.errors import WeightsError

__all__ = ["TfCheckpoint", "is_tf_checkpoint", "read_tf_checkpoint"]

MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
FOOTER_BYTES = 48
TRAILER_BYTES = 5  # of a block: its compression, its checksum
NEWEST_VERSION = 1  # of both formats, since they exist

# Real checkpoints stay far below these. They keep a small file from asking for much memory: a
# protobuf message of two bytes takes a hundred when it is parsed, a key may repeat the one before.
MAX_HEADER_BYTES = 1 << 24
MAX_INDEX_BYTES = 1 << 23
MAX_PACKED_BYTES = 1 << 24
MAX_ENTRY_BYTES = 1 << 20
MAX_SLICE_BYTES = 1 << 13
MAX_KEYS_BYTES = 1 << 26
MAX_RANK = 32  # numpy's
MAX_VALUES = 1 << 48  # numpy counts bytes in 63 bits, of empty arrays too

_DATA_SUFFIX = re.compile(r"\.data-(\d{5})-of-(\d{5})$")
_V1_SHARD_SUFFIX = re.compile(r"-(\d{5})-of-(\d{5})$")

DTYPES = {
    1: "float32",
    2: "float64",
    3: "int32",
    4: "uint8",
    5: "int16",
    6: "int8",
    7: "string",
    8: "complex64",
    9: "int64",
    10: "bool",
    11: "qint8",
    12: "quint8",
    13: "qint32",
    14: "bfloat16",
    15: "qint16",
    16: "quint16",
    17: "uint16",
    18: "complex128",
    19: "half",
    20: "resource",
    21: "variant",
    22: "uint32",
    23: "uint64",
}
"""TensorFlow's numbers of types. Source: `core/framework/types.proto`."""

_STORED = {
    1: np.dtype("<f4"),
    2: np.dtype("<f8"),
    3: np.dtype("<i4"),
    9: np.dtype("<i8"),
    14: np.dtype("<u2"),
    19: np.dtype("<f2"),
}
"""Types that are decoded, as V2 stores them; bfloat16 as the upper half of a float32."""

_V1_FIELDS = {1: "float_val", 2: "double_val", 3: "int_val", 9: "int64_val", 19: "half_val"}

# Messages by name: fields as (name, number, type), "*" for repeated. Only what is read. Enums are
# read as int32. Packed numbers are read as the bytes that they are on the wire, for numpy to
# decode; so are inner messages whose size is looked at before they are parsed.
_MESSAGES: dict[str, tuple[tuple[str, int, str], ...]] = {
    "Versions": (("producer", 1, "int32"), ("min_consumer", 2, "int32")),
    "Dim": (("size", 1, "int64"),),
    "Shape": (("dim", 2, "Dim*"), ("unknown_rank", 3, "bool")),
    "Extent": (("start", 1, "int64"), ("length", 2, "int64")),
    "Slice": (("extent", 1, "Extent*"),),
    "SavedTensorSlices": (("meta", 1, "bytes"), ("data", 2, "SavedSlice")),
    "SavedTensorSliceMeta": (("tensor", 1, "SavedSliceMeta*"), ("versions", 2, "Versions")),
    "SavedSliceMeta": (
        ("name", 1, "bytes"),
        ("shape", 2, "Shape"),
        ("type", 3, "int32"),
        ("slice", 4, "Slice*"),
    ),
    "SavedSlice": (("name", 1, "bytes"), ("slice", 2, "bytes"), ("data", 3, "bytes")),
    "TensorProto": (
        ("tensor_content", 4, "bytes"),
        ("float_val", 5, "bytes"),
        ("double_val", 6, "bytes"),
        ("int_val", 7, "bytes"),
        ("int64_val", 10, "bytes"),
        ("half_val", 13, "bytes"),
    ),
    "BundleHeader": (
        ("num_shards", 1, "int32"),
        ("endianness", 2, "int32"),
        ("version", 3, "Versions"),
    ),
    "BundleEntry": (
        ("dtype", 1, "int32"),
        ("shape", 2, "Shape"),
        ("shard_id", 3, "int32"),
        ("offset", 4, "int64"),
        ("size", 5, "int64"),
        ("crc32c", 6, "fixed32"),
        ("slices", 7, "Slice*"),
    ),
}

Extent = tuple[int, int]
"""Start and length along one axis; a length of -1 is all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TfCheckpoint:
    """A checkpoint that was read whole, checksums verified.

    Attributes:
        path: The V1 file, or the index file of V2.
        version: Of the format.
        tensors: Name to value: float32, float64, int32, int64 and half as they are, bfloat16 as
            float32. Read-only.
        undecoded: Name to type, of tensors of other types (strings, booleans, ...).
    """

    path: Path
    version: Literal["V1", "V2"]
    tensors: Mapping[str, NDArray[Any]]
    undecoded: Mapping[str, str]


def is_tf_checkpoint(path: Path) -> bool:
    """Whether `path` is a TensorFlow checkpoint, whole or damaged, or a file that goes with one.

    Tells by the content: the magic number at the end, or the first record where the end is lost.
    A V2 checkpoint may be given as its prefix, its index or one of its data files. Its `.meta` file
    and the folder's text file `checkpoint` count too, so that `read_tf_checkpoint` can say what to
    give instead.
    """
    try:
        return _is_around_a_checkpoint(path) or any(
            c.is_file() and _looks_like_a_table(c) for c in (path, _index_of(path))
        )
    except OSError:  # it may not be read
        return False


def read_tf_checkpoint(path: Path) -> TfCheckpoint:
    """Reads all tensors of a checkpoint.

    Args:
        path: A V1 file; or of V2 the prefix, the index file or a data file.

    Raises:
        WeightsError: No such file, not a checkpoint, damaged, a part of it is missing, or a library
            that it takes is not installed.
    """
    table_path = _table_path(path)
    _messages()
    _crc32c()
    table = _read(table_path)
    records = _records(table, table_path)
    key, header = next(records, (b"", b""))
    if key or not header:
        raise _damaged(table_path, "its first record is not the header")
    if header[0] == 0x0A:  # field 1 is a message in V1's header, a number in V2's
        _refuse_v1_shards(table_path)
        return _read_v1(table_path, header, records)
    return _read_v2(table_path, header, records)


def _is_around_a_checkpoint(path: Path) -> bool:
    if path.is_dir():
        return (path / "checkpoint").is_file()
    if _DATA_SUFFIX.search(path.name):
        return True
    if path.suffix == ".meta":
        return path.is_file() and any(path.with_suffix(s).is_file() for s in (".index", ""))
    return path.is_file() and _is_state_file(path)


def _is_state_file(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(23) == b"model_checkpoint_path: "


def _looks_like_a_table(path: Path) -> bool:
    with path.open("rb") as file:
        # The first record: shares no key, has none, a length, then field 1 of the header.
        if re.match(rb"\x00\x00[\x80-\xff]{0,4}[\x01-\x7f][\x0a\x08]", file.read(8)):
            return True
        size = path.stat().st_size
        file.seek(max(size - len(MAGIC), 0))
        return file.read() == MAGIC


def _index_of(path: Path) -> Path:
    """The index file of V2 where `path` is the prefix, the index or a data file."""
    if path.suffix == ".index":
        return path
    return path.with_name(_DATA_SUFFIX.sub("", path.name) + ".index")


def _table_path(path: Path) -> Path:
    if path.is_dir():
        raise WeightsError(
            f"{path} is a folder. Give a checkpoint inside it: a `.ckpt` file (V1), or the name "
            "before `.index` (V2)."
        )
    if path.suffix == ".meta":
        raise WeightsError(
            f"{path} holds a graph, not its weights. Give {path.with_suffix('')}, with its "
            "`.index` and `.data-...` files beside it."
        )
    if path.is_file() and not _DATA_SUFFIX.search(path.name):
        if _is_state_file(path):
            raise WeightsError(
                f"{path} only says which checkpoint is the latest. Give the one that it names."
            )
        return path
    index = _index_of(path)
    if index.is_file():
        return index
    if path.is_file():
        raise WeightsError(
            f"{path} is the data of a V2 checkpoint, and {index} is missing. Copy it there too."
        )
    raise WeightsError(f"No such file: {path}, nor {index}.")


def _refuse_v1_shards(path: Path) -> None:
    shard = _V1_SHARD_SUFFIX.search(path.name)
    if shard and int(shard[2]) > 1:
        raise WeightsError(
            f"{path} is one of {int(shard[2])} parts of a sharded V1 checkpoint, which are not "
            "read. Restore it in TensorFlow and save it again with Saver(sharded=False)."
        )


def _read(path: Path) -> memoryview:
    # Read, not mapped: a mapped file that shrinks meanwhile kills the process.
    try:
        return memoryview(path.read_bytes())
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}.") from None


# ---- the table ----


def _records(table: memoryview, path: Path) -> Iterator[tuple[bytes, memoryview]]:
    """Keys and values in the order of their keys, which must rise."""
    size = len(table)
    if size < FOOTER_BYTES or table[-len(MAGIC) :] != MAGIC:
        raise WeightsError(
            f"{path} is not a TensorFlow checkpoint, or is cut short ({size:,} bytes): it does not "
            "end as one. Copy it again."
        )
    footer = table[-FOOTER_BYTES : -len(MAGIC)]
    _, _, at = _handle(footer, 0, path)
    offset, length, _ = _handle(footer, at, path)
    # Blocks that do not overlap are no longer, together, than the file.
    left = size - FOOTER_BYTES
    index = _block(table, offset, length, path)
    keys_left = MAX_KEYS_BYTES
    last: bytes | None = None
    for _, value in _entries(index, path):
        offset, length, _ = _handle(value, 0, path)
        left -= length + TRAILER_BYTES
        if left < 0:
            raise _damaged(path, "its blocks overlap")
        for key, record in _entries(_block(table, offset, length, path), path):
            if last is not None and key <= last:
                raise _damaged(path, "its keys are out of order")
            keys_left -= len(key)
            if keys_left < 0:
                raise _damaged(path, "its names are longer than any net's")
            last = key
            yield key, record


def _block(table: memoryview, offset: int, length: int, path: Path) -> memoryview:
    end = offset + length
    if end + TRAILER_BYTES > len(table) - FOOTER_BYTES:
        raise _damaged(path, f"a block at byte {offset} ends beyond the file")
    compression = table[end]
    if _masked_crc(table[offset : end + 1]) != int.from_bytes(table[end + 1 : end + 5], "little"):
        raise _damaged(path, f"the checksum of the block at byte {offset} does not match")
    if compression:
        raise WeightsError(
            f"{path} has blocks that are compressed (kind {compression}; 1 is Snappy), which "
            "TensorFlow's savers never write and which is not read. Restore it in TensorFlow and "
            "save it again."
        )
    return table[offset:end]


def _entries(block: memoryview, path: Path) -> Iterator[tuple[bytes, memoryview]]:
    size = len(block)
    num_restarts = int.from_bytes(block[-4:], "little") if size >= 4 else size
    end = size - 4 * (num_restarts + 1)
    if end < 0:
        raise _damaged(path, "a block is shorter than its own list of restarts")
    at, key = 0, b""
    while at < end:
        shared, at = _varint(block, at, end, path)
        fresh, at = _varint(block, at, end, path)
        length, at = _varint(block, at, end, path)
        if shared > len(key) or at + fresh + length > end:
            raise _damaged(path, "a record ends beyond its block")
        key = key[:shared] + bytes(block[at : at + fresh])
        at += fresh
        yield key, block[at : at + length]
        at += length


def _handle(data: memoryview, at: int, path: Path) -> tuple[int, int, int]:
    offset, at = _varint(data, at, len(data), path)
    length, at = _varint(data, at, len(data), path)
    return offset, length, at


def _varint(data: memoryview, at: int, end: int, path: Path) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise _damaged(path, "a number in it has no end")


def _masked_crc(data: memoryview) -> int:
    crc = _crc32c().value(bytes(data))
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


# ---- V1 ----


def _read_v1(
    path: Path, header: memoryview, records: Iterator[tuple[bytes, memoryview]]
) -> TfCheckpoint:
    meta = _parse(
        "SavedTensorSliceMeta",
        _parse("SavedTensorSlices", header, path, MAX_HEADER_BYTES).meta,
        path,
    )
    _refuse_newer(meta.versions, path)
    known: dict[str, _Declared] = {}
    for tensor in meta.tensor:
        name = _text(tensor.name, path)
        if name in known:
            raise _damaged(path, f"{name} is listed twice")
        known[name] = _Declared(
            dtype=tensor.type,
            shape=_shape(tensor.shape, name, path),
            slices=frozenset(_extents(s) for s in tensor.slice),
        )
    parts: dict[str, dict[tuple[Extent, ...], NDArray[Any]]] = {n: {} for n in known}
    for key, record in records:
        data = _parse("SavedTensorSlices", record, path).data
        name = _text(data.name, path)
        extents = _extents(_parse("Slice", data.slice, path, MAX_SLICE_BYTES))
        if key != _slice_key(data.name, extents):
            raise _damaged(path, f"the record of {name or 'no tensor'} has the key of another")
        if name not in known or extents not in known[name].slices:
            raise _damaged(path, f"a slice of {name or 'no tensor'} is not in its list")
        declared = known[name]
        region = _region(declared.shape, extents, name, path)
        if declared.dtype in _V1_FIELDS:
            num = math.prod(stop - start for start, stop in region)
            proto = _parse("TensorProto", data.data, path)
            parts[name][extents] = _v1_values(proto, declared.dtype, num, name, path)
    tensors: dict[str, NDArray[Any]] = {}
    undecoded: dict[str, str] = {}
    for name, declared in known.items():
        if declared.dtype in _V1_FIELDS:
            tensors[name] = _assembled(declared.shape, parts[name], name, path)
        else:
            undecoded[name] = _type_name(declared.dtype, name, path)
    return TfCheckpoint(path=path, version="V1", tensors=tensors, undecoded=undecoded)


class _Declared(NamedTuple):
    dtype: int
    shape: tuple[int, ...]
    slices: frozenset[tuple[Extent, ...]]


def _v1_values(
    proto: Any,  # noqa: ANN401
    dtype: int,
    num: int,
    name: str,
    path: Path,
) -> NDArray[Any]:
    stored = _STORED[dtype]
    raw = memoryview(proto.tensor_content or getattr(proto, _V1_FIELDS[dtype]))
    if proto.tensor_content or dtype in (1, 2):
        if len(raw) != num * stored.itemsize:
            raise _wrong_length(path, name, num, f"{len(raw)} bytes")
        return np.frombuffer(raw, stored)
    if len(raw) > MAX_PACKED_BYTES:
        raise _too_long(path, len(raw))
    values = _unpacked(raw, num)
    if values is None:
        raise _wrong_length(path, name, num, f"another number of them in {len(raw)} bytes")
    if dtype == 19:
        return values.astype(np.uint16).view(np.float16)
    return values.astype(np.int64).astype(stored)


def _unpacked(packed: memoryview, num: int) -> NDArray[np.uint64] | None:
    """Decodes `num` varints; `None` where there are more, fewer, or one that is too long."""
    data = np.frombuffer(packed, np.uint8)
    ends = np.flatnonzero(data < 0x80)
    if len(ends) != num or (len(data) and data[-1] >= 0x80):
        return None
    starts = np.concatenate(([0], ends[:-1] + 1)) if num else ends
    lengths = ends - starts + 1
    if num and lengths.max() > 10:
        return None
    values = np.zeros(num, np.uint64)
    for i in range(int(lengths.max()) if num else 0):
        here = lengths > i
        values[here] |= (data[starts[here] + i] & np.uint8(0x7F)).astype(np.uint64) << np.uint64(
            7 * i
        )
    return values


# ---- V2 ----


def _read_v2(
    path: Path, header: memoryview, records: Iterator[tuple[bytes, memoryview]]
) -> TfCheckpoint:
    bundle = _parse("BundleHeader", header, path, MAX_HEADER_BYTES)
    _refuse_newer(bundle.version, path)
    if bundle.endianness:
        raise WeightsError(f"{path} was written on a big-endian machine, which is not read.")
    if path.suffix != ".index":
        raise WeightsError(
            f"{path} is the index of a V2 checkpoint under another name. Give it back its name, "
            "which ends in `.index`, with the `.data-...` files beside it."
        )
    if path.stat().st_size > MAX_INDEX_BYTES:
        raise _damaged(path, f"an index is at most {MAX_INDEX_BYTES:,} bytes long")
    entries = {key: _parse("BundleEntry", record, path, MAX_ENTRY_BYTES) for key, record in records}
    shards = _Shards(path, bundle.num_shards, entries.values())
    # Keys of slices start with a zero byte, names never do.
    unclaimed = {key for key in entries if key[0] == 0}
    tensors: dict[str, NDArray[Any]] = {}
    undecoded: dict[str, str] = {}
    for key, entry in entries.items():
        if key[0] == 0:
            continue
        name = _text(key, path)
        shape = _shape(entry.shape, name, path)
        keys = {_extents(s): _slice_key(key, _extents(s)) for s in entry.slices}
        for slice_key in keys.values():
            if slice_key not in unclaimed:
                raise _damaged(path, f"a slice of {name} is missing")
            unclaimed.remove(slice_key)
        if entry.dtype not in _STORED:
            undecoded[name] = _type_name(entry.dtype, name, path)
        elif keys:
            parts = {e: shards.values(entries[k], entry.dtype, name) for e, k in keys.items()}
            tensors[name] = _assembled(shape, parts, name, path)
        else:
            tensors[name] = shards.values(entry, entry.dtype, name).reshape(shape)
    if unclaimed:
        raise _damaged(path, "it has slices of no tensor")
    return TfCheckpoint(path=path, version="V2", tensors=tensors, undecoded=undecoded)


class _Shards:
    """The data files of a V2 checkpoint, read when they are first needed."""

    def __init__(self, index: Path, num_shards: int, entries: Iterable[Any]) -> None:
        self._index = index
        self._prefix = index.with_suffix("")
        self._num = num_shards
        self._files: dict[int, memoryview] = {}
        used = sorted({e.shard_id for e in entries if e.size})
        for shard_id in used:
            if not 0 <= shard_id < num_shards:
                raise _damaged(index, f"it has {num_shards} data files and wants number {shard_id}")
        for shard_id in used:
            self._files[shard_id] = _read(self._shard_path(shard_id))
        # Tensors that do not overlap are no longer, together, than the files.
        if sum(max(e.size, 0) for e in entries) > sum(len(f) for f in self._files.values()):
            raise WeightsError(
                f"{self._prefix}.data-... is cut short: it is smaller than what {index} says is in "
                "it. Copy both again."
            )

    def values(self, entry: Any, dtype: int, name: str) -> NDArray[Any]:  # noqa: ANN401
        """The values of an entry, flat."""
        stored = _STORED[dtype]
        num = math.prod(_shape(entry.shape, name, self._index))
        if entry.dtype != dtype or entry.size != num * stored.itemsize:
            raise _wrong_length(self._index, name, num, f"{entry.size} bytes")
        if not num:
            return np.zeros(0, np.float32 if dtype == 14 else stored)
        path, file = self._shard_path(entry.shard_id), self._files[entry.shard_id]
        if entry.offset < 0 or entry.offset + entry.size > len(file):
            raise WeightsError(
                f"{path} is cut short: {name} would end at byte {entry.offset + entry.size}, and "
                f"it has {len(file)}. Copy it again."
            )
        data = file[entry.offset : entry.offset + entry.size]
        if _masked_crc(data) != entry.crc32c:
            raise _damaged(path, f"the checksum of {name} does not match")
        values = np.frombuffer(data, stored)
        if dtype == 14:
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values

    def _shard_path(self, shard_id: int) -> Path:
        suffix = f".data-{shard_id:05d}-of-{self._num:05d}"
        path = self._prefix.with_name(self._prefix.name + suffix)
        if not path.is_file():
            raise WeightsError(
                f"{path} is missing; {self._index} needs it. Copy it there, under its own name."
            )
        return path


def _slice_key(name: bytes, extents: Sequence[Extent]) -> bytes:
    """The key of a slice, in both versions: ordered code of 0, name, rank, starts and lengths."""
    escaped = name.replace(b"\xff", b"\xff\x00").replace(b"\x00", b"\x00\xff")
    rank = len(extents).to_bytes(1, "big") if extents else b""
    numbers = (_ordered(n) for extent in extents for n in extent)
    return b"\x00" + escaped + b"\x00\x01" + bytes([len(rank)]) + rank + b"".join(numbers)


def _ordered(number: int) -> bytes:
    """A signed number so that the order of bytes is the order of numbers.

    Its length in bytes stands in front as so many ones, the complement of the sign after them.
    """
    size = (number if number >= 0 else ~number).bit_length() // 7 + 1
    value = number & ((1 << 8 * size) - 1)
    ones = ((1 << size) - 1) << (7 * size)
    return (value ^ ones).to_bytes(size, "big")


# ---- both ----


def _assembled(
    shape: tuple[int, ...],
    parts: Mapping[tuple[Extent, ...], NDArray[Any]],
    name: str,
    path: Path,
) -> NDArray[Any]:
    """A tensor from its slices, which must cover it exactly once."""
    regions = [_region(shape, extents, name, path) for extents in parts]
    sizes = [tuple(stop - start for start, stop in region) for region in regions]
    for size, part in zip(sizes, parts.values(), strict=True):
        if math.prod(size) != part.size:
            raise _wrong_length(path, name, math.prod(size), f"{part.size}")
    if sum(p.size for p in parts.values()) != math.prod(shape) or not parts:
        raise _damaged(path, f"the slices of {name} do not cover it")
    if len(parts) == 1:
        return next(iter(parts.values())).reshape(shape)
    covered = np.zeros(shape, np.bool_)
    whole = np.empty(shape, next(iter(parts.values())).dtype)
    for region, size, part in zip(regions, sizes, parts.values(), strict=True):
        where = tuple(slice(start, stop) for start, stop in region)
        if covered[where].any():
            raise _damaged(path, f"slices of {name} overlap")
        covered[where] = True
        whole[where] = part.reshape(size)
    whole.flags.writeable = False
    return whole


def _region(
    shape: tuple[int, ...], extents: Sequence[Extent], name: str, path: Path
) -> list[tuple[int, int]]:
    """Start and stop of a slice on each axis."""
    if len(extents) != len(shape):
        raise _damaged(path, f"a slice of {name} has {len(extents)} axes, the tensor {len(shape)}")
    region = []
    for (start, length), size in zip(extents, shape, strict=True):
        stop = size if length == -1 else start + length
        if not 0 <= start <= stop <= size or (length == -1 and start):
            raise _damaged(path, f"a slice of {name} lies outside of it")
        region.append((start, stop))
    return region


def _extents(proto: Any) -> tuple[Extent, ...]:  # noqa: ANN401
    return tuple((e.start, e.length if e.HasField("length") else -1) for e in proto.extent)


def _shape(proto: Any, name: str, path: Path) -> tuple[int, ...]:  # noqa: ANN401
    if proto.unknown_rank or len(proto.dim) > MAX_RANK:
        raise _damaged(path, f"{name} has no shape")
    shape = tuple(d.size for d in proto.dim)
    if any(n < 0 for n in shape) or math.prod(max(n, 1) for n in shape) > MAX_VALUES:
        raise _damaged(path, f"{name} has shape {shape}")
    return shape


def _text(name: bytes, path: Path) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise _damaged(path, f"the name {name[:40]!r} is not text") from None


def _type_name(dtype: int, name: str, path: Path) -> str:
    # From 100 on they are references, which no checkpoint holds; 0 is none.
    if not 0 < dtype < 100:
        raise _damaged(path, f"{name} is of type {dtype}, which does not exist")
    return DTYPES.get(dtype, f"type {dtype}")


def _refuse_newer(versions: Any, path: Path) -> None:  # noqa: ANN401
    if versions.min_consumer > NEWEST_VERSION:
        raise WeightsError(
            f"{path} is of version {versions.producer} of its format; up to version "
            f"{NEWEST_VERSION} is read."
        )


def _damaged(path: Path, what: str) -> WeightsError:
    return WeightsError(f"{path} is damaged: {what}. Copy it again, or take another.")


def _wrong_length(path: Path, name: str, num: int, got: str) -> WeightsError:
    return _damaged(path, f"{name} should have {num} values and has {got}")


def _too_long(path: Path, num_bytes: int) -> WeightsError:
    return _damaged(path, f"a record of {num_bytes:,} bytes is longer than any net's")


def _parse(kind: str, data: memoryview | bytes, path: Path, limit: int | None = None) -> Any:  # noqa: ANN401
    from google.protobuf.message import DecodeError

    if limit is not None and len(data) > limit:
        raise _too_long(path, len(data))
    try:
        return _messages()[kind].FromString(bytes(data))
    except DecodeError:
        raise _damaged(path, "a record is not the message that it should be") from None


@functools.cache
def _messages() -> Mapping[str, Any]:
    """Classes of `_MESSAGES`, in a pool of their own: TensorFlow may be imported beside us."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError:
        raise _missing("protobuf") from None
    field_proto = descriptor_pb2.FieldDescriptorProto
    package = "anysize.tf_checkpoint"
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package)
    for message, fields in _MESSAGES.items():
        added = file.message_type.add(name=message)
        for name, number, kind in fields:
            field = added.field.add(
                name=name,
                number=number,
                label=field_proto.LABEL_REPEATED
                if kind.endswith("*")
                else field_proto.LABEL_OPTIONAL,
            )
            kind = kind.rstrip("*")
            if kind in _MESSAGES:
                field.type = field_proto.TYPE_MESSAGE
                field.type_name = f".{package}.{kind}"
            else:
                field.type = getattr(field_proto, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        message: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{message}"))
        for message in _MESSAGES
    }


@functools.cache
def _crc32c() -> Any:  # noqa: ANN401
    try:
        import google_crc32c
    except ImportError:
        raise _missing("google-crc32c") from None
    return google_crc32c


def _missing(library: str) -> WeightsError:
    return WeightsError(
        f"Reading a TensorFlow checkpoint takes {library}, which is not installed: "
        "pip install 'anysize[tensorflow-checkpoint]'."
    )
