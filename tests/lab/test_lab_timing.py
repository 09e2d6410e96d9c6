"""Step times without the warm-up, signals that wait for a step, runs that are worth beginning."""

import os
import signal
import time

import pytest

from attncond.lab import timing
from attncond.lab.folder import Interrupted
from attncond.lab.timing import Starts, Stop, Stopwatch, first_step


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


SIGNALS = pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGHUP")],
)


@SIGNALS
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


def compiling(number):
    os.kill(os.getpid(), number)
    time.sleep(60)


@SIGNALS
def test_before_the_first_step_a_signal_ends_the_run_at_once(number, reason):
    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match=f"^{reason} before its first step$") as caught, Stop():
        compiling(number)
    assert caught.value.reason == reason
    assert signal.getsignal(number) == before


def test_a_signal_after_the_deadline_is_told_as_the_deadline():
    with pytest.raises(Interrupted, match="time limit before its first step"), Stop(time.time()):
        compiling(signal.SIGTERM)


def test_a_deadline_ends_what_has_made_no_step_soon_after_it(monkeypatch):
    monkeypatch.setattr(timing, "SECONDS_TO_BEGIN", 0.2)
    with pytest.raises(Interrupted, match="time limit before its first step"), Stop(time.time()):
        time.sleep(60)
    with Stop(time.time()) as stop:  # it has made one, and saves
        assert stop.reason == "time limit"
        time.sleep(0.4)
    with Stop(time.time() + 1e12):  # no limit to speak of
        pass
    with Stop(float("inf")):
        pass


def test_several_processes_wait_for_a_step_in_any_case(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    began = time.time()
    with Stop() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.reason == "SIGTERM"
    assert first_step(began) is None  # they would not agree on what it means


def test_an_interrupt_that_nobody_asked_for_stays_one():
    with pytest.raises(KeyboardInterrupt), Stop():
        raise KeyboardInterrupt


def test_what_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.reason is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_first_step_of_a_run():
    before = time.time()
    with Stop() as stop:
        assert first_step(before) is None
        _ = stop.reason
        first = first_step(before)
        _ = stop.reason
    assert before <= first == first_step(before) <= time.time()
    assert first_step(time.time() + 1) is None  # a run after it, which made none


def test_a_run_is_worth_beginning_if_its_like_would_make_a_step_in_time():
    starts, limit = Starts(), time.time() + 50
    assert starts.worth(limit, compiled=False)  # nothing is known
    assert not starts.worth(time.time(), compiled=False)
    for seconds in (20, 60, 1000):
        starts.add(seconds, compiled=False)
    assert not starts.worth(limit, compiled=False)
    assert starts.worth(limit, compiled=True)
    assert starts.worth(limit + 20, compiled=False)
    assert starts.worth(None, compiled=False)
    starts.add(70, compiled=True)
    assert not starts.worth(limit, compiled=True)
