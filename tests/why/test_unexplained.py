"""The bar of health, debugging that was left on, steps that become slower: from records."""

from dataclasses import replace

import pytest
import torch
from tests.why.planted import recorded, without_control

from anysize_why.causes import judge
from anysize_why.counting import time_operators
from anysize_why.places import CONSTRUCTORS, place_in_stack
from anysize_why.switches import HOOKS, PROFILER, read_switches

HEALTHY = ("healthy", "healthy_trainer", "healthy_gan", "healthy_closure")


def with_stage(record, stage, share):
    """The same steps with a share of their time in another stage."""
    steps = [
        {**s, "stages": {**{k: v * (1 - share) for k, v in s["stages"].items()},
                         stage: share * s["wall_s"]}}
        for s in record.steps
    ]  # fmt: skip
    return replace(record, steps=steps)


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("stage", ["between steps", "after backward", "something else"])
def test_more_than_a_tenth_outside_the_net_is_never_healthy(name, stage):
    record = replace(recorded(name), facts={**recorded(name).facts, "lines": []})
    assert judge(with_stage(record, stage, 0.02)).healthy
    found = judge(with_stage(record, stage, 0.5))
    assert found.findings[0].cause == f"not explained: most time is in {stage}"
    assert found.findings[0].cost_s >= 0.5 * found.wall_s


def test_steps_slower_than_a_copys_are_not_healthy():
    record = recorded("healthy")
    again = {"seconds": {"as it is": [1.0] * 8}, "sizes": {"as it is": [1] * 8}}
    steps = [
        {**step, "wall_s": 1.02, "stages": {"forward": 0.4, "backward": 0.6}}
        for step in record.steps
    ]
    record = replace(record, steps=steps, controls={"again": again})
    assert judge(record).healthy
    again["seconds"]["as it is"] = [0.5] * 8
    [finding] = judge(record).findings
    assert finding.cause == "not explained: most time is in backward"
    assert finding.cost_s == pytest.approx(0.5 * len(steps))
    assert "takes 1000.0 ms, the same step of a copy of its net 500.0 ms" in finding.evidence


@pytest.mark.parametrize(("within_s", "is_healthy"), [(0.9, True), (0.3, False)])
def test_a_net_whose_time_lies_between_operators_is_not_healthy(within_s, is_healthy):
    longest = [{"name": "aten::add", "calls": 900, "seconds": 0.2}]
    operators = {"step_s": 1.0, "within_s": within_s, "longest": longest}
    found = judge(replace(recorded("healthy"), controls={"operators": operators}))
    assert found.healthy == is_healthy
    if not is_healthy:
        assert "70% of a step of the copy lies between the operators" in found.findings[0].evidence
        assert "aten::add 200.0 ms (900 calls)" in found.findings[0].evidence


def slowing(late, *, cpu=None, spread=0.0):
    """Sixty steps of 1 s, of which the last thirty take longer."""
    record = recorded("healthy")
    steps = []
    for number in range(60):
        wall = (1.0 if number < 30 else late) + spread * (number % 4)
        stages = {"forward": 0.4, "backward": wall - 0.4}
        steps.append({**record.steps[0], "wall_s": wall, "stages": stages, "shape": [4, 3],
                      "cpu_s": cpu or wall, "counts_syncs": False, "compiles": 0})  # fmt: skip
    return judge(replace(record, steps=steps, controls={}))


def test_steps_that_become_slower_are_held_against_the_first():
    finding = slowing(2.0).findings[0]
    assert finding.cause == "steps become slower"
    assert finding.cost_s == pytest.approx(30.0)
    assert "1000.0 ms, the last 20 2000.0 ms (medians); 1000.0 ms of it in backward" in (
        finding.evidence
    )
    assert slowing(1.1).healthy
    assert slowing(1.4, spread=0.5).healthy  # Not clear of their own spread.
    assert slowing(2.0, cpu=1.0).healthy  # Others have the machine: no more was computed.


def test_a_switch_needs_its_control_and_a_gain_that_is_certain():
    record = recorded("anomaly_detection")
    assert judge(record).findings[0].cause.startswith("debugging left on")
    assert not judge(without_control(record, "torch.autograd.set_detect_anomaly")).healthy
    name = "torch.autograd.set_detect_anomaly"
    control = record.controls[name]
    same = {**control, "seconds": {"as it is": control["seconds"]["off"],
                                   "off": control["seconds"]["off"]}}  # fmt: skip
    found = judge(replace(record, controls={**record.controls, name: same}))
    assert any(line.startswith(f"{name}: ") and "harmless" in line for line in found.harmless)


def test_switches_are_read_and_one_hook_is_none():
    net = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(6)])
    assert read_switches(net) == set()
    handle = net[0].register_forward_hook(lambda *values: None)
    assert read_switches(net) == set()
    for layer in net:
        layer.register_forward_hook(lambda *values: None)
    assert read_switches(net) == {HOOKS}
    handle.remove()
    other = torch.nn.Linear(2, 2)
    for parameter in other.parameters():
        parameter.register_hook(lambda gradient: None)
    assert read_switches(other) == {HOOKS}
    assert PROFILER not in read_switches(None)


def test_operators_are_timed_forward_and_backward():
    net = torch.nn.Linear(64, 64)

    def run():
        net(torch.ones(8, 64)).sum().backward()
        return 1.0, 512

    found = time_operators(run)
    names = {each["name"] for each in found["longest"]}
    assert found["step_s"] == 1.0
    assert found["within_s"] > 0
    assert names & {"aten::mm", "aten::addmm"}


def test_graphs_that_are_walked_again_cost_their_share_of_the_backward_pass():
    record = recorded("retained_graph")
    found = judge(record).findings[0]
    assert found.cost_s == pytest.approx(0.6 * record.stage_s("backward"), rel=1e-3)
    steps = [{**step, "repeated": 0} for step in record.steps]
    assert "backward walks" not in str(judge(replace(record, steps=steps)).findings)


def test_the_lines_around_a_checkpoint_are_its_cost():
    record = recorded("checkpointing")
    steps = [dict(step) for step in record.steps]
    for number, step in enumerate(steps):
        stages = {k: v for k, v in step["stages"].items() if k != "checkpoint" or number % 2}
        step["stages"] = {**stages, "between steps": 0.05 if number % 2 else 0.01}
    number = len(steps) // 2
    record = replace(record, steps=steps)
    finding = next(f for f in judge(record).findings if f.cause.startswith("checkpoint"))
    assert finding.cost_s == pytest.approx(record.stage_s("checkpoint") + 0.04 * number)
    assert "in the script's lines around it" in finding.evidence


def test_advice_of_a_larger_batch_says_how_for_images_of_many_sizes():
    record = recorded("tiny_batch")
    assert "anysize plan" not in judge(record).findings[0].change
    steps = [{**s, "shape": [1, *s["shape"][1:-1], 16 + i % 3]} for i, s in enumerate(record.steps)]
    change = judge(replace(record, steps=steps)).findings[0].change
    assert "need one shape for that: planned canvases (`anysize plan`, exact)" in change


def test_a_compiler_that_has_given_up_is_said():
    record = recorded("recompiling")
    facts = {**record.facts, "fallback": "hit config.recompile_limit (8)"}
    finding = judge(replace(record, facts=facts)).findings[0]
    assert finding.cause == "torch.compile has given up: recompile limit"
    assert "recompile_limit (8)" in finding.evidence


def test_objects_made_anew_cost_their_constructors_not_what_is_loaded_into_them():
    record = recorded("net_made_anew")
    lines = [{**line, "via": "torch"} for line in record.facts["lines"]]
    others = judge(replace(record, facts={**record.facts, "lines": lines})).findings[0]
    assert 0 < judge(record).findings[0].cost_s < 0.9 * others.cost_s
    stack = [
        '  File "/x/site-packages/torch/nn/modules/linear.py", line 107 in __init__',
        '  File "/home/me/train.py", line 11 in build',
    ]
    assert place_in_stack(stack) == (("/home/me/train.py", 11), CONSTRUCTORS)
    stack[0] = stack[0].replace("__init__", "forward")
    assert place_in_stack(stack)[1] == "torch"
