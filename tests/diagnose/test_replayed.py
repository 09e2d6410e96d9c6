"""The spectrum of what was run again: rows that cannot move, memory, and what is told of it."""

import pytest
import torch
from test_jacobians import Normed
from torch.nn import functional as F

import attncond as ac
from attncond.diagnose import replayed
from attncond.diagnose.replayed import without_idle_rows

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


def test_sampled_heads_only():
    model = Normed("sdpa")
    report = ac.diagnose(model, X.float(), heads=[1], tokens=4)
    assert [r.head for r in report.rows] == [None, 1]
    assert report.rows[1].values["jacobian_tokens"] == 4
    assert report.rows[1].values["jacobian_path"] == "dense"
