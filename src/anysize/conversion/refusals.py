"""Files of other systems that cannot be taken, each by its name and with the way out."""

from __future__ import annotations

import zipfile
from pathlib import Path

HDF5 = b"\x89HDF\r\n\x1a\n"

_KERAS = (
    "Keras's own ResNets differ from TF-Slim's and torchvision's in their padding, and have biases "
    "in the body. Convert the same depth from TF-Slim, torchvision or timm."
)


def refused_by_name(path: Path) -> str:
    """Why a file or folder cannot be taken, and what to take instead; "" where it is another."""
    folder = path.parent if path.name == "saved_model.pb" else path
    if (folder / "saved_model.pb").is_file():
        variables = folder / "variables" / "variables"
        return (
            f"{path} is a SavedModel, whose weights are a checkpoint of their own. Give "
            f"{variables}: it is taken where TensorFlow 1 wrote it from a TF-Slim net."
        )
    if path.suffix in (".pb", ".pbtxt"):
        return (
            f"{path} is a graph of TensorFlow, whose weights are frozen into it or not in it at "
            "all. Give the checkpoint that it was made from (.ckpt, or .index with .data-...)."
        )
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        start = file.read(8)
    if start == HDF5 or path.suffix in (".h5", ".hdf5"):
        return (
            f"{path} is an HDF5 file, as Keras writes it (.h5), or Caffe as a snapshot. {_KERAS} "
            "In Caffe, set snapshot_format: BINARYPROTO and give the .caffemodel."
        )
    if path.suffix == ".keras" or (start[:4] == b"PK\x03\x04" and _is_keras(path)):
        return f"{path} is a model of Keras. {_KERAS}"
    return ""


def _is_keras(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return "model.weights.h5" in archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return False
