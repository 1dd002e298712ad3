"""Cityscapes' layout."""

from __future__ import annotations

from pathlib import Path

from anysize.config import DataConfig, LabelKind
from anysize.data.classes import Classes, read_classes
from anysize.data.files import unpaired_image, unpaired_mask
from anysize.data.reading import Encoding, Pair, Pairs, Reading
from anysize.errors import DataError
from anysize.faults import Fault

CITYSCAPES: dict[str, tuple[int, tuple[int, int, int]]] = {
    "road": (7, (128, 64, 128)),
    "sidewalk": (8, (244, 35, 232)),
    "building": (11, (70, 70, 70)),
    "wall": (12, (102, 102, 156)),
    "fence": (13, (190, 153, 153)),
    "pole": (17, (153, 153, 153)),
    "traffic light": (19, (250, 170, 30)),
    "traffic sign": (20, (220, 220, 0)),
    "vegetation": (21, (107, 142, 35)),
    "terrain": (22, (152, 251, 152)),
    "sky": (23, (70, 130, 180)),
    "person": (24, (220, 20, 60)),
    "rider": (25, (255, 0, 0)),
    "car": (26, (0, 0, 142)),
    "truck": (27, (0, 0, 70)),
    "bus": (28, (0, 60, 100)),
    "train": (31, (0, 80, 100)),
    "motorcycle": (32, (0, 0, 230)),
    "bicycle": (33, (119, 11, 32)),
}
"""The 19 classes that are evaluated, in the order of their train ids: id and colour of each.
Source: cityscapesScripts `helpers/labels.py`."""


_IMAGE = "_leftImg8bit"
_SPLITS = ("train", "val")


def read_cityscapes(root: Path, data: DataConfig, kind: LabelKind) -> Reading:
    """Reads a folder of Cityscapes.

    Raises:
        DataError: It holds no image, or its classes.toml is invalid.
    """
    name = cityscapes_masks(root, data)
    pairs = scan_cityscapes(root, data, name)
    toml = root / "classes.toml"
    classes, lookup = cityscapes_classes(), cityscapes_lookup(name, 255)
    if toml.is_file():
        classes, lookup = read_classes(toml), ()
    return Reading(
        images=root,
        labels=root / (data.labels or "gtFine"),
        pairs=pairs,
        classes=classes,
        named_by=toml.name if toml.is_file() else "the 19 of Cityscapes",
        encoding=Encoding(kind="index", labels=kind, lookup=lookup),
        because=f"*_{name}.png",
    )


def cityscapes_classes() -> Classes:
    """The 19 classes of Cityscapes."""
    return Classes(
        names=tuple(CITYSCAPES), colours=tuple(colour for _, colour in CITYSCAPES.values())
    )


def scan_cityscapes(root: Path, data: DataConfig, mask_name: str) -> Pairs:
    """leftImg8bit/<split>/<city>/ and gtFine/<split>/<city>/, of the splits that have labels."""
    faults: list[Fault] = []
    pairs: list[Pair] = []
    listed: dict[str, list[str]] = {}
    images_folder, masks_folder = cityscapes_folders(root, data)
    for split in _SPLITS:
        images = sorted((images_folder / split).glob(f"*/*{_IMAGE}.png"))
        masks = sorted((masks_folder / split).glob(f"*/*_{mask_name}.png"))
        found = {p.name.removesuffix(f"{_IMAGE}.png"): p for p in images}
        of_split = {p.name.removesuffix(f"_{mask_name}.png").rpartition("_")[0]: p for p in masks}
        faults += [
            unpaired_image(found[stem], f"{masks_folder / split}/*/{stem}_*_{mask_name}.png")
            for stem in found
            if stem not in of_split
        ]
        faults += [
            unpaired_mask(of_split[stem], f"{stem}{_IMAGE}.png")
            for stem in of_split
            if stem not in found
        ]
        listed[split] = [stem for stem in found if stem in of_split]
        pairs += [Pair(stem, found[stem], (of_split[stem],)) for stem in listed[split]]
    if not pairs and not faults:
        raise DataError(
            f"{images_folder} holds no images of Cityscapes. They lie in "
            f"{images_folder}/train/<city>/*{_IMAGE}.png."
        )
    train, val = (listed[split] for split in _SPLITS)
    return Pairs(
        pairs=sorted(pairs, key=lambda p: p.stem),
        faults=faults,
        listed=(train, val) if train and val else None,
    )


def cityscapes_folders(root: Path, data: DataConfig) -> tuple[Path, Path]:
    """The folders of images and of masks."""
    masks = data.labels or ("gtFine" if (root / "gtFine").is_dir() else "gtCoarse")
    return root / (data.images or "leftImg8bit"), root / masks


def cityscapes_masks(root: Path, data: DataConfig) -> str:
    """Which masks are read: those of train ids where every image has one, else those of ids.

    So masks of both kinds are never mixed, and a split that has only one of them is read whole.
    """
    images, folder = cityscapes_folders(root, data)
    num_images = sum(len(list((images / s).glob(f"*/*{_IMAGE}.png"))) for s in _SPLITS)
    counts = [
        sum(len(list((folder / s).glob(f"*/*_{name}.png"))) for s in _SPLITS)
        for name in ("labelTrainIds", "labelIds")
    ]
    complete = counts[0] >= num_images or counts[0] >= counts[1]
    return "labelTrainIds" if counts[0] and complete else "labelIds"


def cityscapes_lookup(mask_name: str, ignore_index: int) -> tuple[int, ...]:
    """The class of each value of a mask, where there is no classes.toml."""
    lookup = [ignore_index] * 256
    for train_id, (number, _) in enumerate(CITYSCAPES.values()):
        lookup[train_id if mask_name == "labelTrainIds" else number] = train_id
    return tuple(lookup)
