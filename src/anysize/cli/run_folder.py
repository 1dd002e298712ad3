"""A run folder or a weights file, named on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from anysize.models.weights_file import Weights


def load_weights_of(path: Path, device: Literal["auto", "cpu", "cuda"]) -> Weights:
    """The net of a run folder or a weights file, on a device."""
    from anysize.device import select_device
    from anysize.models.weights_file import load_weights, weights_path

    return load_weights(weights_path(path), select_device(device))
