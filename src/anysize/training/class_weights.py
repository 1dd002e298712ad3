"""Class weights from how often classes occur in the training masks."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from numpy.typing import NDArray

from anysize.data.masks import decode_mask
from anysize.data.reading import Sample
from anysize.data.samples import Classes
from anysize.faults import FaultError


def median_frequency_weights(
    samples: Sequence[Sample], classes: Classes, num_threads: int
) -> tuple[float, ...]:
    """Weights that are larger for rarer classes: `median of all frequencies / frequency`.

    A class's frequency is its share of the labelled pixels of the images that have it. A class that
    occurs nowhere has weight 1. Rounded to four digits, so that a run's file is readable.

    Args:
        samples: To train on; masks that cannot be read are passed over, since training names them.
        classes: Of the samples.
        num_threads: Masks that are decoded at once.

    Source: Eigen and Fergus, "Predicting Depth, Surface Normals and Semantic Labels" (2015).
    """
    with ThreadPoolExecutor(num_threads) as pool:
        counts = [c for c in pool.map(partial(_count, classes=classes), samples) if c is not None]
    if not counts:
        return (1.0,) * len(classes.names)
    present, labelled = np.array(counts).transpose(1, 2, 0)
    of_images = np.where(present > 0, labelled, 0).sum(1)
    frequency = present.sum(1) / np.maximum(of_images, 1)
    median = np.median(frequency[frequency > 0]) if frequency.any() else 1.0
    weights = np.where(frequency > 0, median / np.maximum(frequency, 1e-12), 1.0)
    return tuple(float(f"{w:.4g}") for w in weights)


def _count(sample: Sample, classes: Classes) -> NDArray[np.int64] | None:
    """[2, classes]: entries of each class in a mask, and entries that could have it."""
    try:
        mask = decode_mask(sample, classes)
    except FaultError:
        return None
    num = len(classes.names)
    if mask.ndim == 2:
        present = np.bincount(mask.ravel(), minlength=256)[:num]
        return np.stack([present, np.full(num, np.sum(mask != classes.ignore_index))])
    return np.stack([(mask == 1).sum((1, 2)), (mask != classes.ignore_index).sum((1, 2))])
