"""From recorded runs to verdicts; the records were written by `tests/doctor/planted.py`."""

import copy
import subprocess
import sys
from dataclasses import replace

import pytest
from tests.doctor.planted import PLANTS, RECORDS, recorded, script_of, without_control

from anysize.doctor.causes import Record, judge
from anysize.doctor.findings import DoctorError
from anysize.doctor.own_clock import Timed, shown_by, suspects
from anysize.doctor.page import page
from anysize.doctor.probe import Clock, _with_evaluation
from anysize.doctor.why import Watched, describe

KEPT = sorted(path.stem for path in RECORDS.glob("*.json"))


def watched(name, record):
    return Watched(
        script=script_of(PLANTS[name]), code=0, ended="stopped", first_step_s=1.0, record=record
    )


@pytest.mark.parametrize("name", KEPT)
def test_each_planted_cause_is_the_first_finding_and_shows_its_measurement(name):
    found = judge(recorded(name))
    assert (found.findings[0].cause if found.findings else "").startswith(PLANTS[name].cause)
    assert found.healthy == (not PLANTS[name].cause)
    assert sum(s for _, s in found.stages) == pytest.approx(found.wall_s)
    assert abs(found.stages[-1][1]) < 0.03 * found.wall_s
    for finding in found.findings:
        assert any(character.isdigit() for character in finding.evidence)
        assert 0 <= finding.cost_s <= found.wall_s


@pytest.mark.parametrize("name", KEPT)
def test_every_record_can_be_said_and_drawn(name):
    record = recorded(name)
    found = judge(record)
    said = describe(watched(name, record), found)
    assert ("Healthy" in said) == found.healthy
    drawn = page(watched(name, record), found)
    assert drawn.count("data:image/png;base64,") == 2
    assert 'src="http' not in drawn


def test_ten_sizes_are_called_harmless_after_their_first_visits():
    found = judge(recorded("ten_sizes"))
    assert found.healthy
    line = next(line for line in found.harmless if "sizes in" in line)
    assert "harmless after the first visits, which cost" in line
    assert line.startswith("10 sizes in 59 steps")


@pytest.mark.parametrize(
    ("name", "control"),
    [
        ("float64", "float64"),
        ("channels_last_lost", "channels last"),
        ("tiny_batch", "batch"),
        ("many_threads", "threads"),
    ],
)
def test_without_its_control_a_cause_is_no_finding(name, control):
    record = recorded(name)
    causes = [f.cause for f in judge(without_control(record, control)).findings]
    assert PLANTS[name].cause not in causes
    # Nor is it where the two sides of the control differ by no more than they spread.
    same = copy.deepcopy(dict(record.controls))
    sides = same[control]["seconds"]
    sides.update(dict.fromkeys(sides, sides["as it is"]))
    causes = [f.cause for f in judge(replace(record, controls=same)).findings]
    assert PLANTS[name].cause not in causes or control == "batch"


def control_of(before, after):
    sides = {"as it is": before, "float32": after, "larger": after}
    sizes = {"as it is": [1] * len(before), "float32": [1] * len(after), "larger": [1] * len(after)}
    return {"batch": 1, "larger": 4, "seconds": sides, "sizes": sizes}


@pytest.mark.parametrize(
    ("control", "after", "is_finding"),
    [
        ("float64", [0.8, 0.81, 0.79, 0.8], True),
        ("float64", [0.98, 0.98, 0.98, 0.98], False),  # Too little.
        ("float64", [0.2, 1.2, 0.6, 0.8, 0.1, 1.4], False),  # Not clear of its own spread.
        ("batch", [0.5, 0.5, 0.5, 0.5], True),
        ("batch", [0.85, 0.85, 0.85, 0.85], False),  # Every net gains as much.
    ],
)
def test_what_a_control_saves_must_be_enough_and_certain(control, after, is_finding):
    controls = {control: control_of([1.0] * len(after), after)}
    found = judge(replace(recorded("healthy"), controls=controls))
    assert found.healthy == (not is_finding)


def test_a_control_that_failed_is_named_and_gives_no_finding():
    record = replace(recorded("healthy"), controls={"batch": {"failed": "RuntimeError: no"}})
    found = judge(record)
    assert found.healthy
    assert "not tried, batch: RuntimeError: no" in found.harmless
    assert found.limit_share is None


def test_without_steps_it_is_said_what_was_seen():
    facts = {"seen": {"backward": 3}}
    with pytest.raises(DoctorError, match="3 x backward call"):
        judge(Record(script="s.py", source="", steps=[], facts=facts, controls={}))


def test_the_seconds_of_a_stage_do_not_hold_those_within_it():
    clock = Clock()
    clock.enter("optimiser")
    clock.enter("forward")
    clock.leave("optimiser", "loss")  # As when something raised within the forward.
    assert clock.top == "loss"
    sums, segments = clock.cut()
    names = ["between steps", "optimiser", "forward", "loss"]
    assert [name for name, _ in segments] == names
    assert sums == dict(segments)
    clock.leave("never entered")
    assert clock.top == "loss"


@pytest.mark.parametrize(
    ("order", "evaluation"),
    [
        # Between two steps, with a loader of its own: all but the training's wait and printing.
        ("between:1 wait:2 eval:3 wait:4 printing:5 between:6 wait:7 forward:8", 1 + 2 + 3 + 4 + 6),
        # After the training's batch was fetched, without a loader of its own.
        ("wait:1 between:2 eval:3 between:4 forward:5", 2 + 3 + 4),
        # After the training's batch was fetched, with one.
        ("wait:1 between:2 wait:3 eval:4 wait:5 forward:6", 2 + 3 + 4 + 5),
    ],
)
def test_an_evaluation_takes_what_lies_around_it(order, evaluation):
    names = {"between": "between steps", "wait": "wait for data", "eval": "evaluation"}
    segments = [
        (names.get(name, name), float(seconds))
        for name, seconds in (part.split(":") for part in order.split())
    ]
    sums = _with_evaluation(segments)
    assert sums["evaluation"] == evaluation
    assert sum(sums.values()) == sum(seconds for _, seconds in segments)


CLOCKS = """
from datetime import datetime
a = datetime.now()
work()
took = datetime.now() - a
print(took.microseconds)
b = datetime.now()
work()
print((datetime.now() - b).seconds)
print((datetime.now() - b).seconds + (datetime.now() - b).microseconds / 1e6)
print((datetime.now() - b).total_seconds(), message.seconds, (c - d).microseconds)
"""


def test_timers_that_drop_a_part_are_found_and_right_ones_are_not():
    found = sorted(suspects(CLOCKS), key=lambda timed: timed.end)
    assert found == [Timed("microseconds", 3, 5), Timed("seconds", 7, 9)]
    assert suspects("for") == []


def test_what_a_wrong_timer_shows_is_what_a_timedelta_would():
    timed = Timed("microseconds", 3, 5)
    steps = [{"stages": {"forward": 1.5, "backward": 0.6, "loss": 0.3, "optimiser": 9.0}}]
    lines = {"forward": [["s.py", 4]], "backward": [["t.py", 9], ["s.py", 4]]}
    [(shown, true)] = shown_by(timed, steps, lines, "s.py")
    assert (shown, true) == (pytest.approx(0.4), pytest.approx(2.4))
    assert Timed("seconds", 1, 2).shows(2.4) == 2.0
    assert shown_by(timed, steps, lines, "other.py") == []


def test_a_wrong_timer_that_no_step_was_long_enough_for_is_harmless():
    record = recorded("wrong_timer")
    short = [
        {**step, "wall_s": step["wall_s"] / 100,
         "stages": {k: v / 100 for k, v in step["stages"].items()}}
        for step in record.steps
    ]  # fmt: skip
    found = judge(replace(record, steps=short, controls={}))
    assert found.healthy
    assert any("drops whole seconds; no step was long enough" in line for line in found.harmless)


def test_judging_needs_no_pytorch():
    code = (
        "import sys, anysize.doctor.why, anysize.doctor.page, anysize.doctor.probe; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
