"""Deals the canvases of a step among ranks, so that each has about the same to compute.

The step itself stays what it is on one rank: the same images, whose gradients are added up. Passes
are dealt whole where they come out even; else slots of a canvas go to several ranks, and images of
one slot are put on smaller canvases.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from anysize.geometry import Canvas, Layout, NetGeometry, Placement, Size, place, round_up
from anysize.planning.packing import Pass, Step, arrangements, cost_of

_EVEN = 1.05
"""What the busiest rank may have, over the mean, before canvases are divided."""

_HULL_MULTIPLE = 16
"""Pixels; extents of canvases for parts of a slot are rounded up to it, so that they are few."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Some slots of a pass, or some images of one of its slots.

    Attributes:
        source: Number of the pass.
        slots: That it has of the pass's canvas; empty where its images were moved.
        work: Its images on a canvas of its own.
    """

    source: int
    slots: tuple[int, ...]
    work: Pass


def deal(step: Step, num_ranks: int, geometry: NetGeometry) -> list[Step]:
    """The passes of each rank, for nets whose passes do not depend on each other.

    Args:
        step: As it is on one rank.
        num_ranks: At least 1.
        geometry: Of the net.

    Returns:
        A step per rank, of which some may be empty; every image is in one of them.
    """
    if num_ranks == 1:
        return [step]
    parts = [_Part(i, tuple(range(p.layout.canvas.slots)), p) for i, p in enumerate(step.passes)]
    even = cost_of(step.passes) / num_ranks
    best = _longest_first(parts, num_ranks)
    while _most(best) > _EVEN * even:
        divided = _divided(parts, geometry)
        if divided is None:
            break
        parts = divided
        other = _longest_first(parts, num_ranks)
        if _most(other) < _most(best):
            best = other
    return [Step(tuple(_joined(own, step))) for own in best]


def deal_in_lockstep(step: Step, num_ranks: int, geometry: NetGeometry) -> list[Step]:
    """The part of each pass that each rank computes, for nets with statistics of a whole pass.

    Returns:
        A step per rank, all with as many passes as `step`; a rank without images in a pass has one
        of no images there.
    """
    if num_ranks == 1:
        return [step]
    empty = Pass(Layout(empty_canvas(geometry), ()), ())
    dealt: list[list[Pass]] = [[] for _ in range(num_ranks)]
    for number, whole in enumerate(step.passes):
        used = sorted({p.slot for p in whole.layout.placements})
        edges = [i * len(used) // num_ranks for i in range(num_ranks + 1)]
        chunks = [tuple(used[a:b]) for a, b in itertools.pairwise(edges) if a < b]
        parts = [_Part(number, slots, _slots(whole, slots)) for slots in chunks]
        while len(parts) < num_ranks:
            divided = _divided(parts, geometry)
            if divided is None:
                break
            parts = divided
        works = sorted((p.work for p in parts), key=lambda work: -cost_of([work]))
        works += [empty] * (num_ranks - len(works))
        for own, work in zip(sorted(dealt, key=cost_of), works, strict=True):
            own.append(work)
    return [Step(tuple(own)) for own in dealt]


def empty_canvas(geometry: NetGeometry) -> Canvas:
    """A small canvas, for a rank that has no image in a pass for whose statistics others wait."""
    extent = round_up(4 * geometry.output_stride, geometry.canvas_multiple)
    return Canvas(1, extent, extent)


def _longest_first(parts: Sequence[_Part], num_ranks: int) -> list[list[_Part]]:
    """Each part, the most costly first, to the rank that has least.

    Source: Graham, "Bounds on Multiprocessing Timing Anomalies" (1969).
    """
    dealt: list[list[_Part]] = [[] for _ in range(num_ranks)]
    work = [0.0] * num_ranks
    for part in sorted(parts, key=lambda p: -cost_of([p.work])):
        rank = work.index(min(work))
        dealt[rank].append(part)
        work[rank] += cost_of([part.work])
    return dealt


def _most(dealt: Sequence[Sequence[_Part]]) -> float:
    return max(cost_of([p.work for p in own]) for own in dealt)


def _divided(parts: Sequence[_Part], geometry: NetGeometry) -> list[_Part] | None:
    """The parts with the most costly one that can be divided in two halves; None without one."""
    for part in sorted(parts, key=lambda p: -cost_of([p.work])):
        if len(part.work.images) > 1:
            return [p for p in parts if p is not part] + _halves(part, geometry)
    return None


def _halves(part: _Part, geometry: NetGeometry) -> list[_Part]:
    whole = part.work
    used = sorted({p.slot for p in whole.layout.placements})
    if len(used) > 1:
        middle = len(used) // 2
        return [
            _Part(
                part.source,
                tuple(part.slots[s] for s in slots) if part.slots else (),
                _slots(whole, slots),
            )
            for slots in (used[:middle], used[middle:])
        ]
    # Images that were matched with each other first are neighbours.
    middle = len(whole.images) // 2
    sizes = [p.size for p in whole.layout.placements]
    return [
        _Part(part.source, (), _together(whole.images[some], sizes[some], geometry))
        for some in (slice(middle), slice(middle, None))
    ]


def _slots(whole: Pass, slots: Sequence[int]) -> Pass:
    """Some slots of a pass."""
    canvas = whole.layout.canvas
    placements: list[Placement] = []
    images: list[int] = []
    for placement, image in zip(whole.layout.placements, whole.images, strict=True):
        if placement.slot in slots:
            placements.append(placement._replace(slot=slots.index(placement.slot)))
            images.append(image)
    layout = Layout(Canvas(len(slots), canvas.height, canvas.width), tuple(placements))
    return Pass(layout, tuple(images))


def _together(images: Sequence[int], sizes: Sequence[Size], geometry: NetGeometry) -> Pass:
    """A few images in the smallest slot that holds them."""
    multiple = math.lcm(_HULL_MULTIPLE, geometry.canvas_multiple)
    options = [
        (Canvas(1, round_up(ends[1], multiple), round_up(ends[3], multiple)), arranged)
        for ends, arranged in arrangements(range(len(images)), sizes, geometry)
    ]
    canvas, arranged = min(options, key=lambda option: option[0].pixels)
    placements = tuple(
        place(sizes[i], geometry, slot=0, cell_top=top, cell_left=left) for i, top, left in arranged
    )
    return Pass(Layout(canvas, placements), tuple(images[i] for i, _, _ in arranged))


def _joined(own: Sequence[_Part], step: Step) -> list[Pass]:
    """The passes of a rank: slots of one canvas are computed at once."""
    passes: list[Pass] = []
    for number, whole in enumerate(step.passes):
        parts = [p for p in own if p.source == number]
        slots = sorted(s for p in parts for s in p.slots)
        if slots:
            passes.append(_slots(whole, slots))
        passes += [p.work for p in parts if not p.slots]
    return passes
