"""The clock: budgets, and a bar that nobody has to look at."""

import io
import sys

import pytest
from plain_attention import Plain

import attncond as ac
from attncond.diagnose import progress
from attncond.diagnose.progress import Clock


@pytest.fixture
def now(monkeypatch):
    time = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: time[0])
    return time


def test_budget_runs_out_and_none_never_does(now):
    clock, forever = Clock(5, False), Clock(None, False)
    now[0] += 5
    assert not clock.spent
    assert clock.seconds == 5
    now[0] += 0.01
    assert clock.spent
    now[0] += 1e9
    assert not forever.spent


def test_a_bar_counts_every_stage(capsys):
    pytest.importorskip("rich")
    with Clock(None, True) as clock:
        for name, total in (("weights", 2), ("Jacobians", 3)):
            clock.begin(name, total)
            for _ in range(total - 1):
                clock.step()
        tasks = clock._bar.tasks
        assert [(t.description, t.total, t.completed) for t in tasks] == [
            ("weights", 2, 1),
            ("Jacobians", 3, 2),
        ]
        assert clock._bar.live.is_started
    assert not clock._bar.live.is_started
    assert capsys.readouterr().out == ""  # stdout is the user's


def test_the_bar_ends_with_an_error():
    pytest.importorskip("rich")
    clock = Clock(None, True)
    with pytest.raises(KeyboardInterrupt), clock:
        raise KeyboardInterrupt
    assert not clock._bar.live.is_started


@pytest.mark.parametrize(("terminal", "asked", "shown"), [
    (True, None, True), (False, None, False), (True, False, False), (False, True, True),
])  # fmt: skip
def test_a_bar_is_for_terminals(monkeypatch, terminal, asked, shown):
    pytest.importorskip("rich")
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", stream)
    assert (Clock(None, asked)._bar is not None) == shown


def test_no_bar_without_rich(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    clock = Clock(None, True)
    with clock:
        clock.begin("weights", 1)
        clock.step()


def test_every_step_of_a_diagnosis_is_told(monkeypatch):
    steps = []
    monkeypatch.setattr(Clock, "begin", lambda self, what, total: steps.append([what, total, 0]))

    def step(self):
        steps[-1][2] += 1

    monkeypatch.setattr(Clock, "step", step)
    import torch

    ac.diagnose(Plain("sdpa"), torch.randn(2, 6, 12))
    assert steps == [["weights", 1, 1], ["attention", 1, 1], ["Jacobians", 2, 2]]
