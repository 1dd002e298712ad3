"""Our own layout: `images/` and `masks/`, with masks in PNGs, folders or stacks."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from anysize.config import DataConfig, LabelKind, MaskKind
from anysize.data.classes import Classes, read_classes
from anysize.data.files import is_one_of
from anysize.data.formats.coco import coco_files, read_coco_folder
from anysize.data.formats.labelme import labelme_files, read_labelme
from anysize.data.reading import (
    STACK_SUFFIXES,
    Encoding,
    Reading,
    check_fits,
    check_several,
    in_doubt,
    scan_flat,
)
from anysize.errors import DataError
from anysize.faults import Fault

Container = Literal["png", "folders", "stack", "labelme", "coco"]


_NAMES: dict[Container, str] = {
    "png": "PNGs",
    "folders": "a folder a class",
    "stack": "stacks of planes",
    "labelme": "LabelMe files",
    "coco": "a COCO file",
}


_KINDS: dict[Container, MaskKind] = {
    "png": "index",
    "folders": "folders",
    "stack": "stack",
    "labelme": "labelme",
    "coco": "coco",
}


def read_own(root: Path, data: DataConfig, kind: LabelKind) -> Reading:
    """Reads a folder of our own layout, whatever holds its labels.

    Raises:
        DataError: Images, labels or classes are missing, or there are labels of several kinds.
    """
    images = root / data.images if data.images else root / "images"
    if not data.images and not images.is_dir() and labelme_files(root):
        images = root
    labels = root / (data.labels or "masks")
    toml = root / "classes.toml"
    classes = read_classes(toml) if toml.is_file() else None
    container = None
    if data.masks == "auto":
        container = find_container(root, images, labels, data, classes, kind)
    if data.masks == "coco" or container == "coco":
        return read_coco_folder(root, data, kind, classes, told=container is None)
    if data.masks == "labelme" or container == "labelme":
        return read_labelme(root, images, labels, data, kind, classes)
    classes = classes or read_classes(toml)
    if data.masks != "auto":
        check_fits(root, data.masks, classes, kind)
    folders = [labels]
    suffixes: tuple[str, ...] = (".png",)
    if container == "stack" or data.masks == "stack" or _binary_stack(labels, data):
        suffixes = STACK_SUFFIXES
    elif len(classes.names) > 1 or any((labels / name).is_dir() for name in classes.names):
        folders = mask_folders(root, labels, classes, kind)
    pairs = scan_flat(images, folders, suffixes)
    in_folders = folders != [labels]
    if in_folders:
        pairs.faults[:0] = stray_class_folders(root, labels, classes)
    masks, because = data.masks, ""
    if container == "stack":
        masks, because = "stack", "by the files in it"
    elif masks == "auto":
        masks, because = "index", None
    return Reading(
        images=images,
        labels=labels,
        pairs=pairs,
        classes=classes,
        named_by="classes.toml",
        encoding=Encoding(kind=masks, labels=kind),
        because=because,
        in_folders=in_folders,
    )


def find_container(
    root: Path,
    images: Path,
    labels: Path,
    data: DataConfig,
    classes: Classes | None,
    kind: LabelKind,
) -> Container | None:
    """What files hold the labels of a folder of our own layout; None where there are none.

    Raises:
        DataError: There are labels of several kinds.
    """
    if data.train.endswith(".json") or labels.is_file():
        return "coco"
    found: list[Container] = []
    if labels.is_dir():
        files = [p for p in labels.iterdir() if not p.name.startswith(".")]
        names = classes.names if classes else ()
        has_folders = any(p.is_dir() and (p.name in names or not names) for p in files)
        if has_folders and (
            kind == "multilabel" or not any(is_one_of(p, (".png",)) for p in files)
        ):
            found.append("folders")
        elif any(is_one_of(p, (".png",)) for p in files):
            found.append("png")
        if any(is_one_of(p, STACK_SUFFIXES) for p in files):
            found.append("stack")
        if labelme_files(labels):
            found.append("labelme")
    if images != labels and not data.labels and labelme_files(images):
        found.append("labelme")
    if not data.labels and coco_files(root):
        found.append("coco")
    if len(found) > 1:
        raise in_doubt(
            root,
            "holds labels of several kinds",
            (_KINDS[found[0]], _KINDS[found[1]]),
            (_NAMES[found[0]], _NAMES[found[1]]),
        )
    return found[0] if found else None


def _binary_stack(labels: Path, data: DataConfig) -> bool:
    if data.masks != "binary" or not labels.is_dir():
        return False
    return any(p.suffix.lower() in STACK_SUFFIXES for p in labels.iterdir())


def mask_folders(root: Path, labels: Path, classes: Classes, kind: LabelKind) -> list[Path]:
    """The folder of the masks, or that of each class for sigmoid.

    Raises:
        DataError: A class's name cannot be a folder's, or there is one class only.
    """
    if kind == "multiclass":
        check_several(root, classes)
        return [labels]
    for name in classes.names:
        if name in {".", ".."} or "/" in name or "\\" in name:
            raise DataError(
                f"The class {name!r} cannot name a folder of sigmoid masks "
                f"({root / 'classes.toml'}). Rename it."
            )
    return [labels / name for name in classes.names]


def stray_class_folders(root: Path, labels: Path, classes: Classes) -> list[Fault]:
    """The faults of folders among the masks that are no class."""
    if not labels.is_dir():
        return []
    return [
        Fault(
            kind="stray",
            path=entry,
            message=f"folder {entry} is not a class of {root / 'classes.toml'}",
        )
        for entry in sorted(labels.iterdir())
        if entry.is_dir() and not entry.name.startswith(".") and entry.name not in classes.names
    ]
