"""Pairs images with their masks by name: in nested folders, with an ending, in any spelling.

A name's key is its path below the folder without the suffix, in Unicode's composed form (NFC),
since macOS packs the same letters decomposed. What does not pair up is a fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from anysize.data.files import composed, entries_below, files_below, unpaired_image, unpaired_mask
from anysize.data.reading import Pair, Pairs
from anysize.errors import DataError, first_names
from anysize.faults import Fault
from anysize.images.formats import (
    FORMATS,
    IMAGE_SUFFIXES,
    format_by_suffix,
    is_hidden,
)
from anysize.wording import count_of

PLAIN = "{stem}"

_ENOUGH = 0.8
"""Share of the images that a pattern must pair before it is proposed."""

_MAX_PATTERNS = 50


def scan_flat(
    images: Path,
    mask_folders: Sequence[Path],
    suffixes: Sequence[str],
    *,
    pattern: str = PLAIN,
    deep: bool = True,
) -> Pairs:
    """Pairs the images of a folder with the masks of one folder, or of one for each class.

    Args:
        images: Folder of images.
        mask_folders: One, or one for each class.
        suffixes: Endings of masks.
        pattern: See `DataConfig.mask_pattern`.
        deep: Whether folders below are looked into.

    Raises:
        DataError: A folder holds none of its files; or no image has a mask, but would with another
            pattern, which the message names.
    """
    faults: list[Fault] = []
    notes: list[str] = []
    found = _by_key(files_below(images, IMAGE_SUFFIXES, deep=deep), images, faults)
    masks: list[dict[str, Path]] = []
    for folder in mask_folders:
        of_folder = _by_key(files_below(folder, suffixes, deep=deep), folder, faults)
        paired = _unpatterned(of_folder, pattern)
        if len(paired) < len(of_folder):
            num = len(of_folder) - len(paired)
            notes.append(f"{count_of(num, 'file')} in {folder} passed over: not named {pattern}.")
        masks.append(paired)
        if not set(paired) & set(found):
            _propose(found, of_folder, images, folder, pattern)
    notes += passed_over(images, IMAGE_SUFFIXES, deep=deep)
    for folder, of_folder in zip(mask_folders, masks, strict=True):
        faults += _unpaired(found, of_folder, images, folder, suffixes, pattern)
    whole = [key for key in sorted(found) if all(key in m for m in masks)]
    return Pairs(
        pairs=[Pair(key, found[key], tuple(m[key] for m in masks)) for key in whole],
        faults=faults,
        listed=_split_by_folder(whole),
        notes=notes,
    )


def key_of(path: Path, folder: Path) -> str:
    """A file's name for pairing; see the module."""
    return composed(path.relative_to(folder).with_suffix("").as_posix())


def _by_key(paths: Sequence[Path], folder: Path, faults: list[Fault]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in paths:
        key = key_of(path, folder)
        if key in found:
            message = f"{found[key]} and {path} have the same stem"
            faults.append(Fault(kind="same_stem", path=path, message=message))
        found[key] = path
    return found


def _unpatterned(masks: dict[str, Path], pattern: str) -> dict[str, Path]:
    """Masks by the keys of their images."""
    if pattern == PLAIN:
        return masks
    before, after = composed(pattern).split(PLAIN)
    found: dict[str, Path] = {}
    for key, path in masks.items():
        whole = PurePosixPath(key)
        name = whole.name
        if len(name) > len(before + after) and name.startswith(before) and name.endswith(after):
            stem = name[len(before) : len(name) - len(after)]
            found[whole.with_name(stem).as_posix()] = path
    return found


def _unpaired(
    images: dict[str, Path],
    masks: dict[str, Path],
    images_folder: Path,
    folder: Path,
    suffixes: Sequence[str],
    pattern: str,
) -> list[Fault]:
    ending = suffixes[0] if len(suffixes) == 1 else ".*"
    faults: list[Fault] = []
    for key, image in images.items():
        if key in masks:
            continue
        whole = PurePosixPath(key)
        name = folder / whole.with_name(pattern.replace(PLAIN, whole.name)).as_posix()
        others = [
            path
            for form in FORMATS
            for suffix in form.suffixes
            if form.no_labels and (path := name.with_name(name.name + suffix)).is_file()
        ]
        if others:
            message = f"image {image} has a mask that is not read: {_no_labels(others[0])}"
            faults.append(Fault(kind="unpaired", path=image, message=message))
        else:
            faults.append(unpaired_image(image, f"{name}{ending}"))
    faults += [
        unpaired_mask(mask, f"{images_folder / key}.*")
        for key, mask in masks.items()
        if key not in images
    ]
    return faults


def _no_labels(path: Path) -> str:
    found = format_by_suffix(path)
    assert found is not None
    return f"{path} is {found.name}. {found.no_labels}"


def passed_over(folder: Path, suffixes: Sequence[str], *, deep: bool) -> list[str]:
    """Pictures of formats that are not read, in words."""
    entries = entries_below(folder) if deep else sorted(folder.iterdir())
    by_format: dict[str, list[Path]] = {}
    for path in entries:
        found = format_by_suffix(path)
        if found is not None and found.suffixes[0] not in suffixes and not is_hidden(path):
            by_format.setdefault(found.no_image, []).append(path)
    return [
        f"{count_of(len(paths), 'file')} in {folder} passed over: "
        f"{first_names(p.name for p in paths)}. {why}"
        for why, paths in by_format.items()
    ]


def _split_by_folder(keys: Sequence[str]) -> tuple[list[str], list[str]] | None:
    """Images in `train/` and `val/` are split so; what is in further folders is in neither."""
    parts = {key.partition("/")[0] for key in keys if "/" in key}
    if not {"train", "val"} <= parts or any("/" not in key for key in keys):
        return None
    train, val = ([k for k in keys if k.startswith(f"{part}/")] for part in ("train", "val"))
    return train, val


# Patterns


def _propose(
    images: dict[str, Path], masks: dict[str, Path], folder: Path, labels: Path, pattern: str
) -> None:
    """Where no image has a mask: raises with the pattern that would pair them, if there is one."""
    patterns = [p for p in find_patterns(list(images), list(masks)) if p != pattern]
    if not patterns:
        return
    first = patterns[0]
    before, after = first.split(PLAIN)
    affixes = " and ".join(f'"{affix}"' for affix in (before, after) if affix)
    where = "before" if not after else "after" if not before else "around"
    others = ", or ".join(f'"{p}"' for p in patterns[1:4])
    raise DataError(
        f"No image of {folder} has a mask of its own name in {labels}, but masks are named like "
        f"images with {affixes} {where} the name. Set data.mask_pattern = "
        f'"{first}"{f" (or {others})" if others else ""} in run.toml; `anysize init` writes one.'
    )


def find_patterns(images: Sequence[str], masks: Sequence[str]) -> list[str]:
    """Patterns by which nearly all images have a mask, those that pair most first."""
    if not images:
        return []
    have = set(masks)
    # The longest name is least often a part of another.
    example = PurePosixPath(max(images, key=len))
    candidates: dict[str, None] = {}
    for mask in masks:
        name = PurePosixPath(mask)
        at = name.name.find(example.name)
        if name.parent == example.parent and at >= 0:
            after = name.name[at + len(example.name) :]
            candidates[name.name[:at] + PLAIN + after] = None
    paired: dict[str, int] = {}
    for pattern in list(candidates)[:_MAX_PATTERNS]:
        keys = [PurePosixPath(key) for key in images]
        names = [key.with_name(pattern.replace(PLAIN, key.name)).as_posix() for key in keys]
        paired[pattern] = sum(name in have for name in names)
    good = [p for p, num in paired.items() if num >= _ENOUGH * len(images)]
    return sorted(good, key=lambda p: -paired[p])
