"""Separate projections are matched by names and shapes, and only where both agree."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from attncond.adapters import structural
from attncond.errors import UnsupportedAttentionError
from attncond.inspection import inspect


def attention(
    names: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj"),
    sizes: tuple[int, int, int] = (12, 12, 12),
    *,
    cls: str = "Attention",
    inputs: tuple[int, int, int] = (8, 8, 8),
    children: tuple[str, ...] = (),
    **attributes: Any,
) -> nn.Module:
    module = type(cls, (nn.Module,), {})()
    for name, rows, columns in zip(names, sizes, inputs, strict=True):
        setattr(module, name, nn.Linear(columns, rows))
    for name in children:
        setattr(module, name, nn.Linear(4, 4))
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


NAMES = (
    *("{}_proj", "{}", "{}_lin", "linear_{}", "to_{}", "w_{}", "w{}", "W{}", "{}_linear", "fc_{}"),
    *("proj_{}", "project_{}", "{}_head", "{}_net", "to{}", "w_{}s", "self_attn_{}_proj"),
)
TRIPLES = [tuple(name.format(role) for role in "qkv") for name in NAMES]
WORDS = ("{}", "{}_proj", "{}_projection", "lin_{}", "W_{}", "linear_{}", "{}_layer", "to_{}")
TRIPLES += [tuple(w.format(role) for role in ("query", "key", "value")) for w in WORDS]
TRIPLES += [("W_Q", "W_K", "W_V"), ("queries", "keys", "values"), ("toQuery", "toKey", "toValue")]
for name in ("{}Proj", "linear{}", "W{}", "w{}1", "{}1_proj", "{}_conv"):
    TRIPLES.append(tuple(name.format(r if name[0] == "{" else r.upper()) for r in "qkv"))
TRIPLES.append(("queryLayer", "keyLayer", "valueLayer"))


@pytest.mark.parametrize("names", TRIPLES)
def test_every_triple_of_names(names):
    site = structural.match(attention(names, num_heads=3))
    assert [p.role for p in site.projections] == ["q", "k", "v"]
    assert [p.rows.shape for p in site.projections] == [(3, 4)] * 3
    assert site.kind == "self"


@pytest.mark.parametrize(
    ("attributes", "heads"),
    [
        ({"num_heads": 3}, 3),
        ({"head_dim": 6}, 2),
        ({"num_heads": 3, "head_dim": 4}, 3),
        ({"config": SimpleNamespace(num_attention_heads=6)}, 6),
        ({"config": SimpleNamespace(encoder_attention_heads=2)}, 2),
        # What the module says goes before its config, which may speak of another layer.
        ({"head_dim": 4, "config": SimpleNamespace(num_attention_heads=2)}, 3),
        ({"num_heads": True, "head_dim": 3}, 4),
        ({"num_heads": np.prod([1, 3])}, 3),
    ],
)
def test_heads_are_told_by_module_or_config(attributes, heads):
    assert structural.match(attention(**attributes)).heads == heads


def test_grouped_queries():
    site = structural.match(attention(sizes=(12, 4, 4), head_dim=2))
    assert [p.rows.shape for p in site.projections] == [(6, 2), (2, 2), (2, 2)]


def test_values_of_their_own_size():
    site = structural.match(attention(sizes=(12, 12, 30), num_heads=3))
    assert site.projection("v").rows.shape == (3, 10)


@pytest.mark.parametrize(
    ("others", "named"),
    [
        (("add_q_proj", "add_k_proj", "add_v_proj"), "add_q_proj, add_k_proj, add_v_proj"),
        (("to_k_ip", "to_v_ip"), "to_k_ip, to_v_ip"),
        (("to_qkv",), "to_qkv"),  # of diffusers' fuse_projections, which leaves the three unread
    ],
)
def test_a_second_set_of_projections_is_not_passed_over(others, named):
    module = attention(("to_q", "to_k", "to_v"), num_heads=3, children=others)
    (row,) = inspect(nn.Sequential(module)).unsupported
    assert row.reason.startswith(f"has {named} beside to_q, to_k, to_v;")


def test_norms_and_single_weights_beside_the_three_make_no_second_set():
    module = attention(num_heads=3, children=("relative_k_proj", "out_proj"))
    for name in ("q_norm", "k_norm", "v_norm", "query_norm", "kv_norm"):
        setattr(module, name, nn.LayerNorm(4))
    module.k_norm.weight = nn.Parameter(torch.ones(3, 1, 4))  # one for each head
    (site,) = inspect(nn.Sequential(module)).sites
    assert [p.path for p in site.projections] == ["0.q_proj", "0.k_proj", "0.v_proj"]


def test_two_queries_and_keys_for_one_value_are_reported():
    children = ("q1_proj", "k1_proj", "q2_proj", "k2_proj")  # differential attention
    module = attention(("v_proj", "o_proj", "other"), cls="Layer", children=children, num_heads=2)
    assert len(inspect(nn.Sequential(module)).unsupported) == 1


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (attention(), "no attribute tells the number of heads"),
        (attention(num_heads=5), "heads do not divide"),
        (attention(sizes=(12, 10, 10), num_heads=3), "no multiple of the head size 4"),
        (attention(sizes=(24, 12, 12), num_heads=3, head_dim=4), "not 3 heads of 4"),
        (
            attention(
                sizes=(24, 12, 12), head_dim=4, config=SimpleNamespace(num_attention_heads=3)
            ),
            "twice 3 heads of 4",
        ),
        (attention(num_heads=3, children=("conv1d",)), "gated recurrence"),
        (attention(num_heads=3, children=("k_sconv", "v_sconv")), "a convolution mixes tokens"),
        (attention(num_heads=3, children=("kv_b_proj",)), "latent attention"),
        (attention(num_heads=3, children=("to_latent_q",)), "latent attention"),
        (attention(("a", "b", "c"), children=("q_a_proj", "q_b_proj")), "latent attention"),
    ],
)
def test_refusals(module, message):
    with pytest.raises(UnsupportedAttentionError, match=message):
        structural.match(module)
    (row,) = inspect(nn.Sequential(module)).unsupported
    assert message in row.reason


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        (attention(num_heads=3, cls="BertCrossAttention"), "cross"),
        (attention(num_heads=3, is_cross_attention=True), "cross"),
        (attention(num_heads=3, is_cross_attention=False), "self"),
        (attention(num_heads=3, is_decoder=True, is_causal=False), "cross"),
        (attention(num_heads=3, is_decoder=True, is_causal=True), "self"),
        (attention(num_heads=3, is_decoder=True), "self"),
        (attention(num_heads=3, inputs=(8, 6, 6)), "cross"),
        (attention(num_heads=3, cls="SwinSelfAttention"), "window"),
    ],
)
def test_kind(module, kind):
    assert structural.match(module).kind == kind


def test_the_layer_tells_cross_attention_where_the_module_cannot():
    layer = type("T5LayerCrossAttention", (nn.Module,), {})()
    layer.EncDecAttention = attention(("q", "k", "v"), n_heads=3)
    plain = type("T5LayerSelfAttention", (nn.Module,), {})()
    plain.SelfAttention = attention(("q", "k", "v"), n_heads=3)
    plan = inspect(nn.Sequential(plain, layer))
    assert [s.kind for s in plan.sites] == ["self", "cross"]


def test_what_is_no_attention_is_not_reported():
    key_value = attention(("receptance", "key", "value"), cls="RwkvSelfAttention")
    scores = attention(("query_proj", "text_proj", "out"), cls="DotProductScoring")
    queries = nn.Module()
    queries.query = nn.Parameter(torch.zeros(1, 4, 8))
    state_space = attention(("in_proj", "conv1d", "out_proj"), cls="MambaMixer")
    plan = inspect(nn.Sequential(key_value, scores, queries, state_space))
    assert not plan.sites
    assert not plan.unsupported


@pytest.mark.parametrize("names", [("q_proj", "o_proj", "norm"), ("k_proj", "v_proj", "o_proj")])
def test_attention_that_lacks_a_role_is_reported(names):
    plan = inspect(nn.Sequential(attention(names, cls="SharedAttention", num_heads=3)))
    assert not plan.sites
    (row,) = plan.unsupported
    assert row.cls.endswith("SharedAttention")


def test_adapted_projections_are_read_below_the_adapter():
    module = attention(num_heads=3)
    wrapper = nn.Module()
    wrapper.base_layer = module.q_proj
    module.q_proj = wrapper
    site = structural.match(module)
    assert site.projection("q").owner is wrapper.base_layer


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])  # bitsandbytes' quant_storage
def test_a_packed_weight_is_not_counted_by_its_rows(dtype) -> None:
    module = attention(num_heads=3)
    for name in ("q_proj", "k_proj", "v_proj"):
        packed = torch.zeros(48, 1, dtype=dtype)
        getattr(module, name).weight = nn.Parameter(packed, requires_grad=False)
    with pytest.raises(UnsupportedAttentionError, match=r"packs its weight \(12 rows\)"):
        structural.match(module)


class InOut(nn.Module):
    """A layer of one's own that stores (in, out), which no shape gives away when it is square."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size))


class Dense(nn.Module):
    """The same, of which the shape tells that its attributes are no nn.Linear's."""

    def __init__(self) -> None:
        super().__init__()
        self.out_features = 4
        self.weight = nn.Parameter(torch.randn(8, 4))


@pytest.mark.parametrize(
    "layer",
    [lambda: InOut(8), Dense, lambda: nn.ConvTranspose1d(8, 8, 1), lambda: nn.Embedding(8, 8)],
)
def test_a_layer_whose_axes_are_unknown_is_not_guessed(layer) -> None:
    module = nn.Module()
    module.num_heads = 2
    module.q_proj, module.k_proj, module.v_proj = layer(), layer(), layer()
    with pytest.raises(UnsupportedAttentionError, match=r"\(out, in\) or \(in, out\)"):
        structural.match(module)
