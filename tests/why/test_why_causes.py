"""From recorded runs to verdicts; the records were written by `tests/why/planted.py`."""

import copy
import subprocess
import sys
from dataclasses import replace

import pytest
from tests.why.planted import PLANTS, RECORDS, recorded, script_of, without_control

from anysize_why.causes import judge
from anysize_why.counting import parse_log
from anysize_why.counts import counts, counts_json
from anysize_why.findings import WhyError, in_units
from anysize_why.own_clock import Timed, intervals, shown_by, stages_within, suspects
from anysize_why.page import page
from anysize_why.reads import Reads
from anysize_why.record import Record
from anysize_why.stages import Clock, with_evaluation
from anysize_why.why import Watched, before_and_after, describe, watched_json

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
        {"wall_s": 10.0, "shape": [1], "forwards": 1, "compiles": 0, "rss_bytes": 0, "cpu_s": 10.0,
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
    with pytest.raises(WhyError, match="3 x backward call"):
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


def test_a_read_within_a_read_is_one_and_our_own_time_is_of_no_stage():
    class Value:
        def item(self):
            return 1

        def tolist(self):
            return [self.item(), self.item()]

    clock = Clock()
    reads = Reads(clock, lambda: True)
    began = clock.began
    reads.wrap(Value, "item")
    reads.wrap(Value, "tolist")
    assert (Value().tolist(), Value().item()) == ([1, 1], 1)
    stages, _ = clock.cut()
    calls, seconds, gaps = reads.of_step["between steps"]
    assert calls == 2
    assert [(name, stage, calls) for (name, stage, *_), (calls, _) in reads.by_line.items()] == [
        ("tolist", "between steps", 1), ("item", "between steps", 1),
    ]  # fmt: skip
    wall = clock.mark - clock.began
    assert sum(stages.values()) == pytest.approx(wall)
    assert seconds + gaps < wall
    assert clock.began > began  # By what noting the two reads took.


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
    sums = with_evaluation(segments)
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
    unknown = Timed("microseconds", 0, 11)  # Of nothing else than a timedelta.
    assert found == [Timed("microseconds", 3, 5), Timed("seconds", 7, 9), unknown]
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


INTERVALS = """
import time
from time import perf_counter
from datetime import datetime

start = time.time()
end = time.time()
for x in loader:
    meter.update(time.time() - end)
    self.began = perf_counter()
    work()
    ended = perf_counter()
    print(ended - self.began, ended - other)
    for part in parts:
        deeper()
        print(time.time() - self.began)
    end = time.time()
    a = datetime.now()
    work()
    print(int(1000 * (datetime.now() - a).total_seconds()))
print(time.time() - start)
"""


def test_only_a_clock_that_measures_one_round_of_a_loop_is_an_interval():
    found = [(interval.begin, interval.end) for interval in intervals(INTERVALS)]
    # Beginning before the loop, and from a round to the next, many steps or the wait are measured.
    assert found == [(10, 12), (18, 20), (6, 21)]
    assert intervals("for") == []
    loop = next(interval for interval in intervals(INTERVALS) if interval.end == 12)
    lines = {"forward": [["s.py", 11]], "backward": [["t.py", 3], ["s.py", 11]]}
    assert stages_within(loop, INTERVALS, lines, "s.py") >= {"forward", "backward", "loss"}
    # What runs in a deeper loop runs many times; of that nothing is said.
    assert not stages_within(loop, INTERVALS, {"forward": [["s.py", 15]]}, "s.py")
    whole = next(interval for interval in intervals(INTERVALS) if interval.end == 21)
    assert not stages_within(whole, INTERVALS, lines, "s.py")


UNSYNCHRONISED = """
for x in loader:
    began = time.perf_counter()
    loss = model(x)
    loss.backward()
    took = time.perf_counter() - began
    print(loss.item())
"""


def on_a_device(*, waits=(), source=UNSYNCHRONISED, forward=0.002, done=0.1, syncs=3):
    """Steps of 110 ms whose calls return after 5 ms."""
    step = {
        "wall_s": 0.11, "shape": [8], "forwards": 1, "compiles": 0, "rss_bytes": 0,
        "faults": 0, "cpu_s": 0.1,
        "stages": {"forward": forward, "backward": 0.003, "between steps": 0.105 - forward},
        "reads": {}, "counts_syncs": False,
    }  # fmt: skip
    facts = {
        **recorded("healthy").facts,
        "device": "cuda",
        "num_sync_steps": syncs,
        "call_lines": {"forward": [["s.py", 4]], "backward": [["s.py", 5]]},
        "lines": [],
        "device_waits": [
            {"method": "item", "places": [["helper.py", 1], ["s.py", line]], "calls": 3}
            for line in waits
        ],
    }
    controls = {"queued": {"returned": [0.005] * 4, "done": [done] * 4}}
    return Record(script="s.py", source=source, steps=[step] * 20, facts=facts, controls=controls)


WAITLESS = "the script's own clock is wrong: it does not wait for the device"


@pytest.mark.parametrize(
    ("record", "is_wrong"),
    [
        (on_a_device(waits=(7,)), True),
        (on_a_device(), True),
        (on_a_device(waits=(6, 7)), False),  # A wait between the two reads.
        (on_a_device(waits=(4,)), False),  # Or one within what is called there.
        (on_a_device(forward=0.08), False),  # It shows what the device takes: something waits.
        (on_a_device(done=0.005), False),  # The device is no slower than the calls.
        (on_a_device(syncs=0), False),  # Waits were not looked at.
        (replace(on_a_device(), controls={}), False),  # What it misses was not measured.
        (on_a_device(source=UNSYNCHRONISED.replace("for x in", "began = 0\nfor x in")), True),
        (on_a_device(source=UNSYNCHRONISED.replace("took = ", "# ")), False),
    ],
)
def test_a_clock_that_does_not_wait_for_the_device_is_wrong(record, is_wrong):
    if record.source.startswith("\nbegan = 0"):
        lines = {"forward": [["s.py", 5]], "backward": [["s.py", 6]]}
        record = replace(record, facts={**record.facts, "call_lines": lines})
    found = [f for f in judge(record).findings if f.cause == WAITLESS]
    assert bool(found) == is_wrong
    for finding in found:
        assert "shows 5.0 ms" in finding.evidence
        assert "a step of the wall clock takes 110.0 ms" in finding.evidence
        assert "return after 5.0 ms, and are done after 100.0 ms" in finding.evidence


def test_on_a_cpu_no_clock_is_called_unsynchronised():
    assert all("queued" not in recorded(name).controls for name in KEPT)
    for name in KEPT:
        assert WAITLESS not in [f.cause for f in judge(recorded(name)).findings]


LOG = """x onednn_verbose,v1,info,oneDNN v3.12.0 (commit 80afa71)
onednn_verbose,v1,primitive,info,template:operation,engine,exec_time
onednn_verbose,v1,primitive,create:cache_miss,cpu,convolution,jit,forward_training,a,b,1.5
onednn_verbose,v1,primitive,create:cache_hit,cpu,reorder,jit:uni,undef,a,b,0.001
onednn_verbose,primitive,create:cache_miss,cpu,reorder,jit:uni,undef,a,b,0.25
onednn_verbose,v1,primitive,exec,cpu,reorder,jit:uni,undef,a,b,2
onednn_verbose,v1,primitive,exec,cpu,convolution,jit,a,b,nonsense
onednn_verbose,v1
of the script
"""


def test_a_log_of_onednn_is_summed_up():
    assert parse_log(LOG) == {
        "made": 2, "made_ms": 1.75, "from_cache": 1, "reorders": 1, "reorders_ms": 2
    }  # fmt: skip
    assert set(parse_log("").values()) == {0}


COUNTED = {
    "copies": {
        "dtype": {"calls": 2, "bytes": 800},
        "memory format": {"calls": 1, "bytes": 4_000_000},
    },
    "primitives again": parse_log(""),
    "primitives new": parse_log(LOG),
}  # fmt: skip


def test_counts_are_of_a_step_and_say_how_they_were_made():
    record = recorded("healthy")
    record = replace(record, controls={**record.controls, **COUNTED})
    table = {count.name: count for count in counts(record)}
    number = len(record.steps)
    assert table["page faults"].calls == sum(s["faults"] for s in record.steps) / number
    outside = table["time outside the step"].seconds
    within = ("forward", "loss", "backward", "after backward", "optimiser")
    inside = sum(s["stages"].get(name, 0.0) for s in record.steps for name in within) / number
    assert outside + inside == pytest.approx(record.wall_s / number, rel=1e-3)
    assert (table["conversions of dtype"].calls, table["conversions of dtype"].num_bytes) == (
        2,
        800,
    )
    assert table["primitives made, new shape"].calls == 2
    assert table["primitives made, new shape"].seconds == pytest.approx(0.00175)
    assert all(count.measured for count in counts(record))
    found = judge(record)
    report = watched_json(watched("healthy", record), found)["counts"]
    assert report == counts_json(record)
    assert None not in [value for row in report.values() for value in row.values()]
    drawn = page(watched("healthy", record), found)
    assert drawn.count("<tr>") == 1 + len(table)
    assert "conversions of memory format</th><td>1.00</td><td>4.000</td><td>-</td>" in drawn


def test_a_count_whose_tool_failed_is_left_out_and_named():
    controls = {**COUNTED, "copies": {"failed": "TypeError: no"}, "primitives again": None}
    controls["primitives new"] = {"failed": "OSError: closed"}
    record = replace(recorded("healthy"), controls=controls)
    names = {count.name for count in counts(record)}
    assert "conversions of dtype" not in names
    assert "primitives made, shape seen before" not in names
    assert "primitives made, new shape" not in names
    assert {"page faults", "time outside the step"} <= names
    assert "not tried, copies: TypeError: no" in judge(record).harmless
    assert counts(replace(record, steps=[])) == []


def test_counts_support_the_findings_that_they_are_about():
    record = recorded("channels_last_lost")
    before = judge(record).findings[0].evidence
    after = judge(replace(record, controls={**record.controls, **COUNTED})).findings[0].evidence
    assert "1 conversions of memory format a step, 4.0 MB" in after
    assert "conversions" not in before
    record = recorded("ten_sizes")
    steps = [{**step, "tunes": i < 5} for i, step in enumerate(record.steps)]
    found = judge(replace(record, steps=steps, controls={**record.controls, **COUNTED}))
    said = next(line for line in found.harmless if "sizes in" in line)
    assert (
        "oneDNN makes 2 primitives in 1.8 ms for a shape never seen, 0 for one seen before" in said
    )
    assert "cuDNN tuned its kernels anew in 5 steps" in said


def test_kernels_are_tuned_at_new_shapes_where_cudnns_flag_is_on():
    record = recorded("ten_sizes")
    facts = {
        **record.facts,
        "device": "cuda",
        "cudnn": {"benchmark": True, "deterministic": False},
        "reserved_bytes": 3000 + 7 * len(record.steps),
        "reserved_bytes_at_first": 3000,
    }

    def tuned(tunes):
        steps = [{**step, "tunes": tunes} for step in record.steps]
        table = {count.name: count for count in counts(replace(record, steps=steps, facts=facts))}
        assert table["growth of the device's memory"].num_bytes == 7
        return table["kernel tuning"]

    num_new = len({tuple(step["shape"]) for step in record.steps})
    assert tuned(True).calls == num_new / len(record.steps)
    assert "benchmark on, deterministic off" in tuned(True).measured
    assert tuned(False).calls == 0
    assert "kernel tuning" not in {count.name for count in counts(record)}  # An older record.


def test_a_verdict_says_what_100_images_take_before_and_after_the_change():
    record = recorded("recompiling")
    found = judge(record)
    assert found.findings[0].cost_s > 0
    samples = sum(step["shape"][0] for step in record.steps)
    before, after = before_and_after(watched("recompiling", record), found)
    assert before == pytest.approx(100 * record.wall_s / samples)
    assert before - after == pytest.approx(100 * found.findings[0].cost_s / samples)
    what = "images" if len(record.steps[0]["shape"]) == 4 else "samples"
    said = describe(watched("recompiling", record), found)
    assert f"100 {what} take {in_units(before)}; after the change of finding 1, " in said
    assert f"{in_units(after)} are expected: {before / after:.1f} times as fast." in said
    assert said.splitlines()[-1] in page(watched("recompiling", record), found)
    healthy = recorded("healthy")
    assert before_and_after(watched("healthy", healthy), judge(healthy)) is None


def test_judging_needs_no_pytorch():
    code = (
        "import sys, anysize_why.why, anysize_why.page, anysize_why.probe; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
