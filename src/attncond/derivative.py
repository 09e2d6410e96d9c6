"""The derivative of one softmax-attention head in W_Q, W_K and W_V, in closed form.

Thm 3.3 of arXiv:2603.07162 with everything that real heads have: for query i with probabilities
p_ij and output a_i, let T_ij = p_ij(v_j − a_i), the derivative of a_i in the logit z_ij. Then

    ∂a_i = S_i·∂W_Qᵀ·x_i  +  c·B_i·∂W_K·q_i  +  ∂W_Vᵀ·y_i

with S_i = c·Σ_j T_ij k_jᵀ, B_i = Σ_j T_ij x_jᵀ, y_i = Σ_j p_ij x_j, scale c and W of shape
(in, head_dim). Tokens enter through X = L·Uᵀ with orthonormal U, one column for each dimension that
they span: ∂W → Uᵀ·∂W changes no singular value but zeros, and L is small.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attncond.lanczos import Side

__all__ = ["Head", "HeadJacobian", "differentiate"]

_CHUNK = 1 << 24  # elements of a temporary


@dataclass(frozen=True)
class Head:
    """S ``(n, d_v, d)``, B ``(n, d_v, r_k)``, Y ``(n, r_k)``, L_q ``(n, r_q)``, Q ``(n, d)``."""

    s: Tensor
    b: Tensor
    y: Tensor
    left: Tensor
    q: Tensor
    scale: float


def differentiate(
    q: Tensor, k: Tensor, v: Tensor, p: Tensor, left_q: Tensor, left_k: Tensor, scale: float
) -> Head:
    """The closed form from Q ``(n, d)``, K ``(m, d)``, V ``(m, d_v)`` and P ``(n, m)``."""
    n, m = p.shape
    a = p @ v
    s = q.new_empty(n, v.shape[1], k.shape[1])
    b = q.new_empty(n, v.shape[1], left_k.shape[1])
    step = _step(p, m * v.shape[1])
    for start in range(0, n, step):
        i = slice(start, start + step)
        t = ((v - a[i, None]) * p[i, :, None]).mT
        torch.mul(t @ k, scale, out=s[i])
        b[i] = t @ left_k
    return Head(s, b, p @ left_k, left_q, q, scale)


@dataclass(frozen=True)
class HeadJacobian:
    """J as an operator. Wide: [J_Q J_K J_V], the derivative of the head's output ``(n, d_v)``.

    Stacked: [J_Q; J_K; J_V], the paper's, in which the three matrices are one and the same
    variable. Columns are ordered (in, head_dim), rows (n, d_v).
    """

    head: Head
    stacked: bool

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Entries of the reduced W_Q, W_K, W_V."""
        _, dv, d = self.head.s.shape
        rk = self.head.y.shape[1]
        return self.head.left.shape[1] * d, rk * d, rk * dv

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) in the coordinates of the tokens."""
        n, dv, _ = self.head.s.shape
        return (3 * n * dv, self.sizes[0]) if self.stacked else (n * dv, sum(self.sizes))

    @property
    def device(self) -> torch.device:
        """Where the head's tensors are."""
        return self.head.s.device

    def forward(self, vector: Tensor) -> Tensor:
        """J·v."""
        h = self.head
        _, dv, d = h.s.shape
        parts = (vector,) * 3 if self.stacked else vector.split(self.sizes)
        wq, wk, wv = parts[0].view(-1, d), parts[1].view(-1, d), parts[2].view(-1, dv)
        from_q = (h.s @ (h.left @ wq)[:, :, None])[..., 0]
        from_k = (h.b @ (h.scale * h.q @ wk.mT)[:, :, None])[..., 0]
        out = (from_q, from_k, h.y @ wv)
        return torch.stack(out).flatten() if self.stacked else sum(out[1:], out[0]).flatten()

    def adjoint(self, vector: Tensor) -> Tensor:
        """Jᵀ·u."""
        h = self.head
        n, dv, _ = h.s.shape
        parts = vector.view(-1, n, dv)
        uq, uk, uv = (parts[0], parts[1], parts[2]) if self.stacked else (parts[0],) * 3
        grad_q = h.left.mT @ (uq[:, None] @ h.s)[:, 0]
        grad_k = (uk[:, None] @ h.b)[:, 0].mT @ (h.scale * h.q)
        grad_v = h.y.mT @ uv
        if self.stacked:
            return (grad_q + grad_k + grad_v).flatten()
        return torch.cat([grad_q.flatten(), grad_k.flatten(), grad_v.flatten()])

    def blocks(self) -> tuple[Tensor, Tensor, Tensor]:
        """J_Q, J_K and J_V as ``(n, d_v, in, head_dim)``."""
        h = self.head
        eye = torch.eye(h.s.shape[1], dtype=h.s.dtype, device=h.s.device)
        return (
            h.left[:, None, :, None] * h.s[:, :, None],
            h.b[..., None] * (h.scale * h.q)[:, None, None],
            h.y[:, None, :, None] * eye[:, None],
        )

    def dense(self) -> Tensor:
        """J."""
        rows = self.head.s.shape[0] * self.head.s.shape[1]
        parts = [block.reshape(rows, -1) for block in self.blocks()]
        return torch.cat(parts, 0 if self.stacked else 1)

    def gram(self, side: Side) -> Tensor:
        """JJᵀ or JᵀJ, its lower triangle; from products of the factors, never from J."""
        if side == "rows":
            return self._gram_stacked_rows() if self.stacked else self._gram_rows()
        return self._gram_stacked_columns() if self.stacked else self._gram_columns()

    def _gram_rows(self) -> Tensor:
        # Σ of three Hadamard products: (x_i·x_j)(S_i S_jᵀ) + c²(q_i·q_j)(B_i B_jᵀ) + (y_i·y_j)I.
        h = self.head
        n, dv, _ = h.s.shape
        gram = h.s.new_empty(n, dv, n, dv)
        weights = (h.left @ h.left.mT, h.scale**2 * (h.q @ h.q.mT), h.y @ h.y.mT)
        s, b = h.s.flatten(0, 1), h.b.flatten(0, 1)
        step = _step(gram, n * dv * dv)
        for start in range(0, n, step):
            end = min(n, start + step)
            rows, below = slice(start * dv, end * dv), slice(0, end * dv)
            here = gram[start:end, :, :end]
            part = (s[rows] @ s[below].mT).view(end - start, dv, end, dv)
            torch.mul(part, weights[0][start:end, None, :end, None], out=here)
            part = (b[rows] @ b[below].mT).view(end - start, dv, end, dv)
            here.addcmul_(part, weights[1][start:end, None, :end, None])
            here.diagonal(dim1=1, dim2=3).add_(weights[2][start:end, :end, None])
        return gram.view(n * dv, n * dv)

    def _gram_stacked_columns(self) -> Tensor:
        h = self.head
        r, d = h.left.shape[1], h.s.shape[2]
        gram = h.s.new_zeros(r, d, r, d)
        _accumulate(gram, _outer(h.left, h.left), h.s.mT @ h.s, lower=True)
        _accumulate(gram, h.b.mT @ h.b, h.scale**2 * _outer(h.q, h.q), lower=True)
        gram.diagonal(dim1=1, dim2=3).add_((h.y.mT @ h.y)[..., None])
        return gram.view(r * d, r * d)

    def _gram_columns(self) -> Tensor:
        h = self.head
        _, dv, d = h.s.shape
        rq, rk = h.left.shape[1], h.y.shape[1]
        size = sum(self.sizes)
        gram = h.s.new_zeros(size, size)
        cut = (slice(0, rq * d), slice(rq * d, (rq + rk) * d), slice((rq + rk) * d, size))

        def block(i: int, j: int, *shape: int) -> Tensor:
            return gram[cut[i], cut[j]].view(shape)

        q = h.scale * h.q
        _accumulate(block(0, 0, rq, d, rq, d), _outer(h.left, h.left), h.s.mT @ h.s, lower=True)
        _accumulate(block(1, 1, rk, d, rk, d), h.b.mT @ h.b, _outer(q, q), lower=True)
        block(2, 2, rk, dv, rk, dv).diagonal(dim1=1, dim2=3).add_((h.y.mT @ h.y)[..., None])
        _accumulate(block(1, 0, rk, d, rq, d).mT, h.b.mT @ h.s, _outer(q, h.left))
        _accumulate(block(2, 0, rk, dv, rq, d), _outer(h.y, h.left), h.s)
        _accumulate(block(2, 1, rk, dv, rk, d).mT, _outer(h.y, q), h.b)
        return gram

    def _gram_stacked_rows(self) -> Tensor:
        h = self.head
        n, dv, _ = h.s.shape
        q = h.scale * h.q
        gram = h.s.new_zeros(3, n, dv, 3, n, dv)
        gram[0, :, :, 0] = (h.left @ h.left.mT)[:, None, :, None] * _pairs(h.s)
        gram[1, :, :, 1] = (q @ q.mT)[:, None, :, None] * _pairs(h.b)
        gram[2, :, :, 2].diagonal(dim1=1, dim2=3).add_((h.y @ h.y.mT)[..., None])
        gram[1, :, :, 0] = (h.b @ h.left.mT)[..., None] * (h.s @ q.mT).permute(2, 0, 1)[:, None]
        gram[2, :, :, 0] = (h.y @ h.left.mT)[:, None, :, None] * h.s.permute(2, 0, 1)
        gram[2, :, :, 1] = (h.b @ h.y.mT).permute(2, 0, 1)[:, None] * q.mT[:, :, None]
        return gram.view(3 * n * dv, 3 * n * dv)


def _step(like: Tensor, each: int) -> int:
    # As many as a cache holds: on a CPU, memory limits the products of so few columns.
    return max(1, (_CHUNK if like.is_cuda else _CHUNK >> 5) // each)


def _outer(a: Tensor, b: Tensor) -> Tensor:
    return a[:, :, None] * b[:, None]


def _pairs(a: Tensor) -> Tensor:
    n, dv, _ = a.shape
    flat = a.flatten(0, 1)
    return (flat @ flat.mT).view(n, dv, n, dv)


def _accumulate(out: Tensor, left: Tensor, right: Tensor, *, lower: bool = False) -> None:
    """Add Σ_i left[i, w, x]·right[i, y, z] to out[w, y, x, z], one range of w after the other."""
    (_, width, across), (_, y, z) = left.shape, right.shape
    flat = right.flatten(1)
    step = _step(out, across * y * z)
    for start in range(0, width, step):
        end = min(width, start + step)
        upto = end if lower else across
        product = left[:, start:end, :upto].flatten(1).mT @ flat
        out[start:end, :, :upto] += product.view(end - start, upto, y, z).transpose(1, 2)
