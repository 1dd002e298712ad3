import json

import pytest

from anysize_why.findings import Finding, format_verdict, in_units, to_json, verdict


def finding(cause, cost_s, **more):
    return Finding(
        cause=cause, cost_s=cost_s, evidence="10 of 10", change="do less", gain="all of it", **more
    )


def test_the_most_costly_comes_first_and_the_stages_add_up():
    found = verdict(
        10.0, [("forward", 4.0), ("wait", 5.5)], [finding("small", 1.0), finding("large", 3.0)]
    )
    assert [f.cause for f in found.findings] == ["large", "small"]
    assert found.stages[-1] == ("unaccounted", 0.5)
    assert sum(seconds for _, seconds in found.stages) == found.wall_s
    said = format_verdict(found, over="epoch")
    assert said.index("1. large: 3.00 s an epoch") < said.index("2. small")
    assert "unaccounted" in said
    assert "Healthy" not in said


def test_a_healthy_program_is_told_so_with_the_share_of_the_limit():
    found = verdict(1.0, [("forward", 1.0)], [], harmless=["ten sizes: 0.1 s"], limit_share=0.61)
    said = format_verdict(found, over="measurement")
    assert "Healthy: nothing was found that costs time. It reaches 61%" in said
    assert "Harmless: ten sizes: 0.1 s" in said


def test_a_finding_without_a_cost_says_so():
    found = verdict(1.0, [], [finding("the clock drops whole seconds", 0.0)])
    assert "no time, but mind it" in format_verdict(found, over="measurement")


def test_the_json_is_plain():
    found = verdict(1.0, [], [finding("x", 1.0, settings=(("plan.max_canvases", 16),))])
    table = json.loads(json.dumps(to_json(found)))
    assert table["findings"][0]["settings"] == [["plan.max_canvases", 16]]
    assert table["healthy"] is False


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(636.5, "636 s"), (13.24, "13.2 s"), (1.2, "1.20 s"), (0.0314, "31.4 ms"),
     (0.0009999, "1.00 ms"), (0.00042, "420 µs")],
)  # fmt: skip
def test_seconds_are_said_in_a_unit_that_shows_them(seconds, said):
    assert in_units(seconds) == said
