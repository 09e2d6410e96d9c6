"""κ of a head that RemoveGap or Precondition changes, from the closed form of the plain one.

RemoveGap's output is (P − U)·V with the uniform U over the keys that a query sees. U does not
depend on the logits, so that only y_i = Σ_j p_ij x_j in J_V becomes Σ_j (p_ij − u_ij) x_j.
Precondition divides the rows a_i of the output by their lengths: J becomes C·J with a block for
each query, C_i = (I − a_i·a_iᵀ/‖a_i‖²)/‖a_i‖, whose null direction is taken out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attncond.derivative import HeadJacobian, differentiate
from attncond.diagnose.replayed import dense_spectrum
from attncond.head_inputs import Inputs
from attncond.heads import Heads
from attncond.jacobian import JacobianSpectrum, memory_limit
from attncond.lanczos import Bound, Extremes, Operator, Side, beside, extremes, rounding
from attncond.rank import reduce_tokens
from attncond.written import Written

__all__ = ["conditioned_spectrum"]

_EPS = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class _Rows:
    """C·J with C block diagonal: ``blocks`` ``(n, c, d_v)``, one for each query."""

    jacobian: HeadJacobian
    blocks: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return self.blocks.shape[0] * self.blocks.shape[1], self.jacobian.shape[1]

    @property
    def device(self) -> torch.device:
        """Where the blocks are."""
        return self.blocks.device

    def forward(self, vector: Tensor) -> Tensor:
        """C·J·v."""
        n, _, dv = self.blocks.shape
        return (self.blocks @ self.jacobian.forward(vector).view(n, dv, 1)).flatten()

    def adjoint(self, vector: Tensor) -> Tensor:
        """Jᵀ·Cᵀ·u."""
        n, c, _ = self.blocks.shape
        return self.jacobian.adjoint((vector.view(n, 1, c) @ self.blocks).flatten())

    def gram(self, side: Side) -> Tensor:
        """C·JJᵀ·Cᵀ, its lower triangle, or Jᵀ·Cᵀ·C·J."""
        if side == "columns":
            return Written(self.dense()).gram(side)
        n, c, dv = self.blocks.shape
        half = self.blocks @ self.jacobian.gram("rows").view(n, dv, n * dv)
        whole = half.view(n * c, n, dv).transpose(0, 1) @ self.blocks.mT
        return whole.transpose(0, 1).reshape(n * c, n * c)

    def dense(self) -> Tensor:
        """C·J."""
        n, c, dv = self.blocks.shape
        return (self.blocks @ self.jacobian.dense().view(n, dv, -1)).view(n * c, -1)


def conditioned_spectrum(inputs: Inputs, heads: Heads) -> JacobianSpectrum:
    """The wide Jacobian's; ``inputs`` are those of the head without its conditioning."""
    with torch.no_grad():
        shape, inputs = inputs.shape, inputs.distinct()
        if heads.gap is not None and bool((several := inputs.seen.sum(1) > 1).any()):
            # A query that sees one key has no output left, whatever the weights.
            inputs = _queries(inputs, several)
        return replace(_spectrum(inputs, heads), shape=shape)


def _queries(inputs: Inputs, chosen: Tensor) -> Inputs:
    if bool(chosen.all()):
        return inputs
    weight = None if inputs.weight is None else inputs.weight[chosen]
    x_q, shift, seen = (t[chosen] for t in (inputs.x_q, inputs.shift, inputs.seen))
    return replace(inputs, x_q=x_q, shift=shift, seen=seen, weight=weight)


def _spectrum(inputs: Inputs, heads: Heads) -> JacobianSpectrum:
    of_q = reduce_tokens(inputs.x_q, inputs.rtol)
    same = inputs.x_q is inputs.x_kv
    of_k = of_q if same else reduce_tokens(inputs.x_kv, inputs.rtol)
    q, k, v = inputs.x_q @ inputs.w_q, inputs.x_kv @ inputs.w_k, inputs.x_kv @ inputs.w_v
    q = q if inputs.bias_q is None else q + inputs.bias_q
    v = v if inputs.bias_v is None else v + inputs.bias_v
    p = torch.softmax(inputs.scale * (q @ k.mT) + inputs.shift, -1)
    head = differentiate(q, k, v, p, of_q.left, of_k.left, inputs.scale)
    if heads.gap is not None:
        p = p - inputs.seen / inputs.seen.double().sum(1, keepdim=True)
        head = replace(head, y=p @ of_k.left)
    output = p @ v
    scale = torch.ones_like(output[:, :1]) if inputs.weight is None else inputs.weight[:, None]
    length = torch.linalg.vector_norm(output, dim=1, keepdim=True)
    turned = torch.zeros_like(length[:, 0], dtype=torch.bool)
    if (precondition := heads.precondition) is not None:
        divisor = length.clamp_min(precondition.eps)
        scale = scale / torch.where(length == 0, torch.ones_like(length), divisor)
        turned = (length[:, 0] >= precondition.eps) & (not precondition.detach)
    tall = scale[..., None]
    jacobian = HeadJacobian(
        replace(head, s=tall * head.s, b=tall * head.b, y=scale * head.y), False
    )
    unit = torch.where(turned[:, None], output / length.clamp_min(_EPS**2), 0.0)
    some, every = bool(turned.any()), bool(turned.all())
    if (some == every) and 2 * inputs.bytes(True) <= memory_limit(output.device):
        # The rest of an orthonormal basis whose first vector is the unit one.
        rest = torch.linalg.qr(unit[..., None], mode="complete")[0][..., 1:].mT if some else None
        operator = jacobian if rest is None else _Rows(jacobian, rest)
        unmoved = None
        if heads.gap is not None:
            unmoved = _unmoved(head.y, of_k.left, v, scale, rest)
        found = _resolved(operator, unmoved)
        if found is not None:
            rows = operator.shape
            return JacobianSpectrum(
                **vars(found), shape=rows, convention="wide", path="closed form"
            )
    eye = torch.eye(v.shape[1], dtype=v.dtype, device=v.device)
    blocks = eye - unit[:, :, None] * unit[:, None]
    return dense_spectrum(_Rows(jacobian, blocks) if some else jacobian, output)


def _resolved(operator: Operator, unmoved: Tensor | None) -> Extremes | None:
    """Both ends of the spectrum, or None where the lower one is not told.

    ``unmoved``: orthonormal columns in which no weights move the output.
    """
    size = min(operator.shape)
    few = unmoved is not None and unmoved.shape[1] > 0 and size == operator.shape[0]
    found = extremes(operator, Bound(size), smallest=not few, count=False)
    if unmoved is None or not few:
        return found if found.sigma_min is not None else None
    left = torch.stack([operator.adjoint(u) for u in unmoved.mT.contiguous()])
    if float(torch.linalg.matrix_norm(left)) > rounding(operator.shape, found.sigma_max):
        return None
    return beside(operator, "rows", unmoved, found)


def _unmoved(y: Tensor, tokens: Tensor, v: Tensor, scale: Tensor, rest: Tensor | None) -> Tensor:
    """Directions of the output that RemoveGap leaves to no weights, orthonormal columns.

    Logits move outputs within the span of centred values. W_V moves all channels, but no
    combination of queries whose rows of P − U cancel: with as many queries as keys there is one,
    since (P − U)·1 = 0.
    """
    turn, sizes, _ = torch.linalg.svd(y)
    limit = 10 * max(y.shape) * _EPS * float(torch.linalg.matrix_norm(tokens, 2))
    still = torch.linalg.qr(turn[:, int((sizes > limit).sum()) :] / scale)[0]
    _, sizes, channels = torch.linalg.svd(v - v.mean(0))
    limit = 10 * max(v.shape) * _EPS * float(torch.linalg.matrix_norm(v, 2))
    beside = channels[int((sizes > limit).sum()) :].mT
    parts = beside.expand(len(y), -1, -1) if rest is None else rest @ beside
    columns: Tensor = still[:, None, :, None] * parts[:, :, None]
    return columns.flatten(0, 1).flatten(1)
