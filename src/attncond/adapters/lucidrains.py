"""Adapters for x-transformers, performer-pytorch and linear-attention-transformer.

All of them have projections that their names tell, and something that no name does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attncond.adapters import register, structural
from attncond.sites import Site


@register(
    "performer_pytorch.performer_pytorch.Attention",
    "linear_attention_transformer.linear_attention_transformer.SelfAttention",
)
def linear_attention(module: Any) -> Site | None:
    """Heads of two kinds: some are linear, some attend within windows by a softmax.

    The heads' methods would reach these alone, and nothing in the forward tells of the others.
    """
    site = structural.match(module)
    return None if site is None else replace(site, kind="linear")


@register("x_transformers.x_transformers.Attention")
def grouped_attention(module: Any) -> Site | None:
    """Fewer heads of keys and values are repeated as a whole: query heads take them in turns."""
    site = structural.match(module)
    if site is None:
        return None
    projections = (p if p.role == "q" else replace(p, tiled=True) for p in site.projections)
    return replace(site, projections=tuple(projections))
