"""What a head's Jacobian is computed from: a user's inputs, checked and made plain."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from attncond.derivative import Head, HeadJacobian, differentiate
from attncond.errors import ConditioningError
from attncond.lanczos import Bound
from attncond.rank import gauge, reduce_tokens, wide_rank

__all__ = ["Convention", "Inputs"]

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
        rtol = max(*x.shape, *source.shape) * torch.finfo(torch.float64).eps
        if not x.dtype == source.dtype == torch.float64:
            # What float32 rounds off is as large as this, and tokens less apart are not apart:
            # layer-normed ones would otherwise span the direction of their mean.
            rtol = max(rtol, 4 * torch.finfo(torch.float32).eps)
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
            rtol=rtol,
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
            return 8 * factors + (1 << 26)
        if size < n * dv or self.stacked:
            factors += n * (rq * rq + rk * rk) + 3 * (rq + rk) * d * (d * d + d)
        copies = 4 if self.x_q.is_cuda else 2  # the factor's inverse is written down there
        return 8 * (factors + copies * size * size + size * size // 4) + (1 << 28)

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
    if device.type == "mps":
        raise ConditioningError("mps has no float64, which exact spectra need: move to the CPU")
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
