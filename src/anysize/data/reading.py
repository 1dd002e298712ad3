"""What a format's reader gives, whatever the format: pairs of files, and how labels are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from anysize.config import LabelKind, MaskKind
from anysize.data.classes import Classes
from anysize.errors import DataError
from anysize.faults import DoubtError, Fault
from anysize.geometry import Size

STACK_SUFFIXES = (".tif", ".tiff", ".npy")


def check_fits(root: Path, masks: MaskKind, classes: Classes, kind: LabelKind) -> None:
    """Refuses labels that are stored for the other kind of loss.

    Raises:
        DataError: They are.
    """
    if kind == "multiclass":
        check_several(root, classes)
        if masks in {"folders", "stack"}:
            raise DataError(
                f"The masks of {root} have one plane per class, which is for any number of classes "
                f'per pixel. Set loss.kind to "sigmoid".'
            )
        if masks == "binary" and len(classes.names) != 2:
            raise DataError(
                f"Masks of 0 and 255 tell two classes apart, but {root} has "
                f"{len(classes.names)}. Name the background and the class, in this order."
            )
    elif masks in {"index", "colours"} and len(classes.names) > 1:
        raise DataError(
            f"The masks of {root} have one class per pixel, but loss.kind is sigmoid, which takes "
            f'one mask per class. Set loss.kind to "softmax", or give one folder per class.'
        )


def check_several(root: Path, classes: Classes) -> None:
    """Refuses softmax over one class.

    Raises:
        DataError: There is only one.
    """
    if len(classes.names) < 2:
        raise DataError(
            f"{root / 'classes.toml'} names {len(classes.names)} class; softmax chooses "
            f"between at least 2. Add the background as a class, or set loss.kind to sigmoid."
        )


def in_doubt(
    root: Path, what: str, kinds: tuple[str, str], meanings: tuple[str, str]
) -> DoubtError:
    """The question that a person must answer."""
    return DoubtError(
        f"{root} {what}: {meanings[0]}, or {meanings[1]}. Say which: set data.masks to "
        f'"{kinds[0]}" or to "{kinds[1]}".',
        kinds,
    )


class Pair(NamedTuple):
    """An image and the files of its labels."""

    stem: str
    image: Path
    masks: tuple[Path, ...]
    annotations: tuple[Mapping[str, Any], ...] = ()
    claimed: Size | None = None
    file: Path | None = None


@dataclass(slots=True, kw_only=True)
class Pairs:
    """What a scan of names finds.

    Attributes:
        pairs: Sorted by stem.
        faults: What does not pair up.
        listed: Stems of the layout's own split into training and evaluation; None where it has
            none.
        notes: What a person should know of how the folder was read, a sentence each.
        unlabelled: Images that have no joints.
    """

    pairs: list[Pair]
    faults: list[Fault]
    listed: tuple[list[str], list[str]] | None = None
    notes: list[str] = field(default_factory=list[str])
    unlabelled: list[Path] = field(default_factory=list[Path])


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """How labels are stored.

    Attributes:
        kind: See `DataConfig.masks`.
        labels: What they become; None tells by the number of masks.
        lookup: The label of each of 256 values; empty where the classes say what values mean.
        orientation: See `DataConfig.mask_orientation`; for shapes it is their image's.
        file: The COCO file.
        categories: Names of the ids that shapes have, for "coco" and "polygons".
    """

    kind: MaskKind = "index"
    labels: LabelKind | None = None
    lookup: tuple[int, ...] = ()
    orientation: Literal["auto", "apply", "ignore"] = "auto"
    file: Path | None = None
    categories: Mapping[int | str, str] = field(default_factory=dict[int | str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """An image and its labels, on disk.

    Attributes:
        stem: File name without suffix, the same of image and masks.
        image: The image file.
        masks: One file, or one for each class in the order of the classes; none where labels are in
            a file of all images.
        size: Of the image with its EXIF orientation applied, and of the masks.
        encoding: How the labels are stored.
        annotations: Those of this image in a COCO file.
        claimed: Size of the image as a COCO file has it.
    """

    stem: str
    image: Path
    masks: tuple[Path, ...]
    size: Size
    encoding: Encoding = Encoding()
    annotations: tuple[Mapping[str, Any], ...] = ()
    claimed: Size | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a format's reader makes of a folder.

    Attributes:
        images: The folder of the images.
        labels: The folder of the labels, or the file that holds them.
        pairs: Images with their labels.
        classes: Their names and colours.
        named_by: What names the classes, in words.
        encoding: How the labels are stored.
        because: What tells this, in words; None where the values of PNGs have yet to be looked at.
        in_folders: Whether each class has a folder of PNGs.
    """

    images: Path
    labels: Path
    pairs: Pairs
    classes: Classes
    named_by: str
    encoding: Encoding
    because: str | None
    in_folders: bool = False
