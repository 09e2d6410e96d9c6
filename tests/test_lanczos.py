"""Extreme eigenvalues and singular values against dense decompositions."""

from __future__ import annotations

import math

import pytest
import torch
from spectra import gaussian
from torch import Tensor

from attncond import lanczos
from attncond.lanczos import Bound, extremes, largest


class Matrix:
    """A plain matrix as an operator."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self.device = matrix.device

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape[0], self.matrix.shape[1]

    def forward(self, vector: Tensor) -> Tensor:
        return self.matrix @ vector

    def adjoint(self, vector: Tensor) -> Tensor:
        return self.matrix.mT @ vector

    def gram(self, side: str) -> Tensor:
        a = self.matrix if side == "rows" else self.matrix.mT
        return (a @ a.mT).tril()

    def dense(self) -> Tensor:
        return self.matrix


def with_spectrum(rows: int, columns: int, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix, and an orthonormal basis of its null space."""
    left = torch.linalg.qr(gaussian(rows, len(sigma)))[0]
    right = torch.linalg.qr(gaussian(columns, columns, seed=1))[0]
    return (left * sigma) @ right[:, : len(sigma)].mT, right[:, len(sigma) :]


SPECTRA = {
    "one": torch.tensor([2.0]),
    "all equal": torch.full((50,), 3.0),
    "spread": torch.logspace(0, -6, 120),
    "close pair": torch.cat([torch.tensor([1.0, 1 - 1e-6]), torch.linspace(0.9, 0.1, 90)]),
    "multiple": torch.cat([torch.ones(7), torch.linspace(0.9, 0, 80)]),
    "dense near the top": 1 - 1e-3 * torch.linspace(0, 1, 300) ** 0.5,
}


@pytest.mark.parametrize("name", SPECTRA)
def test_the_largest_eigenvalue(name: str) -> None:
    values = SPECTRA[name].double()
    basis = torch.linalg.qr(gaussian(len(values), len(values)))[0]
    matrix = (basis * values) @ basis.mT
    found = largest(lambda v: matrix @ v, len(values))
    assert found.value == pytest.approx(float(values.max()), rel=1e-11)
    assert abs(found.value - float(values.max())) <= found.error + 1e-14
    residual = matrix @ found.vector - found.value * found.vector
    assert float(residual.norm()) < 1e-5
    assert found.steps <= len(values)


def test_the_map_that_is_zero() -> None:
    assert largest(torch.zeros_like, 5).value == 0
    for small in (0, 256):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lanczos, "SMALL", small)
            found = extremes(Matrix(torch.zeros(4, 6).double()), Bound(4))
            assert (found.sigma_max, found.sigma_min, found.rank) == (0, None, 0)


@pytest.mark.parametrize("kappa", [1.0, 1e3, 1e5, 1e6])
@pytest.mark.parametrize(
    ("rows", "columns", "rank"), [(60, 90, 60), (90, 60, 60), (90, 60, 50), (60, 90, 50)]
)
def test_both_ends_by_every_route(kappa, rows, columns, rank, monkeypatch) -> None:
    sigma = torch.logspace(0, -math.log10(kappa), rank, dtype=torch.float64)
    matrix, null = with_spectrum(rows, columns, sigma)
    bounds = [Bound(rank, "given")]
    if rank == min(rows, columns):
        bounds.append(Bound(rank))
    elif columns < rows:
        bounds.append(Bound(rank, "formula", null))
    for small in (256, 0):
        monkeypatch.setattr(lanczos, "SMALL", small)
        for bound in bounds:
            found = extremes(Matrix(matrix), bound)
            assert found.rank == found.numerical_rank == rank
            assert found.rank_rule == (bound.rule or "attained")
            assert found.sigma_max == pytest.approx(1, rel=1e-12)
            assert found.sigma_min == pytest.approx(1 / kappa, rel=max(1e-11, 1e-14 * kappa))
            assert (
                abs(found.sigma_min - 1 / kappa) <= found.sigma_min_error + 2e-15
            )  # of the matrix itself


@pytest.mark.parametrize("small", [0, 256])
@pytest.mark.parametrize("kappa", [1e8, 1e10, 1e12])
@pytest.mark.parametrize(("rows", "columns", "rank"), [(60, 90, 60), (90, 60, 60), (90, 60, 50)])
def test_what_a_gram_matrix_does_not_hold_the_matrix_does(
    small, kappa, rows, columns, rank, monkeypatch
) -> None:
    monkeypatch.setattr(lanczos, "SMALL", small)
    sigma = torch.logspace(0, -math.log10(kappa), rank, dtype=torch.float64)
    matrix, null = with_spectrum(rows, columns, sigma)
    found = extremes(
        Matrix(matrix), Bound(rank, "formula", null if rank < columns < rows else None)
    )
    assert found.rank == found.numerical_rank == rank
    assert found.sigma_min == pytest.approx(1 / kappa, rel=1e-14 * kappa)
    assert abs(found.sigma_min - 1 / kappa) <= found.sigma_min_error + 2e-15
    assert found.floor < found.sigma_min


def test_a_matrix_is_not_written_down_beyond_the_memory_that_is_allowed(monkeypatch) -> None:
    monkeypatch.setattr(lanczos, "SMALL", 0)
    matrix, _ = with_spectrum(60, 90, torch.logspace(0, -9, 60, dtype=torch.float64))
    assert extremes(Matrix(matrix), Bound(60, "formula"), memory=1e6).sigma_min is not None
    found = extremes(Matrix(matrix), Bound(60, "formula"), memory=1e5)
    assert found.sigma_min is None
    assert found.floor == pytest.approx(math.sqrt(60 * 2**-52), rel=1e-9)
    monkeypatch.setattr(lanczos, "_WORK", {"cpu": 1e5})  # nor where that would take hours
    assert extremes(Matrix(matrix), Bound(60, "formula")).sigma_min is None


@pytest.mark.parametrize("small", [0, 256])
def test_below_the_floor_there_is_no_number(small, monkeypatch) -> None:
    monkeypatch.setattr(lanczos, "SMALL", small)
    sigma = torch.logspace(0, -14, 60, dtype=torch.float64)
    matrix, _ = with_spectrum(60, 90, sigma)
    found = extremes(Matrix(matrix), Bound(60, "formula"))
    assert found.sigma_min is found.sigma_min_error is None
    assert found.rank == 60
    assert found.floor == pytest.approx(math.sqrt(60 * 2**-52), rel=1e-9)
    assert abs(found.numerical_rank - int((sigma > found.floor).sum())) <= 1
    monkeypatch.setattr(lanczos, "_EIGEN", 10)  # as if all eigenvalues were too many
    if small == 0:
        found = extremes(Matrix(matrix), Bound(60))
        assert (found.sigma_min, found.rank, found.numerical_rank) == (None, None, None)


@pytest.mark.parametrize("small", [0, 256])
def test_a_rank_that_nobody_knows_is_counted(small, monkeypatch) -> None:
    monkeypatch.setattr(lanczos, "SMALL", small)
    matrix, _ = with_spectrum(60, 90, torch.linspace(1, 0.5, 40).double())
    found = extremes(Matrix(matrix), Bound(60))
    assert (found.rank, found.rank_rule, found.numerical_rank) == (40, "numerical", 40)
    assert found.sigma_min == pytest.approx(0.5, rel=1e-12)
    assert extremes(Matrix(matrix), Bound(60), smallest=False).sigma_min is None
