"""Adapters for torchvision; its ViT uses torch.nn.MultiheadAttention, which torch.py reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attncond.adapters import register
from attncond.sites import Site, fused


@register(
    "torchvision.models.swin_transformer.ShiftedWindowAttention",
    "torchvision.models.swin_transformer.ShiftedWindowAttentionV2",
    "torchvision.models.video.swin_transformer.ShiftedWindowAttention3d",
)
def shifted_window_attention(module: Any) -> Site:
    """Stacked [q; k; v]. The module never calls ``qkv``: it hands its weight to a function.

    Version 2 normalises q and k to unit length before their product (cosine attention).
    """
    site = fused(module.qkv, "qkv", heads=module.num_heads, kind="window")
    return replace(site, hidden=-50.0)  # the mask of shifted windows is -100


@register("torchvision.models.video.mvit.MultiscaleAttention")
def multiscale_attention(module: Any) -> Site:
    """Stacked [q; k; v], which convolutions may pool over neighbours before the product."""
    return fused(module.qkv, "qkv", heads=module.num_heads)


@register("torchvision.models.maxvit.RelativePositionalMultiHeadAttention")
def relative_positional_attention(module: Any) -> Site:
    """Stacked [q; k; v], split by ``chunk``; windows and grids alike."""
    return fused(module.to_qkv, "qkv", heads=module.n_heads, kind="window")
