"""Metrics of pixel labelling, streamed over images with bounded memory; the formulas in full.

One label a pixel (softmax): everything follows from the confusion matrix `n`, where `n[i, j]`
counts pixels of true class `i` that were labelled `j`, over all images together, ignored pixels
left out. Any number of labels a pixel (sigmoid): everything follows from two histograms of scores a
class, one of its positives and one of its negatives.

A class that a metric is not defined for, because it never occurs, is None and left out of the mean;
it is never counted as 0 or as 1.

Source: Long et al., "Fully Convolutional Networks for Semantic Segmentation" (2015), section 5, for
pixel accuracy, class accuracy and IoU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anysize.config import LabelKind

SCORES: Mapping[LabelKind, tuple[str, str]] = {
    "multiclass": ("iou", "miou"),
    "multilabel": ("average_precision", "map"),
    "joints": ("pck", "mean_pck"),
}
"""The score of each class, and their mean, by which weights are compared; keys of a result."""

BINS_PER_LOGIT, LINEAR_TO, LARGEST = 250, 16.0, 2.0**20
NUM_BINS = 2 * math.ceil(BINS_PER_LOGIT * LINEAR_TO * (1 + math.log(LARGEST / LINEAR_TO)))
"""Bins of a score histogram: equal in the logit up to 16, 0.004 wide, and in its logarithm beyond,
0.025% wide, up to a million; what lies beyond that is in the outermost.

Equal in the logit, not in the probability: of a well trained net most probabilities lie above 0.999
or below 0.001, which a histogram of probabilities would not tell apart.
"""


@dataclass(slots=True)
class Confusion:
    """Counts of (true class, predicted class) over all images seen.

    Attributes:
        matrix: int64 `[k, k]`; rows are true classes.
        num_images: Images added.
    """

    matrix: np.ndarray
    num_images: int = 0

    def add(self, other: Confusion) -> None:
        """Adds the counts of other images."""
        self.matrix += other.matrix
        self.num_images += other.num_images


@dataclass(slots=True)
class ScoreHistograms:
    """Histograms of each class's logits, over all images seen.

    Attributes:
        positives: int64 `[k, NUM_BINS]`, entries whose target is 1, by rising logit.
        negatives: The same for entries whose target is 0.
        num_images: Images added.
        num_pixels: Pixels with at least one class that is not ignored.
    """

    positives: np.ndarray
    negatives: np.ndarray
    num_images: int = 0
    num_pixels: int = 0


def empty_confusion(num_classes: int) -> Confusion:
    """A confusion matrix before the first image."""
    return Confusion(np.zeros((num_classes, num_classes), np.int64))


def add_labels(
    confusion: Confusion, target: np.ndarray, predicted: np.ndarray, *, ignore_index: int
) -> None:
    """Adds one image to a confusion matrix.

    Args:
        confusion: Changed in place.
        target: Integers `[h, w]`, true classes or `ignore_index`.
        predicted: Integers `[h, w]`, predicted classes.
        ignore_index: Pixels with this target count nowhere.
    """
    num_classes = len(confusion.matrix)
    valid = target != ignore_index
    pairs = target[valid].astype(np.int64) * num_classes + predicted[valid]
    counts = np.bincount(pairs, minlength=num_classes * num_classes)
    confusion.matrix += counts.reshape(num_classes, num_classes)
    confusion.num_images += 1


def multiclass_metrics(confusion: Confusion, names: Sequence[str]) -> dict[str, Any]:
    """The metrics of one label per pixel, as plain numbers.

    Args:
        confusion: Of all images.
        names: Of the classes, in their order.

    Returns:
        kind: "multiclass".
        miou: Mean of `iou` over the classes that occur in the truth or in the prediction.
        iou: By class, `iou`.
        pixel_accuracy: `pixel_accuracy`.
        class_accuracy: `class_accuracy`.
        f1: By class, `f1`.
        mean_f1: Mean of `f1` over the classes that occur in the truth or in the prediction.
        confusion: `[k][k]`, pixels by true (row) and predicted class.
        num_images, num_pixels: Images added, and their pixels that are not ignored.
    """
    matrix = confusion.matrix
    return {
        "kind": "multiclass",
        "miou": mean_iou(matrix),
        "iou": dict(zip(names, iou(matrix), strict=True)),
        "pixel_accuracy": pixel_accuracy(matrix),
        "class_accuracy": class_accuracy(matrix),
        "f1": dict(zip(names, f1(matrix), strict=True)),
        "mean_f1": _mean(f1(matrix)),
        "confusion": matrix.tolist(),
        "num_images": confusion.num_images,
        "num_pixels": int(matrix.sum()),
    }


def iou(matrix: np.ndarray) -> list[float | None]:
    """Intersection over union of each class: `n[c, c] / (row sum c + column sum c - n[c, c])`.

    None for a class that occurs neither in the truth nor in the prediction.
    """
    hits, truth, predicted = _counts(matrix)
    return [_ratio(h, t + p - h) for h, t, p in zip(hits, truth, predicted, strict=True)]


def f1(matrix: np.ndarray) -> list[float | None]:
    """F1 (Dice) of each class: `2 n[c, c] / (row sum c + column sum c)`.

    It is the harmonic mean of precision `n[c, c] / column sum` and recall `n[c, c] / row sum`. None
    for a class that occurs neither in the truth nor in the prediction.
    """
    hits, truth, predicted = _counts(matrix)
    return [_ratio(2 * h, t + p) for h, t, p in zip(hits, truth, predicted, strict=True)]


def pixel_accuracy(matrix: np.ndarray) -> float | None:
    """Share of pixels with the right label: `sum of n[c, c] / sum of n`; None without a pixel."""
    return _ratio(int(np.trace(matrix)), int(matrix.sum()))


def class_accuracy(matrix: np.ndarray) -> float | None:
    """Mean recall: the mean of `n[c, c] / row sum c` over the classes that occur in the truth."""
    hits, truth, _ = _counts(matrix)
    return _mean([_ratio(h, t) for h, t in zip(hits, truth, strict=True)])


def mean_iou(matrix: np.ndarray) -> float | None:
    """Mean of `iou` over the classes that occur in the truth or in the prediction."""
    return _mean(iou(matrix))


def iou_at_half(target: np.ndarray, logits: np.ndarray, *, ignore_index: int) -> float | None:
    """The mean IoU of one image over the classes that occur in its truth or prediction.

    Args:
        target: Integers `[k, h, w]`: 0, 1 or `ignore_index`.
        logits: Floats `[k, h, w]`; from 0 on, a class is called present.
        ignore_index: Entries with this target count nowhere.
    """
    true, called = target == 1, (logits >= 0) & (target != ignore_index)
    hits, either = (true & called).sum((1, 2)), (true | called).sum((1, 2))
    return _mean([_ratio(int(h), int(e)) for h, e in zip(hits, either, strict=True)])


def empty_histograms(num_classes: int) -> ScoreHistograms:
    """Score histograms before the first image."""
    return ScoreHistograms(
        np.zeros((num_classes, NUM_BINS), np.int64), np.zeros((num_classes, NUM_BINS), np.int64)
    )


def add_scores(
    histograms: ScoreHistograms, target: np.ndarray, logits: np.ndarray, *, ignore_index: int
) -> None:
    """Adds one image to score histograms.

    Args:
        histograms: Changed in place.
        target: Integers `[k, h, w]`: 0, 1 or `ignore_index`, for each class on its own.
        logits: Floats `[k, h, w]`, finite; a probability of one half is a logit of 0.
        ignore_index: Entries with this target count nowhere.
    """
    valid = target != ignore_index
    # The bin edge at 0 is met exactly, since nothing is added before rounding down.
    bins = np.floor(_stretched(logits)) + NUM_BINS // 2
    bins = np.clip(bins, 0, NUM_BINS - 1).astype(np.int64)
    for c in range(len(target)):
        for value, counts in ((1, histograms.positives), (0, histograms.negatives)):
            counts[c] += np.bincount(bins[c][valid[c] & (target[c] == value)], minlength=NUM_BINS)
    histograms.num_images += 1
    histograms.num_pixels += int(valid.any(axis=0).sum())


def _stretched(logits: np.ndarray) -> np.ndarray:
    """Logits in bins from 0: linear up to `LINEAR_TO`, logarithmic beyond, with the same slope."""
    linear = logits * BINS_PER_LOGIT
    large = np.abs(logits) > LINEAR_TO
    if large.any():
        tail = 1 + np.log(np.abs(logits[large]) / LINEAR_TO)
        linear[large] = np.copysign(BINS_PER_LOGIT * LINEAR_TO * tail, logits[large])
    return linear


def multilabel_metrics(histograms: ScoreHistograms, names: Sequence[str]) -> dict[str, Any]:
    """The metrics of any number of labels a pixel, as plain numbers.

    Args:
        histograms: Of all images.
        names: Of the classes, in their order.

    Returns:
        kind: "multilabel".
        map: Mean of `average_precision` over the classes that occur in the truth.
        average_precision: By class, `average_precision`.
        average_precision_error: By class, `average_precision_error`: how far it may be off.
        f1: By class, `f1_at_half`.
        mean_f1: Mean of `f1_at_half` over the classes that occur in the truth or the prediction.
        at_half: By class, true positives, false positives and false negatives of calling
            probabilities of at least one half positive.
        num_images, num_pixels: Images added, and their pixels with a class that is not ignored.
    """
    both = list(zip(histograms.positives, histograms.negatives, strict=True))
    precisions = [average_precision(p, n) for p, n in both]
    errors = [average_precision_error(p, n) for p, n in both]
    scores = [f1_at_half(p, n) for p, n in both]
    return {
        "kind": "multilabel",
        "map": _mean(precisions),
        "average_precision": dict(zip(names, precisions, strict=True)),
        "average_precision_error": dict(zip(names, errors, strict=True)),
        "f1": dict(zip(names, scores, strict=True)),
        "mean_f1": _mean(scores),
        "at_half": {name: list(_at_half(*b)) for name, b in zip(names, both, strict=True)},
        "num_images": histograms.num_images,
        "num_pixels": histograms.num_pixels,
    }


def average_precision(positives: np.ndarray, negatives: np.ndarray) -> float | None:
    """Area under the precision-recall curve: the sum of `(R[t] - R[t-1]) P[t]`.

    `t` runs over the bins from the highest logit down; `P[t]` and `R[t]` are precision and recall
    when all entries of bin `t` and above are called positive. Nothing is interpolated. With a bin a
    distinct score it would be exact; entries of one bin count as tied, and
    `average_precision_error` bounds what that changes. None for a class without a positive.

    Args:
        positives: `[NUM_BINS]`, counts of positives by rising logit.
        negatives: The same of negatives.
    """
    if positives.sum() == 0:
        return None
    hits = positives[::-1].cumsum()
    called = hits + negatives[::-1].cumsum()
    return float(np.sum(positives[::-1] * hits / np.maximum(called, 1)) / hits[-1])


def average_precision_error(positives: np.ndarray, negatives: np.ndarray) -> float | None:
    """The most by which binning can have changed `average_precision`, in either direction.

    For a bin with `p` positives and `n` negatives, and `a` entries in it and above, precision
    at any threshold inside the bin differs from `P[t]` by at most `max(p - 1, n) / a`; the
    bound is the mean of that over all positives. (Above the bin let `T` be the positives among `A`
    entries. No threshold inside has more than `(T + p) / (A + p)`, nor less than
    `(T + 1) / (A + n + 1)`; `P[t]` is `(T + p) / (A + p + n)`.) None for a class without a
    positive.
    """
    if positives.sum() == 0:
        return None
    called = (positives + negatives)[::-1].cumsum()
    off = np.maximum(positives - 1, negatives)[::-1] / np.maximum(called, 1)
    return float(np.sum(positives[::-1] * off) / positives.sum())


def f1_at_half(positives: np.ndarray, negatives: np.ndarray) -> float | None:
    """F1 of calling probabilities of at least one half positive: `2 TP / (2 TP + FP + FN)`.

    A bin edge lies at one half, so binning changes nothing. None for a class that occurs neither in
    the truth nor in the prediction.
    """
    hits, false_alarms, missed = _at_half(positives, negatives)
    return _ratio(2 * hits, 2 * hits + false_alarms + missed)


def _at_half(positives: np.ndarray, negatives: np.ndarray) -> tuple[int, int, int]:
    hits = int(positives[NUM_BINS // 2 :].sum())
    return hits, int(negatives[NUM_BINS // 2 :].sum()), int(positives.sum()) - hits


def _counts(matrix: np.ndarray) -> tuple[list[int], list[int], list[int]]:
    return np.diag(matrix).tolist(), matrix.sum(1).tolist(), matrix.sum(0).tolist()


def _ratio(numerator: int, denominator: int) -> float | None:
    return numerator / denominator if denominator else None


def _mean(values: list[float | None]) -> float | None:
    defined = [v for v in values if v is not None]
    return sum(defined) / len(defined) if defined else None
