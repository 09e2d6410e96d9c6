"""Adapters for diffusers: attention over two streams of tokens, each with projections of its own.

What has a single set of ``to_q``, ``to_k`` and ``to_v`` is read by names and shapes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from attncond.adapters import register, structural
from attncond.sites import Site, separate


@register(
    "diffusers.models.attention_processor.Attention",
    "diffusers.models.transformers.transformer_bria.BriaAttention",
    "diffusers.models.transformers.transformer_bria_fibo.BriaFiboAttention",
    "diffusers.models.transformers.transformer_flux.FluxAttention",
    "diffusers.models.transformers.transformer_flux2.Flux2Attention",
    "diffusers.models.transformers.transformer_longcat_image.LongCatImageAttention",
    "diffusers.models.transformers.transformer_ovis_image.OvisImageAttention",
)
def joint_attention(module: Any) -> Site | Iterable[Site] | None:
    """Image and text (SD3, Flux): both are projected, joined, and attend in one product.

    The second set comes without an attention of its own, so its site is one that need not be seen.
    """
    added = [getattr(module, f"add_{role}_proj", None) for role in "qkv"]
    if None in added or hasattr(module, "to_qkv"):  # one set, or fused, or keys and values alone
        return structural.match(module)
    sets = [(module.to_q, module.to_k, module.to_v), added]
    main, other = (
        separate(q, k, v, heads=module.heads, kv_heads=_kv_heads(module, q, k)) for q, k, v in sets
    )
    return main, replace(other, optional=True)


def _kv_heads(module: Any, q: Any, k: Any) -> int:
    heads: int = module.heads
    return heads * structural.row_count(k) // structural.row_count(q)
