"""Label Studio's brush masks, whose names tell the task and the label, but not the image."""

from __future__ import annotations

import re
from pathlib import Path

from anysize.errors import DataError

_BRUSH = re.compile(r"task-(\d+)-annotation-\d+-by-.*-tag-(.+)-\d+\.(?:png|npy)", re.IGNORECASE)
"""Source: label-studio-converter's `brush.py`."""


def refuse_brush_masks(folder: Path) -> None:
    """Refuses a folder of brush masks, since nothing in it says which image each belongs to.

    Raises:
        DataError: It is one; the message says how to name the files.
    """
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    for path in files:
        if match := _BRUSH.fullmatch(path.name):
            raise DataError(
                f"{path} is a brush mask of Label Studio, named by its task ({match[1]}) and label "
                f"({match[2]}), and not by its image. Its JSON export says which image a task has. "
                f'Rename the masks to {folder}/<label>/<image>.png and set loss.kind to "sigmoid", '
                f"or export polygons as COCO."
            )
