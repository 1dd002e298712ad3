"""Reads Caffe's binary files: `.caffemodel` (net and weights) and `.binaryproto` (an image).

Both are protobuf messages. The part of the schema that is needed is built at run time. The
outermost message is walked by hand, a layer at a time, so that a truncated file is told from a
damaged one, and memory holds one layer beside the arrays. Packed floats are declared as bytes,
which is the same on the wire, and become arrays without a Python object each.

Two layouts of layers exist: "new" (types are strings) and V1 (types are numbers, up to 2015).

Source: BVLC/caffe `src/caffe/proto/caffe.proto` (field numbers), `src/caffe/blob.cpp` (shapes).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from anysize.errors import WeightsError

__all__ = ["Layer", "Window", "is_caffemodel", "read_caffemodel", "read_mean"]

Array = NDArray[np.float32]

_SCHEMA: dict[str, tuple[str, ...]] = {
    "BlobShape": ("repeated int64 dim 1",),
    "Blob": (
        "optional int64 num 1",
        "optional int64 channels 2",
        "optional int64 height 3",
        "optional int64 width 4",
        "repeated bytes data 5",
        "optional BlobShape shape 7",
        "repeated bytes double_data 8",
    ),
    "UnpackedBlob": ("repeated float data 5", "repeated double double_data 8"),
    "Convolution": (
        "optional uint64 num_output 1",
        "optional bool bias_term 2",
        "repeated uint64 pad 3",
        "repeated uint64 kernel_size 4",
        "optional uint64 group 5",
        "repeated uint64 stride 6",
        "optional uint64 pad_h 9",
        "optional uint64 pad_w 10",
        "optional uint64 kernel_h 11",
        "optional uint64 kernel_w 12",
        "optional uint64 stride_h 13",
        "optional uint64 stride_w 14",
        "repeated uint64 dilation 18",
    ),
    "Pooling": (
        "optional int32 pool 1",
        "repeated uint64 kernel_size 2",
        "repeated uint64 stride 3",
        "repeated uint64 pad 4",
        "optional uint64 kernel_h 5",
        "optional uint64 kernel_w 6",
        "optional uint64 stride_h 7",
        "optional uint64 stride_w 8",
        "optional uint64 pad_h 9",
        "optional uint64 pad_w 10",
    ),
    "BatchNorm": ("optional float eps 3",),
    "Crop": ("repeated uint32 offset 2",),
    "Layer": (
        "optional string name 1",
        "optional string type 2",
        "repeated string bottom 3",
        "repeated string top 4",
        "repeated bytes blobs 7",
        "optional Convolution convolution_param 106",
        "optional Pooling pooling_param 121",
        "optional BatchNorm batch_norm_param 139",
        "optional Crop crop_param 144",
    ),
    "V1Layer": (
        "optional bytes layer 1",
        "repeated string bottom 2",
        "repeated string top 3",
        "optional string name 4",
        "optional int32 type 5",
        "repeated bytes blobs 6",
        "optional Convolution convolution_param 10",
        "optional Pooling pooling_param 19",
    ),
}

_V1_TYPES = {
    1: "Accuracy",
    3: "Concat",
    4: "Convolution",
    5: "Data",
    6: "Dropout",
    8: "Flatten",
    12: "ImageData",
    14: "InnerProduct",
    15: "LRN",
    17: "Pooling",
    18: "ReLU",
    19: "Sigmoid",
    20: "Softmax",
    21: "SoftmaxWithLoss",
    22: "Split",
    25: "Eltwise",
    26: "Power",
    27: "SigmoidCrossEntropyLoss",
    36: "Silence",
    39: "Deconvolution",
}

_V1_LAYERS, _LAYERS = 2, 100
_TOP_LEVEL = {1: 2, 2: 2, 3: 2, 4: None, 5: 0, 6: 2, 7: 0, 8: 2, 100: 2}
"""Fields of NetParameter and their wire types; `input_dim` comes packed or not."""

_MOST_LAYERS = 100_000
_MOST_BLOBS = 64
_MOST_BYTES = 1 << 31
_POOL_METHODS = ("max", "average", "stochastic")


@dataclass(frozen=True, slots=True)
class Window:
    """Kernel, stride, padding and dilation of a convolution or a pooling, each (height, width).

    Attributes:
        pool: "max", "average" or "stochastic"; empty for a convolution.
    """

    kernel: tuple[int, int]
    stride: tuple[int, int]
    pad: tuple[int, int]
    dilation: tuple[int, int] = (1, 1)
    group: int = 1
    pool: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A layer as the file has it.

    Attributes:
        type: Caffe's name of the type, "Convolution".
        blobs: Its parameters, in Caffe's order.
        window: Of convolutions, transposed ones and poolings, where the file states it.
        eps: Of a BatchNorm.
        offset: Of a Crop.
    """

    name: str
    type: str
    bottoms: tuple[str, ...] = ()
    tops: tuple[str, ...] = ()
    blobs: tuple[Array, ...] = ()
    window: Window | None = None
    eps: float = 1e-5
    offset: tuple[int, ...] = field(default=())


def is_caffemodel(path: Path) -> bool:
    """Whether a file begins as a net of Caffe does: its fields, then a layer with name and type.

    Reads the beginning only, so that a file that was cut off is still known for what it was.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            for number, wire, length in _fields(file, size, "", strict=False):
                allowed = _TOP_LEVEL.get(number, -1)
                if allowed not in (wire, None):
                    return False
                if number in (_V1_LAYERS, _LAYERS):
                    return _begins_as_layer(file.read(min(length, 1 << 16)), number == _LAYERS)
                file.seek(length, 1)
    except (OSError, WeightsError):
        pass
    return False


def read_caffemodel(path: Path) -> tuple[Literal["new", "V1"], list[Layer]]:
    """Reads the layers of a net, in the file's order.

    Returns:
        Which layout of layers the file has, and the layers, whose blobs are read-only.

    Raises:
        WeightsError: protobuf is not installed; the file is missing, truncated, damaged or of
            another kind; or a blob's shape does not go with its number of values.
    """
    messages = _messages()
    layers: list[Layer] = []
    layouts: set[Literal["new", "V1"]] = set()
    try:
        size = path.stat().st_size
        if size >= _MOST_BYTES:
            raise WeightsError(
                f"{path} has {size} bytes; a .caffemodel has less than 2 GiB. Is it another file?"
            )
        with path.open("rb") as file:
            for number, wire, length in _fields(file, size, str(path)):
                if wire != 2 or number not in (_V1_LAYERS, _LAYERS):
                    file.seek(length, 1)
                    continue
                if len(layers) == _MOST_LAYERS:
                    raise WeightsError(f"{path} has more than {_MOST_LAYERS} layers; no net has.")
                layouts.add("new" if number == _LAYERS else "V1")
                message = messages["Layer" if number == _LAYERS else "V1Layer"]()
                _parse(message, file.read(length), path, f"layer {len(layers) + 1}")
                layers.append(_layer(message, path))
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}.") from None
    if len(layouts) != 1:
        raise WeightsError(
            f"{path} holds {'both layouts of layers' if layouts else 'no layer'}, so it is no "
            ".caffemodel. Take the file that Caffe's solver wrote (snapshot_format: BINARYPROTO)."
        )
    return layouts.pop(), layers


def read_mean(path: Path) -> tuple[float, float, float]:
    """Reads a mean image (`.binaryproto`) and gives its mean pixel, in Caffe's order: B, G, R.

    Raises:
        WeightsError: As `read_caffemodel`; or it is not an image of 3 channels within 0 to 255.
    """
    message = _messages()["Blob"]()
    try:
        size = path.stat().st_size
        if size >= 1 << 28:
            raise WeightsError(f"{path} has {size} bytes; no mean image is that large.")
        data = path.read_bytes()
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}.") from None
    _parse(message, data, path, "the image")
    image = _values(message, path, "the image")
    image = image[0] if image.ndim == 4 and len(image) == 1 else image
    if image.ndim != 3 or len(image) != 3 or not image.size:
        raise WeightsError(
            f"{path} holds an array of shape {image.shape}, not a mean image of 3 channels. Take "
            "the .binaryproto that the net was trained with, or leave --mean out."
        )
    pixel = image.astype(np.float64).mean((1, 2))
    # Written so that NaN fails as well.
    if not (image.min() >= 0 and image.max() <= 255):
        raise WeightsError(f"{path} is no mean image: its values are not within 0 to 255.")
    blue, green, red = (float(v) for v in pixel)
    return blue, green, red


def _fields(
    file: BinaryIO, end: int, source: str, *, strict: bool = True
) -> Iterator[tuple[int, int, int]]:
    """Walks the outermost message: (number, wire type, bytes of the value).

    The file stands at the value, and the caller reads or skips it. Where `strict` is not set, a
    value may reach beyond the end.
    """
    while file.tell() < end:
        tag = _varint(file)
        number, wire = (tag >> 3, tag & 7) if tag is not None else (0, 7)
        length: int | None = None
        if wire == 2:
            length = _varint(file)
        elif wire == 0:
            start = file.tell()
            length = None if _varint(file) is None else file.tell() - start
            file.seek(start)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        if number == 0 or length is None:
            raise WeightsError(
                f"{source} is damaged, or no .caffemodel: no field of protobuf begins at byte "
                f"{file.tell()}. Get the file again."
            )
        if strict and file.tell() + length > end:
            raise WeightsError(
                f"{source} is truncated: a part of {length} bytes begins at byte {file.tell()}, "
                f"and the file ends at {end}. Get it again."
            )
        yield number, wire, length


def _varint(file: BinaryIO) -> int | None:
    value = 0
    for shift in range(0, 70, 7):
        byte = file.read(1)
        if not byte:
            return None
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
    return None


def _begins_as_layer(data: bytes, new: bool) -> bool:
    """Whether a message has a name and a type near its beginning, as every layer has."""
    position, found, wanted = 0, set[int](), {1: 2, 2: 2} if new else {4: 2, 5: 0}
    while position + 1 < len(data) and not found >= set(wanted):
        number, wire = data[position] >> 3, data[position] & 7
        if data[position] >= 0x80 or wire not in (0, 2) or wanted.get(number, wire) != wire:
            return False
        if wire == 2 and data[position + 1] >= 0x80:
            return False
        text = data[position + 2 : position + 2 + data[position + 1]] if wire == 2 else b"x"
        if not (text.isascii() and text.decode("ascii").isprintable()):
            return False
        found.add(number)
        position += 2 + (data[position + 1] if wire == 2 else 0)
    return found >= set(wanted)


def _layer(message: Any, path: Path) -> Layer:  # noqa: ANN401
    new = message.DESCRIPTOR.name == "Layer"
    name = _text(message.name)
    if not new and message.HasField("layer"):
        raise WeightsError(
            f"{path} has the layers of 2013 (V0). Bring it up to date with Caffe's "
            "upgrade_net_proto_binary first."
        )
    if len(message.blobs) > _MOST_BLOBS:
        raise WeightsError(f"{path} is damaged: layer {name} has {len(message.blobs)} blobs.")
    blobs: list[Array] = []
    for i, data in enumerate(message.blobs):
        blob = _messages()["Blob"]()
        _parse(blob, data, path, f"{name}[{i}]")
        blobs.append(_values(blob, path, f"{name}[{i}]"))
    eps, offset = 1e-5, ()
    if new and message.HasField("batch_norm_param") and message.batch_norm_param.HasField("eps"):
        eps = _as_written(message.batch_norm_param.eps)
    if new and message.HasField("crop_param"):
        offset = tuple(message.crop_param.offset)
    return Layer(
        name=name,
        type=_text(message.type) if new else _V1_TYPES.get(message.type, f"V1 {message.type}"),
        bottoms=tuple(_text(b) for b in message.bottom),
        tops=tuple(_text(t) for t in message.top),
        blobs=tuple(blobs),
        window=_window(message),
        eps=eps,
        offset=offset,
    )


def _text(value: str | bytes) -> str:
    """A name; protobuf gives those that are not UTF-8 as bytes."""
    return value if isinstance(value, str) else value.decode("utf-8", "replace")


def _as_written(eps: float) -> float:
    """The decimal that a float32 stands for: 1e-5, and not 9.99999974e-06."""
    return float(str(np.float32(eps)))


def _window(message: Any) -> Window | None:  # noqa: ANN401
    if message.HasField("convolution_param"):
        p = message.convolution_param
        return Window(
            kernel=_pair(p.kernel_size, p.kernel_h, p.kernel_w, 0),
            stride=_pair(p.stride, p.stride_h, p.stride_w, 1),
            pad=_pair(p.pad, p.pad_h, p.pad_w, 0),
            dilation=_pair(p.dilation, 0, 0, 1),
            group=p.group or 1,
        )
    if message.HasField("pooling_param"):
        p = message.pooling_param
        return Window(
            kernel=_pair(p.kernel_size, p.kernel_h, p.kernel_w, 0),
            stride=_pair(p.stride, p.stride_h, p.stride_w, 1),
            pad=_pair(p.pad, p.pad_h, p.pad_w, 0),
            pool=_POOL_METHODS[p.pool] if 0 <= p.pool < len(_POOL_METHODS) else f"pool {p.pool}",
        )
    return None


def _pair(values: Sequence[int], height: int, width: int, default: int) -> tuple[int, int]:
    """(height, width): from the two fields of their own, or from one or two values of a list."""
    if height or width:
        return height, width
    if not values:
        return default, default
    return values[0], values[min(1, len(values) - 1)]


def _values(blob: Any, path: Path, name: str) -> Array:  # noqa: ANN401
    """The array of a blob, its shape checked against the number of values."""
    doubles = bool(blob.double_data)
    raw = b"".join(blob.double_data if doubles else blob.data)
    if len(raw) % (8 if doubles else 4):
        raise WeightsError(f"{path} is damaged: {name} ends within a number. Get the file again.")
    array = np.frombuffer(raw, "<f8" if doubles else "<f4")
    if blob.HasField("shape"):
        shape = tuple(blob.shape.dim)
    elif any(blob.HasField(n) for n in ("num", "channels", "height", "width")):
        shape = (blob.num, blob.channels, blob.height, blob.width)
    else:
        shape = (array.size,)
    count = math.prod(shape)
    if not array.size and count:
        array = _unpacked(blob)
    if len(shape) > 32 or min(shape, default=1) < 0 or count != array.size:
        raise WeightsError(
            f"{path} is damaged: {name} has the shape {shape[:8]}, but {array.size} values."
        )
    with np.errstate(over="ignore"):  # A double beyond float32 becomes infinite, and is refused.
        return array.astype(np.float32, copy=False).reshape(shape)


def _unpacked(blob: Any) -> NDArray[Any]:  # noqa: ANN401
    """Values written one by one, as protobuf allows; they are unknown fields to `Blob`."""
    again = _messages()["UnpackedBlob"].FromString(blob.SerializeToString())
    return np.array(again.data or again.double_data, np.float64)


def _parse(message: Any, data: bytes, path: Path, what: str) -> None:  # noqa: ANN401
    from google.protobuf.message import DecodeError

    try:
        message.ParseFromString(data)
    except (DecodeError, UnicodeDecodeError, RuntimeError) as error:
        raise WeightsError(
            f"{path} is damaged, or no file of Caffe: {what} cannot be read ({error}). Get the "
            "file again."
        ) from None


@functools.cache
def _messages() -> dict[str, Any]:
    """The message classes of `_SCHEMA`, in a pool of their own."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError:
        raise WeightsError(
            "Reading files of Caffe needs protobuf. Install it: pip install 'anysize[caffe]'."
        ) from None
    proto = descriptor_pb2.FileDescriptorProto(
        name="anysize_caffe.proto", package="anysize_caffe", syntax="proto2"
    )
    kinds = descriptor_pb2.FieldDescriptorProto
    for name, fields in _SCHEMA.items():
        message = proto.message_type.add(name=name)
        for line in fields:
            label, kind, field_name, number = line.split(" ")
            added = message.field.add(
                name=field_name,
                number=int(number),
                label=kinds.Label.Value(f"LABEL_{label.upper()}"),
            )
            if kind in _SCHEMA:
                added.type, added.type_name = kinds.TYPE_MESSAGE, f".anysize_caffe.{kind}"
            else:
                added.type = kinds.Type.Value(f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(proto)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"anysize_caffe.{name}"))
        for name in _SCHEMA
    }
