"""Tells whose layout a data folder has, by the folders that are there."""

from __future__ import annotations

from pathlib import Path

from anysize.config import DataConfig, FolderLayout, MaskKind
from anysize.data.formats.voc import VOC_MASKS
from anysize.errors import DataError

LAYOUT_MASKS: dict[FolderLayout, tuple[MaskKind, ...]] = {
    "anysize": ("index", "colours", "binary", "folders", "stack", "labelme", "coco"),
    "voc": ("index", "colours"),
    "cityscapes": ("index",),
    "ultralytics": ("polygons",),
}
"""What `data.masks` may be in each layout."""


def detect_layout(root: Path, data: DataConfig) -> FolderLayout:
    """Tells the layout by the folders that are there.

    Raises:
        DataError: They are those of several layouts.
    """
    if data.layout != "auto":
        return data.layout
    if data.masks != "auto":
        goes_with: list[FolderLayout] = [
            layout for layout, masks in LAYOUT_MASKS.items() if data.masks in masks
        ]
        if len(goes_with) == 1:
            return goes_with[0]
    found: list[FolderLayout] = []
    if (root / "images").is_dir() and (root / "masks").is_dir():
        found.append("anysize")
    if (root / "JPEGImages").is_dir() and any((root / name).is_dir() for name in VOC_MASKS):
        found.append("voc")
    if (root / "leftImg8bit").is_dir():
        found.append("cityscapes")
    if (root / "images").is_dir() and (root / "labels").is_dir():
        found.append("ultralytics")
    if len(found) > 1:
        raise DataError(
            f"{root} holds the folders of several layouts: {' and '.join(found)}. Say which one: "
            f'set data.layout to "{found[0]}" or "{found[1]}".'
        )
    return found[0] if found else "anysize"
