"""Joints: our own CSV, COCO key points, DeepLabCut's project, and pose-tensorflow's `.mat` list.

Each is read as a `CocoFile`, whose annotations are `{"person": NAME, "joints": [(j, x, y), ...]}`
with the joints' places in `joints.toml`, or in the file's own list of names where there is none.
"""

from __future__ import annotations

import csv
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from anysize.config import DataConfig
from anysize.data.classes import Classes, JointLinks, named_classes, spread_colours
from anysize.data.files import MAX_FILE_BYTES, files_below, size_of, whole_number, yes_or_no
from anysize.data.formats.coco import CocoFile, coco_paths, image_name, read_coco, scan_coco
from anysize.data.frames import Reach, frame_of
from anysize.data.joints import Joints
from anysize.data.reading import Encoding, Reading, Sample
from anysize.errors import DataError, first_names
from anysize.faults import Fault, FaultError
from anysize.geometry import Size
from anysize.images.formats import IMAGE_SUFFIXES
from anysize.images.headers import Frame
from anysize.tables import from_table
from anysize.wording import count_of

JOINT_NAMES = "joints.toml"
OWN = "joints.csv"
OWN_COLUMNS = ("image", "person", "joint", "x", "y", "visible")
DEEPLABCUT = "labeled-data"
JOINT_FILES = (JOINT_NAMES, OWN, DEEPLABCUT)
"""What only folders of joints have."""


def read_joints(root: Path, data: DataConfig) -> Reading:
    """Reads a folder of images with joints: those that `data.labels` names, or what is there.

    Images without a labelled joint are left out: nobody said that there is none to be seen.

    Raises:
        DataError: There are no joints, joints of several kinds, or no names for them.
    """
    known = read_joint_names(root / JOINT_NAMES) if (root / JOINT_NAMES).is_file() else None
    path = _labels(root, data)
    is_coco = data.train.endswith(".json") or path.suffix == ".json"
    paths = coco_paths(root, data, "person_keypoints_") if is_coco else [path]
    tables = [_read(p, known) for p in paths]
    classes = known or tables[0].classes
    if classes is None:
        raise DataError(
            f"{root} has no {JOINT_NAMES}, which names the joints of {paths[0]}. Write one: names "
            'is a list such as ["nose", "left_ear", "right_ear"], and pairs is one such as '
            '[["left_ear", "right_ear"]].'
        )
    pairs = scan_coco(root, data, [table.file for table in tables])
    labelled = [pair for pair in pairs.pairs if any(a["joints"] for a in pair.annotations)]
    folders = {pair.image.parent for pair in pairs.pairs}
    beside = {f for folder in folders for f in files_below(folder, IMAGE_SUFFIXES, deep=False)}
    pairs.unlabelled = sorted(beside - {pair.image for pair in labelled})
    if pairs.unlabelled:
        names = first_names((path.name for path in pairs.unlabelled), 3)
        num = len(pairs.unlabelled)
        pairs.notes.append(f"Left out: {count_of(num, 'image')} without a labelled joint: {names}.")
    pairs.pairs = labelled
    pairs.faults[:0] = [fault for table in tables for fault in table.faults]
    pairs.notes += [note for table in tables for note in table.notes]
    return Reading(
        images=root,
        labels=paths[0],
        pairs=pairs,
        classes=classes,
        named_by=JOINT_NAMES if known else paths[0].name,
        encoding=Encoding(kind="joints", labels="joints"),
        because=", ".join(str(p.relative_to(root)) for p in paths),
    )


def joints_of(sample: Sample, num_joints: int) -> Joints:
    """The labelled joints of an image, upright.

    Raises:
        FaultError: As `frame_of`.
    """
    joints = np.full((len(sample.annotations), num_joints, 2), math.nan)
    for person, entry in zip(joints, sample.annotations, strict=True):
        for j, x, y in entry["joints"]:
            person[j] = x, y
    frame = joints_frame(sample)
    x, y = joints[..., 0].copy(), joints[..., 1].copy()
    last_y, last_x = frame.stored.height - 1, frame.stored.width - 1
    if frame.orientation in {2, 3, 7, 8}:
        x = last_x - x
    if frame.orientation in {3, 4, 6, 7}:
        y = last_y - y
    joints[..., 0], joints[..., 1] = (y, x) if frame.orientation > 4 else (x, y)
    return joints


def joints_frame(sample: Sample) -> Frame:
    """The image that a sample's joints were placed on.

    Raises:
        FaultError: As `frame_of`.
    """
    reaches = [Reach(y, x) for entry in sample.annotations for _, x, y in entry["joints"]]
    assert sample.encoding.file is not None
    return frame_of(sample, sample.claimed, reaches, sample.encoding.file)


# Names


@dataclass(frozen=True, slots=True, kw_only=True)
class _NamesTable:
    names: tuple[str, ...]
    pairs: tuple[tuple[str, str], ...]
    skeleton: tuple[tuple[str, str], ...] = ()
    head: tuple[str, ...] = ()


def read_joint_names(path: Path) -> Classes:
    """Reads `joints.toml`: names, left and right pairs, skeleton and, for PCKh, the head's two.

    Raises:
        DataError: It cannot be read, a key is missing or unknown, or a name is given twice or is no
            joint.
    """
    try:
        # utf-8-sig passes over the mark that Windows editors put at the start.
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as TOML: {error}.") from None
    found = from_table(_NamesTable, table, str(path), error=DataError)
    classes = joint_classes(found.names, str(path))
    place = {name: j for j, name in enumerate(classes.names)}
    for key, lists in (
        ("pairs", found.pairs),
        ("skeleton", found.skeleton),
        ("head", [found.head]),
    ):
        if unknown := [name for names in lists for name in names if name not in place]:
            raise DataError(
                f"`{key}` has {first_names(unknown)}, which `names` lacks ({path}). Correct it."
            )
    paired = [name for pair in found.pairs for name in pair]
    if len(set(paired)) < len(paired):
        raise DataError(f"`pairs` has a joint twice ({path}). A joint mirrors one other joint.")
    if len(found.head) not in (0, 2):
        raise DataError(f"`head` must be two joints, the ends of the head ({path}).")
    links = JointLinks(
        pairs=tuple((place[a], place[b]) for a, b in found.pairs),
        skeleton=tuple((place[a], place[b]) for a, b in found.skeleton),
        head=tuple(place[name] for name in found.head),
    )
    return replace(classes, links=links)


def joint_classes(names: Sequence[str], source: str) -> Classes:
    """Joints of which only the names are known.

    Raises:
        DataError: As `named_classes`.
    """
    return replace(named_classes(names, source), colours=spread_colours(len(names)))


# Files


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """What a file of joints holds; `classes` where it names its joints."""

    file: CocoFile
    classes: Classes | None = None
    faults: Sequence[Fault] = ()
    notes: Sequence[str] = ()


def _labels(root: Path, data: DataConfig) -> Path:
    """The file of joints, or DeepLabCut's folder.

    Raises:
        DataError: There is none, or there are several.
    """
    if data.train.endswith(".json"):
        return root / data.train
    if data.labels:
        return root / data.labels
    found = [p for p in (root / OWN, root / DEEPLABCUT) if p.exists()]
    found += sorted(root.glob("*.mat"))
    if not found:
        found = coco_paths(root, data, "person_keypoints_")[:1]
    if len(found) != 1:
        raise DataError(
            f"{root} holds joints of several kinds: {first_names(p.name for p in found)}. Set "
            "data.labels to the one that is meant."
        )
    return found[0]


def _read(path: Path, known: Classes | None) -> _Table:
    if path.is_dir():
        return _read_deeplabcut(sorted(path.glob("*/CollectedData_*.csv")), path, known)
    if path.suffix == ".json":
        return _read_coco(path, known)
    if path.suffix == ".mat":
        return _read_mat(path, known)
    rows = _rows(path)
    if rows and rows[0][:1] == ["scorer"]:
        return _read_deeplabcut([path], path, known)
    return _read_own(path, rows, known)


def _rows(path: Path) -> list[list[str]]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"it has more than {MAX_FILE_BYTES >> 20} MiB")
        with path.open(encoding="utf-8-sig", newline="") as file:
            return list(csv.reader(file, strict=True))
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV: {error}. Replace or remove it.") from None


@dataclass(slots=True)
class _People:
    """Collects joints by image and person, and what is wrong with them."""

    path: Path
    names: Sequence[str]
    images: dict[str, dict[str, dict[int, tuple[float, float]]]] = field(default_factory=dict)
    sizes: dict[str, Size | None] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def add(self, image: str, person: str, name: str, point: tuple[str, str], where: str) -> None:
        """Adds a joint, or the fault that it has; an empty point is not labelled."""
        kind = "joints"
        try:
            people = self.images.setdefault(image_name(image.strip()), {})
            if all(value.strip().lower() in {"", "nan"} for value in point):
                return
            if name not in self.names:
                kind = "labels"
                raise ValueError(f"the joint {name!r} is not one of {first_names(self.names)}")
            x, y = map(float, point)
            if not (math.isfinite(x) and math.isfinite(y)):
                raise ValueError(f"{name!r} is at {point}, which is no place")
            joints = people.setdefault(person, {})
            if self.names.index(name) in joints:
                raise ValueError(f"{name!r} is given twice")
            joints[self.names.index(name)] = x, y
        except ValueError as error:
            message = f"{where}: {error} (image {image!r}, person {person!r}). Correct it."
            self.faults.append(Fault(kind=kind, path=self.path, message=message))

    def table(self, classes: Classes | None = None, notes: Sequence[str] = ()) -> _Table:
        """What was collected."""
        file = CocoFile(
            path=self.path,
            images=tuple((name, self.sizes.get(name), name) for name in self.images),
            annotations={
                name: tuple(
                    {"person": person, "joints": [(j, *point) for j, point in joints.items()]}
                    for person, joints in people.items()
                )
                for name, people in self.images.items()
            },
            categories={},
        )
        return _Table(file=file, classes=classes, faults=self.faults, notes=notes)


def _read_own(path: Path, rows: Sequence[Sequence[str]], known: Classes | None) -> _Table:
    header = [cell.strip() for cell in rows[0]] if rows else []
    strange = sorted(set(header) - set(OWN_COLUMNS))
    missing = [name for name in ("image", "joint", "x", "y") if name not in header]
    if strange or missing or len(set(header)) < len(header):
        raise DataError(
            f"{path} begins with {','.join(header)[:80]!r}; its columns must be "
            f"{', '.join(OWN_COLUMNS)}, of which person and visible may be left out. Correct it."
        )
    names = [] if known is None else known.names
    people, num_hidden = _People(path, names), 0
    for line, cells in enumerate(rows[1:], start=2):
        where = f"line {line} of {path}"
        if len(cells) != len(header):
            if cells:
                message = f"{where} has {len(cells)} cells, not {len(header)}. Correct it."
                people.faults.append(Fault(kind="joints", path=path, message=message))
            continue
        row = dict(zip(header, cells, strict=True))
        point = row["x"], row["y"]
        try:
            visible = whole_number(row.get("visible") or None, f"`visible` in {where}")
            if visible not in (None, 0, 1, 2):
                raise ValueError(f"`visible` in {where} is {visible}, not 0, 1 or 2")
        except ValueError as error:
            people.faults.append(Fault(kind="joints", path=path, message=f"{error}. Correct it."))
            continue
        if visible == 0:
            num_hidden += any(point)
            point = "", ""
        people.add(row["image"], row.get("person", ""), row["joint"].strip(), point, where)
    notes = [f"Not labelled: {count_of(num_hidden, 'joint')} of {path} with visible 0."]
    return people.table(notes=notes if num_hidden else ())


def _read_deeplabcut(paths: Sequence[Path], source: Path, known: Classes | None) -> _Table:
    """DeepLabCut's `CollectedData_SCORER.csv` of each video, of one animal or of several."""
    folders = [p.parent for p in paths]
    if not paths or len(set(folders)) < len(folders):
        files = first_names(f"{p.parent.name}/{p.name}" for p in paths)
        raise DataError(
            f"{source} must hold one CollectedData_*.csv per video; it holds {files}. Remove the "
            "others."
        )
    tables = [(path, *_deeplabcut_columns(path)) for path in paths]
    names = list(dict.fromkeys(name for _, _, columns in tables for name, *_ in columns))
    people = _People(source, known.names if known else names)
    for path, rows, columns in tables:
        for line, cells in rows:
            if len(cells) <= max(at for *_, at in columns) + 1:
                raise DataError(f"line {line} of {path} is too short. Save the file again.")
            image = "/".join(cells[: columns[0][-1]])
            for name, animal, at in columns:
                where = f"line {line} of {path}"
                people.add(image, animal, name, (cells[at], cells[at + 1]), where)
    return people.table(replace(joint_classes(names, str(source)), links=JointLinks(known=False)))


def _deeplabcut_columns(
    path: Path,
) -> tuple[list[tuple[int, list[str]]], list[tuple[str, str, int]]]:
    """The lines of images, and of each body part its name, its animal, and the column of its x."""
    rows = _rows(path)
    heads = {row[0]: row for row in rows[:4] if row}
    coords, parts = heads.get("coords", []), heads.get("bodyparts", [])
    animals = heads.get("individuals", [""] * len(coords))
    at = [i for i, cell in enumerate(coords) if cell == "x"]
    others = {*coords[at[0] :]} - {"x", "y"} if at else {"no x"}
    if others or coords.count("y") != len(at) or not len(parts) == len(animals) == len(coords):
        what = "predictions" if "likelihood" in others else "none"
        raise DataError(
            f"{path} should be labels of DeepLabCut, with the lines scorer, bodyparts and coords, "
            f"and x and y of each body part, but it is {what}. Set data.labels to another file."
        )
    first = next(line for line, row in enumerate(rows, 1) if row and row[0] == "coords")
    lines = [(line, row) for line, row in enumerate(rows, 1) if line > first and row]
    return lines, [(parts[i], animals[i], i) for i in at]


def _read_coco(path: Path, known: Classes | None) -> _Table:
    file = read_coco(path)
    listed = [entry for entry in file.category_entries if entry.get("keypoints")]
    if len(listed) != 1:
        named = first_names(str(entry.get("name")) for entry in listed)
        raise DataError(
            f"{path} must have one category with `keypoints`, the names of its joints; it has "
            f"{named}. Set data.labels to another file, or leave one category in it."
        )
    names = [str(name) for name in listed[0]["keypoints"]]
    people = _People(path, known.names if known else names)
    sizes = {image_id: (name, size) for name, size, image_id in file.images}
    for name, size in sizes.values():
        people.images.setdefault(name, {})
        people.sizes[name] = size
    for image_id, entries in file.annotations.items():
        for entry in entries:
            _add_coco(people, sizes.get(image_id, ("", None))[0], entry, names)
    return people.table(replace(joint_classes(names, str(path)), links=_coco_links(listed[0])))


def _add_coco(people: _People, image: str, entry: Mapping[str, Any], names: Sequence[str]) -> None:
    where = f"annotation {entry.get('id')!r} of {people.path}"
    values = entry.get("keypoints")
    try:
        if not image or values is None or yes_or_no(entry.get("iscrowd"), "`iscrowd`"):
            return
        if not isinstance(values, list) or len(values) != 3 * len(names):
            raise ValueError(f"`keypoints` is not a list of {3 * len(names)} numbers")
    except ValueError as error:
        message = f"{where}: {error}. Correct it."
        people.faults.append(Fault(kind="joints", path=people.path, message=message))
        return
    for name, x, y, visible in zip(names, values[::3], values[1::3], values[2::3], strict=True):
        point = (str(x), str(y)) if visible else ("", "")
        people.add(image, str(entry.get("id")), name, point, where)


def _coco_links(category: Mapping[str, Any]) -> JointLinks:
    """The skeleton, whose numbers count from 1, and pairs of names that say left and right."""
    names = [str(name) for name in category["keypoints"]]
    pairs = [
        (j, names.index(other))
        for j, name in enumerate(names)
        if "left" in name.lower()
        and (other := name.replace("left", "right").replace("Left", "Right")) in names
    ]
    sides = sum("left" in name.lower() or "right" in name.lower() for name in names)
    skeleton = [
        (int(a) - 1, int(b) - 1)
        for a, b in category.get("skeleton") or ()
        if 0 < int(a) <= len(names) and 0 < int(b) <= len(names)
    ]
    known = bool(pairs) and sides == 2 * len(pairs)
    return JointLinks(pairs=tuple(pairs), skeleton=tuple(skeleton), known=known)


def _read_mat(path: Path, known: Classes | None) -> _Table:
    """pose-tensorflow's list: a struct array `dataset` with image, size [3, H, W] and joints.

    Joints are `[n, 3]` of id from 0, x and y in a cell for each person. The original reads the
    first person only.
    """
    names = () if known is None else known.names
    people = _People(path, names)
    for i, image, size, cells in _mat_items(path):
        people.images.setdefault(image, {})
        people.sizes[image] = size
        for number, rows in enumerate(cells):
            for joint, x, y in rows:
                is_named = joint == int(joint) and 0 <= joint < len(names)
                name = names[int(joint)] if is_named else f"id {joint:g}"
                people.add(image, str(number), name, (str(x), str(y)), f"entry {i + 1} of {path}")
    return people.table()


def _mat_items(path: Path) -> Iterator[tuple[int, str, Size | None, list[np.ndarray]]]:
    try:
        from scipy.io import loadmat  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise DataError(
            f"{path} is read by SciPy, which is not installed. Install it: pip install "
            "'anysize[pose]'."
        ) from None
    try:
        entries = np.ravel(loadmat(path, variable_names=["dataset"])["dataset"])
        fields = entries.dtype.names or ()
        for i, entry in enumerate(entries):
            image = image_name(str(np.ravel(entry["image"])[0]))
            size = np.ravel(entry["size"])[-2:] if "size" in fields else (None, None)
            cells = np.ravel(entry["joints"]) if "joints" in fields else []
            people = [np.asarray(cell, np.float64).reshape(-1, 3) for cell in cells]
            yield i, image, size_of(*map(_number, size)), people
    except (OSError, KeyError, ValueError, TypeError, IndexError, NotImplementedError) as error:
        raise FaultError(
            "joints",
            path,
            f"{path} is not a list of pose-tensorflow, a struct array `dataset` with image, size "
            f"and joints: {error}. Save it again, by version 7 of MATLAB's files.",
        ) from None


def _number(value: object) -> float | None:
    return None if value is None else float(value)  # pyright: ignore[reportArgumentType]
