"""`anysize check`: reads a whole data folder once, and names every file with its fault.

`check_data` decodes each image and each mask once, in threads, and keeps a few numbers of each: a
checksum, pixel counts of the labels, and the faults. What only shows over the whole folder is
judged from these numbers afterwards. Only images whose checksums agree are decoded again, to be
sure before they are called duplicates.

`require_fit` is what of this training runs first beside `read_folder`; both use the same words.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from anysize.check.turned import CLEAR, SUSPECTED, Agreement, compare_edges, says, stand_upright
from anysize.config import DataConfig, LabelKind, RunConfig
from anysize.data.classes import Classes, read_classes
from anysize.data.masks import decode_mask, read_png_header
from anysize.data.reading import STACK_SUFFIXES, Sample
from anysize.data.samples import Folder, scan_folder, split_samples
from anysize.data.transforms import largest_size
from anysize.errors import DataError, ShapeError
from anysize.faults import DoubtError, Fault, FaultError, listing
from anysize.geometry import Size
from anysize.images.decode import Pixels, decode_image
from anysize.images.formats import format_by_suffix
from anysize.images.headers import read_frame
from anysize.planning.packing import check_fit
from anysize.planning.planfile import Plan, read_plan

T = TypeVar("T")
R = TypeVar("R")

Severity = Literal["fault", "warning"]

FIXES = {
    "unreadable": "put the file back from where it came, or remove it with its partner",
    "truncated": "copy the file again from where it came",
    "unpaired": "add the missing half, or remove the other",
    "same_stem": "rename one of the two",
    "stray": "rename the folder like a class, or remove it",
    "split": "correct the lists",
    "size": "make the mask again at the image's size",
    "rotated": "turn the mask like the image",
    "encoding": "save the file as the message says, or set data.masks",
    "shapes": "correct the annotation",
    "labels": "add the class to the classes, or correct the name",
    "binary": "divide the mask by 255",
    "values": "correct the ids, or add the classes",
    "colours": "paint the colours of the classes, or add classes",
    "budget": "raise plan.max_pixels_per_step to what the message says if memory allows, rescale "
    "the images, or set augment.crop",
    "duplicate": "take the image out of one of the lists, or scores flatter the net",
    "never": "add images of the class, or take it out of the classes",
    "all_ignored": "label the mask, or remove the pair: it teaches nothing",
    "one_class": "look at it: empty exports of labelling tools look so",
}
"""What to do about each kind of finding, most serious first."""

MOST_SHOWN = 10
"""Files of a kind that the console names; the JSON file names all."""

MIN_TOGETHER = 3
"""Masks that must seem turned before they bear each other out."""

LARGE_PIXELS = 16_000_000
"""Images above it are decoded one at a time, so that threads do not add up their memory."""


def check_data(
    config: RunConfig,
    root: Path,
    kind: LabelKind | None,
    *,
    num_threads: int,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Reads every image and mask of a data folder, and judges them.

    Args:
        config: Of the run; a `RunConfig` of defaults for a bare folder.
        root: The data folder.
        kind: How masks are meant; None goes by what lies there.
        num_threads: Threads that decode. The report does not depend on it.
        progress: Called after each image with the numbers of images done and of all.

    Raises:
        DataError: Nothing can be checked: no such folder, no classes, no images, or a layout that
            is in doubt.
    """
    kind = kind or guess_kind(root)
    folder = _scan(root, config.data, kind)
    findings = [_of_fault(fault) for fault in folder.faults]
    look = _Look(config, folder)
    samples = sorted([*folder.samples, *folder.refused], key=lambda s: s.stem)
    looks: list[Seen] = []
    for seen in in_threads(look, samples, num_threads):
        looks.append(seen)
        if progress is not None:
            progress(len(looks), len(samples))
    findings += [finding for seen in looks for finding in seen.findings]
    findings += _turned(looks, len({f.path for f in findings if f.kind == "rotated"}))

    split, split_findings = _split(folder, config)
    findings += split_findings
    findings += _budget_findings(folder, split, config)
    binary = _binary_masks(looks, folder)
    findings += [finding for _, finding in binary]
    suspicious = [f for seen in looks for f in _suspicious(seen, folder.classes)]
    known = {f.path for f in findings if f.kind == "binary"}
    findings += [f for f in suspicious if f.path not in known]
    findings += _duplicates(looks, split, num_threads, look.num_channels)
    unsure = {class_id for class_id, finding in binary if finding.severity == "fault"}
    findings += [f for i, f in _never(looks, split, folder) if i not in unsure]
    order = {name: i for i, name in enumerate(FIXES)}
    return Report(
        config=config,
        folder=folder,
        split=split,
        seen={seen.sample.stem: seen for seen in looks},
        findings=tuple(
            # A header's fault is met again when the file is decoded.
            sorted(
                dict.fromkeys(findings),
                key=lambda f: (f.severity, order[f.kind], str(f.path), f.message),
            )
        ),
    )


def folder_config(root: Path) -> RunConfig:
    """The settings that a bare folder is checked with: its own lists, and defaults."""
    if all((root / name).is_file() for name in ("train.txt", "val.txt")):
        return RunConfig(data=DataConfig(root=str(root), train="train.txt", val="val.txt"))
    return RunConfig(data=DataConfig(root=str(root)))


def guess_kind(root: Path) -> LabelKind:
    """What the masks of a bare folder of ours are meant for: planes or ids."""
    masks, toml = root / "masks", root / "classes.toml"
    if toml.is_file() and len(read_classes(toml).names) == 1:
        return "multilabel"
    entries = [e for e in masks.iterdir() if not e.name.startswith(".")] if masks.is_dir() else []
    in_planes = any(e.is_dir() or e.suffix.lower() in STACK_SUFFIXES for e in entries)
    only_planes = in_planes and not any(e.suffix.lower() == ".png" for e in entries)
    return "multilabel" if only_planes else "multiclass"


def _scan(root: Path, data: DataConfig, kind: LabelKind) -> Folder:
    try:
        return scan_folder(root, data, kind)
    except DoubtError as doubt:
        if "binary" not in doubt.kinds:
            raise
        # All masks hold 0 and 255: read as they are, so that each is named.
        (plain,) = set(doubt.kinds) - {"binary"}
        return scan_folder(root, replace(data, masks=plain), kind)


def require_fit(samples: Sequence[Sample], config: RunConfig, root: Path) -> None:
    """Refuses training images that are above the memory budget, by name.

    Args:
        samples: To train on.
        config: Of the run; paths in it are whole.
        root: Of the data, for the message.

    Raises:
        DataError: Some are.
    """
    faults = over_budget(samples, config, training=True)
    if faults:
        raise DataError(
            listing(f"Images in {root} do not fit", [fault.message for fault in faults])
        )


def over_budget(samples: Sequence[Sample], config: RunConfig, *, training: bool) -> list[Finding]:
    """The images that need a larger canvas than the settings allow, by name.

    Args:
        samples: Of a split.
        config: Of the run; paths in it are whole.
        training: Whether `[augment]` applies to them.
    """
    plan = read_plan(Path(config.plan.file)) if config.plan.file else None
    findings: list[Finding] = []
    for sample in samples:
        size = largest_size(config.augment, sample.size) if training else sample.size
        message = _does_not_fit(size, sample, config, plan)
        if message:
            findings.append(
                Finding(
                    kind="budget",
                    severity="fault" if training else "warning",
                    path=sample.image,
                    message=message,
                )
            )
    return findings


def _does_not_fit(size: Size, sample: Sample, config: RunConfig, plan: Plan | None) -> str:
    grown = "" if size == sample.size else f", and {size} after the largest augmentation"
    what = f"{sample.image} is {sample.size}{grown}"
    if plan is not None:
        try:
            check_fit([size], plan)
        except ShapeError:
            return (
                f"{what}, which fits on no canvas of {config.plan.file}. Make a plan of these "
                f"images with `anysize plan`, rescale the image, or set `augment.crop`."
            )
        return ""
    geometry, budget = config.model.geometry, config.plan.max_pixels_per_step
    need = geometry.canvas_extent(size.height) * geometry.canvas_extent(size.width)
    if need <= budget:
        return ""
    return (
        f"{what}, which needs a canvas of {need} pixels, above `plan.max_pixels_per_step` = "
        f"{budget}. Raise it to {need} if memory allows, rescale the image, or set "
        f"`augment.crop`."
    )


# One file


def _of_fault(fault: Fault) -> Finding:
    kind = fault.kind
    if kind == "unreadable" and "truncated" in fault.message.lower():
        kind = "truncated"
    return Finding(
        kind=kind, severity="fault", path=fault.path, message=fault.message, found=fault.found
    )


class _Look:
    """Looks at one sample after another, from several threads."""

    def __init__(self, config: RunConfig, folder: Folder) -> None:
        self.num_channels = config.model.num_channels
        self.classes = folder.classes
        self._refused = {sample.stem for sample in folder.refused}
        self._large = threading.Lock()

    def __call__(self, sample: Sample) -> Seen:
        large = sample.size.pixels > LARGE_PIXELS
        with self._large if large else contextlib.nullcontext():
            return self._seen(sample)

    def _seen(self, sample: Sample) -> Seen:
        findings: list[Finding] = []
        checksum, counts, turn = None, None, None
        image, labels = None, None
        try:
            image = decode_image(sample.image, self.num_channels)
            checksum = (image.shape, image.dtype.str, zlib.crc32(image[::4].tobytes()))
        except FaultError as error:
            findings.append(_of_fault(error.fault))
        if sample.stem in self._refused:
            findings += _mask_faults(sample, self.classes)
        else:
            try:
                labels = decode_mask(sample, self.classes)
                counts = _count(labels)
            except FaultError as error:
                # The first of its files with a fault; the others are asked one by one.
                several = len(sample.masks) > 1
                faults = _mask_faults(sample, self.classes) if several else []
                findings += faults or [_of_fault(error.fault)]
        if image is not None and labels is not None:
            turn = _turn(sample, image, labels, self.classes)
        return Seen(
            sample=sample, checksum=checksum, counts=counts, turn=turn, findings=tuple(findings)
        )


def _mask_faults(sample: Sample, classes: Classes) -> list[Finding]:
    """The faults of each mask of a sample alone, whatever its size."""
    faults: list[Finding] = []
    num = len(sample.masks)
    for path in sample.masks or (None,):
        alone = sample if path is None else replace(sample, masks=(path,))
        known = classes
        if num > 1:
            # A mask of a class holds 0 and 1, as one of two classes does.
            alone = replace(alone, encoding=replace(sample.encoding, labels="multiclass"))
            known = replace(classes, names=("0", "1"), colours=classes.colours[:2])
        try:
            decode_mask(replace(alone, size=mask_size(alone)), known)
        except FaultError as error:
            faults.append(_of_fault(error.fault))
    return faults


def mask_size(sample: Sample) -> Size:
    """The size of a sample's mask by its own header, or the image's where it has none."""
    with contextlib.suppress(FaultError, IndexError):
        if sample.masks[0].suffix.lower() == ".png":
            return read_png_header(sample.masks[0]).size
    return sample.size


def _count(labels: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Pixels of each value, `[256]`, or `[k, 256]` for planes."""
    if labels.ndim == 3:
        return np.stack([_count(plane) for plane in labels])
    # Pillow's histogram takes half the time of numpy's bincount.
    return np.array(Image.fromarray(labels).histogram(), np.int64)


def _turn(
    sample: Sample, image: Pixels, labels: NDArray[np.uint8], classes: Classes
) -> Turn | None:
    """What the image's edges say of the mask; None where there is nothing to be turned by."""
    orientation, of_mask = mask_turn(sample)
    if orientation == 1:
        return None
    turned = labels_turned(sample, labels, orientation, classes)
    agreement = None if turned is None else compare_edges(image, labels, turned)
    return None if agreement is None else Turn(orientation, of_mask, agreement)


def _turned(looks: Sequence[Seen], num_certain: int) -> list[Finding]:
    """Masks that lie turned by what edges say: of each, and of most of them together."""
    turns = [(seen.sample, seen.turn) for seen in looks if seen.turn is not None]
    num_suspected = sum(says(turn.agreement, SUSPECTED) for _, turn in turns)
    together = num_suspected + num_certain >= MIN_TOGETHER and 2 * num_suspected > len(turns)
    findings: list[Finding] = []
    for sample, turn in turns:
        agreement = turn.agreement
        suspected = says(agreement, SUSPECTED)
        silent = 1 - SUSPECTED < agreement.turned < SUSPECTED
        if not suspected and not (turn.of_mask and silent):
            continue
        sure = suspected and (together or turn.of_mask or says(agreement, CLEAR))
        path = sample.masks[0] if sample.masks else sample.image
        planes = " with its other planes" if len(sample.masks) > 1 else ""
        whose = f"mask {path}" if turn.of_mask else f"image {sample.image}"
        edges = "edges of the image tell nothing"
        if suspected:
            edges = (
                f"edges of the image fit the mask turned likewise better than as it is (agreement "
                f"{agreement.turned:.2f}; 0.5 says nothing, 1 all)"
            )
        if sure and together:
            edges += ", as in most of the images with an orientation"
        findings.append(
            Finding(
                kind="rotated",
                severity="fault" if sure else "warning",
                path=path,
                message=f"mask {path}{planes} {'is' if sure else 'may be'} turned against its "
                f"image {sample.image}: {whose} has the EXIF orientation {turn.orientation}, and "
                f"{edges}. {'Turn the mask.' if sure else 'Look at it.'}",
            )
        )
    return findings


def labels_turned(
    sample: Sample, labels: NDArray[np.uint8], orientation: int, classes: Classes
) -> NDArray[np.uint8] | None:
    """A sample's labels as if they had been made over the image as it is stored.

    Shapes have no size of their own, so they are drawn again at that of the stored image.
    """
    if orientation < 5 or sample.size.height == sample.size.width:
        return stand_upright(labels, orientation)
    if sample.encoding.kind not in {"labelme", "coco", "polygons"}:
        return None
    stored = Size(sample.size.width, sample.size.height)
    with contextlib.suppress(FaultError):
        return stand_upright(decode_mask(replace(sample, size=stored), classes), orientation)
    return None


def mask_turn(sample: Sample) -> tuple[int, bool]:
    """The EXIF orientation by which the mask may be turned, and whether the mask's file says so.

    A mask's own orientation is never applied. 1 where nothing is to be turned.
    """
    pictures = [m for m in sample.masks if format_by_suffix(m) is not None]
    of_mask = next((o for m in pictures if (o := read_frame(m).orientation) != 1), 1)
    return (of_mask, True) if of_mask != 1 else (read_frame(sample.image).orientation, False)


def _suspicious(seen: Seen, classes: Classes) -> Iterator[Finding]:
    """Masks that are read without a fault, and that hardly anyone drew."""
    if seen.counts is None:
        return
    planes = seen.counts.reshape(-1, 256)
    paths = seen.mask_paths(len(planes))
    for path, counts in zip(paths, planes, strict=True):
        if counts[classes.ignore_index] == counts.sum():
            yield Finding(
                kind="all_ignored",
                severity="warning",
                path=path,
                message=f"mask {path} holds nothing but pixels to ignore "
                f"({classes.ignore_index}). Label it, or remove the pair.",
            )
        elif len(planes) == 1 and seen.counts.ndim == 1:
            (only,) = found if len(found := np.flatnonzero(counts)) == 1 else (None,)
            if only is not None:
                yield _one_class(path, f"class {classes.names[only]!r}")
    if seen.counts.ndim == 2:
        everywhere = [i for i, c in enumerate(planes) if c[1] == c.sum()]
        for i in everywhere:
            yield _one_class(paths[i], f"class {classes.names[i]!r}")
        if all(c[0] == c.sum() for c in planes):
            yield _one_class(paths[0], "no class")


def _one_class(path: Path, what: str) -> Finding:
    return Finding(
        kind="one_class",
        severity="warning",
        path=path,
        message=f"mask {path} is {what} in every pixel. Look at it.",
    )


# The whole folder


def _split(folder: Folder, config: RunConfig) -> tuple[dict[str, str], list[Finding]]:
    """Which split each stem is in, as training would have it once the faults are put right."""
    samples = [*folder.samples, *folder.refused]
    stems = {sample.stem for sample in samples}
    try:
        train, val = split_samples(
            [*samples, *_named_already(folder, config, stems)],
            config.data,
            folder.root,
            seed=config.train.seed,
            listed=folder.listed,
        )
    except DataError as error:
        finding = Finding(kind="split", severity="fault", path=folder.root, message=str(error))
        named = folder.listed or (
            _named(folder, config.data.train),
            _named(folder, config.data.val),
        )
        split = {
            stem: where
            for where, listed in zip(("train", "val"), named, strict=True)
            for stem in listed
            if stem in stems
        }
        return split or dict.fromkeys(sorted(stems), "all"), [finding]
    split = {s.stem: "train" for s in train} | {s.stem: "val" for s in val}
    return {stem: where for stem, where in split.items() if stem in stems}, []


def _named_already(folder: Folder, config: RunConfig, stems: set[str]) -> list[Sample]:
    """Stands in for files with faults of their own, lest lists that name them be faulty as well."""
    if not config.data.train:
        return []
    faulty = {fault.path.stem: fault.path for fault in folder.faults}
    return [
        Sample(stem=stem, image=path, masks=(), size=Size(1, 1))
        for stem, path in faulty.items()
        if stem not in stems
    ]


def _named(folder: Folder, name: str) -> list[str]:
    """What can be read of a list that does not hold as a whole."""
    try:
        lines = (folder.root / name).read_text(encoding="utf-8-sig").splitlines() if name else []
    except (OSError, UnicodeDecodeError):
        return []
    return [line.strip() for line in lines]


def _budget_findings(folder: Folder, split: dict[str, str], config: RunConfig) -> list[Finding]:
    samples = sorted([*folder.samples, *folder.refused], key=lambda s: s.stem)
    train = [s for s in samples if split.get(s.stem) in {"train", "all"}]
    val = [s for s in samples if split.get(s.stem) == "val"]
    return [
        *over_budget(train, config, training=True),
        *over_budget(val, config, training=False),
    ]


def _binary_masks(looks: Sequence[Seen], folder: Folder) -> list[tuple[int, Finding]]:
    """Masks of 0 and 255 where 255 is `ignore_index`, so that no single mask tells; by class."""
    classes = folder.classes
    sigmoid = any(s.encoding.labels == "multilabel" for s in folder.samples)
    if classes.ignore_index != 255 or folder.masks not in {"index", "folders", "stack"}:
        return []
    blank: dict[int, list[tuple[Path, int]]] = defaultdict(list)
    has_ones: set[int] = set()
    has_both: set[int] = set()
    for seen in looks:
        if seen.counts is None or not (sigmoid or len(classes.names) == 2):
            continue
        planes = seen.counts.reshape(-1, 256)
        for i, (path, counts) in enumerate(zip(seen.mask_paths(len(planes)), planes, strict=True)):
            if counts[1]:
                has_ones.add(i)
                has_both |= {i} if counts[255] else set()
            elif 0 < counts[255] < counts.sum():
                blank[i].append((path, int(counts[255])))
    return [
        (
            i if sigmoid else 1,
            _binary_finding(
                path, pixels, classes.names[i if sigmoid else 1], sure=i not in has_ones
            ),
        )
        for i, files in blank.items()
        # A class whose masks hold both uses 255 for what it says.
        if i not in has_both
        for path, pixels in files
    ]


def _binary_finding(path: Path, pixels: int, name: str, *, sure: bool) -> Finding:
    others = f"no mask of {name!r} holds a 1" if sure else "masks that hold a 1 hold no 255"
    return Finding(
        kind="binary",
        severity="fault" if sure else "warning",
        path=path,
        message=f"mask {path} holds 0 and 255, and {others}: as 255 is `ignore_index`, its "
        f"{pixels} pixels of 255 {'would' if sure else 'will'} be ignored. "
        f"{'Divide it by 255.' if sure else 'Look at it; if 255 means the class, divide by 255.'}",
        found=(("255", pixels),),
    )


def _duplicates(
    looks: Sequence[Seen], split: dict[str, str], num_threads: int, num_channels: int
) -> list[Finding]:
    alike: dict[object, list[Seen]] = defaultdict(list)
    for seen in looks:
        if seen.checksum is not None and seen.sample.stem in split:
            alike[seen.checksum].append(seen)
    candidates = [seen for group in alike.values() if len(group) > 1 for seen in group]
    same: dict[bytes, list[Sample]] = defaultdict(list)

    def digest(seen: Seen) -> bytes:
        pixels = decode_image(seen.sample.image, num_channels)
        head = f"{pixels.shape} {pixels.dtype}".encode()
        return hashlib.sha256(head + pixels.tobytes()).digest()

    for seen, key in zip(candidates, in_threads(digest, candidates, num_threads), strict=True):
        same[key].append(seen.sample)
    return [f for group in same.values() if len(group) > 1 for f in _duplicate_of(group, split)]


def _duplicate_of(group: Sequence[Sample], split: dict[str, str]) -> Iterator[Finding]:
    first: dict[str, Sample] = {}
    for sample in group:
        first.setdefault(split[sample.stem], sample)
    for sample in group:
        own = split[sample.stem]
        if own == "train" and "val" in first:
            yield Finding(
                kind="duplicate",
                severity="fault",
                path=sample.image,
                message=f"image {sample.image} (training) has the same pixels as "
                f"{first['val'].image} (evaluation). Take it out of one of the lists.",
            )
        elif sample is not first[own]:
            yield Finding(
                kind="duplicate",
                severity="warning",
                path=sample.image,
                message=f"image {sample.image} has the same pixels as {first[own].image} in the "
                f"same split. It counts twice.",
            )


def _never(
    looks: Sequence[Seen], split: dict[str, str], folder: Folder
) -> list[tuple[int, Finding]]:
    """Classes without a pixel: anywhere, or in one of the splits; by class."""
    pixels = class_pixels(looks, split, folder.classes)
    unread = any(seen.counts is None for seen in looks)
    findings: list[tuple[int, Finding]] = []
    for i, name in enumerate(folder.classes.names):
        counts = {where: int(table[i]) for where, table in pixels.items()}
        if not any(counts.values()):
            where = "any mask"
        elif counts.get("train") == 0:
            where = "the masks for training"
        elif counts.get("val") == 0:
            where = "the masks for evaluation"
        else:
            continue
        finding = Finding(
            kind="never",
            severity="warning",
            path=folder.root,
            message=f"class {name!r} (id {i}) does not occur in {where}"
            f"{' that could be read' if unread else ''}.",
            found=tuple((f"{name} in {where}", n) for where, n in counts.items()),
        )
        findings.append((i, finding))
    return findings


def class_pixels(
    looks: Iterable[Seen], split: dict[str, str], classes: Classes
) -> dict[str, NDArray[np.int64]]:
    """Pixels of each class and, last, of those to ignore, `[k + 1]`, by split."""
    num = len(classes.names)
    totals = {name: np.zeros(num + 1, np.int64) for name in sorted(set(split.values()))}
    for seen in looks:
        where = split.get(seen.sample.stem)
        if seen.counts is None or where is None:
            continue
        planes = seen.counts
        of_class = planes[:num] if planes.ndim == 1 else planes[:, 1]
        totals[where][:num] += of_class
        totals[where][num] += planes[..., classes.ignore_index].sum()
    return totals


def in_threads(work: Callable[[T], R], items: Sequence[T], num_threads: int) -> Iterator[R]:
    """Results in order. What has not begun is dropped where the caller is interrupted."""
    pool = ThreadPoolExecutor(num_threads)
    try:
        yield from pool.map(work, items)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


# For people and for programs


def describe_report(report: Report) -> str:
    """What the console says, and which files it names: the first of each kind."""
    folder = report.folder
    sizes = report.sizes
    lines = [folder.description, *folder.notes]
    if sizes:
        lines.append(
            f"{len(sizes)} images from {sizes[0]} to {sizes[-1]} (height x width), "
            f"{len(set(sizes))} different sizes"
        )
    lines += _describe_splits(report)
    for severity in ("fault", "warning"):
        by_kind: dict[str, list[Finding]] = defaultdict(list)
        for finding in report.findings:
            if finding.severity == severity:
                by_kind[finding.kind].append(finding)
        for kind, findings in by_kind.items():
            lines += ["", f"{kind}: {_count_of(len(findings), severity)}"]
            lines += [f"  {' '.join(f.message.split())}" for f in findings[:MOST_SHOWN]]
            if len(findings) > MOST_SHOWN:
                lines.append(
                    f"  and {len(findings) - MOST_SHOWN} more; --json F writes all of them"
                )
            lines.append(f"  What to do: {FIXES[kind]}.")
    totals = Counter(f.severity for f in report.findings)
    files = len({f.path for f in report.findings if f.severity == "fault"})
    of_files = f" in {'1 file' if files == 1 else f'{files} files'}" if files else ""
    lines += [
        "",
        f"{_count_of(totals['fault'], 'fault')}{of_files}, "
        f"{_count_of(totals['warning'], 'warning')}.",
    ]
    # File names can hold anything, also what a terminal obeys.
    return "\n".join("".join(c if c.isprintable() else "\ufffd" for c in line) for line in lines)


def _count_of(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"


def _describe_splits(report: Report) -> Iterator[str]:
    names = report.folder.classes.names
    num_images = Counter(report.split.values())
    for where, pixels in report.class_pixels.items():
        total = max(int(pixels.sum()), 1)
        shares = ", ".join(
            f"{name} {n / total:.1%}"
            for name, n in zip((*names, "ignored"), pixels.tolist(), strict=True)
            if n
        )
        yield f"{where}: {num_images[where]} images; {shares or 'no labels read'}"


def report_json(report: Report) -> dict[str, Any]:
    """The whole report as plain values; docs/check.md describes the keys."""
    folder, sizes = report.folder, report.sizes
    by_severity = Counter(f.severity for f in report.findings)
    num_images = Counter(report.split.values())
    return {
        "format": "anysize check 1",
        "data": str(folder.root),
        "layout": folder.layout,
        "description": folder.description,
        "passed": report.passed,
        "num_images": len(sizes),
        "num_faults": by_severity["fault"],
        "num_warnings": by_severity["warning"],
        "counts": {
            severity: dict(Counter(f.kind for f in report.findings if f.severity == severity))
            for severity in ("fault", "warning")
        },
        "findings": [
            {
                "kind": f.kind,
                "severity": f.severity,
                "file": str(f.path),
                "message": f.message,
                "found": [list(entry) for entry in f.found],
            }
            for f in report.findings
        ],
        "fixes": {
            kind: text
            for kind, text in FIXES.items()
            if any(f.kind == kind for f in report.findings)
        },
        "classes": list(folder.classes.names),
        "splits": {
            where: {
                "num_images": num_images[where],
                "class_pixels": dict(zip(folder.classes.names, pixels.tolist()[:-1], strict=True)),
                "ignored_pixels": int(pixels[-1]),
            }
            for where, pixels in report.class_pixels.items()
        },
        "sizes": {
            "num_different": len(set(sizes)),
            "smallest": list(sizes[0]) if sizes else None,
            "median": list(sizes[len(sizes) // 2]) if sizes else None,
            "largest": list(sizes[-1]) if sizes else None,
            "megapixels": sum(s.pixels for s in sizes) / 1e6,
        },
    }


class Turn(NamedTuple):
    """How a mask would be turned, whose EXIF orientation says so, and what speaks for it."""

    orientation: int
    of_mask: bool
    agreement: Agreement


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong, or worth a look.

    Attributes:
        kind: A key of `FIXES`.
        severity: Training refuses a "fault", or would learn what is not meant; a "warning" may be
            as it should be.
        path: The file, or the folder where no single file is to blame.
        message: What is wrong, in which file, and what to do.
        found: What was found and in how many pixels.
    """

    kind: str
    severity: Severity
    path: Path
    message: str
    found: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What is kept of a sample once its pixels are let go.

    Attributes:
        sample: Where it is.
        checksum: Of every fourth row of the image; None where it cannot be read.
        counts: Pixels of each label value, `[256]` or `[k, 256]`; None where it cannot be read.
        turn: Whether the mask may lie turned.
        findings: What is wrong with its files.
    """

    sample: Sample
    checksum: tuple[tuple[int, ...], str, int] | None
    counts: NDArray[np.int64] | None
    turn: Turn | None
    findings: tuple[Finding, ...] = ()

    def mask_paths(self, num_planes: int) -> list[Path]:
        """The file of each plane of the labels; one file may hold them all."""
        masks = self.sample.masks or (self.sample.image,)
        return list(masks) if len(masks) == num_planes else [masks[0]] * num_planes


@dataclass(frozen=True, kw_only=True)
class Report:
    """A data folder, read and judged.

    Attributes:
        config: It was checked with.
        folder: What was found.
        split: "train" or "val" by stem, or "all" where the lists do not hold; stems in no list are
            left out.
        seen: What was kept of each sample whose headers hold, by stem.
        findings: Faults, then warnings, each by kind, most serious first, and by file.
    """

    config: RunConfig
    folder: Folder
    split: dict[str, str]
    seen: dict[str, Seen]
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """Whether there is no fault; warnings do not count."""
        return all(f.severity != "fault" for f in self.findings)

    @cached_property
    def sizes(self) -> list[Size]:
        """Of all images whose headers can be read, smallest first."""
        samples = [*self.folder.samples, *self.folder.refused]
        return sorted((s.size for s in samples), key=lambda size: (size.pixels, size))

    @cached_property
    def class_pixels(self) -> dict[str, NDArray[np.int64]]:
        """See the function."""
        return class_pixels(self.seen.values(), self.split, self.folder.classes)
