"""The rank that a head's Jacobian can have: what tokens span, what weights do in vain."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Tokens", "gauge", "reduce_tokens", "wide_rank"]


@dataclass(frozen=True)
class Tokens:
    """X = left·basisᵀ: ``(n, r)`` and ``(in, r)``; r is the rank, ``centred`` that of X − mean."""

    left: Tensor
    basis: Tensor
    centred: int

    @property
    def rank(self) -> int:
        """Dimensions that the tokens span."""
        return self.left.shape[1]

    @property
    def ones(self) -> Tensor:
        """The u with left·u = (1, ..., 1), where there is one."""
        one = torch.ones(len(self.left), 1, dtype=torch.float64, device="cpu")
        solution: Tensor = torch.linalg.lstsq(self.left.cpu(), one).solution
        return solution


def reduce_tokens(x: Tensor, rtol: float) -> Tokens:
    """Tokens ``(n, in)`` in coordinates of the space that they span."""
    # On the CPU: the matrix is small, and rank and coordinates are then the same on all devices.
    u, s, vh = torch.linalg.svd(x.cpu(), full_matrices=False)
    scale = float(s[0]) if len(s) else 0.0
    rank = max(1, int((s > rtol * scale).sum()))
    left = u[:, :rank] * s[:rank]
    if rank == len(x):
        centred = rank - 1
    else:
        centred = int((torch.linalg.svdvals(left - left.mean(0)) > rtol * scale).sum())
    return Tokens(left.to(x.device), vh[:rank].mT.to(x.device), max(centred, rank - 1))


def wide_rank(n: int, d: int, dv: int, tokens: tuple[Tokens, Tokens], biased: bool) -> int:
    """The rank of [J_Q J_K J_V] for generic weights; with a mask, what it cannot exceed.

    Logits reach r_q·ρ_k + ρ_q·r̃_k − ρ_k·ι dimensions: ∂Q·K̃ᵀ + Q·∂K̃ᵀ with K centred, because a
    softmax ignores shifts, less what both summands reach (W_Q → W_Q·M, W_K → W_K·M⁻ᵀ). A bias of
    the keys is such a shift. One of the queries is not, where no combination of tokens is constant.
    """
    of_q, of_k = tokens
    outside = int(biased and of_q.centred == of_q.rank)
    rho_k, rho_q = min(d, of_k.centred), min(d, of_q.rank + outside)
    logits = of_q.rank * rho_k + rho_q * of_k.centred - rho_k * (rho_q - outside)
    # Logits move outputs within the span of centred values only.
    rho_v, values = min(dv, of_k.centred), min(n, of_k.rank)
    return values * (dv - rho_v) + min(n * rho_v, logits + values * rho_v)


def gauge(
    w_q: Tensor, w_k: Tensor, bias_q: Tensor | None, tokens: tuple[Tokens, Tokens]
) -> Tensor | None:
    """Orthonormal columns that span what W_Q and W_K can do without effect, whatever the mask.

    In the coordinates of the tokens, weights ``(in, d)``; None where they are linearly dependent.
    """
    of_q, of_k = tokens
    d = w_q.shape[1]
    eye = torch.eye(d, dtype=w_q.dtype, device=w_q.device)
    a, b, kept = of_q.basis.mT @ w_q, of_k.basis.mT @ w_k, eye
    if bias_q is not None and bool(bias_q.any()):
        if of_q.centred < of_q.rank:
            a = a + of_q.ones.to(a) * bias_q
        else:
            kept = torch.linalg.qr(torch.cat([bias_q[:, None], eye], 1))[0][:, 1:]
    turn_q = torch.einsum("ag,ch->acgh", a @ kept, eye).reshape(a.numel(), -1)
    turn_k = torch.einsum("ah,cg->acgh", -b, kept).reshape(b.numel(), -1)
    columns = torch.cat([turn_q, turn_k])
    if of_k.centred < of_k.rank:
        shift = torch.einsum("a,cf->acf", of_k.ones.to(b)[:, 0], eye).reshape(b.numel(), d)
        columns = torch.cat([columns, torch.cat([shift.new_zeros(a.numel(), d), shift])], 1)
    columns = columns / torch.linalg.vector_norm(columns, dim=0).clamp_min(1e-300)
    if columns.shape[1] > columns.shape[0]:
        return None
    basis: Tensor
    basis, r = torch.linalg.qr(columns)
    # Dependent columns would let directions in that do have an effect.
    return basis if bool((r.diagonal().abs() > 1e-6).all()) else None
