"""Draws shapes as labels: outlines by Pillow, bitmaps as they are, one over the other.

Counts, sizes and coordinates are held against the image before anything is made for them, since a
few bytes of text can ask for any amount of memory or time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from anysize.config import LabelKind
from anysize.data.classes import BACKGROUND_NAMES, Classes, background_id
from anysize.data.files import composed
from anysize.errors import first_names
from anysize.faults import FaultError
from anysize.geometry import Size
from anysize.images.headers import DECODER_ERRORS, Frame
from anysize.wording import count_of

MAX_SHAPES = 100_000
"""Shapes of one image; COCO's fullest image has 93, an aerial photograph some thousands."""

TOLERANCE = 1.0
"""Pixels by which corners may lie outside their image, as tools round them, without a word."""

MAX_EDGE_ROWS = 200_000_000
"""Edges of a polygon times the rows that it covers: what Pillow looks at to fill it."""


def paint(
    shapes: Sequence[Outline | Bitmap], size: Size, classes: Classes, kind: LabelKind
) -> NDArray[np.uint8]:
    """Draws shapes in their order, so that of two that overlap the later one is seen.

    Pixels in no shape are of the class called background; where no class is, they are ignored.

    Returns:
        softmax: `[h, w]` of class ids and `ignore_index`. sigmoid: `[k, h, w]` of 0, 1 and
        `ignore_index`; ignored where a shape says so and no shape of the class is.
    """
    if kind == "multiclass":
        outside = background_id(classes)
        plane = _plane(size, classes.ignore_index if outside is None else outside)
        for shape in shapes:
            value = classes.ignore_index if shape.ignored else shape.class_id
            assert value is not None
            _draw(plane, shape, value)
        return np.array(plane)
    drawn = np.zeros((len(classes.names), *size), np.uint8)
    for class_id in range(len(classes.names)):
        plane = _plane(size, 0)
        # What is ignored first, so that a shape of the class is seen over it.
        for shape in sorted(shapes, key=lambda s: not s.ignored):
            if shape.class_id in (class_id, None):
                _draw(plane, shape, classes.ignore_index if shape.ignored else 1)
        drawn[class_id] = np.array(plane)
    return drawn


def _plane(size: Size, value: int) -> Image.Image:
    return Image.new("L", (size.width, size.height), value)


def _draw(plane: Image.Image, shape: Outline | Bitmap, value: int) -> None:
    if isinstance(shape, Bitmap):
        stencil = Image.fromarray(shape.inside.astype(np.uint8) * 255)
        plane.paste(value, (shape.left, shape.top), stencil)
        return
    draw = ImageDraw.Draw(plane)
    xy = [(float(x), float(y)) for x, y in shape.points]
    match shape.form:
        case "polygon":
            draw.polygon(xy, fill=value, outline=value)
        case "rectangle":
            (x0, y0), (x1, y1) = xy
            corners = (min(x0, x1), min(y0, y1)), (max(x0, x1), max(y0, y1))
            draw.rectangle(corners, fill=value, outline=value)
        case "circle":
            (x, y), on_edge = xy
            r = math.dist((x, y), on_edge)
            draw.ellipse(((x - r, y - r), (x + r, y + r)), fill=value, outline=value)


def as_points(value: object) -> NDArray[np.float64]:
    """Points `[n, 2]` of x and y, from pairs of numbers or from one list of both by turns.

    Raises:
        ValueError: They are something else, or one is not finite.
    """
    try:
        points = np.array(value, np.float64) if isinstance(value, list) else np.empty(0)
    except (ValueError, TypeError, OverflowError):
        raise ValueError("has points that are no pairs of numbers") from None
    if not points.size:
        raise ValueError("has no points")
    if points.size % 2 or points.ndim > 2 or (points.ndim == 2 and points.shape[-1] != 2):
        raise ValueError("has points that are no pairs of numbers")
    points = points.reshape(-1, 2)
    if not np.isfinite(points).all():
        raise ValueError("has a point that is not finite")
    return points


def is_cut(outline: Outline, size: Size) -> bool:
    """Holds an outline against the image that it is drawn in; whether it reaches out of it.

    Raises:
        ValueError: It lies outside the image, reaches further out than the image is large, covers
            nothing, or has more points than could be drawn in a second.
    """
    points, extent = outline.points, np.array([size.width, size.height])
    low, high = points.min(0), points.max(0)
    if outline.form == "circle":
        radius = float(np.linalg.norm(points[1] - points[0]))
        low, high = points[0] - radius, points[0] + radius
    if (high < 0).any() or (low > extent).any():
        raise ValueError(f"lies outside the image of {size}")
    if (low < -extent).any() or (high > 2 * extent).any():
        raise ValueError(f"reaches far outside the image of {size}")
    check_effort(points, size)
    if not (area(points) if outline.form == "polygon" else np.ptp(points, axis=0).any()):
        raise ValueError("covers nothing")
    return bool((low < -TOLERANCE).any() or (high > extent + TOLERANCE).any())


def check_effort(points: NDArray[np.float64], size: Size) -> None:
    """Holds the work of drawing a polygon against the image.

    Raises:
        ValueError: It has more points than could be drawn in a second.
    """
    rows = np.ptp(points[:, 1]) + 1
    steps = np.abs(np.diff(points, axis=0, append=points[:1])).max(1, initial=0).sum()
    if len(points) * rows > MAX_EDGE_ROWS or steps > 16 * size.pixels + 1_000_000:
        raise ValueError(f"has {len(points)} points, too many for an image of {size}")


def check_total(num_pixels: int, size: Size) -> None:
    """Holds the pixels of all bitmaps of an image against the image.

    Raises:
        ValueError: They would cover it many times.
    """
    if num_pixels > 256 * size.pixels + 1_000_000:
        raise ValueError(f"its shapes have {num_pixels} pixels, too many for an image of {size}")


def area(points: NDArray[np.float64]) -> float:
    """Of the polygon with these corners `[n, 2]`: Gauss's shoelace."""
    x, y = points[:, 0], points[:, 1]
    return abs(float((x * np.roll(y, 1) - y * np.roll(x, 1)).sum())) / 2


def class_of(label: str, classes: Classes) -> int | None:
    """The class that a label names; any name of the background stands for the class of it."""
    for name in (label, composed(label)):
        if name in classes.names:
            return classes.names.index(name)
    return background_id(classes) if label.lower() in BACKGROUND_NAMES else None


def unknown_labels(path: Path, unknown: Mapping[str, int], classes: Classes) -> FaultError:
    """The fault of a file that names what is no class; `unknown` are these names, counted."""
    listed = ", ".join(
        f"{name!r} ({count_of(count, 'shape')})" for name, count in list(unknown.items())[:10]
    )
    return FaultError(
        "labels",
        path,
        f"{path} names what is no class: {listed}. Classes are {', '.join(classes.names)}. Correct "
        f"the labels, or add them to the classes.",
        tuple(unknown.items()),
    )


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """What reading shapes raises inside the block becomes a FaultError that names the file."""
    try:
        yield
    except (*DECODER_ERRORS, OverflowError, RecursionError) as error:
        raise FaultError(
            "shapes", path, f"{path} is invalid: {error}. Correct it, or remove it."
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A shape by its corners.

    Attributes:
        class_id: None for a shape of all classes, which is then ignored.
        ignored: Whether its pixels neither train nor count.
        form: "polygon", "rectangle" by two opposite corners, or "circle" by its centre and a point
            on it.
        points: `[n, 2]` of x and y.
    """

    class_id: int | None
    ignored: bool
    form: Literal["polygon", "rectangle", "circle"]
    points: NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bitmap:
    """A shape by its pixels.

    Attributes:
        class_id, ignored: See `Outline`.
        top, left: Of `inside` in the image.
        inside: bool `[h, w]`.
    """

    class_id: int | None
    ignored: bool
    top: int
    left: int
    inside: NDArray[np.bool_]


class LeftOut(NamedTuple):
    """An object, or a ring of one, that is not drawn.

    Attributes:
        which: In words, such as "annotation 7".
        why: Goes on from `which`: "lies outside the image".
        harmless: Whether it has no area by its kind, as a line has none, so that nothing is lost.
    """

    which: str
    why: str
    harmless: bool = False


class Objects(NamedTuple):
    """How the objects of an image were taken.

    Attributes:
        drawn: How many are drawn, cut or not.
        cut: How many of them reach out of the image.
        left_out: What is not drawn.
    """

    drawn: int
    cut: int
    left_out: tuple[LeftOut, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """The objects of an image, as the reader of a format finds them.

    Attributes:
        drawn: In the order in which they are painted.
        frame: Size and orientation of the image that they are painted over.
        objects: How many these are, and what is left out.
    """

    drawn: tuple[Outline | Bitmap, ...]
    frame: Frame
    objects: Objects


def shapes_of(
    drawn: Sequence[Outline | Bitmap], num_cut: int, left_out: Sequence[LeftOut], frame: Frame
) -> Shapes:
    """Puts an image's objects together.

    Raises:
        ValueError: None of them can be drawn, so that the image would count as empty.
    """
    faulty = [entry for entry in left_out if not entry.harmless]
    if faulty and not drawn:
        raise ValueError(f"none of its objects can be drawn: {listed(faulty)}")
    objects = Objects(len(drawn), num_cut, tuple(left_out))
    return Shapes(drawn=tuple(drawn), frame=frame, objects=objects)


def listed(left_out: Sequence[LeftOut]) -> str:
    """What is left out, and why, in a sentence."""
    return first_names([f"{entry.which} {entry.why}" for entry in left_out], 5)
