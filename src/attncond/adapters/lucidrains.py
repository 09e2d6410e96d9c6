"""Refusals for performer-pytorch and linear-attention-transformer, whose heads are of two kinds.

Some are linear, some attend within windows by a softmax. The heads' methods would reach these
alone, and nothing in the forward tells that there are others.
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
    """Separate projections, as their names say."""
    site = structural.match(module)
    return None if site is None else replace(site, kind="linear")
