"""From step times to what they say; pure, so that each figure can be checked by hand.

A ratio is taken within a round, whose arms took turns step by step, so that a slow minute of the
machine falls on both sides; the figure is the median of the rounds' ratios.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from anysize.errors import AnysizeError

EPOCHS = 10
"""That first visits are spread over: in `shape_tax_exact_ten_epochs`, and by the planner."""

PLAIN_ONE, PLAIN_ALL = "plain, one size", "plain, all sizes"
TUNED_ONE, TUNED_ALL = "plain tuned, one size", "plain tuned, all sizes"
BATCH_1_ONE, BATCH_1_ALL = "plain batch 1, one size", "plain batch 1, all sizes"
PADDED = "pad to batch maximum, all sizes"
MOSAIC, UNMASKED = "mosaic, all sizes", "mosaic without masks, all sizes"
MOSAIC_ONE = "mosaic, one size"
MOSAIC_FLOAT32 = "mosaic float32, all sizes"
TF_SLIM = "tf_slim, all sizes"


class BenchError(AnysizeError):
    """The benchmark cannot go on; the message names the arm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """One optimiser step of an arm.

    Attributes:
        arm: Its name.
        number: Of the step within its arm, from 0, in the order in which they ran.
        round: That it counts in, from 0; None for steps before the rounds, and for repeats.
        again_of: Number of the arm's step before, where this one repeats it; None for others.
        seconds: That it took.
        valid_pixels: Of its images.
        computed_pixels: Of the tensors that held them.
        first_visit: The arm had not met the shape of one of these tensors before.
    """

    arm: str
    number: int
    round: int | None
    again_of: int | None
    seconds: float
    valid_pixels: int
    computed_pixels: int
    first_visit: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All that the experiment measured.

    Attributes:
        steps: Of all arms.
        epoch_pixels: Valid pixels of an epoch over all sizes.
        mosaic_pixels: Computed pixels of an epoch of the mosaics, of which rounds are a part only.
        flops_a_pixel: Operations of a training step, a valid pixel.
        limits: What a convolution reached in each round, operations a second.
    """

    steps: Sequence[StepTime]
    epoch_pixels: int
    mosaic_pixels: int
    flops_a_pixel: float
    limits: Sequence[float]
    by_arm: dict[str, list[StepTime]] = field(init=False)

    def __post_init__(self) -> None:
        grouped: dict[str, list[StepTime]] = {}
        for step in self.steps:
            grouped.setdefault(step.arm, []).append(step)
        object.__setattr__(self, "by_arm", grouped)

    def rates(self, arm: str, *, computed: bool = False) -> list[float]:
        """Seconds per valid megapixel in each round; empty for an arm that was not there.

        Args:
            arm: Its name.
            computed: Per computed megapixel instead.
        """
        seconds: dict[int, float] = {}
        pixels: dict[int, int] = {}
        for s in self.by_arm.get(arm, ()):
            if s.round is not None:
                seconds[s.round] = seconds.get(s.round, 0.0) + s.seconds
                counted = s.computed_pixels if computed else s.valid_pixels
                pixels[s.round] = pixels.get(s.round, 0) + counted
        return [1e6 * seconds[r] / pixels[r] for r in sorted(seconds)]

    def epochs_s(self, arm: str) -> list[float]:
        """For each round: what an epoch takes at its rate, with the waste of the whole epoch."""
        if arm == MOSAIC:
            return [r * self.mosaic_pixels / 1e6 for r in self.rates(arm, computed=True)]
        return [rate * self.epoch_pixels / 1e6 for rate in self.rates(arm)]

    def first_visits_s(self, arm: str) -> list[float]:
        """For each round: what the first visits before the rounds took above the round's rate."""
        visits = [s for s in self.by_arm.get(arm, ()) if s.round is None and s.first_visit]
        return [
            sum(s.seconds - rate * s.valid_pixels / 1e6 for s in visits) for rate in self.rates(arm)
        ]


def summarise_arm(measured: Measured, arm: str) -> dict[str, Any]:
    """What `arms[]` of the JSON says of an arm's times.

    Raises:
        BenchError: No step of the arm counts.
    """
    steps, rates = measured.by_arm.get(arm, []), measured.rates(arm)
    if not rates:
        raise BenchError(f'The arm "{arm}" has no step that counts. Raise --rounds or --images.')
    counted = [s for s in steps if s.round is not None]
    first = [s.seconds for s in steps if s.first_visit]
    repeats = [s.seconds for s in steps if not s.first_visit]
    computed = sum(s.computed_pixels for s in counted)
    return {
        "seconds_per_valid_megapixel": {
            "median": statistics.median(rates),
            "min": min(rates),
            "max": max(rates),
        },
        "first_visit_s": statistics.median(first) if first else None,
        "repeat_visit_s": statistics.median(repeats) if repeats else None,
        "waste": 1 - sum(s.valid_pixels for s in counted) / computed,
        "rounds": rates,
        "num_steps": len(steps),
    }


def ratios_by_round(measured: Measured) -> dict[str, list[float]]:
    """Every ratio, round by round; those of arms that were not there are left out."""
    found = {
        "shape_tax_exact": _over(measured, MOSAIC, PLAIN_ONE),
        "shape_tax_exact_ten_epochs": _epochs_over(measured, MOSAIC, PLAIN_ONE, EPOCHS),
        "shape_tax_exact_first_epoch": _epochs_over(measured, MOSAIC, PLAIN_ONE, 1),
        "shape_tax_mosaic": _over(measured, MOSAIC, MOSAIC_ONE),
        "shape_tax_plain": _over(measured, PLAIN_ALL, PLAIN_ONE),
        "shape_tax_plain_batch_1": _over(measured, BATCH_1_ALL, BATCH_1_ONE),
        "shape_tax_plain_tuned": _over(measured, TUNED_ALL, TUNED_ONE),
        "speedup_over_plain": _over(measured, BATCH_1_ALL, MOSAIC),
        "speedup_over_plain_accumulated": _over(measured, PLAIN_ALL, MOSAIC),
        "speedup_over_plain_tuned": _over(measured, TUNED_ALL, MOSAIC),
        "speedup_over_padding": _over(measured, PADDED, MOSAIC),
        "exactness_cost": [r - 1 for r in _over(measured, MOSAIC, UNMASKED)],
        "share_of_conv_limit": [
            measured.flops_a_pixel * 1e6 / rate / limit
            for rate, limit in zip(measured.rates(MOSAIC), measured.limits, strict=False)
        ],
        "first_over_second_step": _first_over_second(measured.by_arm.get(MOSAIC, ())),
        "speedup_over_tf_slim": _over(measured, TF_SLIM, MOSAIC),
        "speedup_over_tf_slim_float32": _over(measured, TF_SLIM, MOSAIC_FLOAT32),
        "speedup_of_plain_over_tf_slim": _over(measured, TF_SLIM, PLAIN_ALL),
    }
    return {name: values for name, values in found.items() if values}


def summarise_ratios(measured: Measured) -> dict[str, Any]:
    """`ratios` of the JSON: a median each, and under `spread` the least and the largest."""
    found = ratios_by_round(measured)
    return {
        **{name: statistics.median(values) for name, values in found.items()},
        "spread": {name: {"min": min(v), "max": max(v)} for name, v in found.items()},
    }


def _over(measured: Measured, above: str, below: str) -> list[float]:
    pairs = zip(measured.rates(above), measured.rates(below), strict=False)
    return [a / b for a, b in pairs]


def _epochs_over(measured: Measured, above: str, below: str, num_epochs: int) -> list[float]:
    """Time of so many epochs, the first visits of the first one included."""

    def totals(arm: str) -> list[float]:
        pairs = zip(measured.first_visits_s(arm), measured.epochs_s(arm), strict=True)
        return [extra + num_epochs * epoch for extra, epoch in pairs]

    return [a / b for a, b in zip(totals(above), totals(below), strict=False)]


def _first_over_second(steps: Sequence[StepTime]) -> list[float]:
    """Of steps that were repeated, and whose canvases had been met before."""
    by_number = {s.number: s for s in steps}
    pairs = [(by_number[s.again_of], s) for s in steps if s.again_of is not None]
    return [first.seconds / again.seconds for first, again in pairs if not first.first_visit]
