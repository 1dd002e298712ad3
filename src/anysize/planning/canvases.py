"""Choosing the canvases of a plan.

The search works on a sample of the images, seeded, from several starts:

1. `guess`: a model says what an image costs in the best of company: in a padded batch, its slot; in
   a strip of images of about its height or width, that height times its length; among four in one
   slot, its own extents with its part of the gutters. The canvases that are cheapest together
   under this model are picked, one by one and then by exchange.
2. `settle`: images are matched in twos on these canvases, which they may overflow at a price, and
   canvases move at random, both at a temperature that falls while the price rises.
3. `refit`: the same for whole groups, with the best move of every canvas in turn.

Packings of the sample decide between starts and stages.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from anysize.errors import ConfigError, ShapeError
from anysize.geometry import Canvas, NetGeometry, Size, round_up
from anysize.planning.blocks import (
    MAX_CONTENT,
    NEVER,
    PASS_OVERHEAD,
    Extents,
    Floats,
    Index,
    content_of,
    extents_of,
    joined,
    shelf_cost,
    slot_cost,
    take,
)
from anysize.planning.grouping import Blocks, Search, group, group_cost, nest
from anysize.planning.matching import anneal, falling
from anysize.planning.packing import (
    Plan,
    cost_of,
    count_sizes,
    images_per_pass_options,
    pack_window,
)
from anysize.planning.planfile import check_plan, describe_plan, plan_summary, read_plan, write_plan

__all__ = [
    "Plan",
    "check_plan",
    "describe_plan",
    "plan_canvases",
    "plan_summary",
    "read_plan",
    "worthwhile_canvases",
    "write_plan",
]

FEWEST_CANVASES, MOST_CANVASES = 8, 64
VISITS_SHARE = 0.01
VISIT_ON_CPU = 20_000
"""What the first visit of a canvas costs, in pixels: 40 ms beside 2 s a megapixel (ResNet-50)."""
VISIT_ON_GPU = 2_500_000
"""The same where a pixel is a hundred times cheaper; not measured."""

SAMPLE, NUM_SAMPLES = 300, 4
"""Images that may meet in the search, and how often as many are drawn. All others must fit, but
have no say in what is cheap."""

_STARTS = ((1, 2, 4), (1, 2), (2,), (2, 4))
"""Images a slot that the canvases of a start may have."""

_PICKS = 12
"""Random starts of an exchange, beside the greedy one."""

_SETTLED = 2
"""Starts, the best ones, that are settled and fitted."""

_SETTLE_ROUNDS, _REFITS, _REFIT_ROUNDS, _SCORE_ROUNDS = 350, 8, 600, 2_400
_MIN_ROUNDS = 30
_MATCH_ROUNDS = 40
_FIRST_ROUNDS = 2_000
_HEAT = 0.02
_LEAPS = 0.1
"""Part of the moves that put a canvas where an image or a two lies, wherever that is."""

_SLOPES = (8.0, 60.0)
_MISFIT = 1.02
"""How much longer a strip must be than its images, which never add up exactly; from packings."""

_MOVES = (-6, -2, -1, 0, 1, 2, 6)


def worthwhile_canvases(sizes: Sequence[Size], *, epochs: float, on_gpu: bool) -> int:
    """Canvases whose first visits together take at most one percent of a run, 8 to 64.

    More of them waste fewer pixels; each has its first visit, and planning takes longer.

    Args:
        sizes: Of the images of an epoch.
        epochs: That the run computes them.
        on_gpu: Where first visits cost more pixels' worth of time.
    """
    visit = VISIT_ON_GPU if on_gpu else VISIT_ON_CPU
    affordable = VISITS_SHARE * epochs * sum(s.pixels for s in sizes) / visit
    return max(FEWEST_CANVASES, min(int(affordable), MOST_CANVASES))


def plan_canvases(
    sizes: Sequence[Size],
    *,
    geometry: NetGeometry,
    images_per_step: int,
    max_pixels_per_step: int,
    max_canvases: int,
    must_fit: Sequence[Size] = (),
) -> Plan:
    """Chooses at most `max_canvases` canvases on which steps of these images compute little waste.

    The same arguments give the same plan.

    Args:
        sizes: Of the images, as often as they occur.
        geometry: Of the net.
        images_per_step: Images an optimiser step.
        max_pixels_per_step: Most canvas pixels computed at once.
        max_canvases: Most canvas shapes; each costs its first visit.
        must_fit: Further sizes that must fit on some canvas, each alone.

    Raises:
        ConfigError: A limit is below 1, or there are no sizes.
        ShapeError: An image needs a canvas above `max_pixels_per_step`, or the largest images
            differ so much in shape that `max_canvases` do not hold them.
    """
    limits = {
        "plan.images_per_step": images_per_step,
        "plan.max_pixels_per_step": max_pixels_per_step,
        "plan.max_canvases": max_canvases,
    }
    for key, value in limits.items():
        if value < 1:
            raise ConfigError(f"`{key}` is {value}; it must be at least 1.")
    if not sizes:
        raise ConfigError("There are no images to make a plan of. Check the data folder's path.")
    _check_budget([*sizes, *must_fit], geometry, max_pixels_per_step)
    rng = np.random.default_rng(0)
    # Of fewer images than a step has, the only step is made of these.
    per_step = min(images_per_step, len(sizes))
    looked_at, samples = _samples(sizes, per_step, rng)
    job = _Job(
        plan=Plan(
            geometry=geometry,
            images_per_step=per_step,
            max_pixels_per_step=max_pixels_per_step,
            canvases=(),
        ),
        sizes=looked_at,
        extents=extents_of(looked_at, geometry),
        samples=samples,
        needs=_largest([*sizes, *must_fit], geometry),
        max_canvases=max_canvases,
    )
    _, canvases = min(_candidates(job, rng))
    return replace(job.plan_with(canvases), images_per_step=images_per_step)


@dataclass(frozen=True, slots=True)
class _Job:
    """What is planned.

    Attributes:
        plan: The plan but for its canvases.
        sizes: That the search looks at.
        extents: Of `sizes`.
        samples: Indices into `sizes`, whole steps of them, as many as may meet in a search.
        needs: [n, 2] extents that some canvas must have, so that every image fits alone.
        max_canvases: Most canvases.
    """

    plan: Plan
    sizes: list[Size]
    extents: Extents
    samples: list[Index]
    needs: npt.NDArray[np.int32]
    max_canvases: int

    @property
    def budget(self) -> int:
        """Most canvas pixels computed at once."""
        return self.plan.max_pixels_per_step

    @property
    def multiple(self) -> int:
        """Pixels; extents of canvases are multiples of it."""
        return self.plan.geometry.canvas_multiple

    def rounds(self, full: int) -> int:
        """Rounds of a search that takes `full` rounds on `SAMPLE` images."""
        return max(full * len(self.samples[0]) // SAMPLE, _MIN_ROUNDS)

    def plan_with(self, canvases: Sequence[Canvas]) -> Plan:
        """The plan with these canvases, in a fixed order."""
        return replace(self.plan, canvases=tuple(sorted(canvases)))

    def fits_all(self, canvases: Sequence[Canvas]) -> bool:
        """Whether every image fits on one of the canvases."""
        return bool(_covered(self.needs, canvases).all())


def _covered(needs: npt.NDArray[np.int32], canvases: Sequence[Canvas]) -> npt.NDArray[np.bool_]:
    shapes = np.array([(c.height, c.width) for c in canvases], np.int32).reshape(-1, 2)
    tall_enough = needs[:, :1] <= shapes[:, 0]
    wide_enough = needs[:, 1:] <= shapes[:, 1]
    return np.logical_or.reduce(tall_enough & wide_enough, axis=1)


def _check_budget(sizes: Sequence[Size], geometry: NetGeometry, budget: int) -> None:
    too_large = [
        s
        for s in sizes
        if geometry.canvas_extent(s.height) * geometry.canvas_extent(s.width) > budget
    ]
    if too_large:
        need = max(
            geometry.canvas_extent(s.height) * geometry.canvas_extent(s.width) for s in too_large
        )
        raise ShapeError(
            f"{count_sizes(too_large)} need canvases above `plan.max_pixels_per_step` = {budget}. "
            f"Raise it to {need} if memory allows, rescale the images, or set `augment.crop`."
        )


def _samples(
    sizes: Sequence[Size], per_step: int, rng: np.random.Generator
) -> tuple[list[Size], list[Index]]:
    """Some of the sizes, cut into samples of whole steps."""
    num = max(min(len(sizes), SAMPLE) // per_step, 1) * per_step
    num_samples = min(len(sizes) // num, NUM_SAMPLES)
    order: list[int] = rng.permutation(len(sizes))[: num * num_samples].tolist()
    return [sizes[i] for i in order], list(np.arange(len(order)).reshape(num_samples, num))


def _largest(sizes: Sequence[Size], geometry: NetGeometry) -> npt.NDArray[np.int32]:
    """The canvas extents of images that do not fit on the canvas of another."""
    extents = sorted(
        {(geometry.canvas_extent(s.height), geometry.canvas_extent(s.width)) for s in sizes},
        reverse=True,
    )
    front: list[tuple[int, int]] = []
    for height, width in extents:
        if not front or width > front[-1][1]:
            front.append((height, width))
    return np.array(front, np.int32)


def _candidates(job: _Job, rng: np.random.Generator) -> list[tuple[float, tuple[Canvas, ...]]]:
    """Costs and canvases from several starts and stages; each holds every image."""
    mean = sum(s.pixels for s in job.sizes) / len(job.sizes)
    parts = images_per_pass_options(job.plan.images_per_step, mean, job.budget)
    guesses = {
        (per_pass, canvases): _score(canvases, per_pass, job)
        for per_pass in parts[:2]
        for contents in _STARTS
        for canvases in [_cover(_guess(per_pass, contents, job, rng), job)]
    }
    found = [(score, canvases) for (_, canvases), score in guesses.items()]
    for per_pass, canvases in sorted(guesses, key=guesses.__getitem__)[:_SETTLED]:
        settled = canvases
        if per_pass % 2 == 0:
            settled = _settle(canvases, per_pass, job, rng)
            found.append((_score(settled, per_pass, job), settled))
        refitted = _refit_in_turn(settled, per_pass, job, rng)
        found.append((_score(refitted, per_pass, job), refitted))
    return found


def _score(canvases: Sequence[Canvas], per_pass: int, job: _Job) -> float:
    """Computed pixels and fixed costs of two packings, of unlike images where there are enough."""
    plan = job.plan_with(canvases)
    groups = [
        passes
        for seed in range(2)
        for passes in pack_window(
            job.samples[-1 - seed % len(job.samples)],
            job.extents,
            job.sizes,
            plan,
            per_pass,
            job.rounds(_SCORE_ROUNDS),
            np.random.default_rng(seed),
        )
    ]
    return sum(cost_of(passes) for passes in groups)


@dataclass(frozen=True, slots=True)
class _Shape:
    """A canvas before all its extents are known; 0 is open, `content` 0 takes one image alone."""

    content: int
    height: int
    width: int


def _guess(
    per_pass: int, contents: Sequence[int], job: _Job, rng: np.random.Generator
) -> list[Canvas]:
    """The canvases that are cheapest together if every image meets its best company."""
    shapes, cost = _shape_costs(job, per_pass, contents)
    if not shapes:
        return []
    picked = _pick(cost, job.max_canvases, rng)
    step_h, end_h, step_w, end_w = job.extents
    mean_h, mean_w = (step_h + end_h) / 2, (step_w + end_w) / 2
    owner = cost[picked].argmin(axis=0)
    canvases: set[Canvas] = set()
    for k, shape in enumerate(shapes[i] for i in picked):
        own = owner == k
        if not own.any():
            continue
        slots = per_pass // shape.content if shape.content else 1
        two_high, two_wide = 2 * mean_h[own].mean() * _MISFIT, 2 * mean_w[own].mean() * _MISFIT
        multiple = job.multiple
        height = min(shape.height or _up(two_high, multiple), job.budget // (slots * multiple))
        height = max(height // multiple, 1) * multiple
        width = min(shape.width or _up(two_wide, multiple), job.budget // (slots * height))
        width = width // multiple * multiple
        if width:
            canvases.add(Canvas(slots, height, width))
    return sorted(canvases)


def _shape_costs(job: _Job, per_pass: int, contents: Sequence[int]) -> tuple[list[_Shape], Floats]:
    """[shapes, images]: what each image costs on each shape in the best of company."""
    step_h, end_h, step_w, end_w = job.extents
    budget, multiple = job.budget, job.multiple
    mean_h, mean_w = (step_h + end_h) / 2, (step_w + end_w) / 2
    shapes: list[_Shape] = []
    costs: list[npt.NDArray[np.float64]] = []

    def add(shape: _Shape, cost: float | npt.NDArray[np.float64]) -> None:
        fits = (end_h <= (shape.height or np.inf)) & (end_w <= (shape.width or np.inf))
        shapes.append(shape)
        costs.append(np.where(fits, cost, NEVER))

    for height, width in _boxes(end_h, end_w, multiple):
        pixels = height * width
        if 1 in contents and per_pass * pixels <= budget:
            add(_Shape(1, height, width), pixels)
        if per_pass > 1 and per_pass * pixels > budget / 2 and pixels <= budget:
            add(_Shape(0, height, width), pixels + PASS_OVERHEAD)
    if 2 in contents and per_pass % 2 == 0:
        for height in _levels(end_h, 50, multiple):
            add(_Shape(2, height, 0), height * mean_w * _MISFIT)
        for width in _levels(end_w, 50, multiple):
            add(_Shape(2, 0, width), width * mean_h * _MISFIT)
    if 4 in contents and per_pass % 4 == 0:
        add(_Shape(4, 0, 0), mean_h * mean_w * _MISFIT**2)
    return shapes, np.array(costs, np.float32)


def _boxes(
    end_h: npt.NDArray[np.int32], end_w: npt.NDArray[np.int32], multiple: int
) -> list[tuple[int, int]]:
    """Canvas extents for single images: the most frequent ones, and a grid over all."""
    each, counts = np.unique(
        -(-np.stack([end_h, end_w], axis=1) // multiple) * multiple,
        axis=0,
        return_counts=True,
    )
    frequent = each[np.argsort(-counts, kind="stable")[:150]]
    grid = itertools.product(_levels(end_h, 16, multiple), _levels(end_w, 16, multiple))
    return sorted({(h, w) for h, w in frequent.tolist()} | set(grid))


def _levels(ends: npt.NDArray[np.int32], num: int, multiple: int) -> list[int]:
    quantiles = np.quantile(ends, np.linspace(0, 1, num), method="higher")
    return sorted({_up(q, multiple) for q in quantiles.tolist()})


def _up(extent: float, multiple: int) -> int:
    return round_up(int(np.ceil(extent)), multiple)


def _pick(cost: Floats, num: int, rng: np.random.Generator) -> list[int]:
    """At most `num` rows of a cost that are cheapest together, each column by its cheapest row."""
    greedy: list[int] = []
    best = np.full(cost.shape[1], NEVER)
    for _ in range(num):
        greedy.append(int(np.minimum(best, cost).sum(axis=1, dtype=np.float64).argmin()))
        best = np.minimum(best, cost[greedy[-1]])
    starts = [greedy, *(rng.integers(len(cost), size=num).tolist() for _ in range(_PICKS))]
    results = [_exchange(cost, start) for start in starts]
    return sorted(set(min(results)[1]))


def _exchange(cost: Floats, picked: list[int]) -> tuple[float, list[int]]:
    """Replaces one picked row after the other by the best, until none is better."""
    total = np.inf
    while True:
        before = total
        for k in range(len(picked)):
            others = cost[picked[:k] + picked[k + 1 :]].min(axis=0, initial=NEVER)
            totals = np.minimum(others, cost).sum(axis=1, dtype=np.float64)
            picked[k] = int(totals.argmin())
            total = float(totals[picked[k]])
        if total >= before * (1 - 1e-6):
            return total, picked


def _cover(start: Sequence[Canvas], job: _Job) -> tuple[Canvas, ...]:
    """Adds or enlarges canvases until every image fits on one.

    Raises:
        ShapeError: The largest images need more canvases than there may be.
    """
    canvases = list(start)
    while True:
        open_needs = job.needs[~_covered(job.needs, canvases)] if canvases else job.needs
        if not len(open_needs):
            return tuple(sorted(set(canvases)))
        height, width = open_needs[open_needs.prod(axis=1).argmax()].tolist()
        larger = [
            (grown.pixels - c.pixels, k, grown)
            for k, c in enumerate(canvases)
            for grown in [Canvas(c.slots, max(c.height, height), max(c.width, width))]
            if grown.pixels <= job.budget
        ]
        if len(canvases) < job.max_canvases:
            canvases.append(Canvas(1, height, width))
        elif larger:
            _, k, grown = min(larger)
            canvases[k] = grown
        else:
            canvases = _cover_all_with_few(job)


def _cover_all_with_few(job: _Job) -> list[Canvas]:
    """One image a canvas, each canvas as large as its images need, merged while there are many."""
    canvases = [Canvas(1, h, w) for h, w in job.needs.tolist()]
    while len(canvases) > job.max_canvases:
        merged = [
            (both.pixels - a.pixels - b.pixels, i, both)
            for i, (a, b) in enumerate(itertools.pairwise(canvases))
            for both in [Canvas(1, max(a.height, b.height), max(a.width, b.width))]
            if both.pixels <= job.budget
        ]
        if not merged:
            shapes = ", ".join(f"{c.height}x{c.width}" for c in canvases[:5])
            raise ShapeError(
                f"The largest images need {len(canvases)} canvases ({shapes}, ...; height x "
                f"width), and no two fit in one within `plan.max_pixels_per_step` = {job.budget}. "
                f"Raise `plan.max_canvases`, which is {job.max_canvases}, or the pixels, or "
                f"rescale the images."
            )
        _, i, both = min(merged)
        canvases[i : i + 2] = [both]
    return canvases


@dataclass(frozen=True, slots=True)
class _Pairs:
    """All twos of the sample's images.

    Attributes:
        single: Extents of each image.
        joint: [n, n] extents of each two, in a row and in a column.
        per_pass: Images a pass.
        geometry: Of the net.
    """

    single: Extents
    joint: tuple[Extents, ...]
    per_pass: int
    geometry: NetGeometry

    def cost(self, canvas: Canvas, slope: float, first: Index, second: Index) -> Floats:
        """What the twos `first`, `second` cost on a canvas; the indices broadcast."""
        part = np.float32(2 / self.per_pass)
        content = content_of(canvas, self.per_pass)
        apart = slot_cost([self.single], canvas, slope)
        if content == 1:
            apart *= part / 2
        cost = apart[first] + apart[second]
        if content == 1 or content > MAX_CONTENT:
            return cost
        matched = [take(o, (first, second)) for o in self.joint]
        if content == 2:
            together = slot_cost(matched, canvas, slope)
        else:
            together = shelf_cost(matched, canvas, slope, self.geometry)
        return np.minimum(cost, together * part)


def _settle(
    start: Sequence[Canvas], per_pass: int, job: _Job, rng: np.random.Generator
) -> tuple[Canvas, ...]:
    """Matches images in twos and moves canvases, both at the same falling temperature."""
    canvases = list(start)
    extents = take(job.extents, job.samples[0])
    rows, columns = np.arange(len(extents[0]))[:, None], np.arange(len(extents[0]))[None, :]
    joint = joined([take(extents, rows)], [take(extents, columns)])
    pairs = _Pairs(extents, joint, per_pass, job.plan.geometry)
    order = rng.permutation(len(extents[0]))
    first, second = order[0::2], order[1::2]
    usual = 2 * float((extents[1] * extents[3]).mean())
    costs: list[Floats] = []
    slope = 0.0
    num_rounds = job.rounds(_SETTLE_ROUNDS)
    for r in range(num_rounds):
        done = r / num_rounds
        if r % max(num_rounds // 20, 1) == 0:
            slope = _SLOPES[0] * (_SLOPES[1] / _SLOPES[0]) ** done
            costs = [pairs.cost(c, slope, rows, columns) for c in canvases]
        if r == 0:
            # Canvases must not follow the images before these have found their company.
            cooling = falling(_HEAT * usual, job.rounds(_FIRST_ROUNDS))
            first, second = anneal(np.minimum.reduce(costs), first, second, cooling, rng)
        temperature = _HEAT * usual * (1 - done) ** 1.5
        for k in _move(canvases, pairs, slope, first, second, temperature, job, rng):
            costs[k] = pairs.cost(canvases[k], slope, rows, columns)
        first, second = anneal(
            np.minimum.reduce(costs), first, second, [temperature] * _MATCH_ROUNDS, rng
        )
    return tuple(sorted(set(canvases)))


def _move(
    canvases: list[Canvas],
    pairs: _Pairs,
    slope: float,
    first: Index,
    second: Index,
    temperature: float,
    job: _Job,
    rng: np.random.Generator,
) -> list[int]:
    """Moves canvases at random, in place, at a temperature; tells which have moved."""
    costs = np.stack([pairs.cost(c, slope, first, second) for c in canvases])
    moved: list[int] = []
    for k, canvas in enumerate(canvases):
        if content_of(canvas, pairs.per_pass) > 2:
            continue  # Four in a slot: a match of two does not tell the extents; see `_refit`.
        others = np.delete(costs, k, axis=0).min(axis=0, initial=NEVER)
        for _ in range(2):
            before = canvases[k]
            if rng.random() < _LEAPS:
                proposal = _tight(before, pairs, first, second, job.multiple, rng)
            else:
                proposal = _nudged(before, job.multiple, rng)
            canvases[k] = proposal
            fits = min(proposal[1:]) > 0 and proposal.pixels <= job.budget
            if proposal == before or not fits or not job.fits_all(canvases):
                canvases[k] = before
                continue
            cost = pairs.cost(proposal, slope, first, second)
            worse = float(
                np.minimum(others, cost).sum(dtype=np.float64)
                - np.minimum(others, costs[k]).sum(dtype=np.float64)
            )
            if worse > 0 and rng.random() >= np.exp(-worse / max(temperature, 1e-9)):
                canvases[k] = before
                continue
            costs[k] = cost
            moved.append(k)
    return moved


def _nudged(canvas: Canvas, multiple: int, rng: np.random.Generator) -> Canvas:
    spread = float(rng.choice([1, 2, 5]))
    down, right = rng.normal(scale=spread, size=2).round().astype(int).tolist()
    height, width = canvas.height + multiple * down, canvas.width + multiple * right
    return Canvas(canvas.slots, height, width)


def _tight(
    canvas: Canvas,
    pairs: _Pairs,
    first: Index,
    second: Index,
    multiple: int,
    rng: np.random.Generator,
) -> Canvas:
    """A canvas of as many slots that just holds one image or one two, drawn at random."""
    i = int(rng.integers(len(first)))
    if content_of(canvas, pairs.per_pass) == 1:
        _, end_h, _, end_w = take(pairs.single, first[i])
    else:
        _, end_h, _, end_w = take(pairs.joint[int(rng.integers(2))], (first[i], second[i]))
    return Canvas(canvas.slots, _up(float(end_h), multiple), _up(float(end_w), multiple))


def _refit_in_turn(
    canvases: tuple[Canvas, ...], per_pass: int, job: _Job, rng: np.random.Generator
) -> tuple[Canvas, ...]:
    """Groups images and fits the canvases to the groups, while overflow becomes dearer."""
    for turn, slope in enumerate(np.geomspace(*_SLOPES, _REFITS).tolist()):
        search = Search(canvases, job.plan.geometry, per_pass, slope)
        images = job.samples[turn % len(job.samples)]
        groups = group(images, job.extents, search, job.rounds(_REFIT_ROUNDS), rng)
        canvases = _refit(canvases, nest(groups, job.extents, search), search, job)
    return canvases


def _refit(
    start: Sequence[Canvas], levels: Sequence[Blocks], search: Search, job: _Job
) -> tuple[Canvas, ...]:
    """Moves each canvas in turn to where the given groups cost least."""
    canvases = list(start)
    joint = np.stack([group_cost(levels, c, search.per_pass, search.slope) for c in canvases])
    apart = np.stack([slot_cost(levels[0].options, c, search.slope) for c in canvases])
    for k, canvas in enumerate(canvases):
        other_joint = np.delete(joint, k, axis=0).min(axis=0, initial=NEVER)
        other_apart = np.delete(apart, k, axis=0).min(axis=0, initial=NEVER)
        best = np.inf
        for down, right in itertools.product(_MOVES, _MOVES):
            height = canvas.height + job.multiple * down
            moved = Canvas(canvas.slots, height, canvas.width + job.multiple * right)
            rest = canvases[:k] + canvases[k + 1 :]
            if min(moved[1:]) < job.multiple or moved.pixels > job.budget:
                continue
            if not job.fits_all([*rest, moved]):
                continue
            new_joint = group_cost(levels, moved, search.per_pass, search.slope)
            new_apart = slot_cost(levels[0].options, moved, search.slope)
            single = np.minimum(other_apart, new_apart).reshape(-1, search.per_pass).sum(axis=1)
            cost = np.minimum(np.minimum(other_joint, new_joint), single).sum(dtype=np.float64)
            if cost < best:
                best, canvases[k], joint[k], apart[k] = cost, moved, new_joint, new_apart
    return tuple(sorted(set(canvases)))
