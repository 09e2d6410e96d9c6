from __future__ import annotations

import pytest
import torch
from torch import nn

import attncond as ac
from attncond.lab.config import Model
from attncond.lab.initial import (
    QK_IDENTITY,
    QK_NOISE,
    V_IDENTITY,
    V_NOISE,
    halves,
    mimetic,
    near_identity,
)
from attncond.lab.models import build


def started(name: str, **kwargs: object) -> nn.Module:
    torch.manual_seed(0)
    return build(Model(name=name, kwargs=kwargs, init="mimetic"), 10, 32)


def test_queries_and_keys_start_at_the_best_product_of_their_rank() -> None:
    model = started("vit_small32", depth=1)
    d, heads, k = 192, 3, 64
    q, key, _ = model.blocks[0].attn.qkv.weight.detach().unflatten(0, (3, heads, k))
    torch.manual_seed(0)
    build(Model(name="vit_small32", kwargs={"depth": 1}), 10, 32)  # uses the same numbers first
    for head in range(heads):
        target = QK_NOISE * torch.randn(d, d) / d**0.5 + QK_IDENTITY * torch.eye(d)
        product = q[head].T @ key[head]  # x W_Qᵀ W_K xᵀ are the logits
        # Eckart and Young: what is missing are the other singular values, and no more.
        missing = torch.linalg.svdvals(target)[k:].square().sum().sqrt()
        torch.testing.assert_close(torch.linalg.norm(target - product), missing, rtol=1e-4, atol=0)
        assert torch.linalg.matrix_rank(product) == k


def test_queries_and_keys_share_the_identity_evenly() -> None:
    model = started("vit_small32", depth=1)
    q, key, _ = model.blocks[0].attn.qkv.weight.detach().unflatten(0, (3, 3, 64))
    gram = q @ q.mT  # diagonal: the halves are scaled singular vectors
    torch.testing.assert_close(
        gram, torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1)), atol=1e-4, rtol=0
    )
    torch.testing.assert_close(gram, key @ key.mT, atol=1e-4, rtol=0)
    products = q.mT @ key
    assert (products.diagonal(dim1=-2, dim2=-1).mean(-1) > 0.3).all()


def test_values_and_output_start_at_minus_the_identity() -> None:
    model = started("vit_small32", depth=1)
    d = 192
    attention = model.blocks[0].attn
    v = attention.qkv.weight.detach()[2 * d :]
    product = v.T @ attention.proj.weight.detach().T  # x W_Vᵀ W_projᵀ is what a token passes on
    noise = product - V_IDENTITY * torch.eye(d)
    assert noise.std().item() == pytest.approx(V_NOISE / d**0.5, rel=0.02)
    assert product.diagonal().mean().item() == pytest.approx(V_IDENTITY, abs=0.01)
    off = product - torch.diag(product.diagonal())
    assert off.mean().abs().item() < 1e-3


def test_biases_and_everything_else_stay() -> None:
    torch.manual_seed(0)
    stock = build(Model(name="swin_small32"), 10, 32).state_dict()
    model = started("swin_small32")
    for name, value in model.state_dict().items():
        changed = name.endswith(("attn.qkv.weight", "attn.proj.weight"))
        assert torch.equal(value, stock[name]) != changed, name


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("vit_small32", {"self"}),
        ("deit_small32", {"self"}),
        ("swin_small32", {"window"}),
        ("xcit_small32", {"class"}),
        ("davit_small32", {"window"}),
    ],
)
def test_only_attention_over_tokens_is_initialised(name: str, kinds: set[str]) -> None:
    torch.manual_seed(0)
    model = build(Model(name=name), 10, 32)
    sites = list(ac.inspect(model))
    before = [p.raw.clone() for site in sites for p in site.projections]
    count = mimetic(model)
    after = [p.raw for site in sites for p in site.projections]
    owners = [site for site in sites for _ in site.projections]
    touched = {
        site.path
        for site, old, new in zip(owners, before, after, strict=True)
        if not torch.equal(old, new)
    }
    assert touched == {site.path for site in sites if site.kind in kinds}
    assert count == len(touched)


def test_halves_of_full_rank_multiply_to_the_whole() -> None:
    torch.manual_seed(5)
    left, right = halves(16, 16, 0.4, -0.4)
    torch.manual_seed(5)
    whole = 0.4 * torch.randn(16, 16) / 4 - 0.4 * torch.eye(16)
    torch.testing.assert_close(left @ right.T, whole, atol=1e-5, rtol=0)


def test_what_has_no_output_projection_is_refused_by_name() -> None:
    with pytest.raises(ac.UnsupportedAttentionError, match="output projection"):
        mimetic(nn.Sequential(nn.MultiheadAttention(8, 2)))
    with pytest.raises(ac.UnsupportedAttentionError, match="attention over tokens"):
        mimetic(nn.Linear(3, 3))


@pytest.mark.parametrize("sign", ["output", "minus-output"])
@pytest.mark.parametrize("name", ["vit_small32", "swin_small32", "xcit_small32", "davit_small32"])
def test_output_projections_start_near_plus_or_minus_the_identity(name: str, sign: str) -> None:
    torch.manual_seed(0)
    stock = build(Model(name=name), 10, 32)
    torch.manual_seed(0)
    model = build(Model(name=name, init=sign), 10, 32)
    changed = set()
    for (key, old), new in zip(stock.named_parameters(), model.parameters(), strict=True):
        if torch.equal(old, new):
            continue
        changed.add(key)
        before, after = (torch.linalg.svdvals(w.detach().double()) for w in (old, new))
        assert after[0] / after[-1] <= 2 * (1 + 1e-5)
        torch.testing.assert_close(after[0], before[0], rtol=1e-5, atol=0)
        assert new.diagonal().mean() * (1 if sign == "output" else -1) > before[0] / 2
    assert changed == {f"{site.path}.proj.weight" for site in ac.inspect(stock)}


def test_without_output_projections_there_is_nothing_to_start() -> None:
    with pytest.raises(ac.UnsupportedAttentionError, match="no attention with an output"):
        near_identity(nn.Sequential(nn.MultiheadAttention(8, 2)))
