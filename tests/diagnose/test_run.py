"""Which measurement goes into which row, in which order, and what a budget leaves out."""

import pytest
import torch
from plain_attention import Plain
from torch import nn

import attncond as ac
from attncond.diagnose import begin, jacobians, run
from attncond.diagnose.progress import Clock
from attncond.errors import DiagnosisError


class Two(nn.Module):
    """One attention that runs twice, and one that runs once."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = Plain("sdpa")
        self.last = Plain("matmul")
        self.unused = Plain("sdpa")

    def forward(self, x):
        for _ in range(2):
            x = x + 0.1 * self.shared(x).transpose(1, 2).flatten(2).repeat(1, 1, 2)[..., :12]
        return self.last(x)


@pytest.fixture
def two():
    torch.manual_seed(0)
    return Two().double()


X = torch.randn(2, 6, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", [(0, 6, 12), (2, 0, 12)])
def test_without_tokens_there_is_nothing_but_weights(shape):
    model = Plain("sdpa")
    report = ac.diagnose(model, torch.zeros(shape))
    assert report.notes == ("nothing to measure in the model: no tokens came",)
    for row in report.rows:
        assert row.values["jacobian_status"] == "not measured: no tokens"
        assert "q_kappa" in row.values
        assert "entropy" not in row.values


def test_rows_are_layers_runs_and_heads_in_order(two):
    report = ac.diagnose(two, X)
    keys = [(r.layer, r.call, r.head) for r in report.rows]
    want = [(0, c, h) for c in (0, 1) for h in (None, 0, 1)]
    want += [(layer, 0, h) for layer in (1, 2) for h in (None, 0, 1)]
    assert keys == want
    calls = [r.values["entropy"] for r in report.rows if r.layer == 0 and r.head == 0]
    assert calls[0] != calls[1]
    assert {r.values["jacobian_status"] for r in report.rows if r.layer == 2} == {"not reached"}
    assert all(r.values["q_kappa"] > 1 for r in report.rows)


def test_the_row_of_the_whole_is_its_heads(two):
    rows = [r.values for r in ac.diagnose(two, X, layers=[1]).rows]
    whole, heads = rows[0], rows[1:]
    assert whole["heads"] == 2
    assert whole["entropy"] == pytest.approx(sum(h["entropy"] for h in heads) / 2)
    assert whole["entropy_min"] == min(h["entropy_min"] for h in heads)
    assert whole["logit_max"] == max(h["logit_max"] for h in heads)
    worst = max(heads, key=lambda h: h["jacobian_kappa"])
    for name in ("kappa", "sigma_max", "certificate", "path", "tokens"):
        assert whole[f"jacobian_{name}"] == worst[f"jacobian_{name}"]


def test_jacobians_go_through_layers_before_heads(two, monkeypatch):
    order = []
    real = jacobians.Job.solve

    def solve(job):
        order.append((id(job.projections[0].owner), job.head))
        return real(job)

    monkeypatch.setattr(jacobians.Job, "solve", solve)
    ac.diagnose(two, X)
    first, last = id(two.shared.q), id(two.last.q)
    assert order == [(first, 0), (first, 0), (last, 0), (first, 1), (first, 1), (last, 1)]


def test_a_budget_keeps_what_is_there_and_names_the_rest(two, monkeypatch):
    solved = []
    real = jacobians.Job.solve
    monkeypatch.setattr(jacobians.Job, "solve", lambda job: solved.append(job) or real(job))
    monkeypatch.setattr(Clock, "spent", property(lambda self: len(solved) >= 2))
    report = ac.diagnose(two, X, time_budget=60.0)
    status = {r.key[::2] + r.key[3:]: r.values["jacobian_status"] for r in report.rows}
    assert status[0, 0, 0] == status[0, 1, 0] == "closed form"
    assert status[1, 0, 0] == status[0, 0, 1] == "not measured: time budget"
    assert report.notes == ("time budget of 60.0 s: 4 Jacobians not measured",)
    assert all("entropy" in r.values for r in report.rows if r.layer < 2)


def test_an_unresolved_head_does_not_hide_another(two, monkeypatch):
    real = jacobians.Job.solve

    def solve(job):
        if job.head == 1:
            return {"jacobian_kappa": None, "jacobian_status": "unresolved"}
        return real(job)

    monkeypatch.setattr(jacobians.Job, "solve", solve)
    rows = [r.values for r in ac.diagnose(two, X, layers=[0, 1]).rows if r.layer == 1]
    assert rows[2]["jacobian_kappa"] is None
    assert rows[0]["jacobian_kappa"] == rows[1]["jacobian_kappa"]
    assert (rows[0]["jacobian_status"], rows[0]["jacobian_unresolved"]) == ("unresolved", 1)
    assert rows[1]["jacobian_status"] == "closed form"


def failing(job):
    raise RuntimeError("no convergence")


def test_jobs_that_are_taken_are_of_first_runs_and_may_fail(two, monkeypatch):
    sites = list(enumerate(ac.inspect(two)))
    diagnosis = begin(two, sites, X, None, 6)
    assert [(layer, call) for layer, call, *_ in diagnosis.jobs] == [(0, 0), (1, 0)]
    report = ac.diagnose(two, X, tokens=6, samples=None, weights=False)
    diagnosis.measure_jacobians()
    assert diagnosis.troubles == []
    found = {(r.layer, r.call, r.head): r.values for r in diagnosis.rows()}
    for row in report.rows:
        if row.call == 0:
            assert found[row.layer, 0, row.head] == row.values
    monkeypatch.setattr(jacobians.Job, "solve", failing)
    diagnosis = begin(two, sites, X, None, 6)
    diagnosis.measure_jacobians()
    assert len(diagnosis.troubles) == 4
    assert diagnosis.troubles[0].startswith("the Jacobian of head 0 of shared cannot be solved")
    assert {r.values["jacobian_status"] for r in diagnosis.rows() if r.layer == 1} == {
        "not measured: no convergence"
    }
    with pytest.raises(RuntimeError, match="no convergence"):  # here the caller waits for it
        ac.diagnose(two, X)


def test_without_tokens_nothing_is_left_for_later(two):
    diagnosis = begin(two, list(enumerate(ac.inspect(two))), X, None, None)
    assert diagnosis.jobs == []
    assert all("entropy" in r.values for r in diagnosis.rows() if r.layer < 2)


def test_choose_sites():
    sites = ac.inspect(nn.ModuleList([Two(), Two()])).sites
    paths = [s.path for s in sites]
    assert [i for i, _ in run.choose_sites(sites, None)] == list(range(6))
    assert [i for i, _ in run.choose_sites(sites, [-1, 0, 0])] == [0, 5]
    chosen = run.choose_sites(sites, "1.*")
    assert [s.path for _, s in chosen] == [p for p in paths if p.startswith("1.")]
    with pytest.raises(DiagnosisError, match="6 attentions"):
        run.choose_sites(sites, [0, 6])


def test_gradients_of_unused_weights_are_zero(two):
    report = ac.diagnose(two, X, loss=lambda out: out.square().sum())
    norms = {(r.layer, r.head): r.values["k_grad_norm"] for r in report.rows if r.call == 0}
    assert norms[2, None] == norms[2, 0] == 0
    assert norms[1, None] == pytest.approx((norms[1, 0] ** 2 + norms[1, 1] ** 2) ** 0.5)
    assert norms[0, 0] > 0
    assert all(p.grad is None for p in two.parameters())
