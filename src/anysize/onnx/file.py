"""ONNX files that `anysize export` wrote: what they say of themselves, and running them.

A file holds the whole way from a uint8 image to logits or labels, and in its metadata what a
weights file holds: classes, kind, geometry and pixel convention. It runs in onnxruntime, on the CPU
and in float32, one image at its own size; `OnnxLabeller` puts the tiling of `anysize.predict.files`
around it.

A file from elsewhere can name other files on the disk for its tensors, or operations that need code
from elsewhere. Both are refused before onnxruntime sees the file.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from anysize.config import LabelKind, PixelConvention, read_geometry
from anysize.data.classes import Classes, saved_classes
from anysize.errors import (
    AnysizeError,
    ConfigError,
    DataError,
    DeviceError,
    ShapeError,
    WeightsError,
)
from anysize.geometry import NetGeometry, Size
from anysize.images.decode import Rows, as_rows
from anysize.predict.tiles import Prediction, predict_tiled, to_probabilities
from anysize.tables import from_table
from anysize.wording import count_of

if TYPE_CHECKING:
    import onnx
    import onnxruntime

Output = Literal["logits", "labels"]

ONNX_FORMAT = "anysize-onnx-1"

MAX_FILE_BYTES = 2**31 - 1
"""A protobuf message can be no larger; beyond it, ONNX needs a second file for the tensors."""

_FATAL = 4
"""Severity from which onnxruntime logs to the console; its errors come as exceptions as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxDescription:
    """What an ONNX file says of itself.

    Attributes:
        output: "logits": float32 `[k, h, w]`. "labels": uint8 `[h, w]`, and for sigmoid also
            `present`, uint8 `[k, h, w]`.
        classes, kind, pixels: As in `anysize.models.weights_file.Weights`.
        geometry: Of the net.
        source: What the weights were converted from; empty where Anysize trained them.
    """

    output: Output
    classes: Classes
    kind: LabelKind
    geometry: NetGeometry
    pixels: PixelConvention
    source: str = ""

    @property
    def output_names(self) -> list[str]:
        """Names of the graph's outputs, in their order."""
        if self.output == "logits":
            return ["logits"]
        return ["labels"] if self.kind == "multiclass" else ["labels", "present"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxLabeller:
    """An ONNX file as an `anysize.predict.files.Labeller`.

    Attributes:
        name: Of the file, for messages.
        description: What the file says of itself.
        session: That runs it.
    """

    name: str
    description: OnnxDescription
    session: onnxruntime.InferenceSession

    @property
    def classes(self) -> Classes:
        """See `Labeller`."""
        return self.description.classes

    @property
    def kind(self) -> LabelKind:
        """See `Labeller`."""
        return self.description.kind

    @property
    def geometry(self) -> NetGeometry:
        """See `Labeller`."""
        return self.description.geometry

    @property
    def pixels(self) -> PixelConvention:
        """See `Labeller`."""
        return self.description.pixels

    def predict(
        self, image: np.ndarray | Rows, *, max_pixels: int, keep_probabilities: bool
    ) -> Prediction:
        """Labels one image, in tiles if it has more than `max_pixels`; see `predict_image`.

        Raises:
            ConfigError: Probabilities are asked of a file that gives labels.
            ShapeError: The image needs tiles, and the file gives labels; or it is too small for the
                net.
            WeightsError: The file does not run, or gives logits that are not finite.
            DeviceError: The memory does not suffice.
        """
        if self.description.output == "logits":
            return predict_tiled(
                self._probabilities,
                image,
                self.geometry,
                kind=self.kind,
                max_pixels=max_pixels,
                keep_probabilities=keep_probabilities,
            )
        if keep_probabilities:
            raise ConfigError(
                f"{self.name} gives labels, and probabilities were asked for. Export it again with "
                "`--output logits`."
            )
        rows = as_rows(image)
        size = rows.size
        if size.pixels > max_pixels:
            raise ShapeError(
                f"The image of {size} has more than {max_pixels} pixels and would run in tiles, "
                f"but {self.name} gives labels, which cannot be blended. Raise --max-pixels, or "
                "export it again with `--output logits`."
            )
        labels, *present = self.run(rows.read(0, size.height))
        return Prediction(
            labels=labels,
            present=present[0] if present else None,
            probabilities=None,
            num_tiles=1,
        )

    def run(self, image: np.ndarray) -> list[np.ndarray]:
        """Runs the file on one image, uint8 `[h, w, 3]`, whole.

        Returns:
            The outputs that `OnnxDescription.output` describes.

        Raises:
            DataError: The image is not of 8 bits, or of another number of channels.
            ShapeError: The image is too small for the net.
            WeightsError: The file does not run, or its outputs have the wrong shape.
            DeviceError: The memory does not suffice.
        """
        size = Size(image.shape[0], image.shape[1])
        num_channels = len(self.pixels.mean)
        if image.dtype != np.uint8 or image.shape[2:] != (num_channels,):
            raise DataError(
                f"{self.name} takes images of {count_of(num_channels, 'channel')} of 8 bits, not "
                "of "
                f"{count_of(image.shape[2], 'channel')} of {8 * image.itemsize} bits. Predict with "
                "the run it "
                "was exported from, or convert the image."
            )
        for extent in size:
            self.geometry.cells(extent)  # Raises where nothing would be left of the image.
        try:
            outputs = [
                np.asarray(array)
                for array in self.session.run(
                    self.description.output_names, {"image": np.ascontiguousarray(image)}
                )
            ]
        except Exception as error:  # noqa: BLE001 - onnxruntime's exceptions have no common type.
            message = _first_line(error)
            if "alloc" in message.lower():
                raise DeviceError(
                    f"The memory does not suffice to run {self.name} on {size} pixels. Use a "
                    "smaller --max-pixels."
                ) from None
            raise WeightsError(
                f"{self.name} does not run on an image of {size}: {message}"
            ) from None
        num_classes = len(self.classes.names)
        for name, array in zip(self.description.output_names, outputs, strict=True):
            expected = (*size,) if name == "labels" else (num_classes, *size)
            if array.shape != expected:
                raise WeightsError(
                    f"{self.name} gives {name} of shape {array.shape} for an image of {size}; it "
                    f"should be {expected}. Export it again."
                )
        return outputs

    def _probabilities(self, tile: np.ndarray) -> Tensor:
        logits = torch.from_numpy(self.run(tile)[0])
        if not torch.isfinite(logits).all():
            raise WeightsError(
                f"{self.name} gives logits that are not finite on an image of "
                f"{tile.shape[0]}x{tile.shape[1]}. Export weights of an earlier step."
            )
        return to_probabilities(logits, self.kind)


def open_onnx(path: Path) -> OnnxLabeller:
    """Opens an ONNX file that `anysize export` wrote.

    Raises:
        WeightsError: No such file, damaged, not written by Anysize, or it asks for other files or
            for operations that ONNX does not have.
        ConfigError: The extra is not installed.
    """
    if not path.is_file():
        raise WeightsError(f"No such file: {path}.")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise WeightsError(f"{path} has more than 2 GB, so it is not an ONNX file in one piece.")
    return load_onnx(path.read_bytes(), str(path))


def load_onnx(data: bytes, name: str) -> OnnxLabeller:
    """Opens the bytes of an ONNX file; see `open_onnx`.

    Args:
        data: The whole file.
        name: Of the file, for messages.
    """
    require_extra()
    import onnx
    from google.protobuf.message import DecodeError

    try:
        # From bytes, so that nothing which the file names is read.
        proto = onnx.load_model_from_string(data)
        description = _read_description({p.key: p.value for p in proto.metadata_props}, name)
        _refuse_references(proto, name)
        session = _start(data, name)
        _check_signature(session, description, name)
    except (DecodeError, UnicodeDecodeError):
        raise WeightsError(
            f"{name} is damaged or not an ONNX file. Take another file, or export it again."
        ) from None
    return OnnxLabeller(name=name, description=description, session=session)


def require_extra() -> None:
    """Makes sure that onnx and onnxruntime are there.

    Raises:
        ConfigError: One of them is not installed.
    """
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"ONNX files need the package {error.name}, which is not installed. "
            'Run `pip install "anysize[export]"`.'
        ) from None


def to_metadata(description: OnnxDescription) -> dict[str, str]:
    """A description as the metadata properties of a file."""
    metadata = {
        "format": ONNX_FORMAT,
        "output": description.output,
        "kind": description.kind,
        "geometry": json.dumps(description.geometry.to_table()),
        **{
            key: json.dumps(dataclasses.asdict(getattr(description, key)))
            for key in ("classes", "pixels")
        },
    }
    return metadata | ({"source": description.source} if description.source else {})


def _start(data: bytes, name: str) -> onnxruntime.InferenceSession:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = _FATAL
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    # Between two images, threads that spin take the processor from decoding and writing.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        # The fallback is a second try with the same provider, announced on the console.
        return onnxruntime.InferenceSession(
            data, options, providers=["CPUExecutionProvider"], enable_fallback=0
        )
    except Exception as error:  # noqa: BLE001 - onnxruntime's exceptions have no common type.
        raise WeightsError(
            f"{name} is not a net that onnxruntime can run: {_first_line(error)} Export it again."
        ) from None


def _read_description(metadata: Mapping[str, str], name: str) -> OnnxDescription:
    if metadata.get("format") != ONNX_FORMAT:
        raise WeightsError(
            f"{name} is of format {metadata.get('format')!r}, not {ONNX_FORMAT!r}. Anysize runs "
            "only ONNX files that `anysize export` wrote."
        )
    try:
        description = OnnxDescription(
            output=_one_of(metadata["output"], ("logits", "labels")),
            classes=saved_classes(metadata["classes"], name),
            kind=_one_of(metadata["kind"], typing.get_args(LabelKind)),
            geometry=read_geometry(json.loads(metadata["geometry"]), name),
            pixels=from_table(PixelConvention, json.loads(metadata["pixels"]), name),
            source=metadata.get("source", ""),
        )
    except (KeyError, ValueError, TypeError, RecursionError, AnysizeError) as error:
        raise WeightsError(
            f"The metadata of {name} is invalid: {str(error).rstrip('.')}. Export it again."
        ) from None
    return description


def _one_of(value: Any, allowed: Sequence[Any]) -> Any:  # noqa: ANN401
    if value not in allowed:
        raise ValueError(f"{value!r} is none of {', '.join(map(str, allowed))}")
    return value


def _refuse_references(proto: onnx.ModelProto, name: str) -> None:
    """Refuses what would make onnxruntime read other files or look for code from elsewhere."""
    import onnx

    foreign = {o.domain for o in proto.opset_import} | {n.domain for n in proto.graph.node}
    foreign -= {"", "ai.onnx"}
    if foreign or proto.functions:
        which = ", ".join(sorted(map(str, foreign))) or "functions"
        raise WeightsError(
            f"{name} has operations of its own ({which}), and those are not run. Export it again."
        )
    tensors = list(proto.graph.initializer)
    sparse = list(proto.graph.sparse_initializer)
    for node in proto.graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g") or attribute.graphs:
                raise WeightsError(
                    f"{name} has a graph within its node {node.name!r}, which no export of Anysize "
                    "has. Export it again."
                )
            tensors += [attribute.t, *attribute.tensors]
            sparse += [attribute.sparse_tensor, *attribute.sparse_tensors]
    for tensor in tensors + [part for s in sparse for part in (s.values, s.indices)]:
        if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data:
            raise WeightsError(
                f"{name} keeps the tensor {tensor.name!r} in another file, and such files are not "
                "read. Export it again: Anysize writes one file."
            )


def _check_signature(
    session: onnxruntime.InferenceSession, description: OnnxDescription, name: str
) -> None:
    inputs = [(i.name, i.type, len(i.shape)) for i in session.get_inputs()]
    outputs = [(o.name, o.type) for o in session.get_outputs()]
    kind = "tensor(float)" if description.output == "logits" else "tensor(uint8)"
    if inputs != [("image", "tensor(uint8)", 3)] or outputs != [
        (output, kind) for output in description.output_names
    ]:
        raise WeightsError(
            f"{name} takes {inputs} and gives {outputs}, which is not what its metadata says. "
            "Export it again."
        )


def _first_line(error: Exception) -> str:
    """The message of an exception of onnxruntime, without its codes and the lines after it."""
    lines = str(error).strip().splitlines()
    text = lines[0].rsplit(" : ", 1)[-1].strip() if lines else type(error).__name__
    return text[:300].rstrip(".") + "."
