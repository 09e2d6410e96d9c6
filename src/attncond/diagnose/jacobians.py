"""The Jacobian of a captured head: whether the closed form covers it, its κ, and the bounds.

The closed form is for softmax(c·(XW_Q)(XW_K)ᵀ + mask)·XW_V. That queries, keys and values are these
products is not taken on trust: each is recomputed from a candidate X and the claimed weight, and
compared with what reached the attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attncond.corrections import effective, full, records
from attncond.diagnose.bounds import BoundedHead, certificate, paper_bound
from attncond.diagnose.capture import Captured, ProjectionInput
from attncond.diagnose.conditioned import conditioned_spectrum
from attncond.diagnose.layout import as_tokens
from attncond.diagnose.measure import Values, spread
from attncond.diagnose.replayed import CLOSE, ReplayJob, replay_of, spectrum_values
from attncond.diagnose.tokenwise import ReplayError
from attncond.errors import ConditioningError
from attncond.head_inputs import Inputs
from attncond.heads import Heads
from attncond.jacobian import Details, attention_jacobian
from attncond.sites import Projection, Role, Site

__all__ = ["Job", "NotCoveredError", "job_of", "used_weight"]

_ROLES: tuple[Role, Role, Role] = ("q", "k", "v")


class NotCoveredError(Exception):
    """Why an attention's Jacobians cannot be computed."""


@dataclass(frozen=True, eq=False)
class Job:
    """One head as `attention_jacobian` takes it; its tokens are sampled already."""

    x: Tensor
    x_kv: Tensor | None
    projections: tuple[Projection, Projection, Projection]  # read anew: they are large in float64
    biases: tuple[Tensor | None, Tensor | None, Tensor | None]
    scale: float
    mask: Tensor | None  # (heads or 1, queries, keys)
    head: int = 0
    conditioned: Heads | None = None
    weights: tuple[Tensor, Tensor, Tensor] | None = None  # of all heads, once they are taken

    def taken(self, heads: Sequence[int], room: int) -> Job:
        """The same with copies of all that it needs in the host's memory: the model may go on."""
        q, k, v = (used_weight(p).cpu() for p in self.projections)
        b_q, b_k, b_v = (_on_host(b) for b in self.biases)
        return replace(
            self,
            x=self.x.cpu(),
            x_kv=_on_host(self.x_kv),
            biases=(b_q, b_k, b_v),
            mask=_on_host(self.mask),
            weights=(q, k, v),
        )

    @property
    def written(self) -> int:
        """Bytes of Jacobians that are written down already."""
        return 0

    def of_head(self, head: int) -> Job:
        """The same attention, another head."""
        return replace(self, head=head)

    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """W_Q, W_K, W_V and mask of the head."""
        heads = self.projections[0].heads
        used = self.weights or (used_weight(p) for p in self.projections)
        q, k, v = (w[self.head * len(w) // heads].double() for w in used)
        mask = self.mask
        if mask is not None:
            mask = mask[self.head if len(mask) > 1 else 0]
        return q, k, v, mask

    def bias(self, index: int) -> Tensor | None:
        """One of the biases of the head."""
        bias, heads = self.biases[index], self.projections[0].heads
        return None if bias is None else bias[self.head * len(bias) // heads]

    def solve(self) -> Values:
        """κ of the head's Jacobian, the paper's bound and the certificate."""
        return _solve(self)


def used_weight(p: Projection) -> Tensor:
    """The weight that the forward pass uses, (heads, head_dim, in), in memory of its own."""
    raw = full(p.raw.detach())
    return p.matrix(effective(p.owner, p.name, raw) if p.name in records(p.owner) else raw)


def _on_host(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.cpu()


@dataclass(frozen=True, eq=False)
class _Source:
    x: Tensor  # (tokens, in) of one item, in its own dtype, which tells how exact it is
    bias: Tensor | None  # (heads, head_dim)
    factor: float
    tensor: Tensor  # where x comes from


def job_of(captured: Captured, heads: Sequence[int], tokens: int | None) -> Job | ReplayJob:
    """What the Jacobians of an attention's heads need, for the first item of the batch.

    Where the closed form does not cover it, the attention is run again. Raises `NotCoveredError`.
    """
    try:
        return _closed_form(captured, tokens)
    except NotCoveredError as plain:
        try:
            return replay_of(captured, heads, tokens)
        except ReplayError as error:
            raise NotCoveredError(f"{plain}, and {error}") from error


def _closed_form(captured: Captured, tokens: int | None) -> Job:
    site = captured.site
    weights = {p.role: used_weight(p) for p in site.projections}
    if captured.query is None or captured.key is None or captured.value is None:
        return _written_out(captured, weights, tokens)
    if not captured.fixed:
        raise NotCoveredError("its mask or position bias depends on queries or keys")
    sources = []
    for role, tensor in (("q", captured.query), ("k", captured.key), ("v", captured.value)):
        p = next((p for p in site.projections if p.role == role), None)
        if p is None:
            raise NotCoveredError(f"it has no projection for {role.upper()}")
        sources.append(_source(captured, p, weights[p.role], tensor[0]))
    q, k, v = sources
    if k.x is not v.x and k.tensor is not v.tensor:
        raise NotCoveredError("keys and values are projected from different inputs")
    if abs(v.factor - 1) > 1e-3:
        raise NotCoveredError("its values are rescaled")
    same = q.tensor is k.tensor
    rows = spread(len(q.x), tokens)
    columns = rows if same else spread(len(k.x), tokens)
    mask = None
    if captured.mask is not None:
        mask = captured.mask[0][:, rows][:, :, columns]
        mask = mask[:1] if captured.mask.stride(1) == 0 else mask
        if mask.dtype != torch.bool:
            mask = mask.double().masked_fill(mask <= site.hidden, -math.inf)
    if captured.causal:
        places = [torch.tensor(i, device=q.x.device) for i in (rows, columns)]
        seen = (places[0][:, None] >= places[1])[None]
        mask = seen if mask is None else _both(mask, seen)
    return Job(
        q.x[rows],
        None if same else k.x[columns],
        _by_role(site),
        (q.bias, k.bias, v.bias),
        captured.scale * q.factor * k.factor,
        mask,
        conditioned=captured.conditioned,
    )


def _written_out(captured: Captured, weights: dict[Role, Tensor], tokens: int | None) -> Job:
    """The same where the module computes softmax(logits) itself: the logits are compared."""
    product, value, site = captured.product, captured.value, captured.site
    if captured.conditioned is not None:
        raise NotCoveredError("its heads are conditioned (RemoveGap, Precondition)")
    if product is None or captured.matrix is None or value is None:
        raise NotCoveredError("its logits are no multiple of a product plus something fixed")
    roles = {p.role: p for p in site.projections}
    if set(roles) != {"q", "k", "v"} or captured.scores.heads != site.heads:
        raise NotCoveredError("its queries, keys and values are not found head by head")
    logits, visible = captured.scores.read(0, slice(None))
    p = torch.softmax(logits.masked_fill(~visible, -math.inf), -1).nan_to_num(0.0)
    limit = CLOSE.get(product.dtype, 0.05)
    # Some compute the softmax in float32, whatever the rest is in.
    if float((captured.matrix[0].double() - p).norm()) > max(limit, 1e-5) * float(p.norm()):
        raise NotCoveredError("its attention matrix is changed after the softmax")
    w_v = weights["v"]
    if value.shape[1] == site.heads and len(w_v) < site.heads:  # repeated for its group
        value = value[:, :: site.heads // len(w_v)]
    v = _source(captured, roles["v"], w_v, value[0])
    if abs(v.factor - 1) > 1e-3:
        raise NotCoveredError("its values are rescaled")
    q, k, fit = _logit_sources(captured, roles["q"], roles["k"], weights, product[0])
    if k.tensor is not v.tensor:
        raise NotCoveredError("keys and values are projected from different inputs")
    scale = captured.scale * fit
    same = q.tensor is k.tensor
    rows = spread(len(q.x), tokens)
    columns = rows if same else spread(len(k.x), tokens)
    shift = logits - captured.scale * product[0].double()
    mask: Tensor | None = shift.masked_fill(~visible, -math.inf)
    size = float(logits.masked_fill(~visible, 0.0).abs().max())
    if float(shift.masked_fill(~visible, 0.0).abs().max()) <= limit * max(size, 1e-30):
        mask = None if bool(visible.all()) else visible
    return Job(
        q.x[rows],
        None if same else k.x[columns],
        _by_role(site),
        (q.bias, k.bias, v.bias),
        scale,
        None if mask is None else mask[:, rows][:, :, columns],
    )


def _logit_sources(
    captured: Captured,
    p_q: Projection,
    p_k: Projection,
    weights: dict[Role, Tensor],
    product: Tensor,
) -> tuple[_Source, _Source, float]:
    """The inputs with which the claimed weights make the product, and its factor."""
    limit, got = CLOSE.get(product.dtype, 0.05), product.double()
    groups = len(weights["q"]) // len(weights["k"])
    for q in _candidates(captured, p_q, weights["q"], got.shape[1]):
        for k in _candidates(captured, p_k, weights["k"], got.shape[2]):
            if q[1].shape[2] != k[1].shape[2]:
                continue
            want = q[1] @ k[1].repeat_interleave(groups, 0).mT
            factor = float((want * got).sum() / want.square().sum())
            if factor and float((got / factor - want).norm()) <= limit * float(want.norm()):
                return q[0], k[0], factor
    raise NotCoveredError(
        "Q or K is no plain projection of the input (rotary, normalised, pooled, ...)"
    )


def _by_role(site: Site) -> tuple[Projection, Projection, Projection]:
    q, k, v = (site.projection(role) for role in _ROLES)
    assert q is not None
    assert k is not None
    assert v is not None
    return q, k, v


def _both(mask: Tensor, seen: Tensor) -> Tensor:
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -math.inf)


def _source(captured: Captured, p: Projection, weight: Tensor, got: Tensor) -> _Source:
    """The input and bias with which a claimed weight makes ``got`` (heads, tokens, channels)."""
    if weight.shape[0] != got.shape[0] or weight.shape[1] != got.shape[2]:
        raise NotCoveredError(f"{p.role.upper()} reaches attention in another shape")
    limit, wide = CLOSE.get(got.dtype, 0.05), got.double()
    centred = p.role == "v" and captured.gap  # they come with their mean or without
    for source, want in _candidates(captured, p, weight, got.shape[1]):
        if centred:
            wide, want = (t - t.mean(1, keepdim=True) for t in (wide, want))
        factor = float((want * wide).sum() / want.square().sum())
        if factor and float((wide / factor - want).norm()) <= limit * float(want.norm()):
            rounded = abs(factor - 1) <= torch.finfo(got.dtype).eps
            return replace(source, factor=1.0 if rounded else factor)
    raise NotCoveredError(
        f"{p.role.upper()} is no plain projection of the input (rotary, normalised, pooled, ...)"
    )


def _candidates(
    captured: Captured, p: Projection, weight: Tensor, count: int
) -> Iterator[tuple[_Source, Tensor]]:
    """What may have been projected, and what the weight makes of it, (heads, tokens, channels)."""
    for given in captured.inputs:
        if given.x.shape[-1] != p.in_features:
            continue
        x = as_tokens(given.x.detach(), captured.site, count)[0]
        if len(x) != count:
            continue
        plain = torch.einsum("ti,hci->htc", x.double(), weight.double())
        for bias in _biases(given, p):
            wide = None if bias is None else bias.double()
            yield _Source(x, wide, 1.0, given.x), plain if wide is None else plain + wide[:, None]


def _biases(given: ProjectionInput, p: Projection) -> Iterator[Tensor | None]:
    """The biases of the role's rows, if the weight was used whole or from some row on."""
    if given.bias is None:
        yield None
        return
    bias = given.bias.detach().flatten()
    total = p.raw.shape[p.axis]
    for first in dict.fromkeys((0, total - given.rows, int(p.rows.min()))):
        rows = p.rows - first
        if int(rows.min()) >= 0 and int(rows.max()) < len(bias):
            yield bias[rows.to(bias.device)]


def _solve(job: Job) -> Values:
    w_q, w_k, w_v, mask = job.parts()
    details: Details = {
        "x_kv": job.x_kv,
        "scale": job.scale,
        "bias_q": job.bias(0),
        "bias_k": job.bias(1),
        "bias_v": job.bias(2),
        "mask": mask,
    }
    tokens = {"jacobian_tokens": float(len(job.x))}
    try:
        if job.conditioned is not None:  # the bounds are for heads as they are
            inputs = Inputs.of(job.x, w_q, w_k, w_v, **details)
            return spectrum_values(conditioned_spectrum(inputs, job.conditioned)) | tokens
        found = attention_jacobian(job.x, w_q, w_k, w_v, **details)
    except ConditioningError as error:
        return {"jacobian_status": f"not measured: {error}"}
    values = spectrum_values(found) | tokens
    x = job.x.double()
    head = BoundedHead.of(
        x,
        x if job.x_kv is None else job.x_kv.double(),
        (w_q, w_k, w_v),
        (job.bias(0), job.bias(1), job.bias(2)),
        job.scale,
        mask,
    )
    values["jacobian_paper_bound"] = paper_bound(head)
    values["jacobian_certificate"] = certificate(head)
    return values
