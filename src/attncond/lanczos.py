"""The extreme singular values of an operator, each with an error estimate or not given at all."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "Bound",
    "Extremes",
    "Low",
    "Operator",
    "Ritz",
    "extremes",
    "largest",
    "least",
    "rounding",
]

Side = Literal["rows", "columns"]
Rule = Literal["formula", "attained", "numerical", "given"]

_EPS = torch.finfo(torch.float64).eps
_ROUNDING = 16 * _EPS  # of the length of a product with J, in units of σ_max
_SEED = 0x5EED
SMALL = 256  # up to this side the SVD of the matrix itself is as fast, and more exact
_EIGEN = 4096  # beyond this side all eigenvalues of a Gram matrix take minutes on a CPU
_WORK = {"cpu": 2e12, "cuda": 4e13}  # operations of a QR decomposition, about a minute
_STEPS = 400
_FALL = 1e-2  # from the last eigenvalue that counts to the next, which then is rounding


class Operator(Protocol):
    """A linear map in float64 that can write down its Gram matrices."""

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""

    @property
    def device(self) -> torch.device:
        """Where the vectors live."""

    def forward(self, vector: Tensor) -> Tensor:
        """J·v: ``(columns,) -> (rows,)``."""

    def adjoint(self, vector: Tensor) -> Tensor:
        """Jᵀ·u: ``(rows,) -> (columns,)``."""

    def gram(self, side: Side) -> Tensor:
        """JJᵀ ("rows") or JᵀJ ("columns"); only the lower triangle has to be there."""

    def dense(self) -> Tensor:
        """J itself."""


@dataclass(frozen=True)
class Bound:
    """What is known of a rank before anything is computed.

    ``rank`` is not exceeded, and with a rule ("formula", "given") it is the rank. ``null`` holds
    orthonormal columns that J maps to zero; they may stop short of J's last columns.
    """

    rank: int
    rule: Rule | None = None
    null: Tensor | None = None


@dataclass(frozen=True)
class Extremes:
    """σ_max and the singular value at the rank, with errors; None means unresolved."""

    sigma_max: float
    sigma_max_error: float
    sigma_min: float | None
    sigma_min_error: float | None
    rank: int | None
    rank_rule: Rule
    numerical_rank: int | None
    floor: float


class Low(NamedTuple):
    """σ_min, its error, and the least σ that the way it was found by can tell from rounding."""

    sigma: float
    error: float
    floor: float


@dataclass(frozen=True)
class Ritz:
    """The largest eigenvalue of a symmetric operator as Lanczos found it."""

    value: float
    vector: Tensor
    second: float
    error: float
    steps: int


def largest(
    apply: Callable[[Tensor], Tensor],
    size: int,
    device: torch.device | str = "cpu",
    tolerance: float = 1e-13,
) -> Ritz:
    """Lanczos with full reorthogonalisation for a positive semidefinite map of ``(size,)``.

    Deterministic, and without effect on torch's random state.

    >>> a = torch.diag(torch.tensor([1.0, 4.0, 2.0], dtype=torch.float64))
    >>> round(largest(lambda v: a @ v, 3).value, 12)
    4.0
    """
    generator = torch.Generator().manual_seed(_SEED)
    start = torch.randn(size, generator=generator, dtype=torch.float64, device="cpu").to(device)
    most = min(size, _STEPS)
    basis = start.new_empty(min(most, 64), size)
    basis[0] = start / torch.linalg.vector_norm(start)
    diagonal: list[float] = []
    beside: list[float] = []
    while True:
        k = len(diagonal)
        now = basis[: k + 1]
        image = apply(now[k])
        diagonal.append(float(image @ now[k]))
        for _ in range(2):  # twice is enough (Kahan and Parlett)
            image = image - now.mT @ (now @ image)
        length = float(torch.linalg.vector_norm(image))
        tri = np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1)
        values, vectors = np.linalg.eigh(tri)
        top, second = float(values[-1]), float(values[-2]) if k else 0.0
        residual = abs(length * float(vectors[-1, -1]))
        error = _eigenvalue_error(residual, top - second)
        # An invariant subspace, too, ends the search: what remains of the image is rounding.
        done = length <= 4 * _EPS * abs(top) or (k >= 7 and error <= tolerance * top)
        if done or k + 1 == most or not math.isfinite(top):
            weights = torch.from_numpy(vectors[:, -1].copy()).to(device)
            vector = now.mT @ weights
            return Ritz(top, vector / torch.linalg.vector_norm(vector), second, error, k + 1)
        beside.append(length)
        if k + 1 == len(basis):
            basis = torch.cat([basis, basis.new_empty(min(len(basis), most - len(basis)), size)])
        basis[k + 1] = image / length


def extremes(
    operator: Operator,
    bound: Bound,
    *,
    smallest: bool = True,
    count: bool = True,
    memory: float = math.inf,
) -> Extremes:
    """σ_max, and σ at the rank that ``bound`` names or that the numbers show.

    σ_max comes from Lanczos, the other end from `least`, which takes no more than ``memory`` bytes
    beside the Gram matrix. A σ that cannot be told from rounding is not given: None, which reads
    "unresolved". So does a rank that only ``count``ing can tell, unless singular values fall off
    behind it.
    """
    if min(operator.shape) <= SMALL and smallest:
        return _from_svd(operator, bound)
    rows, columns = operator.shape
    size = min(rows, columns)
    if rows <= columns:
        top = largest(lambda u: operator.forward(operator.adjoint(u)), rows, operator.device)
    else:
        top = largest(lambda v: operator.adjoint(operator.forward(v)), columns, operator.device)
    sigma = math.sqrt(max(top.value, 0.0))
    floor = math.sqrt(size * _EPS) * sigma
    error = _ROUNDING * sigma + top.error / (2 * sigma or 1)
    rule = bound.rule
    known = bound.rank if rule else None
    if not smallest:
        return Extremes(sigma, error, None, None, known, rule or "numerical", None, floor)
    if sigma == 0:
        return Extremes(0.0, 0.0, None, None, 0, "numerical", 0, 0.0)
    nullity = 0 if bound.null is None else bound.null.shape[1]
    full = bound.rank == rows or bound.rank == columns - nullity
    if full:
        side: Side = "rows" if bound.rank == rows else "columns"
        low = least(operator, side, bound.null if side == "columns" else None, top.value, memory)
        if low is not None:
            at, off, floor = low
            rank = bound.rank
            return Extremes(sigma, error, at, off, rank, rule or "attained", rank, floor)
    if size > _EIGEN or not count:
        return Extremes(sigma, error, None, None, known, rule or "numerical", None, floor)
    side = "rows" if rows <= columns else "columns"
    if full and rule:
        squares = torch.linalg.eigvalsh(operator.gram(side))
        found = int((squares > floor**2).sum())
        return Extremes(sigma, error, None, None, bound.rank, rule, found, floor)
    squares, vectors = torch.linalg.eigh(operator.gram(side))
    found = int((squares > floor**2).sum())
    rank = bound.rank if rule else found
    falls = bool(rule) or found in (0, size) or squares[-found - 1] < _FALL * squares[-found]
    if rank == 0 or float(squares[-rank]) < floor**2 or not bool(falls):
        return Extremes(sigma, error, None, None, rank, rule or "numerical", found, floor)
    gaps = (squares - squares[-rank]).abs().sort().values
    at, off = _corrected(operator, side, vectors[:, -rank], float(gaps[1]) if size > 1 else 0.0)
    off += _ROUNDING * sigma
    return Extremes(sigma, error, at, off, rank, rule or "numerical", found, floor)


def _eigenvalue_error(residual: float, gap: float) -> float:
    # Both bounds are classical (Parlett, The Symmetric Eigenvalue Problem, Thms 4.5.1, 11.7.1).
    return min(residual, residual**2 / gap) if gap > 0 else residual


def _from_svd(operator: Operator, bound: Bound) -> Extremes:
    matrix = operator.dense()
    values = torch.linalg.svdvals(matrix).tolist()
    size, sigma = min(matrix.shape), values[0]
    error = 4 * math.sqrt(size) * _EPS * sigma
    nonzero = sum(value > max(matrix.shape) * _EPS * sigma for value in values)
    if sigma == 0:
        return Extremes(0.0, 0.0, None, None, 0, "numerical", 0, 0.0)
    rank = bound.rank if bound.rule else min(bound.rank, nonzero)
    rule = bound.rule or ("attained" if rank == bound.rank else "numerical")
    low = values[rank - 1] if rank else 0.0
    coarse, floor = math.sqrt(size * _EPS) * sigma, rounding(matrix.shape, sigma)
    # Where a rank is only counted, what counts has to stand clear of rounding.
    if rank == 0 or low < (coarse if rule == "numerical" else floor):
        found = sum(value > coarse for value in values)
        return Extremes(sigma, error, None, None, rank, rule, found, coarse)
    return Extremes(sigma, error, low, error, rank, rule, rank, floor)


def rounding(shape: tuple[int, ...], sigma: float) -> float:
    """Singular values of a matrix itself, not of its Gram matrix, that may be rounding."""
    return 10 * max(shape) * _EPS * sigma


def least(
    operator: Operator, side: Side, null: Tensor | None, top: float, memory: float = math.inf
) -> Low | None:
    """σ_min at full rank on one side, or None where it cannot be told from rounding.

    ``null`` holds orthonormal columns that the matrix maps to zero from that side, and ``top`` is
    σ_max². First Lanczos on the inverse: a Cholesky factor of the float64 Gram matrix. It is then
    corrected with J itself, so that the error is that of J and not of its square. Where κ² is
    beyond float64 the factor is R of a QR decomposition of J, as far as ``memory`` allows.
    """
    low = _from_gram(operator, side, null, top)
    if low is not None and low.sigma >= low.floor and low.error <= 0.1 * low.sigma:
        return low
    low = _from_qr(operator, side, null, math.sqrt(top), memory)
    return low if low is not None and low.sigma >= low.floor else None


def beside(operator: Operator, side: Side, null: Tensor, found: Extremes) -> Extremes | None:
    """``found`` with σ_min where the zeros of ``null``, as in `least`, are taken out; or None."""
    low = least(operator, side, null, found.sigma_max**2)
    if low is None:
        return None
    rank, (at, off, floor) = min(operator.shape) - null.shape[1], low
    top, error = found.sigma_max, found.sigma_max_error
    return Extremes(top, error, at, off, rank, "numerical", rank, floor)


def _from_gram(operator: Operator, side: Side, null: Tensor | None, top: float) -> Low | None:
    gram = operator.gram(side)
    size = len(gram)
    if null is not None and null.shape[1]:
        # Moves the zeros to the other end of the spectrum.
        k = len(null)
        gram[:k, :k] += (top * null) @ null.mT
    factor, info = torch.linalg.cholesky_ex(gram)
    del gram
    if int(info) or not bool(factor.diagonal().isfinite().all()):
        return None
    solve = _inverse(factor)
    found = largest(solve, size, operator.device, tolerance=1e-12)
    if found.value <= 0 or not math.isfinite(found.value):
        return None
    vector = found.vector
    gap = (1 / found.second if found.second > 0 else top) - 1 / found.value
    for _ in range(2):
        # A preconditioned step (PINVIT): it removes what the Gram matrix, rounded, put into the
        # vector, because this residual is that of J.
        vector = vector - solve(_residual(operator, side, vector)[1])
        if null is not None:
            vector[: len(null)] -= null @ (null.mT @ vector[: len(null)])
        vector = vector / torch.linalg.vector_norm(vector)
    sigma, error = _corrected(operator, side, vector, gap)
    return Low(sigma, error + _ROUNDING * math.sqrt(top), math.sqrt(size * _EPS * top))


def _from_qr(
    operator: Operator, side: Side, null: Tensor | None, sigma: float, memory: float
) -> Low | None:
    size, across = operator.shape if side == "rows" else operator.shape[::-1]
    work = 2.0 * across * size**2
    if work > _WORK.get(operator.device.type, 0.0) or 24 * size * across > memory:
        return None
    tall = operator.dense()
    tall = tall.mT if side == "rows" else tall
    if null is not None and null.shape[1]:
        rest = tall.new_zeros(null.shape[1], size - len(null))
        tall = torch.cat([tall, torch.cat([sigma * null.mT, rest], 1)])
    r: Tensor = torch.linalg.qr(tall, mode="r")[1]
    floor = rounding(operator.shape, sigma)
    if float(r.diagonal().abs().min()) <= floor:
        return None
    found = largest(_inverse(r.mT), size, operator.device, tolerance=1e-12)
    if found.value <= 0 or not found.error <= 1e-3 * found.value:
        return None
    low = 1 / math.sqrt(found.value)
    error = 4 * math.sqrt(size) * _EPS * sigma + 0.5 * low * found.error / found.value
    return Low(low, error, floor)


def _residual(operator: Operator, side: Side, vector: Tensor) -> tuple[float, Tensor]:
    """‖Jᵀu‖ and JJᵀu − ‖Jᵀu‖²u (side "rows") without the Gram matrix and its rounding."""
    there, back = operator.adjoint, operator.forward
    if side == "columns":
        there, back = back, there
    image = there(vector)
    sigma = float(torch.linalg.vector_norm(image))
    return sigma, back(image) - sigma**2 * vector


def _corrected(operator: Operator, side: Side, vector: Tensor, gap: float) -> tuple[float, float]:
    """The singular value of an approximate singular vector, and its error."""
    sigma, residual = _residual(operator, side, vector)
    error = _eigenvalue_error(float(torch.linalg.vector_norm(residual)), gap)
    return sigma, error / (2 * sigma or 1)


def _inverse(factor: Tensor) -> Callable[[Tensor], Tensor]:
    if factor.is_cuda:
        # Triangular solves run row after row there; a product with the inverse does not.
        inverse = torch.cholesky_inverse(factor)
        return lambda v: inverse @ v

    def solve(v: Tensor) -> Tensor:
        half = torch.linalg.solve_triangular(factor, v[:, None], upper=False)
        whole: Tensor = torch.linalg.solve_triangular(factor.mT, half, upper=True)
        return whole[:, 0]

    return solve
