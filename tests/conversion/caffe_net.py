"""Caffe without Caffe: nets as lists of layers, their files byte by byte, and a forward pass.

Independent of `anysize`: the encoder has the field numbers of caffe.proto as literals and does not
use protobuf; the forward pass is plain numpy in float64 and follows Caffe's layers one by one.
"""

import dataclasses
import struct

import numpy as np

V1_TYPES = {
    "Convolution": 4,
    "InnerProduct": 14,
    "Pooling": 17,
    "ReLU": 18,
    "Split": 22,
    "Eltwise": 25,
    "Deconvolution": 39,
}
KAIMING = {
    50: ((3, 4, 6, 3), (False, False, False, False)),
    101: ((3, 4, 23, 3), (False, True, True, False)),
    152: ((3, 8, 36, 3), (False, True, True, False)),
}


@dataclasses.dataclass
class L:
    """A layer of a prototxt, with its weights."""

    name: str
    type: str
    bottoms: list
    tops: list
    blobs: list = dataclasses.field(default_factory=list)
    kernel: int = 0
    stride: int = 1
    pad: int = 0
    dilation: int = 1
    group: int = 1
    eps: float | None = None
    offset: tuple = ()


def resnet(
    units=(2, 1, 2, 1),
    base_depth=4,
    *,
    numbered=(False, True, True, False),
    conv1_bias=True,
    stride_in="2a",
    output_stride=32,
    dilate_first=True,
    merged=False,
    num_classes=3,
    head=True,
    eps=None,
    seed=0,
):
    """The layers of a ResNet by KaimingHe's names, all weights and statistics drawn."""
    rng = np.random.default_rng(seed)
    layers = []

    def draw(low, high, n):
        return rng.uniform(low, high, n).astype(np.float32)

    def conv(name, bottom, num_in, num_out, size, *, stride=1, dilation=1, bias=False, gain=1.0):
        std = np.sqrt(2.0 / (num_in * size * size))
        blobs = [rng.normal(0, std, (num_out, num_in, size, size)).astype(np.float32)]
        if bias or merged:
            # conv1 sees pixels, whose sums are a hundred times larger.
            bias_range = 20.0 if name == "conv1" and not merged else 0.5
            blobs.append(draw(-bias_range, bias_range, num_out))
        window = {"kernel": size, "stride": stride, "dilation": dilation}
        pad = dilation * (size // 2)
        layers.append(L(name, "Convolution", [bottom], [name], blobs, pad=pad, **window))
        if merged:
            blobs[0] *= np.float32(gain)
            return
        suffix = "_conv1" if name == "conv1" else name.removeprefix("res")
        f = float(rng.uniform(0.3, 900))
        statistics = [draw(-0.4, 0.4, num_out), draw(0.5, 1.5, num_out)]
        blobs = [*(s * np.float32(f) for s in statistics), np.float32([f])]
        layers.append(L("bn" + suffix, "BatchNorm", [name], [name], blobs, eps=eps))
        blobs = [draw(0.5, 1.5, num_out) * np.float32(gain), draw(-0.3, 0.5, num_out)]
        layers.append(L("scale" + suffix, "Scale", [name], [name], blobs))

    def relu(name):
        layers.append(L(name + "_relu", "ReLU", [name], [name]))

    conv("conv1", "data", 3, base_depth, 7, stride=2, bias=conv1_bias, gain=0.02)
    relu("conv1")
    layers.append(L("pool1", "Pooling", ["conv1"], ["pool1"], kernel=3, stride=2))
    last, num_in, current, rate = "pool1", base_depth, 4, 1
    for block, num_units in enumerate(units):
        depth = base_depth << block
        previous, stride = rate, 1 if block == 0 else 2
        if stride == 2 and current == output_stride:
            rate, stride = 2 * rate, 1
        current *= stride
        for unit in range(num_units):
            letter = f"b{unit}" if numbered[block] and unit else "abcdefghijklmnopqrstuvwxyz"[unit]
            name, s = f"res{block + 2}{letter}", stride if unit == 0 else 1
            d = rate if unit or dilate_first else previous
            shortcut = last
            if unit == 0:
                shortcut = name + "_branch1"
                conv(shortcut, last, num_in, 4 * depth, 1, stride=s)
            first, second = (s, 1) if stride_in == "2a" else (1, s)
            conv(name + "_branch2a", last, num_in, depth, 1, stride=first)
            relu(name + "_branch2a")
            middle = name + "_branch2a", depth, depth, 3
            conv(name + "_branch2b", *middle, stride=second, dilation=d)
            relu(name + "_branch2b")
            conv(name + "_branch2c", name + "_branch2b", depth, 4 * depth, 1, gain=0.3)
            layers.append(L(name, "Eltwise", [shortcut, name + "_branch2c"], [name]))
            relu(name)
            last, num_in = name, 4 * depth
    if head:
        weights = rng.normal(0, 0.1, (num_in, num_classes, 3, 3)).astype(np.float32)
        blobs = [weights, draw(-0.5, 0.5, num_classes)]
        layers.append(L("up", "Deconvolution", [last], ["up"], blobs, kernel=3, stride=2))
    return layers


# ------------------------------------------------------------------ files, byte by byte


def varint(n):
    out = bytearray()
    while n > 0x7F:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    return bytes([*out, n])


def number(field, value):
    return varint(field << 3) + varint(value)


def nested(field, data):
    return varint(field << 3 | 2) + varint(len(data)) + data


def text(field, value):
    return nested(field, value.encode())


def encode_blob(array, layout="new", *, doubles=False, packed=True):
    array = np.asarray(array)
    field, kind = (8, "<f8") if doubles else (5, "<f4")
    raw = array.astype(kind).tobytes()
    if packed:
        values = nested(field, raw)
    else:
        size, wire = (8, 1) if doubles else (4, 5)
        tag = varint(field << 3 | wire)
        values = b"".join(tag + raw[i : i + size] for i in range(0, len(raw), size))
    if layout == "new":
        return values + nested(7, nested(1, b"".join(varint(n) for n in array.shape)))
    shape = (1,) * (4 - array.ndim) + array.shape
    return b"".join(number(i, n) for i, n in enumerate(shape, 1)) + values


def encode_window(layer):
    if layer.type == "Pooling":
        return number(1, 0) + number(2, layer.kernel) + number(3, layer.stride)
    parts = [number(1, len(layer.blobs[0])), number(2, int(len(layer.blobs) > 1))]
    parts += [number(3, layer.pad), number(4, layer.kernel), number(5, layer.group)]
    parts += [number(6, layer.stride), number(18, layer.dilation)]
    return b"".join(parts)


def encode_layer(layer, layout="new", **blob):
    has_window = layer.type in ("Convolution", "Deconvolution", "Pooling") and layer.kernel
    blobs = [encode_blob(b, layout, **blob) for b in layer.blobs]
    if layout == "V1":
        parts = [*(text(2, b) for b in layer.bottoms), *(text(3, t) for t in layer.tops)]
        parts += [text(4, layer.name), number(5, V1_TYPES[layer.type])]
        parts += [nested(6, b) for b in blobs]
        if has_window:
            parts.append(nested(19 if layer.type == "Pooling" else 10, encode_window(layer)))
        return nested(2, b"".join(parts))
    parts = [text(1, layer.name), text(2, layer.type)]
    parts += [*(text(3, b) for b in layer.bottoms), *(text(4, t) for t in layer.tops)]
    parts += [nested(7, b) for b in blobs]
    if has_window:
        parts.append(nested(121 if layer.type == "Pooling" else 106, encode_window(layer)))
    if layer.eps is not None:
        parts.append(nested(139, number(1, 1) + varint(3 << 3 | 5) + struct.pack("<f", layer.eps)))
    if layer.type == "Scale":
        parts.append(nested(142, number(4, 1)))
    if layer.offset:
        parts.append(nested(144, b"".join(number(2, o) for o in layer.offset)))
    return nested(100, b"".join(parts))


def encode_net(layers, layout="new", **blob):
    """The bytes of a `.caffemodel`."""
    return text(1, "a net") + b"".join(encode_layer(la, layout, **blob) for la in layers)


# ------------------------------------------------------------------ prototxt, for Caffe itself


def prototxt(layers, size, *, loss=False):
    """The net as Caffe reads it, for images of (height, width)."""
    lines = [f'input: "data" input_shape {{ dim: 1 dim: 3 dim: {size[0]} dim: {size[1]} }}']
    if loss:
        # Caffe knows the shape of an input only; the label's is set when the logits' is known.
        num = layers[-1].blobs[0].shape[1]
        lines.append(f'input: "label" input_shape {{ dim: 1 dim: {num} dim: 1 dim: 1 }}')
    for la in layers:
        wires = [f'bottom: "{b}"' for b in la.bottoms] + [f'top: "{t}"' for t in la.tops]
        parts = [f'name: "{la.name}" type: "{la.type}"', *wires]
        if la.type in ("Convolution", "Deconvolution"):
            out = la.blobs[0].shape[0 if la.type == "Convolution" else 1]
            parts.append(
                f"convolution_param {{ num_output: {out} kernel_size: {la.kernel} stride: "
                f"{la.stride} pad: {la.pad} dilation: {la.dilation} bias_term: "
                f"{'true' if len(la.blobs) > 1 else 'false'} }}"
            )
        elif la.type == "Pooling":
            parts.append("pooling_param { pool: MAX kernel_size: 3 stride: 2 }")
        elif la.type == "BatchNorm":
            eps = "" if la.eps is None else f" eps: {la.eps}"
            parts.append(f"batch_norm_param {{ use_global_stats: true{eps} }}")
        elif la.type == "Scale":
            parts.append("scale_param { bias_term: true }")
        lines.append("layer { " + " ".join(parts) + " }")
    if loss:
        lines += [
            'layer { name: "crop" type: "Crop" bottom: "up" bottom: "label" top: "logits" '
            "crop_param { axis: 2 offset: 0 } }",
            'layer { name: "loss" type: "SigmoidCrossEntropyLoss" bottom: "logits" '
            'bottom: "label" top: "loss" }',
        ]
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------ what the layers compute


def convolve(x, w, stride, pad, dilation):
    k = w.shape[2]
    x = np.pad(x, ((0, 0), (pad, pad), (pad, pad)))
    out = [(n - dilation * (k - 1) - 1) // stride + 1 for n in x.shape[1:]]
    y = np.zeros((len(w), *out))
    for i in range(k):
        for j in range(k):
            top, left = i * dilation, j * dilation
            rows = slice(top, top + (out[0] - 1) * stride + 1, stride)
            columns = slice(left, left + (out[1] - 1) * stride + 1, stride)
            y += np.tensordot(w[:, :, i, j], x[:, rows, columns], 1)
    return y


def convolve_transposed(x, w, stride, pad):
    """Blob [in, out, kh, kw]: every input cell adds its patch; `pad` is cut from all four sides."""
    k, (h, wd) = w.shape[2], x.shape[1:]
    y = np.zeros((w.shape[1], (h - 1) * stride + k, (wd - 1) * stride + k))
    for i in range(k):
        for j in range(k):
            patch = np.tensordot(w[:, :, i, j].T, x, 1)
            y[:, i : i + (h - 1) * stride + 1 : stride, j : j + (wd - 1) * stride + 1 : stride] += (
                patch
            )
    return y[:, pad : y.shape[1] - pad, pad : y.shape[2] - pad]


def pool(x, *, round_down=False):
    """3x3, stride 2, no padding; rounds up, and windows are clipped at the image's end."""
    extents = [(n - 3) // 2 + 1 if round_down else -(-(n - 3) // 2) + 1 for n in x.shape[1:]]
    y = np.empty((len(x), *extents))
    for i in range(extents[0]):
        for j in range(extents[1]):
            y[:, i, j] = x[:, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3].max((1, 2))
    return y


def forward(layers, image, *, round_down=False):
    """All blobs for one image `[3, h, w]`, already BGR less the mean; float64."""
    blobs = {"data": np.asarray(image, np.float64)}
    for la in layers:
        x = blobs[la.bottoms[0]]
        w = [np.asarray(b, np.float64) for b in la.blobs]
        match la.type:
            case "Convolution":
                y = convolve(x, w[0], la.stride, la.pad, la.dilation)
                y = y + w[1][:, None, None] if len(w) > 1 else y
            case "Deconvolution":
                y = convolve_transposed(x, w[0], la.stride, la.pad) + w[1][:, None, None]
            case "BatchNorm":
                scale = 0.0 if w[2][0] == 0 else 1.0 / w[2][0]
                eps = 1e-5 if la.eps is None else la.eps
                mean, variance = w[0] * scale, w[1] * scale
                y = (x - mean[:, None, None]) / np.sqrt(variance + eps)[:, None, None]
            case "Scale":
                y = x * w[0][:, None, None] + w[1][:, None, None]
            case "ReLU":
                y = np.maximum(x, 0)
            case "Pooling":
                y = pool(x, round_down=round_down)
            case "Eltwise":
                y = x + blobs[la.bottoms[1]]
        blobs[la.tops[0]] = y
    return blobs


def logits(layers, image, **rules):
    """The transposed convolution's output, cropped at offset 0 to twice its input."""
    blobs = forward(layers, image, **rules)
    h, w = blobs[layers[-1].bottoms[0]].shape[1:]
    return blobs[layers[-1].tops[0]][:, : 2 * h, : 2 * w]
