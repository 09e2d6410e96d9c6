"""Extreme singular values of a matrix that is written down, far below those of its Gram matrix."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attncond.lanczos import Bound, Extremes, Side, beside, extremes, rounding

__all__ = ["Written", "matrix_extremes"]

_EPS = torch.finfo(torch.float64).eps
_MOST = 2048  # beyond this side all singular values take minutes on a CPU
_WIDE = 256  # dimensions of a null space that are looked for
_SMALL = 1e-6  # what the Gram matrix's rounding may leave of it at first, in units of σ_max
_GAP = 1e3  # between the singular values that count and those that are rounding


class Written:
    """A matrix as an operator."""

    def __init__(self, matrix: Tensor) -> None:
        self._matrix = matrix

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return self._matrix.shape[0], self._matrix.shape[1]

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self._matrix.device

    def forward(self, vector: Tensor) -> Tensor:
        """J·v."""
        return self._matrix @ vector

    def adjoint(self, vector: Tensor) -> Tensor:
        """Jᵀ·u."""
        return self._matrix.mT @ vector

    def gram(self, side: Side) -> Tensor:
        """JJᵀ or JᵀJ."""
        j = self._matrix
        return j @ j.mT if side == "rows" else j.mT @ j

    def dense(self) -> Tensor:
        """J."""
        return self._matrix


def matrix_extremes(matrix: Tensor) -> Extremes:
    """σ_max and σ_min at the rank, of which nothing is known but the matrix's shape.

    First as for any operator. Where the matrix is singular, a null space is looked for and taken
    out; where that fails, all singular values are computed. The rank is where they fall by a factor
    of 1000 at least: without such a gap, or with sides above 2048, the answer is None. ``floor`` is
    what the way taken resolves.
    """
    size = min(matrix.shape)
    found = extremes(Written(matrix), Bound(size), count=False)
    sigma, error = found.sigma_max, found.sigma_max_error
    if found.sigma_min is not None or not sigma > 0 or size <= 1:
        return found
    if (without := _deflated(matrix, found)) is not None:
        return without
    floor = rounding(matrix.shape, sigma)
    if size > _MOST:
        return Extremes(sigma, error, None, None, None, "numerical", None, floor)
    values = torch.linalg.svdvals(matrix).tolist()
    rank = sum(value > floor for value in values)
    if rank < size and values[rank - 1] <= _GAP * values[rank]:
        return Extremes(sigma, error, None, None, None, "numerical", rank, floor)
    off = 4 * math.sqrt(size) * _EPS * sigma
    return Extremes(sigma, error, values[rank - 1], off, rank, "numerical", rank, floor)


def _deflated(matrix: Tensor, found: Extremes) -> Extremes | None:
    """With the null space of few dimensions taken out, if there is one that stands apart."""
    rows, columns = matrix.shape
    side: Side = "rows" if rows <= columns else "columns"
    wide = matrix if rows <= columns else matrix.mT
    size, top = len(wide), found.sigma_max**2
    gram = wide @ wide.mT
    gram.diagonal().add_(size * _EPS * top)
    factor, info = torch.linalg.cholesky_ex(gram)
    if int(info):
        return None
    generator = torch.Generator().manual_seed(0)
    width = min(_WIDE, size)
    block = torch.randn(size, width, generator=generator, dtype=torch.float64).to(wide.device)
    for _ in range(3):  # what is null grows by 1/(n·eps), all else by κ² at the most
        block = torch.linalg.qr(torch.cholesky_solve(block, factor))[0]
    turn, values, _ = torch.linalg.svd(block.mT @ wide, full_matrices=False)
    count = int((values < _SMALL * found.sigma_max).sum())
    if not 0 < count < width:
        return None  # none, or more of it than was looked for
    null = block @ turn[:, -count:]
    for _ in range(2):  # as in `least`: the residual is that of the matrix itself
        null = null - torch.cholesky_solve(wide @ (wide.mT @ null), factor)
        null = torch.linalg.qr(null)[0]
    left = float(torch.linalg.matrix_norm(wide.mT @ null, 2))
    if left > rounding(matrix.shape, found.sigma_max) or left * _GAP > values[-count - 1]:
        return None
    return beside(Written(matrix), side, null, found)
