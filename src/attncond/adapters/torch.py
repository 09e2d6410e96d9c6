"""Adapters for torch.nn."""

from __future__ import annotations

from torch import nn

from attncond.adapters import register
from attncond.sites import Site, fused, separate


@register(nn.MultiheadAttention)
def multihead_attention(module: nn.MultiheadAttention) -> Site:
    """Packed when K and V have the width of Q, three weights otherwise."""
    if module.in_proj_weight is not None:
        return fused(module, "qkv", heads=module.num_heads, name="in_proj_weight")
    names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    return separate(module, module, module, heads=module.num_heads, names=names, kind="cross")
