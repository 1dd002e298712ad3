"""Looks at the joints of a data folder."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from anysize.check.budget import require_pairs
from anysize.check.findings import Finding
from anysize.config import RunConfig
from anysize.data.classes import Classes
from anysize.data.formats.joints import joints_of
from anysize.data.reading import Sample
from anysize.data.samples import Folder
from anysize.errors import DataError


def joint_counts(sample: Sample, classes: Classes) -> NDArray[np.int64]:
    """People of an image without each joint, and with it: `[k, 256]`, as `Seen.counts`."""
    labelled = np.isfinite(joints_of(sample, len(classes.names))[..., 0])
    counts = np.zeros((len(classes.names), 256), np.int64)
    counts[:, 0], counts[:, 1] = (~labelled).sum(0), labelled.sum(0)
    return counts


def outside(sample: Sample, classes: Classes) -> Iterator[Finding]:
    """Joints beyond the border of their image."""
    joints, file = joints_of(sample, len(classes.names)), sample.encoding.file or sample.image
    for person, entry in zip(joints, sample.annotations, strict=True):
        for name, (x, y) in zip(classes.names, person, strict=True):
            if not (-0.5 <= x <= sample.size.width and -0.5 <= y <= sample.size.height) and x == x:
                yield Finding(
                    kind="outside",
                    severity="fault",
                    path=sample.image,
                    message=f"{file} has {name!r} of person {entry['person']!r} at ({x:g}, {y:g}), "
                    f"outside image {sample.image} of {sample.size} (height x width). Correct it.",
                )


def of_the_folder(folder: Folder, config: RunConfig) -> Iterator[Finding]:
    """Images without joints, and pairs that nobody named."""
    for path in folder.unlabelled:
        message = f"image {path} has no labelled joint, so it is left out."
        yield Finding(kind="unlabelled", severity="warning", path=path, message=message)
    if folder.kind == "joints":
        try:
            require_pairs(config, folder.classes, folder.root)
        except DataError as error:
            yield Finding(kind="pairs", severity="fault", path=folder.root, message=str(error))
