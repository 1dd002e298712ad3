"""The classes of a data folder: `classes.toml`, lists of names, and those that conventions fix."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from anysize.data.files import read_lines
from anysize.errors import DataError

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
            f"{source} names {len(names)} classes; there must be 1 to {MAX_NAMES}, none empty. "
            f"Correct it, or write classes.toml."
        )
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(
            f"{source} names classes twice: {', '.join(twice[:10])}. Correct it, or write "
            f"classes.toml."
        )
    return Classes(names=tuple(names), colours=tuple(_voc_colour(i) for i in range(len(names))))


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
    _check_keys(table, {"ignore_index", "ignore_colours", "class"}, "", path)
    entries = table.get("class")
    if not isinstance(entries, list) or not entries:
        raise DataError(f"{path} names no classes. Add a [[class]] table for each.")
    names: list[str] = []
    colours: list[tuple[int, int, int]] = []
    for number, entry in enumerate(cast("list[object]", entries)):
        name, colour = _read_class(entry, number, path)
        names.append(name)
        colours.append(colour)
    ignored = _read_ignore_colours(table, path)
    for what, values in (("name", names), ("colour", [*colours, *ignored])):
        twice = [str(v) for v, count in Counter[object](values).items() if count > 1]
        if twice:
            raise DataError(
                f"{path} gives the same {what} to several classes: {', '.join(twice)}. "
                f"Each class needs its own."
            )
    ignore_index = _read_ignore_index(table, len(names), path)
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


def _read_class(entry: object, number: int, path: Path) -> tuple[str, tuple[int, int, int]]:
    if not isinstance(entry, dict):
        raise DataError(f"Class {number} is {entry!r}; it must be a [[class]] table ({path}).")
    table = cast("dict[str, Any]", entry)
    _check_keys(table, {"name", "colour"}, f"class {number}: ", path)
    name = table.get("name")
    if not isinstance(name, str) or not name.strip():
        raise DataError(f"The name of class {number} is {name!r}; it must be a text ({path}).")
    if "colour" not in table:
        raise DataError(f"Class {name!r} has no `colour`; add [red, green, blue] ({path}).")
    return name, _read_colour(table.get("colour"), f"The colour of class {name!r}", path)


def _read_colour(colour: object, what: str, path: Path) -> tuple[int, int, int]:
    is_colour = (
        isinstance(colour, list)
        and len(cast("list[object]", colour)) == 3
        and all(type(c) is int and 0 <= c <= 255 for c in cast("list[object]", colour))
    )
    if not is_colour:
        raise DataError(
            f"{what} is {colour!r}; it must be [red, green, blue], each a whole number from 0 to "
            f"255 ({path})."
        )
    red, green, blue = cast("list[int]", colour)
    return red, green, blue


def _read_ignore_colours(table: dict[str, Any], path: Path) -> tuple[tuple[int, int, int], ...]:
    entries = table.get("ignore_colours", [])
    if not isinstance(entries, list):
        raise DataError(f"`ignore_colours` is {entries!r}; it must be a list of colours ({path}).")
    return tuple(
        _read_colour(entry, "An entry of `ignore_colours`", path)
        for entry in cast("list[object]", entries)
    )


def _read_ignore_index(table: dict[str, Any], num_classes: int, path: Path) -> int:
    ignore_index = table.get("ignore_index", IGNORED)
    # 0 and 1 are the values of a multilabel mask, whatever the number of classes.
    lowest = max(num_classes, 2)
    if type(ignore_index) is int and (ignore_index == 0 or lowest <= ignore_index <= 255):
        return ignore_index
    raise DataError(
        f"`ignore_index` is {ignore_index!r}; it must be 0, so that the {num_classes} classes have "
        f"the ids 1 to {num_classes}, or from {lowest} to 255, since lower ones are ids of classes "
        f"or mask values ({path}). If ids are numbered otherwise, say what each value means in "
        'run.toml: data.ids = {0 = "ignore", 1 = "NAME"}.'
    )


def _check_keys(table: dict[str, Any], known: set[str], where: str, path: Path) -> None:
    unknown = sorted(set(table) - known)
    if unknown:
        raise DataError(
            f"{where}unknown key {', '.join(f'`{k}`' for k in unknown)} ({path}). "
            f"Known: {', '.join(f'`{k}`' for k in sorted(known))}."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Classes:
    """The classes of a data folder.

    Attributes:
        names: By class id.
        colours: (red, green, blue) of each class, in pictures and in masks of colours.
        ignore_index: The mask value of pixels that neither train nor count.
        ignore_colours: Their colours in masks of colours.
        ids: What values of masks of ids mean: pairs of a value and its label, a class id or
            `ignore_index`. Empty where values are class ids and `ignore_index` themselves.
    """

    names: tuple[str, ...]
    colours: tuple[tuple[int, int, int], ...]
    ignore_index: int = 255
    ignore_colours: tuple[tuple[int, int, int], ...] = ()
    ids: tuple[tuple[int, int], ...] = ()
