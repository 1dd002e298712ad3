"""Our own layout: `images/` and `masks/`, with masks in PNGs, folders or stacks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from anysize.config import DataConfig, LabelKind, MaskKind
from anysize.data.classes import Classes, read_classes
from anysize.data.files import files_below, is_one_of
from anysize.data.formats.coco import coco_files, read_coco_folder
from anysize.data.formats.label_studio import refuse_brush_masks
from anysize.data.formats.labelme import labelme_files, read_labelme
from anysize.data.mask_files import read_mask_header
from anysize.data.pairing import scan_flat
from anysize.data.reading import (
    STACK_SUFFIXES,
    Encoding,
    Reading,
    check_fits,
    check_several,
    in_doubt,
)
from anysize.errors import DataError
from anysize.faults import Fault, FaultError
from anysize.images.formats import LABEL_SUFFIXES, PICTURE_SUFFIXES, is_hidden

Container = Literal["files", "folders", "stack", "labelme", "coco"]


_NAMES: dict[Container, str] = {
    "files": "PNG, BMP or TIFF files",
    "folders": "one folder per class",
    "stack": "stacks of planes",
    "labelme": "LabelMe files",
    "coco": "a COCO file",
}


_KINDS: dict[Container, MaskKind] = {
    "files": "index",
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
    refuse_brush_masks(labels)
    classes = classes or read_classes(toml)
    masks: MaskKind = container if container in ("folders", "stack") else "index"
    check_fits(root, masks if data.masks == "auto" else data.masks, classes, kind)
    folders = [labels]
    suffixes = LABEL_SUFFIXES
    if container == "stack" or data.masks == "stack" or _binary_stack(labels, data):
        suffixes = STACK_SUFFIXES
    elif len(classes.names) > 1 or any((labels / name).is_dir() for name in classes.names):
        folders = mask_folders(root, labels, classes, kind)
    pairs = scan_flat(images, folders, suffixes, pattern=data.mask_pattern)
    in_folders = folders != [labels]
    if in_folders:
        pairs.faults[:0] = stray_class_folders(root, labels, classes)
    because = ""
    if data.masks != "auto":
        masks = data.masks
    elif container == "stack":
        because = "by the files in it"
    else:
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
        if has_class_folders(images, labels, classes) and (
            kind == "multilabel" or not _direct(labels, LABEL_SUFFIXES)
        ):
            found.append("folders")
        elif _mask_files(labels, paged=False):
            found.append("files")
        if _direct(labels, (".npy",)) or _mask_files(labels, paged=True):
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


def has_class_folders(images: Path, labels: Path, classes: Classes | None) -> bool:
    """Whether the masks lie in folders that are named like classes, and not like those of images.

    A class may be called "train", as a part of the images may.
    """
    names = classes.names if classes else None
    return labels.is_dir() and any(
        p.is_dir()
        and not is_hidden(p)
        and (names is None or p.name in names)
        and not (images / p.name).is_dir()
        for p in labels.iterdir()
    )


def has_stacks(labels: Path) -> bool:
    """Whether a folder holds files with one plane per class."""
    return labels.is_dir() and bool(_direct(labels, (".npy",)) or _mask_files(labels, paged=True))


def _direct(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    return [p for p in sorted(folder.iterdir()) if is_one_of(p, suffixes) and p.is_file()]


def _mask_files(labels: Path, *, paged: bool) -> bool:
    """Whether there are TIFFs of several pages, or masks and none of them.

    Files of formats that are not read count as of one page, so that they are named.
    """
    try:
        files = files_below(labels, PICTURE_SUFFIXES)
    except DataError:
        return False
    tiffs = [p for p in files if p.suffix.lower() in STACK_SUFFIXES]
    if not paged and len(tiffs) < len(files):
        return True
    return bool(tiffs) and any(_num_pages(path) > 1 for path in tiffs) is paged


def _num_pages(path: Path) -> int:
    try:
        return read_mask_header(path).num_pages
    except FaultError:
        return 1


def _binary_stack(labels: Path, data: DataConfig) -> bool:
    return data.masks == "binary" and has_stacks(labels)


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
        if entry.is_dir() and not is_hidden(entry) and entry.name not in classes.names
    ]
