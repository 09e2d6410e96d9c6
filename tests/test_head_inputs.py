"""The inputs of a head made plain."""

from __future__ import annotations

import math

import pytest
import torch
from attention_heads import plain_head
from spectra import gaussian

from attncond.head_inputs import Inputs


def test_weights_that_repeat_each_other_have_no_known_null_space() -> None:
    x, w_q, w_k, w_v = plain_head(30, 6, 3)
    w_q[1], w_k[1] = w_q[0], w_k[0]
    assert Inputs.of(x, w_q, w_k, w_v).jacobian()[1].null is None


def test_equal_queries_count_once_with_their_number() -> None:
    x, *weights = plain_head(4, 9, 3)
    tripled = Inputs.of(x[[0, 1, 0, 2, 3, 0]], *weights, x_kv=x).distinct()
    assert len(tripled.x_q) == 4
    assert sorted(tripled.weight.tolist()) == pytest.approx([1, 1, 1, math.sqrt(3)])
    whole = Inputs.of(x, *weights)
    assert whole.distinct() is whole


def test_float32_tokens_span_what_float32_can_tell() -> None:
    weights = [w.float() for w in plain_head(30, 6, 3)[1:]]
    normed = torch.nn.functional.layer_norm(gaussian(30, 6).float(), (6,))
    assert Inputs.of(normed, *weights).jacobian()[0].shape == (90, 45)  # five dimensions
    assert Inputs.of(gaussian(30, 6), *weights).jacobian()[0].shape == (90, 54)
    nearly = gaussian(30, 6).float()
    nearly[:, 5] = nearly[:, 4] + 1e-5 * nearly[:, 5]
    assert Inputs.of(nearly, *weights).jacobian()[0].shape == (90, 54)


def test_the_memory_is_estimated_for_the_size_that_counts() -> None:
    vit = Inputs.of(torch.ones(197, 768), *[torch.ones(64, 768)] * 3)
    assert 2.5e9 < vit.bytes(smallest=True) < 6e9
    assert vit.bytes(smallest=False) < 1e8
    one_query = Inputs.of(torch.ones(1, 192), *[torch.ones(48, 192)] * 3, x_kv=torch.ones(197, 192))
    assert one_query.bytes(smallest=True) < 1e9
