"""Where the logits of a net say that joints are, and how good that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anysize.config import PartMaps
from anysize.data.classes import Classes
from anysize.data.joints import LOCATION_STDEV, Joints
from anysize.wording import count_of

SURE = 0.2
"""Confidence that one of several people's joints needs. Source: pose-tensorflow."""

APART = 5
"""Cells; of two peaks of a part map that are nearer, the lower one is none. Source: the same."""

FRACTIONS = (0.05, 0.1, 0.2)
HEAD_FRACTION = 0.5

Found = NDArray[np.float64]
"""`[n, 3]` of x, y in pixels of the image, and confidence from 0 to 1."""


def best_joints(cells: NDArray[np.float32], stride: int, part_maps: PartMaps) -> Found:
    """One place for each joint, that of the highest score: `[joints, 3]`.

    Args:
        cells: `[3 * joints, h, w]`, see `anysize.data.joints`.
        stride: Pixels of a cell.
        part_maps: What the net was trained to give.
    """
    num_joints = len(cells) // 3
    width = cells.shape[2]
    best = [divmod(int(part.argmax()), width) for part in cells[:num_joints]]
    return np.array(
        [_place(cells, j, row, column, stride, part_maps) for j, (row, column) in enumerate(best)]
    )


def all_joints(cells: NDArray[np.float32], stride: int, part_maps: PartMaps) -> list[Found]:
    """For each joint the places of all peaks with a confidence of at least `SURE`, best first.

    Whose joints they are is not told. Arguments of `best_joints`.
    """
    found: list[Found] = []
    for j, part in enumerate(cells[: len(cells) // 3]):
        peaks = np.argwhere((part == _highest_near(part)) & (_confidence(part, part_maps) >= SURE))
        kept: list[NDArray[np.int64]] = []
        for peak in peaks:  # Of equal ones that are near, the first.
            if all(np.linalg.norm(peak - other) > APART for other in kept):
                kept.append(peak)
        places = [_place(cells, j, int(r), int(c), stride, part_maps) for r, c in kept]
        found.append(np.array(sorted(places, key=lambda p: -p[2])).reshape(-1, 3))
    return found


def _highest_near(part: NDArray[np.float32]) -> NDArray[np.float32]:
    padded = np.pad(part, APART, constant_values=-np.inf)
    height, width = part.shape
    reach = range(-APART, APART + 1)
    disc = [(dy, dx) for dy in reach for dx in reach if dy**2 + dx**2 <= APART**2]
    near = [
        padded[APART + dy : APART + dy + height, APART + dx : APART + dx + width] for dy, dx in disc
    ]
    return np.max(near, axis=0)


def _confidence(scores: NDArray[np.float32], part_maps: PartMaps) -> NDArray[np.float64]:
    values = scores.astype(np.float64)
    if part_maps == "gaussians":
        return values.clip(0, 1)
    return np.exp(-np.logaddexp(0, -values))


def _place(
    cells: NDArray[np.float32], j: int, row: int, column: int, stride: int, part_maps: PartMaps
) -> tuple[float, float, float]:
    first = len(cells) // 3 + 2 * j
    x, y = (LOCATION_STDEV * float(v) for v in cells[first : first + 2, row, column])
    confidence = float(_confidence(cells[j, row, column], part_maps))
    return (column + 0.5) * stride + x, (row + 0.5) * stride + y, confidence


# Metrics


@dataclass(slots=True)
class JointScores:
    """How far joints were off, over all images seen.

    Attributes:
        errors: Of each labelled joint: which one, pixels (infinite where nothing was found), the
            longer side of the box around the joints of its person, and the length of the head (NaN
            where it is not labelled).
        num_images: Images added.
    """

    errors: list[tuple[int, float, float, float]] = field(
        default_factory=list[tuple[int, float, float, float]]
    )
    num_images: int = 0


def add_joints(
    scores: JointScores,
    truth: Joints,
    cells: NDArray[np.float32],
    classes: Classes,
    stride: int,
    part_maps: PartMaps,
) -> None:
    """Adds one image.

    The joints of one person are held against `best_joints`. Of several people, each peak of a joint
    goes to one person, the nearest pairs first; who is left without one is missed.
    """
    scores.num_images += 1
    people = truth[np.isfinite(truth).any((1, 2))]
    num_joints = truth.shape[1]
    distances = np.full(people.shape[:2], np.inf)
    if len(people) == 1:
        best = best_joints(cells, stride, part_maps)
        distances[0] = np.hypot(*(best[:, :2] - people[0]).T)
    else:
        for j, peaks in enumerate(all_joints(cells, stride, part_maps)):
            away = np.linalg.norm(people[:, None, j] - peaks[None, :, :2], axis=-1)
            away[np.isnan(away)] = np.inf
            while away.size and np.isfinite(away.min()):
                person, peak = np.unravel_index(away.argmin(), away.shape)
                distances[person, j] = away[person, peak]
                away[person], away[:, peak] = np.inf, np.inf
    for person, off in zip(people, distances, strict=True):
        labelled = np.isfinite(person[:, 0])
        box = float((person[labelled].max(0) - person[labelled].min(0)).max())
        head = math.nan
        if classes.links.head:
            head = float(np.linalg.norm(np.subtract(*person[list(classes.links.head)])))
        scores.errors += [(j, float(off[j]), box, head) for j in range(num_joints) if labelled[j]]


def joint_metrics(scores: JointScores, names: Sequence[str]) -> dict[str, Any]:
    """The metrics of joints, as plain numbers; means are over the joints that are labelled at all.

    Returns:
        kind: "joints".
        pck: By joint, the share of its labels that are off by at most 0.1 of the longer side of the
            box around the labelled joints of their person.
        mean_pck: Its mean over joints.
        pck_at: By fraction of the box ("0.05", "0.1", "0.2"), the same: by joint, and "mean".
        pckh: By joint and "mean", the share that is off by at most 0.5 of the distance of the two
            joints that `head` of joints.toml names; None where no head is labelled.
        error_pixels: By joint and "mean", the mean distance where a joint was found.
        num_images, num_joints: Images, and their labelled joints.

    Source: pose-tensorflow `eval.py` for PCK.
    """
    table = np.array(scores.errors, np.float64).reshape(-1, 4)
    which, off, box, head = table.T

    def by_joint(values: NDArray[np.float64], counts: NDArray[np.bool_]) -> dict[str, Any]:
        means = [
            float(values[mine].mean()) if (mine := counts & (which == j)).any() else None
            for j in range(len(names))
        ]
        defined = [mean for mean in means if mean is not None]
        whole = sum(defined) / len(defined) if defined else None
        return {**dict(zip(names, means, strict=True)), "mean": whole}

    every = np.ones(len(table), np.bool_)
    at = {
        f"{fraction}": by_joint((off <= fraction * box).astype(np.float64), every)
        for fraction in FRACTIONS
    }
    has_head = np.isfinite(head)
    of_head = by_joint((off <= HEAD_FRACTION * head).astype(np.float64), has_head)
    main = dict(at["0.1"])
    return {
        "kind": "joints",
        "mean_pck": main.pop("mean"),
        "pck": main,
        "pck_at": at,
        "pckh": of_head if has_head.any() else None,
        "error_pixels": by_joint(off, np.isfinite(off)),
        "num_images": scores.num_images,
        "num_joints": len(table),
    }


def joints_table(result: dict[str, Any]) -> str:
    """The metrics as lines of text: a row a joint, and their means."""
    columns = {f"PCK@{f}": result["pck_at"][f] for f in result["pck_at"]}
    if result["pckh"]:
        columns[f"PCKh@{HEAD_FRACTION}"] = result["pckh"]
    names = [*result["pck"], "mean"]
    width = max(len(name) for name in ("joint", *names))
    lines = [f"{'joint':<{width}}" + "".join(f"{c:>10}" for c in (*columns, "error px"))]
    for name in names:
        shares = [column[name] for column in columns.values()]
        cells = ["-" if share is None else f"{100 * share:.1f}" for share in shares]
        error = result["error_pixels"][name]
        cells.append("-" if error is None else f"{error:.1f}")
        lines.append(f"{name:<{width}}" + "".join(f"{cell:>10}" for cell in cells))
    lines.append(
        f"{count_of(result['num_joints'], 'joint')} in {count_of(result['num_images'], 'image')}; "
        "PCK in % of joints "
        "that are off by at most this share of the longer side of the box around their person's "
        "labelled joints"
    )
    return "\n".join(lines)
