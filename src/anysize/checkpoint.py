"""Weights and training state as safetensors: no code inside, written whole, checked when read.

`weights.safetensors` is what a run gives to others: the net's tensors, and in the metadata all that
is needed to use them (net, classes, pixel convention). A file of `checkpoints/` is what a run gives
to itself: weights, the optimiser's state, the step, and a checksum over all of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from anysize.atomic_files import write_atomic
from anysize.config import (
    LabelKind,
    ModelConfig,
    PixelConvention,
    RunConfig,
    check_model,
    check_pixels,
    from_table,
    load_config,
)
from anysize.data.samples import Classes
from anysize.errors import ConfigError, WeightsError, first_names
from anysize.models.build import build_model
from anysize.models.fcn import FCN

WEIGHTS_FORMAT = "anysize-weights-1"
STATE_FORMAT = "anysize-state-2"
NUM_KEPT = 2

OF_THE_BODY = ("num_channels", "base_depth", "pool_padding", "stride_position", "dilation_rule")
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
    """

    model: FCN
    config: ModelConfig
    classes: Classes
    kind: LabelKind
    pixels: PixelConvention


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFile:
    """What a weights file holds, before a net is built from it.

    Attributes:
        config, pixels: As in `Weights`.
        classes, kind: As in `Weights`; None where the file is a body without a head, as the
            ImageNet checkpoints of other systems are.
        tensors: By the names of the net's state dict; without `head.*` for a body.
        source: What the file was converted from; empty where Anysize trained it.
    """

    config: ModelConfig
    pixels: PixelConvention
    classes: Classes | None
    kind: LabelKind | None
    tensors: Mapping[str, Tensor]
    source: str = ""


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
    }
    if file.classes is not None and file.kind is not None:
        metadata["classes"] = json.dumps(dataclasses.asdict(file.classes))
        metadata["kind"] = file.kind
    write_atomic(path, save(_contiguous(file.tensors), metadata))


def read_weights_file(path: Path) -> WeightsFile:
    """Reads a weights file; whether its tensors are those of its net, only building it shows.

    Raises:
        WeightsError: No such file, damaged, or not a weights file of Anysize.
    """
    tensors, metadata = _read(path, WEIGHTS_FORMAT)
    return _weights_file(path, metadata, tensors)


def load_weights(path: Path, device: torch.device) -> Weights:
    """Reads a weights file and builds its net.

    Raises:
        WeightsError: No such file, damaged, not a weights file of Anysize, a body without a head,
            or its tensors are not those of the net that it describes.
    """
    file = read_weights_file(path)
    if file.classes is None or file.kind is None:
        raise WeightsError(
            f"{path} is a body without a head ({file.source}), so it cannot label images yet. "
            "Train a head for your classes first: set `train.weights` to this file."
        )
    _require_same_tensors(expected_tensors(file, str(path)), file.tensors, str(path))
    model = build_model(file.config, len(file.classes.names))
    load_tensors(model, file.tensors, str(path))
    return Weights(
        model=model.to(device).eval(),
        config=file.config,
        classes=file.classes,
        kind=file.kind,
        pixels=file.pixels,
    )


def is_ours(path: Path) -> bool:
    """Whether a file says that Anysize wrote it: weights, or a state of training."""
    try:
        with safe_open(path, framework="pt") as file:  # pyright: ignore[reportArgumentType]
            return (file.metadata() or {}).get("format") in (WEIGHTS_FORMAT, STATE_FORMAT)
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
    num_classes = 1 if file.classes is None else len(file.classes.names)
    with torch.device("meta"):
        own = build_model(file.config, num_classes).state_dict()
    return {
        name: tensor.shape
        for name, tensor in own.items()
        if file.classes is not None or not name.startswith("head.")
    }


def load_run_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a `run.toml`; what it leaves open about the net, `train.weights` decides.

    The depth, the rules of padding, stride and dilation, and the pixel convention are those that
    the weights were trained with, unless the TOML file says otherwise.

    Raises:
        ConfigError: As `load_config`.
        WeightsError: The file that `train.weights` names cannot be read.
    """
    config = load_config(path, overrides)
    if not config.train.weights:
        return config
    weights = path.resolve().parent / config.train.weights
    metadata = _read_metadata(weights, WEIGHTS_FORMAT)
    file = _weights_file(weights, metadata, {})
    return load_config(path, overrides, defaults=_left_open(file.config, file.pixels))


def config_as_begun(path: Path, overrides: Sequence[str], began_with: Path) -> RunConfig:
    """Reads a `run.toml` to resume a run; what it leaves open about the net is as it was.

    So the weights that a run started from need not be there any more.

    Args:
        path: The TOML file.
        overrides: As in `load_config`.
        began_with: The run's own copy of its settings.

    Raises:
        ConfigError: As `load_config`, of either file.
    """
    before = load_config(began_with)
    return load_config(path, overrides, defaults=_left_open(before.model, before.pixels))


def _left_open(model: ModelConfig, pixels: PixelConvention) -> dict[str, dict[str, Any]]:
    net = dataclasses.asdict(model)
    return {
        "model": {key: net[key] for key in ("depth", "units", *OF_THE_BODY)},
        "pixels": dataclasses.asdict(pixels),
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


def start_from(
    model: FCN, path: Path, config: ModelConfig, classes: Classes
) -> tuple[PixelConvention, str]:
    """Fine-tuning: copies a weights file into a net that is to be trained on other classes perhaps.

    The body is taken whole. The head is taken if the classes are the same, and otherwise keeps its
    initial values. Output stride, norm, place of the loss and activation checkpointing may differ;
    what decides which function the weights are for may not.

    Returns:
        The pixel convention that the weights were trained with, and a sentence that says what was
        taken.

    Raises:
        WeightsError: As `load_weights`; or the rules of the file's net differ from `config`.
    """
    file = read_weights_file(path)
    for key in OF_THE_BODY:
        _require_same(key, file, config, path)
    tensors = {n: t for n, t in file.tensors.items() if n.startswith("body.")}
    head = {n: t for n, t in file.tensors.items() if n.startswith("head.")}
    same_head = file.classes is not None and file.classes.names == classes.names
    if same_head:
        _require_same("head_relu", file, config, path)
        taken = "body and head"
    else:
        head = {n: t for n, t in model.state_dict().items() if n.startswith("head.")}
        why = "the file has none" if file.classes is None else "the classes differ"
        taken = f"body ({why}, so the head starts afresh)"
    load_tensors(model, {**tensors, **head}, str(path))
    source = f" ({file.source})" if file.source else ""
    return file.pixels, f"Started from {path}{source}: {taken}."


def _require_same(key: str, file: WeightsFile, config: ModelConfig, path: Path) -> None:
    theirs, ours = getattr(file.config, key), getattr(config, key)
    if theirs != ours:
        raise WeightsError(
            f"`model.{key}` is {ours!r}, but the weights in {path} are for {theirs!r}. "
            f"Set `model.{key}` to {theirs!r}, or leave it out."
        )


def save_state(
    folder: Path,
    *,
    step: int,
    data_fingerprint: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tally: Mapping[str, Any] | None = None,
) -> Path:
    """Writes `step-<step>.safetensors` and keeps the one before it; all others are removed.

    Newer ones are removed as well: a run that goes on from an older checkpoint has passed over
    them since they are damaged, and writes them anew.

    Args:
        folder: `checkpoints/` of a run.
        step: Steps done.
        data_fingerprint: Of the samples, so that a resumed run meets the same order.
        model: Its weights and moving statistics are saved.
        optimizer: Its state is saved by the names of the model's parameters.
        tally: What else a resumed run must know, as JSON takes it.

    Raises:
        OSError: The disk is full or the folder cannot be written; older files stay.
    """
    tensors = {f"model/{n}": t for n, t in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer/{name}/{key}"] = torch.as_tensor(value)
    tensors = _contiguous(tensors)
    metadata = {
        "format": STATE_FORMAT,
        "step": str(step),
        "data": data_fingerprint,
        "tally": json.dumps(tally or {}),
    }
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{step:08d}.safetensors"
    write_atomic(path, save(tensors, {**metadata, "sha256": _checksum(tensors, metadata)}))
    there = sorted(folder.glob("step-*.safetensors"))
    kept = [p for p in there if p.name <= path.name][-NUM_KEPT:]
    for other in there:
        if other not in kept:
            other.unlink()
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A checkpoint that was read.

    Attributes:
        path: Its file.
        step: Steps done.
        data_fingerprint: Of the samples that it was trained on.
        tally: As it was given to `save_state`.
        damaged: Newer checkpoints that could not be read, as messages.
        tensors: Of the net and of the optimiser.
    """

    path: Path
    step: int
    data_fingerprint: str
    tally: Mapping[str, Any]
    damaged: tuple[str, ...]
    tensors: Mapping[str, Tensor]

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Puts weights and optimiser back as they were.

        Raises:
            WeightsError: The checkpoint is of another net or optimiser.
        """
        own = {n[6:]: t for n, t in self.tensors.items() if n.startswith("model/")}
        load_tensors(model, own, str(self.path))
        for name, parameter in model.named_parameters():
            prefix = f"optimizer/{name}/"
            for key, tensor in self.tensors.items():
                if key.startswith(prefix):
                    if tensor.numel() != 1 and tensor.shape != parameter.shape:
                        raise WeightsError(
                            f"{self.path}: {key} is {tuple(tensor.shape)}, but its parameter is "
                            f"{tuple(parameter.shape)}. Remove the file; the checkpoint before it "
                            "is then taken."
                        )
                    optimizer.state[parameter][key[len(prefix) :]] = _as_the_optimizer_has_it(
                        tensor, parameter
                    )


def load_latest_state(folder: Path) -> State | None:
    """Reads the newest checkpoint that is whole; `None` where there is none at all.

    Raises:
        WeightsError: There are checkpoints, and each is damaged.
    """
    damaged: list[str] = []
    for path in sorted(folder.glob("step-*.safetensors"), reverse=True):
        try:
            tensors, metadata = _read(path, STATE_FORMAT)
            stated = metadata.pop("sha256", "")
            if stated != _checksum(tensors, metadata):
                raise WeightsError(f"{path} is damaged: its checksum does not match.")
            return State(
                path=path,
                step=int(metadata["step"]),
                data_fingerprint=metadata["data"],
                tally=dict(json.loads(metadata["tally"])),
                damaged=tuple(damaged),
                tensors=tensors,
            )
        except WeightsError as error:
            damaged.append(str(error))
        except (KeyError, ValueError, TypeError, RecursionError) as error:
            damaged.append(f"The metadata of {path} does not hold: {error!r}.")
    if damaged:
        raise WeightsError(
            f"No checkpoint in {folder} can be read: {' '.join(damaged)} Start a new run; if there "
            "is a weights.safetensors in this one, train.weights can start from it."
        )
    return None


def _weights_file(
    path: Path, metadata: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> WeightsFile:
    try:
        config = from_table(ModelConfig, json.loads(metadata["model"]), str(path))
        pixels = from_table(PixelConvention, json.loads(metadata["pixels"]), str(path))
        check_model(config, str(path))
        check_pixels(pixels, config.num_channels, str(path))
        classes, kind = None, metadata.get("kind")
        if kind is not None:
            classes = from_table(Classes, json.loads(metadata["classes"]), str(path))
        if kind is not None and kind not in typing.get_args(LabelKind):
            raise ConfigError(f"the kind of labels is {kind[:80]!r}")
    except (KeyError, ValueError, TypeError, RecursionError, ConfigError) as error:
        raise WeightsError(
            f"The metadata of {path} does not hold: {error}. Take another file, or write it again."
        ) from None
    return WeightsFile(
        config=config,
        pixels=pixels,
        classes=classes,
        kind=typing.cast("LabelKind | None", kind),
        tensors=tensors,
        source=metadata.get("source", ""),
    )


def _read(path: Path, expected_format: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    metadata = _read_metadata(path, expected_format)
    try:
        with safe_open(path, framework="pt") as file:  # pyright: ignore[reportArgumentType]
            return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} is damaged: {error}. Take another file.") from None


def _read_metadata(path: Path, expected_format: str) -> dict[str, str]:
    if not path.is_file():
        raise WeightsError(f"No such file: {path}.")
    try:
        with safe_open(path, framework="pt") as file:  # pyright: ignore[reportArgumentType]
            metadata: dict[str, Any] = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise WeightsError(
            f"{path} is damaged or not a safetensors file: {error}. Weights of other systems are "
            "taken over with `anysize convert`."
        ) from None
    found = str(metadata.get("format"))[:40]
    if found != expected_format:
        raise WeightsError(
            f"{path} is of format {found!r}, not {expected_format!r}. Weights of "
            "other systems are taken over with `anysize convert`."
        )
    return metadata


def _as_the_optimizer_has_it(tensor: Tensor, parameter: Tensor) -> Tensor:
    if tensor.shape != parameter.shape:
        return tensor.clone()
    return torch.empty_like(parameter).copy_(tensor)


def _contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.detach().cpu().contiguous() for n, t in tensors.items()}


def _checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
