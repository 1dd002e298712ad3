"""The result in words and columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ARM_COLUMNS = (
    "arm",
    "s per valid megapixel",
    "least to most",
    "first visit, s",
    "repeat, s",
    "waste",
    "peak memory",
)
RATIO_COLUMNS = ("ratio", "median", "least to most")

MEANINGS = {
    "shape_tax_exact": "mosaic on all sizes / plain on one size",
    "shape_tax_exact_ten_epochs": "the same over ten epochs, first visits included",
    "shape_tax_exact_first_epoch": "the same in the first epoch alone",
    "shape_tax_mosaic": "mosaic on all sizes / mosaic on one size",
    "shape_tax_plain": "plain on all sizes / plain on one size",
    "shape_tax_plain_batch_1": "the same, plain at one image a step",
    "shape_tax_plain_tuned": "plain tuned on all sizes / plain tuned on one size",
    "speedup_over_plain": "plain batch 1 / mosaic, on all sizes",
    "speedup_over_plain_accumulated": "plain / mosaic, on all sizes",
    "speedup_over_plain_tuned": "plain tuned / mosaic, on all sizes",
    "speedup_over_padding": "pad to batch maximum / mosaic, on all sizes",
    "exactness_cost": "mosaic / mosaic without masks - 1",
    "share_of_conv_limit": "mosaic's operations a second / a convolution's",
    "first_over_second_step": "mosaic: first step on new sizes / the same again",
    "speedup_over_tf_slim": "TF-Slim in float32 / mosaic",
    "speedup_over_tf_slim_float32": "TF-Slim / mosaic, both in float32",
    "speedup_of_plain_over_tf_slim": "TF-Slim in float32 / plain",
}


def arm_rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A row an arm, as `ARM_COLUMNS` says."""
    rows: list[tuple[str, ...]] = []
    for arm in result["arms"]:
        rate = arm["seconds_per_valid_megapixel"]
        rows.append(
            (
                arm["name"],
                f"{rate['median']:.3g}",
                f"{rate['min']:.3g} to {rate['max']:.3g}",
                _number(arm["first_visit_s"]),
                _number(arm["repeat_visit_s"]),
                f"{arm['waste']:.1%}",
                f"{arm['peak_rss_bytes'] / 1e6:,.0f} MB",
            )
        )
    return rows


def ratio_rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A row a ratio, as `RATIO_COLUMNS` says."""
    ratios = result["ratios"]
    return [
        (
            f"{name} ({meaning})",
            f"{ratios[name]:.3f}",
            f"{ratios['spread'][name]['min']:.3f} to {ratios['spread'][name]['max']:.3f}",
        )
        for name, meaning in MEANINGS.items()
        if name in ratios
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
