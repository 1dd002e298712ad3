"""What a check finds, and what is kept of each sample and of the whole folder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from anysize.check.turned import Turn
from anysize.config import RunConfig
from anysize.data.classes import Classes
from anysize.data.reading import Sample
from anysize.data.samples import Folder
from anysize.data.shapes import Objects
from anysize.faults import Fault
from anysize.geometry import Size

Severity = Literal["fault", "warning"]

FIXES = {
    "unreadable": "put the file back from where it came, or remove it with its partner",
    "truncated": "copy the file again from where it came",
    "unpaired": "add the missing half, or remove the other",
    "same_stem": "rename one of the two",
    "stray": "rename the folder like a class, or remove it",
    "split": "correct the lists",
    "size": "make the mask again at the image's size",
    "rotated": "turn the mask like the image, or set the key that the message names",
    "encoding": "save the file as the message says, or set the key that it names",
    "shapes": "correct the annotation",
    "labels": "add the class or joint to classes.toml or joints.toml, or correct the name",
    "joints": "correct the line that the message names",
    "outside": "correct the joint, or put the image there that it was placed on",
    "pairs": "write joints.toml as the message says, or set augment.mirror to false",
    "binary": 'set data.masks to "binary" if 255 is the class in all masks, or divide by 255',
    "values": "correct the ids, add the classes, or set data.ids",
    "colours": "paint the colours of the classes, or add classes",
    "budget": "raise plan.max_pixels_per_step to what the message says if memory allows, rescale "
    "the images, or set augment.crop",
    "duplicate": "take the image out of one of the lists, or scores flatter the net",
    "never": "add images of the class, or take it out of the classes",
    "dark": "set pixels.white to what the brightest pixel can be, such as 4095 for 12 bits",
    "unlabelled": "label the image if it should train; else nothing",
    "left_out": "look at them; correct the annotation where the object matters",
    "all_ignored": "label the mask, or remove the pair: it teaches nothing",
    "one_class": "look at it: empty exports of labelling tools look so",
}
"""What to do about each kind of finding, most serious first."""


def of_fault(fault: Fault) -> Finding:
    """A fault of a file as a finding."""
    kind = fault.kind
    if kind == "unreadable" and "truncated" in fault.message.lower():
        kind = "truncated"
    return Finding(
        kind=kind, severity="fault", path=fault.path, message=fault.message, found=fault.found
    )


def class_pixels(
    looks: Iterable[Seen], split: dict[str, str], classes: Classes
) -> dict[str, ClassCounts]:
    """In how many pixels and images each class occurs, by split."""
    num = len(classes.names)
    totals = {name: ClassCounts.none(num) for name in sorted(set(split.values()))}
    for seen in looks:
        where = split.get(seen.sample.stem)
        if seen.counts is None or where is None:
            continue
        planes, total = seen.counts, totals[where]
        of_class = planes[:num] if planes.ndim == 1 else planes[:, 1]
        total.labels[:num] += of_class
        total.labels[num] += planes[..., classes.ignore_index].sum()
        total.images[:] += of_class > 0
        total.num_pixels += int(planes.reshape(-1, 256)[0].sum())
        total.num_labels += int(planes.sum())
    return totals


@dataclass(slots=True)
class ClassCounts:
    """In how many pixels and images of a split each class occurs.

    Attributes:
        labels: Pixels of each class and, last, labels that are ignored, `[k + 1]`.
        images: In which each class occurs, `[k]`.
        num_pixels: Of all images.
        num_labels: The same for one class per pixel, and `k` times that for any number of classes.
    """

    labels: NDArray[np.int64]
    images: NDArray[np.int64]
    num_pixels: int = 0
    num_labels: int = 0

    @classmethod
    def none(cls, num_classes: int) -> ClassCounts:
        """Counts of no image."""
        return cls(np.zeros(num_classes + 1, np.int64), np.zeros(num_classes, np.int64))

    @property
    def all_ignored(self) -> bool:
        """Whether there are labels, but none that trains or counts."""
        return 0 < self.num_labels == self.labels[-1]


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
        brightest: Value in an image of 16 bits; None for other images.
        turn: Whether the mask may lie turned.
        objects: How many were drawn, where labels are drawn from shapes.
        findings: What is wrong with its files.
    """

    sample: Sample
    checksum: tuple[tuple[int, ...], str, int] | None = None
    counts: NDArray[np.int64] | None = None
    brightest: int | None = None
    turn: Turn | None = None
    objects: Objects | None = None
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
        split: "train" or "val" by stem, or "all" where the lists are faulty; stems in no list are
            left out.
        seen: What was kept of each sample whose headers are right, by stem.
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
    def objects(self) -> Objects | None:
        """Those of all images; None where labels are masks."""
        found = [seen.objects for seen in self.seen.values() if seen.objects is not None]
        if not found:
            return None
        left_out = tuple(entry for objects in found for entry in objects.left_out)
        return Objects(sum(o.drawn for o in found), sum(o.cut for o in found), left_out)

    @cached_property
    def brightest(self) -> int | None:
        """Value in all images of 16 bits; None where there are none."""
        values = [seen.brightest for seen in self.seen.values() if seen.brightest is not None]
        return max(values, default=None)

    @cached_property
    def class_pixels(self) -> dict[str, ClassCounts]:
        """See the function."""
        return class_pixels(self.seen.values(), self.split, self.folder.classes)
