"""`anysize check --fix DIR`: a corrected copy of a data folder, in the layout of Anysize.

What can be put right without guessing is put right; a pair with any other fault is left out and
named in `left-out.txt`. The data themselves are never written to. The copy is made under another
name and renamed at the end, so it is whole or not there.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from anysize.check import Finding, Report, in_threads, mask_size, mask_turn
from anysize.check_turned import stand_upright
from anysize.data.classes import Classes
from anysize.data.faults import FaultError
from anysize.data.images import decode_image, opened
from anysize.data.masks import (
    Sample,
    colour_codes,
    colour_table,
    decode_mask,
    decode_mask_file,
    label_kind,
)
from anysize.data.samples import images_of
from anysize.errors import ConfigError, DataError
from anysize.files import sync_folder
from anysize.geometry import Size

MAX_SIZE_DIFFERENCE = 3
"""Rows and columns by which a mask may be cropped or padded."""

MAX_COLOUR_DIFFERENCE = 16
"""In each channel, of a colour that is taken for that of a class."""

IN_LABELS = {"size", "rotated", "binary", "values", "colours"}
"""Faults of a mask that are put right in its labels."""

NOT_OF_A_FILE = {"budget", "duplicate", "split", "never"}
"""Faults for which nothing is left out."""


def write_fixed(
    report: Report,
    out: Path,
    *,
    num_threads: int,
    progress: Callable[[int, int], None] | None = None,
) -> Fixed:
    """Writes a corrected copy.

    Args:
        report: Of the data.
        out: Folder to write, which must be empty or not be there.
        num_threads: Threads that decode and encode.
        progress: Called after each image with the numbers of images done and of all.

    Raises:
        ConfigError: `out` is not empty or lies in the data, or a class cannot name a folder.
        DataError: Without its duplicates, the training list would be empty.
        OSError: It cannot be written; nothing is left of it.
    """
    require_apart(out, report.folder.root)
    folder = report.folder
    samples = sorted([*folder.samples, *folder.refused], key=lambda s: s.stem)
    names = _file_names([s.stem for s in samples])
    out.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.", suffix=".part"))
    try:
        _make_folders(part, folder.classes, sigmoid=is_sigmoid(report))
        job = _Job(report, part, names)
        results: list[_Result] = []
        for result in in_threads(job, samples, num_threads):
            results.append(result)
            if progress is not None:
                progress(len(results), len(samples))
        fixed = _finish(part, report, samples, results, names)
        part.chmod(0o755)
        part.rename(out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    sync_folder(out.parent)
    return fixed


def require_apart(out: Path, root: Path) -> None:
    """Refuses to write a copy into the data, or over something else.

    Raises:
        ConfigError: `out` is the data folder, lies in it, is a file, or is not empty.
    """
    whole, data = out.resolve(), root.resolve()
    if whole == data or data in whole.parents:
        raise ConfigError(
            f"--fix {out} lies in the data folder {root}, which is never written to. Name another "
            f"folder."
        )
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise ConfigError(f"--fix {out} is not a folder. Name a new one.")
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"--fix {out} is not empty. Empty it, or name another folder.")


def describe_fixed(fixed: Fixed, out: Path) -> str:
    """What the console says of a copy."""
    lines = [f"Wrote {out}: {fixed.num_images} images with masks."]
    lines += [f"  {what}: {number}" for what, number in fixed.done.items()]
    if fixed.num_left_out:
        lines.append(f"  left out: {fixed.num_left_out} files, named in {out / 'left-out.txt'}")
    if fixed.has_lists:
        lines.append('  set data.train = "train.txt" and data.val = "val.txt" in run.toml')
    lines += [f"  not put right: {what} ({number})" for what, number in fixed.remaining.items()]
    return "\n".join(lines)


def _file_names(stems: Sequence[str]) -> dict[str, str]:
    """A name for each stem that cannot lead out of a folder; stems may hold slashes."""
    names: dict[str, str] = {}
    taken: set[str] = set()
    for stem in stems:
        name = stem.replace("/", "_").replace("\\", "_").lstrip(".") or "image"
        while name.lower() in taken:
            name += "_"
        taken.add(name.lower())
        names[stem] = name
    return names


def _make_folders(part: Path, classes: Classes, *, sigmoid: bool) -> None:
    (part / "images").mkdir()
    (part / "masks").mkdir()
    if sigmoid:
        for name in classes.names:
            if name in {".", ".."} or "/" in name or "\\" in name:
                raise ConfigError(
                    f"--fix writes a folder of masks for each class, and {name!r} cannot name one. "
                    f"Rename the class."
                )
            (part / "masks" / name).mkdir()
    (part / "classes.toml").write_text(_classes_toml(classes), encoding="utf-8")


def _classes_toml(classes: Classes) -> str:
    lines = [f"ignore_index = {classes.ignore_index}"]
    if classes.ignore_colours:
        lines.append(f"ignore_colours = {[list(c) for c in classes.ignore_colours]}")
    for name, colour in zip(classes.names, classes.colours, strict=True):
        escaped = "".join(
            f"\\u{ord(c):04x}" if c in '"\\' or ord(c) < 32 or ord(c) == 127 else c for c in name
        )
        lines += ["", "[[class]]", f'name = "{escaped}"', f"colour = {list(colour)}"]
    return "\n".join(lines) + "\n"


def _finish(
    part: Path,
    report: Report,
    samples: Sequence[Sample],
    results: Sequence[_Result],
    names: dict[str, str],
) -> Fixed:
    """Writes the lists, and what was left out of the copy."""
    kept = {s.stem for s, r in zip(samples, results, strict=True) if not r.left_out}
    done = Counter(what for r in results if not r.left_out for what in r.done)
    faults = [f for f in report.findings if f.severity == "fault"]
    twice = {f.path for f in faults if f.kind == "duplicate"}
    by_stem = {s.stem: s for s in samples}
    lists: dict[str, list[str]] = {"train": [], "val": []}
    for stem, where in report.split.items():
        if stem not in kept or where not in lists:
            continue
        if by_stem[stem].image in twice:
            done["duplicates across splits, taken out of the training list"] += 1
        else:
            lists[where].append(names[stem])
    if twice and not lists["train"]:
        raise DataError(
            f"Every image of the training list of {report.folder.root} is in evaluation as well, "
            "so no copy without duplicates can be trained on. Give other images or lists."
        )
    has_lists = all(lists.values())
    if has_lists:
        for where, stems in lists.items():
            text = "".join(f"{stem}\n" for stem in stems)
            (part / f"{where}.txt").write_text(text, encoding="utf-8")

    left_out = {
        path: reason
        for sample, result in zip(samples, results, strict=True)
        if result.left_out
        for path, reason in result.left_out.items()
    }
    of_samples = {path for s in samples for path in (s.image, *s.masks)}
    for fault in faults:
        if fault.kind not in NOT_OF_A_FILE and fault.path not in of_samples:
            left_out.setdefault(fault.path, fault.message)
    in_copy = {path for s in samples if s.stem in kept for path in (s.image, *s.masks)}
    gone = {path.stem for path in left_out}
    for path in _all_files(report):
        if path.stem in gone and path not in in_copy:
            left_out.setdefault(path, "its other half, or another file of this name, is left out")
    if left_out:
        text = "".join(f"{path}: {' '.join(why.split())}\n" for path, why in left_out.items())
        (part / "left-out.txt").write_text(text, encoding="utf-8")
    remaining = Counter(
        f.kind for f in faults if f.kind == "budget" and _stem_of(f.path, samples) in kept
    )
    return Fixed(
        num_images=len(kept),
        done=dict(done),
        num_left_out=len(left_out),
        has_lists=has_lists,
        remaining=dict(remaining),
    )


def _all_files(report: Report) -> list[Path]:
    folder = report.folder
    labels = folder.labels.rglob("*") if folder.labels.is_dir() else ()
    return [*images_of(folder.root, report.config.data), *sorted(p for p in labels if p.is_file())]


def _stem_of(image: Path, samples: Iterable[Sample]) -> str | None:
    return next((s.stem for s in samples if s.image == image), None)


class _Job:
    """Puts one sample after another right, from several threads."""

    def __init__(self, report: Report, part: Path, names: dict[str, str]) -> None:
        self.report = report
        self.part = part
        self.names = names
        self._sigmoid = is_sigmoid(report)
        self.by_path: dict[Path, list[Finding]] = defaultdict(list)
        for finding in report.findings:
            if finding.severity == "fault" and finding.kind not in NOT_OF_A_FILE:
                self.by_path[finding.path].append(finding)

    def __call__(self, sample: Sample) -> _Result:
        own = [f for path in (sample.image, *sample.masks) for f in self.by_path[path]]
        seen = self.report.seen.get(sample.stem)
        own += [f for f in (seen.findings if seen else ()) if f.severity == "fault"]
        beyond = [f for f in own if f.kind not in IN_LABELS]
        if beyond:
            return _Result.without(sample, beyond[0])
        try:
            labels, done = self._labels(sample, own)
        except _CannotFixError as error:
            return _Result.without(sample, own[0] if own else None, str(error))
        except FaultError as error:
            return _Result.without(sample, None, str(error))
        name = self.names[sample.stem]
        done += self._write_image(sample, name)
        self._write_masks(sample, name, labels)
        return _Result(done=tuple(dict.fromkeys(done)))

    # Labels

    def _labels(
        self, sample: Sample, findings: Sequence[Finding]
    ) -> tuple[NDArray[np.uint8] | None, list[str]]:
        """The corrected labels, or None where the masks' files hold as they are."""
        kinds = {f.kind for f in findings}
        if (
            not kinds
            and sample.encoding.kind in {"index", "folders"}
            and not sample.encoding.lookup
        ):
            return None, []
        classes = self.report.folder.classes
        by_mask = sample.encoding.kind in {"index", "folders", "binary", "colours"}
        if not by_mask or any(path.suffix.lower() != ".png" for path in sample.masks):
            if "size" in kinds:
                raise _CannotFixError(findings[0].message)
            size = mask_size(sample)
            if "rotated" in kinds and mask_turn(sample)[0] >= 5:
                size = Size(size.width, size.height)
            labels = decode_mask(replace(sample, size=size), classes)
            return self._placed(labels, sample, kinds)
        planes: list[NDArray[np.uint8]] = []
        done: list[str] = []
        for path in sample.masks:
            own = {f.kind for f in findings if f.path == path}
            # A turned image turns all of its planes; it is reported once.
            own |= kinds & {"rotated"}
            plane, said = _plane(path, sample, classes, own, sigmoid=self._sigmoid)
            done += said
            plane, said = self._placed(plane, sample, own)
            done += said
            planes.append(plane)
        return (np.stack(planes) if self._sigmoid else planes[0]), done

    def _placed(
        self, labels: NDArray[np.uint8], sample: Sample, kinds: set[str]
    ) -> tuple[NDArray[np.uint8], list[str]]:
        """Labels turned, cropped and padded to the image's size."""
        done: list[str] = []
        if "rotated" in kinds:
            labels = stand_upright(labels, mask_turn(sample)[0])
            done.append("masks turned like their images")
        size = Size(*labels.shape[-2:])
        if size != sample.size:
            labels = _fitted(labels, sample.size, self.report.folder.classes.ignore_index)
            done.append("masks cropped or padded to the size of their images")
        return labels, done

    # Files

    def _write_image(self, sample: Sample, name: str) -> list[str]:
        orientation = mask_turn(replace(sample, masks=()))[0]
        if orientation != 1:
            pixels = decode_image(sample.image, self.report.config.model.num_channels)
            # Pillow has no 16-bit colour to write; such files keep their orientation.
            if pixels.dtype == np.uint8 and pixels.shape[-1] in {1, 3}:
                upright = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
                upright.save(self.part / "images" / f"{name}.png", compress_level=3)
                return ["images stored upright, as PNG"]
        target = self.part / "images" / f"{name}{sample.image.suffix.lower()}"
        shutil.copyfile(sample.image, target)
        return []

    def _write_masks(self, sample: Sample, name: str, labels: NDArray[np.uint8] | None) -> None:
        classes, masks = self.report.folder.classes, self.part / "masks"
        targets = (
            [masks / c / f"{name}.png" for c in classes.names]
            if self._sigmoid
            else [masks / f"{name}.png"]
        )
        if labels is None:
            for source, target in zip(sample.masks, targets, strict=True):
                shutil.copyfile(source, target)
            return
        planes = labels if labels.ndim == 3 else labels[None]
        for plane, target in zip(planes, targets, strict=True):
            image = Image.fromarray(plane)
            if not self._sigmoid:
                image.putpalette(_palette(classes))
            image.save(target)


def is_sigmoid(report: Report) -> bool:
    """Whether labels are planes, one for each class."""
    samples = [*report.folder.samples, *report.folder.refused]
    return any(label_kind(s, report.folder.classes) == "sigmoid" for s in samples)


def _plane(
    path: Path, sample: Sample, classes: Classes, kinds: set[str], *, sigmoid: bool
) -> tuple[NDArray[np.uint8], list[str]]:
    """Labels of one mask file at its own size, with the faults of its values put right."""
    alone = replace(sample, masks=(path,))
    alone = replace(alone, size=mask_size(alone))
    if sample.encoding.kind == "colours":
        if "colours" not in kinds:
            return decode_mask(alone, classes), []
        return _nearest_colours(path, classes)
    plane = decode_mask_file(path, alone)
    done: list[str] = []
    if sample.encoding.lookup:
        plane = np.array(sample.encoding.lookup, np.uint8)[plane]
    if sample.encoding.kind == "binary" or "binary" in kinds:
        plane = np.where(plane == 255, 1, plane).astype(np.uint8)
        done += ["masks of 0 and 255 made 0 and 1"] if "binary" in kinds else []
    num_values = 2 if sigmoid else len(classes.names)
    wrong = (plane >= num_values) & (plane != classes.ignore_index)
    if wrong.any():
        plane = np.where(wrong, classes.ignore_index, plane).astype(np.uint8)
        done.append("masks whose ids of no class are now ignored")
    return plane, done


def _nearest_colours(path: Path, classes: Classes) -> tuple[NDArray[np.uint8], list[str]]:
    with opened(path, ("PNG",)) as image:
        colours = np.array((image.convert("RGBA") if image.mode == "P" else image).convert("RGB"))
    codes, inverse = np.unique(colour_codes(colours), return_inverse=True)
    table, labels = colour_table(classes)
    found, known = _channels(codes), _channels(table)
    difference = np.abs(found[:, None] - known[None])
    nearest = (difference**2).sum(axis=-1).argmin(axis=1)
    near = difference[np.arange(len(codes)), nearest].max(axis=-1) <= MAX_COLOUR_DIFFERENCE
    of_code = np.where(near, labels[nearest], classes.ignore_index).astype(np.uint8)
    done = ["masks whose colours are now those of the nearest class"]
    if not near.all():
        done.append("masks whose colours of no class are now ignored")
    return of_code[inverse].reshape(colours.shape[:2]), done


def _channels(codes: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.stack([codes >> 16, codes >> 8 & 255, codes & 255], axis=-1)


def _fitted(labels: NDArray[np.uint8], size: Size, ignore_index: int) -> NDArray[np.uint8]:
    """Cropped and padded at the bottom and the right.

    Raises:
        _CannotFixError: The difference is too large to be a rounding.
    """
    height, width = labels.shape[-2:]
    off = max(abs(height - size.height), abs(width - size.width))
    if off > MAX_SIZE_DIFFERENCE:
        raise _CannotFixError(
            f"its mask is {Size(height, width)} beside an image of {size}, which is more than "
            f"{MAX_SIZE_DIFFERENCE} pixels off"
        )
    fitted = np.full((*labels.shape[:-2], *size), ignore_index, np.uint8)
    rows, columns = min(height, size.height), min(width, size.width)
    fitted[..., :rows, :columns] = labels[..., :rows, :columns]
    return fitted


def _palette(classes: Classes) -> bytes:
    palette = bytearray(768)
    palette[: 3 * len(classes.names)] = bytes(c for colour in classes.colours for c in colour)
    palette[3 * classes.ignore_index : 3 * classes.ignore_index + 3] = b"\xff\xff\xff"
    return bytes(palette)


class _CannotFixError(Exception):
    """Only a person can put it right."""


@dataclass(frozen=True, slots=True)
class _Result:
    """What became of a sample: what was put right, or why its files were left out."""

    done: tuple[str, ...] = ()
    left_out: dict[Path, str] | None = None

    @classmethod
    def without(cls, sample: Sample, finding: Finding | None, reason: str = "") -> _Result:
        """A sample that is left out, for what was found or for a reason."""
        why = reason or (finding.message if finding else "")
        paths = (sample.image, *sample.masks)
        guilty = finding.path if finding and finding.path in paths else None
        return cls(
            left_out={
                path: why if guilty in {None, path} else f"goes with {guilty}" for path in paths
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """What a corrected copy holds.

    Attributes:
        num_images: In the copy.
        done: What was put right, and in how many images.
        num_left_out: Files of the data that are not in the copy.
        has_lists: Whether it has lists for training and evaluation.
        remaining: Kinds of fault that the copy still has.
    """

    num_images: int
    done: dict[str, int]
    num_left_out: int
    has_lists: bool
    remaining: dict[str, int]
