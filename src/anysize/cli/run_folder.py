"""A run folder or a weights file, named on the command line."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from anysize.cli.output import complain

if TYPE_CHECKING:
    from anysize.config import DeviceName
    from anysize.models.weights_file import Weights


def trust_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--trust-net`."""
    parser.add_argument(
        "--trust-net",
        action="store_true",
        help="import and call the code of the net that a weights file names",
    )


def load_weights_of(path: Path, device: DeviceName, *, trust_net: bool = False) -> Weights:
    """The net of a run folder or a weights file, on a device; says what is odd about it."""
    from anysize.device import select_device
    from anysize.models.weights_file import load_weights, weights_path

    weights = load_weights(weights_path(path), select_device(device), trust_net=trust_net)
    if weights.note:
        complain(weights.note.strip())
    return weights
