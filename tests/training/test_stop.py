import signal

import pytest

from anysize.errors import StoppedByUserError
from anysize.training.stop import stop_requests


def raise_signals(*numbers):
    for number in numbers:
        signal.raise_signal(number)
    return "went on"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_obeyed_between_steps_and_at_once_in_harmless_work(number):
    before = signal.getsignal(number)
    done = []
    with stop_requests() as stop:
        stop.raise_if_requested()
        done.append(raise_signals(number))
        with pytest.raises(StoppedByUserError, match="--resume"):
            stop.raise_if_requested()
        with pytest.raises(StoppedByUserError), stop.at_once():
            done.append("not reached")
    with stop_requests() as stop, pytest.raises(StoppedByUserError), stop.at_once():
        raise_signals(number)
    assert done == ["went on"]
    assert signal.getsignal(number) is before


def test_a_hangup_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_requests() as stop:
            assert raise_signals(signal.SIGHUP) == "went on"
            assert not stop.is_requested
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_signal_interrupts_at_once():
    with stop_requests(), pytest.raises(KeyboardInterrupt):
        raise_signals(signal.SIGINT, signal.SIGINT)
