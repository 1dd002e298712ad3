"""Looks at one sample of a data folder: decodes it, and says what is wrong with its files."""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from anysize.check.findings import Finding, Seen, of_fault
from anysize.check.joints import joint_counts, outside
from anysize.check.turned import turn_of
from anysize.config import RunConfig
from anysize.data.classes import Classes
from anysize.data.mask_files import read_mask_header
from anysize.data.masks import decode_labels, decode_mask
from anysize.data.reading import Sample
from anysize.data.samples import Folder
from anysize.data.shapes import Objects, listed
from anysize.faults import Fault, FaultError
from anysize.geometry import Size
from anysize.images.decode import decode_image
from anysize.images.formats import format_by_suffix
from anysize.wording import count_of

LARGE_PIXELS = 16_000_000
"""Images above it are decoded one at a time, so that threads do not add up their memory."""


class Look:
    """Looks at one sample after another, from several threads."""

    def __init__(self, config: RunConfig, folder: Folder) -> None:
        self.pixels = config.pixels
        self.classes = folder.classes
        self._refused = {sample.stem for sample in folder.refused}
        self._large = threading.Lock()

    def __call__(self, sample: Sample) -> Seen:
        """What is kept of the sample."""
        large = sample.size.pixels > LARGE_PIXELS
        with self._large if large else contextlib.nullcontext():
            try:
                return self._seen(sample)
            except MemoryError:
                message = (
                    f"memory does not suffice to read {sample.image} ({sample.size}) and its "
                    "labels, so nothing of them was checked. Free memory, or use a smaller image."
                )
        fault = Fault(kind="unreadable", path=sample.image, message=message)
        return Seen(sample=sample, findings=(of_fault(fault),))

    def _seen(self, sample: Sample) -> Seen:
        findings: list[Finding] = []
        checksum, counts, brightest, turn = None, None, None, None
        image, labels, objects = None, None, None
        try:
            image = decode_image(sample.image, len(self.pixels.mean), self.pixels.float_range)
            brightest = int(image.max()) if image.dtype == np.uint16 else None
            checksum = (image.shape, image.dtype.str, zlib.crc32(image[::4].tobytes()))
        except FaultError as error:
            findings.append(of_fault(error.fault))
        if sample.encoding.kind == "joints":
            if sample.stem not in self._refused:
                counts = joint_counts(sample, self.classes)
                findings += outside(sample, self.classes)
        elif sample.stem in self._refused:
            findings += _mask_faults(sample, self.classes)
        else:
            try:
                labels, objects = decode_labels(sample, self.classes)
                counts = _count(labels)
                findings += _left_out(sample, objects)
            except FaultError as error:
                # The first of its files with a fault; the others are asked one by one.
                several = len(sample.masks) > 1
                faults = _mask_faults(sample, self.classes) if several else []
                findings += faults or [of_fault(error.fault)]
        if image is not None and labels is not None:
            turn = turn_of(sample, image, labels, self.classes)
        return Seen(
            sample=sample,
            checksum=checksum,
            counts=counts,
            brightest=brightest,
            turn=turn,
            objects=objects,
            findings=tuple(findings),
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
            known = replace(classes, names=("0", "1"), colours=classes.colours[:2], ids=())
        try:
            decode_mask(replace(alone, size=mask_size(alone)), known)
        except FaultError as error:
            faults.append(of_fault(error.fault))
    return faults


def _left_out(sample: Sample, objects: Objects | None) -> Iterator[Finding]:
    if objects is not None and objects.left_out:
        path = sample.masks[0] if sample.masks else sample.encoding.file or sample.image
        counts = Counter(entry.why for entry in objects.left_out)
        what = count_of(len(objects.left_out), "object or part", "objects or parts")
        yield Finding(
            kind="left_out",
            severity="warning",
            path=path,
            message=f"{path} is read for image {sample.image} without {what}: "
            f"{listed(objects.left_out)}.",
            found=tuple(counts.items()),
        )


def mask_size(sample: Sample) -> Size:
    """The size of a sample's mask by its own header, or the image's where it has none."""
    with contextlib.suppress(FaultError, IndexError):
        path = sample.masks[0]
        if format_by_suffix(path) is not None:
            frame = read_mask_header(path).frame
            return frame.stored if sample.encoding.orientation == "ignore" else frame.seen
    return sample.size


def _count(labels: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Pixels of each value, `[256]`, or `[k, 256]` for planes."""
    if labels.ndim == 3:
        return np.stack([_count(plane) for plane in labels])
    # Pillow's histogram takes half the time of numpy's bincount.
    return np.array(Image.fromarray(labels).histogram(), np.int64)


def suspicious(seen: Seen, classes: Classes) -> Iterator[Finding]:
    """Masks that are read without a fault, and that hardly anyone drew."""
    if seen.counts is None or seen.sample.encoding.kind == "joints":
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
