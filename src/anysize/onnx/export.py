"""Export: a net of ours as one ONNX file that takes any image, proven before it is kept.

The graph takes `image`, uint8 RGB `[height, width, 3]` of any height and width, and does all that
`anysize.predict.files.predict_logits` does with an image that runs whole: pixel convention, net,
bilinear upsampling to the image's own size. Other runtimes than ours need no code of ours.

The image runs alone, without a canvas, so each convolution pads by itself. What is left of the
three pooling rules is where the first window starts. The padding at the end is always one cell; at
the beginning it is none (Caffe), one (torchvision), or one where the extent is odd (SAME), which
the graph reads from the tensor that it pools.

The graph is written node by node, not traced. `torch.onnx.export` (PyTorch 2.13, `dynamo=True`,
dynamic height and width) was tried first on a module of the same operations, and its files were
right; but the exporter raises a FutureWarning of its own, which ends it where warnings are errors;
with Caffe's pooling written as `max_pool2d(ceil_mode=True)` it fails at an inequality of extents,
"Expected op to be '==', got <"; it logs to the console; and each node of its file has a stack trace
with the paths of the machine that exported it.

Every file is checked before it gets its name: by ONNX's own checker, and in onnxruntime against our
own prediction on images of odd, even and tiny sizes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from anysize.atomic_files import write_atomic
from anysize.config import PixelConvention
from anysize.errors import ConfigError, DeviceError, ShapeError, WeightsError
from anysize.geometry import NetGeometry, Size
from anysize.models.any_net import AnyNet
from anysize.models.fcn import FCN
from anysize.models.net import Net
from anysize.models.ops import ConvNorm
from anysize.models.resnet_v1 import Unit
from anysize.models.weights_file import Weights
from anysize.onnx.file import (
    MAX_FILE_BYTES,
    OnnxDescription,
    OnnxLabeller,
    Output,
    load_onnx,
    require_extra,
    to_metadata,
)
from anysize.predict.tiles import NO_CLASS, predict_logits
from anysize.wording import count_of

if TYPE_CHECKING:
    import onnx

OPSET = 18
"""The first with reductions and padding over chosen axes; runtimes since 2023 have it."""

IR_VERSION = 8
"""Of the file format; the one of opset 18."""

FOLLOWS_ONE_SIZE = (
    "PyTorch's exporter follows the net on one image, and the file is wrong for images of other "
    "sizes. Predict with the run itself"
)

TOLERANCE = 1e-3
"""Largest difference from our own prediction, as a share of the range of the logits."""

CHECKED_SIZES = ((1, 1), (3, 5), (2, 4), (8, 7), (37, 54), (66, 39), (95, 64), (129, 122))
"""Every class modulo 4 of both extents, odd, even and tiny; the last has 5x4 cells at stride 32."""

_TO_THE_END = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportCheck:
    """How a file compares with our own prediction.

    Attributes:
        output: What was compared.
        sizes: Of the images that both ran on.
        difference: For logits: the largest difference, as a share of their range.
        num_pixels: For labels: pixels whose label is certain, that is, whose logits are further
            from a tie than `TOLERANCE` of the range.
        num_differing: How many of those got another label.
    """

    output: Output
    sizes: tuple[Size, ...]
    difference: float = 0.0
    num_pixels: int = 0
    num_differing: int = 0


@dataclass(slots=True)
class _Graph:
    """A graph under construction; every method returns the name of the tensor that it makes."""

    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, NDArray[np.generic]] = field(default_factory=dict)

    def node(
        self,
        operation: str,
        name: str,
        inputs: Sequence[str],
        attributes: Mapping[str, Any] | None = None,
    ) -> str:
        from onnx import helper

        self.nodes.append(
            helper.make_node(operation, inputs, [name], name=name, **(attributes or {}))
        )
        return name

    def constant(self, name: str, array: NDArray[np.generic]) -> str:
        self.constants[name] = np.ascontiguousarray(array)
        return name

    def integers(self, name: str, *values: int) -> str:
        return self.constant(name, np.array(values, np.int64))


def export(
    weights: Weights, path: Path, *, output: Output = "logits", source: str = ""
) -> ExportCheck:
    """Writes an ONNX file and compares it with our own prediction; a file that differs is not kept.

    Args:
        weights: The net, its classes and its pixel convention; any device, norm and mode.
        path: Ends with `.onnx`.
        output: "logits": float32 `[k, height, width]`. "labels": uint8 `[height, width]`, the
            class with the largest logit; for sigmoid `NO_CLASS` where no logit reaches 0, and
            `present`, uint8 `[k, height, width]`, as well.
        source: What the weights were converted from, for the metadata.

    Raises:
        ConfigError: The path does not end with `.onnx`, or the extra is not installed.
        WeightsError: The file would have more than 2 GB, or gives something else than our own
            prediction; or the weights have diverged.
        OSError: The disk is full or the folder cannot be written; an older file stays.
    """
    if path.suffix != ".onnx":
        raise ConfigError(f"{path} does not end with .onnx. `anysize predict` goes by the ending.")
    if weights.kind == "joints":
        raise ConfigError(
            "A net of joints is not exported: an ONNX file of Anysize gives labels of pixels. Use "
            "anysize predict, or anysize.load in Python."
        )
    require_extra()
    description = OnnxDescription(
        output=output,
        classes=weights.classes,
        kind=weights.kind,
        geometry=weights.model.geometry,
        pixels=weights.pixels,
        source=source,
    )
    model = weights.model
    traced = isinstance(model, AnyNet)
    data = build(model, description, str(path))
    try:
        check = compare(load_onnx(data, str(path)), weights)
    except (WeightsError, DeviceError) as error:
        if not traced:
            raise
        raise WeightsError(f"{path} was not written: {FOLLOWS_ONE_SIZE} ({error})") from error
    differs = check.num_differing or not check.difference <= TOLERANCE
    if differs and traced:
        raise WeightsError(f"{path} was not written: {FOLLOWS_ONE_SIZE} ({describe(check)}).")
    if differs:
        raise WeightsError(
            f"{path} was not written: run in onnxruntime, it differs from our own prediction "
            f"({describe(check)}). Report this with the versions of torch, onnx and onnxruntime."
        )
    write_atomic(path, data)
    return check


def build(model: Net, description: OnnxDescription, name: str) -> bytes:
    """The bytes of an ONNX file, held against ONNX's own checker.

    Args:
        model: The net.
        description: What the graph is to give, and what goes into the metadata.
        name: Of the file, for messages.

    Raises:
        WeightsError: The file would have more than 2 GB.
    """
    from onnx import TensorProto, helper, numpy_helper

    num_bytes = sum(4 * parameter.numel() for parameter in model.parameters())
    if num_bytes > MAX_FILE_BYTES - 2**24:
        raise WeightsError(
            f"{name} would have {num_bytes / 1e9:.1f} GB, and one ONNX file holds at most 2.1. "
            "Use a net with a smaller `model.base_depth`."
        )
    if isinstance(model, AnyNet):
        from anysize.onnx.traced import trace

        return _finished(trace(model, description, name), description)
    assert isinstance(model, FCN)
    graph = _Graph()
    features = _body(graph, model, _pixels(graph, description.pixels))
    logits = _at_full_resolution(graph, _head(graph, model, features), description.geometry)
    _outputs(graph, logits, description)
    num_channels, num_classes = len(description.pixels.mean), len(description.classes.names)
    shapes = {
        "logits": (TensorProto.FLOAT, [num_classes, "height", "width"]),
        "labels": (TensorProto.UINT8, ["height", "width"]),
        "present": (TensorProto.UINT8, [num_classes, "height", "width"]),
    }
    proto = helper.make_model(
        helper.make_graph(
            graph.nodes,
            "anysize",
            [
                helper.make_tensor_value_info(
                    "image", TensorProto.UINT8, ["height", "width", num_channels]
                )
            ],
            [helper.make_tensor_value_info(n, *shapes[n]) for n in description.output_names],
            [numpy_helper.from_array(array, n) for n, array in graph.constants.items()],
        ),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
    )
    return _finished(proto, description)


def _finished(proto: onnx.ModelProto, description: OnnxDescription) -> bytes:
    import onnx
    from onnx import helper

    proto.producer_name = "anysize"
    helper.set_model_props(proto, to_metadata(description))
    onnx.checker.check_model(proto, full_check=True)
    return proto.SerializeToString()


def compare(labeller: OnnxLabeller, weights: Weights) -> ExportCheck:
    """Runs an ONNX file and the net that it was made from on the same images.

    Raises:
        WeightsError: The net gives logits that are not finite.
    """
    images, ours = [], []
    for image in _images(labeller.geometry, len(labeller.pixels.mean)):
        with contextlib.suppress(ShapeError):  # Too small for this net, on a canvas and alone.
            ours.append(predict_logits(weights.model, image, weights.pixels).cpu().numpy())
            images.append(image)
    theirs = [labeller.run(image) for image in images]
    sizes = tuple(Size(*image.shape[:2]) for image in images)
    smallest, largest = min(o.min() for o in ours), max(o.max() for o in ours)
    # A net that gives one value everywhere has no range; rounding is then judged by the value.
    logit_range = float(max(largest - smallest, 1e-3 * max(abs(smallest), abs(largest))))
    if labeller.description.output == "logits":
        off = float(np.max([np.abs(t[0] - o).max() for t, o in zip(theirs, ours, strict=True)]))
        difference = off / logit_range if off else 0.0
        return ExportCheck(output="logits", sizes=sizes, difference=difference)
    num_pixels, num_differing = 0, 0
    for t, o in zip(theirs, ours, strict=True):
        for (label, certain), given in zip(
            _labels(o, labeller.kind, TOLERANCE * logit_range), t, strict=True
        ):
            num_pixels += int(certain.sum())
            num_differing += int((certain & (label != given)).sum())
    return ExportCheck(
        output="labels", sizes=sizes, num_pixels=num_pixels, num_differing=num_differing
    )


def describe(check: ExportCheck) -> str:
    """A check as a sentence without its full stop."""
    smallest, largest = min(check.sizes), max(check.sizes)
    images = f"on {count_of(len(check.sizes), 'image')} from {smallest} to {largest}"
    if check.output == "labels":
        return f"{check.num_differing} of {check.num_pixels} certain labels differ {images}"
    return f"largest difference {check.difference:.1e} of the range of the logits {images}"


def _images(geometry: NetGeometry, num_channels: int) -> Iterator[NDArray[np.uint8]]:
    rng = np.random.default_rng(0)
    for extents in CHECKED_SIZES:
        height, width = (_large_enough(extent, geometry) for extent in extents)
        yield rng.integers(0, 256, (height, width, num_channels), np.uint8)


def _large_enough(extent: int, geometry: NetGeometry) -> int:
    """The extent, or the next of its class modulo 4 that the net can run on."""
    try:
        geometry.cells(extent)
    except ShapeError:
        return _large_enough(extent + 4, geometry)
    return extent


def _labels(
    logits: NDArray[np.float32], kind: str, tolerance: float
) -> list[tuple[NDArray[np.generic], NDArray[np.bool_]]]:
    """What a file that gives labels should give, each with where that is certain."""
    best = logits.max(0)
    labels = logits.argmax(0)
    second = np.sort(logits, 0)[-2] if len(logits) > 1 else np.full_like(best, -np.inf)
    certain = best - second > tolerance
    if kind == "multiclass":
        return [(labels, certain)]
    labels = np.where(best >= 0, labels, NO_CLASS)
    certain = np.where(best >= 0, certain, True) & (np.abs(best) > tolerance)
    return [(labels, certain), (logits >= 0, np.abs(logits) > tolerance)]


def _pixels(graph: _Graph, pixels: PixelConvention) -> str:
    """Takes `image`; gives float32 `[1, c, h, w]`, by the arithmetic of `data.loader.normalise`."""
    from onnx import TensorProto

    x = graph.node("Cast", "pixels", ["image"], {"to": TensorProto.FLOAT})
    if pixels.channel_order == "BGR":
        order = graph.integers("pixels/order", 2, 1, 0)
        x = graph.node("Gather", "pixels/reordered", [x, order], {"axis": 2})
    steps = (
        ("Mul", "scale", np.float32(pixels.max_value / 255)),
        ("Sub", "mean", np.asarray(pixels.mean, np.float32)),
        ("Div", "std", np.asarray(pixels.std, np.float32)),
    )
    for operation, name, value in steps:
        constant = graph.constant(f"pixels.{name}", np.asarray(value))
        x = graph.node(operation, f"pixels/{operation.lower()}", [x, constant])
    x = graph.node("Transpose", "pixels/transposed", [x], {"perm": [2, 0, 1]})
    return graph.node("Unsqueeze", "input", [x, graph.integers("pixels.axis", 0)])


def _body(graph: _Graph, model: FCN, x: str) -> str:
    body = model.body
    x = _conv_norm(graph, "body.conv1", body.conv1, x)
    x = graph.node("Relu", "body.conv1/relu", [x])
    x = _max_pool(graph, x, body.geometry.pool_padding)
    for name, unit in body.units.items():
        assert isinstance(unit, Unit)
        x = _unit(graph, f"body.units.{name}", unit, x)
    return x


def _conv_norm(graph: _Graph, name: str, layer: ConvNorm, x: str) -> str:
    """A convolution with its norm folded into it; the moving statistics are the statistics."""
    # float64 on the CPU, so that only the folded weights are rounded, once.
    weights, gamma, beta, mean, variance = (
        tensor.detach().cpu().double().numpy()
        for tensor in (
            layer.weights,
            layer.gamma,
            layer.beta,
            layer.moving_mean,
            layer.moving_variance,
        )
    )
    scale = gamma / np.sqrt(variance + layer.EPSILON)
    folded = (weights * scale[:, None, None, None]).astype(np.float32)
    shift = (beta - mean * scale).astype(np.float32)
    return graph.node(
        "Conv",
        name,
        [x, graph.constant(f"{name}.weights", folded), graph.constant(f"{name}.biases", shift)],
        {
            "kernel_shape": list(folded.shape[2:]),
            "strides": [layer.stride] * 2,
            "dilations": [layer.rate] * 2,
            "pads": [layer.padding] * 4,
        },
    )


def _max_pool(graph: _Graph, x: str, rule: str) -> str:
    """3x3 max-pool with stride 2; zeros are as good as minus infinity, since no input is negative.

    Extents after it: `ceil(n / 2)`, and for Caffe `floor(n / 2)`, as in `NetGeometry.extents`.
    """
    begin = 1 if rule == "torchvision" else 0
    if rule == "same":
        extents = graph.node("Shape", "pool1/extents", [x], {"start": 2, "end": 4})
        two = graph.integers("pool1.two", 2)
        odd = graph.node("Mod", "pool1/odd", [extents, two])
        end = graph.integers("pool1.end", 0, 0)
        pads = graph.node("Concat", "pool1/pads", [odd, end], {"axis": 0})
        axes = graph.integers("pool1.axes", 2, 3)
        x = graph.node("Pad", "pool1/padded", [x, pads, "", axes])
    return graph.node(
        "MaxPool",
        "pool1",
        [x],
        {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [begin, begin, 1, 1]},
    )


def _unit(graph: _Graph, name: str, unit: Unit, x: str) -> str:
    """A unit and the ReLU after it."""
    shortcut, stride = x, unit.plan.stride
    if unit.shortcut is not None:
        shortcut = _conv_norm(graph, f"{name}.shortcut", unit.shortcut, x)
    elif stride > 1:
        subsampled = [
            graph.integers(f"{name}.subsample.{key}", value, value)
            for key, value in (("starts", 0), ("ends", _TO_THE_END))
        ]
        axes = graph.integers(f"{name}.subsample.axes", 2, 3)
        steps = graph.integers(f"{name}.subsample.steps", stride, stride)
        shortcut = graph.node("Slice", f"{name}/subsample", [x, *subsampled, axes, steps])
    y = x
    *layers, last = ("conv1", "conv2", "conv3") if hasattr(unit, "conv3") else ("conv1", "conv2")
    for layer in layers:
        y = _conv_norm(graph, f"{name}.{layer}", getattr(unit, layer), y)
        y = graph.node("Relu", f"{name}.{layer}/relu", [y])
    y = _conv_norm(graph, f"{name}.{last}", getattr(unit, last), y)
    return graph.node("Relu", name, [graph.node("Add", f"{name}/sum", [y, shortcut])])


def _head(graph: _Graph, model: FCN, x: str) -> str:
    head = model.head
    weights, biases = (
        graph.constant(f"head.{name}", tensor.detach().cpu().float().numpy())
        for name, tensor in (("weights", head.weights), ("biases", head.biases))
    )
    # SAME: the full result without its last row and column, which is what padding at the end is.
    x = graph.node(
        "ConvTranspose",
        "head",
        [x, weights, biases],
        {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [0, 0, 1, 1]},
    )
    return graph.node("Relu", "head/relu", [x]) if model.head_relu else x


def _at_full_resolution(graph: _Graph, x: str, geometry: NetGeometry) -> str:
    """Bilinear upsampling, cut to the image's own size; gives `[k, h, w]`."""
    axes = graph.integers("full.axes", 2, 3)
    if geometry.pool_padding == "caffe":
        # Its pooling can lose the image's last pixels; they read the last cell, as in `upsample`.
        pads = graph.integers("full.pads", 0, 0, 1, 1)
        x = graph.node("Pad", "full/padded", [x, pads, "", axes], {"mode": "edge"})
    scales = np.array([1, 1, geometry.head_stride, geometry.head_stride], np.float32)
    x = graph.node(
        "Resize",
        "full/upsampled",
        [x, "", graph.constant("full.scales", scales)],
        {"mode": "linear", "coordinate_transformation_mode": "half_pixel"},
    )
    size = graph.node("Shape", "full/size", ["image"], {"start": 0, "end": 2})
    x = graph.node("Slice", "full/cut", [x, graph.integers("full.starts", 0, 0), size, axes])
    return graph.node("Squeeze", "logits", [x, graph.integers("full.batch", 0)])


def _outputs(graph: _Graph, logits: str, description: OnnxDescription) -> None:
    """Turns logits into labels where those are asked for."""
    from onnx import TensorProto

    if description.output == "logits":
        return
    to_uint8 = {"to": TensorProto.UINT8}
    best = graph.node("ArgMax", "labels/best", [logits], {"axis": 0, "keepdims": 0})
    if description.kind == "multiclass":
        graph.node("Cast", "labels", [best], to_uint8)
        return
    best = graph.node("Cast", "labels/class", [best], to_uint8)
    least = graph.constant("present.least", np.array(0, np.float32))
    reached = graph.node("GreaterOrEqual", "present/reached", [logits, least])
    present = graph.node("Cast", "present", [reached], to_uint8)
    any_class = graph.node(
        "ReduceMax", "labels/any", [present, graph.integers("labels.axis", 0)], {"keepdims": 0}
    )
    is_any = graph.node("Cast", "labels/is_any", [any_class], {"to": TensorProto.BOOL})
    none = graph.constant("labels.none", np.array(NO_CLASS, np.uint8))
    graph.node("Where", "labels", [is_any, best, none])
