"""Weights as safetensors: no code inside, written whole, checked when read.

`weights.safetensors` is what a run gives to others: the net's tensors, and in the metadata all that
is needed to use them (net, classes, pixel convention).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from anysize.atomic_files import write_atomic
from anysize.config import (
    LabelKind,
    ModelConfig,
    PixelConvention,
    check_model,
    check_pixels,
    load_config,
)
from anysize.data.classes import Classes, saved_classes
from anysize.data.joints import num_logits
from anysize.errors import AnysizeError, ConfigError, WeightsError, first_names
from anysize.models.any_net import is_of_a_library, package_of
from anysize.models.build import build_model
from anysize.models.net import Net
from anysize.tables import from_table

WEIGHTS_FORMAT = "anysize-weights-2"


OF_THE_BODY = (
    "num_channels",
    "basic_units",
    "base_depth",
    "pool_padding",
    "stride_position",
    "dilation_rule",
)
"""Keys of `[model]` that decide, with the units, which function a body's weights are for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A net, and what is needed to use it.

    Attributes:
        model: In eval mode, on the device asked for.
        config: `[model]` that it was built with.
        classes: Names, colours and ignore index.
        kind: How its logits become labels.
        pixels: How uint8 RGB becomes its input.
        note: What a person should know of the file, as a sentence; usually empty.
    """

    model: Net
    config: ModelConfig
    classes: Classes
    kind: LabelKind
    pixels: PixelConvention
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFile:
    """What a weights file holds, before a net is built from it.

    Attributes:
        config, pixels: As in `Weights`.
        classes, kind: As in `Weights`; None where the file is a body without a head, as the
            ImageNet checkpoints of other systems are.
        tensors: By the names of the net's state dict; without `head.*` for a body.
        source: What the file was converted from; empty where Anysize trained it.
        package: Name and version of the package of `model.net`, if there is one.
    """

    config: ModelConfig
    pixels: PixelConvention
    classes: Classes | None
    kind: LabelKind | None
    tensors: Mapping[str, Tensor]
    source: str = ""
    package: str = ""


def save_weights(path: Path, weights: Weights) -> None:
    """Writes a weights file, whole or not at all.

    Raises:
        OSError: The disk is full or the folder cannot be written; an older file stays.
    """
    write_weights_file(
        path,
        WeightsFile(
            config=weights.config,
            pixels=weights.pixels,
            classes=weights.classes,
            kind=weights.kind,
            tensors=weights.model.state_dict(),
            package=package_of(weights.config.net),
        ),
    )


def write_weights_file(path: Path, file: WeightsFile) -> None:
    """Writes a weights file, whole or not at all; of a body too.

    Raises:
        OSError: The disk is full or the folder cannot be written; an older file stays.
    """
    metadata = {
        "format": WEIGHTS_FORMAT,
        "model": json.dumps(dataclasses.asdict(file.config)),
        "pixels": json.dumps(dataclasses.asdict(file.pixels)),
        "source": file.source,
        "package": file.package,
    }
    if file.classes is not None and file.kind is not None:
        metadata["classes"] = json.dumps(dataclasses.asdict(file.classes))
        metadata["kind"] = file.kind
    write_tensors(path, file.tensors, metadata)


def read_weights_file(path: Path) -> WeightsFile:
    """Reads a weights file.

    Raises:
        WeightsError: As `describe_weights_file`; or the checksum shows damage.
    """
    file = describe_weights_file(path)
    tensors, _ = read_tensors(path, WEIGHTS_FORMAT)
    return dataclasses.replace(file, tensors=tensors)


def describe_weights_file(path: Path) -> WeightsFile:
    """Reads the header of a weights file; its tensors have shapes but no values.

    Raises:
        WeightsError: No such file, damaged, not a weights file of Anysize, or its tensors are not
            those of the ResNet that it describes.
    """
    file = _parse_weights(path, read_metadata(path, WEIGHTS_FORMAT))
    with safe_open(path, framework="pt") as opened:  # pyright: ignore[reportArgumentType]
        shapes = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    file = dataclasses.replace(file, tensors=tensors)
    if not file.config.net:  # The code of other nets is only called where it is trusted.
        _require_same_tensors(expected_tensors(file, str(path)), tensors, str(path))
    return file


def weights_path(path: Path) -> Path:
    """The weights file of a run folder, or the file itself."""
    return path / "weights.safetensors" if path.is_dir() else path


def load_weights(path: Path, device: torch.device, *, trust_net: bool = False) -> Weights:
    """Reads a weights file and builds its net.

    Args:
        path: The file.
        device: Where the net is put.
        trust_net: A net that the file names as `package.module:build` is imported and called even
            if no `run.toml` beside the file names it with the same arguments.

    Raises:
        WeightsError: No such file, damaged, not a weights file of Anysize, a body without a head,
            its tensors are not those of the net that it describes, or the net is not trusted or
            cannot be built.
    """
    file = read_weights_file(path)
    if file.classes is None or file.kind is None:
        raise WeightsError(
            f"{path} is a body without a head ({file.source}), so it cannot label images yet. "
            "Train a head for your classes first: set `train.weights` to this file."
        )
    note = ""
    if file.config.net:
        if not trust_net:
            _require_consent(path, file.config)
        note = _said_of_versions(path, file)
    try:
        model = build_model(file.config, num_logits(file.kind, len(file.classes.names)))
    except AnysizeError as error:
        raise WeightsError(f"The net of {path} cannot be built. {note}{error}") from error
    load_tensors(model, file.tensors, str(path))
    return Weights(
        model=model.to(device).eval(),
        config=file.config,
        classes=file.classes,
        kind=file.kind,
        pixels=file.pixels,
        note=note,
    )


def _require_consent(path: Path, config: ModelConfig) -> None:
    """A file from someone else must not import and call code unnoticed."""
    if is_of_a_library(config.net):
        return
    run = path.parent / "run.toml"
    if run.is_file():
        named = load_config(run).model
        if (named.net, named.arguments) == (config.net, config.arguments):
            return
    arguments = ", ".join(f"{k}={v!r}" for k, v in config.arguments.items())
    raise WeightsError(
        f"To use {path}, {config.net}({arguments}) would be imported and called, and no run.toml "
        "beside the file names it. If you know that code, add --trust-net (in Python: "
        "trust_net=True)."
    )


def _said_of_versions(path: Path, file: WeightsFile) -> str:
    now = package_of(file.config.net)
    if now == file.package:
        return ""
    return (
        f"{path} was made with {file.package or 'a module of no package'}; here is "
        f"{now or 'no such package'}. "
    )


def is_ours(path: Path) -> bool:
    """Whether a file says that Anysize wrote it: weights, or a state of training."""
    try:
        with safe_open(path, framework="pt") as file:  # pyright: ignore[reportArgumentType]
            return str((file.metadata() or {}).get("format")).startswith("anysize-")
    except (SafetensorError, OSError):
        return False


def expected_tensors(file: WeightsFile, source: str) -> dict[str, torch.Size]:
    """Names and shapes of the tensors of the net that a file describes; builds no net for it.

    Raises:
        WeightsError: The net has more units than the file has tensors: the file is forged or cut.
    """
    # Every unit has more tensors than one, so this bounds what a forged file can have built.
    if sum(file.config.units) > len(file.tensors):
        raise WeightsError(
            f"{source} describes a net of {sum(file.config.units)} units, but holds "
            f"{len(file.tensors)} tensors. Take another file."
        )
    num_channels = 1
    if file.classes is not None and file.kind is not None:
        num_channels = num_logits(file.kind, len(file.classes.names))
    with torch.device("meta"):
        own = build_model(file.config, num_channels).state_dict()
    return {
        name: tensor.shape
        for name, tensor in own.items()
        if file.classes is not None or name.startswith("body.")
    }


def load_tensors(model: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Copies tensors into a net; every one of them, and of the net's, must find its partner.

    Raises:
        WeightsError: A name is on one side only, or two shapes differ; both sides are listed.
    """
    own = model.state_dict()
    _require_same_tensors({name: t.shape for name, t in own.items()}, tensors, source)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def _require_same_tensors(
    own: Mapping[str, torch.Size], tensors: Mapping[str, Tensor], source: str
) -> None:
    missing = sorted(set(own) - set(tensors))
    surplus = sorted(set(tensors) - set(own))
    differing = [
        f"{n}: {tuple(tensors[n].shape)} in the file, {tuple(own[n])} in the net"
        for n in own
        if n in tensors and tensors[n].shape != own[n]
    ]
    if missing or surplus or differing:
        raise WeightsError(
            f"{source} is not of this net. Only in the net: {first_names(missing, 5)}. Only in the "
            f"file: {first_names(surplus, 5)}. Of another shape: {first_names(differing, 5)}. "
            "Set [model] to the net that the file was made with."
        )


def _parse_weights(path: Path, metadata: Mapping[str, str]) -> WeightsFile:
    """A weights file from its metadata, without tensors.

    Raises:
        WeightsError: The metadata are invalid.
    """
    try:
        config = from_table(ModelConfig, json.loads(metadata["model"]), str(path))
        pixels = from_table(PixelConvention, json.loads(metadata["pixels"]), str(path))
        check_model(config, str(path))
        check_pixels(pixels, config.num_channels, str(path))
        classes, kind = None, metadata.get("kind")
        if kind is not None:
            classes = saved_classes(metadata["classes"], str(path))
        if kind is not None and kind not in typing.get_args(LabelKind):
            raise ConfigError(f"the kind of labels is {kind[:80]!r}")
    except (KeyError, ValueError, TypeError, RecursionError, ConfigError) as error:
        raise WeightsError(
            f"The metadata of {path} is invalid: {error}. Take another file, or write it again."
        ) from None
    return WeightsFile(
        config=config,
        pixels=pixels,
        classes=classes,
        kind=typing.cast("LabelKind | None", kind),
        tensors={},
        source=metadata.get("source", ""),
        package=metadata.get("package", ""),
    )


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file with a checksum over tensors and metadata, whole or not at all.

    Raises:
        OSError: The disk is full or the folder cannot be written; an older file stays.
    """
    tensors = {n: t.detach().cpu().contiguous() for n, t in tensors.items()}
    write_atomic(path, save(tensors, {**metadata, "sha256": _checksum(tensors, metadata)}))


def read_tensors(path: Path, expected_format: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file of ours.

    Raises:
        WeightsError: No such file, damaged, or of another format.
    """
    metadata = read_metadata(path, expected_format)
    stated = metadata.pop("sha256", "")
    try:
        with safe_open(path, framework="pt") as file:  # pyright: ignore[reportArgumentType]
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} is damaged: {error}. Take another copy of it.") from None
    if stated != _checksum(tensors, metadata):
        raise WeightsError(
            f"{path} is damaged: its checksum does not match. Take another copy of it."
        )
    return tensors, metadata


def _checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_metadata(path: Path, expected_format: str) -> dict[str, str]:
    """The metadata of a safetensors file of ours, without its tensors.

    Raises:
        WeightsError: No such file, damaged, or of another format.
    """
    if not path.is_file():
        raise WeightsError(f"No such file: {path}.")
    try:
        with safe_open(path, framework="pt") as file:  # pyright: ignore[reportArgumentType]
            metadata: dict[str, str] = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise WeightsError(
            f"{path} is damaged or not a safetensors file: {error}. Weights of other systems are "
            "taken over with `anysize convert`."
        ) from None
    found = str(metadata.get("format"))[:40]
    if found != expected_format:
        raise WeightsError(_of_another_format(path, found, expected_format))
    return metadata


def _of_another_format(path: Path, found: str, expected: str) -> str:
    if found.startswith("anysize-state-") and expected == WEIGHTS_FORMAT:
        run = path.absolute().parent.parent
        return (
            f"{path} is a checkpoint of a run, for `anysize train --resume` only. Give the run "
            f"folder, or the weights in it: {run / 'weights.safetensors'}."
        )
    if found.startswith("anysize-"):
        return (
            f"{path} is of format {found!r}, but {expected!r} is needed: it is another kind of "
            "file, or of another version of Anysize."
        )
    return (
        f"{path} was not written by Anysize. Weights of other systems are taken over with `anysize "
        "convert`."
    )
