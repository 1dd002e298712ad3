"""Tells what the values of masks mean, where the settings do not: ids, colours, or 0 and 255.

The headers of all masks are compared: whatever is stored otherwise than most, such as a palette in
another order, is decoded and looked at, and so are a few of the others. Where files can be read in
two ways, the settings must say which; a file that is stored for another way than the rest is named.
What only pixels show is held against the answer as each mask is decoded (`anysize.data.masks`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from anysize.config import LabelKind, MaskKind
from anysize.data.classes import Classes
from anysize.data.files import some_of
from anysize.data.mask_files import MaskHeader, read_mask_pixels
from anysize.data.masks import labels_of_colours, not_ids, value_table
from anysize.data.reading import in_doubt
from anysize.errors import first_names
from anysize.faults import Fault, FaultError
from anysize.images.headers import NUM_THREADS
from anysize.wording import count_of

_NO_CODE = -1


class Detected(NamedTuple):
    """How labels are stored.

    Attributes:
        kind: See `DataConfig.masks`.
        because: A few words on what that was told by.
        faults: Files that are stored otherwise than the rest.
        notes: What a person should know of how files were read, a sentence each.
    """

    kind: MaskKind
    because: str
    faults: tuple[Fault, ...] = ()
    notes: tuple[str, ...] = ()


def detect_masks(
    root: Path,
    headers: Mapping[Path, MaskHeader | Fault],
    classes: Classes,
    kind: LabelKind,
    *,
    in_folders: bool,
) -> Detected:
    """Tells what the values of masks mean: ids, colours, or 0 and 255.

    Args:
        root: The data folder, for messages.
        headers: Of all masks.
        classes: Their ids and colours.
        kind: What labels are to become.
        in_folders: Whether the masks lie in one folder per class.

    Raises:
        DataError: They can be read in two ways.
    """
    usable = {path: h for path, h in headers.items() if isinstance(h, MaskHeader)}
    chosen = _worth_a_look(usable)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        seen = pool.map(lambda path: _look(path, usable[path], classes, kind), chosen)
        looks = [look for look in seen if look is not None]
    plain: MaskKind = "folders" if in_folders else "index"
    because = f"detected from the headers of {count_of(len(usable), 'file')}"
    if len(looks) < len(usable):
        because += f" and the pixels of {len(looks)}"
    if not looks:
        return Detected(plain, "no mask could be read")
    if kind == "multiclass" and any(look.as_ids is None for look in looks):
        return _with_colours(root, looks, usable, because)
    as_shades = kind == "multiclass" and _are_shades(looks)
    values = {value for look in looks for value in look.values}
    if values == {0, 255} and not as_shades and not classes.ids:
        if kind == "multilabel" or len(classes.names) == 2:
            if classes.ignore_index != 255:
                return Detected("binary", f"0 and 255, {because}")
            raise in_doubt(
                root,
                f"has masks of 0 and 255 ({because})",
                ("binary", plain),
                ("255 is the class", "255 is ignored"),
            )
        if classes.ignore_index == 255 and _nothing_else(usable, set(chosen), classes, kind):
            return Detected("index", because, faults=_blank(usable, classes))
    if kind == "multilabel":
        return Detected(plain, f"{_styles(looks)}, {because}")
    if _palettes_differ(looks):
        return _of_several_palettes(looks, because)
    return _of_one_kind(root, looks, because, as_shades=as_shades)


def _worth_a_look(headers: Mapping[Path, MaskHeader]) -> list[Path]:
    """A few of the masks that are stored like most, and all others."""
    groups: dict[object, list[Path]] = defaultdict(list)
    for path, header in headers.items():
        groups[header.style, header.palette].append(path)
    by_size = sorted(groups.values(), key=len)
    return [p for group in by_size[:-1] for p in group] + [
        p for group in by_size[-1:] for p in some_of(group)
    ]


def _look(path: Path, header: MaskHeader, classes: Classes, kind: LabelKind) -> _Look | None:
    try:
        pixels = read_mask_pixels(path, header, turned=False)
    except FaultError:
        return None
    if pixels.values is None:
        assert pixels.colours is not None
        codes = np.unique(pixels.colours).astype(np.int32)
        labels = labels_of_colours(codes, classes)
        return _Look(path, header, (), (), None, _whole(labels.tolist()))
    values = np.unique(pixels.values)
    codes = np.full(len(values), _NO_CODE, np.int32)
    inside = (values >= 0) & (values < 256)
    if header.style == "palette":
        palette = np.array(header.palette, np.int32)
        inside &= values < len(palette)
        codes[inside] = palette[values[inside]]
    else:
        codes[inside] = values[inside].astype(np.int32) * 0x010101
    table = value_table(classes, kind)
    known = (values >= 0) & (values < len(table))
    ids = np.where(known, table[np.where(known, values, 0)], -1)
    return _Look(
        path,
        header,
        tuple(values.tolist()),
        tuple(codes.tolist()),
        _whole(ids.tolist()),
        _whole(labels_of_colours(codes, classes).tolist()),
    )


def _whole(labels: list[int]) -> tuple[int, ...]:
    """Labels of all values of a file; () where one of them has none."""
    return () if -1 in labels else tuple(labels)


@dataclass(frozen=True, slots=True)
class _Look:
    """What one file holds.

    Attributes:
        path, header: The file.
        values: That occur; none in RGB files whose channels differ.
        codes: The colour of each value: the palette's, or a shade.
        as_ids: The label of each value, if values are ids; () where one is no id, None where they
            cannot be ids.
        as_colours: The label of each colour; () where one is no class's.
    """

    path: Path
    header: MaskHeader
    values: tuple[int, ...]
    codes: tuple[int, ...]
    as_ids: tuple[int, ...] | None
    as_colours: tuple[int, ...]

    @property
    def odd_among_colours(self) -> bool:
        """Whether it is grey, and its values are ids of other classes than its shades."""
        return not self.as_colours or (
            self.header.style == "grey" and bool(self.as_ids) and self.as_ids != self.as_colours
        )


def _styles(looks: Sequence[_Look]) -> str:
    (style, _), *_ = Counter(look.header.style for look in looks).most_common()
    return "RGB" if style == "colour" else style


def _with_colours(
    root: Path, looks: Sequence[_Look], headers: Mapping[Path, MaskHeader], because: str
) -> Detected:
    """Where some files can be nothing but colours: the rest are, or most decide which are named."""
    coloured = [look for look in looks if look.as_ids is None]
    odd = [look for look in looks if look.as_ids is not None and look.odd_among_colours]
    if not odd:
        return Detected("colours", f"{_styles(coloured)}, {because}")
    num_colour = sum(header.style == "colour" for header in headers.values())
    if 2 * num_colour == len(headers):
        raise in_doubt(
            root,
            f"has masks of both kinds, {num_colour} of {len(headers)} in RGB",
            ("index", "colours"),
            ("values are ids, and RGB is a mistake", "colours are classes"),
        )
    if 2 * num_colour < len(headers):
        return Detected("index", because, faults=tuple(not_ids(s.path).fault for s in coloured))
    return Detected(
        "colours",
        f"RGB, {because}",
        faults=tuple(
            Fault(
                kind="encoding",
                path=look.path,
                message=f"{look.path} holds ids ({look.header.style}) among masks of colours. Save "
                f"it in the colours of the classes, like the others.",
            )
            for look in odd
        ),
    )


def _are_shades(looks: Sequence[_Look]) -> bool:
    """Whether RGB files of grey shades are colours: ids would name no class but the first."""
    in_rgb = all(look.header.style == "colour" for look in looks)
    named = {label for look in looks for label in look.as_ids or ()}
    return (
        in_rgb
        and all(look.as_colours for look in looks)
        and (not all(look.as_ids for look in looks) or named <= {0, 255})
    )


def _nothing_else(
    headers: Mapping[Path, MaskHeader], seen: set[Path], classes: Classes, kind: LabelKind
) -> bool:
    """Whether the masks that were not looked at hold nothing but 0 and 255 either."""
    rest = (_look(p, h, classes, kind) for p, h in headers.items() if p not in seen)
    return all(look is None or set(look.values) <= {0, 255} for look in rest)


def _blank(headers: Mapping[Path, MaskHeader], classes: Classes) -> tuple[Fault, ...]:
    num = len(classes.names)
    return tuple(
        Fault(
            kind="binary",
            path=path,
            message=f"mask {path} holds nothing but 0 and 255, like all masks here, where "
            f"{num} classes are named and 255 is ignored: nothing but class {classes.names[0]!r} "
            f"would be learned. Export the ids of the classes; or name two classes and set "
            f'data.masks to "binary".',
        )
        for path in headers
    )


# Palettes


def _palettes_differ(looks: Sequence[_Look]) -> bool:
    """Whether an index stands for one colour here and for another there."""
    return len(_colours_of_indices(looks)[1]) > 0


def _colours_of_indices(looks: Sequence[_Look]) -> tuple[dict[int, int], set[Path]]:
    """The colour that each index has in most files, and the files where one has another."""
    votes: dict[int, Counter[int]] = defaultdict(Counter)
    palettes = [look for look in looks if look.header.style == "palette"]
    for look in palettes:
        for value, code in zip(look.values, look.codes, strict=True):
            votes[value][code] += 1
    most = {value: counts.most_common(1)[0][0] for value, counts in votes.items()}
    other = {
        look.path
        for look in palettes
        if any(most[v] != c for v, c in zip(look.values, look.codes, strict=True))
    }
    return most, other


def _of_several_palettes(looks: Sequence[_Look], because: str) -> Detected:
    _, other = _colours_of_indices(looks)
    named = first_names(sorted(str(path) for path in other))
    if not any(look.odd_among_colours for look in looks):
        note = (
            f"Palettes have the same colours in different orders; the colours decide, not the "
            f"indices. In another order than most: {named}."
        )
        return Detected("colours", f"colours of palettes, {because}", notes=(note,))
    return Detected(
        "index",
        f"palette, {because}",
        faults=tuple(
            Fault(
                kind="encoding",
                path=path,
                message=f"the palette of {path} gives indices other colours than those of most "
                f"masks, and the colours are not all those of classes.toml, so its indices may "
                f"mean other classes. Save it like the others; or give the classes the colours of "
                f'the palettes; or set data.masks to "index" if indices are ids in all files.',
            )
            for path in sorted(other)
        ),
    )


def _of_one_kind(root: Path, looks: Sequence[_Look], because: str, *, as_shades: bool) -> Detected:
    """Where all files could be ids: whether they are, or their colours are the classes.

    Files that neither reading fits, or only the one that most do not have, are named as they are
    decoded.
    """
    are_ids = all(look.as_ids for look in looks)
    are_colours = all(look.as_colours for look in looks)
    styles = _styles(looks)
    index = Detected("index", f"{'ids in RGB' if styles == 'RGB' else styles}, {because}")
    num_ids = sum(bool(look.as_ids) for look in looks)
    num_colours = sum(bool(look.as_colours) for look in looks)
    mostly_colours = not are_ids and num_colours > num_ids
    if as_shades or mostly_colours:
        what = {"palette": "colours of a palette", "grey": "shades of grey"}.get(styles, styles)
        return Detected("colours", f"{what}, {because}")
    if are_colours and any(look.as_ids != look.as_colours for look in looks):
        what = "indices" if styles == "palette" else "values"
        raise in_doubt(
            root,
            f"has {styles} masks whose {what} and colours name different classes ({because})",
            ("index", "colours"),
            (f"{what} are ids", "colours are classes"),
        )
    return index
