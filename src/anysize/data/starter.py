"""`anysize init`: a `classes.toml` and a `run.toml` to start from, of what a data folder holds.

Every mask is read for the ids or colours in it. What only a person knows, such as what an id is
called or whether 255 is a class, is left to be filled in, and said in a comment.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from anysize.atomic_files import write_atomic
from anysize.config import DataConfig
from anysize.data.classes import (
    BACKGROUND_NAMES,
    IGNORE_NAME,
    IGNORED,
    MAX_NAMES,
    NAME_LISTS,
)
from anysize.data.colours import Colour, distinct_colours
from anysize.data.files import files_below, read_json, read_lines
from anysize.data.formats.coco import coco_files, read_coco
from anysize.data.formats.joints import JOINT_FILES
from anysize.data.formats.labelme import labelme_entries, labelme_files
from anysize.data.formats.own import has_stacks
from anysize.data.formats.ultralytics import ultralytics_names
from anysize.data.layouts import detect_layout
from anysize.data.mask_files import read_mask_header, read_mask_pixels
from anysize.data.pairing import find_patterns, key_of
from anysize.errors import ConfigError, DataError
from anysize.faults import FaultError
from anysize.images.formats import IMAGE_SUFFIXES, LABEL_SUFFIXES, is_hidden
from anysize.tables import toml_text
from anysize.wording import count_of, printable


@dataclass(slots=True, kw_only=True)
class Found:
    """What a data folder holds, as far as its files tell.

    Attributes:
        names: Of the classes; placeholders where nothing names them. Empty where the layout has
            classes of its own.
        colours: Of the classes, where masks have them; else they are chosen.
        ids: The class of each value, where values are not 0, 1, 2, ...
        num_images: In which each class occurs, where masks were read.
        multilabel: Whether masks hold any number of classes per pixel.
        pattern: Of the masks' names.
        notes: Comments for `run.toml`, and for the console.
        unread: Masks that could not be read; `anysize check` names them.
    """

    names: list[str] = field(default_factory=list[str])
    colours: list[Colour] = field(default_factory=list[Colour])
    ids: dict[int, str] = field(default_factory=dict[int, str])
    num_images: list[int] = field(default_factory=list[int])
    multilabel: bool = False
    pattern: str = ""
    notes: list[str] = field(default_factory=list[str])
    unread: int = 0


def write_starter(root: Path, run_toml: Path) -> list[str]:
    """Writes `classes.toml` into a data folder, and a `run.toml`; never over a file.

    Args:
        root: The data folder.
        run_toml: Where to write the settings of a run.

    Returns:
        What was found and written, a sentence each.

    Raises:
        ConfigError: Both files exist already.
        DataError: The folder holds nothing to learn from, or more classes than a mask can hold.
        OSError: A file cannot be written.
    """
    if not root.is_dir():
        raise DataError(f"No such data folder: {root}. Name the folder of images and masks.")
    toml = root / "classes.toml"
    if toml.exists() and run_toml.exists():
        raise ConfigError(f"{toml} and {run_toml} already exist; init never overwrites a file.")
    found = look_into(root)
    said, settings = [*found.notes], _run_toml(root, run_toml, found).encode()
    if toml.exists():
        said.append(f"{toml} already exists; it is left as it is.")
    elif found.names:
        write_atomic(toml, classes_toml(found).encode())
        said.append(
            f"Wrote {toml}: {count_of(len(found.names), 'class', 'classes')}. Correct their names."
        )
    if run_toml.exists():
        said.append(f"{run_toml} already exists; it is left as it is.")
    else:
        write_atomic(run_toml, settings)
        said.append(f"Wrote {run_toml}. Next: anysize check {run_toml}")
    return said


def look_into(root: Path) -> Found:
    """Reads names, ids and colours from a data folder's labels.

    Raises:
        DataError: It holds no labels, or more classes than a mask can hold.
    """
    if any((root / name).exists() for name in JOINT_FILES):
        raise DataError(
            f'{root} holds joints. A run.toml for them needs data.root and loss.kind = "pose"; '
            "docs/pose.md has one, and a joints.toml."
        )
    data = DataConfig(root=str(root))
    layout = detect_layout(root, data)
    if layout == "ultralytics":
        listed = ultralytics_names(root)
        if listed is None:
            raise DataError(f"{root} has no data.yaml, which names the classes. Add it.")
        return _named([*listed[0].names], f"those of {listed[1].name}")
    if layout != "anysize":
        return Found(notes=[f"{root} is a folder of {layout}, whose classes are known."])
    images, masks = root / "images", root / "masks"
    if files := coco_files(root):
        names = [n for n in read_coco(files[0]).categories.values() if n != IGNORE_NAME]
        return _named(names, f"those of {files[0].name}")
    for folder in (masks, images, root):
        if folder.is_dir() and (files := labelme_files(folder)):
            return _of_labelme(files)
    folders = [p for p in sorted(masks.iterdir()) if p.is_dir()] if masks.is_dir() else []
    nested = {p.name for p in images.iterdir() if p.is_dir()} if images.is_dir() else set[str]()
    own = [p.name for p in folders if not is_hidden(p) and p.name not in nested]
    if own and has_stacks(masks) is False and not _direct_files(masks):
        found = Found(names=own, multilabel=True)
        found.notes.append(f"{masks} has one folder per class, so loss.kind is sigmoid.")
        return found
    if has_stacks(masks):
        raise DataError(
            f"{masks} holds stacks, whose planes are classes that nothing names. Write "
            f"{root / 'classes.toml'} with a [[class]] for each plane, in their order."
        )
    found = _of_masks(root, files_below(masks, LABEL_SUFFIXES))
    keys = [key_of(p, images) for p in files_below(images, IMAGE_SUFFIXES)]
    of_masks = [key_of(p, masks) for p in files_below(masks, LABEL_SUFFIXES)]
    if not set(keys) & set(of_masks):
        found.pattern = next(iter(find_patterns(keys, of_masks)), "")
    return found


def _direct_files(folder: Path) -> bool:
    return any(p.is_file() and p.suffix.lower() in LABEL_SUFFIXES for p in folder.iterdir())


def _named(names: Sequence[str], by: str) -> Found:
    background = [n for n in names if n.lower() in BACKGROUND_NAMES]
    ordered = list(names) if background else ["background", *names]
    return Found(names=ordered, notes=[f"Classes are {by}."])


def _of_labelme(files: Sequence[Path]) -> Found:
    names: dict[str, None] = {}
    unread = 0
    for path in files:
        try:
            entries = labelme_entries(read_json(path))
        except (FaultError, ValueError):
            unread += 1
            continue
        names |= {str(e["label"]): None for e in entries if isinstance(e.get("label"), str)}
    known = sorted(n for n in names if n != IGNORE_NAME)
    if not known:
        raise DataError(f"No LabelMe file in {files[0].parent} has a shape. Outline objects first.")
    found = _named(known, "the labels of LabelMe's files")
    found.unread = unread
    return found


def _of_masks(root: Path, paths: Sequence[Path]) -> Found:
    """By the ids, or the colours, of all masks."""
    images_with: dict[int, int] = {}
    colours_with: dict[int, int] = {}
    palette: dict[int, int] = {}
    unread, num_coloured = 0, 0
    for path in paths:
        try:
            header = read_mask_header(path)
            pixels = read_mask_pixels(path, header, turned=False)
        except FaultError:
            unread += 1
            continue
        if pixels.values is None:
            assert pixels.colours is not None
            num_coloured += 1
            for code in np.unique(pixels.colours).tolist():
                colours_with[code] = colours_with.get(code, 0) + 1
            continue
        for value in np.unique(pixels.values).tolist():
            images_with[value] = images_with.get(value, 0) + 1
            if value < len(header.palette):
                palette.setdefault(value, header.palette[value])
    if unread == len(paths):
        raise DataError(f"No mask of {root} can be read; `anysize check {root}` says why.")
    coloured = num_coloured > 0
    found = _of_colours(root, colours_with) if coloured else _of_ids(root, images_with, palette)
    found.unread = unread
    if unread:
        found.notes.append(
            f"Not read: {count_of(unread, 'mask')}; `anysize check {root}` says why."
        )
    return found


def _of_colours(root: Path, images_with: dict[int, int]) -> Found:
    if len(images_with) > MAX_NAMES:
        raise DataError(
            f"The masks of {root} hold {len(images_with)} colours, more than {MAX_NAMES} classes. "
            f"Are they photographs, or smoothed at the edges? Export them as ids."
        )
    codes = sorted(images_with)
    return Found(
        names=[f"class {i}" for i in range(len(codes))],
        colours=[_colour(code) for code in codes],
        num_images=[images_with[code] for code in codes],
        notes=[f"Masks hold {len(codes)} colours; each is a class. Name them."],
    )


def _of_ids(root: Path, images_with: dict[int, int], palette: dict[int, int]) -> Found:
    values = sorted(images_with)
    if len(values) > MAX_NAMES or values[-1] > 65535 or values[0] < 0:
        raise DataError(
            f"The masks of {root} hold {len(values)} values from {values[0]} to {values[-1]}, more "
            f"than {MAX_NAMES} classes, or more than 16 bits. Are they photographs?"
        )
    if values == [0, IGNORED]:
        note = "Masks hold 0 and 255: 255 may be the class, or pixels to ignore; see data.masks."
        return Found(names=["background", "foreground"], notes=[note])
    classes = [value for value in values if value != IGNORED]
    found = Found(num_images=[images_with[value] for value in classes])
    found.names = _listed_names(root, classes) or [f"class {value}" for value in classes]
    colours = [_colour(palette[value]) for value in classes if value in palette]
    if len(set(colours)) == len(classes):
        found.colours = colours
    if classes != list(range(len(classes))):
        found.ids = dict(zip(classes, found.names, strict=True))
        if IGNORED in values:
            found.ids[IGNORED] = "ignore"
        found.notes.append("Values of masks are not 0, 1, 2, ..., so data.ids says what they mean.")
    found.notes.insert(0, f"Masks hold the values {', '.join(map(str, values))}.")
    return found


def _listed_names(root: Path, classes: Sequence[int]) -> list[str]:
    """The names of ids in a list of names beside the data, if one holds them all."""
    for name in NAME_LISTS:
        if (root / name).is_file():
            names = [n for n in read_lines(root / name) if n != IGNORE_NAME]
            if classes[-1] < len(names):
                return [names[value] for value in classes]
    return []


def _colour(code: int) -> Colour:
    return code >> 16, code >> 8 & 255, code & 255


def classes_toml(found: Found) -> str:
    """A `classes.toml` of what was found."""
    colours = found.colours or distinct_colours(len(found.names))
    lines = [
        "# Classes in the order of their ids, 0 first. Names may be anything; colours are those of",
        "# pictures, and of masks of colours.",
        f"ignore_index = {IGNORED}  # the value of pixels that neither train nor count",
    ]
    for i, (name, colour) in enumerate(zip(found.names, colours, strict=True)):
        seen = f"  # in {count_of(found.num_images[i], 'mask')}" if found.num_images else ""
        lines += ["", f"[[class]]{seen}", f"name = {toml_text(name)}", f"colour = {list(colour)}"]
    return "\n".join(lines) + "\n"


def _run_toml(root: Path, run_toml: Path, found: Found) -> str:
    relative = os.path.relpath(root.resolve(), run_toml.resolve().parent)
    lines = [
        "# Settings of a run: `anysize check run.toml` checks the data, `anysize train run.toml`",
        "# trains. Keys that are commented out show their defaults, or what else they can be.",
        "",
        "[data]",
        f"root = {toml_text(Path(relative).as_posix())}",
    ]
    lines += ["# " + printable(note).replace("\n", " ") for note in found.notes]
    if found.names == ["background", "foreground"] and not found.num_images:
        lines += [
            '# masks = "binary"  # 255 is the class "foreground"',
            '# masks = "index"   # 255 is ignored',
        ]
    if found.pattern:
        lines.append(f"mask_pattern = {toml_text(found.pattern)}")
    if found.ids:
        pairs = ", ".join(f"{value} = {toml_text(name)}" for value, name in found.ids.items())
        lines.append(f"ids = {{ {pairs} }}")
    kind = '"sigmoid"  # any number of classes per pixel' if found.multilabel else '"softmax"'
    lines += [
        "# val_fraction = 0.2  # of the images, held out for evaluation",
        '# train = "train.txt"  # or lists of names without suffix, one per line',
        '# val = "val.txt"',
        "",
        "[loss]",
        f"kind = {kind}",
        "",
        "[augment]",
        "# min_scale = 0.75  # images are rescaled at random",
        "# max_scale = 1.33",
        "",
        "[train]",
        'run = "run"  # the folder that the run is written to',
        "# epochs = 10",
        '# weights = "resnet_v1_50.safetensors"  # pretrained, from `anysize convert`',
    ]
    return "\n".join(lines) + "\n"
