"""COCO's JSON: which images it lists, and their shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from anysize.config import DataConfig
from anysize.data.classes import IGNORE_NAME, Classes, named_classes, with_background
from anysize.data.files import (
    composed,
    files_below,
    is_one_of,
    read_json,
    size_of,
    some_of,
    whole_number,
    yes_or_no,
)
from anysize.data.frames import Reach, frame_of
from anysize.data.reading import Encoding, Pair, Pairs, Reading, Sample
from anysize.data.shapes import (
    MAX_SHAPES,
    Bitmap,
    LabelKind,
    LeftOut,
    Outline,
    Shapes,
    as_points,
    check_total,
    class_of,
    is_cut,
    naming,
    shapes_of,
    unknown_labels,
)
from anysize.errors import DataError
from anysize.faults import Fault, FaultError
from anysize.geometry import Size
from anysize.images.formats import IMAGE_SUFFIXES
from anysize.images.headers import Frame

MAX_COCO_BYTES = 2 << 30
"""COCO's own training file has 0.45 GB."""

MAX_NAME = 250
"""Characters of a file name in a COCO file; file systems hold some more in each part."""

_KEYS = {"images", "annotations", "categories"}
_HEAD_BYTES = 1 << 20


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
    paths = coco_paths(root, data)
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
    return Reading(
        images=root,
        labels=paths[0],
        pairs=pairs,
        classes=classes,
        named_by=named_by,
        encoding=Encoding(kind="coco", labels=kind, categories=files[0].categories),
        because="" if told else "detected by its content",
    )


def coco_paths(root: Path, data: DataConfig, kind: str = "instances_") -> list[Path]:
    """The one COCO file of a data folder, or that for training and that for evaluation.

    Raises:
        DataError: There is none, or it is not clear which one is meant.
    """
    if data.train.endswith(".json"):
        return [root / data.train, root / data.val]
    if data.labels:
        return [root / data.labels]
    paths = coco_files(root, kind)
    if len(paths) == 1:
        return paths
    splits = [[p for p in paths if part in p.stem] for part in ("train", "val")]
    if len(paths) != 2 or any(len(found) != 1 for found in splits):
        names = ", ".join(str(p.relative_to(root)) for p in paths) or "none"
        raise DataError(
            f"{root} must hold one COCO file, or one of train and one of val; it holds "
            f"{names}. Set data.labels to the one, or data.train and data.val to the two."
        )
    return [found[0] for found in splits]


def coco_files(root: Path, kind: str = "instances_") -> list[Path]:
    """The COCO files of a data folder: those of a kind, where other kinds lie beside them.

    Raises:
        FaultError: One is damaged.
    """
    files = sorted([*root.glob("*.json"), *root.glob("annotations/*.json")])
    files = [p for p in files if is_one_of(p, (".json",))][:100]
    named = [p for p in files if p.name.startswith(kind)]
    return [p for p in named or files if _is_coco(p)]


def _is_coco(path: Path) -> bool:
    """Whether a file is COCO's, by its keys.

    Raises:
        FaultError: It is damaged, and was COCO's by what is left of it.
    """
    try:
        return set(read_json(path, MAX_COCO_BYTES)) >= _KEYS
    except FaultError:
        with suppress(OSError), path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
            if path.name.startswith("instances") or any(f'"{k}"'.encode() in head for k in _KEYS):
                raise
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class CocoFile:
    """What a COCO file holds.

    Attributes:
        path: The file.
        images: File name, size if it is told, and id of each image.
        annotations: By the image's id.
        categories: Their names by id, in the order of the ids.
        category_entries: As the file has them.
    """

    path: Path
    images: tuple[tuple[str, Size | None, int | str], ...]
    annotations: Mapping[int | str, tuple[Mapping[str, Any], ...]]
    categories: Mapping[int | str, str]
    category_entries: Sequence[Mapping[str, Any]] = ()


def read_coco(path: Path) -> CocoFile:
    """Reads a COCO file. Ids are the same where they are the same number, as 7 and "7" are.

    Raises:
        FaultError: It cannot be read or is invalid.
    """
    table = read_json(path, MAX_COCO_BYTES)
    images, annotations, categories = (
        _objects(table, key, path) for key in ("images", "annotations", "categories")
    )
    by_image: dict[int | str, list[Mapping[str, Any]]] = {}
    listed: list[tuple[str, Size | None, int | str]] = []
    try:
        for entry in annotations:
            of_image = _key_of(entry["image_id"], "the `image_id` of an annotation")
            by_image.setdefault(of_image, []).append(entry)
        for entry in images:
            name = image_name(entry["file_name"])
            image_id = _key_of(entry["id"], f"the `id` of image {name!r}")
            listed.append((name, size_of(entry.get("height"), entry.get("width")), image_id))
        ids = [_key_of(entry["id"], "the `id` of a category") for entry in categories]
        _require_own_ids([image_id for _, _, image_id in listed], "images")
        _require_own_ids(ids, "categories")
        names = {i: entry["name"] for i, entry in zip(ids, categories, strict=True)}
        if not all(isinstance(name, str) for name in names.values()):
            raise ValueError("the `name` of a category is not a text")
        if by_image and not by_image.keys() & {image_id for _, _, image_id in listed}:
            raise ValueError(
                f"none of its {len(annotations)} annotations is of an image that it lists: "
                f"`image_id` is {next(iter(by_image))!r} in the first, and `id` "
                f"{listed[0][2]!r} in the first image"
                if listed
                else "it lists no images"
            )
    except (KeyError, ValueError, TypeError) as error:
        what = f"`{error.args[0]}` is missing" if isinstance(error, KeyError) else error
        message = f"{path} is not a valid COCO file: {what}. Correct it, or set data.labels to "
        raise FaultError("shapes", path, f"{message}another.") from None
    return CocoFile(
        path=path,
        images=tuple(listed),
        annotations={key: tuple(entries) for key, entries in by_image.items()},
        categories=dict(sorted(names.items(), key=lambda n: (isinstance(n[0], str), n[0]))),
        category_entries=categories,
    )


def _key_of(value: object, what: str) -> int | str:
    """An id as a number where it is one, in whatever form, else as the text that it is.

    Raises:
        ValueError: It is neither.
    """
    with suppress(ValueError):
        number = whole_number(value, what)
        if number is not None:
            return number
    if not isinstance(value, str) or not value:
        raise ValueError(f"{what} is {value!r}, which is neither a number nor a text")
    return value


def image_name(value: object) -> str:
    """The path of an image, with the slashes that Windows writes the other way.

    Raises:
        ValueError: It is none.
    """
    name = value.replace("\\", "/") if isinstance(value, str) else ""
    if not Path(name).name or len(name) > MAX_NAME or "\0" in name:
        raise ValueError(f"the file name {str(value)[:80]!r} is none")
    return name


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
        message = f"{path} is not a valid COCO file: `{key}` is not a list of objects. Correct it."
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
    elsewhere = _ByName(root / data.images)
    for file in files:
        folder = _coco_images(root, data, file)
        stems: list[str] = []
        num_found = 0
        known = {image_id for _, _, image_id in file.images}
        strays = [len(of) for key, of in file.annotations.items() if key not in known]
        if strays:
            notes.append(
                f"{file.path} has {sum(strays)} annotations of images that it does not list; they "
                f"are passed over."
            )
        for name, claimed, image_id in file.images:
            bare = Path(name).with_suffix("")
            stem = composed(bare.name if alone else bare.as_posix())
            image = folder / name
            if not _is_below(name) or not image.is_file():
                other = elsewhere.find(name)
                if other is None:
                    message = f"{file.path} names {name}, but there is no image {image}"
                    faults.append(Fault(kind="unpaired", path=image, message=message))
                    continue
                image, num_found = other, num_found + 1
            stems.append(stem)
            pairs.append(
                Pair(stem, image, (), file.annotations.get(image_id, ()), claimed, file.path)
            )
        if num_found:
            notes.append(
                f"{num_found} images of {file.path} lie in other folders than it says; they were "
                f"found by their names."
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


def _is_below(name: str) -> bool:
    path = Path(name)
    return not path.is_absolute() and ".." not in path.parts


class _ByName:
    """Finds an image by its name and as many folders before it as agree; lists them once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._paths: dict[str, list[Path]] | None = None

    def find(self, name: str) -> Path | None:
        """The one image that agrees most; None where there is none, or several."""
        if self._paths is None:
            self._paths = {}
            with suppress(DataError):
                for path in files_below(self._root, IMAGE_SUFFIXES):
                    self._paths.setdefault(composed(path.name), []).append(path)
        parts = Path(composed(name)).parts[::-1]
        found = self._paths.get(parts[0], [])

        def agreeing(path: Path) -> int:
            own = [composed(part) for part in path.relative_to(self._root).parts[::-1]]
            return next((i for i, (a, b) in enumerate(zip(own, parts, strict=False)) if a != b), 99)

        best = max((agreeing(path) for path in found), default=0)
        most = [path for path in found if agreeing(path) == best]
        return most[0] if len(most) == 1 else None


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
    names = [name for name, _, _ in some_of(file.images) if _is_below(name)]
    return max(candidates, key=lambda folder: sum((folder / name).is_file() for name in names))


def coco_shapes(sample: Sample, classes: Classes) -> Shapes:
    """The objects of one image of a COCO file: crowds first, then from large to small.

    So a small object is seen before a large one behind it, and a crowd, whose members nobody told
    apart, is ignored where no object was outlined.

    Raises:
        FaultError: A category is no class, an annotation is invalid otherwise than by its outline,
            none of several can be drawn, or `frame_of` fails.
        DataError: pycocotools, which draws the polygons, is not installed.
    """
    path = sample.encoding.file
    assert path is not None
    unknown: dict[str, int] = {}
    found: list[tuple[str, int, bool, _Rings | _Code]] = []
    left_out: list[LeftOut] = []
    with naming(path):
        if len(sample.annotations) > MAX_SHAPES:
            raise ValueError(f"an image has more than {MAX_SHAPES} shapes")
        for entry in sample.annotations:
            which = f"annotation {entry.get('id')!r}"
            key = _key_of(entry.get("category_id"), f"`category_id` of {which}")
            name = sample.encoding.categories.get(key, "")
            class_id = class_of(name, classes)
            if class_id is None:
                name = name or f"category {key!r}"
                unknown[name] = unknown.get(name, 0) + 1
                continue
            crowd = yes_or_no(entry.get("iscrowd"), f"`iscrowd` of {which}")
            try:
                found.append((which, class_id, crowd, _outline(entry.get("segmentation"))))
            except ValueError as error:
                left_out.append(LeftOut(which, str(error)))
        if unknown:
            raise unknown_labels(path, unknown, classes)
        frame = frame_of(sample, sample.claimed, [outline.reach for *_, outline in found], path)
        bitmaps: list[tuple[bool, float, Bitmap]] = []
        num_cut = total = 0
        for which, class_id, crowd, outline in found:
            drawn = outline.draw(which, frame.stored, left_out)
            if drawn is None:
                continue
            top, left, inside, is_cut = drawn
            bitmap = Bitmap(class_id=class_id, ignored=crowd, top=top, left=left, inside=inside)
            bitmaps.append((not crowd, -float(np.count_nonzero(inside)), bitmap))
            num_cut += is_cut
            total += inside.size
            check_total(total, frame.stored)
        bitmaps.sort(key=lambda b: b[:2])
        return shapes_of([bitmap for *_, bitmap in bitmaps], num_cut, left_out, frame)


def coco_frame(sample: Sample) -> Frame:
    """The image that a sample's annotations were drawn over, without drawing them.

    Raises:
        FaultError: As `frame_of`.
    """
    reaches: list[Reach] = []
    for entry in sample.annotations:
        with suppress(ValueError):
            reaches.append(_outline(entry.get("segmentation")).reach)
    assert sample.encoding.file is not None
    return frame_of(sample, sample.claimed, reaches, sample.encoding.file)


def _outline(segmentation: object) -> _Rings | _Code:
    """A segmentation, told from its type; not yet held against an image.

    Raises:
        ValueError: It is neither a list of polygons nor a run-length code.
    """
    if isinstance(segmentation, dict):
        code = cast("dict[str, Any]", segmentation)
        extent = code.get("size")
        if not isinstance(extent, list) or len(cast("list[object]", extent)) != 2:
            raise ValueError(f"has a run-length code of size {extent}")
        size = size_of(*cast("list[object]", extent))
        if size is None:
            raise ValueError("has a run-length code without a size")
        counts = code.get("counts")
        numbers = _unpack(counts) if isinstance(counts, str) else _whole(counts)
        if sum(numbers) != size.pixels or min(numbers, default=0) < 0:
            raise ValueError(f"has a run-length code of {sum(numbers)} pixels for {size}")
        return _Code(size, numbers)
    if not isinstance(segmentation, list) or not segmentation:
        raise ValueError("has no outline")
    rings = cast("list[object]", segmentation)
    if all(isinstance(value, int | float) for value in rings):
        rings = [rings]  # One polygon without the list around it.
    good: list[NDArray[np.float64]] = []
    bad: list[str] = []
    for ring in rings:
        try:
            points = as_points(ring)
            if len(points) < 3:
                raise ValueError(f"has {len(points)} points, fewer than 3")
            good.append(points)
        except ValueError as error:
            bad.append(str(error))
    if not good:
        raise ValueError(bad[0])
    return _Rings(good, bad)


class _Rings(NamedTuple):
    """Polygons that make one object, and what is wrong with others of it."""

    good: list[NDArray[np.float64]]
    bad: list[str]

    @property
    def reach(self) -> Reach:
        """Of all of them."""
        right, bottom = np.concatenate(self.good).max(0)
        return Reach(float(bottom), float(right))

    def draw(self, which: str, size: Size, left_out: list[LeftOut]) -> _Drawn | None:
        """The object's pixels; what cannot be drawn goes to `left_out`."""
        bad = list(self.bad)
        rings: list[NDArray[np.float64]] = []
        cut = False
        for ring in self.good:
            outline = Outline(class_id=None, ignored=False, form="polygon", points=ring)
            try:
                cut |= is_cut(outline, size)
                rings.append(ring)
            except ValueError as error:
                bad.append(str(error))
        whose = f"a ring of {which}" if rings else which
        left_out += [LeftOut(whose, why) for why in (bad if rings else bad[:1])]
        return _seen(which, _coco_polygons(rings, size), cut, left_out) if rings else None


class _Code(NamedTuple):
    """A run-length code: the image's size, and how many pixels are outside and inside in turn."""

    size: Size
    counts: list[int]

    @property
    def reach(self) -> Reach:
        """That of its image."""
        return Reach(self.size.height, self.size.width, whole=True)

    def draw(self, which: str, size: Size, left_out: list[LeftOut]) -> _Drawn | None:
        """The object's pixels; what cannot be drawn goes to `left_out`."""
        if self.size != size:
            why = f"has a run-length code of size {self.size} in an image of {size}"
            left_out.append(LeftOut(which, why))
            return None
        return _seen(which, (0, 0, _expanded(self.counts, size)), False, left_out)


class _Drawn(NamedTuple):
    top: int
    left: int
    inside: NDArray[np.bool_]
    is_cut: bool


def _seen(
    which: str,
    pixels: tuple[int, int, NDArray[np.bool_]],
    cut: bool,
    left_out: list[LeftOut],
) -> _Drawn | None:
    """Cut to the rows and columns in which anything is inside, so that many fit into memory."""
    top, left, inside = pixels
    rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
    if not len(rows):
        left_out.append(LeftOut(which, "covers no pixel"))
        return None
    trimmed = inside[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].copy()
    return _Drawn(top + int(rows[0]), left + int(columns[0]), trimmed, cut)


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
        raise ValueError("has a run-length code whose counts are no list of whole numbers")
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
            raise ValueError("has a run-length code that is damaged")
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            value -= 1 << shift
        counts.append(value + counts[-2] if len(counts) > 2 else value)
        value = shift = 0
    if shift:
        raise ValueError("has a run-length code that is cut off")
    return counts
