"""An attention that is written in one of several ways, and masks for it."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

import attncond as ac


class Plain(nn.Module):
    """An attention that computes as it is told; ``seen`` keeps its matrices for the test."""

    def __init__(self, how: str, heads: int = 2, kv_heads: int = 2, width: int = 12) -> None:
        super().__init__()
        self.how, self.heads, self.kv_heads, self.dim = how, heads, kv_heads, 4
        self.q = nn.Linear(width, heads * self.dim)
        self.k = nn.Linear(width, kv_heads * self.dim)
        self.v = nn.Linear(width, kv_heads * self.dim, bias=False)

    def forward(self, x, context=None, mask=None, causal=False):
        context = x if context is None else context
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k = self.k(context).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        v = self.v(context).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        if self.how == "sdpa":
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True
            )
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        if self.how == "einsum":
            logits = torch.einsum("bhnd,bhmd->bhnm", q, k) / 2
        elif self.how == "bmm":
            b, h, n, d = q.shape
            logits = torch.bmm(q.reshape(b * h, n, d), k.reshape(b * h, -1, d).mT) / 2
            logits = logits.view(b, h, n, -1)
        else:
            logits = q @ k.mT * 0.5
        if causal:
            hidden = torch.ones_like(logits, dtype=torch.bool).triu(1)
            logits = logits.masked_fill(hidden, -math.inf)
        if mask is not None:
            if mask.dtype == torch.bool:
                logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
            else:
                logits = logits + mask
        return torch.dropout(logits.softmax(-1), 0.1, self.training) @ v


@ac.register(Plain)
def _plain(module):
    return ac.separate(module.q, module.k, module.v, heads=module.heads, kv_heads=module.kv_heads)


class Normed(Plain):
    """Its queries are of length one."""

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (2, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        q = F.normalize(q, dim=-1)
        if self.how == "sdpa":
            return F.scaled_dot_product_attention(q, k, v)
        return (q @ k.mT).softmax(-1) @ v


def masks():
    """Arguments of `Plain` for a batch of two with six tokens, by name."""
    boolean = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    boolean[1, :, :, 4:] = False
    bias = torch.randn(2, 6, 6, dtype=torch.float64)
    hiding = bias.masked_fill(torch.rand(2, 6, 6) > 0.8, -math.inf)
    hiding[..., 0] = 0.0
    return {
        "none": {},
        "causal": {"causal": True},
        "padding": {"mask": boolean},
        "bias": {"mask": bias},
        "hiding": {"mask": hiding},
    }
