"""Step times without the warm-up, and signals that wait for the end of a step."""

import os
import signal
import time

import pytest

from attncond.lab import timing
from attncond.lab.timing import Stop, Stopwatch


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    return now


def test_the_first_interval_is_the_warm_up(clock):
    watch = Stopwatch()
    clock[0] += 60.0  # compiling, in the first 8 steps
    watch.lap(8)
    for seconds in (1.0, 2.0, 9.0):
        watch.go()
        clock[0] += seconds
        watch.lap(100)
        clock[0] += 5.0  # an evaluation
    assert watch.warm_up == 60
    assert watch.laps == [10, 20, 90]
    assert watch.milliseconds == 20
    # All the time but what compiling took beyond 8 steps of 20 ms.
    assert watch.seconds == pytest.approx(60 + 12 + 15 - (60 - 0.16))


def test_a_resumed_run_adds_up(clock):
    watch = Stopwatch([10.0, 10.0], seconds=30.0)
    clock[0] += 10.0
    watch.lap(8)
    assert watch.milliseconds == 10
    assert watch.seconds == pytest.approx(30 + 0.08)


def test_a_run_that_ends_in_its_warm_up_has_no_step_time(clock):
    watch = Stopwatch()
    clock[0] += 1.0
    watch.lap(5)
    assert watch.milliseconds is None
    assert watch.last == 200


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")]
)
def test_a_signal_is_a_reason_and_the_second_an_interrupt(number, reason):
    before = signal.getsignal(number)
    with Stop() as stop:
        assert stop.reason is None
        os.kill(os.getpid(), number)
        assert stop.reason == reason
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) == before


def test_a_deadline():
    assert Stop(time.time() + 60).reason is None
    assert Stop(time.time() - 1).reason == "time limit"
