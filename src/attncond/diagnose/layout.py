"""An attention's tensors in one layout, whichever its module has them in."""

from __future__ import annotations

from torch import Tensor, nn

from attncond.calls import FusedAttention
from attncond.sites import Site

__all__ = ["as_tokens", "by_head", "split_heads"]


def as_tokens(x: Tensor, site: Site, queries: int) -> Tensor:
    """``x`` as (batch, tokens, channels), also if its first axis is the tokens."""
    if x.ndim == 2:
        return x[None]
    x = x.flatten(1, -2)
    first = isinstance(site.module, nn.MultiheadAttention)  # it works on (tokens, batch, channels)
    if first or (x.shape[0] == queries != x.shape[1]):
        return x.transpose(0, 1)
    return x


def split_heads(t: Tensor, heads: int) -> Tensor:
    """(..., rows, columns) as (items, heads, rows, columns); all one head where none are found."""
    lead = t.shape[:-2]
    if lead and lead[-1] != heads and lead[-1] % heads == 0 and len(lead) == 1:
        return t.reshape(-1, heads, *t.shape[-2:])  # a batch of heads
    if len(lead) == 1 and lead[0] == heads:
        return t[None]
    if len(lead) >= 2:
        return t.flatten(0, -4) if t.ndim > 4 else t
    return t.reshape(-1, 1, *t.shape[-2:])


def by_head(attention: FusedAttention, site: Site) -> FusedAttention:
    """The same with tensors (items, heads, rows, columns)."""
    query, key, value = attention.operands
    heads, shared, mask = site.heads, site.heads, attention.attn_mask
    if (p := site.projection("k")) is not None and key.shape[:-2] != query.shape[:-2]:
        shared = p.heads
    if mask is not None:
        mask = split_heads(mask.expand(*query.shape[:-1], key.shape[-2]), heads)
    return attention._replace(
        query=split_heads(query, heads),
        key=split_heads(key, shared),
        value=split_heads(value, shared),
        attn_mask=mask,
    )
