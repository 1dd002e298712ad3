import json
import math
import random
import shutil
import struct
import sys
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

from anysize.conversion import tf_checkpoint
from anysize.conversion.tf_checkpoint import is_tf_checkpoint, read_tf_checkpoint
from anysize.errors import WeightsError

GOLDEN = Path(__file__).parent.parent / "golden"
NAMES = ("tf_v1_fcn.ckpt", "tf_v2_fcn", "tf_v1_types.ckpt", "tf_v2_types")
FLOAT, INT64 = 1, 9


def expected(name):
    with np.load(GOLDEN / f"{name.removesuffix('.ckpt')}_expected.npz") as file:
        index, data = json.loads(str(file["index"])), file["values"].tobytes()
    values, at = {}, 0
    for key, (dtype, shape) in index.items():
        values[key] = np.frombuffer(data, dtype, math.prod(shape), at).reshape(shape)
        at += values[key].nbytes
    assert at == len(data)
    return values


def copied(name, folder):
    for file in GOLDEN.glob(f"{name}*"):
        if not file.name.endswith("_expected.npz"):
            shutil.copy(file, folder)
    return folder / name


def same(checkpoint, values):
    return set(checkpoint.tensors) == set(values) and all(
        t.dtype == values[n].dtype and np.array_equal(t, values[n])
        for n, t in checkpoint.tensors.items()
    )


def varint(number):
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def sealed(block, compression=0):
    crc = google_crc32c.value(block + bytes([compression]))
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return block + bytes([compression]) + struct.pack("<I", masked)


def block_of(records):
    body = b"".join(
        b"\x00" + varint(len(k)) + varint(len(v)) + k + v for k, v in records
    )  # no prefixes are shared
    return body + struct.pack("<II", 0, 1)


def table(records, compression=0, repeats=1):
    """A table of one block, as TensorFlow writes it; `repeats` lists the block several times."""
    data = block_of(records) if records else struct.pack("<300I", *[0] * 299, 299)
    handle = b"\x00" + varint(len(data))
    index = block_of([(b"\xff" * (i + 1), handle) for i in range(repeats)])
    written = sealed(data, compression)
    footer = b"\x00\x00" + varint(len(written)) + varint(len(index))
    return written + sealed(index) + footer.ljust(40, b"\x00") + tf_checkpoint.MAGIC


def message(kind, **fields):
    return tf_checkpoint._messages()[kind](**fields)


def shape_of(*sizes):
    return message("Shape", dim=[message("Dim", size=n) for n in sizes])


def slice_of(*extents):
    return message(
        "Slice",
        extent=[
            message("Extent", start=e[0], length=e[1]) if e else message("Extent") for e in extents
        ],
    )


def v1_file(path, declared, parts, min_consumer=0, stray=b""):
    """`declared`: name, type, shape, slices; `parts`: name, slice, values."""
    meta = message(
        "SavedTensorSliceMeta",
        tensor=[
            message("SavedSliceMeta", name=n, type=t, shape=shape, slice=slices)
            for n, t, shape, slices in declared
        ],
        versions=message("Versions", producer=9, min_consumer=min_consumer),
    )
    records = [(b"", message("SavedTensorSlices", meta=meta.SerializeToString()))]
    for name, region, values in parts:
        proto = message("TensorProto", float_val=np.asarray(values, "<f4").tobytes())
        data = message(
            "SavedSlice",
            name=name,
            slice=region.SerializeToString(),
            data=proto.SerializeToString(),
        )
        key = tf_checkpoint._slice_key(name, tf_checkpoint._extents(region))
        records.append((key + stray, message("SavedTensorSlices", data=data)))
    path.write_bytes(table([(k, m.SerializeToString()) for k, m in records]))
    return path


def v2_files(prefix, entries, data, num_shards=1, **header):
    top = message("BundleHeader", num_shards=num_shards, **header)
    records = [(b"", top), *((n, message("BundleEntry", **e)) for n, e in entries)]
    index = prefix.with_name(f"{prefix.name}.index")
    index.write_bytes(table([(k, m.SerializeToString()) for k, m in records]))
    prefix.with_name(f"{prefix.name}.data-00000-of-{num_shards:05d}").write_bytes(data)
    return prefix


def entry(data, *, offset=0, **changes):
    crc = google_crc32c.value(data)
    fields = {
        "dtype": FLOAT,
        "shape": shape_of(len(data) // 4),
        "offset": offset,
        "size": len(data),
        "crc32c": ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF,
    }
    return fields | changes


@pytest.mark.parametrize("name", NAMES)
def test_what_tensorflow_wrote_is_read_to_the_last_bit(name):
    checkpoint = read_tf_checkpoint(GOLDEN / name)
    assert same(checkpoint, expected(name))
    assert checkpoint.version == ("V1" if "v1" in name else "V2")
    assert is_tf_checkpoint(GOLDEN / name)


def test_types_that_no_net_has_are_listed_and_not_decoded():
    checkpoint = read_tf_checkpoint(GOLDEN / "tf_v2_types")
    assert checkpoint.undecoded == {"bytes": "uint8", "flags": "bool", "strings": "string"}
    assert read_tf_checkpoint(GOLDEN / "tf_v1_types.ckpt").undecoded == {
        "bytes": "uint8",
        "flags": "bool",
    }


def test_variables_that_were_cut_into_parts_are_put_together():
    values = expected("tf_v2_types")
    cut = {"rows": (300, 2), "columns": (2, 200, 3), "long": (1, 12500)}
    assert {n: values[n].shape for n in cut} == cut
    stored = (GOLDEN / "tf_v2_types.index").read_bytes()
    assert stored.count(b"\x00\x01\x01\x02") >= 1  # keys of slices of rank 2 are in the file
    for name in ("tf_v1_types.ckpt", "tf_v2_types"):
        tensors = read_tf_checkpoint(GOLDEN / name).tensors
        assert np.array_equal(tensors["columns"], expected(name)["columns"])


@pytest.mark.parametrize("suffix", ["", ".index", ".data-00000-of-00002", ".data-00001-of-00002"])
def test_a_v2_checkpoint_may_be_given_by_any_of_its_files(suffix):
    path = GOLDEN / f"tf_v2_types{suffix}"
    assert is_tf_checkpoint(path)
    assert same(read_tf_checkpoint(path), expected("tf_v2_types"))


def test_a_prefix_with_a_dot_and_a_number_is_one(tmp_path):
    for file in GOLDEN.glob("tf_v2_fcn.*"):
        shutil.copy(file, tmp_path / file.name.replace("tf_v2_fcn", "model.ckpt-1000"))
    assert same(read_tf_checkpoint(tmp_path / "model.ckpt-1000"), expected("tf_v2_fcn"))


@pytest.mark.parametrize("name", ["tf_v1_fcn.ckpt", "tf_v2_fcn.index"])
def test_a_truncated_file_is_named_wherever_it_ends(tmp_path, name):
    whole = (GOLDEN / name).read_bytes()
    copied(name.removesuffix(".index"), tmp_path)
    path = tmp_path / name
    size = len(whole)
    for length in [0, 1, 7, 8, 47, 48, 49, *range(100, size, 997), *range(size - 100, size)]:
        path.write_bytes(whole[:length])
        assert is_tf_checkpoint(path) == (length > 1) or length in (7, 8)
        with pytest.raises(WeightsError, match=f"{name} is not a TensorFlow checkpoint, or is cut"):
            read_tf_checkpoint(path)


def test_a_truncated_data_file_is_named(tmp_path):
    prefix = copied("tf_v2_fcn", tmp_path)
    data = tmp_path / "tf_v2_fcn.data-00000-of-00001"
    whole = data.read_bytes()
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        data.write_bytes(whole[:length])
        with pytest.raises(WeightsError, match=r"tf_v2_fcn\.data-.* is cut short"):
            read_tf_checkpoint(prefix)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("tf_v1_types.ckpt", "tf_v1_types.ckpt"),
        ("tf_v2_types", "tf_v2_types.index"),
        ("tf_v2_types", "tf_v2_types.data-00000-of-00002"),
        ("tf_v2_types", "tf_v2_types.data-00001-of-00002"),
    ],
)
def test_a_flipped_bit_is_found_or_changes_nothing(tmp_path, name, file):
    copied(name, tmp_path)
    values = expected(name)
    whole = (tmp_path / file).read_bytes()
    size = len(whole)
    places = sorted({*range(0, size, max(size // 100, 1)), *range(max(size - 60, 0), size)})
    unnoticed = 0
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        (tmp_path / file).write_bytes(damaged)
        try:
            checkpoint = read_tf_checkpoint(tmp_path / name)
        except WeightsError as error:
            assert str(tmp_path) in str(error)  # noqa: PT017
        else:
            assert same(checkpoint, values)
            unnoticed += 1
    # The list of meta-blocks, the footer's padding, and strings and flags, are not read.
    assert unnoticed < 70


def test_damage_under_a_right_checksum_is_refused_or_read_never_a_crash(tmp_path):
    rng = random.Random(0)
    whole = (GOLDEN / "tf_v1_types.ckpt").read_bytes()
    footer = whole[-48:]
    _, _, at = tf_checkpoint._handle(memoryview(footer), 0, tmp_path)
    start, length, _ = tf_checkpoint._handle(memoryview(footer), at, tmp_path)
    index = memoryview(whole)[start : start + length]
    _, handle = next(tf_checkpoint._entries(index, tmp_path))
    blocks = [(start, length), tf_checkpoint._handle(handle, 0, tmp_path)[:2]]
    refused = 0
    for i in range(300):
        first, size = blocks[i % 2]
        damaged = bytearray(whole)
        for _ in range(rng.choice((1, 1, 4))):
            # The list of tensors is at the front, the long rows of floats after it.
            place = rng.randrange(min(size, 700))
            damaged[first + place] = rng.choice((0, 255, rng.randrange(256)))
        damaged[first : first + size + 5] = sealed(bytes(damaged[first : first + size]))
        path = tmp_path / "damaged.ckpt"
        path.write_bytes(damaged)
        try:
            read_tf_checkpoint(path)
        except WeightsError as error:
            assert "damaged.ckpt" in str(error)  # noqa: PT017
            refused += 1
    assert refused > 150


def test_a_missing_part_is_named(tmp_path):
    prefix = copied("tf_v2_types", tmp_path)
    (tmp_path / "tf_v2_types.data-00001-of-00002").unlink()
    with pytest.raises(WeightsError, match=r"data-00001-of-00002 is missing; .*types\.index needs"):
        read_tf_checkpoint(prefix)
    (tmp_path / "tf_v2_types.index").unlink()
    data = tmp_path / "tf_v2_types.data-00000-of-00002"
    assert is_tf_checkpoint(data)
    with pytest.raises(WeightsError, match=r"tf_v2_types\.index is missing. Copy it there too"):
        read_tf_checkpoint(data)
    with pytest.raises(WeightsError, match=r"No such file: .*tf_v2_types, nor .*\.index"):
        read_tf_checkpoint(prefix)


def test_a_file_that_goes_with_a_checkpoint_is_told_from_it(tmp_path):
    copied("tf_v2_fcn", tmp_path)
    state, graph = tmp_path / "checkpoint", tmp_path / "tf_v2_fcn.meta"
    state.write_text('model_checkpoint_path: "tf_v2_fcn"\n')
    graph.write_bytes(b"\n\x05graph")
    for path, message in (
        (tmp_path, "is a folder. Give a checkpoint inside it"),
        (state, "only says which checkpoint is the latest"),
        (graph, r"holds a graph, not its weights. Give .*tf_v2_fcn, with"),
    ):
        assert is_tf_checkpoint(path)
        with pytest.raises(WeightsError, match=message):
            read_tf_checkpoint(path)


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04" + b"x" * 99, b"\x89PNG\r\n" * 20, b"\x00" * 200, b"\n" * 5]
)
def test_another_file_is_refused(tmp_path, content):
    path = tmp_path / "x.ckpt"
    path.write_bytes(content)
    assert not is_tf_checkpoint(path)
    with pytest.raises(WeightsError, match=r"x\.ckpt is not a TensorFlow checkpoint, or is cut"):
        read_tf_checkpoint(path)
    assert not is_tf_checkpoint(tmp_path / "nothing.ckpt")
    assert not is_tf_checkpoint(GOLDEN)


def test_an_index_without_its_name_and_a_part_of_a_v1_checkpoint_are_refused(tmp_path):
    shutil.copy(GOLDEN / "tf_v2_fcn.index", tmp_path / "weights")
    with pytest.raises(WeightsError, match="index of a V2 checkpoint under another name"):
        read_tf_checkpoint(tmp_path / "weights")
    part = tmp_path / "model.ckpt-00000-of-00002"
    shutil.copy(GOLDEN / "tf_v1_fcn.ckpt", part)
    with pytest.raises(WeightsError, match="one of 2 parts of a sharded V1 checkpoint"):
        read_tf_checkpoint(part)


def test_a_compressed_block_is_refused(tmp_path):
    path = tmp_path / "x.ckpt"
    path.write_bytes(table([(b"", b"\x0a\x00")], compression=1))
    with pytest.raises(WeightsError, match="compressed .kind 1; 1 is Snappy"):
        read_tf_checkpoint(path)


WHOLE = (slice_of((0, 2)), slice_of((2, 2)))
PARTS = [("w", WHOLE[0], [1, 2]), ("w", WHOLE[1], [3, 4])]


def test_the_test_writes_what_is_read(tmp_path):
    path = v1_file(tmp_path / "x.ckpt", [(b"w", FLOAT, shape_of(4), WHOLE)], as_bytes(PARTS))
    assert read_tf_checkpoint(path).tensors["w"].tolist() == [1, 2, 3, 4]
    data = struct.pack("<2f", 5, 6)
    prefix = v2_files(tmp_path / "y", [(b"w", entry(data))], data)
    assert read_tf_checkpoint(prefix).tensors["w"].tolist() == [5, 6]


def test_a_record_under_the_key_of_another_is_refused(tmp_path):
    declared = [(b"w", FLOAT, shape_of(4), WHOLE)]
    path = v1_file(tmp_path / "x.ckpt", declared, as_bytes(PARTS), stray=b"!")
    with pytest.raises(WeightsError, match="the record of w has the key of another"):
        read_tf_checkpoint(path)


def as_bytes(parts):
    return [(n.encode(), s, v) for n, s, v in parts]


@pytest.mark.parametrize(
    ("declared", "parts", "message"),
    [
        ([("w", FLOAT, (4,), WHOLE)], PARTS[:1], "slices of w do not cover it"),
        ([("w", FLOAT, (4,), WHOLE)], [PARTS[0], ("w", WHOLE[1], [3])], "should have 2 values"),
        ([("w", FLOAT, (4,), WHOLE)], [PARTS[0], PARTS[0]], "its keys are out of order"),
        ([("w", FLOAT, (4,), WHOLE)], [("v", WHOLE[0], [1, 2])], "slice of v is not in its list"),
        ([("w", FLOAT, (3,), WHOLE)], PARTS, "slice of w lies outside of it"),
        ([("w", FLOAT, (4, 1), WHOLE)], PARTS, "a slice of w has 1 axes, the tensor 2"),
        ([("w", FLOAT, (-4,), WHOLE)], PARTS, r"w has shape \(-4,\)"),
        ([("w", FLOAT, (0, 1 << 62), [slice_of((), ())])], [], r"w has shape \(0, 4611"),
        ([("w", FLOAT, (1,) * 33, [slice_of(*[()] * 33)])], [], "w has no shape"),
        ([("w", 0, (4,), WHOLE)], [], "w is of type 0, which does not exist"),
        ([("w", FLOAT, (4,), WHOLE)] * 2, PARTS, "w is listed twice"),
        ([("w", FLOAT, (1 << 13,) * 3, [slice_of((), (), ())])], [], "do not cover it"),
        (
            [("w", FLOAT, (1 << 13,) * 3, [slice_of((), (), ())])],
            [("w", slice_of((), (), ()), [1.0])],
            "should have 549755813888 values",
        ),
        (
            [("w", FLOAT, (4,), [slice_of((0, 2)), slice_of((1, 2))])],
            [("w", slice_of((0, 2)), [1, 2]), ("w", slice_of((1, 2)), [3, 4])],
            "slices of w overlap",
        ),
        (
            [("w", FLOAT, (4,), [slice_of((3, 1 << 62))])],
            [("w", slice_of((3, 1 << 62)), [1])],
            "lies outside",
        ),
    ],
)
def test_a_v1_file_that_contradicts_itself_is_refused(tmp_path, declared, parts, message):
    tensors = [(n.encode(), t, shape_of(*shape), slices) for n, t, shape, slices in declared]
    path = v1_file(tmp_path / "x.ckpt", tensors, as_bytes(parts))
    with pytest.raises(WeightsError, match=message):
        read_tf_checkpoint(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offset": 4}, "is cut short: w would end at byte 12"),
        ({"offset": -4}, "is cut short"),
        ({"size": 1 << 60}, "is cut short"),
        ({"shape": shape_of(1 << 39)}, "should have 549755813888 values"),
        ({"shape": shape_of(3)}, "should have 3 values and has 8 bytes"),
        ({"shape": shape_of(-1)}, "has shape"),
        ({"shard_id": 7}, "has 1 data files and wants number 7"),
        ({"crc32c": 1}, "checksum of w does not match"),
        ({"dtype": INT64}, "should have 2 values"),
        ({"dtype": 0}, "of type 0"),
        ({"slices": [slice_of((0, 1))]}, "a slice of w is missing"),
    ],
)
def test_a_v2_index_that_contradicts_its_data_is_refused(tmp_path, changes, message):
    data = struct.pack("<2f", 5, 6)
    prefix = v2_files(tmp_path / "x", [(b"w", entry(data, **changes))], data)
    with pytest.raises(WeightsError, match=message):
        read_tf_checkpoint(prefix)


def test_tensors_that_share_their_bytes_are_refused(tmp_path):
    data = bytes(4000)
    entries = [(b"w%04d" % i, entry(data)) for i in range(2000)]
    with pytest.raises(WeightsError, match="is cut short: it is smaller than what"):
        read_tf_checkpoint(v2_files(tmp_path / "x", entries, data))


def test_slices_of_no_tensor_are_refused(tmp_path):
    data = struct.pack("<2f", 5, 6)
    key = tf_checkpoint._slice_key(b"w", [(0, 2)])
    with pytest.raises(WeightsError, match="slices of no tensor"):
        read_tf_checkpoint(v2_files(tmp_path / "x", [(key, entry(data))], data))


def test_other_versions_and_byte_orders_are_refused(tmp_path):
    path = v1_file(tmp_path / "x.ckpt", [], [], min_consumer=2)
    with pytest.raises(WeightsError, match="is of version 9 of its format"):
        read_tf_checkpoint(path)
    with pytest.raises(WeightsError, match="big-endian"):
        read_tf_checkpoint(v2_files(tmp_path / "y", [], b"", endianness=1))


BROKEN_TABLES = {
    "falling keys": (table([(b"", b"\x08\x01"), (b"b", b""), (b"a", b"")]), "out of order"),
    "equal keys": (table([(b"", b"\x08\x01"), (b"b", b""), (b"b", b"")]), "out of order"),
    "a block twice": (table([(b"", b"\x08\x01")], repeats=2), "out of order"),
    "an empty block often": (table([], repeats=30), "blocks overlap"),
    "no header": (table([(b"a", b"\x08\x01")]), "first record is not the header"),
    "an empty header": (table([(b"", b"")]), "first record is not the header"),
    "nothing": (table([]), "first record is not the header"),
    "a header that breaks off": (table([(b"", b"\x0a\xff")]), "not the message"),
    "a record that breaks off": (table([(b"", b"\x0a\x00"), (b"a", b"\xff")]), "not the message"),
    "a long header": (table([(b"", b"\x0a\x00" * (9 << 20))]), "longer than any net's"),
    "a long entry": (table([(b"", b"\x08\x01"), (b"a", b"\x3a\x00" * 600_000)]), "than any net's"),
}


@pytest.mark.parametrize("case", BROKEN_TABLES)
def test_a_table_that_breaks_its_rules_is_refused(tmp_path, case):
    content, message = BROKEN_TABLES[case]
    path = tmp_path / "x.index"
    path.write_bytes(content)
    with pytest.raises(WeightsError, match=message):
        read_tf_checkpoint(path)


def test_blocks_and_records_beyond_the_file_are_refused(tmp_path):
    path = tmp_path / "x.ckpt"
    for where in (b"\xff" * 40, b"\x00\x00\xff\xff\xff\xff\x7f\x01", b"\x00\x00\x00\xff\xff\x7f"):
        path.write_bytes(bytes(100) + where.ljust(40, b"\x00") + tf_checkpoint.MAGIC)
        with pytest.raises(WeightsError, match="ends beyond the file|has no end"):
            read_tf_checkpoint(path)
    ends = "a record ends beyond its block"
    for body, message in (
        (b"\x05\x00\x00", ends),  # shares 5 bytes of a key of none
        (b"\x00\x7f\x00", ends),
        (b"\x00\x00\x7f", ends),
        (b"\x80\x80\x80\x80\x80", "has no end"),
    ):
        block = body + struct.pack("<II", 0, 1)
        footer = b"\x00\x00\x00" + varint(len(block))
        path.write_bytes(sealed(block) + footer.ljust(40, b"\x00") + tf_checkpoint.MAGIC)
        with pytest.raises(WeightsError, match=message):
            read_tf_checkpoint(path)
    block = struct.pack("<I", 1 << 31)
    footer = b"\x00\x00\x00" + varint(len(block))
    path.write_bytes(sealed(block) + footer.ljust(40, b"\x00") + tf_checkpoint.MAGIC)
    with pytest.raises(WeightsError, match="shorter than its own list"):
        read_tf_checkpoint(path)


@pytest.mark.parametrize(
    ("limit", "name", "message"),
    [
        ("MAX_KEYS_BYTES", "tf_v1_types.ckpt", "its names are longer than any net's"),
        ("MAX_PACKED_BYTES", "tf_v1_types.ckpt", "a record of .* bytes is longer"),
        ("MAX_SLICE_BYTES", "tf_v1_types.ckpt", "a record of .* bytes is longer"),
        ("MAX_INDEX_BYTES", "tf_v2_types", "an index is at most 3 bytes long"),
    ],
)
def test_what_would_take_much_memory_is_refused(monkeypatch, limit, name, message):
    monkeypatch.setattr(tf_checkpoint, limit, 3)
    with pytest.raises(WeightsError, match=message):
        read_tf_checkpoint(GOLDEN / name)


def test_packed_numbers_must_be_as_many_as_the_tensor_has():
    packed = memoryview(b"\x07\x80\x01" + b"\xff" * 9 + b"\x01")
    values = tf_checkpoint._unpacked(packed, 3)
    assert values.tolist() == [7, 128, (1 << 64) - 1]
    assert values.astype(np.int64).tolist() == [7, 128, -1]
    for data, num in ((packed, 2), (packed, 4), (packed[:-1], 3), (packed[:-1], 2), (b"", 1)):
        assert tf_checkpoint._unpacked(memoryview(data), num) is None
    assert tf_checkpoint._unpacked(memoryview(b"\xff" * 10 + b"\x01"), 1) is None
    assert tf_checkpoint._unpacked(memoryview(b""), 0).tolist() == []


def test_ordered_numbers_sort_as_their_bytes():
    edges = [m + d for e in range(63) for m in (1 << e, -(1 << e)) for d in (-1, 0, 1)]
    numbers = sorted({*edges, 0})
    assert [tf_checkpoint._ordered(n) for n in numbers] == sorted(
        tf_checkpoint._ordered(n) for n in numbers
    )


@pytest.mark.parametrize("module", ["google_crc32c", "google.protobuf"])
def test_a_missing_library_is_named_with_what_to_install(monkeypatch, module):
    tf_checkpoint._messages.cache_clear()
    tf_checkpoint._crc32c.cache_clear()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(WeightsError, match=r"pip install 'anysize\[tensorflow-checkpoint\]'"):
        read_tf_checkpoint(GOLDEN / "tf_v1_types.ckpt")
