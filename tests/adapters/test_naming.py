"""Which of Q, K and V a weight makes is told by the words of its name."""

from __future__ import annotations

import pytest
import torch
from named_modules import named
from torch import nn

from attncond.inspection import inspect


def test_norms_of_queries_and_keys_are_no_attention():
    norms = nn.Module()
    norms.query_norm, norms.key_norm, norms.value_norm = (nn.LayerNorm(4) for _ in range(3))
    norms.q_drop, norms.k_drop, norms.v_drop = (nn.Dropout() for _ in range(3))
    plan = inspect(nn.Sequential(norms))
    assert not plan.sites
    assert not plan.unsupported


@pytest.mark.parametrize("name", ["vq", "vq_layer", "_pre_vq_conv", "vqProj"])
def test_vector_quantisation_is_no_fused_weight(name):
    model = named("Tokenizer", "encoder", name, "decoder")
    plan = inspect(nn.Sequential(model))
    assert not plan.sites
    assert not plan.unsupported


@pytest.mark.parametrize("name", ["linearQKV", "qkvProj", "queryKeyValue", "Wqkv2", "toKV"])
def test_fused_weights_are_told_by_every_way_of_writing_words(name):
    plan = inspect(nn.Sequential(named("Layer", "first", name, "last")))
    (row,) = plan.unsupported
    assert f"the order of rows in '{name}' cannot be guessed" in row.reason


@pytest.mark.parametrize(
    "names", [("model_q", "model_k"), ("query_tower", "key_tower"), ("backbone_q", "backbone_k")]
)
def test_whole_models_are_no_projections(names):
    model = nn.Module()
    for name in names:
        setattr(model, name, nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    assert not inspect(nn.Sequential(model)).unsupported


@pytest.mark.parametrize(
    ("names", "shape"),
    [
        (("q_pos_embed", "kv_pos_embed"), (1, 9, 4)),
        (("query_pos", "key_pos"), (9, 4)),
        (("rel_q", "rel_k"), (9, 4)),
        (("qk_scale", "gamma"), (2, 1, 1)),
        (("qkv_bias", "proj_bias"), (3, 2, 4)),
        (("q", "k"), ()),
    ],
)
def test_what_is_added_to_tokens_or_scales_them_is_no_projection(names, shape):
    block = nn.Module()
    block.attn = nn.MultiheadAttention(4, 2)
    for name in names:
        setattr(block, name, nn.Parameter(torch.zeros(shape)))
    plan = inspect(nn.Sequential(block))
    assert [s.path for s in plan.sites] == ["0.attn"]
    assert not plan.unsupported
