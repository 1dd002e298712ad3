"""`anysize check`: reads a whole data folder once, and names every file with its fault.

`check_data` decodes each image and each mask once, in threads, and keeps a few numbers of each: a
checksum, pixel counts of the labels, and the faults. What only shows over the whole folder is
judged from these numbers afterwards. Only images whose checksums agree are decoded again, to be
sure before they are called duplicates.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from anysize.check.budget import no_labels, over_budget
from anysize.check.findings import FIXES, Finding, Report, Seen, class_pixels, of_fault
from anysize.check.joints import of_the_folder
from anysize.check.one_file import Look, suspicious
from anysize.check.turned import CLEAR, SUSPECTED, says
from anysize.config import DataConfig, LabelKind, RunConfig
from anysize.data.classes import read_classes
from anysize.data.files import is_one_of, read_lines
from anysize.data.formats.joints import JOINT_FILES
from anysize.data.formats.own import has_class_folders, has_stacks
from anysize.data.reading import Sample
from anysize.data.samples import Folder, scan_folder, split_samples
from anysize.errors import DataError
from anysize.faults import DoubtError
from anysize.geometry import Size
from anysize.images.decode import decode_image
from anysize.images.formats import LABEL_SUFFIXES
from anysize.wording import count_of

T = TypeVar("T")
R = TypeVar("R")

DARK, DIM = 0.02, 0.25
"""Share of `pixels.white` that the brightest pixel of all images of 16 bits must reach: below the
first the net sees black, below the second next to it."""

MIN_TOGETHER = 3
"""Masks that must seem turned before they bear each other out."""


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
    findings = [of_fault(fault) for fault in folder.faults]
    findings += of_the_folder(folder, config)
    look = Look(config, folder)
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
    binary = _binary_masks(looks, folder, told=config.data.masks != "auto")
    findings += [finding for _, finding in binary]
    doubtful = [f for seen in looks for f in suspicious(seen, folder.classes)]
    known = {f.path for f in findings if f.kind == "binary"}
    findings += [f for f in doubtful if f.path not in known]
    findings += _duplicates(looks, split, num_threads, config)
    findings += [*_dark(looks, folder, config), *_nothing_to_learn(looks, split, folder)]
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
    """What the labels of a bare folder of ours are meant for: joints, planes or ids."""
    if any((root / name).exists() for name in JOINT_FILES):
        return "joints"
    masks, toml = root / "masks", root / "classes.toml"
    classes = read_classes(toml) if toml.is_file() else None
    if classes is not None and len(classes.names) == 1:
        return "multilabel"
    in_planes = has_class_folders(root / "images", masks, classes) or has_stacks(masks)
    files = [e for e in masks.iterdir() if is_one_of(e, LABEL_SUFFIXES)] if masks.is_dir() else []
    return "multilabel" if in_planes and (has_stacks(masks) or not files) else "multiclass"


def _scan(root: Path, data: DataConfig, kind: LabelKind) -> Folder:
    try:
        return scan_folder(root, data, kind)
    except DoubtError as doubt:
        if "binary" not in doubt.kinds:
            raise
        # All masks hold 0 and 255: read as they are, so that each is named.
        (plain,) = set(doubt.kinds) - {"binary"}
        return scan_folder(root, replace(data, masks=plain), kind)


# The whole folder


def _turned(looks: Sequence[Seen], num_certain: int) -> list[Finding]:
    """Masks that lie turned by what edges say: of each, and of most of them together."""
    turns = [(seen.sample, seen.turn) for seen in looks if seen.turn is not None]
    num_suspected = sum(says(turn.agreement, SUSPECTED) for _, turn in turns)
    together = num_suspected + num_certain >= MIN_TOGETHER and 2 * num_suspected > len(turns)
    findings: list[Finding] = []
    for sample, turn in turns:
        agreement = turn.agreement
        suspected = says(agreement, SUSPECTED)
        if not suspected:
            continue
        sure = together or says(agreement, CLEAR)
        path = sample.masks[0] if sample.masks else sample.image
        planes = " with its other planes" if len(sample.masks) > 1 else ""
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
                f"image {sample.image}, which has the EXIF orientation {turn.orientation}, and "
                f"{edges}. {'Turn the mask.' if sure else 'Look at it.'}",
            )
        )
    return findings


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
    """What can be read of a list that is faulty."""
    try:
        return read_lines(folder.root / name) if name else []
    except DataError:
        return []


def _budget_findings(folder: Folder, split: dict[str, str], config: RunConfig) -> list[Finding]:
    samples = sorted([*folder.samples, *folder.refused], key=lambda s: s.stem)
    train = [s for s in samples if split.get(s.stem) in {"train", "all"}]
    val = [s for s in samples if split.get(s.stem) == "val"]
    return [
        *over_budget(train, config, training=True),
        *over_budget(val, config, training=False),
    ]


def _binary_masks(
    looks: Sequence[Seen], folder: Folder, *, told: bool
) -> list[tuple[int, Finding]]:
    """Masks of 0 and 255 where 255 is `ignore_index`, so that no single mask tells; by class.

    Where the settings say that they are ids (`told`), that is worth a look and no fault.
    """
    classes = folder.classes
    sigmoid = any(s.encoding.labels == "multilabel" for s in folder.samples)
    if classes.ignore_index != 255 or folder.masks not in {"index", "folders", "stack"}:
        return []
    if classes.ids or any(s.encoding.lookup for s in folder.samples[:1]):
        return []
    blank: dict[int, list[tuple[Path, int]]] = defaultdict(list)
    has_ones: set[int] = set()
    has_both: set[int] = set()
    for seen in looks:
        if seen.counts is None:
            continue
        planes = seen.counts.reshape(-1, 256)
        for i, (path, counts) in enumerate(zip(seen.mask_paths(len(planes)), planes, strict=True)):
            if counts[1:255].any():
                has_ones.add(i)
                has_both |= {i} if counts[255] else set()
            elif 0 < counts[255] < counts.sum():
                blank[i].append((path, int(counts[255])))
    return [
        (
            i if sigmoid else 1,
            _binary_finding(
                path,
                pixels,
                classes.names[i if sigmoid else 1],
                sure=i not in has_ones,
                masks=folder.masks,
                told=told,
            ),
        )
        for i, files in blank.items()
        # Masks that hold both use 255 for what it says. Where none of several classes occurs at
        # all, `anysize.data.detect` has said so already.
        if i not in has_both and (sigmoid or len(classes.names) == 2 or has_ones)
        for path, pixels in files
    ]


def _binary_finding(
    path: Path, pixels: int, name: str, *, sure: bool, masks: str, told: bool
) -> Finding:
    others = f"no mask of {name!r} holds a 1" if sure else "masks that hold other ids hold no 255"
    return Finding(
        kind="binary",
        severity="fault" if sure and not told else "warning",
        path=path,
        message=f"mask {path} holds 0 and 255, and {others}: as 255 is `ignore_index`, its "
        f"{count_of(pixels, 'pixel')} of 255 {'would' if sure else 'will'} be ignored. "
        + (
            f'Set data.masks to "binary" if 255 is the class, or to "{masks}" if it is ignored.'
            if sure
            else "Look at it; if 255 means the class, divide by 255."
        ),
        found=(("255", pixels),),
    )


def _dark(looks: Sequence[Seen], folder: Folder, config: RunConfig) -> list[Finding]:
    """Images of 16 bits that use almost none of their range."""
    values = [seen.brightest for seen in looks if seen.brightest is not None]
    if not values or max(values) >= DIM * config.pixels.white:
        return []
    brightest, white = max(values), config.pixels.white
    meant = next(2**bits - 1 for bits in range(8, 17) if brightest < 2**bits)
    return [
        Finding(
            kind="dark",
            severity="fault" if brightest < DARK * white else "warning",
            path=folder.root,
            message=f"In {count_of(len(values), '16-bit image')} of {folder.root} the brightest "
            f"pixel is {brightest}, {brightest / white:.1%} of pixels.white ({white}), so the net "
            "sees "
            f"them nearly black. Set pixels.white, to {meant} if the camera has "
            f"{meant.bit_length()} bits.",
        )
    ]


def _nothing_to_learn(
    looks: Sequence[Seen], split: dict[str, str], folder: Folder
) -> list[Finding]:
    """Splits of which every label is ignored."""
    num_images = Counter(split.values())
    words = {"train": "training", "val": "evaluation", "all": "training"}
    return [
        Finding(
            kind="all_ignored",
            severity="fault",
            path=folder.root,
            message=no_labels(words[where], num_images[where], folder.classes),
        )
        for where, counts in class_pixels(looks, split, folder.classes).items()
        if counts.all_ignored
    ]


def _duplicates(
    looks: Sequence[Seen], split: dict[str, str], num_threads: int, config: RunConfig
) -> list[Finding]:
    alike: dict[object, list[Seen]] = defaultdict(list)
    for seen in looks:
        if seen.checksum is not None and seen.sample.stem in split:
            alike[seen.checksum].append(seen)
    candidates = [seen for group in alike.values() if len(group) > 1 for seen in group]
    same: dict[bytes, list[Sample]] = defaultdict(list)

    def digest(seen: Seen) -> bytes:
        of_net = config.pixels
        pixels = decode_image(seen.sample.image, len(of_net.mean), of_net.float_range)
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
    what = "label" if folder.kind == "joints" else "mask"
    findings: list[tuple[int, Finding]] = []
    for i, name in enumerate(folder.classes.names):
        counts = {where: int(table.labels[i]) for where, table in pixels.items()}
        if not any(counts.values()):
            where = f"any {what}"
        elif counts.get("train") == 0:
            where = f"the {what}s for training"
        elif counts.get("val") == 0:
            where = f"the {what}s for evaluation"
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


def in_threads(work: Callable[[T], R], items: Sequence[T], num_threads: int) -> Iterator[R]:
    """Results in order. What has not begun is dropped where the caller is interrupted."""
    pool = ThreadPoolExecutor(num_threads)
    try:
        yield from pool.map(work, items)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
