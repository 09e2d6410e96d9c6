"""Spectral norms, cold and tracked, and condition numbers."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["condition_number", "spectral_norm", "start_block", "track_norm"]

_SEED = 0x5EED
_DENSE = 256  # up to this side a dense float64 eigensolver beats a Krylov method
_BLOCK = 8
_PRECISION = threading.RLock()


def spectral_norm(a: Tensor) -> Tensor:
    """Return the largest singular value of each matrix: ``(..., m, n) -> (...)``.

    Deterministic, and accurate to a relative 1e-6 (float32 or narrower, answered in float32) or
    1e-12 (float64). A zero matrix has norm 0; a matrix holding NaN or inf answers with that.

    >>> spectral_norm(torch.diag(torch.tensor([3.0, -4.0])))
    tensor(4.)
    """
    x, lead = matrices(a)
    with torch.no_grad(), exact(x.device):
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
    x, lead = matrices(a)
    with torch.no_grad():
        finite = x.isfinite().all(-1).all(-1)
        sigma = torch.linalg.svdvals(torch.where(finite[:, None, None], x, 0.0).double())
        kappa = torch.where(sigma[:, -1] > 0, sigma[:, 0] / sigma[:, -1], math.inf)
        return torch.where(finite, kappa, math.nan).reshape(lead)


def start_block(a: Tensor, size: int = _BLOCK) -> Tensor:
    """Return the first block for `track_norm`: ``(..., m, n) -> (..., n, min(size, m, n))``.

    >>> start_block(torch.eye(6, 5)).shape
    torch.Size([5, 5])
    """
    x, lead = matrices(a)
    m, n = x.shape[-2:]
    v = gaussian(n, min(size, m, n), like=x).expand(x.shape[0], -1, -1)
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
    x, lead = matrices(a)
    block = v.to(x.dtype).reshape(-1, *v.shape[-2:])
    with torch.no_grad(), exact(x.device):
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


def matrices(a: Tensor) -> tuple[Tensor, torch.Size]:
    """``(..., m, n)`` as ``(b, m, n)``, in float32 at the least, and the shape that became b."""
    if a.ndim < 2 or 0 in a.shape[-2:] or not a.is_floating_point():
        raise ValueError(f"expected real matrices (..., m, n), not {a.dtype} {tuple(a.shape)}")
    wide = torch.promote_types(a.dtype, torch.float32)
    return a.detach().to(wide).reshape(-1, *a.shape[-2:]), a.shape[:-2]


@contextmanager
def exact(device: torch.device, tf32: bool = False) -> Iterator[None]:
    """Products in full precision, or in TF32 where a device has it.

    Autocast or a lowered matmul precision set by the caller would silently cost digits.
    """
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


def gaussian(rows: int, columns: int, like: Tensor, draw: int = 0) -> Tensor:
    """The same numbers whatever the device, and whatever else is drawn; ``draw`` for others."""
    generator = torch.Generator().manual_seed(_SEED + draw)
    shape = (rows, columns)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(like)


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
    basis[:, :b] = torch.linalg.qr(gaussian(n, b, like=x))[0].mT
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
