"""Step times in, figures out: held against values that were worked out by hand."""

import math

import pytest

from anysize.bench.summary import (
    BATCH_1_ALL,
    BATCH_1_ONE,
    MOSAIC,
    MOSAIC_FLOAT32,
    MOSAIC_ONE,
    PADDED,
    PLAIN_ALL,
    PLAIN_ONE,
    TF_SLIM,
    TUNED_ALL,
    TUNED_ONE,
    UNMASKED,
    BenchError,
    Measured,
    StepTime,
    ratios_by_round,
    summarise_arm,
    summarise_ratios,
)


def times(arm, *steps):
    """Steps of one megapixel: (round, seconds), or (round, seconds, what differs)."""
    return [
        StepTime(
            **{
                "arm": arm,
                "number": number,
                "round": step[0],
                "again_of": None,
                "seconds": step[1],
                "valid_pixels": 1_000_000,
                "computed_pixels": 1_000_000,
                "first_visit": False,
                **(step[2] if len(step) > 2 else {}),
            }
        )
        for number, step in enumerate(steps)
    ]


def measured(*steps, epoch_pixels=10_000_000, mosaic_pixels=None):
    return Measured(
        steps=[s for many in steps for s in many],
        epoch_pixels=epoch_pixels,
        mosaic_pixels=mosaic_pixels or epoch_pixels,
        flops_a_pixel=700_000.0,
        limits=[2e12, 1e12],
    )


FIRST = {"first_visit": True}


def test_an_arms_rate_is_taken_round_by_round():
    half = {"valid_pixels": 500_000}
    m = measured(times("a", (None, 9.0, FIRST), (0, 1.0), (0, 2.0, half), (1, 4.0), (None, 8.0)))
    # Round 0: 3 s for 1.5 megapixels.
    assert m.rates("a") == [2.0, 4.0]
    summary = summarise_arm(m, "a")
    assert summary["seconds_per_valid_megapixel"] == {"median": 3.0, "min": 2.0, "max": 4.0}
    assert summary["first_visit_s"] == 9.0
    assert summary["repeat_visit_s"] == 3.0
    assert summary["num_steps"] == 5


def test_waste_counts_what_the_rounds_computed_beyond_the_images():
    larger = {"computed_pixels": 1_500_000}
    first = {"computed_pixels": 90_000_000}
    m = measured(times("a", (None, 1.0, first), (0, 1.0), (0, 1.0, larger)))
    assert summarise_arm(m, "a")["waste"] == pytest.approx(0.2)


def test_an_arm_without_rounds_is_named():
    with pytest.raises(BenchError, match='"a" has no step that counts'):
        summarise_arm(measured(times("a", (None, 1.0))), "a")


def test_ratios_are_those_of_the_arms_they_speak_of():
    rates = {
        PLAIN_ONE: 1.0,
        PLAIN_ALL: 3.0,
        BATCH_1_ONE: 2.0,
        BATCH_1_ALL: 5.0,
        TUNED_ONE: 1.0,
        TUNED_ALL: 5.0,
        PADDED: 1.5,
        MOSAIC: 1.25,
        MOSAIC_ONE: 0.5,
        UNMASKED: 1.0,
        TF_SLIM: 10.0,
        MOSAIC_FLOAT32: 4.0,
    }
    found = summarise_ratios(measured(*(times(arm, (0, s), (1, s)) for arm, s in rates.items())))
    assert found.pop("spread").keys() == found.keys()
    assert found == pytest.approx(
        {
            "shape_tax_exact": 1.25,
            "shape_tax_exact_ten_epochs": 1.25,
            "shape_tax_exact_first_epoch": 1.25,
            "shape_tax_mosaic": 2.5,
            "shape_tax_plain": 3.0,
            "shape_tax_plain_batch_1": 2.5,
            "shape_tax_plain_tuned": 5.0,
            "speedup_over_plain": 4.0,
            "speedup_over_plain_accumulated": 2.4,
            "speedup_over_plain_tuned": 4.0,
            "speedup_over_padding": 1.2,
            "exactness_cost": 0.25,
            # 0.7 of 1.25 seconds a megapixel at 1 TFLOP/s, and half of it at 2: 0.56, 0.28.
            "share_of_conv_limit": 0.42,
            "speedup_over_tf_slim": 8.0,
            "speedup_over_tf_slim_float32": 2.5,
            "speedup_of_plain_over_tf_slim": 10 / 3,
        }
    )


def test_a_ratio_is_the_median_of_rounds_and_not_a_ratio_of_medians():
    # A slow minute in round 1 falls on both sides.
    one = times(PLAIN_ONE, (0, 1.0), (1, 10.0), (2, 1.0))
    mosaic = times(MOSAIC, (0, 1.0), (1, 30.0), (2, 9.0))
    found = summarise_ratios(measured(one, mosaic))
    assert found["shape_tax_exact"] == 3.0
    assert found["spread"]["shape_tax_exact"] == {"min": 1.0, "max": 9.0}


def test_first_visits_are_part_of_the_first_epoch_and_a_tenth_of_one_in_ten():
    one = times(PLAIN_ONE, (None, 3.0, FIRST), (0, 1.0))
    mosaic = times(MOSAIC, (None, 4.0, FIRST), (None, 4.0, FIRST), (None, 99.0), (0, 2.0))
    found = ratios_by_round(measured(one, mosaic))
    # Ten megapixels an epoch; above the rate the first visits took 2 and 4 seconds.
    assert found["shape_tax_exact_first_epoch"] == [pytest.approx(24 / 12)]
    assert found["shape_tax_exact_ten_epochs"] == [pytest.approx(204 / 102)]
    dearer = times(MOSAIC, (None, 44.0, FIRST), (0, 2.0))
    found = ratios_by_round(measured(one, dearer))
    assert found["shape_tax_exact_first_epoch"] == [pytest.approx(62 / 12)]
    assert found["shape_tax_exact_ten_epochs"] == [pytest.approx(242 / 102)]


def test_an_epoch_has_the_waste_of_all_its_steps_not_that_of_the_measured_ones():
    one = times(PLAIN_ONE, (0, 1.0))
    mosaic = times(MOSAIC, (0, 3.0, {"computed_pixels": 1_500_000}))
    found = ratios_by_round(measured(one, mosaic, mosaic_pixels=12_000_000))
    # 2 s a computed megapixel; 12 of them an epoch, beside 10 on one size.
    assert found["shape_tax_exact_ten_epochs"] == [pytest.approx(2.4)]
    assert found["shape_tax_exact"] == [3.0]


def test_a_first_step_is_held_against_its_repeat_where_the_canvas_was_known():
    steps = times(
        MOSAIC,
        (0, 3.0),
        (None, 2.0, {"again_of": 0}),
        (0, 99.0, FIRST),
        (None, 2.0, {"again_of": 2}),
    )
    assert ratios_by_round(measured(steps))["first_over_second_step"] == [1.5]


def test_ratios_of_arms_that_were_not_there_are_left_out():
    found = summarise_ratios(measured(times(PLAIN_ONE, (0, 1.0)), times(MOSAIC, (0, 1.0))))
    assert "speedup_over_tf_slim" not in found
    assert "speedup_over_padding" not in found
    assert all(math.isfinite(v) for k, v in found.items() if k != "spread")
