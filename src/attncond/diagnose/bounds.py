"""The paper's bound on κ of a head's Jacobian, and the certificate that holds, at real sizes.

:mod:`attncond.theory` has both by the book, for small heads without masks and biases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attncond.diagnose.measure import singular_values
from attncond.theory import softmax_jacobian

__all__ = ["BoundedHead", "certificate", "paper_bound"]

_ZERO = 1e-11  # below this fraction of σ_max a float64 SVD holds nothing but rounding


@dataclass(frozen=True, eq=False)
class BoundedHead:
    """One head with all that the bounds speak of, mask and biases included."""

    x: Tensor
    x_kv: Tensor
    weights: tuple[Tensor, Tensor, Tensor]
    q: Tensor
    k: Tensor
    v: Tensor
    p: Tensor
    scale: float

    @classmethod
    def of(
        cls,
        x: Tensor,
        x_kv: Tensor,
        weights: tuple[Tensor, Tensor, Tensor],
        biases: tuple[Tensor | None, Tensor | None, Tensor | None],
        scale: float,
        mask: Tensor | None,
    ) -> BoundedHead:
        """From tokens (n, in), weights (d, in) and a mask, boolean or additive, all in float64."""
        q, k, v = (
            torch.nn.functional.linear(t, w, b)
            for t, w, b in zip((x, x_kv, x_kv), weights, biases, strict=True)
        )
        logits = scale * q @ k.mT
        if mask is not None:
            boolean = mask.dtype == torch.bool
            logits = logits.masked_fill(~mask, -math.inf) if boolean else logits + mask
        p = torch.softmax(logits, -1).nan_to_num(0.0)  # a query that sees nothing
        return cls(x, x_kv, weights, q, k, v, p, scale)


def paper_bound(head: BoundedHead) -> float:
    """`attncond.theory.paper_bound` without its N² x N² matrix, and with masks and biases.

    The singular values of a block-diagonal matrix are those of its blocks.
    """
    softmax = torch.linalg.eigvalsh(softmax_jacobian(head.p)).abs()
    x = max(_pseudo(singular_values(t)) for t in (head.x, head.x_kv))
    q, k, v = (_pseudo(singular_values(w)) for w in head.weights)
    lam = _pseudo(softmax.flatten())
    return x**3 * lam * v * (q + k) + x * _pseudo(torch.linalg.svdvals(head.p))


def certificate(head: BoundedHead) -> float:
    """`attncond.theory.jacobian_certificate`, wide and cheap, with masks and biases."""
    norm = torch.linalg.matrix_norm
    sigma = torch.linalg.svdvals(head.p @ head.x_kv)
    n = len(head.x)
    if n > len(sigma) or float(sigma[n - 1]) <= _ZERO * float(sigma[0]):
        return math.inf
    t = head.p[:, :, None] * (head.v[None] - (head.p @ head.v)[:, None])
    s = abs(head.scale) * torch.einsum("ije,jf->ief", t, head.k)
    b = torch.einsum("ije,jc->iec", t, head.x_kv).flatten(0, 1)
    norm_q = float(norm(head.x, 2)) * float(norm(s, 2).max())
    norm_k = abs(head.scale) * float(head.q.norm(dim=1).max()) * float(norm(b, 2))
    return math.hypot(norm_q, norm_k, float(sigma[0])) / float(sigma[n - 1])


def _pseudo(sigma: Tensor) -> float:
    """σ_max over the smallest that is not zero."""
    top = float(sigma.max())
    if not top > 0:
        return math.nan
    return top / float(sigma[sigma > _ZERO * top].min())
