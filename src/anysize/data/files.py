"""Files of a data folder: listed, paired by their stems, and read as JSON or as lists of names."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from anysize.errors import DataError, first_names
from anysize.faults import Fault, FaultError
from anysize.geometry import Size
from anysize.images.formats import (
    IMAGE_SUFFIXES,
    PICTURE_SUFFIXES,
    Format,
    format_by_suffix,
    is_hidden,
)

T = TypeVar("T")

MAX_FILE_BYTES = 256 << 20
"""Of a LabelMe file, which may hold its image; other files of one image are far smaller."""

MAX_LIST_BYTES = 64 << 20
"""Of a list of stems, or of class names: a million lines."""

NUM_FILES = 8
"""Masks that are looked at, spread over all."""


def files_below(folder: Path, suffixes: Sequence[str], *, deep: bool = True) -> list[Path]:
    """The files of a folder with one of these endings, sorted; hidden files are passed over.

    Raises:
        DataError: No such folder, or no such file in it; it says what other pictures there are.
    """
    try:
        entries = entries_below(folder) if deep else sorted(folder.iterdir())
    except OSError as error:
        raise DataError(
            f"The folder {folder} cannot be read: {error.strerror}. "
            f"Put the {', '.join(suffixes)} files there."
        ) from None
    files = [e for e in entries if is_one_of(e, suffixes) and e.is_file()]
    if files:
        return files
    others = [e for e in entries if is_one_of(e, PICTURE_SUFFIXES) and e.is_file()]
    said = _of_other_formats(others, suffixes)
    raise DataError(f"The folder {folder} holds no {', '.join(suffixes)} files. {said}".rstrip())


def entries_below(folder: Path) -> list[Path]:
    """The files and folders in a folder and those below it, sorted; hidden ones are left out.

    Raises:
        OSError: It cannot be read.
    """
    found: list[Path] = []
    for entry in sorted(folder.iterdir()):
        if is_hidden(entry):
            continue
        found.append(entry)
        if entry.is_dir() and not entry.is_symlink():
            found += entries_below(entry)
    return found


def _of_other_formats(others: Sequence[Path], suffixes: Sequence[str]) -> str:
    """What pictures a folder holds instead, and why they are not read; a sentence or two each."""
    masks = set(suffixes) != set(IMAGE_SUFFIXES)
    by_format: dict[Format, list[Path]] = {}
    for path in others:
        if found := format_by_suffix(path):
            by_format.setdefault(found, []).append(path)
    return " ".join(
        f"It has {len(paths)} of {found.name}: {first_names(p.name for p in paths)}. "
        f"{found.no_labels if masks else found.no_image}".rstrip()
        for found, paths in by_format.items()
    )


def is_one_of(path: Path, suffixes: Sequence[str]) -> bool:
    """Whether a file has one of these endings and is not hidden."""
    return path.suffix.lower() in suffixes and not is_hidden(path)


def by_stem(
    paths: Sequence[Path], faults: list[Fault], stem: Callable[[Path], str] = lambda p: p.stem
) -> dict[str, Path]:
    """Files by their stems, see `composed`; two with the same one are a fault."""
    found: dict[str, Path] = {}
    for path in paths:
        name = composed(stem(path))
        if name in found:
            message = f"{found[name]} and {path} have the same stem"
            faults.append(Fault(kind="same_stem", path=path, message=message))
        found[name] = path
    return found


def composed(name: str) -> str:
    """A name in Unicode's composed form (NFC); macOS packs the same letters decomposed."""
    return unicodedata.normalize("NFC", name)


def some_of(files: Sequence[T]) -> list[T]:
    """Up to `NUM_FILES` of them, spread evenly."""
    num = min(NUM_FILES, len(files))
    return [files[i * len(files) // num] for i in range(num)]


def unpaired_image(image: Path, mask: Path | str) -> Fault:
    """The fault of an image without its mask."""
    return Fault(kind="unpaired", path=image, message=f"image {image} has no mask {mask}")


def unpaired_mask(mask: Path, image: Path | str) -> Fault:
    """The fault of a mask without its image."""
    return Fault(kind="unpaired", path=mask, message=f"mask {mask} has no image {image}")


def read_json(path: Path, max_bytes: int = MAX_FILE_BYTES) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        FaultError: It cannot be read, is too large, or is no object.
    """
    try:
        if path.stat().st_size > max_bytes:
            raise ValueError(f"it has more than {max_bytes >> 20} MiB")
        table = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        what = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise FaultError(
            "unreadable", path, f"{path} cannot be read as JSON: {what}. Replace or remove it."
        ) from None
    if not isinstance(table, dict):
        raise FaultError("unreadable", path, f"{path} holds no JSON object. Replace or remove it.")
    return cast("dict[str, Any]", table)


def read_lines(path: Path) -> list[str]:
    """The lines of a list, stripped and composed, without empty ones.

    Raises:
        DataError: It cannot be read, or is too large.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_LIST_BYTES + 1)
        if len(data) > MAX_LIST_BYTES:
            raise DataError(f"The list {path} has more than {MAX_LIST_BYTES >> 20} MiB.")
        # utf-8-sig passes over the mark that Windows editors put at the start.
        lines = data.decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"The list {path} cannot be read: {error}.") from None
    return [composed(line.strip()) for line in lines if line.strip()]


def whole_number(value: object, what: str) -> int | None:
    """A whole number as people write it: 96, 96.0 or "96"; None where there is none.

    Raises:
        ValueError: It is something else.
    """
    if value is None:
        return None
    if type(value) is int:
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and value.strip().isascii() and len(value) < 20:
        text = value.strip().removesuffix(".0")
        if text.removeprefix("-").isdigit():
            return int(text)
    raise ValueError(f"{what} is {str(value)[:80]!r}, which is not a whole number")


def yes_or_no(value: object, what: str) -> bool:
    """A truth as people write it: true, 1, 1.0, "1" or "true"; no where there is none.

    Raises:
        ValueError: It is something else.
    """
    text = str(value).strip().lower()
    if value is None or text in {"", "0", "0.0", "false"}:
        return False
    if text in {"1", "1.0", "true"}:
        return True
    raise ValueError(f"{what} is {text[:80]!r}, which is neither 0 nor 1")


def size_of(height: object, width: object) -> Size | None:
    """An image's size as a file of labels has it; None where it has none, or only half of it.

    Raises:
        ValueError: One of the two is not a whole number, or not positive.
    """
    rows, columns = whole_number(height, "the height"), whole_number(width, "the width")
    if rows is None or columns is None:
        return None
    if min(rows, columns) < 1:
        raise ValueError(f"the image's height is {height!r} and its width {width!r}")
    return Size(rows, columns)


def keys_of(path: Path) -> set[str]:
    """The keys of a JSON file; none where it is no JSON object."""
    try:
        return set(read_json(path))
    except FaultError:
        return set()
