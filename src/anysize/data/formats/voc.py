"""Pascal VOC's layout."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import cast

from anysize.config import DataConfig, LabelKind, MaskKind
from anysize.data.classes import NAME_LISTS, Classes, named_classes, read_classes, read_names
from anysize.data.files import by_stem, files_below, is_one_of, read_lines, unpaired_mask
from anysize.data.formats.cvat import LABELMAP, read_labelmap
from anysize.data.reading import Encoding, Pair, Pairs, Reading
from anysize.errors import DataError
from anysize.faults import Fault
from anysize.images.formats import IMAGE_SUFFIXES, LABEL_SUFFIXES
from anysize.wording import count_of

VOC_NAMES = (
    "background",
    "aeroplane",
    "bicycle",
    "bird",
    "boat",
    "bottle",
    "bus",
    "car",
    "cat",
    "chair",
    "cow",
    "diningtable",
    "dog",
    "horse",
    "motorbike",
    "person",
    "pottedplant",
    "sheep",
    "sofa",
    "train",
    "tvmonitor",
)
"""Source: the Pascal VOC development kit, `VOCinit`."""


VOC_MASKS = ("SegmentationClass", "SegmentationClassPNG", "SegmentationClassAug")
"""Folders of masks: of Pascal VOC, of LabelMe's examples, and with the masks of SBD added."""


def read_voc(root: Path, data: DataConfig, kind: LabelKind) -> Reading:
    """Reads a folder of Pascal VOC.

    Raises:
        DataError: Images, masks or a list cannot be read.
    """
    pairs = scan_voc(root, data)
    toml = root / "classes.toml"
    lists = [root / name for name in NAME_LISTS if (root / name).is_file()]
    labelmap = root / LABELMAP
    if toml.is_file():
        classes, named_by = read_classes(toml), toml.name
    elif labelmap.is_file():
        classes, named_by = read_labelmap(labelmap), f"CVAT's {LABELMAP}"
    elif lists:
        classes, named_by = read_names(lists[0]), lists[0].name
    else:
        classes, named_by = voc_classes(), "those of Pascal VOC"
    auto = data.masks == "auto"
    return Reading(
        images=root,
        labels=pairs.pairs[0].masks[0].parent if pairs.pairs else root,
        pairs=pairs,
        classes=classes,
        named_by=named_by,
        encoding=Encoding(kind="index" if auto else cast("MaskKind", data.masks), labels=kind),
        because=None if auto else "",
    )


def voc_classes() -> Classes:
    """The 21 classes of Pascal VOC; the border's colour is ignored."""
    named = named_classes(VOC_NAMES, "Pascal VOC")
    return Classes(names=named.names, colours=named.colours, ignore_colours=((224, 224, 192),))


def scan_voc(root: Path, data: DataConfig) -> Pairs:
    """JPEGImages/, SegmentationClass/ and the lists in ImageSets/Segmentation/.

    Most images of Pascal VOC have no mask; they are passed over unless a list names them. The lines
    of a list may hold the paths of an image and of its mask; then these say where masks are.

    Raises:
        DataError: There are several folders of masks, or images, masks or a list cannot be read.
    """
    faults: list[Fault] = []
    lists, lines = _lists(root)
    images_folder = root / (data.images or "JPEGImages")
    masks_folder = root / (data.labels or _masks_folder(root, lists, lines))
    images = by_stem(files_below(images_folder, IMAGE_SUFFIXES, deep=False), faults)
    masks = by_stem(files_below(masks_folder, LABEL_SUFFIXES, deep=False), faults)
    faults += [
        unpaired_mask(mask, f"{images_folder / stem}.*")
        for stem, mask in masks.items()
        if stem not in images
    ]
    train, val = ([_stem(line[0]) for line in of] for of in lines)
    for stem in [*train, *val]:
        if stem not in images or stem not in masks:
            where = images_folder if stem not in images else masks_folder
            message = f"{stem} is in a list of {lists[0].parent}, but not in {where}"
            faults.append(Fault(kind="unpaired", path=where / stem, message=message))
    both = sorted(set(images) & set(masks))
    notes: list[str] = []
    if len(images) > len(both):
        notes.append(f"Passed over: {count_of(len(images) - len(both), 'image')} without a mask.")
    pairs = [Pair(stem, images[stem], (masks[stem],)) for stem in both]
    listed = (train, val) if train and val else None
    return Pairs(pairs=pairs, faults=faults, listed=listed, notes=notes)


def _lists(root: Path) -> tuple[list[Path], list[list[list[str]]]]:
    """The lists of training and evaluation, and the words of their lines; none unless both exist.

    trainaug.txt belongs to SegmentationClassAug, and is taken where only these masks exist.
    """
    folder = root / "ImageSets" / "Segmentation"
    names = ["train.txt", "val.txt"]
    if [name for name in VOC_MASKS if (root / name).is_dir()] == ["SegmentationClassAug"] and (
        folder / "trainaug.txt"
    ).is_file():
        names[0] = "trainaug.txt"
    lists = [folder / name for name in names]
    if not all(path.is_file() for path in lists):
        return lists, [[], []]
    return lists, [[line.split() for line in read_lines(path)] for path in lists]


def _masks_folder(root: Path, lists: list[Path], lines: list[list[list[str]]]) -> str:
    """The folder of the masks: as the lists say, or the only one with files in it."""
    named = {
        str(PurePosixPath(line[1].lstrip("/")).parent)
        for of in lines
        for line in of
        if len(line) > 1 and is_one_of(Path(line[1]), LABEL_SUFFIXES)
    }
    if len(named) > 1:
        raise DataError(
            f"The lists of {lists[0].parent} name masks in several folders: "
            f"{', '.join(sorted(named))}. Set data.labels to one, or put all masks into one."
        )
    for name in named:
        # Lists are written for another root as well, with a folder or two before ours.
        parts = PurePosixPath(name).parts
        tails = ["/".join(parts[i:]) for i in range(len(parts))]
        found = next((tail for tail in tails if ".." not in parts and (root / tail).is_dir()), None)
        if found is not None:
            return found
    folders = [
        name
        for name in VOC_MASKS
        if any(is_one_of(p, LABEL_SUFFIXES) for p in (root / name).glob("*"))
    ]
    if len(folders) > 1:
        raise DataError(
            f"{root} has masks in {' and in '.join(folders)}. Set data.labels to one of them."
        )
    return folders[0] if folders else VOC_MASKS[0]


def _stem(name: str) -> str:
    """A word of a list, which may be a path with the file's ending."""
    path = PurePosixPath(name)
    return path.stem if is_one_of(Path(name), IMAGE_SUFFIXES) else path.name
