"""Where numbers come from, and what a run shows of itself."""

import subprocess
import sys

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


def test_without_tensorboard(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert tensorboard(tmp_path, 0) is None
    assert list(tmp_path.iterdir()) == []
