"""Fine-tuning: what a net takes over from the weights that a run starts from."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from anysize.config import (
    LabelKind,
    ModelConfig,
    PixelConvention,
)
from anysize.data.samples import Classes
from anysize.errors import ConfigError, WeightsError, first_names
from anysize.models.build import build_model
from anysize.models.net import Net
from anysize.models.weights_file import (
    OF_THE_BODY,
    WeightsFile,
    is_ours,
    load_tensors,
    read_weights_file,
)


def start_from(
    model: Net, path: Path, config: ModelConfig, classes: Classes, kind: LabelKind
) -> tuple[PixelConvention | None, str]:
    """Fine-tuning: copies a weights file into a net that is to be trained on other classes perhaps.

    The body is taken whole. Of the head, the rows of classes that both have are taken by the
    classes' names, or of joints by theirs; the rest keep their initial values. Output stride, norm,
    place of the loss and activation checkpointing may differ; what decides which function the
    weights are for may not. For a net that `model.net` names, see `_start_any_from`.

    Returns:
        The pixel convention that the weights were trained with, None where the file says none, and
        a sentence that says what was taken.

    Raises:
        WeightsError: As `load_weights`; or the rules of the file's net differ from `config`.
    """
    if config.net:
        return _start_any_from(model, path, config, classes)
    file = read_weights_file(path)
    for key in OF_THE_BODY:
        _require_same(key, file, config, path)
    tensors = {n: t for n, t in file.tensors.items() if n.startswith("body.")}
    head = {n: t for n, t in file.tensors.items() if not n.startswith("body.")}
    own = {n: t for n, t in model.state_dict().items() if not n.startswith("body.")}
    same_kind = (file.kind == "joints") == (kind == "joints")
    theirs = () if file.classes is None or not same_kind else file.classes.names
    known = [name for name in classes.names if name in theirs]
    if not known:
        why = "the file has none" if file.classes is None else "no class has the same name"
        why = why if same_kind or file.kind is None else f"the file's is of {file.kind} labels"
        head, taken = own, f"body ({why}, so the head starts afresh)"
    else:
        _require_same("head_relu", file, config, path)
        _require_same("part_maps", file, config, path)
        taken = "body and head"
        fresh = {n: t for n, t in own.items() if n.startswith("intermediate.")}
        head = fresh | {n: t for n, t in head.items() if n in fresh or n.startswith("head.")}
    if known and theirs != classes.names:
        axes = {name: 1 if tensor.dim() > 1 else 0 for name, tensor in own.items()}
        head = _rows_by_name(head, own, axes, theirs, classes.names, path)
        taken += f" ({_what_was_taken(theirs, classes.names)})"
    load_tensors(model, {**tensors, **head}, str(path))
    source = f" ({file.source})" if file.source else ""
    return file.pixels, f"Started from {path}{source}: {taken}."


def _rows_by_name(
    head: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    axes: Mapping[str, int],
    theirs: Sequence[str],
    ours: Sequence[str],
    path: Path,
) -> dict[str, Tensor]:
    """Our head with the rows of theirs whose class it has; `axes` say where the classes are."""
    mixed = {name: tensor.clone() for name, tensor in own.items()}
    shared = [name for name in ours if name in theirs]
    for name, tensor in mixed.items():
        axis = axes[name]
        per_class = tensor.shape[axis] // len(ours)
        into, out_of = (_rows(shared, names, per_class) for names in (ours, theirs))
        if name not in head or head[name].shape[axis] != per_class * len(theirs):
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


def _rows(shared: Sequence[str], names: Sequence[str], per_class: int) -> list[int]:
    """The channels of some classes: of joints, the part map of each, then its location in x, y."""
    places = [names.index(name) for name in shared]
    if per_class == 1:
        return places
    return places + [len(names) + 2 * i + axis for i in places for axis in (0, 1)]


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


def _start_any_from(
    model: Net, path: Path, config: ModelConfig, classes: Classes
) -> tuple[PixelConvention | None, str]:
    """Copies a file of ours or a library's own, by the names of the state dict.

    The file may be of the whole net, or of the module of it that it fits best, such as an encoder;
    that module is taken whole, and what the file has beyond it is left out. What depends on the
    number of classes is taken by the classes' names, or where a file has no names, if it is of the
    same number; else it starts afresh. All of it is said.

    Raises:
        WeightsError: The file cannot be read, or a tensor of the module is missing or of another
            shape.
    """
    file = read_weights_file(path) if is_ours(path) else None
    tensors = _read_state_dict(path) if file is None else file.tensors
    own = model.state_dict()
    prefix = _best_prefix(model, own, tensors)
    tensors = {prefix + name: tensor for name, tensor in tensors.items()}
    axes = _axes_of_classes(model, config, len(classes.names))
    theirs = () if file is None or file.classes is None else file.classes.names
    head = {n: tensors[n] for n in axes if n in tensors}
    said: list[str] = []
    if head and theirs and theirs != classes.names:
        rows = {n: own[n] for n in head}
        head = _rows_by_name(head, rows, axes, theirs, classes.names, path)
        said.append(_what_was_taken(theirs, classes.names))
    head = {n: t for n, t in head.items() if t.shape == own[n].shape}
    # Files from before PyTorch 0.4.1 have no counters.
    optional = {n for n in own if not n.startswith(prefix) or n.endswith("num_batches_tracked")}
    body = {n: t for n, t in tensors.items() if n in own and n not in axes}
    taken = body | head
    new = [n for n in own if n not in taken and (n in axes or n in optional)]
    load_tensors(model, {n: own[n] for n in new} | taken, str(path))
    where = f" as {prefix.rstrip('.')}" if prefix else ""
    said.insert(0, f"{len(taken)} of {len(own)} tensors{where}")
    surplus = [n.removeprefix(prefix) for n in tensors if n not in own]
    said += [f"starting afresh: {first_names(new)}"] if new else []
    said += [f"left out: {first_names(surplus)}"] if surplus else []
    return None if file is None else file.pixels, f"Started from {path}: {'; '.join(said)}."


def _best_prefix(model: Net, own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> str:
    """The path of the module whose state dict a file fits best, with a dot; empty for the net."""

    def num_fitting(prefix: str) -> int:
        fits = ((own.get(prefix + n), t.shape) for n, t in tensors.items())
        return sum(o is not None and o.shape == shape for o, shape in fits)

    prefixes = ["" if not name else f"{name}." for name, _ in model.named_modules()]
    return max(prefixes, key=num_fitting)  # The first of equals, so the outermost.


def _axes_of_classes(model: nn.Module, config: ModelConfig, num_classes: int) -> dict[str, int]:
    """The tensors that have an entry per class, and along which dimension."""
    try:
        other = build_model(config, num_classes + 1).state_dict()
    except ConfigError:
        return {}  # The number of classes is written into the net.
    found: dict[str, int] = {}
    for name, tensor in model.state_dict().items():
        shapes = zip(tensor.shape, other[name].shape, strict=True)
        found.update((name, axis) for axis, (a, b) in enumerate(shapes) if a != b)
    return found


def _read_state_dict(path: Path) -> dict[str, Tensor]:
    """A state dict that PyTorch or safetensors wrote; runs no code of the file.

    Raises:
        WeightsError: No such file, damaged, or it holds something else.
    """
    if not path.is_file():
        raise WeightsError(f"No such file: {path}.")
    try:
        if path.suffix == ".safetensors":
            found: Any = load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise WeightsError(
            f"{path} cannot be read: {first} Save the state_dict alone: "
            "torch.save(net.state_dict(), path)."
        ) from None
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not (isinstance(found, dict) and any(isinstance(t, Tensor) for t in found.values())):
        raise WeightsError(f"{path} holds no state dict. Save one: net.state_dict().")
    tensors = {str(n): t for n, t in found.items() if isinstance(t, Tensor)}
    if all(n.startswith("module.") for n in tensors):  # of DataParallel
        return {n.removeprefix("module."): t for n, t in tensors.items()}
    return tensors
