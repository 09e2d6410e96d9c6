"""Attention as modules write it, and the masks they give it, to be compared with the naive one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch._dynamo
from naive import attention
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import attncond as ac

GAP, PRE = ac.RemoveGap(), ac.Precondition()
METHODS = {"gap": (GAP,), "precondition": (PRE,), "both": (GAP, PRE)}
methods = pytest.mark.parametrize("on", METHODS.values(), ids=METHODS.keys())
sdpa = F.scaled_dot_product_attention
INF = float("inf")


# What a mask may look like ------------------------------------------------------------------------


def boolean(shape: Sequence[int], generator: torch.Generator, p: float = 0.6) -> Tensor:
    return torch.rand(shape, generator=generator) < p


def with_open_rows(visible: Tensor) -> Tensor:
    """Every query sees something: the first key, if nothing else."""
    visible = visible.clone()
    visible[..., 0] |= ~visible.any(-1)
    return visible


def additive(visible: Tensor, low: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, low)


LEAST = torch.finfo(torch.float64).min
AHEAD = torch.ones(4, 4, dtype=torch.bool).triu(1)  # the keys that a causal mask hides


def make_mask(
    kind: str, b: int, h: int, q: int, k: int, generator: torch.Generator
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(what the module gets, which keys are visible, what is added to the logits)."""
    shape = (b, h, q, k)
    if kind == "none":
        return None, None, None
    if kind == "boolean":
        mask = with_open_rows(boolean((b, 1, q, k), generator))
        return mask, mask, None
    if kind == "flat":
        mask = with_open_rows(boolean((q, k), generator))
        return mask, mask, None
    if kind == "per-head":
        mask = with_open_rows(boolean(shape, generator))
        return additive(mask, -INF), mask, None
    if kind == "inf":
        mask = with_open_rows(boolean((b, 1, q, k), generator))
        return additive(mask, -INF), mask, None
    if kind == "least":
        mask = with_open_rows(boolean((1, 1, q, k), generator))
        return additive(mask, LEAST), mask, None
    if kind == "ten-thousand":
        mask = with_open_rows(boolean((b, 1, q, k), generator))
        return additive(mask, -1e4), mask, None
    if kind == "bias":
        bias = 3 * torch.randn(h, q, k, generator=generator, dtype=torch.float64)
        return bias, None, bias
    if kind == "bias and mask":
        bias = 3 * torch.randn(1, h, q, k, generator=generator, dtype=torch.float64)
        mask = with_open_rows(boolean((b, 1, q, k), generator))
        return bias + additive(mask, -INF), mask, bias
    if kind == "padding":
        mask = with_open_rows(boolean((b, 1, 1, k), generator))
        return mask, mask, None
    if kind == "queries":
        mask = boolean((b, 1, q, 1), generator)
        return additive(mask, -INF), mask, None
    if kind == "window":
        i, j = torch.arange(q)[:, None], torch.arange(k)
        mask = ((i - j).abs() <= 1) | (j == 0)
        return mask, mask, None
    if kind == "causal":
        mask = torch.ones(q, k, dtype=torch.bool).tril()
        return additive(mask, LEAST), mask, None
    if kind == "blind":
        mask = boolean((b, 1, q, k), generator, 0.3)
        mask[0, 0, 0] = False
        return mask, mask, None
    if kind == "blind, inf":
        mask = boolean(shape, generator, 0.3)
        mask[0, 0, -1] = False
        return additive(mask, -INF), mask, None
    assert kind == "blind, least"
    mask = boolean((1, 1, q, k), generator, 0.3)
    mask[0, 0, -1] = False
    return additive(mask, LEAST), mask, None


MASKS = (
    *("none", "boolean", "flat", "per-head", "inf", "least", "ten-thousand", "bias"),
    *(
        "bias and mask",
        "padding",
        "queries",
        "window",
        "causal",
        "blind",
        "blind, inf",
        "blind, least",
    ),
)


# How a module may write its attention -------------------------------------------------------------


def low(mask: Tensor) -> Tensor:
    """The additive form of a mask."""
    return additive(mask, -INF) if mask.dtype == torch.bool else mask


def logits_of(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    logits = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    return logits if mask is None else logits + low(mask)


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return sdpa(q, k, v, attn_mask=mask)


def positional(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, 0.0, False)


def matmul(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return torch.matmul(F.softmax(logits_of(q, k, mask), dim=-1), v)


def by_keyword(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return torch.matmul(input=torch.softmax(logits_of(q, k, mask), dim=-1), other=v)


def method_and_cast(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    weights = F.softmax(logits_of(q, k, mask), dim=-1, dtype=torch.float64).to(q.dtype)
    return F.dropout(weights, p=0.0, training=True).matmul(v)


def values_cast(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    weights = logits_of(q, k, mask).softmax(-1)
    return weights @ v.type_as(weights)


def softmax_by_keyword(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return torch.softmax(input=logits_of(q, k, mask), dim=-1) @ v


def special_softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return torch.special.softmax(logits_of(q, k, mask), -1) @ v


def softmax_module(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return nn.Dropout(0.1).eval()(nn.Softmax(-1)(logits_of(q, k, mask))) @ v


def masked_fill(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    logits = q @ k.mT * q.shape[-1] ** -0.5
    if mask is not None and mask.dtype == torch.bool:
        logits = logits.masked_fill(mask.logical_not(), torch.finfo(q.dtype).min)
    elif mask is not None:
        logits += mask
    return logits.softmax(dim=-1) @ v


def where(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    logits = torch.matmul(q, k.transpose(2, 3)).div(q.shape[-1] ** 0.5)
    if mask is not None and mask.dtype == torch.bool:
        logits = torch.where(mask, logits, torch.full([], LEAST, dtype=q.dtype))
    elif mask is not None:
        logits = torch.add(logits, mask)
    return torch.softmax(logits, -1).matmul(v)


def flattened(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    b, h, n, _ = q.shape
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    scaled = q * q.shape[-1] ** -0.5
    if mask is None:
        logits = torch.bmm(scaled, k.transpose(1, 2))
    else:
        full = low(mask).expand(b, h, n, k.shape[1]).reshape(b * h, n, -1)
        logits = torch.baddbmm(full, scaled, k.transpose(1, 2))
    return torch.bmm(F.softmax(logits, dim=-1), v).view(b, h, n, -1)


def viewed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    b, h, n, _ = q.shape
    logits = (q.flatten(0, 1) @ k.flatten(0, 1).mT).view(b, h, n, -1) / q.shape[-1] ** 0.5
    weights = torch.softmax(logits if mask is None else logits + low(mask), -1)
    weights = weights.view(b * h, n, -1).unsqueeze(0).permute(0, 1, 3, 2).contiguous().mT[0]
    return (weights.reshape(b * h, n, -1) @ v.reshape(b * h, *v.shape[2:])).view(b, h, n, -1)


def split_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    weights = torch.cat(logits_of(q, k, mask).split(1, dim=1), 1).softmax(-1)
    parts = [
        w @ t for w, t in zip(weights.chunk(q.shape[1], 1), v.chunk(q.shape[1], 1), strict=True)
    ]
    return torch.cat(parts, 1)


def linalg(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    logits = torch.linalg.matmul(q * q.shape[-1] ** -0.5, k.mT)
    weights = (logits if mask is None else logits + low(mask)).softmax(dim=-1)
    return torch.linalg.matmul(weights, v)


def einsum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    logits = torch.einsum("bhid,bhjd->bhij", q * q.shape[-1] ** -0.5, k)
    weights = (logits if mask is None else logits + low(mask)).softmax(dim=-1)
    return torch.einsum("bhij,bhjd->bihd", weights, v).transpose(1, 2)


def einsum_values_first(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    weights = logits_of(q, k, mask).softmax(-1)
    return torch.einsum("...jd, ...ij -> ...di", v, weights).mT


def values_first(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    weights = logits_of(q, k, mask).softmax(-1)
    return (v.transpose(-2, -1) @ weights.transpose(-2, -1)).transpose(-2, -1)


def keys_first(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    weights = F.softmax(logits_of(q, k, mask).mT.contiguous(), dim=-2)
    return (v.mT @ weights).mT


def stabilised(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Less their maximum, logits of a row that sees nothing are zero (or not a number)."""
    logits = logits_of(q, k, mask)
    return (logits - logits.max(dim=-1, keepdim=True).values).softmax(-1) @ v


def stabilised_in_parts(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    logits = logits_of(q, k, mask)
    top = logits.detach().amax(-1, keepdim=True)
    first, second = logits[..., :1].sub(top), logits[..., 1:]
    second -= top
    return torch.cat([first, second], -1).softmax(-1) @ v


def stabilised_in_place(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    logits = logits_of(q, k, mask)
    top = logits.detach().amax(-1, keepdim=True)
    logits[..., :1] -= top
    logits[..., 1:] -= top
    return logits.softmax(-1) @ v


def stabilised_elsewhere(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    logits = logits_of(q, k, mask)
    top = logits.detach().amax(-1, keepdim=True)
    shifted = torch.zeros_like(logits)
    shifted[..., :1] = logits[..., :1] - top
    shifted[..., 1:] = logits[..., 1:] - top
    return shifted.softmax(-1) @ v


def summed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    parts = logits_of(torch.stack([q / 4, q * 3 / 4]), k, None).sum(0)
    return (parts if mask is None else parts + low(mask)).softmax(-1) @ v


def stabilised_and_summed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    parts = torch.cat([logits_of(q / 4, k, mask)[None], logits_of(q * 3 / 4, k, None)[None]])
    return (parts - parts.amax(-1, keepdim=True)).sum(0).softmax(-1) @ v


FUSED = (fused, positional)
WRITTEN = (
    *(matmul, by_keyword, method_and_cast, values_cast, softmax_by_keyword, special_softmax),
    *(softmax_module, masked_fill, where, linalg, stabilised, stabilised_in_parts),
    *(summed, stabilised_and_summed),
    *(flattened, viewed, split_heads, einsum, einsum_values_first, values_first, keys_first),
)
ASSIGNED = (stabilised_in_place, stabilised_elsewhere)  # which torch.compile shows to no mode
FORMS = FUSED + WRITTEN


GATE = torch.tensor([1.0, 0.5])[:, None, None]  # a factor for each of two heads


def gathered(v: Tensor, places: Tensor) -> Tensor:
    """The values at each query's places, (..., queries, places, channels)."""
    whole = v.unsqueeze(-3).expand(*places.shape[:-1], *v.shape[-2:])
    return whole.gather(-2, places[..., None].expand(*places.shape, v.shape[-1]))


# What is compared ---------------------------------------------------------------------------------


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def close(a: Any, b: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def compare(
    module: nn.Module,
    tensors: Sequence[Tensor],
    mask: Tensor | None,
    on: tuple[object, ...],
    visible: Tensor | None,
    bias: Tensor | None,
    tolerance: float = 1e-10,
) -> None:
    """Outputs, and the gradients of a random functional of them, with the naive ones."""
    mine = [t.detach().clone().requires_grad_() for t in tensors]
    theirs = [t.detach().clone().requires_grad_() for t in tensors]
    output = module(*mine, mask)
    expected = attention(*theirs, on, visible, bias)
    close(output, expected, tolerance)
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    found = torch.autograd.grad((output * direction).sum(), mine)
    wanted = torch.autograd.grad((expected * direction).sum(), theirs, materialize_grads=True)
    # Where a row is short, its direction turns fast, and so do rounding errors, even where it
    # cannot turn at all: there the gradient is zero, as with two keys less their mean.
    lengths = attention(*tensors, tuple(m for m in on if m is GAP), visible, bias).norm(dim=-1)
    shortest = float(lengths[lengths > 0].amin()) if lengths.any() else 1.0
    for f, w in zip(found, wanted, strict=True):
        assert torch.isfinite(f).all()
        close(f, w, tolerance * max(1.0, float(w.abs().max()), 1 / shortest))


def compiled(module: nn.Module, **kwargs: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(module, fullgraph=True, **{"backend": "aot_eager", **kwargs})


def alike(
    module: Callable[..., Any], wanted: Callable[..., Any], tensors: Sequence[Tensor]
) -> None:
    """Outputs and gradients of a module, and of functions of the same tensors."""
    mine = [t.detach().clone().requires_grad_() for t in tensors]
    theirs = [t.detach().clone().requires_grad_() for t in tensors]
    found, expected = tree_leaves(module(*mine)), tree_leaves(wanted(*theirs))
    assert len(found) == len(expected)
    losses = [0.0, 0.0]
    for f, e in zip(found, expected, strict=True):
        assert f.shape == e.shape
        if f.dtype == torch.bool:
            assert torch.equal(f, e)
            continue
        close(f, e)
        direction = torch.randn(f.shape, generator=torch.Generator().manual_seed(f.numel())).to(f)
        losses[0] += (f * direction).sum()
        losses[1] += (e * direction).sum()
    for f, e in zip(*map(torch.autograd.grad, losses, (mine, theirs)), strict=True):
        close(f, e, 1e-10 * max(1.0, float(e.abs().max())))
