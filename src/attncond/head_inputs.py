"""What a head's Jacobian is computed from: checked inputs, the span of the tokens, the rank."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from attncond.derivative import Head, HeadJacobian, differentiate
from attncond.errors import ConditioningError
from attncond.lanczos import Bound

__all__ = ["Convention", "Inputs", "Tokens", "gauge", "reduce_tokens", "wide_rank"]

Convention = Literal["wide", "stacked"]

_MASKED = -1e4  # so far below the largest of its row, an additive mask hides


@dataclass(frozen=True)
class Inputs:
    """One head in float64: tokens, weights ``(in, d)``, biases, and which keys a query sees.

    ``shift`` is what the mask adds to logits, -inf where ``seen`` is False; both ``(n, m)``.
    ``weight`` ``(n,)`` multiplies each query's rows of the Jacobian.
    """

    x_q: Tensor
    x_kv: Tensor
    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    bias_q: Tensor | None
    bias_v: Tensor | None
    shift: Tensor
    seen: Tensor
    scale: float
    stacked: bool
    rtol: float
    weight: Tensor | None = None

    @classmethod
    def of(
        cls,
        x: Tensor,
        w_q: Tensor,
        w_k: Tensor,
        w_v: Tensor,
        *,
        x_kv: Tensor | None = None,
        scale: float | None = None,
        bias_q: Tensor | None = None,
        bias_k: Tensor | None = None,
        bias_v: Tensor | None = None,
        mask: Tensor | None = None,
        causal: bool = False,
        convention: Convention = "wide",
    ) -> Inputs:
        """Check what a user gave; `attention_jacobian` has the shapes."""
        source = x if x_kv is None else x_kv
        named = {"x": x, "x_kv": source, "w_q": w_q, "w_k": w_k, "w_v": w_v}
        for name, t in named.items():
            _check(name, t, 2, x.device)
        for name, w, read in (("w_q", w_q, x), ("w_k", w_k, source), ("w_v", w_v, source)):
            if w.shape[1] != read.shape[1]:
                raise ConditioningError(
                    f"{name} of shape {tuple(w.shape)} does not read tokens of width "
                    f"{read.shape[1]}: give weights as (head_dim, in), as nn.Linear stores them"
                )
        if len(w_q) != len(w_k):
            raise ConditioningError(f"w_q has {len(w_q)} rows, w_k {len(w_k)}: they must agree")
        for name, bias, w in (
            ("bias_q", bias_q, w_q),
            ("bias_k", bias_k, w_k),
            ("bias_v", bias_v, w_v),
        ):
            if bias is not None:
                _check(name, bias, 1, x.device)
                if len(bias) != len(w):
                    raise ConditioningError(f"{name} has {len(bias)} entries, its weight {len(w)}")
        if convention not in ("wide", "stacked"):
            raise ConditioningError(f"convention must be 'wide' or 'stacked', not {convention!r}")
        if convention == "stacked" and not w_q.shape == w_k.shape == w_v.shape:
            raise ConditioningError(
                "the stacked convention needs W_Q, W_K and W_V of one shape, not "
                f"{tuple(w_q.shape)}, {tuple(w_k.shape)}, {tuple(w_v.shape)}: use 'wide'"
            )
        scale = 1 / math.sqrt(len(w_q)) if scale is None else float(scale)
        if not math.isfinite(scale):
            raise ConditioningError(f"scale is {scale}: give a finite number")
        shift = _shift(mask, causal, len(x), len(source), x.device)
        tokens = _plain(x)
        # bf16 tokens are taken at their word: coarser than float32 is no arithmetic of ours.
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
        return cls(
            x_q=tokens,
            x_kv=tokens if x_kv is None else _plain(x_kv),
            w_q=_plain(w_q).mT,
            w_k=_plain(w_k).mT,
            w_v=_plain(w_v).mT,
            bias_q=None if bias_q is None else _plain(bias_q),
            bias_v=None if bias_v is None else _plain(bias_v),
            shift=shift,
            seen=shift > -math.inf,
            scale=scale,
            stacked=convention == "stacked",
            rtol=max(*x.shape, *source.shape) * eps,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the Jacobian in all weights."""
        rows = len(self.x_q) * self.w_v.shape[1]
        if self.stacked:
            return 3 * rows, self.w_q.numel()
        return rows, self.w_q.numel() + self.w_k.numel() + self.w_v.numel()

    def distinct(self) -> Inputs:
        """The same spectrum without keys that nobody sees and queries that see nothing.

        Equal queries have equal rows in J: one of them times √count has the same JᵀJ.
        """
        rows, keys = self.seen.any(1), self.seen.any(0)
        if not bool(rows.any()):
            raise ConditioningError(
                "the mask hides every key from every query, so nothing depends on the weights; "
                "True in a boolean mask means that a query may look"
            )
        shift = self.shift[rows][:, keys]
        both = torch.cat([self.x_q[rows], shift], 1)
        few, counts = torch.unique(both, dim=0, return_counts=True)
        if len(few) < len(both):
            x_q, shift = few.split([self.x_q.shape[1], shift.shape[1]], 1)
        elif bool(rows.all() & keys.all()):
            return self
        else:
            x_q, counts = self.x_q[rows], torch.ones_like(counts)
        seen = shift > -math.inf
        weight = counts.double().sqrt()
        x_kv = self.x_kv[keys]
        return replace(self, x_q=x_q, x_kv=x_kv, seen=seen, shift=shift, weight=weight)

    def bytes(self, smallest: bool) -> int:
        """About how much memory the spectrum takes at its peak."""
        (n, width), m = self.x_q.shape, len(self.x_kv)
        d, dv = self.w_q.shape[1], self.w_v.shape[1]
        if self.stacked:
            rq = rk = min(n if self.x_q is self.x_kv else n + m, width)
            size = min(3 * n * dv, rq * d)
        else:
            rq, rk = min(n, width), min(m, self.x_kv.shape[1])
            size = min(n * dv, rq * d + rk * (d + dv))
        factors = n * dv * (d + rk) + 2 * (n * m + n * rq)
        if not smallest:
            return 8 * factors
        pairs = n * (rk * rk + rq * rk) if size < n * dv else 0
        return 8 * (factors + pairs + int(2.5 * size * size)) + (1 << 28)

    def jacobian(self) -> tuple[HeadJacobian, Bound]:
        """J in the coordinates of the tokens, and what is known of its rank."""
        n, d, dv = len(self.x_q), self.w_q.shape[1], self.w_v.shape[1]
        masked = not bool(self.seen.all())
        if self.stacked:
            both = self.x_q if self.x_q is self.x_kv else torch.cat([self.x_q, self.x_kv])
            joint = reduce_tokens(both, self.rtol)
            left_q, left_k = joint.left[:n], joint.left[-len(self.x_kv) :]
            of_k = joint if both is self.x_kv else reduce_tokens(self.x_kv, self.rtol)
            # Y alone is injective on what the keys span, S on what the queries add to it.
            sure = n >= of_k.rank and (joint.rank == of_k.rank or d <= of_k.centred)
            rank = min(3 * n * dv, joint.rank * d)
            bound = Bound(rank, "formula" if sure and not masked else None)
            return HeadJacobian(self._head(left_q, left_k), True), bound
        of_q = reduce_tokens(self.x_q, self.rtol)
        of_k = of_q if self.x_q is self.x_kv else reduce_tokens(self.x_kv, self.rtol)
        jacobian = HeadJacobian(self._head(of_q.left, of_k.left), False)
        biased = self.bias_q is not None and bool(self.bias_q.any())
        rank = wide_rank(n, d, dv, (of_q, of_k), biased)
        null = None
        if rank < n * dv and d <= min(of_q.rank, of_k.centred) and dv <= of_k.centred:
            null = gauge(self.w_q, self.w_k, self.bias_q, (of_q, of_k))
        return jacobian, Bound(rank, None if masked else "formula", null)

    def whole(self) -> HeadJacobian:
        """J in the weights' own coordinates."""
        return HeadJacobian(self._head(self.x_q, self.x_kv), self.stacked)

    def _head(self, left_q: Tensor, left_k: Tensor) -> Head:
        q, k, v = self.x_q @ self.w_q, self.x_kv @ self.w_k, self.x_kv @ self.w_v
        # A bias of the keys moves all logits of a query alike: the softmax does not see it.
        q = q if self.bias_q is None else q + self.bias_q
        v = v if self.bias_v is None else v + self.bias_v
        p = torch.softmax(self.scale * (q @ k.mT) + self.shift, -1)
        p = torch.where(self.seen.any(1, keepdim=True), p, 0.0)
        head = differentiate(q, k, v, p, left_q, left_k, self.scale)
        if self.weight is None:
            return head
        w = self.weight[:, None]
        return replace(head, s=w[..., None] * head.s, b=w[..., None] * head.b, y=w * head.y)


def _plain(t: Tensor) -> Tensor:
    return t.detach().double()


def _check(name: str, t: Tensor, ndim: int, device: torch.device) -> None:
    if not isinstance(t, Tensor) or not t.is_floating_point():
        raise ConditioningError(f"{name} must be a tensor of real numbers")
    if t.ndim != ndim or 0 in t.shape:
        wanted = "(tokens, in) or (head_dim, in)" if ndim == 2 else "(head_dim,)"
        raise ConditioningError(
            f"{name} has shape {tuple(t.shape)}, one head needs {wanted}: "
            "take one sample of a batch, or attention_jacobians for several heads"
        )
    if t.device != device:
        raise ConditioningError(f"{name} is on {t.device}, x on {device}: move them together")
    if not bool(t.isfinite().all()):
        raise ConditioningError(
            f"{name} holds NaN or inf: look for the first layer that produces them, or leave "
            "those tokens out"
        )


def _shift(mask: Tensor | None, causal: bool, n: int, m: int, device: torch.device) -> Tensor:
    """Boolean or additive mask and causality as one additive mask."""
    shift = torch.zeros(n, m, dtype=torch.float64, device=device)
    if mask is not None:
        try:
            mask = mask.detach().to(device).expand(n, m)
        except RuntimeError:
            raise ConditioningError(
                f"mask of shape {tuple(mask.shape)} does not fit {n} queries and {m} keys: give "
                "one that broadcasts to (queries, keys) of one head"
            ) from None
        if mask.dtype == torch.bool:
            shift = shift.masked_fill(~mask, -math.inf)
        elif mask.is_floating_point():
            if bool((mask.isnan() | (mask == math.inf)).any()):
                raise ConditioningError(
                    "mask holds NaN or +inf: use -inf where a query may not look"
                )
            # A softmax ignores what a whole row has in common, and -1e9 would swallow the logits.
            shift = mask.double() - mask.double().amax(1, keepdim=True)
            shift = torch.where(shift > _MASKED, shift, -math.inf)  # nan: -inf throughout
        else:
            raise ConditioningError(
                f"mask is {mask.dtype}: make it bool (True: may look) or real (added to logits)"
            )
    if causal:
        hidden = torch.ones(n, m, dtype=torch.bool, device=device).triu(1)
        shift = shift.masked_fill(hidden, -math.inf)
    return shift


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
