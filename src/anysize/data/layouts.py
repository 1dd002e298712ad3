"""Where images and labels lie: our own folder, and those of Pascal VOC, Cityscapes and Ultralytics.

A scan pairs files by their names and reads no pixels. It raises only where there is nothing to
scan; what does not pair up is a fault in its result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

from anysize.config import DataConfig, FolderLayout, MaskKind
from anysize.data.annotations import MAX_COCO_BYTES, read_json
from anysize.data.classes import CITYSCAPES, Classes, named_classes
from anysize.errors import DataError
from anysize.faults import Fault, FaultError
from anysize.geometry import Size
from anysize.images.decode import IMAGE_SUFFIXES

MAX_YAML_BYTES = 1 << 16
"""Names of a thousand classes take a third of it; PyYAML takes seconds for a megabyte."""

MAX_NAME = 250
"""Characters of a file name in a COCO file; file systems hold some more in each part."""

LAYOUT_MASKS: dict[FolderLayout, tuple[MaskKind, ...]] = {
    "anysize": ("index", "colours", "binary", "folders", "stack", "labelme", "coco"),
    "voc": ("index", "colours"),
    "cityscapes": ("index",),
    "ultralytics": ("polygons",),
}
"""What `data.masks` may be in each layout."""

_VOC_MASKS = ("SegmentationClass", "SegmentationClassPNG")


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
    """

    pairs: list[Pair]
    faults: list[Fault]
    listed: tuple[list[str], list[str]] | None = None
    notes: list[str] = field(default_factory=list[str])


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
    if (root / "JPEGImages").is_dir() and any((root / name).is_dir() for name in _VOC_MASKS):
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


# Files


def list_files(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """The files directly in a folder with one of these endings, sorted by name.

    Raises:
        DataError: No such folder, or no such file in it.
    """
    kinds = ", ".join(suffixes)
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise DataError(
            f"The folder {folder} cannot be read: {error.strerror}. "
            f"Put the {kinds} files there; docs/data-folder.md shows the folder."
        ) from None
    files = [e for e in entries if is_one_of(e, suffixes) and e.is_file()]
    if not files:
        raise DataError(
            f"The folder {folder} holds no {kinds} files. Put them directly into it, not into "
            f"folders below it."
        )
    return files


def is_one_of(path: Path, suffixes: Sequence[str]) -> bool:
    """Whether a file has one of these endings and is not hidden.

    Names with a leading dot are files that macOS leaves beside each copied one.
    """
    return path.suffix.lower() in suffixes and not path.name.startswith(".")


def by_stem(
    paths: Sequence[Path], faults: list[Fault], stem: Callable[[Path], str] = lambda p: p.stem
) -> dict[str, Path]:
    """Files by their stems; two with the same one are a fault."""
    found: dict[str, Path] = {}
    for path in paths:
        name = stem(path)
        if name in found:
            message = f"{found[name]} and {path} have the same stem"
            faults.append(Fault(kind="same_stem", path=path, message=message))
        found[name] = path
    return found


def unpaired_image(image: Path, mask: Path | str) -> Fault:
    """The fault of an image without its mask."""
    return Fault(kind="unpaired", path=image, message=f"image {image} has no mask {mask}")


def unpaired_mask(mask: Path, image: Path | str) -> Fault:
    """The fault of a mask without its image."""
    return Fault(kind="unpaired", path=mask, message=f"mask {mask} has no image {image}")


# Our own


def scan_flat(images: Path, mask_folders: Sequence[Path], suffixes: Sequence[str]) -> Pairs:
    """Pairs the images of a folder with the masks of one folder, or of one for each class."""
    faults: list[Fault] = []
    found = by_stem(list_files(images, IMAGE_SUFFIXES), faults)
    masks = [by_stem(list_files(folder, suffixes), faults) for folder in mask_folders]
    ending = suffixes[0] if len(suffixes) == 1 else ".*"
    for folder, of_folder in zip(mask_folders, masks, strict=True):
        faults += [
            unpaired_image(image, f"{folder / stem}{ending}")
            for stem, image in found.items()
            if stem not in of_folder
        ]
        faults += [
            unpaired_mask(mask, f"{images / stem}.*")
            for stem, mask in of_folder.items()
            if stem not in found
        ]
    whole = [stem for stem in sorted(found) if all(stem in m for m in masks)]
    return Pairs(
        pairs=[Pair(stem, found[stem], tuple(m[stem] for m in masks)) for stem in whole],
        faults=faults,
    )


# Pascal VOC


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
        train, val = (_read_stems(path) for path in lists)
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
    for name in _VOC_MASKS:
        if any(is_one_of(p, (".png",)) for p in (root / name).glob("*.png")):
            return name
    return _VOC_MASKS[0]


def _read_stems(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"The list {path} cannot be read: {error}.") from None
    return [line.split()[0] for line in lines if line.strip()]


# Cityscapes

_CITYSCAPES_IMAGE = "_leftImg8bit"
_CITYSCAPES_SPLITS = ("train", "val")


def scan_cityscapes(root: Path, data: DataConfig, mask_name: str) -> Pairs:
    """leftImg8bit/<split>/<city>/ and gtFine/<split>/<city>/, of the splits that have labels."""
    faults: list[Fault] = []
    pairs: list[Pair] = []
    listed: dict[str, list[str]] = {}
    images_folder, masks_folder = cityscapes_folders(root, data)
    for split in _CITYSCAPES_SPLITS:
        images = sorted((images_folder / split).glob(f"*/*{_CITYSCAPES_IMAGE}.png"))
        masks = sorted((masks_folder / split).glob(f"*/*_{mask_name}.png"))
        found = {p.name.removesuffix(f"{_CITYSCAPES_IMAGE}.png"): p for p in images}
        of_split = {p.name.removesuffix(f"_{mask_name}.png").rpartition("_")[0]: p for p in masks}
        faults += [
            unpaired_image(found[stem], f"{masks_folder / split}/*/{stem}_*_{mask_name}.png")
            for stem in found
            if stem not in of_split
        ]
        faults += [
            unpaired_mask(of_split[stem], f"{stem}{_CITYSCAPES_IMAGE}.png")
            for stem in of_split
            if stem not in found
        ]
        listed[split] = [stem for stem in found if stem in of_split]
        pairs += [Pair(stem, found[stem], (of_split[stem],)) for stem in listed[split]]
    if not pairs and not faults:
        raise DataError(
            f"{images_folder} holds no images of Cityscapes. They lie in "
            f"{images_folder}/train/<city>/*{_CITYSCAPES_IMAGE}.png."
        )
    train, val = (listed[split] for split in _CITYSCAPES_SPLITS)
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
    """Which of the masks are there: those of train ids, else of ids."""
    _, folder = cityscapes_folders(root, data)
    has_train_ids = any(folder.glob("*/*/*_labelTrainIds.png"))
    return "labelTrainIds" if has_train_ids else "labelIds"


def cityscapes_lookup(mask_name: str, ignore_index: int) -> tuple[int, ...]:
    """The class of each value of a mask, where there is no classes.toml."""
    lookup = [ignore_index] * 256
    for train_id, (number, _) in enumerate(CITYSCAPES.values()):
        lookup[train_id if mask_name == "labelTrainIds" else number] = train_id
    return tuple(lookup)


# Ultralytics


def scan_ultralytics(root: Path, data: DataConfig) -> Pairs:
    """images/<split>/ and labels/<split>/ with a text file an image; or both without splits.

    An image without a text file has no objects.
    """
    images_folder, labels_folder = (
        root / (data.images or "images"),
        root / (data.labels or "labels"),
    )
    faults: list[Fault] = []
    pairs: list[Pair] = []
    listed: dict[str, list[str]] = {}
    num_without = 0
    splits = [s for s in ("train", "val") if (images_folder / s).is_dir()] or [""]
    for split in splits:
        prefix = f"{split}/" if split else ""
        images = by_stem(
            list_files(images_folder / split, IMAGE_SUFFIXES),
            faults,
            stem=lambda p, prefix=prefix: prefix + p.stem,
        )
        folder = labels_folder / split
        texts = {prefix + p.stem: p for p in sorted(folder.glob("*.txt")) if p.is_file()}
        faults += [
            unpaired_mask(text, f"{images_folder / stem}.*")
            for stem, text in texts.items()
            if stem not in images
        ]
        num_without += len(set(images) - set(texts))
        listed[split] = sorted(images)
        pairs += [
            Pair(stem, images[stem], (texts[stem],) if stem in texts else ())
            for stem in listed[split]
        ]
    if num_without == len(pairs):
        raise DataError(
            f"{labels_folder} holds no label of an image of {images_folder}. Labels are text "
            f"files with the stems of the images."
        )
    notes: list[str] = []
    if num_without:
        notes.append(f"{num_without} images without a text file count as all background.")
    train, val = listed.get("train"), listed.get("val")
    return Pairs(
        pairs=sorted(pairs, key=lambda p: p.stem),
        faults=faults,
        listed=(train, val) if train and val else None,
        notes=notes,
    )


def ultralytics_names(root: Path) -> tuple[Classes, Path] | None:
    """The classes of the YAML file in a folder that has `names`; None where there is no such file.

    Raises:
        DataError: The file cannot be read, or PyYAML is not installed.
    """
    files = sorted([*root.glob("*.yaml"), *root.glob("*.yml")])
    if not files:
        return None
    path = root / "data.yaml" if root / "data.yaml" in files else files[0]
    try:
        import yaml  # pyright: ignore[reportMissingModuleSource, reportMissingImports]
    except ImportError:
        raise DataError(
            f"{path} names the classes in YAML, which needs PyYAML. Install it: "
            f"pip install 'anysize[ultralytics]'; or write classes.toml."
        ) from None
    try:
        if path.stat().st_size > MAX_YAML_BYTES:
            raise ValueError(f"it has more than {MAX_YAML_BYTES} bytes")
        table = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        what = " ".join(str(error).split())
        raise DataError(f"{path} cannot be read as YAML: {what}. Correct it.") from None
    names = cast("dict[str, Any]", table).get("names") if isinstance(table, dict) else None
    if isinstance(names, dict):
        numbered = cast("dict[object, object]", names)
        if set(numbered) != set(range(len(numbered))):
            raise DataError(f"The names in {path} are not numbered 0 to {len(numbered) - 1}.")
        names = [numbered[i] for i in range(len(numbered))]
    if not isinstance(names, list) or not all(
        isinstance(n, str) for n in cast("list[object]", names)
    ):
        raise DataError(f"{path} has no list of `names`. Add it, or write classes.toml.")
    return named_classes(cast("list[str]", names), str(path)), path


# COCO


@dataclass(frozen=True, slots=True, kw_only=True)
class CocoFile:
    """What a COCO file holds.

    Attributes:
        path: The file.
        images: File name, size if it is told, and id of each image.
        annotations: By the image's id.
        categories: Their names by id, in the order of the ids.
    """

    path: Path
    images: tuple[tuple[str, Size | None, object], ...]
    annotations: Mapping[object, tuple[Mapping[str, Any], ...]]
    categories: Mapping[int, str]


def read_coco(path: Path) -> CocoFile:
    """Reads a COCO file.

    Raises:
        FaultError: It cannot be read or does not hold.
    """
    table = read_json(path, MAX_COCO_BYTES)
    images, annotations, categories = (
        _objects(table, key, path) for key in ("images", "annotations", "categories")
    )
    by_image: dict[object, list[Mapping[str, Any]]] = {}
    listed: list[tuple[str, Size | None, object]] = []
    try:
        for entry in annotations:
            by_image.setdefault(entry["image_id"], []).append(entry)
        for entry in images:
            name = entry["file_name"]
            if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"the file name {name!r} is not below the data folder")
            if len(name) > MAX_NAME or "\0" in name or not Path(name).name:
                raise ValueError(f"the file name {name[:80]!r} is none")
            height, width = entry.get("height"), entry.get("width")
            size = None
            if isinstance(height, int) and isinstance(width, int):
                size = Size(height, width)
            if not isinstance(entry["id"], int | str):
                raise ValueError(f"the id {entry['id']!r} of an image is no number")
            listed.append((name, size, entry["id"]))
        _require_own_ids([image_id for _, _, image_id in listed], "images")
        _require_own_ids([entry["id"] for entry in categories], "categories")
        names = {entry["id"]: entry["name"] for entry in categories}
        if not all(type(i) is int and isinstance(n, str) for i, n in names.items()):
            raise ValueError("a category has no whole number as id, or no name")
    except (KeyError, ValueError, TypeError) as error:
        what = f"`{error.args[0]}` is missing" if isinstance(error, KeyError) else error
        message = f"{path} is no COCO file: {what}. Correct it, or set data.labels to another."
        raise FaultError("shapes", path, message) from None
    return CocoFile(
        path=path,
        images=tuple(listed),
        annotations={key: tuple(entries) for key, entries in by_image.items()},
        categories=dict(sorted(names.items())),
    )


def _require_own_ids(ids: Sequence[object], what: str) -> None:
    """Two images of one id would share their annotations, and two categories their pixels."""
    twice = [i for i, count in Counter(ids).items() if count > 1]
    if twice:
        raise ValueError(f"several {what} have the id {twice[0]!r}")


def _objects(table: dict[str, Any], key: str, path: Path) -> list[dict[str, Any]]:
    entries = table.get(key)
    if not isinstance(entries, list) or not all(
        isinstance(e, dict) for e in cast("list[object]", entries)
    ):
        message = f"{path} is no COCO file: `{key}` is no list of objects. Correct it."
        raise FaultError("shapes", path, message)
    return cast("list[dict[str, Any]]", entries)


def scan_coco(root: Path, data: DataConfig, files: Sequence[CocoFile]) -> Pairs:
    """The images of one COCO file, or of one for training and one for evaluation."""
    faults: list[Fault] = []
    pairs: list[Pair] = []
    notes: list[str] = []
    listed: list[list[str]] = []
    names = [name for file in files for name, _, _ in file.images]
    alone = len({Path(name).stem for name in names}) == len(names)
    for file in files:
        folder = _coco_images(root, data, file)
        stems: list[str] = []
        known = {image_id for _, _, image_id in file.images}
        strays = [len(of) for key, of in file.annotations.items() if key not in known]
        if strays:
            notes.append(
                f"{file.path} has {sum(strays)} annotations of images that it does not list; they "
                f"are passed over."
            )
        for name, claimed, image_id in file.images:
            image, bare = folder / name, Path(name).with_suffix("")
            stem = bare.name if alone else bare.as_posix()
            if not image.is_file():
                message = f"{file.path} names {name}, but there is no image {image}"
                faults.append(Fault(kind="unpaired", path=image, message=message))
                continue
            stems.append(stem)
            pairs.append(
                Pair(stem, image, (), file.annotations.get(image_id, ()), claimed, file.path)
            )
        listed.append(stems)
    seen: dict[str, Path] = {}
    for pair in pairs:
        if pair.stem in seen:
            message = f"{pair.image} and {seen[pair.stem]} have the same stem"
            faults.append(Fault(kind="same_stem", path=pair.image, message=message))
        seen[pair.stem] = pair.image
    if not pairs and not faults:
        raise DataError(f"{files[0].path} names no images. Set data.labels to another file.")
    return Pairs(
        pairs=sorted(pairs, key=lambda p: p.stem),
        faults=faults,
        listed=(listed[0], listed[1]) if len(listed) == 2 else None,
        notes=notes,
    )


def _coco_images(root: Path, data: DataConfig, file: CocoFile) -> Path:
    """The folder that the names of a COCO file are relative to, by where its first images are."""
    if data.images:
        return root / data.images
    # annotations/instances_val2017.json goes with val2017/.
    split = file.path.stem.rpartition("_")[2]
    candidates = (
        root,
        root / "images",
        file.path.parent,
        root / split,
        root / "images" / split,
    )
    names = [name for name, _, _ in file.images[:8]]
    return max(candidates, key=lambda folder: sum((folder / name).is_file() for name in names))
