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
from anysize.doctor.probe import Clock, Options, Probe, _with_evaluation
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


def test_a_larger_batch_saves_steps_of_the_optimiser_too():
    steps = [
        {**step, "stages": {"forward": 0.4, "backward": 0.4, "optimiser": 0.2}, "wall_s": 1.0}
        for step in recorded("healthy").steps
    ]
    controls = {"batch": control_of([1.0] * 6, [0.5] * 6)}
    [finding] = judge(replace(recorded("healthy"), steps=steps, controls=controls)).findings
    assert finding.cause == "tiny batch"
    # Half of forward and backward, and three of four steps of the optimiser.
    assert finding.cost_s == pytest.approx(len(steps) * (0.5 * 0.8 + 0.75 * 0.2))


def reading(timed, *, usual=6.0, calls=4000):
    """Steps of 10 s between which values are read; in the first three the reads are timed."""
    place = {"file": "s.py", "line": 7, "stage": "between steps"}
    steps = [
        {"wall_s": 10.0, "shape": [1], "forwards": 1, "compiles": 0, "rss_bytes": 0,
         "stages": {"forward": 10.0 - usual, "between steps": usual},
         "counts_syncs": False, "reads": {}}
        for _ in range(20)
    ]  # fmt: skip
    for step, (stage, *reads) in zip(steps, timed, strict=False):
        step["stages"] = {"forward": 10.0 - usual, "between steps": stage}
        step |= {"counts_syncs": True, "reads": {"between steps": [calls, *reads]} if reads else {}}
    return replace(
        recorded("healthy"),
        steps=steps,
        controls={},
        facts={
            **recorded("healthy").facts,
            "lines": [
                {**place, "via": "", "seconds": 50.0},
                {**place, "line": 3, "via": "", "seconds": 9.0},
            ],
            "syncs": [{**place, "method": "item", "calls": calls * len(timed), "seconds": 1.0}],
            "num_sync_steps": len(timed),
        },
    )  # fmt: skip


@pytest.mark.parametrize(
    ("timed", "cost_s"),
    [
        # 1 s beside the reads, so 5 of the usual 6 s are theirs, whatever timing them added.
        ([(9.0, 2.0, 6.0)] * 3, 5.0),
        # No less than what was spent within the reads ...
        ([(9.0, 3.0, 0.0)] * 3, 3.0),
        # ... and no more than that with the loop around them.
        ([(3.0, 1.0, 1.5)] * 3, 2.5),
    ],
)
def test_reads_cost_what_their_own_timing_shows_and_no_sample(timed, cost_s):
    found = judge(reading(timed))
    costs = {finding.cause: finding.cost_s for finding in found.findings}
    # The three steps whose reads were timed do not count for the usual time.
    assert costs.pop(".item() in each step") == pytest.approx(20 * cost_s)
    # And what is left for the lines beside them is the rest of the stage, never the same again.
    rest = dict(found.stages)["between steps"] - 20 * cost_s
    assert list(costs.values()) == ([pytest.approx(rest)] if rest > 20 else [])
    assert sum("s.py:7" in finding.evidence for finding in found.findings) == 1


def test_reads_that_are_not_in_each_step_are_no_finding_of_each_step():
    found = judge(reading([(9.0, 2.0, 6.0), (6.0,), (9.0, 2.0, 6.0)]))
    assert [f.cause for f in found.findings] == ["the script's own lines between the steps"]


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


def test_a_read_within_a_read_is_one_and_our_own_time_is_of_no_stage(tmp_path):
    class Value:
        def item(self):
            return 1

        def tolist(self):
            return [self.item(), self.item()]

    probe = Probe(Options(2, 1.0, 0.0, record=-1), tmp_path / "script.py")
    began = probe.row.began = probe.clock.mark
    probe._count_sync(Value, "item")
    probe._count_sync(Value, "tolist")
    assert (Value().tolist(), Value().item()) == ([1, 1], 1)
    stages, _ = probe.clock.cut()
    calls, seconds, gaps = probe.row.reads["between steps"]
    assert calls == 2
    assert [(name, stage, calls) for (name, stage, *_), (calls, _) in probe.syncs.items()] == [
        ("tolist", "between steps", 1), ("item", "between steps", 1),
    ]  # fmt: skip
    wall = probe.clock.mark - probe.row.began
    assert sum(stages.values()) == pytest.approx(wall)
    assert seconds + gaps < wall
    assert probe.row.began > began  # By what noting the two reads took.


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
