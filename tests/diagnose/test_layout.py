"""Tensors of an attention in one layout: every entry where its item, head and row say."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import attncond as ac
from attncond.calls import FusedAttention
from attncond.diagnose.layout import as_tokens, by_head, split_heads


@pytest.mark.parametrize(
    ("shape", "heads", "wanted"),
    [
        ((2, 3, 5, 7), 3, (2, 3, 5, 7)),
        ((6, 5, 7), 3, (2, 3, 5, 7)),  # the batch and its heads in one
        ((3, 5, 7), 3, (1, 3, 5, 7)),  # without a batch
        ((4, 5, 7), 3, (4, 1, 5, 7)),  # no heads are found
        ((5, 7), 3, (1, 1, 5, 7)),
        ((2, 4, 3, 5, 7), 3, (8, 3, 5, 7)),  # windows in images
    ],
)
def test_heads_are_split(shape, heads, wanted):
    t = torch.randn(shape)
    found = split_heads(t, heads)
    assert found.shape == wanted
    assert torch.equal(found.flatten(), t.flatten())


def test_fused_attention_is_the_same_by_head():
    site = ac.separate(nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4), heads=4, kv_heads=2)
    q, k, v = torch.randn(8, 5, 2), torch.randn(4, 6, 2), torch.randn(4, 6, 2)
    mask = torch.randn(5, 6)
    found = by_head(FusedAttention(F.scaled_dot_product_attention, q, k, v, mask), site)
    assert [tuple(t.shape) for t in found.operands] == [(2, 4, 5, 2), (2, 2, 6, 2), (2, 2, 6, 2)]
    assert found.attn_mask.shape == (2, 4, 5, 6)
    wanted = F.scaled_dot_product_attention(
        q, k.repeat_interleave(2, 0), v.repeat_interleave(2, 0), mask
    )
    grouped = found._replace(enable_gqa=True)
    torch.testing.assert_close(grouped.run().flatten(0, 1), wanted)


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ((5, 8), (1, 5, 8)),
        ((2, 5, 8), (2, 5, 8)),
        ((5, 2, 8), (2, 5, 8)),
        ((2, 1, 5, 8), (2, 5, 8)),
    ],
)
def test_tokens_come_second(shape, wanted):
    site = ac.fused(nn.Linear(8, 24), heads=2)
    assert as_tokens(torch.randn(shape), site, queries=5).shape == wanted


def test_tokens_of_multihead_attention_come_first():
    (site,) = ac.inspect(nn.MultiheadAttention(8, 2))
    x = torch.randn(5, 5, 8)
    assert torch.equal(as_tokens(x, site, queries=5), x.transpose(0, 1))
