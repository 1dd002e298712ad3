"""Packing images onto the canvases of a plan, step by step.

Images are matched in pairs, and those in pairs again, up to the images of a pass; the cost of a
match is the part of a canvas that it will take up (`anysize.planning.blocks`). So a canvas with as
many slots as images is a padded batch, one with half as many holds two images a slot, and one with
a quarter as many holds four: in a row, in a column, or two by two.

The images come in a random order, which changes from epoch to epoch. It is cut into windows of a
few hundred images, and images meet within their window; the search starts from that order and draws
its chances from it, so that even images of one window meet others in each epoch.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from anysize.errors import ShapeError
from anysize.geometry import Canvas, Layout, NetGeometry, Placement, Size, ceil_div, place
from anysize.planning.blocks import MAX_CONTENT, PASS_OVERHEAD, Extents, Index, extents_of
from anysize.planning.grouping import Search, group
from anysize.wording import count_of

WINDOW = 600
"""Images that may meet in a step: enough that good partners exist, few enough to try them all."""

_MIN_ROUNDS, _ROUNDS_A_PACK, _ROUNDS_AN_IMAGE = 1_000, 30_000, 20
_TRIAL_ROUNDS = 300
_MAX_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The canvases of a run.

    Attributes:
        geometry: Of the net that the canvases were planned for.
        images_per_step: Images an optimiser step, on as many canvases as they need.
        max_pixels_per_step: Most canvas pixels computed at once.
        canvases: The only shapes that the net will meet.
    """

    geometry: NetGeometry
    images_per_step: int
    max_pixels_per_step: int
    canvases: tuple[Canvas, ...]


@dataclass(frozen=True, slots=True)
class Pass:
    """One canvas computed at once.

    Attributes:
        layout: The canvas and where the images lie on it.
        images: For each placement, the index of its image among the sizes that were packed.
    """

    layout: Layout
    images: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One optimiser step: its images' gradients are added up over the passes."""

    passes: tuple[Pass, ...]

    @property
    def num_images(self) -> int:
        """Images in all passes."""
        return sum(len(p.images) for p in self.passes)


def pack(sizes: Sequence[Size], order: Sequence[int], plan: Plan) -> list[Step]:
    """Packs images into steps of `plan.images_per_step`; the last has what remains.

    Args:
        sizes: Size of every image.
        order: Indices into `sizes` of the images to pack, in the random order of an epoch. The
            result depends on nothing but the arguments.
        plan: The canvases, the budget and the net.

    Returns:
        Steps in no particular order, but for the last; every index of `order` is in one of them.

    Raises:
        ShapeError: Some images fit on no canvas of the plan.
    """
    check_fit([sizes[i] for i in order], plan)
    indices = np.array(order, np.intp)
    # The bytes of the order seed the search: the same epoch packs the same, another differently.
    rng = np.random.default_rng(zlib.crc32(indices.astype("<i8").tobytes()))
    extents = extents_of(sizes, plan.geometry)
    per_step = plan.images_per_step
    num_full = len(indices) - len(indices) % per_step
    windows = _windows(indices[:num_full], per_step)
    steps: list[Step] = []
    if windows:
        per_pass = _images_per_pass(windows[0], extents, sizes, plan, rng)
        num_rounds = min(
            max(_ROUNDS_A_PACK // len(windows), _MIN_ROUNDS), _ROUNDS_AN_IMAGE * len(windows[0])
        )
        num_tries = _MAX_TRIES if len(windows) == 1 else 1
        for window in windows:
            groups = pack_window(window, extents, sizes, plan, per_pass, num_rounds, rng, num_tries)
            # Neighbours by cost make a step, so that it can be dealt evenly among ranks.
            mixed: list[int] = rng.permutation(len(groups)).tolist()
            costs = [cost_of(group) for group in groups]
            mixed.sort(key=costs.__getitem__)
            for i in range(0, len(mixed), per_step // per_pass):
                step = mixed[i : i + per_step // per_pass]
                steps.append(Step(tuple(p for g in step for p in groups[g])))
    if num_full < len(indices):
        rest = sorted(indices[num_full:].tolist(), key=sizes.__getitem__)
        steps.append(Step(to_passes(rest, sizes, plan)))
    return steps


def pack_window(
    window: Index,
    extents: Extents,
    sizes: Sequence[Size],
    plan: Plan,
    per_pass: int,
    num_rounds: int,
    rng: np.random.Generator,
    num_tries: int = 1,
) -> list[tuple[Pass, ...]]:
    """Packs images that may all meet, in groups of `per_pass`.

    Returns:
        The passes of each group: one, or several where no canvas holds the group. Chance may leave
        a group behind that fits nowhere, such as a row with a column, so there are some tries.
    """
    search = Search(plan.canvases, plan.geometry, per_pass)
    best: list[tuple[Pass, ...]] = []
    for _ in range(num_tries):
        groups = group(window, extents, search, num_rounds, rng)
        passes = [to_passes(g, sizes, plan) for g in groups.tolist()]
        if not best or _cost_of_groups(passes) < _cost_of_groups(best):
            best = passes
        if all(len(p) == 1 for p in best):
            break
    return best


def _cost_of_groups(groups: Sequence[tuple[Pass, ...]]) -> float:
    return sum(cost_of(passes) for passes in groups)


def check_fit(sizes: Sequence[Size], plan: Plan) -> None:
    """Checks that every image fits on a canvas of the plan.

    Raises:
        ShapeError: Some do not; the message names the largest of them.
    """
    canvases = np.array([(c.height, c.width) for c in plan.canvases], np.int32).reshape(-1, 2)
    _, end_h, _, end_w = extents_of(sizes, plan.geometry)
    fits = (end_h[:, None] <= canvases[:, 0]) & (end_w[:, None] <= canvases[:, 1])
    unfit = [sizes[i] for i in np.flatnonzero(~fits.any(axis=1)).tolist()]
    if unfit:
        raise ShapeError(
            f"{count_sizes(unfit)} fit on no canvas of the plan, which has "
            f"{', '.join(str(c) for c in plan.canvases)}. Make a plan of these images, rescale "
            f"them, or set `augment.crop`."
        )


def count_sizes(sizes: Sequence[Size]) -> str:
    """How many images these are, and the largest of their sizes, in words."""
    distinct = sorted(set(sizes), key=lambda s: (-s.pixels, s))
    named = ", ".join(str(s) for s in distinct[:5])
    more = f" and {len(distinct) - 5} more sizes" if len(distinct) > 5 else ""
    images = count_of(len(sizes), "image")
    return f"{images} ({named}{more}; height x width)"


def images_per_pass_options(
    images_per_step: int, mean_pixels: float, max_pixels_per_step: int
) -> list[int]:
    """Equal parts in which steps may be computed: whole, halves, quarters, ..., single images."""
    parts = [images_per_step]
    while parts[-1] % 2 == 0:
        parts.append(parts[-1] // 2)
    return [p for p in parts if p * mean_pixels <= max_pixels_per_step] or [1]


def _windows(indices: Index, per_step: int) -> list[Index]:
    num_steps = len(indices) // per_step
    if num_steps == 0:
        return []
    num_windows = min(ceil_div(len(indices), max(WINDOW, per_step)), num_steps)
    edges = [w * num_steps // num_windows * per_step for w in range(num_windows + 1)]
    return [indices[a:b] for a, b in itertools.pairwise(edges)]


def _images_per_pass(
    window: Index,
    extents: Extents,
    sizes: Sequence[Size],
    plan: Plan,
    rng: np.random.Generator,
) -> int:
    """Tries on a window which part of a step to compute at once."""
    indices: list[int] = window.tolist()
    mean = sum(sizes[i].pixels for i in indices) / len(indices)
    options = images_per_pass_options(plan.images_per_step, mean, plan.max_pixels_per_step)
    costs: list[tuple[float, int]] = []
    for per_pass in options:
        search = Search(plan.canvases, plan.geometry, per_pass)
        groups = group(window, extents, search, _TRIAL_ROUNDS, rng)
        passes = [p for g in groups.tolist() for p in to_passes(g, sizes, plan)]
        costs.append((cost_of(passes), -per_pass))
    return -min(costs)[1] if costs else 1


def cost_of(passes: Sequence[Pass]) -> float:
    """Computed pixels and the fixed cost of each pass."""
    return sum(p.layout.canvas.pixels + PASS_OVERHEAD for p in passes)


def to_passes(images: Sequence[int], sizes: Sequence[Size], plan: Plan) -> tuple[Pass, ...]:
    """Puts a group on the cheapest canvas that holds it, or its halves on cheaper ones."""
    whole = _one_pass(images, sizes, plan)
    if len(images) == 1:
        assert whole is not None, "check_fit has seen to it"
        return (whole,)
    fair = 1.25 * sum(sizes[i].pixels for i in images)
    if whole is not None and whole.layout.canvas.pixels <= fair:
        return (whole,)
    middle = ceil_div(len(images), 2)
    halves = to_passes(images[:middle], sizes, plan) + to_passes(images[middle:], sizes, plan)
    if whole is not None and cost_of([whole]) <= cost_of(halves):
        return (whole,)
    return halves


def _one_pass(images: Sequence[int], sizes: Sequence[Size], plan: Plan) -> Pass | None:
    for canvas in sorted(plan.canvases, key=lambda c: (c.pixels, c)):
        if sum(sizes[i].pixels for i in images) > canvas.pixels:
            continue
        content = ceil_div(len(images), canvas.slots)
        if content > MAX_CONTENT:
            continue
        slots = [images[i : i + content] for i in range(0, len(images), content)]
        placed: list[tuple[int, Placement]] = []
        for slot, members in enumerate(slots):
            arranged = arrange(members, sizes, canvas, plan.geometry)
            if arranged is None:
                break
            placed += [
                (i, place(sizes[i], plan.geometry, slot=slot, cell_top=top, cell_left=left))
                for i, top, left in arranged
            ]
        else:
            layout = Layout(canvas, tuple(p for _, p in placed))
            return Pass(layout, tuple(i for i, _ in placed))
    return None


Arranged: TypeAlias = list[tuple[int, int, int]]
"""Image, first row and first column of its cells."""


def arrange(
    images: Sequence[int], sizes: Sequence[Size], canvas: Canvas, geometry: NetGeometry
) -> Arranged | None:
    """Arranges images in one slot of a canvas, or tells that they do not fit."""
    for (_, end_h, _, end_w), arranged in arrangements(images, sizes, geometry):
        if end_h <= canvas.height and end_w <= canvas.width:
            return arranged
    return None


def arrangements(
    images: Sequence[int], sizes: Sequence[Size], geometry: NetGeometry
) -> list[tuple[tuple[int, int, int, int], Arranged]]:
    """The arrangements that `joined` counts, with the images' places, for one block."""
    if len(images) == 1:
        size = sizes[images[0]]
        return [(_extents(size, geometry), [(images[0], 0, 0)])]
    middle = ceil_div(len(images), 2)
    stride = geometry.output_stride
    found: list[tuple[tuple[int, int, int, int], Arranged]] = []
    for a, in_a in arrangements(images[:middle], sizes, geometry):
        for b, in_b in arrangements(images[middle:], sizes, geometry):
            for (x, in_x), (y, in_y) in (((a, in_a), (b, in_b)), ((b, in_b), (a, in_a))):
                row = (max(x[0], y[0]), max(x[1], y[1]), x[2] + y[2], x[2] + y[3])
                column = (x[0] + y[0], x[0] + y[1], max(x[2], y[2]), max(x[3], y[3]))
                right = [(i, top, left + x[2] // stride) for i, top, left in in_y]
                below = [(i, top + x[0] // stride, left) for i, top, left in in_y]
                found += [(row, in_x + right), (column, in_x + below)]
    return found


def _extents(size: Size, geometry: NetGeometry) -> tuple[int, int, int, int]:
    steps = [geometry.step(e) for e in size]
    ends = [geometry.shift(e) + geometry.padded(e) for e in size]
    return steps[0], ends[0], steps[1], ends[1]
