"""The state of a run as a file of its `checkpoints/`: what a run gives to itself.

Weights, the optimiser's state, the step, and a checksum over all of it; written whole, and passed
over where it is damaged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from anysize.errors import WeightsError
from anysize.models.weights_file import load_tensors, read_tensors, write_tensors

STATE_FORMAT = "anysize-state-3"

NUM_KEPT = 2


def save_state(
    folder: Path,
    *,
    step: int,
    made_of: Mapping[str, str],
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
        made_of: What its result depends on beside the settings; compared by a resumed run.
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
    metadata = {
        "format": STATE_FORMAT,
        "step": str(step),
        "made_of": json.dumps(made_of),
        "tally": json.dumps(tally or {}),
    }
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{step:08d}.safetensors"
    write_tensors(path, tensors, metadata)
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
        made_of, tally: As they were given to `save_state`.
        damaged: Newer checkpoints that could not be read, as messages.
        tensors: Of the net and of the optimiser.
    """

    path: Path
    step: int
    made_of: Mapping[str, str]
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
            tensors, metadata = read_tensors(path, STATE_FORMAT)
            return State(
                path=path,
                step=int(metadata["step"]),
                made_of=dict(json.loads(metadata["made_of"])),
                tally=dict(json.loads(metadata["tally"])),
                damaged=tuple(damaged),
                tensors=tensors,
            )
        except WeightsError as error:
            damaged.append(str(error))
        except (KeyError, ValueError, TypeError, RecursionError) as error:
            damaged.append(f"The metadata of {path} is invalid: {error!r}.")
    if damaged:
        raise WeightsError(
            f"No checkpoint in {folder} can be read: {' '.join(damaged)} Start a new run; if there "
            "is a weights.safetensors in this one, train.weights can start from it."
        )
    return None


def _as_the_optimizer_has_it(tensor: Tensor, parameter: Tensor) -> Tensor:
    """On the parameter's device, as fused optimisers keep all of their state, `step` included."""
    if tensor.shape != parameter.shape:
        return tensor.clone().to(parameter.device)
    return torch.empty_like(parameter).copy_(tensor)
