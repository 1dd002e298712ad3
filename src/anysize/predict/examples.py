"""Evaluation images of a run, beside their labels and what its net says."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from anysize.config import load_config
from anysize.data.classes import Classes
from anysize.data.formats.joints import joints_of
from anysize.data.masks import decode_mask
from anysize.data.reading import Sample
from anysize.errors import ConfigError
from anysize.images.decode import Pixels, decode_image, viewable
from anysize.models.weights_file import Weights
from anysize.predict.evaluate import held_out
from anysize.predict.files import NetLabeller, overlay
from anysize.predict.joint_files import draw_joints_on, find_joints
from anysize.predict.tiles import DEFAULT_MAX_PIXELS

LONGEST_SIDE = 420
"""Pixels of an image as it is shown."""

GAP = 6


def draw_examples(run: Path, weights: Weights, number: int) -> Iterator[tuple[str, bytes]]:
    """Draws the held-out images that the best net labels worst, and those that it labels best.

    Args:
        run: Folder of the run; its `metrics.json` has the score of each image. Without one, images
            are evenly spread.
        weights: Of the run.
        number: Of the worst, and of the best; fewer where there are fewer.

    Yields:
        What each is, and its PNG; see `draw`.

    Raises:
        AnysizeError: The folder is not a run's, or an image cannot be read.
    """
    if not (run / "run.toml").is_file():
        raise ConfigError(f"{run} is not the folder of a run: there is no run.toml in it.")
    config = load_config(run / "run.toml")
    folder, samples = held_out(run, config, Path(run / config.data.root), weights.kind)
    chosen = [(s, s.stem) for s in evenly_spread(samples, number)]
    scores = _scores_of_images(run)
    ranked = sorted((s for s in samples if s.stem in scores), key=lambda s: scores[s.stem])
    if ranked:
        num_worst = min(number, (len(ranked) + 1) // 2)
        best = ranked[num_worst:][-number:][::-1]
        chosen = [
            (s, f"{place} {i}: {s.stem}, IoU {scores[s.stem]:.1%}")
            for place, some in (("worst", ranked[:num_worst]), ("best", best))
            for i, s in enumerate(some, 1)
        ]
    pictures = draw([sample for sample, _ in chosen], weights, folder.classes)
    yield from zip((caption for _, caption in chosen), pictures, strict=True)


def _scores_of_images(run: Path) -> Mapping[str, float]:
    try:
        found = json.loads((run / "metrics.json").read_text(encoding="utf-8"))["images"]
        return {str(stem): float(score) for stem, score in found.items() if score is not None}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def evenly_spread(samples: Sequence[Sample], number: int) -> list[Sample]:
    """So many of the samples, or all of them where there are fewer."""
    number = min(number, len(samples))
    return [samples[i * len(samples) // number] for i in range(number)]


def draw(samples: Sequence[Sample], weights: Weights, classes: Classes) -> Iterator[bytes]:
    """Draws images alone, with their labels, and predicted.

    Args:
        samples: The images.
        weights: The net.
        classes: Of the samples.

    Yields:
        A PNG of the three side by side, scaled down where it is large.

    Raises:
        AnysizeError: An image cannot be read.
    """
    labeller = NetLabeller(weights=weights)
    for sample in samples:
        image = decode_image(sample.image, len(weights.pixels.mean), weights.pixels.float_range)
        if weights.kind == "joints":
            yield _side_by_side(_joint_panels(sample, image, labeller))
            continue
        predicted = labeller.predict(image, max_pixels=DEFAULT_MAX_PIXELS, keep_probabilities=False)
        truth = _one_plane(decode_mask(sample, classes), classes)
        seen = viewable(image, weights.pixels)
        colours = weights.classes.colours
        panels = [seen, overlay(seen, truth, colours), overlay(seen, predicted.labels, colours)]
        yield _side_by_side(panels)


def _joint_panels(sample: Sample, image: Pixels, labeller: NetLabeller) -> list[np.ndarray]:
    classes, seen = labeller.classes, viewable(image, labeller.pixels)
    joints = joints_of(sample, len(classes.names)).transpose(1, 0, 2)
    labelled = [of[np.isfinite(of[:, 0])] for of in joints]
    truth = [np.column_stack([of, np.ones(len(of))]) for of in labelled]
    found = find_joints(
        labeller, image, max_pixels=DEFAULT_MAX_PIXELS, several=len(sample.annotations) > 1
    )
    return [seen, draw_joints_on(seen, truth, classes), draw_joints_on(seen, found, classes)]


def _one_plane(labels: NDArray[np.uint8], classes: Classes) -> NDArray[np.uint8]:
    """Labels as one class per pixel to show; of several the last, `ignore_index` for none."""
    if labels.ndim == 2:
        return labels
    shown = np.full(labels.shape[1:], classes.ignore_index, np.uint8)
    for class_id, plane in enumerate(labels):
        shown[plane == 1] = class_id
    return shown


def _side_by_side(panels: list[NDArray[np.uint8]]) -> bytes:
    height, width = panels[0].shape[:2]
    scale = min(1.0, LONGEST_SIDE / max(height, width))
    size = (max(round(width * scale), 1), max(round(height * scale), 1))
    picture = Image.new("RGB", (len(panels) * (size[0] + GAP) - GAP, size[1]), "white")
    for i, panel in enumerate(panels):
        picture.paste(Image.fromarray(panel).resize(size), (i * (size[0] + GAP), 0))
    out = io.BytesIO()
    picture.save(out, "PNG")
    return out.getvalue()
