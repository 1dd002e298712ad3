"""Clocks that drop whole seconds, found where the value is read, whatever is done with it."""

from dataclasses import replace

import pytest
from tests.why.planted import recorded

from anysize_why.causes import judge
from anysize_why.own_clock import Timed, shown_by, suspects

IMPORT = "from datetime import datetime\n"

WRONG = {
    "into a meter": """
end = datetime.now()
for x in loader:
    work(x)
    meter.update((datetime.now() - end).microseconds / 1e6)
    end = datetime.now()
""",
    "through a helper that is given the start": """
def elapsed(since):
    return (datetime.now() - since).microseconds / 1e6

for x in loader:
    began = datetime.now()
    work(x)
    print(elapsed(began))
""",
    "through a helper that is given the difference": """
def in_ms(delta):
    return delta.microseconds / 1000

for x in loader:
    began = datetime.now()
    work(x)
    print(in_ms(datetime.now() - began))
""",
    "of a difference that a helper returns": """
def since(start):
    return datetime.now() - start

for x in loader:
    began = datetime.now()
    work(x)
    print(since(began).microseconds)
""",
    "in a method": """
class Meter:
    def update(self, delta):
        self.sum += delta.microseconds

for x in loader:
    began = datetime.now()
    work(x)
    meter.update(datetime.now() - began)
""",
}

PLACES = {
    "into a meter": (6, 5),  # Read further down: a whole round.
    "through a helper that is given the start": (6, 8),
    "through a helper that is given the difference": (6, 8),
    "of a difference that a helper returns": (6, 8),
    "in a method": (7, 9),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_part_of_a_difference_is_found_wherever_it_is_read(name):
    found = suspects(IMPORT + WRONG[name].lstrip("\n"))
    assert found == [Timed("microseconds", *PLACES[name])]


@pytest.mark.parametrize(
    "text",
    [
        "print((datetime.now() - began).total_seconds())",
        "s = took.seconds\nus = took.microseconds",  # Both parts are read.
        "print(arguments.seconds, config.seconds)",  # Not of a clock.
        "took.microseconds = 3",
        "print(datetime.now().microsecond)",
    ],
)
def test_what_drops_nothing_is_not_found(text):
    assert suspects(f"{IMPORT}began = datetime.now()\ntook = datetime.now() - began\n{text}") == []


def test_a_context_of_which_the_lines_are_not_known_is_named_all_the_same():
    source = (
        IMPORT + "class Timed:\n    def stop(self, delta):\n        return delta.microseconds\n"
    )
    assert suspects(source) == [Timed("microseconds", 0, 4)]
    record = recorded("wrong_timer")
    assert min(step["wall_s"] for step in record.steps) > 0
    steps = [{**step, "wall_s": 2.5} for step in record.steps]
    facts = {**record.facts, "sources": {"/d/clock.py": source}}
    found = judge(replace(record, source="", steps=steps, facts=facts)).findings
    wrong = next(f for f in found if f.cause == "the script's own clock is wrong")
    assert "clock.py:4 takes `.microseconds` of a timedelta" in wrong.evidence
    assert "of a step it would show 0.50 s a step, the wall clock 2.50 s" in wrong.evidence


def test_a_clock_of_whole_rounds_is_held_against_the_wall_clock():
    timed = Timed("seconds", 6, 5)
    assert shown_by(timed, [{"wall_s": 2.4, "stages": {}}], {}, "s.py") == [(2.0, 2.4)]
