"""Starts that no method of the library makes: mimetic, and output projections near the identity.

Mimetic initialisation (Trockman & Kolter, arXiv:2305.09828): attention that starts like a trained
one. Per head W_Q W_Kᵀ ≈ 0.7 Z + 0.7 I, per layer W_V W_proj ≈ 0.4 Z − 0.4 I, each from the singular
value decomposition of the right side, Z Gaussian with variance 1/d. (In the paper's notation
weights act from the right; torch's are their transposes.) It is the nearest relative of λI
conditioning: both put identities into the projections, but this one only at the start.

Output projections are no part of the papers, whose λI is for W_Q, W_K and W_V. Here they may start
as s(W ± λI) with κ ≤ 2 and their own norm, as the library's default makes the other three.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from attncond.errors import UnsupportedAttentionError
from attncond.inspection import inspect
from attncond.sites import Projection, Site

QK_NOISE, QK_IDENTITY = 0.7, 0.7
V_NOISE, V_IDENTITY = 0.4, -0.4


@torch.no_grad()
def mimetic(model: nn.Module) -> int:
    """Initialise W_Q, W_K, W_V and the output projection of every attention over tokens, in place.

    Attention over channels (XCiT's cross-covariance, DaViT's channel attention) keeps what it has:
    the definition speaks of tokens. Returns how many attentions were initialised.

    Raises:
        UnsupportedAttentionError: The model has no such attention, or one is not square enough for
            the definition or has no output projection named ``proj``.
    """
    sites = [site for site in inspect(model) if not site.over_channels]
    if not sites:
        raise UnsupportedAttentionError("mimetic initialisation needs attention over tokens")
    for site in sites:
        _start(site)
    return len(sites)


def _start(site: Site) -> None:
    q, k, v = (site.projection(role) for role in ("q", "k", "v"))
    output = _output(site)
    if q is None or k is None or v is None or output is None:
        raise UnsupportedAttentionError(
            f"mimetic initialisation: {site.path} has no W_Q, W_K, W_V and output projection 'proj'"
        )
    d = q.in_features
    if (
        (q.heads, q.head_dim) != (k.heads, k.head_dim)
        or k.in_features != d
        or (output.weight.shape != (d, v.heads * v.head_dim))
    ):
        raise UnsupportedAttentionError(f"mimetic initialisation: {site.path} has unequal shapes")
    heads = [halves(d, q.head_dim, QK_NOISE, QK_IDENTITY) for _ in range(q.heads)]
    _write(q, torch.stack([left.T for left, _ in heads]))
    _write(k, torch.stack([right.T for _, right in heads]))
    left, right = halves(d, v.heads * v.head_dim, V_NOISE, V_IDENTITY)
    _write(v, left.T.unflatten(0, (v.heads, v.head_dim)))
    output.weight.copy_(right)


def halves(d: int, rank: int, noise: float, identity: float) -> tuple[Tensor, Tensor]:
    """Two (d, rank) matrices whose product L Rᵀ is the best of that rank to noise·Z + identity·I.

    >>> left, right = halves(8, 8, 0.0, 2.0)
    >>> torch.allclose(left @ right.T, 2 * torch.eye(8), atol=1e-5)
    True
    """
    z = torch.randn(d, d) * d**-0.5
    u, s, vt = torch.linalg.svd(noise * z + identity * torch.eye(d))
    root = s[:rank].sqrt()
    return u[:, :rank] * root, vt[:rank].T * root


def _write(projection: Projection, matrix: Tensor) -> None:
    """Write a (heads, head_dim, in_features) matrix to where the projection lives."""
    raw = projection.raw
    rows = raw.movedim(projection.axis, 0)
    shape = (projection.rows.numel(), *rows.shape[1:])
    rows[projection.rows.flatten().to(raw.device)] = matrix.reshape(shape).to(
        device=raw.device, dtype=raw.dtype
    )


def outputs(model: nn.Module) -> list[nn.Linear]:
    """The output projections of all attention, by timm's name for them."""
    found = {id(p): p for p in map(_output, inspect(model)) if p is not None}
    return list(found.values())


def _output(site: Site) -> nn.Linear | None:
    found = getattr(site.module, "proj", None)
    return found if isinstance(found, nn.Linear) else None


@torch.no_grad()
def near_identity(model: nn.Module, sign: float = 1.0) -> int:
    """Let output projections start as s(W + sign·λI), λ = 3σ_max, s what keeps σ_max; how many.

    Raises:
        UnsupportedAttentionError: No output projection is named ``proj``.
    """
    found = outputs(model)
    if not found:
        raise UnsupportedAttentionError("there is no attention with an output projection 'proj'")
    for linear in found:
        weight = linear.weight
        norm = torch.linalg.matrix_norm(weight, 2)
        shifted = weight + sign * 3 * norm * torch.eye(*weight.shape, device=weight.device)
        weight.copy_(shifted * (norm / torch.linalg.matrix_norm(shifted, 2)))
    return len(found)


STARTS: dict[str, Callable[[nn.Module], int]] = {
    "mimetic": mimetic,
    "output": near_identity,
    "minus-output": lambda model: near_identity(model, -1.0),
}
"""What ``model.init`` may name besides the methods of the library."""
