"""Choosing the canvases of a plan.

The search works on a sample of the images, seeded, from several starts:

1. `guess`: a model says what an image costs in the best of company: in a padded batch, its slot; in
   a strip of images of about its height or width, that height times its length; among four in one
   slot, its own extents with its part of the gutters. The canvases that are cheapest together
   under this model are picked, one by one and then by exchange.
2. `refit`: the images are grouped for these canvases, which they may overflow at a price, and the
   canvases that are cheapest together for the groups are picked from what would hold each.

Packings of the sample decide between starts and stages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from anysize.errors import ConfigError, ShapeError
from anysize.geometry import Canvas, NetGeometry, Size, round_up
from anysize.planning.blocks import (
    MAX_CONTENT,
    NEVER,
    PASS_OVERHEAD,
    STRICT,
    Extents,
    Floats,
    Index,
    extents_of,
)
from anysize.planning.grouping import Blocks, Search, group, group_cost, nest
from anysize.planning.packing import (
    Plan,
    Step,
    cost_of,
    count_sizes,
    images_per_pass_options,
    pack,
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

_STARTS = ((1, 2, 4), (1, 2))
"""Images a slot that the canvases of a start may have."""

_PICKS = 3
"""Random starts of an exchange, beside the greedy one."""

_REFITTED = 2
"""Starts, the best ones, that are fitted to groups."""

_TURNS, _GROUPINGS = 3, 3
"""Of a fit: how often it groups the images anew, and how many groupings it picks canvases for."""

_REFIT_ROUNDS, _SCORE_ROUNDS, _MIN_ROUNDS = 450, 1_200, 30
"""Of matching, on `SAMPLE` images."""

_USED_ORDERS = 2
"""Epochs in which a canvas must meet an image; those that `plan_summary` packs."""

_SLOPES = (8.0, 60.0)
"""How dear it is to overflow a canvas, in the first and in the last turn of a fit."""

_MISFIT = 1.02
"""How much longer a strip must be than its images, which never add up exactly; from packings."""


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
    progress: Callable[[int, int], None] | None = None,
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
        progress: Called after every stage of the search with the stages done and their number.

    Raises:
        ConfigError: A limit is below 1, or there are no sizes.
        ShapeError: An image needs a canvas above `max_pixels_per_step`, or the largest images
            differ so much in shape that `max_canvases` do not fit them.
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
    _, canvases = min(_candidates(job, rng, progress))
    return replace(_used_only(job.plan_with(canvases), job), images_per_step=images_per_step)


def _used_only(plan: Plan, job: _Job) -> Plan:
    """The plan without canvases that no image meets, unless an image fits on no other one.

    Without them a packing may leave out one or two others; to repeat this until none is left takes
    2 to 3 s for 200 sizes, and gains nothing that a run would notice.
    """
    epochs = [_epoch(plan, job, seed) for seed in range(_USED_ORDERS)]
    used = {p.layout.canvas for step in itertools.chain(*epochs) for p in step.passes}
    return job.plan_with(_cover([c for c in plan.canvases if c in used], job))


def _epoch(plan: Plan, job: _Job, seed: int) -> list[Step]:
    """The images that the search looks at, packed in the order of a seed as `plan_summary` does."""
    order = np.random.default_rng(seed).permutation(len(job.sizes)).tolist()
    return pack(job.sizes, order, plan)


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

    def most_canvases(self, per_pass: int) -> int:
        """Canvases to pick: of more than a sample has groups, some would meet no image."""
        return min(self.max_canvases, len(self.samples[0]) // per_pass)

    def plan_with(self, canvases: Sequence[Canvas]) -> Plan:
        """The plan with these canvases, in a fixed order."""
        return replace(self.plan, canvases=tuple(sorted(canvases)))


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


def _candidates(
    job: _Job, rng: np.random.Generator, progress: Callable[[int, int], None] | None
) -> list[tuple[float, tuple[Canvas, ...]]]:
    """Costs and canvases from several starts; each holds every image."""
    mean = sum(s.pixels for s in job.sizes) / len(job.sizes)
    parts = images_per_pass_options(job.plan.images_per_step, mean, job.budget)[:2]
    num_guesses = len(parts) * len(_STARTS)
    stages = itertools.count(1)
    guesses: dict[tuple[int, tuple[Canvas, ...]], tuple[float, tuple[Canvas, ...]]] = {}

    def tell() -> None:
        if progress is not None:
            progress(next(stages), num_guesses + _REFITTED)

    for per_pass, contents in itertools.product(parts, _STARTS):
        canvases = _cover(_guess(per_pass, contents, job, rng), job)
        guesses[per_pass, canvases] = _score(canvases, per_pass, job)
        tell()
    found = list(guesses.values())
    for per_pass, canvases in sorted(guesses, key=guesses.__getitem__)[:_REFITTED]:
        refitted = _refit(canvases, per_pass, job, rng)
        found.append(_score(refitted, per_pass, job))
        tell()
    return found


def _score(
    canvases: Sequence[Canvas], per_pass: int, job: _Job
) -> tuple[float, tuple[Canvas, ...]]:
    """The cost of two packings, of unlike images where there are enough, and the canvases used."""
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
    used = {p.layout.canvas for passes in groups for p in passes}
    return sum(cost_of(passes) for passes in groups), _cover(sorted(used), job)


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
    picked = _pick(cost, job.most_canvases(per_pass), rng)
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


def _boxes(end_h: Floats, end_w: Floats, multiple: int) -> list[tuple[int, int]]:
    """Canvas extents for single images: the most frequent ones, and a grid over all."""
    each, counts = np.unique(
        -(-np.stack([end_h, end_w], axis=1).astype(np.int64) // multiple) * multiple,
        axis=0,
        return_counts=True,
    )
    frequent = each[np.argsort(-counts, kind="stable")[:150]]
    grid = itertools.product(_levels(end_h, 16, multiple), _levels(end_w, 16, multiple))
    return sorted({(h, w) for h, w in frequent.tolist()} | set(grid))


def _levels(ends: Floats, num: int, multiple: int) -> list[int]:
    quantiles = np.quantile(ends, np.linspace(0, 1, num), method="higher")
    return sorted({_up(q, multiple) for q in quantiles.tolist()})


def _up(extent: float, multiple: int) -> int:
    return round_up(int(np.ceil(extent)), multiple)


def _pick(cost: Floats, num: int, rng: np.random.Generator) -> list[int]:
    """At most `num` rows of a cost that are cheapest together, each column by its cheapest row."""
    greedy: list[int] = []
    best = np.full(cost.shape[1], NEVER, np.float32)
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


def _refit(
    start: tuple[Canvas, ...], per_pass: int, job: _Job, rng: np.random.Generator
) -> tuple[Canvas, ...]:
    """Groups the images, and picks the canvases that are cheapest together for these groups.

    Candidates are the canvases so far and, for each group, the smallest ones that hold it. At first
    groups may overflow their canvas at a price, so that canvases follow what nearly fits.
    """
    canvases = start
    for turn, slope in enumerate(np.geomspace(*_SLOPES, _TURNS).tolist()):
        search = Search(canvases, job.plan.geometry, per_pass, slope)
        levels_of = [
            nest(
                group(
                    job.samples[(turn + k) % len(job.samples)],
                    job.extents,
                    search,
                    job.rounds(_REFIT_ROUNDS),
                    rng,
                ),
                job.extents,
                search,
            )
            for k in range(_GROUPINGS)
        ]
        options = sorted(
            {c for levels in levels_of for c in _hulls(levels, per_pass, job.budget, job.multiple)}
            | set(canvases)
        )
        cost = np.concatenate(
            [[group_cost(levels, c, per_pass, STRICT) for c in options] for levels in levels_of],
            axis=1,
        )
        picked = _pick(np.minimum(cost, NEVER), job.most_canvases(per_pass), rng)
        canvases = _cover([options[i] for i in picked], job)
    return canvases


def _hulls(levels: Sequence[Blocks], per_pass: int, budget: int, multiple: int) -> set[Canvas]:
    """For each group and each number of images a slot, the smallest canvas that holds the group."""
    found: set[Canvas] = set()
    for blocks in levels:
        if blocks.num_images > MAX_CONTENT or per_pass % blocks.num_images:
            continue
        slots = per_pass // blocks.num_images
        ends = np.array([(o[1], o[3]) for o in blocks.options], np.int64)
        ends = ends.reshape(len(blocks.options), 2, -1, slots).max(axis=3)
        ends = -(-ends // multiple) * multiple
        best = ends.prod(axis=1).argmin(axis=0)
        for height, width in ends[best, :, np.arange(len(best))].tolist():
            if slots * height * width <= budget:
                found.add(Canvas(slots, height, width))
    return found
