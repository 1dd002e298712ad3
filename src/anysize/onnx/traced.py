"""ONNX of a net that `model.net` names: PyTorch traces it, with what comes before and behind it.

Tracing follows one image. A net whose Python code decides by the image's size gives a file that is
wrong for other sizes; `anysize.onnx.export` compares files on many sizes and keeps none that
differs. Traced with TorchScript: the newer exporter needs onnxscript, and writes paths of this
machine into the file.
"""

from __future__ import annotations

import copy
import io
import warnings

import onnx
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anysize.config import PixelConvention
from anysize.errors import WeightsError
from anysize.geometry import NetGeometry
from anysize.models.any_net import AnyNet
from anysize.models.on_canvas import chosen_output
from anysize.onnx.file import OnnxDescription
from anysize.predict.tiles import NO_CLASS

_TRACED_EXTENTS = (75, 106)
"""Odd and even, and no multiple of any stride."""


class _Whole(nn.Module):
    """From a uint8 image to what the file gives, as `anysize.predict.tiles` computes it."""

    mean: Tensor
    std: Tensor

    def __init__(self, net: nn.Module, description: OnnxDescription) -> None:
        super().__init__()
        self.net = net
        self.description = description
        pixels = description.pixels
        self.register_buffer("mean", torch.tensor(pixels.mean))
        self.register_buffer("std", torch.tensor(pixels.std))

    def forward(self, image: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """`[h, w, c]` to logits `[k, h, w]` or labels `[h, w]`."""
        geometry: NetGeometry = self.description.geometry
        pixels: PixelConvention = self.description.pixels
        height, width = image.shape[0], image.shape[1]
        x = image.float()
        if pixels.channel_order == "BGR":
            x = x.flip(-1)
        x = (x * (pixels.max_value / 255) - self.mean) / self.std
        more = geometry.size_multiple
        x = F.pad(x.permute(2, 0, 1)[None], (0, -width % more, 0, -height % more))
        y = chosen_output(self.net(x), None)
        if geometry.head_stride > 1:
            scale = float(geometry.head_stride)
            y = F.interpolate(y, scale_factor=scale, mode="bilinear", align_corners=False)
        y = y[0, :, :height, :width]
        if self.description.output == "logits":
            return y
        best, labels = y.max(0)
        if self.description.kind == "multiclass":
            return labels.to(torch.uint8)
        labels = torch.where(best >= 0, labels, torch.full_like(labels, NO_CLASS))
        return labels.to(torch.uint8), (y >= 0).to(torch.uint8)


def trace(model: AnyNet, description: OnnxDescription, name: str) -> onnx.ModelProto:
    """The net as ONNX, for any size of image; to be compared on several.

    Raises:
        WeightsError: PyTorch's exporter cannot write the net.
    """
    whole = _Whole(copy.deepcopy(model.net).float().cpu(), description).eval()
    image = torch.zeros(*_TRACED_EXTENTS, len(description.pixels.mean), dtype=torch.uint8)
    axes = {0: "height", 1: "width"}
    data = io.BytesIO()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Of this exporter's age, and of traced decisions.
            torch.onnx.export(
                whole,
                (image,),
                data,  # pyright: ignore[reportArgumentType]
                dynamo=False,
                opset_version=18,
                input_names=["image"],
                output_names=description.output_names,
                dynamic_axes={
                    "image": axes,
                    "labels": axes,
                    **{output: {1: "height", 2: "width"} for output in ("logits", "present")},
                },
            )
    except Exception as error:  # its errors have no common type
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise WeightsError(
            f"{name} was not written: PyTorch's exporter cannot write this net: {first} Predict "
            "with the run itself."
        ) from error
    proto = onnx.load_model_from_string(data.getvalue())
    for node in proto.graph.node:
        node.doc_string = ""
    return proto
