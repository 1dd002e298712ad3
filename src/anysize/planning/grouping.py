"""Grouping images that share a canvas: in pairs, those in pairs again, up to the images of a pass.

At each level a block is matched with another at the cost of the part of a canvas that both will
take up. With four images a pass, for example, a canvas of four slots is a padded batch, and a match
of two images costs two slots; a canvas of two slots has a strip of two in each; a canvas of one
slot has all four in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from anysize.geometry import Canvas, NetGeometry
from anysize.planning.blocks import (
    MAX_CONTENT,
    NEVER,
    STRICT,
    Extents,
    Floats,
    Index,
    content_of,
    joined,
    shelf_cost,
    slot_cost,
    take,
)
from anysize.planning.matching import anneal, falling

_STAGES = ((10.0, 0.02), (40.0, 0.01), (STRICT, 0.01))
"""Slope and temperature of each stage of a matching, this as a part of a usual cost.

At first little is forbidden, which leads to what nearly fits; in the end, what overflows never is.
"""


@dataclass(frozen=True, slots=True)
class Search:
    """What images are grouped for.

    Attributes:
        canvases: To choose from.
        geometry: Of the net.
        per_pass: Images that share a canvas.
        slope: How strictly they must fit; see `anysize.planning.blocks.slot_cost`.
    """

    canvases: tuple[Canvas, ...]
    geometry: NetGeometry
    per_pass: int
    slope: float = STRICT


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of `num_images` images each, in an array of any shape.

    Attributes:
        num_images: Images a block.
        options: The ways to arrange a block in a slot.
        shares: [canvases, ...]: what a block costs on each canvas; `NEVER` where its place in a
            slot is not known before it is matched further.
    """

    num_images: int
    options: tuple[Extents, ...]
    shares: Floats

    def at(self, index: Index) -> Blocks:
        """The blocks at an index array, in its shape."""
        options = tuple(take(o, index) for o in self.options)
        return Blocks(self.num_images, options, self.shares[:, index])


def group(
    images: Index, extents: Extents, search: Search, num_rounds: int, rng: np.random.Generator
) -> Index:
    """Groups images so that each group shares a canvas and little of it is wasted.

    Args:
        images: Indices; their number is a multiple of `search.per_pass`.
        extents: Of all images.
        search: The canvases, and how strictly groups must fit them.
        num_rounds: Of each matching.
        rng: Source of all chance.

    Returns:
        [groups, images a pass] indices; those that share a slot follow each other.
    """
    blocks = images[:, None]
    while search.per_pass % (2 * blocks.shape[1]) == 0:
        blocks = _match(blocks, extents, search, num_rounds, rng)
    shares = nest(blocks, extents, search)[-1].shares
    # What is left is an odd number of blocks a pass: neighbours in cost on the same canvas.
    likes = np.lexsort((shares.min(axis=0), shares.argmin(axis=0)))
    return blocks[likes].reshape(-1, search.per_pass)


def nest(blocks: Index, extents: Extents, search: Search) -> list[Blocks]:
    """The blocks of 1, 2, 4, ... images that make up [blocks, images], as far as these halve."""
    levels = [_singles(take(extents, blocks.reshape(-1)), search)]
    num_images = int(blocks.shape[1])
    while num_images % (2 * levels[-1].num_images) == 0:
        index: Index = np.arange(len(blocks) * num_images // levels[-1].num_images)
        levels.append(_merge(levels[-1].at(index[0::2]), levels[-1].at(index[1::2]), search))
    return levels


def group_cost(levels: Sequence[Blocks], canvas: Canvas, per_pass: int, slope: float) -> Floats:
    """[groups]: what one canvas costs for groups of `per_pass` images, given as nested blocks."""
    content = content_of(canvas, per_pass)
    if content > MAX_CONTENT or per_pass % content:
        return np.full(len(levels[0].options[0][0]) // per_pass, NEVER)
    cost = slot_cost(levels[content.bit_length() - 1].options, canvas, slope)
    return cost.reshape(-1, per_pass // content).mean(axis=1)


def cost_alone(levels: Sequence[Blocks], search: Search) -> Floats:
    """[blocks]: what the largest of nested blocks cost if they share no canvas with others."""
    alone: Floats | None = None
    for blocks in levels:
        for canvas in search.canvases:
            cost = group_cost(levels, canvas, blocks.num_images, search.slope)
            alone = cost if alone is None else np.minimum(alone, cost)
        if blocks is not levels[-1] and alone is not None:
            alone = alone.reshape(-1, 2).sum(axis=1)
    assert alone is not None
    return alone


def _match(
    blocks: Index, extents: Extents, search: Search, num_rounds: int, rng: np.random.Generator
) -> Index:
    """[blocks, images] to [half as many, twice the images]."""
    cost, _, likes = _match_costs(blocks, extents, replace(search, slope=_STAGES[0][0]))
    # Those that like the same canvas are a good start; equals stay in their random order.
    order = np.argsort(likes, kind="stable")
    first, second = order[0::2], order[1::2]
    usual = float(np.median(cost.min(axis=0)))
    turns = np.zeros_like(cost, np.intp)
    for slope, heat in _STAGES:
        cost, turns, _ = _match_costs(
            blocks, extents, replace(search, slope=min(slope, search.slope))
        )
        temperatures = falling(heat * usual, num_rounds // len(_STAGES))
        first, second = anneal(cost, first, second, temperatures, rng)
    return _pair_up(blocks, first, second, turns[first, second])


def _match_costs(blocks: Index, extents: Extents, search: Search) -> tuple[Floats, Index, Index]:
    """The least cost of matching any two blocks.

    Returns:
        [blocks, blocks]: the cost; at worst, each block goes on a canvas of its own.
        [blocks, blocks]: how the halves of the two are best exchanged, see `_pair_up`.
        [blocks]: the canvas on which each block finds its cheapest match.
    """
    levels = nest(blocks, extents, search)
    one, two = np.arange(len(blocks))[:, None], np.arange(len(blocks))[None, :]
    ways = [_merge(levels[-1].at(one), levels[-1].at(two), search).shares]
    if len(levels) > 1:
        half = levels[-2]
        for partner, other in ((2 * two, 2 * two + 1), (2 * two + 1, 2 * two)):
            left = _merge(half.at(2 * one), half.at(partner), search)
            right = _merge(half.at(2 * one + 1), half.at(other), search)
            ways.append(_merge(left, right, search).shares)
    costs = np.stack([w.min(axis=0) for w in ways])
    alone = cost_alone(levels, search)
    apart = alone[:, None] + alone
    cost = np.minimum(costs.min(axis=0), apart)
    turns = np.where(apart <= cost, 0, costs.argmin(axis=0))
    return cost, turns, ways[0].min(axis=2).argmin(axis=0)


def _pair_up(blocks: Index, first: Index, second: Index, turns: Index) -> Index:
    """Puts two blocks after each other.

    Their halves stay together (0), or the first half of one goes with the first (1) or the second
    half (2) of the other.
    """
    half = blocks.shape[1] // 2
    a, b = blocks[first], blocks[second]
    straight = np.concatenate([a, b], axis=1)
    if half == 0:
        return straight
    a1, a2, b1, b2 = a[:, :half], a[:, half:], b[:, :half], b[:, half:]
    ways = np.stack(
        [
            straight,
            np.concatenate([a1, b1, a2, b2], axis=1),
            np.concatenate([a1, b2, a2, b1], axis=1),
        ]
    )
    return ways[turns, np.arange(len(turns))]


def _singles(extents: Extents, search: Search) -> Blocks:
    never = np.full(len(extents[0]), NEVER, np.float32)
    part = np.float32(1 / search.per_pass)
    shares = [
        slot_cost([extents], c, search.slope) * part
        if content_of(c, search.per_pass) == 1
        else never
        for c in search.canvases
    ]
    return Blocks(1, (extents,), np.stack(shares))


def _merge(a: Blocks, b: Blocks, search: Search) -> Blocks:
    """Two blocks matched; their arrays broadcast."""
    num_images = 2 * a.num_images
    part = np.float32(num_images / search.per_pass)
    options = joined(a.options, b.options) if num_images <= MAX_CONTENT else ()
    shape = np.broadcast(a.shares[0], b.shares[0]).shape
    shares = np.full((len(search.canvases), *shape), NEVER, np.float32)
    for k, canvas in enumerate(search.canvases):
        content = content_of(canvas, search.per_pass)
        if content <= a.num_images:
            shares[k] = a.shares[k] + b.shares[k]
        elif content == num_images and options:
            shares[k] = slot_cost(options, canvas, search.slope) * part
        elif content == 2 * num_images and content <= MAX_CONTENT:
            shares[k] = shelf_cost(options, canvas, search.slope, search.geometry) * part
    return Blocks(num_images, options, shares)
