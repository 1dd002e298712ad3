import struct
import subprocess
import sys

import numpy as np
import pytest
from tests.conversion import caffe_net
from tests.conversion.caffe_net import nested, number, text

from anysize.conversion import caffemodel
from anysize.conversion.caffemodel import Window, is_caffemodel, read_caffemodel, read_mean
from anysize.errors import WeightsError


@pytest.fixture
def layers():
    return caffe_net.resnet((1, 1, 1, 1), 2, eps=1e-3)


def write(tmp_path, data, name="net.caffemodel"):
    path = tmp_path / name
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
@pytest.mark.parametrize("doubles", [False, True], ids=["float", "double"])
@pytest.mark.parametrize("layout", ["new", "V1"])
def test_a_file_written_byte_by_byte_is_read_back(tmp_path, layout, doubles, packed):
    written = caffe_net.resnet((1, 1, 1, 1), 2, merged=layout == "V1", eps=1e-3)
    data = caffe_net.encode_net(written, layout, doubles=doubles, packed=packed)
    path = write(tmp_path, data)
    assert is_caffemodel(path)
    found, read = read_caffemodel(path)
    assert found == layout
    for ours, theirs in zip(read, written, strict=True):
        assert (ours.name, ours.type) == (theirs.name, theirs.type)
        assert (list(ours.bottoms), list(ours.tops)) == (theirs.bottoms, theirs.tops)
        for a, b in zip(ours.blobs, theirs.blobs, strict=True):
            assert a.dtype == np.float32
            assert np.array_equal(a.reshape(b.shape), b)
            assert a.ndim == (b.ndim if layout == "new" else 4)
        if theirs.type == "Pooling":
            assert ours.window == Window((3, 3), (2, 2), (0, 0), pool="max")
        elif theirs.kernel:
            k, s, p, d = theirs.kernel, theirs.stride, theirs.pad, theirs.dilation
            assert ours.window == Window((k, k), (s, s), (p, p), (d, d))
        if theirs.type == "BatchNorm":
            assert ours.eps == 1e-3


def test_windows_may_have_two_numbers_or_fields_of_their_own(tmp_path):
    lists = number(3, 1) + number(3, 2) + number(4, 5) + number(4, 7) + number(5, 2)
    fields = number(9, 1) + number(10, 2) + number(11, 5) + number(12, 7) + number(13, 2)
    convolutions = (lists, nested(3, b"\1\2") + nested(4, b"\5\7"), fields + number(14, 3))
    pooling = number(1, 1) + number(5, 4) + number(6, 5) + number(7, 2) + number(8, 3)
    layer = text(1, "c") + text(2, "Convolution")
    data = b"".join(nested(100, layer + nested(106, c)) for c in convolutions)
    data += nested(100, text(1, "p") + text(2, "Pooling") + nested(121, pooling + number(10, 1)))
    _, read = read_caffemodel(write(tmp_path, data))
    assert [la.window for la in read] == [
        Window((5, 7), (1, 1), (1, 2), group=2),
        Window((5, 7), (1, 1), (1, 2)),
        Window((5, 7), (2, 3), (1, 2)),
        Window((4, 5), (2, 3), (0, 1), pool="average"),
    ]


def test_epsilon_is_the_decimal_that_was_meant(tmp_path, layers):
    layers = [la for la in layers if la.type == "BatchNorm"]
    for eps in (1e-5, 1e-3, 2e-5):
        for la in layers:
            la.eps = eps
        _, read = read_caffemodel(write(tmp_path, caffe_net.encode_net(layers)))
        assert {la.eps for la in read} == {eps}


def message_of(path):
    """What reading a file says against it; any other error is one of ours."""
    try:
        read_caffemodel(path)
    except WeightsError as error:
        return str(error)
    return None


def test_every_truncation_is_named(tmp_path, layers):
    whole = caffe_net.encode_net(layers)
    assert len(whole) > 20000
    ends = {*range(1, 400, 7), *range(400, len(whole), 997), len(whole) - 1}
    for end in ends:
        path = write(tmp_path, whole[:end], "cut.caffemodel")
        message = message_of(path)
        # None where it is cut exactly between two layers.
        assert "cut.caffemodel" in message if message else len(read_caffemodel(path)[1]) < 60
    path = write(tmp_path, whole[: len(whole) // 2], "cut.caffemodel")
    with pytest.raises(WeightsError, match=r"cut\.caffemodel is truncated"):
        read_caffemodel(path)
    assert is_caffemodel(path)


def test_damaged_bytes_never_give_anything_but_layers_or_a_named_error(tmp_path, layers):
    whole = caffe_net.encode_net(layers)
    rng = np.random.default_rng(3)
    refused = 0
    for _ in range(300):
        data = bytearray(whole)
        for position in rng.integers(0, 3000, rng.integers(1, 6)):
            data[position] = rng.integers(0, 256)
        path = write(tmp_path, bytes(data))
        is_caffemodel(path)
        message = message_of(path)
        assert message is None or str(path) in message
        refused += message is not None
    assert refused > 20


def layer_with(blob):
    return nested(100, text(1, "conv1") + text(2, "Convolution") + nested(7, blob))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (layer_with(nested(7, nested(1, b"\5")) + nested(5, bytes(16))), r"conv1\[0\] has the sh"),
        (layer_with(nested(7, nested(1, b"\4")) + nested(5, bytes(15))), "ends within a number"),
        (layer_with(nested(7, nested(1, b"\xff" * 9 + b"\1"))), r"shape \(-1,\)"),
        (
            layer_with(nested(7, nested(1, b"\0" * 400))),
            r"conv1\[0\] has the shape \(0, 0, 0, 0, 0, 0, 0, 0\)",
        ),
        (layer_with(nested(7, nested(1, (b"\xff" * 8 + b"\x7f") * 30))), "has the shape"),
        (layer_with(b"\xff\xff\xff"), r"conv1\[0\] cannot be read"),
        (nested(100, text(1, "a") + text(2, "B") + nested(7, b"") * 65), "65 blobs"),
        (nested(100, b"\x0a\x09short"), "layer 1 cannot be read"),
        (nested(2, nested(1, text(1, "conv1"))), "upgrade_net_proto_binary"),
        (nested(100, text(1, "a")) + nested(2, text(4, "b")), "both layouts"),
        (b"", "no layer"),
        (text(1, "a net without layers"), "no layer"),
        (b"\x80" * 20, "damaged, or no .caffemodel"),
        (b"\x0f\x0f", "damaged, or no .caffemodel"),
        (nested(100, b"")[:1] + b"\xff" * 9 + b"\1", "no .caffemodel|truncated"),
    ],
)
def test_a_hostile_file_is_refused_by_name(tmp_path, data, message):
    path = write(tmp_path, data)
    with pytest.raises(WeightsError, match=message) as caught:
        read_caffemodel(path)
    assert str(path) in str(caught.value)


def test_a_flood_of_layers_is_refused(tmp_path):
    path = write(tmp_path, nested(100, b"") * 100_001)
    with pytest.raises(WeightsError, match="more than 100000 layers"):
        read_caffemodel(path)


def test_a_huge_or_missing_file_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "huge.caffemodel"
    with path.open("wb") as file:
        file.truncate(1 << 31)
    with pytest.raises(WeightsError, match="less than 2 GiB"):
        read_caffemodel(path)
    with pytest.raises(WeightsError, match="no mean image is that large"):
        read_mean(path)
    with pytest.raises(WeightsError, match="cannot be read"):
        read_caffemodel(tmp_path / "absent")
    with pytest.raises(WeightsError, match="cannot be read"):
        read_caffemodel(tmp_path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\x03\x04" + bytes(100),
        b"\x80\x02}q\x00",
        struct.pack("<Q", 40) + b'{"x":{"dtype":"F32"}}',
        b"\x89HDF\r\n\x1a\n" + bytes(64),
        b"name: 'ResNet-50'\nlayer { }",
        number(1, 20000) + text(2, "iter"),  # A solver state.
        nested(1, text(1, "node") + text(2, "Const")) * 3,  # A TensorFlow graph.
        number(1, 8) + text(2, "pytorch") + nested(7, b""),  # ONNX.
        nested(100, text(1, "no type")),
        nested(2, text(4, "no type")),
        text(1, "no layer"),
        nested(100, b"\x0a\x04\x00\x01\x02\x03" + text(2, "Data")),
        bytes(range(256)) * 8,
    ],
)
def test_other_files_are_not_taken_for_a_caffemodel(tmp_path, data):
    assert not is_caffemodel(write(tmp_path, data, "looks.caffemodel"))


def test_a_folder_or_nothing_is_no_caffemodel(tmp_path):
    assert not is_caffemodel(tmp_path)
    assert not is_caffemodel(tmp_path / "absent")


def test_an_input_and_its_sizes_before_the_layers_are_no_obstacle(tmp_path, layers):
    sizes = b"".join(number(4, n) for n in (1, 3, 224, 224))
    head = text(1, "ResNet-50") + text(3, "data") + sizes + number(5, 0) + nested(8, b"")
    data = head + b"".join(caffe_net.encode_layer(la) for la in layers)
    assert is_caffemodel(write(tmp_path, data))
    assert len(read_caffemodel(write(tmp_path, data))[1]) == len(layers)


def test_unknown_fields_of_forks_are_skipped(tmp_path):
    odd = nested(2066, b"fork") + number(77, 1) + struct.pack("<Bf", 78 << 3 & 0x7F | 5, 1.0)[:0]
    layer = text(1, "a") + text(2, "Fork") + odd + nested(7, caffe_net.encode_blob([1.5]))
    _, (read,) = read_caffemodel(write(tmp_path, nested(100, layer) + number(2000, 1)))
    assert read.type == "Fork"
    assert read.blobs[0].tolist() == [1.5]


def test_a_name_that_is_not_utf8_is_still_text(tmp_path):
    data = nested(100, nested(1, b"\xff\xfe") + text(2, "Data"))
    assert read_caffemodel(write(tmp_path, data))[1][0].name == "\ufffd\ufffd"


def test_types_of_v1_that_are_not_caffes_keep_their_number(tmp_path):
    data = nested(2, text(4, "bn") + number(5, 47))
    assert read_caffemodel(write(tmp_path, data))[1][0].type == "V1 47"


def test_the_mean_pixel_of_an_image(tmp_path):
    image = np.arange(3 * 4 * 5, dtype=np.float32).reshape(3, 4, 5)
    for blob in (caffe_net.encode_blob(image, "V1"), caffe_net.encode_blob(image, doubles=True)):
        assert read_mean(write(tmp_path, blob, "mean.binaryproto")) == (9.5, 29.5, 49.5)


def test_without_protobuf_the_extra_is_named(tmp_path, monkeypatch, layers):
    path = write(tmp_path, caffe_net.encode_net(layers))
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    caffemodel._messages.cache_clear()
    assert is_caffemodel(path)
    with pytest.raises(WeightsError, match=r"pip install 'anysize\[caffe\]'"):
        read_caffemodel(path)


@pytest.mark.parametrize("module", ["caffemodel", "caffe"])
def test_the_readers_do_not_load_torch(module):
    code = f"import sys, anysize.conversion.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
