"""The classes of a data folder: `classes.toml`, lists of names, and those that conventions fix."""

from __future__ import annotations

import colorsys
import json
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from anysize.data.files import read_lines
from anysize.errors import ConfigError, DataError
from anysize.tables import Index, Within, from_table
from anysize.wording import count_of

Byte = Annotated[int, Within(0, 255)]

BACKGROUND_NAMES = ("background", "_background_", "__background__")
"""Names of the class of pixels that lie in no shape. Source: Pascal VOC; LabelMe's examples."""

IGNORE_NAME = "__ignore__"
"""LabelMe's name for what neither trains nor counts. Source: its examples' labels.txt."""


IGNORED = 255
"""The value of pixels that neither train nor count, unless `classes.toml` says otherwise."""

MAX_NAMES = 254
"""Classes that a mask of 8 bits can hold beside `ignore_index`."""

NAME_LISTS = ("labels.txt", "class_names.txt")
"""Lists of class names, as LabelMe and its examples call them."""


def named_classes(names: Sequence[str], source: str) -> Classes:
    """Classes of which only the names are known; their colours are those of Pascal VOC by id.

    Raises:
        DataError: No name, an empty one, one given twice, or more than a mask can hold.
    """
    if not names or len(names) > MAX_NAMES or not all(n.strip() for n in names):
        raise DataError(
            f"{source} names {count_of(len(names), 'class', 'classes')}; there must be 1 to "
            f"{MAX_NAMES}, none empty. "
            f"Correct it, or write classes.toml."
        )
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(
            f"{source} names classes twice: {', '.join(twice[:10])}. Correct it, or write "
            f"classes.toml."
        )
    return Classes(names=tuple(names), colours=tuple(_voc_colour(i) for i in range(len(names))))


def spread_colours(num: int) -> tuple[tuple[int, int, int], ...]:
    """Bright colours that differ, for classes or joints of which nothing says theirs."""
    colours = [
        colorsys.hsv_to_rgb(i / num, 1 - 0.5 * (i % 2), 1 - 0.25 * (i % 3)) for i in range(num)
    ]
    return tuple((round(255 * r), round(255 * g), round(255 * b)) for r, g, b in colours)


def _voc_colour(index: int) -> tuple[int, int, int]:
    """Spreads the bits of an id over the three channels, highest bit first. Source: VOCcolormap."""
    rgb = [0, 0, 0]
    for bit in range(8):
        for channel in range(3):
            rgb[channel] |= (index >> (3 * bit + channel) & 1) << (7 - bit)
    return rgb[0], rgb[1], rgb[2]


def read_names(path: Path) -> Classes:
    """Reads a list of class names, a line each, as LabelMe has it; `__ignore__` is passed over.

    Raises:
        DataError: It cannot be read, or the names are invalid.
    """
    return named_classes([n for n in read_lines(path) if n != IGNORE_NAME], str(path))


def with_background(classes: Classes) -> Classes:
    """Puts a background before classes that have none, for softmax over shapes."""
    if background_id(classes) is not None:
        return classes
    return named_classes(("background", *classes.names), "the list of classes")


def background_id(classes: Classes) -> int | None:
    """The class of pixels that lie in no shape; None where no class is called so."""
    return next((i for i, n in enumerate(classes.names) if n.lower() in BACKGROUND_NAMES), None)


def read_classes(path: Path) -> Classes:
    """Reads `classes.toml`: `ignore_index`, `ignore_colours` and a `[[class]]` table a class.

    Raises:
        DataError: No such file, not TOML, an unknown or missing key, a value of the wrong type or
            range, or a name or colour given twice.
    """
    try:
        # utf-8-sig passes over the mark that Windows editors put at the start.
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise DataError(
            f"No such file: {path}. `anysize init {path.parent}` writes one to start from."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read as TOML: {error}.") from None
    found = from_table(_ClassesTable, table, str(path), error=DataError)
    names = [entry.name for entry in found.class_]
    colours = [entry.colour for entry in found.class_]
    if not names:
        raise DataError(f"{path} names no classes. Add a [[class]] table for each.")
    if not all(name.strip() for name in names):
        raise DataError(f"{path} has a class without a name. Each class needs its own.")
    ignored = found.ignore_colours
    for what, values in (("name", names), ("colour", [*colours, *ignored])):
        twice = [str(v) for v, count in Counter[object](values).items() if count > 1]
        if twice:
            raise DataError(
                f"{path} gives the same {what} to several classes: {', '.join(twice)}. "
                f"Each class needs its own."
            )
    ignore_index = found.ignore_index
    _check_ignore_index(ignore_index, len(names), path)
    ids: tuple[tuple[int, int], ...] = ()
    if ignore_index == 0:
        ignore_index = IGNORED
        ids = ((0, IGNORED), *((i + 1, i) for i in range(len(names))))
    return Classes(
        names=tuple(names),
        colours=tuple(colours),
        ignore_index=ignore_index,
        ignore_colours=ignored,
        ids=ids,
    )


def saved_classes(text: str, source: str) -> Classes:
    """The classes in the metadata of a file, JSON of `Classes`.

    Raises:
        ConfigError: A key is missing or unknown, or a value of the wrong type or range.
        ValueError: It is not JSON.
    """
    classes = from_table(Classes, json.loads(text), source)
    if not 1 <= len(classes.names) == len(classes.colours) <= 256:
        raise ConfigError(
            f"{count_of(len(classes.names), 'class', 'classes')} with "
            f"{count_of(len(classes.colours), 'colour')} ({source})."
        )
    return classes


def with_ids(classes: Classes, ids: Mapping[str, str]) -> Classes:
    """Classes whose masks hold other values than 0, 1, 2, ...: those of `data.ids`.

    Raises:
        DataError: A value is no whole number that 16 bits hold, or a name is neither a class nor
            "ignore".
    """
    if not ids:
        return classes
    labels = {"ignore": classes.ignore_index} | {n: i for i, n in enumerate(classes.names)}
    pairs: list[tuple[int, int]] = []
    for value, name in ids.items():
        if not (value.isascii() and value.isdigit()) or int(value) > 65535:
            raise DataError(
                f"`data.ids` has the key {value!r}; a key is a value of the masks, a whole number "
                f"from 0 to 65535."
            )
        if name not in labels:
            raise DataError(
                f"`data.ids` says that {value} is {name!r}, which is no class. Name a class "
                f'({", ".join(classes.names)}), or "ignore".'
            )
        pairs.append((int(value), labels[name]))
    return replace(classes, ids=tuple(pairs))


def _check_ignore_index(ignore_index: int, num_classes: int, path: Path) -> None:
    # 0 and 1 are the values of a multilabel mask, whatever the number of classes.
    lowest = max(num_classes, 2)
    if ignore_index == 0 or lowest <= ignore_index <= 255:
        return
    raise DataError(
        f"`ignore_index` is {ignore_index!r}; it must be 0, so that the {num_classes} classes have "
        f"the ids 1 to {num_classes}, or from {lowest} to 255, since lower ones are ids of classes "
        f"or mask values ({path}). If ids are numbered otherwise, say what each value means in "
        'run.toml: data.ids = {0 = "ignore", 1 = "NAME"}.'
    )


Colour = tuple[Byte, Byte, Byte]
"""Red, green and blue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ClassTable:
    name: str
    colour: Colour


@dataclass(frozen=True, slots=True, kw_only=True)
class _ClassesTable:
    class_: tuple[_ClassTable, ...] = ()
    ignore_index: int = IGNORED
    ignore_colours: tuple[Colour, ...] = ()


Joined = tuple[Index, Index]
"""Two joints, by their places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JointLinks:
    """Which joints belong together.

    Attributes:
        pairs: Left and right, which mirroring swaps.
        skeleton: Joints that pictures connect.
        head: The two ends of the head, for PCKh; may be empty.
        known: Whether anyone said which joints are pairs.
    """

    pairs: tuple[Joined, ...] = ()
    skeleton: tuple[Joined, ...] = ()
    head: tuple[Index, ...] = ()
    known: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Classes:
    """The classes of a data folder; or its joints, one a class.

    Attributes:
        names: By class id.
        colours: (red, green, blue) of each class, in pictures and in masks of colours.
        ignore_index: The mask value of pixels that neither train nor count.
        ignore_colours: Their colours in masks of colours.
        ids: What values of masks of ids mean: pairs of a value and its label, a class id or
            `ignore_index`. Empty where values are class ids and `ignore_index` themselves.
        links: Of joints.
    """

    names: tuple[str, ...]
    colours: tuple[Colour, ...]
    ignore_index: Byte = 255
    ignore_colours: tuple[Colour, ...] = ()
    ids: tuple[tuple[int, int], ...] = ()
    links: JointLinks = JointLinks()
