"""The spectrum of what was run again: rows that cannot move, memory, and what is told of it."""

import pytest
import torch
from plain_attention import Normed
from torch.nn import functional as F

import attncond as ac
from attncond.diagnose import replayed, run
from attncond.diagnose.replayed import without_idle_rows
from attncond.diagnose.tokenwise import ReplayError

X = torch.randn(2, 6, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_directions_that_no_weight_moves_are_taken_out():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 9, generator=generator, dtype=torch.float64)
    w = torch.randn(9, 4, generator=generator, dtype=torch.float64)

    def output(w):
        out = F.normalize(x @ w, dim=1)
        return torch.cat([out[:3], 0 * out[3:4], (x @ w)[4:]])  # unit rows, zeros, a free one

    jacobian = torch.func.jacrev(output)(w).reshape(20, 36)
    kept = without_idle_rows(jacobian, output(w))
    assert kept.shape == (3 * 3 + 4, 36)
    want = torch.linalg.svdvals(jacobian)
    assert torch.allclose(torch.linalg.svdvals(kept), want[:13])
    assert float(want[13]) < 1e-14 * float(want[0])


def test_a_free_output_is_left_alone():
    jacobian = torch.randn(8, 30, dtype=torch.float64)
    assert without_idle_rows(jacobian, torch.randn(2, 4, dtype=torch.float64)) is jacobian


def test_too_large_to_write_down_has_the_largest_singular_value(monkeypatch):
    torch.manual_seed(0)
    model = Normed("sdpa").double()
    whole = ac.diagnose(model, X).rows[1].values
    monkeypatch.setattr(replayed, "memory_limit", lambda device: 0)
    values = ac.diagnose(model, X).rows[1].values
    assert values["jacobian_path"] == "matrix-free"
    assert values["jacobian_status"] == "unresolved"
    assert values["jacobian_kappa"] is None
    assert values["jacobian_sigma_max"] == pytest.approx(whole["jacobian_sigma_max"], rel=1e-10)


def test_what_is_taken_needs_no_model_and_no_more_room_than_there_is(monkeypatch):
    torch.manual_seed(0)
    model, held, real = Normed("sdpa").double(), [], run.job_of
    x = X.clone()
    monkeypatch.setattr(run, "job_of", lambda *args: held.append(real(*args)) or held[-1])
    rows = ac.diagnose(model, x).rows
    every = held[0].taken([0, 1], 1 << 30)
    size = every.written // 2
    some, none = held[0].taken([0, 1], size), held[0].taken([0, 1], size - 1)
    assert (some.written, none.written) == (size, 0)
    assert isinstance(some.of_head(1), replayed._Solved)
    with torch.no_grad():
        for tensor in (x, *model.parameters()):
            tensor.zero_()
    for taken in (every, some, none):
        for h in (0, 1):
            found, want = taken.of_head(h).solve(), rows[h + 1].values
            assert found == {k: v for k, v in want.items() if k in found}
            assert found["jacobian_path"] == "dense"


def test_what_cannot_be_run_again_says_so_once_taken(monkeypatch):
    held, real = [], run.job_of
    monkeypatch.setattr(run, "job_of", lambda *args: held.append(real(*args)) or held[-1])
    ac.diagnose(Normed("sdpa").double(), X)

    def trace(replay, head):
        raise ReplayError("it changed")

    monkeypatch.setattr(replayed.Replay, "trace", trace)
    found = held[0].taken([0], 1 << 30).of_head(0).solve()
    assert found == held[0].solve() == {"jacobian_status": "not measured: it changed"}


def test_sampled_heads_only():
    model = Normed("sdpa")
    report = ac.diagnose(model, X.float(), heads=[1], tokens=4)
    assert [r.head for r in report.rows] == [None, 1]
    assert report.rows[1].values["jacobian_tokens"] == 4
    assert report.rows[1].values["jacobian_path"] == "dense"
