"""Spectral norms, condition numbers and polar factors, cold and tracked, without an SVD."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "condition_number",
    "polar",
    "spectral_norm",
    "start_block",
    "track_norm",
    "track_polar",
]

Quintic = tuple[float, float, float]

_NEWTON_SCHULZ: Quintic = (15 / 8, -10 / 8, 3 / 8)
_SEED = 0x5EED
_DENSE = 256  # up to this side a dense float64 eigensolver beats a Krylov method
_BLOCK = 8
_RESOLVED = 1e-4  # one round of quintics brings singular values above this to one
_CUSHION = 0.024  # keeps large singular values away from zero, as arXiv:2505.16932 does
_DELICATE = 4  # so many quintics of a round need true float32
_PRECISION = threading.RLock()
_HEADROOM = 1.05  # the quintics grow fast beyond their interval; a norm may be a little low


def spectral_norm(a: Tensor) -> Tensor:
    """Return the largest singular value of each matrix: ``(..., m, n) -> (...)``.

    Deterministic, and accurate to a relative 1e-6 (float32 or narrower, answered in float32) or
    1e-12 (float64). A zero matrix has norm 0; a matrix holding NaN or inf answers with that.

    >>> spectral_norm(torch.diag(torch.tensor([3.0, -4.0])))
    tensor(4.)
    """
    x, lead = _matrices(a)
    with torch.no_grad(), _exact(x.device):
        peak = torch.maximum(x.amax((-2, -1)), -x.amin((-2, -1)))
        finite = peak.isfinite()
        # A power of two divides exactly, and then no square can overflow or vanish.
        exponent = torch.frexp(torch.where(finite & (peak > 0), peak, 1.0))[1].to(x.dtype)
        scale = torch.exp2(exponent - 1)
        x = x / scale[:, None, None]
        if not bool(finite.all()):
            x[~finite] = 0
        x = x if x.shape[-2] >= x.shape[-1] else x.mT
        if x.shape[-1] <= _DENSE:
            norm = _dense_norm(x)
        else:
            norm, converged = _lanczos_norm(x)
            if not bool(converged.all()):
                norm[~converged] = _dense_norm(x[~converged])
        return torch.where(finite, norm.to(x.dtype) * scale, peak).reshape(lead)


def condition_number(a: Tensor) -> Tensor:
    """Return σ_max/σ_min of each matrix in float64: ``(..., m, n) -> (...)``.

    A singular matrix has condition number inf; a matrix holding NaN or inf has NaN.

    >>> condition_number(torch.diag(torch.tensor([3.0, -4.0, 1.0])))
    tensor(4., dtype=torch.float64)
    """
    x, lead = _matrices(a)
    with torch.no_grad():
        finite = x.isfinite().all(-1).all(-1)
        sigma = torch.linalg.svdvals(torch.where(finite[:, None, None], x, 0.0).double())
        kappa = torch.where(sigma[:, -1] > 0, sigma[:, 0] / sigma[:, -1], math.inf)
        return torch.where(finite, kappa, math.nan).reshape(lead)


def polar(
    a: Tensor, norm: Tensor | None = None, near: Tensor | None = None, *, tf32: bool = False
) -> Tensor:
    """Return the orthogonal polar factor U of each matrix: ``(..., m, n) -> (..., m, n)``.

    U = PQᵀ for the thin SVD A = PSQᵀ, so A + σ_max·U has condition number at most 2 (Thm 3.5 of
    arXiv:2603.07162). It comes from Newton–Schulz steps with minimax quintics (Polar Express,
    arXiv:2505.16932). The columns of U (its rows, if m < n) are orthonormal whatever the rank:
    singular directions too small for the dtype to resolve are completed in a fixed generic way,
    which makes U the exact factor of a matrix within about 1e-6·σ_max of A. bf16 and fp16 are
    answered in float32. ``norm``, shape ``(...)``, is σ_max if it is already known, roughly;
    ``near``, shape ``(..., m, n)``, is an earlier factor to keep where A itself does not decide.
    ``tf32`` lets CUDA iterate in TF32: several times faster, orthonormal all the same, but the
    factor of a matrix that is only within about 1e-3·σ_max of A.

    >>> polar(torch.tensor([[0.0, -3.0], [5.0, 0.0]])).round(decimals=4)
    tensor([[ 0., -1.],
            [ 1.,  0.]])
    """
    x, lead = _matrices(a)
    with torch.no_grad(), _exact(x.device):
        sigma = spectral_norm(x) if norm is None else norm.to(x).expand(lead).reshape(-1)
        if not bool(sigma.isfinite().all() & x.isfinite().all()):
            raise ValueError("polar: the matrix holds NaN or inf")
        if not bool((sigma > 0).all()):
            raise ValueError("polar: a zero matrix has no polar factor")
        shape = x.shape
        with _exact(x.device, tf32):
            scale = torch.maximum(sigma, _schatten_norm(x)) if norm is not None else sigma
        x = x / scale[:, None, None] / _HEADROOM
        guess = None if near is None else near.to(x).reshape(shape)
        if shape[-2] >= shape[-1]:
            x = _orthonormalise(x, guess, tf32)
        else:
            x = _orthonormalise(x.mT.contiguous(), None if guess is None else guess.mT, tf32)
        return (x if shape[-2] >= shape[-1] else x.mT).reshape(*lead, *shape[-2:])


def start_block(a: Tensor, size: int = _BLOCK) -> Tensor:
    """Return the first block for `track_norm`: ``(..., m, n) -> (..., n, min(size, m, n))``.

    >>> start_block(torch.eye(6, 5)).shape
    torch.Size([5, 5])
    """
    x, lead = _matrices(a)
    m, n = x.shape[-2:]
    v = _gaussian(n, min(size, m, n), like=x).expand(x.shape[0], -1, -1)
    for _ in range(12):
        _, v = track_norm(x, v)
    return v.reshape(*lead, *v.shape[-2:])


def track_norm(a: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Follow σ_max of a slowly changing matrix: ``(..., m, n), (..., n, b) -> (...), (..., n, b)``.

    Two subspace iterations and a Rayleigh–Ritz step from the previous block, without host
    synchronisation. The estimate is never above σ_max (up to rounding).

    >>> w = torch.diag(torch.tensor([3.0, -4.0]))
    >>> sigma, v = track_norm(w, start_block(w))
    >>> sigma
    tensor(4.)
    """
    x, lead = _matrices(a)
    block = v.to(x.dtype).reshape(-1, *v.shape[-2:])
    with torch.no_grad(), _exact(x.device):
        for _ in range(2):
            block = _orthonormal_columns(x.mT @ _unit_columns(x @ block), block)
        image = (x @ block).double()
        gram = image.mT @ image
        trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None].clamp_min(1e-300)
        gram = gram / trace
        # The projector on the top Ritz vector as a high power: an eigensolver would synchronise.
        # Ritz values within 0.1% of the top one still mix, which costs at most 0.05% of σ.
        power = torch.linalg.matrix_power(gram, 32)
        power = power / power.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None].clamp_min(1e-300)
        power = torch.linalg.matrix_power(power, 32)
        mass = power.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(1e-300)
        ritz = (gram * power).sum((-2, -1)) / mass * trace[:, 0, 0]
        return ritz.sqrt().to(x.dtype).reshape(lead), block.reshape(v.shape)


def track_polar(a: Tensor, u: Tensor, norm: Tensor, steps: int = 2) -> Tensor:
    """Update the polar factor of a slowly changing matrix: three ``(..., m, n)`` and ``(...)``.

    U_t = polar(U_{t−1} + A_t/σ): the argument has its singular values in about [1, 2] whatever the
    rank of A_t, so two quintics (three matrix products each, no host synchronisation) reach an
    orthogonality defect of 2e-4 while A moves by up to 0.2σ between calls. Errors in U_{t−1}
    are removed in the same step. On CUDA, TF32 is used wherever it does not limit the result.

    U_t is continuous in A_t, the polar factor is not: a singular value that passes through zero
    flips a sign in it. U_t keeps the old sign, hence κ(A + σU) = 2/(1 − h) once that singular
    value has grown to hσ. Call ``polar(a, norm, near=u)`` from time to time to take such flips in.

    >>> w = torch.tensor([[0.0, -3.0], [5.0, 0.0]])
    >>> u = polar(w)
    >>> w = w + 0.1
    >>> u = track_polar(w, u, spectral_norm(w))
    >>> float(condition_number(w + spectral_norm(w) * u)) < 2
    True
    """
    if steps < 1:
        raise ValueError(f"track_polar: steps must be at least 1, not {steps}")
    x, lead = _matrices(a)
    shape = x.shape
    with torch.no_grad():
        sigma = norm.to(x).expand(lead).reshape(-1, 1, 1)
        x = u.to(x.dtype).reshape(shape) + x / sigma
        x = x if shape[-2] >= shape[-1] else x.mT
        *first, last = _schedule(0.8, 2.2, steps, cushion=0.0)
        with _exact(x.device, tf32=True):
            for coefficients in first:
                x = _step(x, coefficients)
            with _exact(x.device):
                e = _defect(x)
            x = _closing_step(x, e, last)
        return (x if shape[-2] >= shape[-1] else x.mT).reshape(*lead, *shape[-2:])


def _matrices(a: Tensor) -> tuple[Tensor, torch.Size]:
    if a.ndim < 2 or 0 in a.shape[-2:] or not a.is_floating_point():
        raise ValueError(f"expected real matrices (..., m, n), not {a.dtype} {tuple(a.shape)}")
    wide = torch.promote_types(a.dtype, torch.float32)
    return a.detach().to(wide).reshape(-1, *a.shape[-2:]), a.shape[:-2]


@contextmanager
def _exact(device: torch.device, tf32: bool = False) -> Iterator[None]:
    # Autocast or a lowered matmul precision set by the caller would silently cost digits.
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    with _PRECISION:  # the setting is global: threads must not restore each other's
        before = backend.matmul.fp32_precision
        wanted = "tf32" if tf32 and device.type == "cuda" else "ieee"
        backend.matmul.fp32_precision = wanted
        try:
            with torch.autocast(device.type, enabled=False):
                yield
        finally:
            backend.matmul.fp32_precision = before


def _gaussian(rows: int, columns: int, like: Tensor, seed: int = _SEED) -> Tensor:
    # Drawn on the CPU, so that every device sees the same numbers.
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, columns)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(like)


def _schatten_norm(x: Tensor) -> Tensor:
    # (Σσ⁸)^(1/8), never below σ_max and within a factor n^(1/8) of it: a given norm that is too
    # low would otherwise let the quintics diverge.
    x = x if x.shape[-2] >= x.shape[-1] else x.mT
    peak = x.abs().amax((-2, -1)).clamp_min(torch.finfo(x.dtype).tiny)
    x = x / peak[:, None, None]
    gram = x.mT @ x
    size: Tensor = torch.linalg.matrix_norm(gram @ gram)
    return size**0.25 * peak


def _dense_norm(x: Tensor) -> Tensor:
    x = x.double()
    values: Tensor = torch.linalg.eigvalsh(x.mT @ x)
    return values[:, -1].clamp_min(0).sqrt()


def _lanczos_norm(x: Tensor) -> tuple[Tensor, Tensor]:
    """Block Lanczos on XᵀX with full reorthogonalisation; the basis is kept as rows."""
    batch, _, n = x.shape
    b, most = _BLOCK, n // (2 * _BLOCK)
    # The error bound is for σ² and pessimistic; the Rayleigh quotient itself is good to ~eps.
    tolerance = 5e-7 if x.dtype == torch.float32 else 5e-13
    basis = x.new_empty(batch, (most + 1) * b, n)
    tri = x.new_zeros(batch, (most + 1) * b, (most + 1) * b)
    basis[:, :b] = torch.linalg.qr(_gaussian(n, b, like=x))[0].mT
    norm = x.new_zeros(batch, dtype=torch.float64)
    todo = torch.arange(batch, device=x.device)
    for k in range(most):
        old, now, new = (slice(i * b, j * b) for i, j in ((0, k + 1), (k, k + 1), (k + 1, k + 2)))
        q = basis[:, old]
        w = (basis[:, now] @ x.mT) @ x
        h = w @ q.mT
        tri[:, now, now] = h[:, :, now]
        w, r = torch.linalg.qr((w - h @ q).mT)
        # The second pass is what keeps the basis orthogonal once the Krylov space is exhausted.
        w, r_again = torch.linalg.qr(w - q.mT @ (q @ w))
        r = r_again @ r
        basis[:, new] = w.mT
        tri[:, new, now], tri[:, now, new] = r, r.mT
        # Eigensolvers would dominate the cost: they run every fourth step, and the slowest matrix
        # answers for all until it has converged.
        if (k < 7 or k % 4 != 3) and k + 1 < most:
            continue
        if k > 7 and bool((_ritz(tri[todo[:1], old, old], r[todo[:1]])[0] > tolerance).any()):
            continue
        error, y = _ritz(tri[todo, old, old], r[todo])
        for i, vector in zip(todo[error <= tolerance].tolist(), y[error <= tolerance], strict=True):
            ritz = vector @ q[i]
            norm[i] = (x[i] @ ritz).double().norm() / ritz.double().norm()
        error, order = error.sort(descending=True)
        todo = todo[order][error > tolerance]
        if not len(todo):
            break
    return norm, torch.ones_like(norm, dtype=torch.bool).index_fill_(0, todo, False)


def _ritz(tri: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """The top Ritz vector of a block Lanczos step and a relative bound on its value's error."""
    b = r.shape[-1]
    theta, y = (t.flip(-1) for t in torch.linalg.eigh(tri))
    # λ_1 − θ_1 ≤ sqrt(g²/4 + ‖R_j‖²) − g/2 for the residual R_j of the top j Ritz vectors and
    # the gap g = θ_1 − θ_{j+1}; the best j sees through a cluster at the top.
    residual = (r @ y[:, -b:, :b]).square().sum(-2).cumsum(-1)
    gap = theta[:, :1] - theta[:, 1 : b + 1]
    error = residual / (((gap / 2).square() + residual).sqrt() + gap / 2)
    return (error.nan_to_num(0.0).amin(-1) / theta[:, 0]).nan_to_num(0.0), y[..., 0]


def _orthonormalise(x: Tensor, guess: Tensor | None, tf32: bool) -> Tensor:
    """Drive every singular value of tall X, ‖X‖ ≤ 1, to one."""
    m, n, eps = *x.shape[-2:], torch.finfo(x.dtype).eps
    rounds = _schedule(_RESOLVED, 1.0, 8, _CUSHION)
    result, todo = x, torch.arange(len(x), device=x.device)
    for attempt in range(12):
        if attempt:
            # Directions below the noise, amplified by the rounds so far, have no polar factor of
            # their own: any orthogonal completion in the complement of the others is as good.
            if guess is None or attempt > 2:
                g = _gaussian(m, n, like=x, seed=_SEED + attempt) / (math.sqrt(m) + math.sqrt(n))
            else:
                g = guess[todo]
            g = 0.5 * min(1.0, eps / _RESOLVED**attempt) * g  # a half keeps ‖X‖ ≤ 1
            g = g - x @ (x.mT @ g)
            x = (x + g - (g @ x.mT) @ x) / _HEADROOM
        for i, coefficients in enumerate(rounds):
            # The first quintics take large singular values close to zero, where TF32 loses them.
            with _exact(x.device, tf32 and i >= _DELICATE):
                x = _step(x, coefficients)
        for _ in range(5):
            e = _defect(x)
            defect = torch.linalg.matrix_norm(e)
            left = ~(defect <= eps * (n + 10))
            if not bool((left & (defect < 0.5)).any()):  # all done, or too far for this step
                break
            with _exact(x.device, tf32):
                x = _closing_step(x, e)
        result[todo] = x
        if not bool(left.any()):
            return result
        if not bool(defect.isfinite().all()):
            break
        x, todo = x[left], todo[left]
    raise ValueError("polar: no convergence; is the given norm below the largest singular value?")


def _defect(x: Tensor) -> Tensor:
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    return torch.baddbmm(eye.expand(len(x), -1, -1), x.mT, x, alpha=-1)


def _step(x: Tensor, coefficients: Quintic) -> Tensor:
    a, b, c = coefficients
    gram = x.mT @ x
    return torch.baddbmm(x, x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), beta=a)


def _closing_step(x: Tensor, e: Tensor, coefficients: Quintic = _NEWTON_SCHULZ) -> Tensor:
    # Written as X plus a correction that vanishes with the defect E = I − XᵀX, so that only the
    # product for E needs full precision.
    a, b, c = coefficients
    correction = torch.baddbmm(e, e, e, beta=-(b + 2 * c), alpha=c)
    return torch.baddbmm(x, x, correction, beta=a + b + c)


def _unit_columns(x: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(x, dim=-2, keepdim=True)
    return x / length.clamp_min(torch.finfo(x.dtype).tiny)


def _orthonormal_columns(x: Tensor, fallback: Tensor) -> Tensor:
    # Cholesky-QR in float64: no synchronisation, and the squared condition number still fits. The
    # shift lets rounding noise fill the columns that a matrix of low rank leaves dependent.
    x = torch.where(torch.linalg.vector_norm(x, dim=-2, keepdim=True) > 0, x, fallback)
    wide = _unit_columns(x.double())
    shift = 1e-15 * torch.eye(x.shape[-1], dtype=wide.dtype, device=x.device)
    factor = torch.linalg.cholesky_ex(wide.mT @ wide + shift)[0]
    columns: Tensor = torch.linalg.solve_triangular(factor.mT, wide, upper=True, left=False)
    return columns.to(x.dtype)


@cache
def _schedule(low: float, high: float, steps: int, cushion: float) -> tuple[Quintic, ...]:
    """Quintics whose composition is the best odd approximation of one on [low, high].

    The greedy choice is optimal (Polar Express, arXiv:2505.16932, Thm 3.1): each is the minimax
    quintic of the interval its predecessor leaves.
    """
    chosen = []
    for _ in range(steps):
        a, b, c = _minimax_quintic(max(low, cushion * high), high)
        ends = [a * x + b * x**3 + c * x**5 for x in (low, high)]
        if low < cushion * high:  # recentre, for low lies outside the fitted interval
            scale = 2 / sum(ends)
            a, b, c, ends = a * scale, b * scale, c * scale, [scale * e for e in ends]
        low, high = ends[0], 2 - ends[0]
        chosen.append((a, b, c))
    return tuple(chosen)


def _minimax_quintic(low: float, high: float) -> Quintic:
    """The odd quintic closest to one on [low, high], by Remez exchange."""
    if low >= (1 - 5e-6) * high:
        return 15 / (8 * high), -10 / (8 * high**3), 3 / (8 * high**5)
    q, r = (3 * low + high) / 4, (low + 3 * high) / 4
    for _ in range(30):
        rows = [[x, x**3, x**5, s] for x, s in ((low, 1.0), (q, -1.0), (r, 1.0), (high, -1.0))]
        # In numpy: a tensor would follow the caller's default device and tracing modes.
        a, b, c, _ = np.linalg.solve(np.array(rows), np.ones(4)).tolist()
        root = math.sqrt(max(0.0, 9 * b * b - 20 * a * c))
        q, r = (math.sqrt((-3 * b + sign * root) / (10 * c)) for sign in (-1, 1))
    return a, b, c
