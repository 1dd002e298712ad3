"""A few evaluation images of a run, beside their labels and what its net says."""

from __future__ import annotations

import io
from collections.abc import Iterator
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
    """Draws images that a run held out, evenly spread: alone, with their labels, and predicted.

    Args:
        run: Folder of the run.
        weights: Of the run.
        number: Of images; fewer where there are fewer.

    Yields:
        The stem of each, and a PNG of the three side by side, scaled down where it is large.

    Raises:
        AnysizeError: The folder is not a run's, or an image cannot be read.
    """
    if not (run / "run.toml").is_file():
        raise ConfigError(f"{run} is not the folder of a run: there is no run.toml in it.")
    config = load_config(run / "run.toml")
    folder, samples = held_out(run, config, Path(run / config.data.root), weights.kind)
    number = min(number, len(samples))
    labeller = NetLabeller(weights=weights)
    for sample in (samples[i * len(samples) // number] for i in range(number)):
        image = decode_image(sample.image, len(weights.pixels.mean), weights.pixels.float_range)
        if weights.kind == "joints":
            yield sample.stem, _side_by_side(_joint_panels(sample, image, labeller))
            continue
        predicted = labeller.predict(image, max_pixels=DEFAULT_MAX_PIXELS, keep_probabilities=False)
        truth = _one_plane(decode_mask(sample, folder.classes), folder.classes)
        seen = viewable(image, weights.pixels)
        colours = weights.classes.colours
        panels = [seen, overlay(seen, truth, colours), overlay(seen, predicted.labels, colours)]
        yield sample.stem, _side_by_side(panels)


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
