import pytest

from anysize.training.pace import Pace, time_left


def test_what_is_left_knows_the_first_visits_to_come():
    pace = Pace()
    assert pace.seconds_left(10, 5) == 0
    pace.add(7.0, 2)
    assert pace.seconds_left(10, 5) == 70, "nothing else is known yet"
    pace.add(2.0, 0)
    pace.add(4.0, 0)
    # A step takes 3 s, and the first visits of two canvases took 4 s more.
    assert pace.seconds_left(10, 5) == pytest.approx(10 * 3 + 5 * 2)
    assert pace.seconds_left(0, 0) == 0


def test_first_visits_faster_than_their_repeats_take_no_time_away():
    pace = Pace()
    pace.add(1.0, 1)
    pace.add(3.0, 0)
    assert pace.seconds_left(1, 9) == 3


def test_time_left_in_words():
    assert time_left({"eta_s": 3725.4, "first_visits": [12, 40]}) == (
        "left 1:02:05  first visits: 12 of 40 canvases"
    )
    assert time_left({"eta_s": 59.6, "first_visits": [40, 40]}) == "left 0:01:00"
