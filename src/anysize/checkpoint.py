"""Weights and training state as safetensors: no code inside, written whole, checked when read.

`weights.safetensors` is what a run gives to others: the net's tensors, and in the metadata all that
is needed to use them (net, classes, pixel convention). A file of `checkpoints/` is what a run gives
to itself: weights, the optimiser's state, the step, and a checksum over all of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from anysize.config import ModelConfig, PixelConvention, from_table
from anysize.data.samples import Classes
from anysize.errors import ConfigError, WeightsError
from anysize.files import write_atomic
from anysize.models.fcn import FCN, build_model

WEIGHTS_FORMAT = "anysize-weights-1"
STATE_FORMAT = "anysize-state-1"
NUM_KEPT = 2


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
    kind: Literal["softmax", "sigmoid"]
    pixels: PixelConvention


def save_weights(path: Path, weights: Weights) -> None:
    """Writes a weights file, whole or not at all.

    Raises:
        OSError: The disk is full or the folder cannot be written; an older file stays.
    """
    metadata = {
        "format": WEIGHTS_FORMAT,
        "model": json.dumps(dataclasses.asdict(weights.config)),
        "classes": json.dumps(dataclasses.asdict(weights.classes)),
        "kind": weights.kind,
        "pixels": json.dumps(dataclasses.asdict(weights.pixels)),
    }
    write_atomic(path, save(_contiguous(weights.model.state_dict()), metadata))


def load_weights(path: Path, device: torch.device) -> Weights:
    """Reads a weights file and builds its net.

    Raises:
        WeightsError: No such file, damaged, not a weights file of Anysize, or its tensors are not
            those of the net that it describes.
    """
    tensors, metadata = _read(path, WEIGHTS_FORMAT)
    try:
        config = from_table(ModelConfig, json.loads(metadata["model"]), str(path))
        classes = from_table(Classes, json.loads(metadata["classes"]), str(path))
        pixels = from_table(PixelConvention, json.loads(metadata["pixels"]), str(path))
        kind = metadata["kind"]
        if kind not in ("softmax", "sigmoid"):
            raise ConfigError(f"the kind of loss is {kind!r}")
    except (KeyError, ValueError, ConfigError) as error:
        raise WeightsError(
            f"The metadata of {path} does not hold: {error}. Take another file, or write it again."
        ) from None
    model = build_model(config, len(classes.names))
    load_tensors(model, tensors, str(path))
    return Weights(
        model=model.to(device).eval(), config=config, classes=classes, kind=kind, pixels=pixels
    )


def load_tensors(model: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Copies tensors into a net; every one of them, and of the net's, must find its partner.

    Raises:
        WeightsError: A name is on one side only, or two shapes differ; both sides are listed.
    """
    own = model.state_dict()
    missing = sorted(set(own) - set(tensors))
    surplus = sorted(set(tensors) - set(own))
    differing = [
        f"{n}: {tuple(tensors[n].shape)} in the file, {tuple(own[n].shape)} in the net"
        for n in own
        if n in tensors and tensors[n].shape != own[n].shape
    ]
    if missing or surplus or differing:
        raise WeightsError(
            f"{source} is not of this net. Only in the net: {_first(missing)}. Only in the file: "
            f"{_first(surplus)}. Of another shape: {_first(differing)}. Set [model] to the net "
            "that the file was made with."
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


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
    weights = load_weights(path, torch.device("cpu"))
    for key in ("pool_padding", "stride_position", "dilation_rule"):
        theirs, ours = getattr(weights.config, key), getattr(config, key)
        if theirs != ours:
            raise WeightsError(
                f"`model.{key}` is {ours!r}, but the weights in {path} are for {theirs!r}. "
                f"Set `model.{key}` to {theirs!r}."
            )
    tensors = dict(weights.model.state_dict())
    same_head = weights.classes.names == classes.names
    if not same_head:
        tensors.update({n: t for n, t in model.state_dict().items() if n.startswith("head.")})
    load_tensors(model, tensors, str(path))
    head = "body and head" if same_head else "body (the classes differ, so the head starts afresh)"
    return weights.pixels, f"Started from {path}: {head}."


def save_state(
    folder: Path,
    *,
    step: int,
    data_fingerprint: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> Path:
    """Writes `step-<step>.safetensors` and removes all but the last two.

    Args:
        folder: `checkpoints/` of a run.
        step: Steps done.
        data_fingerprint: Of the samples, so that a resumed run meets the same order.
        model: Its weights and moving statistics are saved.
        optimizer: Its state is saved by the names of the model's parameters.

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
        "sha256": _checksum(tensors),
    }
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{step:08d}.safetensors"
    write_atomic(path, save(tensors, metadata))
    for old in sorted(folder.glob("step-*.safetensors"))[:-NUM_KEPT]:
        old.unlink()
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A checkpoint that was read.

    Attributes:
        path: Its file.
        step: Steps done.
        data_fingerprint: Of the samples that it was trained on.
        damaged: Newer checkpoints that could not be read, as messages.
    """

    path: Path
    step: int
    data_fingerprint: str
    damaged: tuple[str, ...]
    tensors: Mapping[str, Tensor]

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Puts weights and optimiser back as they were.

        Raises:
            WeightsError: The checkpoint is of another net.
        """
        own = {n[6:]: t for n, t in self.tensors.items() if n.startswith("model/")}
        load_tensors(model, own, str(self.path))
        for name, parameter in model.named_parameters():
            prefix = f"optimizer/{name}/"
            for key, tensor in self.tensors.items():
                if key.startswith(prefix):
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
            if metadata.get("sha256") != _checksum(tensors):
                raise WeightsError(f"{path} is damaged: its checksum does not match.")
            return State(
                path=path,
                step=int(metadata["step"]),
                data_fingerprint=metadata["data"],
                damaged=tuple(damaged),
                tensors=tensors,
            )
        except (WeightsError, KeyError, ValueError) as error:
            damaged.append(str(error))
    if damaged:
        raise WeightsError(
            f"No checkpoint in {folder} can be read: {' '.join(damaged)} Start a new run."
        )
    return None


def _read(path: Path, expected_format: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    if not path.is_file():
        raise WeightsError(f"No such file: {path}.")
    try:
        with safe_open(path, framework="pt") as file:  # pyright: ignore[reportArgumentType]
            metadata: dict[str, Any] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} is damaged or not a safetensors file: {error}.") from None
    if metadata.get("format") != expected_format:
        raise WeightsError(
            f"{path} is of format {metadata.get('format')!r}, not {expected_format!r}. "
            "Was it written by another program?"
        )
    return tensors, metadata


def _as_the_optimizer_has_it(tensor: Tensor, parameter: Tensor) -> Tensor:
    if tensor.shape != parameter.shape:
        return tensor.clone()
    return torch.empty_like(parameter).copy_(tensor)


def _contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.detach().cpu().contiguous() for n, t in tensors.items()}


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _first(names: list[str]) -> str:
    if not names:
        return "nothing"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
