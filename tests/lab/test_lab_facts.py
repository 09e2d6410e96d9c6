"""Where numbers come from, and what a run shows of itself."""

import subprocess
import sys
import time

import pytest
import torch

from attncond.lab import facts
from attncond.lab.progress import Progress, tensorboard

CPU = torch.device("cpu")


def test_what_a_result_says_about_itself():
    found = facts.about(CPU, 2)
    assert found["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert found["hardware"]["processes"] == 2
    assert found["finished"].endswith("+00:00")
    assert not found["command"].startswith("/")


def test_the_source(monkeypatch):
    monkeypatch.setenv("ATTNCOND_COMMIT", "abc123")
    assert facts.git() == {"commit": "abc123", "dirty": False}
    monkeypatch.setenv("ATTNCOND_COMMIT", "abc123-dirty")
    assert facts.git() == {"commit": "abc123", "dirty": True}
    monkeypatch.delenv("ATTNCOND_COMMIT")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: (_ for _ in ()).throw(OSError("no git")))
    assert facts.git() is None


def test_memory():
    assert facts.begin_memory(CPU) == 0
    assert facts.peak_memory(CPU) > 2**20


ROW = {"epoch": 2, "train_loss": 1.5, "validation_accuracy": None, "images_per_second": 1234.5}


def test_plain_lines_where_there_is_no_terminal(capsys):
    with Progress("run", 10, shown=True) as shown:
        shown.at(5, 1.0)
        shown.evaluation(4, ROW)
        shown.evaluation(4, {**ROW, "validation_accuracy": 50.0})
    assert capsys.readouterr().err.splitlines() == [
        "run: epoch 2/4, loss 1.5000, 1,234 images/s",
        "run: epoch 2/4, loss 1.5000, validation 50.00%, 1,234 images/s",
    ]
    with Progress("run", 10, shown=False) as shown:
        shown.line("nothing")
    assert capsys.readouterr().err == ""


def test_a_bar_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress("run [red]", 10, shown=True) as shown:
        shown.at(5, 1.0)
        shown.evaluation(4, ROW)
    assert "run [red]: epoch 2/4" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize("step", [0, 2])
def test_tensorboard_shows_each_step_once_after_a_kill(tmp_path, step):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, steps in ((0, [0, 1, 2, 3]), (step, [3, 4] if step else [0, 1, 2, 3, 4])):
        writer = tensorboard(tmp_path, start)
        for each in steps:
            writer.add_scalar("loss", 1.0, each)
        writer.close()
        time.sleep(1.1)  # its files are ordered by the second
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("loss")
    assert [event.step for event in events] == [0, 1, 2, 3, 4]


def test_without_tensorboard(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert tensorboard(tmp_path, 0) is None
    assert list(tmp_path.iterdir()) == []
