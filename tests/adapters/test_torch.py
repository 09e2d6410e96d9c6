"""nn.MultiheadAttention in every form: the rows must be those that reach the attention product."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import attncond as ac

FORMS: dict[str, dict[str, Any]] = {
    "packed": {},
    "no-bias": {"bias": False},
    "batch-first": {"batch_first": True},
    "bias-kv": {"add_bias_kv": True},
    "zero-attn": {"add_zero_attn": True},
    "kdim-vdim": {"kdim": 6, "vdim": 10},
    "kdim-only": {"kdim": 6, "batch_first": True},
    "vdim-no-bias": {"vdim": 10, "bias": False},
    "everything": {"kdim": 6, "vdim": 10, "add_bias_kv": True, "add_zero_attn": True},
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The q, k, v of every attention product.

    Patched by name: a TorchFunctionMode sees multi_head_attention_forward as one opaque call.
    """
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    true = F.scaled_dot_product_attention

    def spy(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append((q, k, v))
        return true(q, k, v, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    return seen


def expected(site: ac.Site, role: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    """What the adapter says reaches the product: (batch, heads, tokens, head_dim)."""
    p = site.projection(role)
    assert p is not None
    out = torch.einsum("bti,hdi->bhtd", x, p.matrix())
    if bias is not None:
        start = "qkv".index(role) * p.heads * p.head_dim
        out = out + bias[start : start + p.heads * p.head_dim].view(p.heads, 1, p.head_dim)
    return out


@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS.keys())
def test_rows_are_those_that_reach_the_product(
    options: dict[str, Any], calls: list[tuple[Tensor, Tensor, Tensor]]
) -> None:
    torch.manual_seed(0)
    batch, tokens, memory, dim = 2, 5, 7, 8
    module = nn.MultiheadAttention(dim, 2, **options).double().eval()
    if module.in_proj_bias is not None:
        nn.init.normal_(module.in_proj_bias)
    inputs = [
        torch.randn(batch, tokens, dim).double(),
        torch.randn(batch, memory, options.get("kdim", dim)).double(),
        torch.randn(batch, memory, options.get("vdim", dim)).double(),
    ]
    given = inputs if module.batch_first else [x.transpose(0, 1) for x in inputs]
    module(*given, need_weights=False)
    (site,) = ac.inspect(module).sites
    assert len(calls) == 1
    for role, got, x in zip("qkv", calls[0], inputs, strict=True):
        want = expected(site, role, x, module.in_proj_bias)
        extra = got.shape[-2] - want.shape[-2]
        appended = module.add_zero_attn + ("add_bias_kv" in options)
        assert extra == (0 if role == "q" else appended)
        torch.testing.assert_close(got[:, :, : want.shape[-2]], want)


def test_the_roles_of_a_packed_weight_are_not_interchangeable(
    calls: list[tuple[Tensor, Tensor, Tensor]],
) -> None:
    """Guards the test above: with q and k swapped it would have to fail."""
    module = nn.MultiheadAttention(8, 2).double().eval()
    x = torch.randn(5, 3, 8).double()
    module.train()  # eval takes the fused path, which never reaches the product in Python
    module(x, x, x, need_weights=False)
    (site,) = ac.inspect(module).sites
    wrong = expected(site, "k", x.transpose(0, 1), None)
    assert not torch.allclose(calls[0][0], wrong)


@pytest.mark.parametrize("options", [{}, {"kdim": 6, "vdim": 10}], ids=["packed", "separate"])
def test_layout_and_kind(options: dict[str, Any]) -> None:
    (site,) = ac.inspect(nn.MultiheadAttention(8, 2, **options)).sites
    widths = [p.in_features for p in site.projections]
    assert (site.layout, site.kind, widths) == (
        ("separate", "cross", [8, 6, 10])
        if options
        else ("fused qkv, role-major", "self", [8, 8, 8])
    )


def test_transformer_tells_self_from_cross() -> None:
    model = nn.Transformer(8, 2, 1, 2, 16, batch_first=True)
    kinds = {site.path: site.kind for site in ac.inspect(model)}
    assert kinds == {
        "encoder.layers.0.self_attn": "self",
        "decoder.layers.0.self_attn": "self",
        "decoder.layers.0.multihead_attn": "cross",
        "decoder.layers.1.self_attn": "self",
        "decoder.layers.1.multihead_attn": "cross",
    }
    assert not ac.inspect(model).unsupported


def test_a_shared_attention_is_listed_once() -> None:
    shared = nn.MultiheadAttention(8, 2)
    assert [s.path for s in ac.inspect(nn.ModuleList([shared, shared]))] == ["0"]


def test_a_parametrised_weight_is_refused_with_the_reason() -> None:
    module = parametrizations.orthogonal(nn.MultiheadAttention(8, 2), "in_proj_weight")
    plan = ac.inspect(module)
    assert not plan.sites
    assert "in_proj_weight" in plan.unsupported[0].reason
    assert "not a plain Parameter" in plan.unsupported[0].reason


def test_inspect_needs_no_memory() -> None:
    with torch.device("meta"):
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)
    assert len(ac.inspect(model)) == 3


def hand_made(module: nn.MultiheadAttention) -> None:
    """What Spectral(lam=2, preserve_norm=False) has to amount to, written out."""
    size = module.embed_dim
    with torch.no_grad():
        if module._qkv_same_embed_dim:
            for part in range(3):
                block = module.in_proj_weight[part * size : (part + 1) * size]
                block += 2 * torch.eye(size, dtype=block.dtype)
        else:
            for weight in (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight):
                weight += 2 * torch.eye(*weight.shape, dtype=weight.dtype)


@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_conditioned_outputs_are_those_of_a_hand_made_copy(
    options: dict[str, Any], training: bool
) -> None:
    module = nn.MultiheadAttention(8, 2, **options).double().train(training)
    copy = deepcopy(module)
    hand_made(copy)
    widths = (8, options.get("kdim", 8), options.get("vdim", 8))
    inputs = [torch.randn(5, 5, width).double() for width in widths]
    ac.condition(module, ac.Spectral(lam=2.0, preserve_norm=False))
    with torch.no_grad():  # without it the fused path is never taken
        got, want = module(*inputs), copy(*inputs)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_encoder_fast_path_gives_the_same_outputs(norm_first: bool, padded: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).double()
    handle = ac.condition(model, ac.Spectral())
    x = torch.randn(3, 5, 8).double()
    mask = torch.arange(5)[None] >= torch.tensor([5, 3, 2])[:, None] if padded else None
    seen = slice(None) if mask is None else ~mask
    for p in model.parameters():  # dropout is the only other difference between train and eval
        p.requires_grad_(False)
    model.eval()
    fast = model(x, src_key_padding_mask=mask)[seen]
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        slow = model(x, src_key_padding_mask=mask)[seen]
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-12)
    handle.fold()
    folded = model(x, src_key_padding_mask=mask)[seen]
    torch.testing.assert_close(folded, slow, rtol=1e-12, atol=1e-12)


def test_decoder_is_conditioned_in_both_attentions() -> None:
    model = nn.TransformerDecoderLayer(8, 2, 16, batch_first=True).double().eval()
    copy = deepcopy(model)
    hand_made(copy.self_attn)
    hand_made(copy.multihead_attn)
    ac.condition(model, ac.Spectral(lam=2.0, preserve_norm=False))
    x, memory = torch.randn(2, 4, 8).double(), torch.randn(2, 6, 8).double()
    torch.testing.assert_close(model(x, memory), copy(x, memory), rtol=1e-12, atol=1e-12)
