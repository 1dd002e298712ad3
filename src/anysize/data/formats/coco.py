"""COCO's JSON: which images it lists, and their shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from anysize.config import DataConfig
from anysize.data.classes import IGNORE_NAME, Classes, named_classes, with_background
from anysize.data.files import is_one_of, keys_of, read_json
from anysize.data.reading import Encoding, Pair, Pairs, Reading
from anysize.data.shapes import (
    MAX_SHAPES,
    Bitmap,
    LabelKind,
    Shapes,
    check_points,
    check_total,
    class_of,
    naming,
    unknown_labels,
)
from anysize.errors import DataError
from anysize.faults import Fault, FaultError
from anysize.geometry import Size

MAX_COCO_BYTES = 2 << 30
"""COCO's own training file has 0.45 GB."""


MAX_NAME = 250
"""Characters of a file name in a COCO file; file systems hold some more in each part."""


def read_coco_folder(
    root: Path, data: DataConfig, kind: LabelKind, classes: Classes | None, *, told: bool
) -> Reading:
    """Reads a folder with one COCO file, or with one for training and one for evaluation.

    Args:
        root: The data folder.
        data: Names the files, where there are several.
        kind: What labels are to become.
        classes: Of classes.toml; None takes the categories.
        told: Whether `data.masks` says "coco".

    Raises:
        DataError: A file is missing or invalid, or it is not clear which one is meant.
    """
    if data.train.endswith(".json"):
        paths = [root / data.train, root / data.val]
    elif data.labels:
        paths = [root / data.labels]
    else:
        paths = coco_files(root)
        splits = [[p for p in paths if part in p.stem] for part in ("train", "val")]
        if len(paths) == 2 and all(len(found) == 1 for found in splits):
            paths = [found[0] for found in splits]
        elif len(paths) != 1:
            names = ", ".join(str(p.relative_to(root)) for p in paths) or "none"
            raise DataError(
                f"{root} must hold one COCO file, or one of train and one of val; it holds "
                f"{names}. Set data.labels to the one, or data.train and data.val to the two."
            )
    files = [read_coco(path) for path in paths]
    named_by = "classes.toml"
    if classes is None:
        named_by = paths[0].name
        names = [n for n in files[0].categories.values() if n != IGNORE_NAME]
        classes = named_classes(names, str(paths[0]))
        classes = with_background(classes) if kind == "multiclass" else classes
    pairs = scan_coco(root, data, files)
    if files[0].categories != files[-1].categories:
        raise DataError(
            f"{paths[0]} and {paths[-1]} have different categories. Give both the same list."
        )
    encoding = Encoding(kind="coco", labels=kind, categories=files[0].categories)
    return Reading(
        images=root,
        labels=paths[0],
        pairs=pairs,
        classes=classes,
        named_by=named_by,
        encoding=encoding,
        because="" if told else "detected by its content",
    )


def coco_files(root: Path) -> list[Path]:
    """The COCO files of a data folder: those of instances, where other kinds lie beside them."""
    files = sorted([*root.glob("*.json"), *root.glob("annotations/*.json")])
    files = [p for p in files if is_one_of(p, (".json",))][:100]
    named = [p for p in files if p.name.startswith("instances_")]
    return [p for p in named or files if {"images", "annotations", "categories"} <= keys_of(p)]


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


def coco_shapes(
    entries: Sequence[Mapping[str, Any]],
    categories: Mapping[int, str],
    path: Path,
    size: Size,
    classes: Classes,
) -> Shapes:
    """The shapes of one image of a COCO file: crowds first, then from large to small.

    So a small object is seen before a large one behind it, and a crowd, whose members nobody told
    apart, is ignored where no object was outlined.

    Raises:
        FaultError: An annotation does not hold, or its category is no class.
        DataError: pycocotools, which draws the polygons, is not installed.
    """
    unknown: dict[str, int] = {}
    found: list[tuple[bool, float, Bitmap]] = []
    total = 0
    with naming(path):
        if len(entries) > MAX_SHAPES:
            raise ValueError(f"an image has more than {MAX_SHAPES} shapes")
        for entry in entries:
            name = categories.get(cast("int", entry.get("category_id")), "")
            class_id = class_of(name, classes)
            if class_id is None:
                name = name or f"category {entry.get('category_id')!r}"
                unknown[name] = unknown.get(name, 0) + 1
                continue
            try:
                top, left, inside = coco_bitmap(entry.get("segmentation"), size)
            except (ValueError, TypeError) as error:
                raise ValueError(f"annotation {entry.get('id')!r}: {error}") from None
            crowd = bool(entry.get("iscrowd"))
            bitmap = Bitmap(class_id=class_id, ignored=crowd, top=top, left=left, inside=inside)
            found.append((not crowd, -float(np.count_nonzero(inside)), bitmap))
            total += inside.size
            check_total(total, size)
    if unknown:
        raise unknown_labels(path, unknown, classes)
    return [bitmap for _, _, bitmap in sorted(found, key=lambda f: f[:2])]


def coco_bitmap(segmentation: object, size: Size) -> tuple[int, int, NDArray[np.bool_]]:
    """A segmentation as pixels: top, left, and which of a rectangle are inside.

    Raises:
        ValueError: It does not hold, or not for an image of this size.
        DataError: pycocotools is not installed.
    """
    if isinstance(segmentation, dict):
        code = cast("dict[str, Any]", segmentation)
        if code.get("size") != [size.height, size.width]:
            raise ValueError(f"a run-length code of size {code.get('size')} in an image of {size}")
        counts = code.get("counts")
        numbers = _unpack(counts) if isinstance(counts, str) else _whole(counts)
        if sum(numbers) != size.pixels or min(numbers, default=0) < 0:
            raise ValueError(f"a run-length code of {sum(numbers)} pixels in an image of {size}")
        return _trimmed(_expanded(numbers, size))
    if not isinstance(segmentation, list) or not segmentation:
        raise ValueError("no segmentation")
    rings: list[NDArray[np.float64]] = []
    for ring in cast("list[object]", segmentation):
        flat = np.array(ring, np.float64)
        if flat.ndim != 1 or len(flat) < 6 or len(flat) % 2:
            raise ValueError("a polygon is no list of at least three pairs of x and y")
        rings.append(flat.reshape(-1, 2))
        check_points(rings[-1], size)
    return _coco_polygons(rings, size)


def _trimmed(inside: NDArray[np.bool_]) -> tuple[int, int, NDArray[np.bool_]]:
    """Cut to the rows and columns in which anything is inside, so that many fit into memory."""
    rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
    if not len(rows):
        return 0, 0, inside[:1, :1]
    top, left = int(rows[0]), int(columns[0])
    return top, left, inside[top : rows[-1] + 1, left : columns[-1] + 1].copy()


def _coco_polygons(
    rings: Sequence[NDArray[np.float64]], size: Size
) -> tuple[int, int, NDArray[np.bool_]]:
    """Polygons as pycocotools draws them, in the rectangle around them only."""
    try:
        from pycocotools import mask as coco  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise DataError(
            "COCO polygons are drawn by pycocotools, which is not installed. Install it: "
            "pip install 'anysize[coco]'."
        ) from None
    points = np.concatenate(rings)
    left, top = np.clip(np.floor(points.min(0)) - 1, 0, [size.width - 1, size.height - 1])
    right, bottom = np.clip(np.ceil(points.max(0)) + 2, 1, [size.width, size.height])
    left, top = int(left), int(top)
    height, width = max(int(bottom) - top, 1), max(int(right) - left, 1)
    flat = [(ring - (left, top)).ravel().tolist() for ring in rings]
    codes: Any = coco.frPyObjects(cast("Any", flat), height, width)
    counts: Any = coco.merge(codes)["counts"]
    return top, left, _expanded(_unpack(counts.decode("ascii")), Size(height, width))


def _expanded(counts: list[int], size: Size) -> NDArray[np.bool_]:
    """Runs go down the columns, outside and inside in turn."""
    inside = np.repeat(np.arange(len(counts)) % 2 == 1, counts)
    return inside.reshape(size.width, size.height).T


def _whole(counts: object) -> list[int]:
    if not isinstance(counts, list) or not all(
        type(c) is int for c in cast("list[object]", counts)
    ):
        raise ValueError("the counts of a run-length code are no list of whole numbers")
    return cast("list[int]", counts)


def _unpack(text: str) -> list[int]:
    """Unpacks the text form of a run-length code.

    Five bits a character, lowest first; the sixth says that more follow. From the fourth number on,
    what is stored is the difference from the number two before. Source: COCO's maskApi.c.
    """
    counts: list[int] = []
    value = shift = 0
    for character in text:
        bits = ord(character) - 48
        if not 0 <= bits < 64 or shift > 35:
            raise ValueError("a run-length code is damaged")
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            value -= 1 << shift
        counts.append(value + counts[-2] if len(counts) > 2 else value)
        value = shift = 0
    if shift:
        raise ValueError("a run-length code is cut off")
    return counts
