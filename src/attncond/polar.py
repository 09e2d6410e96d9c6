"""Orthogonal polar factors, cold and tracked, by Newton–Schulz steps without an SVD."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from torch import Tensor

from attncond.linalg import exact, gaussian, matrices, spectral_norm

__all__ = ["polar", "track_polar"]

Quintic = tuple[float, float, float]

_NEWTON_SCHULZ: Quintic = (15 / 8, -10 / 8, 3 / 8)
_RESOLVED = 1e-4  # one round of quintics brings singular values above this to one
_CUSHION = 0.024  # keeps large singular values away from zero, as arXiv:2505.16932 does
_DELICATE = 4  # so many quintics of a round need true float32
_HEADROOM = 1.05  # the quintics grow fast beyond their interval; a norm may be a little low


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
    x, lead = matrices(a)
    with torch.no_grad(), exact(x.device):
        sigma = spectral_norm(x) if norm is None else norm.to(x).expand(lead).reshape(-1)
        if not bool(sigma.isfinite().all() & x.isfinite().all()):
            raise ValueError("polar: the matrix holds NaN or inf")
        if not bool((sigma > 0).all()):
            raise ValueError("polar: a zero matrix has no polar factor")
        shape = x.shape
        with exact(x.device, tf32):
            scale = torch.maximum(sigma, _schatten_norm(x)) if norm is not None else sigma
        x = x / scale[:, None, None] / _HEADROOM
        guess = None if near is None else near.to(x).reshape(shape)
        if shape[-2] >= shape[-1]:
            x = _orthonormalise(x, guess, tf32)
        else:
            x = _orthonormalise(x.mT.contiguous(), None if guess is None else guess.mT, tf32)
        return (x if shape[-2] >= shape[-1] else x.mT).reshape(*lead, *shape[-2:])


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
    >>> float(torch.linalg.cond(w + spectral_norm(w) * u)) < 2
    True
    """
    if steps < 1:
        raise ValueError(f"track_polar: steps must be at least 1, not {steps}")
    x, lead = matrices(a)
    shape = x.shape
    with torch.no_grad():
        sigma = norm.to(x).expand(lead).reshape(-1, 1, 1)
        x = u.to(x.dtype).reshape(shape) + x / sigma
        x = x if shape[-2] >= shape[-1] else x.mT
        *first, last = _schedule(0.8, 2.2, steps, cushion=0.0)
        with exact(x.device, tf32=True):
            for coefficients in first:
                x = _step(x, coefficients)
            with exact(x.device):
                e = _defect(x)
            x = _closing_step(x, e, last)
        return (x if shape[-2] >= shape[-1] else x.mT).reshape(*lead, *shape[-2:])


def _schatten_norm(x: Tensor) -> Tensor:
    # (Σσ⁸)^(1/8), never below σ_max and within a factor n^(1/8) of it: a given norm that is too
    # low would otherwise let the quintics diverge.
    x = x if x.shape[-2] >= x.shape[-1] else x.mT
    peak = x.abs().amax((-2, -1)).clamp_min(torch.finfo(x.dtype).tiny)
    x = x / peak[:, None, None]
    gram = x.mT @ x
    size: Tensor = torch.linalg.matrix_norm(gram @ gram)
    return size**0.25 * peak


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
                g = gaussian(m, n, like=x, draw=attempt) / (math.sqrt(m) + math.sqrt(n))
            else:
                g = guess[todo]
            g = 0.5 * min(1.0, eps / _RESOLVED**attempt) * g  # a half keeps ‖X‖ ≤ 1
            g = g - x @ (x.mT @ g)
            x = (x + g - (g @ x.mT) @ x) / _HEADROOM
        for i, coefficients in enumerate(rounds):
            # The first quintics take large singular values close to zero, where TF32 loses them.
            with exact(x.device, tf32 and i >= _DELICATE):
                x = _step(x, coefficients)
        for _ in range(5):
            e = _defect(x)
            defect = torch.linalg.matrix_norm(e)
            left = ~(defect <= eps * (n + 10))
            if not bool((left & (defect < 0.5)).any()):  # all done, or too far for this step
                break
            with exact(x.device, tf32):
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
