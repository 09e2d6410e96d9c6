"""What attncond diagnose does with a loaded model: measure it, before and after, and write."""

import json

import pytest
import torch
from torch import nn

import attncond as ac
from attncond.diagnose import command
from attncond.diagnose.command import (
    Job,
    check_comparable,
    checked_output,
    read_earlier,
    write,
)
from attncond.diagnose.inputs import Inputs
from attncond.errors import ConditioningError, DiagnosisError
from attncond.loading import Loaded

WIDTH, HEADS = 8, 2


class Stack(nn.Module):
    """Attentions under names of one's choice."""

    def __init__(self, *names):
        super().__init__()
        torch.manual_seed(0)
        for name in names:
            self.add_module(name, nn.MultiheadAttention(WIDTH, HEADS, batch_first=True))

    def forward(self, x):
        for attention in self.children():
            x = x + attention(x, x, x)[0]
        return x


def loaded(model, **more):
    return Loaded(model, "random, seed 0", ["a note of the loader"], **more)


def job(model, width=WIDTH, own=True, **options):
    inputs = Inputs(torch.randn(2, 5, width), "made here", ["a note of the input"])
    return Job("mine:make", loaded(model), inputs, {"jacobian": False, **options}, own=own)


def kappas(report):
    return [row.values["q_kappa"] for row in report.rows if row.head is None]


def test_a_report_says_where_everything_comes_from():
    report, before = job(Stack("a")).run((), None)
    assert before is None
    told = {key: report.info[key] for key in ("source", "weights", "input", "method")}
    assert told == {
        "source": "mine:make", "weights": "random, seed 0", "input": "made here", "method": None
    }  # fmt: skip
    assert report.notes[-2:] == ("a note of the loader", "a note of the input")


def test_with_methods_the_model_is_measured_without_them_too():
    model = Stack("a", "b")
    state = {k: v.clone() for k, v in model.state_dict().items()}
    methods = (ac.Spectral(kappa=1.5), ac.RemoveGap())
    report, before = job(model).run(methods, None)
    assert report.info["method"] == "spectral:kappa=1.5 + gap"
    assert before.info["method"] is None
    stored = model.a.in_proj_weight[:WIDTH].detach()
    assert max(kappas(report)) <= 1.5 * (1 + 1e-6)
    assert kappas(before)[0] == pytest.approx(float(torch.linalg.cond(stored.double())), rel=1e-6)
    assert model.state_dict().keys() == state.keys()  # stock again
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


def test_an_earlier_report_is_compared_with_and_nothing_is_measured_twice(monkeypatch):
    earlier, _ = job(Stack("a")).run((), None)
    measured = []
    real = command.diagnose

    def counted(*args, **options):
        measured.append(args)
        return real(*args, **options)

    monkeypatch.setattr(command, "diagnose", counted)
    report, before = job(Stack("a")).run((ac.Spectral(),), earlier)
    assert before is earlier
    assert len(measured) == 1
    assert max(kappas(report)) <= 2 * (1 + 1e-6)


def test_what_cannot_be_conditioned_is_told_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(command, "diagnose", lambda *_, **__: pytest.fail("measured"))
    with pytest.raises(ConditioningError, match="Spectral"):
        job(Stack("a")).run((ac.Spectral(), ac.Spectral(kappa=3.0)), None)


@pytest.mark.parametrize("own", [False, True])
def test_an_input_of_ours_that_fails_points_to_one_of_theirs(own):
    with pytest.raises(DiagnosisError, match="cannot run on this batch") as told:
        job(Stack("a"), width=WIDTH + 1, own=own).run((), None)
    assert ("This input was made by attncond" in str(told.value)) != own


def test_other_mistakes_are_told_as_they_are():
    with pytest.raises(DiagnosisError, match="none of the model's") as told:
        job(Stack("a"), own=False, layers=[7]).run((), None)
    assert "made by attncond" not in str(told.value)
    assert "numbered from 0: " in str(told.value)
    assert "..." not in str(told.value)  # those named are all


@pytest.mark.parametrize("name", ["r.html", "r.HTM", "new/deeper/r.json"])
def test_an_output_that_can_be_written(tmp_path, name):
    path = tmp_path / name
    assert checked_output(path) == path
    assert path.parent.is_dir()
    assert not list(path.parent.iterdir())  # nothing is left of the trial


def test_an_output_that_cannot_be_written_is_refused_before_the_work(tmp_path):
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "file").write_text("mine")
    for name, said in {
        "report.pdf": r"ends in \.html or \.json, not '.*report\.pdf'",
        "report": r"ends in \.html or \.json",
        "folder.html": "is a folder: --out takes the name of a file",
        "file/report.html": r"cannot write .*file/report\.html",
    }.items():
        with pytest.raises(DiagnosisError, match=said):
            checked_output(tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine"


def test_the_ending_decides_what_is_written(tmp_path):
    report, before = job(Stack("a")).run((ac.Spectral(),), None)
    write(tmp_path / "r.JSON", report, before)
    assert json.loads((tmp_path / "r.JSON").read_text())["info"]["source"] == "mine:make"
    assert kappas(read_earlier(tmp_path / "r.JSON")) == kappas(report)
    page = write(tmp_path / "r.html", report, before).read_text(encoding="utf-8")
    assert page.lstrip().lower().startswith("<!doctype html>")
    with pytest.raises(DiagnosisError, match=r"cannot write .*gone"):
        write(tmp_path / "gone" / "r.json", report, None)


def test_an_earlier_report_that_is_none(tmp_path):
    with pytest.raises(DiagnosisError, match=r"cannot read .*gone\.json: No such file"):
        read_earlier(tmp_path / "gone.json")
    for text, said in {"": "is not JSON", "{": "is not JSON", "{}": "its schema is None"}.items():
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(DiagnosisError, match=rf"bad\.json.*{said}"):
            read_earlier(tmp_path / "bad.json")


def test_reports_without_a_common_attention(tmp_path):
    report, _ = job(Stack("a", "b")).run((), None)
    check_comparable(Stack("b", "c"), report, tmp_path)
    with pytest.raises(DiagnosisError, match=r"another model: it speaks of a, b, .* has c, \.\.\."):
        check_comparable(Stack("c"), report, tmp_path)
    with pytest.raises(DiagnosisError, match="this one has no attention"):
        check_comparable(nn.Linear(2, 2), report, tmp_path)
