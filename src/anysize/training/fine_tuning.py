"""Fine-tuning: what a net takes over from the weights that a run starts from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from anysize.config import (
    ModelConfig,
    PixelConvention,
)
from anysize.data.samples import Classes
from anysize.errors import WeightsError, first_names
from anysize.models.fcn import FCN
from anysize.models.weights_file import OF_THE_BODY, WeightsFile, load_tensors, read_weights_file


def start_from(
    model: FCN, path: Path, config: ModelConfig, classes: Classes
) -> tuple[PixelConvention, str]:
    """Fine-tuning: copies a weights file into a net that is to be trained on other classes perhaps.

    The body is taken whole. Of the head, the rows of classes that both have are taken by the
    classes' names; the rest keep their initial values. Output stride, norm, place of the loss and
    activation checkpointing may differ; what decides which function the weights are for may not.

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
    own = {n: t for n, t in model.state_dict().items() if n.startswith("head.")}
    theirs = () if file.classes is None else file.classes.names
    known = [name for name in classes.names if name in theirs]
    if not known:
        why = "the file has none" if file.classes is None else "no class has the same name"
        head, taken = own, f"body ({why}, so the head starts afresh)"
    else:
        _require_same("head_relu", file, config, path)
        taken = "body and head"
    if known and theirs != classes.names:
        head = _rows_by_name(head, own, theirs, classes.names, path)
        taken += f" ({_what_was_taken(theirs, classes.names)})"
    load_tensors(model, {**tensors, **head}, str(path))
    source = f" ({file.source})" if file.source else ""
    return file.pixels, f"Started from {path}{source}: {taken}."


def _rows_by_name(
    head: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    theirs: Sequence[str],
    ours: Sequence[str],
    path: Path,
) -> dict[str, Tensor]:
    """Our head with the rows of theirs whose class it has: `weights` by column, `biases`."""
    mixed = {name: tensor.clone() for name, tensor in own.items()}
    into = [i for i, name in enumerate(ours) if name in theirs]
    out_of = [theirs.index(ours[i]) for i in into]
    for name, tensor in mixed.items():
        axis = 1 if tensor.dim() > 1 else 0
        if name not in head or head[name].shape[axis] != len(theirs):
            raise WeightsError(
                f"{path} has no tensor {name} for its {len(theirs)} classes. Take another file."
            )
        rows = head[name].index_select(axis, torch.tensor(out_of)).to(tensor.device, tensor.dtype)
        if rows.shape != tensor.index_select(axis, torch.tensor(into)).shape:
            raise WeightsError(
                f"{name} in {path} is {tuple(head[name].shape)}, which does not fit this net's "
                f"{tuple(tensor.shape)}. Set [model] to the net that the file was made with."
            )
        tensor.index_copy_(axis, torch.tensor(into), rows)
    return mixed


def _what_was_taken(theirs: Sequence[str], ours: Sequence[str]) -> str:
    new = [name for name in ours if name not in theirs]
    gone = [name for name in theirs if name not in ours]
    said = [f"{len(ours) - len(new)} of {len(ours)} classes by name"]
    said += [f"starting afresh: {first_names(new)}"] if new else []
    said += [f"left out: {first_names(gone)}"] if gone else []
    return "; ".join(said)


def _require_same(key: str, file: WeightsFile, config: ModelConfig, path: Path) -> None:
    theirs, ours = getattr(file.config, key), getattr(config, key)
    if theirs != ours:
        raise WeightsError(
            f"`model.{key}` is {ours!r}, but the weights in {path} are for {theirs!r}. "
            f"Set `model.{key}` to {theirs!r}, or leave it out."
        )
