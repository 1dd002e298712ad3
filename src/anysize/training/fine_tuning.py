"""Fine-tuning: what a net takes over from the weights that a run starts from."""

from __future__ import annotations

from pathlib import Path

from anysize.config import (
    ModelConfig,
    PixelConvention,
)
from anysize.data.samples import Classes
from anysize.errors import WeightsError
from anysize.models.fcn import FCN
from anysize.models.weights_file import OF_THE_BODY, WeightsFile, load_tensors, read_weights_file


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
