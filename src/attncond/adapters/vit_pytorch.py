"""Adapters for vit-pytorch, whose files have each an Attention of their own."""

from __future__ import annotations

from typing import Any

from attncond.adapters import register
from attncond.sites import Site, fused, join, separate

# Modules of vit_pytorch: one weight for the three, and one for keys and values.
FUSED = [
    "cct",
    "cct_3d",
    "deepvit",
    "jet_vit",
    "jumbo_vit",
    "local_vit",
    "looped_vit",
    "max_vit",
    "mobile_vit",
    "nest",
    "parallel_vit",
    "pit",
    "regionvit",
    "simple_flash_attn_vit",
    "simple_flash_attn_vit_3d",
    "simple_uvit",
    "simple_vit",
    "simple_vit_1d",
    "simple_vit_3d",
    "simple_vit_orthog_residual_update",
    "simple_vit_with_fft",
    "simple_vit_with_hyper_connections",
    "simple_vit_with_patch_dropout",
    "simple_vit_with_qk_norm",
    "simple_vit_with_register_tokens",
    "simple_vit_with_relative_proj_pos_bias",
    "vit",
    "vit_1d",
    "vit_3d",
    "vit_5",
    "vit_detpool",
    "vit_with_decorr",
    "vit_with_keel_post_ln",
    "vit_with_patch_dropout",
    "vit_with_patch_merger",
    "vivit",
    "vivit_with_moss",
]
KEY_VALUE = [
    "cait",
    "cross_vit",
    "learnable_memory_vit",
    "mp3",
    "na_vit",
    "simple_vit_attn_residual",
    "vat",
    "vat_siglip",
    "xcit",
]


@register(*(f"vit_pytorch.{module}.Attention" for module in FUSED))
def attention(module: Any) -> Site:
    """Stacked [q; k; v], split by ``chunk``; CCT calls it ``qkv``."""
    owner = module.to_qkv if hasattr(module, "to_qkv") else module.qkv
    return fused(owner, "qkv", heads=module.heads)


@register(*(f"vit_pytorch.{module}.Attention" for module in KEY_VALUE))
def key_value_attention(module: Any) -> Site:
    """Stacked [k; v], of the tokens themselves, or of others."""
    q = separate(module.to_q, None, None, heads=module.heads)
    kv = fused(module.to_kv, "kv", heads=module.heads)
    of_others = q.projections[0].in_features != kv.projections[0].in_features
    return join(q, kv, kind="cross" if of_others else "self")


@register("vit_pytorch.xcit.XCAttention")
def cross_covariance_attention(module: Any) -> Site:
    """Channels attend to channels, with q and k normalised over the tokens."""
    return fused(module.to_qkv, "qkv", heads=module.heads, kind="cross-covariance")
