"""Pascal VOC's layout."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from anysize.config import DataConfig, LabelKind, MaskKind
from anysize.data.classes import NAME_LISTS, Classes, named_classes, read_classes, read_names
from anysize.data.files import by_stem, is_one_of, list_files, read_stems, unpaired_mask
from anysize.data.reading import Encoding, Pair, Pairs, Reading
from anysize.faults import Fault
from anysize.images.formats import IMAGE_SUFFIXES

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


VOC_MASKS = ("SegmentationClass", "SegmentationClassPNG")


def read_voc(root: Path, data: DataConfig, kind: LabelKind) -> Reading:
    """Reads a folder of Pascal VOC.

    Raises:
        DataError: Images, masks or a list cannot be read.
    """
    pairs = scan_voc(root, data)
    toml = root / "classes.toml"
    lists = [root / name for name in NAME_LISTS if (root / name).is_file()]
    if toml.is_file():
        classes, named_by = read_classes(toml), toml.name
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

    Most images of Pascal VOC have no mask; they are passed over unless a list names them.
    """
    faults: list[Fault] = []
    images_folder = root / (data.images or "JPEGImages")
    masks_folder = root / (data.labels or _voc_masks(root))
    images = by_stem(list_files(images_folder, IMAGE_SUFFIXES), faults)
    masks = by_stem(list_files(masks_folder, (".png",)), faults)
    faults += [
        unpaired_mask(mask, f"{images_folder / stem}.*")
        for stem, mask in masks.items()
        if stem not in images
    ]
    lists = [root / "ImageSets" / "Segmentation" / f"{part}.txt" for part in ("train", "val")]
    listed = None
    if all(path.is_file() for path in lists):
        train, val = (read_stems(path) for path in lists)
        for stem in [*train, *val]:
            if stem not in images or stem not in masks:
                where = images_folder if stem not in images else masks_folder
                message = f"{stem} is in a list of {lists[0].parent}, but not in {where}"
                faults.append(Fault(kind="unpaired", path=where / stem, message=message))
        if train and val:
            listed = train, val
    both = sorted(set(images) & set(masks))
    notes: list[str] = []
    if len(images) > len(both):
        notes.append(f"{len(images) - len(both)} images without a mask are passed over.")
    pairs = [Pair(stem, images[stem], (masks[stem],)) for stem in both]
    return Pairs(pairs=pairs, faults=faults, listed=listed, notes=notes)


def _voc_masks(root: Path) -> str:
    """LabelMe's examples keep arrays in the one and PNGs in the other."""
    for name in VOC_MASKS:
        if any(is_one_of(p, (".png",)) for p in (root / name).glob("*.png")):
            return name
    return VOC_MASKS[0]
