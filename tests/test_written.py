"""Extreme singular values of matrices whose spectra are known."""

import math

import pytest
import torch
from spectra import with_spectrum

from attncond.written import Written, matrix_extremes


@pytest.mark.parametrize("shape", [(300, 400), (400, 300), (60, 90), (90, 60)])
@pytest.mark.parametrize("exponent", [1, 4, 7, 10])
def test_full_rank_far_below_the_gram_matrix(shape, exponent):
    size = min(shape)
    sigma = torch.logspace(1, 1 - exponent, size, dtype=torch.float64)
    found = matrix_extremes(with_spectrum(*shape, sigma))
    assert found.sigma_max == pytest.approx(10, rel=1e-12)
    want = 10 ** (1 - exponent)
    assert found.sigma_min == pytest.approx(want, rel=10 ** (exponent - 13))
    assert abs(found.sigma_min - want) <= found.sigma_min_error
    assert (found.rank, found.numerical_rank) == (size, size)


@pytest.mark.parametrize("low", [1e-2, 1e-8])
def test_a_rank_is_where_singular_values_fall(low):
    sigma = torch.linspace(1, low, 270, dtype=torch.float64)
    found = matrix_extremes(with_spectrum(300, 400, sigma))
    assert found.rank == 270
    assert found.rank_rule == "numerical"
    assert found.sigma_min == pytest.approx(low, rel=1e-5)


@pytest.mark.parametrize("shape", [(400, 500), (500, 400)])
@pytest.mark.parametrize("missing", [1, 40, 255, 300])
def test_null_spaces_narrow_and_wide(shape, missing, monkeypatch):
    if missing < 256:  # found without all singular values
        monkeypatch.setattr(torch.linalg, "svdvals", None)
    sigma = torch.logspace(0, -3, 400 - missing, dtype=torch.float64)
    found = matrix_extremes(with_spectrum(*shape, sigma))
    assert found.rank == 400 - missing
    assert found.sigma_min == pytest.approx(1e-3, rel=1e-10)
    assert abs(found.sigma_min - 1e-3) <= found.sigma_min_error


def test_a_spectrum_that_fades_out_has_no_rank():
    sigma = torch.logspace(0, -17, 300, dtype=torch.float64)
    found = matrix_extremes(with_spectrum(300, 400, sigma))
    assert found.sigma_min is None
    assert found.rank is None
    assert found.sigma_max == pytest.approx(1)


def test_zero():
    found = matrix_extremes(torch.zeros(300, 280, dtype=torch.float64))
    assert (found.sigma_max, found.sigma_min, found.rank) == (0.0, None, 0)


def test_operator_is_the_matrix():
    a = torch.randn(5, 7, dtype=torch.float64)
    op = Written(a)
    assert op.shape == (5, 7)
    assert torch.equal(op.forward(torch.ones(7, dtype=a.dtype)), a @ torch.ones(7, dtype=a.dtype))
    assert torch.allclose(op.adjoint(torch.ones(5, dtype=a.dtype)), a.sum(0))
    assert torch.equal(op.gram("rows"), a @ a.mT)
    assert torch.equal(op.gram("columns"), a.mT @ a)
    assert op.dense() is a
    assert math.isfinite(matrix_extremes(a).sigma_max)
