"""Attention heads to differentiate: drawn inputs, the head as a function, and its Jacobian."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st
from spectra import gaussian
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def plain_head(n: int, width: int, d: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens and weights of variance 1/width, as at initialisation."""
    w = gaussian(3, d, width, seed=seed + 1) / math.sqrt(width)
    return gaussian(n, width, seed=seed), w[0], w[1], w[2]


def attend(
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
) -> Tensor:
    """A head by the book, for autograd."""
    source = x if x_kv is None else x_kv
    linear = torch.nn.functional.linear
    q, k, v = linear(x, w_q, bias_q), linear(source, w_k, bias_k), linear(source, w_v, bias_v)
    logits = q @ k.mT * (scale if scale is not None else 1 / math.sqrt(len(w_q)))
    if mask is not None:
        masked = mask.dtype == torch.bool
        logits = logits.masked_fill(~mask, -math.inf) if masked else logits + mask
    if causal:
        logits = logits.masked_fill(torch.ones_like(logits).triu(1) > 0, -math.inf)
    hidden = (logits == -math.inf).all(-1, keepdim=True)
    p = torch.softmax(logits.masked_fill(hidden, 0.0), -1).masked_fill(hidden, 0.0)
    return p @ v


def jacobian(weights: tuple[Tensor, ...], convention: str, function: Any) -> Tensor:
    """The whole Jacobian by torch.func.jacrev, which our code is to agree with."""
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no batched derivative
        parts = torch.func.jacrev(function, argnums=tuple(range(len(weights))))(*weights)
    flat = [p.reshape(-1, w.numel()) for p, w in zip(parts, weights, strict=True)]
    return torch.cat(flat, 1 if convention == "wide" else 0)


@st.composite
def heads(draw: Any, *, stacked: bool | None = None) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """(x, w_q, w_k, w_v) and the rest of a head, convention included."""
    seed = draw(st.integers(0, 2**16))
    size = st.integers(1, 7)
    n, width, d = draw(size), draw(size), draw(st.integers(1, 4))
    stacked = draw(st.booleans()) if stacked is None else stacked
    cross = draw(st.booleans())
    m, width_kv = (draw(size), width if stacked else draw(size)) if cross else (n, width)
    dv = d if stacked else draw(st.integers(1, 4))
    x = gaussian(n, width, seed=seed)
    x_kv = gaussian(m, width_kv, seed=seed + 1) if cross else None
    kind = draw(st.sampled_from(["generic", "generic", "repeated token", "constant channel"]))
    for tokens in (x, x_kv):
        if tokens is not None and kind == "repeated token":
            tokens[-1] = tokens[0]
        elif tokens is not None and kind == "constant channel":
            tokens[:, 0] = 1
    details: dict[str, Any] = {"convention": "stacked" if stacked else "wide"}
    if x_kv is not None:
        details["x_kv"] = x_kv
    for i, (name, length) in enumerate((("bias_q", d), ("bias_k", d), ("bias_v", dv))):
        if draw(st.booleans()):
            details[name] = gaussian(length, seed=seed + 2 + i)
    if draw(st.booleans()):
        details["scale"] = draw(st.sampled_from([0.1, 1.0, -0.7]))
    mask = draw(st.sampled_from(["none", "none", "boolean", "additive", "padded", "causal"]))
    noise = gaussian(n, m, seed=seed + 6)
    if mask == "boolean":
        details["mask"] = noise > -0.6
    elif mask == "additive":
        details["mask"] = noise.masked_fill(noise < -1.2, -math.inf)
    elif mask == "padded":
        details["mask"] = (torch.arange(m) < max(1, m - 2)).expand(n, m)
    details["causal"] = mask == "causal"
    shapes = ((d, width), (d, width_kv), (dv, width_kv))
    weights = tuple(
        gaussian(*shape, seed=seed + 7 + i) / math.sqrt(shape[1]) for i, shape in enumerate(shapes)
    )
    return (x, *weights), details
