"""The arms: a policy, a set of sizes, and what a step of them is.

A step is a sequence of layouts whose gradients are added up: one tensor each, with its images. So
an image at its own size is a layout without padding, a usual batch is one of several images, and
the rest is a matter of how layouts are chosen. No net is needed here.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from anysize.bench.sizes import SizeSets
from anysize.bench.summary import EPOCHS
from anysize.data.batching import epoch_steps
from anysize.geometry import Canvas, Layout, NetGeometry, Placement, Size, padded_batch
from anysize.planning.canvases import Plan, plan_canvases, worthwhile_canvases
from anysize.planning.packing import to_passes

if TYPE_CHECKING:
    from anysize.device import Precision

NUM_CLASSES = 15
LEARNING_RATE, MOMENTUM = 1e-4, 0.9
"""Of every arm."""

SizeSet = Literal["one", "ten", "all"]
Policy = Literal[
    "plain",
    "plain batch 1",
    "plain tuned",
    "compile dynamic",
    "pad to batch maximum",
    "exact canvas",
    "mosaic",
    "mosaic without masks",
    "tf_slim",
]
ON_CANVASES = ("exact canvas", "mosaic", "mosaic without masks")
"""Policies of the product's own net."""

_SAID = {"one": "one size", "ten": "ten sizes", "all": "all sizes"}

OptimiserStep: TypeAlias = tuple[Layout, ...]
Turn: TypeAlias = tuple[OptimiserStep, ...]
"""What an arm does at its turn: one step, or one an image at batch size 1."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A policy on a set of sizes."""

    policy: Policy
    sizes: SizeSet
    precision: Precision
    is_twin: bool = False
    """Of an arm in another precision, which its name then says."""

    @property
    def name(self) -> str:
        """As people read it."""
        twin = f" {self.precision}" if self.is_twin else ""
        return f"{self.policy}{twin}, {_SAID[self.sizes]}"


def arms_of(precision: Precision, *, full: bool, tuning: bool, peers: bool) -> list[Arm]:
    """The arms that take turns, in their order; torch.compile is none of them.

    Args:
        precision: Of the run.
        full: With ten sizes for the policies that plan or pad.
        tuning: The device tunes its kernels where it is told to.
        peers: With TF-Slim, which computes in float32.
    """
    wanted: list[tuple[Policy, SizeSet]] = [
        ("plain", "one"),
        ("plain", "ten"),
        ("plain", "all"),
        ("plain batch 1", "one"),
        ("plain batch 1", "all"),
        ("pad to batch maximum", "all"),
        ("exact canvas", "all"),
        ("mosaic", "one"),
        ("mosaic", "all"),
        ("mosaic without masks", "all"),
    ]
    arms = [Arm(policy, sizes, precision) for policy, sizes in wanted]
    ten: list[Policy] = ["pad to batch maximum", "exact canvas", "mosaic"] if full else []
    arms += [Arm(policy, "ten", precision) for policy in ten]
    tuned: list[SizeSet] = ["one", "ten", "all"] if tuning else []
    arms += [Arm("plain tuned", sizes, precision) for sizes in tuned]
    if peers:
        arms += [Arm("tf_slim", "one", "float32"), Arm("tf_slim", "all", "float32")]
        if precision != "float32":
            arms.append(Arm("mosaic", "all", "float32", is_twin=True))
    return arms


@dataclass(frozen=True, slots=True)
class Work:
    """What an arm does.

    Attributes:
        visits: Before the rounds: the first visits of shapes that will come again, or a warm-up on
            the one size where most shapes are new each time.
        turns: In the rounds, by number; turn i has as many images on every arm.
    """

    visits: tuple[Turn, ...]
    turns: tuple[Turn, ...]


class WorkPlan:
    """Plans canvases once, and says what each arm does.

    Attributes:
        num_turns: In an epoch.
        plans: Of the sets of sizes: the canvases of the mosaics.
    """

    def __init__(
        self,
        sets: SizeSets,
        geometry: NetGeometry,
        images_per_step: int,
        *,
        full: bool,
        on_gpu: bool,
    ) -> None:
        self._on_gpu = on_gpu
        self.sets, self.geometry, self.images_per_step = sets, geometry, images_per_step
        self.num_turns = len(sets.all) // images_per_step
        repeated = itertools.islice(itertools.cycle(sets.ten), len(sets.all))
        images: dict[SizeSet, Sequence[Size]] = {"all": sets.all, "ten": tuple(repeated)}
        planned: tuple[SizeSet, ...] = ("all", "ten") if full else ("all",)
        self.images = images
        self.plans: dict[SizeSet, Plan] = {
            name: self._plan(images[name], images_per_step) for name in planned
        }
        # Of single images: the same canvases as at one image a step.
        self._singles: dict[SizeSet, Plan] = {name: self._plan(images[name], 1) for name in planned}
        self._orders = {name: self._order(name) for name in images}

    def work(self, policy: Policy, sizes: SizeSet) -> Work:
        """What an arm does in an epoch, and before."""
        if sizes == "one":
            turn = self._turn(policy, sizes, [self.sets.one] * self.images_per_step)
            return Work((turn,), (turn,) * self.num_turns)
        turns = tuple(self._turns(policy, sizes))
        if policy in ON_CANVASES:
            return Work(_first_visits((*self._turns(policy, sizes, epoch=0), *turns)), turns)
        if sizes == "ten" and policy != "pad to batch maximum":
            return Work(_first_visits(turns), turns)
        warm_up = self._turn(policy, "one", [self.sets.one] * self.images_per_step)
        return Work((warm_up[:1],), turns)

    def _turns(self, policy: Policy, sizes: SizeSet, epoch: int = 1) -> list[Turn]:
        images = self.images[sizes]
        if policy in ("mosaic", "mosaic without masks"):
            return [(step,) for step in self._mosaics(sizes, epoch)]
        order = self._orders[sizes]
        if policy == "pad to batch maximum":
            # Batches as they come: the planner's company would suit this policy too well.
            order = np.random.default_rng(2).permutation(len(images)).tolist()
        each = self.images_per_step
        return [
            self._turn(policy, sizes, [images[i] for i in order[t * each : (t + 1) * each]])
            for t in range(self.num_turns)
        ]

    def _turn(self, policy: Policy, sizes: SizeSet, images: Sequence[Size]) -> Turn:
        """A turn of any policy but the mosaics of many sizes."""
        match policy:
            case "plain batch 1" | "tf_slim" | "compile dynamic":
                return tuple((batch([size]),) for size in images)
            case "pad to batch maximum":
                return ((batch(images),),)
            case "plain" | "plain tuned" if sizes == "one":
                return ((batch(images),),)
            case "plain" | "plain tuned":
                return (tuple(batch([size]) for size in images),)
            case _ if sizes == "one":
                height, width = (self.geometry.canvas_extent(e) for e in images[0])
                canvas = Canvas(len(images), height, width)
                return ((padded_batch(list(images), canvas, self.geometry),),)
            case _:
                passes = [to_passes([i], images, self._singles[sizes]) for i in range(len(images))]
                return (tuple(p.layout for (p,) in passes),)

    def epoch_computed_pixels(self) -> int:
        """Canvas pixels of an epoch of the mosaics over all sizes, to the last image."""
        steps = epoch_steps(self.plans["all"], self.images["all"], seed=0, epoch=1)
        return sum(p.layout.canvas.pixels for step in steps for p in step.passes)

    def _mosaics(self, sizes: SizeSet, epoch: int) -> list[OptimiserStep]:
        return [
            tuple(p.layout for p in step.passes)
            for step in epoch_steps(self.plans[sizes], self.images[sizes], seed=0, epoch=epoch)
            if step.num_images == self.images_per_step
        ]

    def _order(self, sizes: SizeSet) -> list[int]:
        """Of the images of the other arms: that of the mosaics, so that all have the same turns."""
        if sizes not in self.plans:
            return np.random.default_rng(1).permutation(len(self.images[sizes])).tolist()
        steps = epoch_steps(self.plans[sizes], self.images[sizes], seed=0, epoch=1)
        return [i for step in steps for p in step.passes for i in p.images]

    def _plan(self, images: Sequence[Size], images_per_step: int) -> Plan:
        """The product's own plan, with a budget that binds no more than the other arms' none."""
        largest = max(
            self.geometry.canvas_extent(s.height) * self.geometry.canvas_extent(s.width)
            for s in images
        )
        return plan_canvases(
            images,
            geometry=self.geometry,
            images_per_step=images_per_step,
            max_pixels_per_step=2 * images_per_step * largest,
            max_canvases=worthwhile_canvases(images, epochs=EPOCHS, on_gpu=self._on_gpu),
        )


def batch(sizes: Sequence[Size]) -> Layout:
    """Images in the upper left corners of a tensor of the largest height and width."""
    canvas = Canvas(len(sizes), max(s.height for s in sizes), max(s.width for s in sizes))
    return Layout(canvas, tuple(Placement(i, 0, 0, *size) for i, size in enumerate(sizes)))


def shapes_of(turn: Turn) -> set[Canvas]:
    """The shapes of a turn's tensors."""
    return {layout.canvas for step in turn for layout in step}


def _first_visits(turns: Sequence[Turn]) -> tuple[Turn, ...]:
    """The turns that bring a shape which none before brought."""
    seen: set[Canvas] = set()
    kept: list[Turn] = []
    for turn in turns:
        if shapes_of(turn) - seen:
            kept.append(turn)
            seen |= shapes_of(turn)
    return tuple(kept)
