"""The data folder: finds images and their labels, and splits them.

    images/<stem>.jpg          any image
    masks/<stem>.png           softmax: an index PNG, values are class ids
    masks/<class>/<stem>.png   sigmoid: a PNG a class, values 0 and 1
    classes.toml               names, colours, ignore_index

or what `layouts` and `detect` tell apart. Finding reads headers only. Every fault of a stage is in
one message, so that a folder is put right in few rounds. docs/data-folder.md describes the folder
for its makers.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from anysize.config import DataConfig, FolderLayout, LabelKind, MaskKind
from anysize.data.classes import Classes, background_id, read_classes, with_ids
from anysize.data.detect import Detected, detect_masks
from anysize.data.files import files_below, read_lines
from anysize.data.formats.cityscapes import cityscapes_folders, read_cityscapes
from anysize.data.formats.coco import coco_frame
from anysize.data.formats.joints import joints_frame, read_joints
from anysize.data.formats.own import mask_folders, read_own, stray_class_folders
from anysize.data.formats.ultralytics import read_ultralytics
from anysize.data.formats.voc import read_voc
from anysize.data.layouts import LAYOUT_MASKS, detect_layout
from anysize.data.mask_files import MaskHeader, read_mask_headers
from anysize.data.masks import check_header, decode_mask, label_kind
from anysize.data.pairing import scan_flat
from anysize.data.reading import (
    Encoding,
    Pair,
    Pairs,
    Reading,
    Sample,
    check_fits,
)
from anysize.errors import DataError
from anysize.faults import Fault, FaultError, listing
from anysize.images.decode import EIGHT_BIT_MODES, decode_image
from anysize.images.formats import IMAGE_SUFFIXES, LABEL_SUFFIXES
from anysize.images.headers import read_sizes, unreadable

__all__ = [
    "EIGHT_BIT_MODES",
    "IMAGE_SUFFIXES",
    "Classes",
    "Encoding",
    "Folder",
    "LabelKind",
    "Sample",
    "decode_image",
    "decode_mask",
    "find_samples",
    "images_of",
    "label_kind",
    "list_images",
    "read_classes",
    "read_folder",
    "scan_folder",
    "split_samples",
]

_ADD_OR_REMOVE = "Add what is missing, or remove the other half."

_LAYOUT_NAMES: dict[FolderLayout, str] = {
    "anysize": "our own",
    "voc": "Pascal VOC",
    "cityscapes": "Cityscapes",
    "ultralytics": "Ultralytics",
}

_MASK_NAMES: dict[MaskKind, str] = {
    "index": "ids",
    "colours": "colours of classes.toml",
    "binary": "0 and 255",
    "folders": "one folder per class, 0 and 1",
    "stack": "one plane per class",
    "labelme": "LabelMe files",
    "coco": "a COCO file",
    "polygons": "Ultralytics' polygons",
    "joints": "joints",
}


def list_images(folder: Path) -> list[Path]:
    """The image files directly in a folder, sorted by name.

    Raises:
        DataError: No such folder, or no image in it.
    """
    return files_below(folder, IMAGE_SUFFIXES, deep=False)


def images_of(root: Path, data: DataConfig) -> list[Path]:
    """All images of a data folder, or of a folder of images, whether they have labels or not.

    Raises:
        DataError: No image, or the folders of several layouts.
    """
    match detect_layout(root, data):
        case "voc":
            return list_images(root / (data.images or "JPEGImages"))
        case "cityscapes":
            images, _ = cityscapes_folders(root, data)
            return sorted(images.glob("*/*/*_leftImg8bit.png")) or list_images(images)
        case "ultralytics":
            images = root / (data.images or "images")
            splits = [images / s for s in ("train", "val") if (images / s).is_dir()]
            return [path for folder in splits or [images] for path in list_images(folder)]
        case "anysize":
            images = root / (data.images or "images")
            apart = images.is_dir() or bool(data.images)
            return files_below(images if apart else root, IMAGE_SUFFIXES, deep=apart)


def find_samples(root: Path, classes: Classes, kind: LabelKind) -> list[Sample]:
    """Finds the pairs of image and mask in `images/` and `masks/`, sorted by stem.

    Reads headers only, so labels are not checked here; `decode_mask` does.

    Args:
        root: Folder with `images/` and `masks/`.
        classes: Of `classes.toml`.
        kind: "multiclass" takes one mask per image, "multilabel" one for each class.

    Raises:
        DataError: A folder is missing or empty, an image or mask lacks its partner, two files share
            a stem, a header cannot be read, or a mask has another size than its image.
    """
    folders = mask_folders(root, root / "masks", classes, kind)
    pairs = scan_flat(root / "images", folders, LABEL_SUFFIXES)
    if kind == "multilabel":
        pairs.faults[:0] = stray_class_folders(root, root / "masks", classes)
    headers = read_mask_headers(mask for pair in pairs.pairs for mask in pair.masks)
    samples, _, faults = _samples(pairs, Encoding(), headers)
    _raise_first_stage(root, root / "masks", [*pairs.faults, *faults], len(pairs.pairs))
    return samples


def read_folder(root: Path, data: DataConfig, kind: LabelKind) -> Folder:
    """Reads a data folder of any layout and encoding; see `scan_folder`.

    Raises:
        DataError: As `scan_folder`; also if anything is wrong with a file, by its name or header:
            all faults of the first stage that has any.
    """
    folder = scan_folder(root, data, kind)
    _raise_first_stage(root, folder.labels, folder.faults, folder.num_pairs)
    return folder


def scan_folder(root: Path, data: DataConfig, kind: LabelKind) -> Folder:
    """Finds images and labels in a folder, and how they are stored; collects what is wrong.

    Reads headers, texts of classes, a COCO file, and up to eight masks if `data.masks` is "auto".

    Args:
        root: The data folder.
        data: Says what is not to be detected.
        kind: What labels are to become.

    Raises:
        DataError: There is nothing to be scanned, the classes are not known, or the files can be
            read in two ways; the message says which setting decides.
    """
    if not root.is_dir():
        raise DataError(f"No such data folder: {root}. Set data.root to where the images are.")
    layout, reading = _read(root, data, kind)
    pairs, classes = reading.pairs, with_ids(reading.classes, data.ids)
    encoding = dataclasses.replace(reading.encoding, orientation=data.mask_orientation)
    if data.ids:
        encoding = dataclasses.replace(encoding, lookup=())
    headers = _mask_headers(pairs, encoding)
    detected = Detected(encoding.kind, reading.because or "as data.masks says")
    if reading.because is None:
        detected = detect_masks(root, headers, classes, kind, in_folders=reading.in_folders)
        encoding = dataclasses.replace(encoding, kind=detected.kind)
    if kind != "joints":
        check_fits(root, encoding.kind, classes, kind)
    _check_ids(root, data, classes, encoding.kind, kind)
    faults, notes = [*pairs.faults, *detected.faults], [*pairs.notes, *detected.notes]
    samples, refused, of_files = _samples(pairs, encoding, headers)
    faults += of_files
    shapes = encoding.kind in {"labelme", "coco", "polygons"}
    if shapes and kind == "multiclass" and background_id(classes) is None:
        notes.append("Pixels in no shape are ignored, since no class is called background.")
    return Folder(
        root=root,
        layout=layout,
        classes=classes,
        kind=kind,
        samples=samples,
        refused=refused,
        masks=encoding.kind,
        faults=tuple(faults),
        listed=pairs.listed,
        labels=reading.labels,
        num_pairs=len(pairs.pairs),
        description=_describe(root, data, layout, reading, detected, samples),
        notes=tuple(notes),
        unlabelled=tuple(pairs.unlabelled),
    )


def _read(root: Path, data: DataConfig, kind: LabelKind) -> tuple[FolderLayout, Reading]:
    if kind == "joints":
        return "anysize", read_joints(root, data)
    layout = detect_layout(root, data)
    if data.masks not in ("auto", *LAYOUT_MASKS[layout]):
        raise DataError(
            f'`data.masks` is "{data.masks}", but {root} is read as data.layout "{layout}", whose '
            f"masks are {' or '.join(LAYOUT_MASKS[layout])}. Set one or the other right."
        )
    match layout:
        case "voc":
            return layout, read_voc(root, data, kind)
        case "cityscapes":
            return layout, read_cityscapes(root, data, kind)
        case "ultralytics":
            return layout, read_ultralytics(root, data, kind)
        case "anysize":
            return layout, read_own(root, data, kind)


def _describe(
    root: Path,
    data: DataConfig,
    layout: FolderLayout,
    reading: Reading,
    detected: Detected,
    samples: Sequence[Sample],
) -> str:
    num = len(reading.classes.names)
    if detected.kind == "joints":
        people = sum(len(sample.annotations) for sample in samples)
        return (
            f"{root}: {len(samples)} images with joints of {people} people ({detected.because}); "
            f"{num} joints ({reading.named_by})."
        )
    where = _LAYOUT_NAMES[layout]
    if layout == "anysize":
        apart = reading.images != root
        where = f"{reading.images.relative_to(root)}/" if apart else "beside their labels"
    key, setting = "data.layout", data.layout
    if len(LAYOUT_MASKS[layout]) > 1:
        key, setting = "data.masks", data.masks
    return (
        f"{root}: {len(samples)} images ({where}); masks: {_MASK_NAMES[detected.kind]} "
        f"({detected.because}); {num} classes ({reading.named_by})."
        + (f" Set {key} to say otherwise." if setting == "auto" else "")
    )


def _check_ids(
    root: Path, data: DataConfig, classes: Classes, masks: MaskKind, kind: LabelKind
) -> None:
    """Refuses settings that say what values mean where masks are not of ids."""
    if data.ids and (masks != "index" or kind == "multilabel"):
        raise DataError(
            f"`data.ids` is for masks of ids, one class per pixel, but the masks of {root} are "
            f"{_MASK_NAMES[masks]}. Leave it out."
        )
    if classes.ids and kind == "multilabel" and masks not in {"labelme", "coco", "polygons"}:
        raise DataError(
            f"`ignore_index` is 0 in {root / 'classes.toml'}, but 0 says that a class is absent "
            f"in masks of one class each. Use another value, or leave it out."
        )


# Headers


def _mask_headers(pairs: Pairs, encoding: Encoding) -> dict[Path, MaskHeader | Fault]:
    if encoding.kind in {"labelme", "coco", "polygons", "joints"}:
        return {}
    masks = (mask for pair in pairs.pairs for mask in pair.masks)
    return read_mask_headers(path for path in masks if path.suffix.lower() != ".npy")


def _samples(
    pairs: Pairs, encoding: Encoding, headers: Mapping[Path, MaskHeader | Fault]
) -> tuple[list[Sample], list[Sample], list[Fault]]:
    """The pairs whose headers are right, those whose are not, and what is wrong with each file."""
    faults: list[Fault] = []
    samples: list[Sample] = []
    refused: list[Sample] = []
    encodings: dict[Path | None, Encoding] = {}
    sizes = read_sizes([pair.image for pair in pairs.pairs])
    for pair, size in zip(pairs.pairs, sizes, strict=True):
        if isinstance(size, DataError):
            faults.append(Fault(kind="unreadable", path=pair.image, message=str(size)))
            continue
        sample = Sample(
            stem=pair.stem,
            image=pair.image,
            masks=pair.masks,
            size=size,
            encoding=encodings.setdefault(pair.file, dataclasses.replace(encoding, file=pair.file)),
            annotations=pair.annotations,
            claimed=pair.claimed,
        )
        own = _header_faults(sample, pair, headers)
        faults += own
        (refused if own else samples).append(sample)
    return samples, refused, faults


def _header_faults(
    sample: Sample, pair: Pair, headers: Mapping[Path, MaskHeader | Fault]
) -> list[Fault]:
    encoding, faults = sample.encoding, list[Fault]()
    if encoding.kind in {"coco", "joints"} and pair.claimed not in (None, sample.size):
        frame = joints_frame if encoding.kind == "joints" else coco_frame
        try:
            frame(sample)
        except FaultError as error:
            faults.append(error.fault)
    for path in sample.masks:
        header = headers.get(path)
        if isinstance(header, Fault):
            faults.append(header)
        elif header is not None:
            try:
                check_header(path, header, sample)
            except FaultError as error:
                faults.append(error.fault)
    return faults


def _raise_first_stage(root: Path, labels: Path, faults: Sequence[Fault], num_pairs: int) -> None:
    unpaired = [f.message for f in faults if f.kind in {"unpaired", "same_stem", "stray"}]
    if unpaired:
        raise DataError(listing(f"{root} does not pair up", unpaired) + f"\n{_ADD_OR_REMOVE}")
    images = [
        DataError(f.message)
        for f in faults
        if f.kind == "unreadable"
        and f.path.suffix.lower() in IMAGE_SUFFIXES
        and not f.path.is_relative_to(labels)
    ]
    if images:
        raise unreadable(images, num_pairs)
    if faults:
        messages = [f.message for f in faults]
        raise DataError(listing(f"Labels in {labels} cannot be used", messages))


# Splits


def split_samples(
    samples: Sequence[Sample],
    config: DataConfig,
    root: Path,
    *,
    seed: int,
    listed: tuple[Sequence[str], Sequence[str]] | None = None,
) -> tuple[list[Sample], list[Sample]]:
    """Splits samples for training and evaluation.

    With `config.train` and `config.val`: by these lists, in their order; samples in neither list
    are left out. Without: as the layout lists them. Without that: `config.val_fraction` of the
    sorted stems, at least one, is drawn for evaluation; it depends on the seed and the stems only.

    Args:
        samples: Of `find_samples` or a `Folder`.
        config: `[data]` of the run.
        root: The data folder, which the lists' paths are relative to.
        seed: Of the drawn split.
        listed: `Folder.listed`.

    Raises:
        DataError: A list cannot be read, is empty, repeats a stem or names one that does not exist;
            a stem is in both lists; there are too few samples to draw from.
    """
    by_stem = {sample.stem: sample for sample in samples}
    if config.train and not config.train.endswith(".json"):
        train = _read_list(root / config.train, by_stem)
        val = _read_list(root / config.val, by_stem)
        lists = f"{root / config.train} and {root / config.val}"
    elif listed is not None:
        train, val = ([stem for stem in part if stem in by_stem] for part in listed)
        lists = f"The lists of {root}"
    else:
        train, val = _draw_split(sorted(by_stem), config.val_fraction, root, seed)
        lists = ""
    shared = sorted(set(train) & set(val))
    if shared:
        raise DataError(
            listing(f"{lists} share stems", shared)
            + "\nTake them out of one list, or scores flatter the net."
        )
    return [by_stem[stem] for stem in train], [by_stem[stem] for stem in val]


def _read_list(path: Path, by_stem: dict[str, Sample]) -> list[str]:
    alone: dict[str, list[str]] = {}
    for stem in by_stem:
        alone.setdefault(stem.rpartition("/")[2], []).append(stem)
    # In folders within folders, a name that only one image has says enough.
    stems = [name if len(alone.get(name, ())) != 1 else alone[name][0] for name in read_lines(path)]
    if not stems:
        raise DataError(f"The list {path} is empty. Write one stem per line.")
    missing = [stem for stem in stems if stem not in by_stem]
    if missing:
        raise DataError(
            listing(f"{path} names stems that no image has", missing)
            + "\nA stem is the file's name without its folder and suffix."
        )
    twice = [stem for stem, count in Counter(stems).items() if count > 1]
    if twice:
        raise DataError(listing(f"{path} repeats stems", twice) + "\nName each once.")
    return stems


def _draw_split(
    stems: list[str], val_fraction: float, root: Path, seed: int
) -> tuple[list[str], list[str]]:
    if len(stems) < 2:
        raise DataError(
            f"{root} holds {len(stems)} sample; a split into training and evaluation needs at "
            f"least 2. Add images."
        )
    num_val = min(max(1, round(len(stems) * val_fraction)), len(stems) - 1)
    # The last word keeps this stream apart from those of the order (seed, epoch) and of the
    # augmentation: numpy fills a short seed up with zeros.
    order = np.random.default_rng((seed, 0, 0, 2)).permutation(len(stems))
    val = {stems[i] for i in order[:num_val]}
    return [s for s in stems if s not in val], [s for s in stems if s in val]


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A data folder as it was found.

    Attributes:
        root: The folder.
        layout: How it is laid out.
        masks: How labels are stored.
        kind: What they become.
        classes: Of `classes.toml`, or of the layout.
        samples: The images whose headers and labels' headers hold, sorted by stem.
        refused: Those whose image can be read, but whose labels are invalid by their headers.
        faults: What is wrong with the folder, the refused, and images that cannot be read.
        listed: Stems of the layout's own split into training and evaluation.
        labels: Folder or file of the labels.
        num_pairs: Images that have labels, with those whose headers are invalid.
        description: What was found and how it was told, in a line.
        notes: What else a person should know, a sentence each.
        unlabelled: Images beside the samples that have no joints.
    """

    root: Path
    layout: FolderLayout
    masks: MaskKind
    kind: LabelKind
    classes: Classes
    samples: list[Sample]
    refused: list[Sample]
    faults: tuple[Fault, ...]
    listed: tuple[list[str], list[str]] | None
    labels: Path
    num_pairs: int
    description: str
    notes: tuple[str, ...]
    unlabelled: tuple[Path, ...] = ()
