import numpy as np
import pytest

from anysize.timing import Timer, spread


class Clock:
    """A clock that moves only when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def pass_(self, seconds):
        self.now += seconds


class Device:
    """Calls return at once; `wait` passes the time of what was started."""

    def __init__(self, clock):
        self.clock = clock
        self.queued = 0.0

    def start(self, seconds):
        self.queued += seconds

    def wait(self):
        self.clock.pass_(self.queued)
        self.queued = 0.0


@pytest.fixture
def clock():
    return Clock()


def test_whole_seconds_are_kept(clock):
    """The timer of 2016 showed `timedelta.microseconds`: of 2.1 s it kept 0.1 s."""
    timer = Timer(clock=clock)
    for _ in range(3):
        with timer.step():
            clock.pass_(2.1)
    assert timer.times().repeats.median_s == pytest.approx(2.1)
    assert timer.times().wall_s == pytest.approx(6.3)


def test_first_visits_are_apart_from_repeats(clock):
    timer = Timer(clock=clock)
    for shape, seconds in [((1, 2), 9.0), ((1, 2), 1.0), ((3, 4), 7.0), ((1, 2), 2.0)]:
        with timer.step(visit=shape):
            clock.pass_(seconds)
    times = timer.times()
    assert (times.first_visits.count, times.first_visits.total_s) == (2, 16.0)
    assert (times.repeats.count, times.repeats.mean_s) == (2, 1.5)


def test_the_device_is_waited_for_at_the_end_of_a_step_and_where_asked(clock):
    device = Device(clock)
    timer = Timer(clock=clock, synchronise=device.wait)
    for _ in range(2):
        with timer.step():
            with timer.stage("forward"):
                device.start(3.0)
            with timer.stage("backward", synchronise=True):
                device.start(4.0)
            with timer.stage("optimiser"):
                device.start(1.0)
    times = timer.times()
    stages = {stage.name: stage.repeats.median_s for stage in times.stages}
    assert stages == {"forward": 0.0, "backward": 7.0, "optimiser": 0.0}
    assert times.repeats.median_s == 8.0


def test_waiting_and_what_is_in_no_step_add_up_to_the_wall_clock(clock):
    def loader():
        for seconds in (5.0, 0.5, 0.5):
            clock.pass_(seconds)
            yield seconds

    timer = Timer(clock=clock)
    for _ in timer.waiting(loader()):
        with timer.step():
            clock.pass_(1.0)
        clock.pass_(0.25)  # Printing, say.
    times = timer.times()
    assert times.waiting.total_s == 6.0
    assert times.waiting.max_s == 5.0
    # The last 0.25 s come after the end of the last step.
    assert times.wall_s == 9.5
    assert times.unaccounted_s == pytest.approx(0.5)


def test_a_step_that_fails_is_not_counted_and_leaves_the_timer_usable(clock):
    timer = Timer(clock=clock)

    def failing():
        with timer.step(visit="a"):
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        failing()
    with timer.step(visit="a"):
        clock.pass_(1.0)
    assert timer.times().first_visits.count == 1


def test_misuse_is_told(clock):
    timer = Timer(clock=clock)
    with pytest.raises(RuntimeError, match="'forward' is outside a step"), timer.stage("forward"):
        pass
    with timer.step(), pytest.raises(RuntimeError, match="already"), timer.step():
        pass


def test_percentiles_are_those_of_numpy():
    values = np.random.default_rng(0).exponential(size=37)
    found = spread(list(values))
    expected = np.percentile(values, [10, 50, 90])
    assert np.allclose([found.p10_s, found.median_s, found.p90_s], expected, rtol=1e-14)
    assert found.max_s == values.max()
    assert spread([]).count == 0


def test_the_summary_names_every_stage(clock):
    timer = Timer(clock=clock)
    assert "wall clock 0.00 s" in timer.summary()
    for _ in range(2):
        with timer.step(), timer.stage("forward"):
            clock.pass_(2.0)
    lines = timer.summary().splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["waiting", "first", "repeats", "forward"]
    assert "2000.0" in lines[4]
    assert lines[-1].startswith("wall clock 4.00 s, of which 0.00 s")
