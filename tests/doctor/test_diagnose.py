"""Recorded measurements in, findings out: no clock, no net."""

import dataclasses
import subprocess
import sys

import pytest

from anysize.doctor.diagnose import (
    Control,
    Measurements,
    StepTimes,
    Trial,
    describe,
    diagnose,
    estimate_epoch,
)

SETTINGS = {
    "plan.file": "",
    "plan.images_per_step": 4,
    "plan.max_canvases": 4,
    "model.activation_checkpointing": False,
    "train.precision": "bf16",
    "train.channels_last": True,
    "train.log_every": 10,
    "train.checkpoint_every": 100,
    "train.evaluate_every": 2,
    "train.loader_threads": 1,
    "train.prefetch_steps": 4,
}


def a_step(*, wait=0.01, first=False, new=0, pixels=1000, more=0.0, rest=0.02):
    """3.5 s for 1000 pixels, of which 0.5 s do not grow with them."""
    stages = {
        "wait for data": wait,
        "transfer": 0.0,
        "forward": pixels / 1000 + more,
        "backward": pixels / 500,
        "optimiser": 0.5,
        "logging": 0.01,
    }
    return StepTimes(
        first_of_epoch=first,
        new_canvases=new,
        computed_pixels=pixels,
        valid_pixels=pixels,
        wall_s=sum(stages.values()) + rest,
        stages=stages,
    )


def measured(*, settings=(), **changes):
    """A healthy run of 10 steps an epoch; a fault is one change."""
    healthy = Measurements(
        device="two cores",
        cores=2,
        threads=2,
        fewer_threads=1,
        settings={**SETTINGS, **dict(settings)},
        epochs=20,
        steps_per_epoch=10,
        epoch_images=40,
        epoch_computed_pixels=10_000,
        epoch_valid_pixels=9_800,
        num_canvases=4,
        steps=(a_step(wait=0.2, first=True), *[a_step() for _ in range(4)]),
        loader_s={"decode": 6.0, "transform": 3.0, "place": 1.0},
        decoded_pixels=9_800,
        loaded_pixels=9_800,
        packing_s=0.1,
        logging_s=0.01,
        checkpoint_s=1.0,
        evaluation_s=4.0,
        evaluated_images=5,
        val_images=10,
        controls=(Control(name="precision float32", ratios=(1.9, 2.0, 2.1)),),
        one_size_ratio=0.97,
        flops_a_pixel=1000.0,
        limit_flops_s=400_000.0,
    )
    return dataclasses.replace(healthy, **changes)


def only_finding(m):
    (finding,) = diagnose(m).verdict.findings
    return finding


def test_an_epoch_is_estimated_and_its_stages_add_up():
    epoch = estimate_epoch(measured())
    assert epoch.stages == pytest.approx(
        {
            "wait for data": 0.2 + 9 * 0.01,  # The first wait comes once an epoch.
            "transfer": 0.0,
            "forward": 10.0,
            "backward": 20.0,
            "optimiser": 5.0,
            "packing": 0.1,
            "first visits": 0.0,
            "logging": 0.01,
            "checkpoint": 0.1,  # 10 steps of 100
            "evaluation": 2.0,  # every other epoch
        }
    )
    assert epoch.unaccounted_s == pytest.approx(0.2)
    assert epoch.wall_s == pytest.approx(sum(epoch.stages.values()) + 0.2)
    found = diagnose(measured()).verdict
    assert sum(seconds for _, seconds in found.stages) == pytest.approx(found.wall_s)
    assert found.stages[-1] == ("unaccounted", pytest.approx(0.2))


def test_what_grows_with_canvases_goes_by_pixels_and_the_rest_by_steps():
    small = tuple(a_step(pixels=500) for _ in range(5))
    epoch = estimate_epoch(measured(steps=small))
    assert epoch.stages["forward"] == pytest.approx(10.0)
    assert epoch.stages["optimiser"] == pytest.approx(5.0)


def test_first_visits_are_kept_apart_and_shared_out_over_the_run():
    steps = (
        a_step(first=True, new=1, more=6.0),
        a_step(new=1, more=4.0),
        *[a_step() for _ in range(3)],
    )
    epoch = estimate_epoch(measured(steps=steps))
    assert epoch.stages["forward"] == pytest.approx(10.0)
    # 5 s more for each of 4 canvases, two of which were met, over 20 epochs.
    assert epoch.stages["first visits"] == pytest.approx(1.0)


def test_where_all_steps_are_first_visits_they_count_as_they_are():
    epoch = estimate_epoch(measured(steps=(a_step(new=1), a_step(new=1))))
    assert epoch.stages["first visits"] == 0.0
    assert epoch.stages["forward"] == pytest.approx(10.0)


def test_an_evaluation_at_the_end_only_is_shared_out_over_the_run():
    m = measured(settings={"train.evaluate_every": 0})
    assert estimate_epoch(m).stages["evaluation"] == pytest.approx(4.0 / 20)


def test_a_healthy_run_is_told_so_with_its_share_of_the_limit():
    diagnosis = diagnose(measured())
    assert diagnosis.verdict.healthy
    assert diagnosis.expected_s == diagnosis.verdict.wall_s
    # 1000 operations a pixel, 9,800 pixels, at most 400,000 a second: 24.5 s of 37.7.
    assert diagnosis.verdict.limit_share == pytest.approx(24.5 / 37.7)
    said = describe(measured(), diagnosis)
    assert "Healthy: nothing was found that costs time. It reaches 65%" in said
    assert "10 steps and 40 images" in said
    assert "from 5 steps" in said
    assert "5 of 10 images of the evaluation" in said
    assert "decode 6.00 s" in said
    assert "2.00 times as long with precision float32" in said


WAITING = (a_step(wait=2.0, first=True), *[a_step(wait=2.0) for _ in range(4)])


def trial(settings, ratios, *, pixels=10_000, num_canvases=4):
    return Trial(
        settings=settings,
        ratios=ratios,
        epoch_computed_pixels=pixels,
        num_canvases=num_canvases,
    )


def test_waiting_names_the_thread_count_that_was_measured_to_help():
    finding = only_finding(
        measured(
            steps=WAITING,
            trials=(
                trial((("train.prefetch_steps", 16),), (0.99, 0.97, 1.01)),
                trial((("train.loader_threads", 2),), (0.70, 0.75, 0.72)),
            ),
        )
    )
    assert finding.cause == "waiting for data"
    assert finding.cost_s == pytest.approx(20.0)
    assert finding.change == "train.loader_threads = 2"
    assert finding.settings == (("train.loader_threads", 2),)
    assert "decode 60%" in finding.evidence
    # 28% of the loop: 35 s of steps, 20 of waits, 0.2 unaccounted.
    assert finding.gain.startswith(f"{0.28 * 55.2:.2f} s an epoch (measured")


def test_a_trial_saves_no_more_than_the_waits():
    finding = only_finding(
        measured(steps=WAITING, trials=(trial((("train.loader_threads", 2),), (0.1, 0.1, 0.1)),))
    )
    assert finding.gain.startswith("20.00 s")


@pytest.mark.parametrize("ratios", [(), (0.97, 1.0, 1.02), (0.5, 1.1, 1.2, 0.4)])
def test_waiting_that_no_setting_helps_is_about_the_files(ratios):
    trials = (trial((("train.loader_threads", 2),), ratios),) if ratios else ()
    finding = only_finding(measured(steps=WAITING, trials=trials, decoded_pixels=98_000))
    assert finding.settings == ()
    assert "10.0 pixels are decoded for each" in finding.change
    assert ("did not help" in finding.evidence) == bool(ratios)


def test_few_waits_that_no_setting_helps_are_harmless():
    steps = (a_step(wait=0.3, first=True), *[a_step(wait=0.3) for _ in range(4)])
    found = diagnose(measured(steps=steps)).verdict
    assert found.healthy
    assert any(line.startswith("waiting for data: steps wait 7%") for line in found.harmless)


def test_a_run_of_which_something_was_not_measured_is_not_called_healthy():
    m = measured(not_measured="a step takes 60 s")
    diagnosis = diagnose(m)
    assert not diagnosis.verdict.healthy
    said = describe(m, diagnosis)
    assert "Not measured: a step takes 60 s." in said
    assert "Healthy" not in said


def test_more_threads_than_cores_are_called_so():
    control = Control(name="fewer threads", ratios=(0.5, 0.5, 0.5))
    finding = only_finding(measured(threads=6, fewer_threads=2, controls=(control,)))
    assert finding.cause == "more threads than cores"
    assert finding.change == "start with OMP_NUM_THREADS=2 (6 threads on 2 cores now)"


def test_waste_names_the_number_of_canvases_that_was_measured_to_help():
    m = measured(
        settings={"plan.max_canvases": 1},
        epoch_valid_pixels=4_000,
        num_canvases=1,
        trials=(
            trial(
                (("plan.max_canvases", 4),),
                (0.5, 0.48, 0.53),
                pixels=5_000,
                num_canvases=4,
            ),
        ),
    )
    finding = only_finding(m)
    assert finding.cause == "pixels that belong to no image"
    assert finding.cost_s == pytest.approx(0.5 * 35.49)
    assert finding.change == "plan.max_canvases = 4 (1 now): 20% wasted"
    assert "60% of the computed pixels" in finding.evidence
    assert "0.97 times the time" in finding.evidence


def test_first_visits_of_many_canvases_name_fewer():
    steps = (a_step(first=True, new=1, more=40.0), *[a_step() for _ in range(4)])
    m = measured(
        steps=steps,
        epochs=2,
        num_canvases=8,
        trials=(trial((("plan.max_canvases", 4),), (1.0, 1.02, 0.99), num_canvases=4),),
    )
    finding = next(f for f in diagnose(m).verdict.findings)
    assert finding.cause == "first visits of many canvases"
    assert finding.cost_s == pytest.approx(80.0)  # 4 of 8 times 40 s, over 2 epochs


def test_waste_that_no_plan_helps_is_harmless():
    found = diagnose(measured(epoch_valid_pixels=5_000)).verdict
    assert found.healthy
    assert any(line.startswith("canvases: 50%") for line in found.harmless)


def test_evaluation_names_how_seldom():
    finding = only_finding(
        measured(settings={"train.evaluate_every": 1}, evaluation_s=40.0, val_images=200)
    )
    assert finding.cause == "evaluation"
    assert finding.cost_s == pytest.approx(40.0)
    # 35.7 s else, so 10% are 3.97 s an epoch.
    assert finding.settings == (("train.evaluate_every", 11),)
    assert finding.change == "train.evaluate_every = 11 (1 now)"
    assert finding.gain.startswith(f"{40 - 40 / 11:.2f} s")
    assert "estimated from 5" in finding.evidence


def test_evaluation_is_never_rarer_than_the_end():
    finding = only_finding(measured(settings={"train.evaluate_every": 1}, evaluation_s=4_000.0))
    assert finding.settings == (("train.evaluate_every", 20),)
    at_the_end = measured(settings={"train.evaluate_every": 0}, evaluation_s=4_000.0)
    assert diagnose(at_the_end).verdict.healthy


def test_checkpoints_name_how_seldom():
    finding = only_finding(measured(settings={"train.checkpoint_every": 1}))
    assert finding.cause == "checkpoints"
    assert finding.cost_s == pytest.approx(10.0)
    # 1 s over 2% of a step of 3.76 s is 13.3: the next round number.
    assert finding.settings == (("train.checkpoint_every", 20),)
    assert finding.gain.startswith("9.50 s")


def test_logging_names_how_seldom():
    finding = only_finding(measured(settings={"train.log_every": 1}, logging_s=0.5))
    assert finding.cause == "logging"
    assert finding.cost_s == pytest.approx(5.0)
    assert finding.settings == (("train.log_every", 10),)  # An epoch's end has its line anyway.
    assert diagnose(measured(logging_s=5.0)).verdict.healthy


def test_precision_is_suggested_and_never_applied():
    m = measured(
        settings={"train.precision": "float32"},
        controls=(Control(name="precision bf16", ratios=(0.5, 0.6, 0.55)),),
    )
    finding = only_finding(m)
    assert finding.cause == "slow precision: float32"
    assert 'train.precision = "bf16"' in finding.change
    assert finding.settings == ()
    assert finding.cost_s == pytest.approx(0.45 * 35)
    diagnosis = diagnose(m)
    assert diagnosis.expected_s == diagnosis.verdict.wall_s


@pytest.mark.parametrize(
    ("name", "cause", "settings"),
    [
        ("channels_last", "memory format of the net", (("train.channels_last", True),)),
        ("fewer threads", "threads wait for one another", ()),
        (
            "activation_checkpointing off",
            "activations are computed twice",
            (("model.activation_checkpointing", False),),
        ),
    ],
)
def test_a_control_that_nearly_all_turns_confirm_is_a_finding(name, cause, settings):
    def with_ratios(*ratios, **changes):
        return measured(controls=(Control(name=name, ratios=ratios),), **changes)

    finding = only_finding(with_ratios(0.8, 0.7, 0.75, 1.1))
    assert (finding.cause, finding.settings) == (cause, settings)
    assert finding.cost_s == pytest.approx((1 - 0.775) * 35)
    assert diagnose(with_ratios(0.99, 0.98, 1.0)).verdict.healthy
    assert diagnose(with_ratios(0.6, 1.2, 1.1, 0.5)).verdict.healthy
    assert diagnose(with_ratios(0.5)).verdict.healthy


def test_activation_checkpointing_stays_where_memory_is_scarce():
    m = measured(
        controls=(Control(name="activation_checkpointing off", ratios=(0.7, 0.7, 0.7)),),
        memory_share=0.9,
    )
    found = diagnose(m).verdict
    assert found.healthy
    assert any("90% full, so it is needed" in line for line in found.harmless)


def test_the_most_costly_comes_first_and_gains_do_not_add_up_to_more_than_all():
    m = measured(
        settings={"train.evaluate_every": 1, "train.checkpoint_every": 1},
        evaluation_s=60.0,
        steps=WAITING,
        trials=(trial((("train.loader_threads", 2),), (0.7, 0.7, 0.7)),),
    )
    diagnosis = diagnose(m)
    causes = [f.cause for f in diagnosis.verdict.findings]
    assert causes == ["evaluation", "waiting for data", "checkpoints"]
    assert 0 < diagnosis.expected_s < diagnosis.verdict.wall_s


def test_a_limit_that_could_not_be_measured_is_not_spoken_of():
    m = measured(limit_flops_s=None)
    assert "limit" not in describe(m, diagnose(m))


def test_diagnosing_needs_no_torch():
    code = "import sys, anysize.doctor.diagnose; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
