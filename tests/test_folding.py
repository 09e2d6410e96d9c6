"""What folds into weights exactly, be it W or what heads do, and what is refused by name."""

import copy

import pytest
import torch
from cases import CASE, same_state, stock_state
from torch import nn
from torch.nn import functional as F

import attncond as ac

GAP, PRE = ac.RemoveGap(), ac.Precondition()
vit = CASE["timm-vit"]


def cross_covariance(m, x):
    """q, k, v as (batch, heads, channels, tokens), and the attention matrix over channels."""
    b, n, _ = x.shape
    q, k, v = m.qkv(x).view(b, n, 3, m.num_heads, -1).permute(2, 0, 3, 4, 1)
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    return torch.softmax(torch.einsum("bhin,bhjn->bhij", q, k) * m.temperature, -1), v


def channel(m, x):
    """DaViT's: what is named k asks, v answers, and q is read."""
    b, n, _ = x.shape
    q, k, v = m.qkv(x).view(b, n, 3, m.num_heads, -1).permute(2, 0, 3, 4, 1)
    return torch.softmax(torch.einsum("bhin,bhjn->bhij", k * m.scale, v), -1), q


def channel_v2(m, x):
    b, n, _ = x.shape
    q, k, v = m.qkv(x).view(b, n, 3, m.groups, -1).permute(2, 0, 3, 4, 1)
    scale = (n if m.dynamic_scale else m.head_dim) ** -0.5
    return torch.softmax(torch.einsum("bhin,bhjn->bhij", q * scale, k), -1), v


def xca(**kwargs):
    from timm.models.xcit import XCA

    return XCA(24, 3, **kwargs)


def fused_xca():
    module = xca(qkv_bias=True)
    module.fused_attn = True
    return module


def edgenext():
    from timm.models.edgenext import CrossCovarianceAttn

    return CrossCovarianceAttn(24, 4, qkv_bias=True)


def davit(v2=False, **kwargs):
    from timm.models.davit import ChannelAttention, ChannelAttentionV2

    return (ChannelAttentionV2 if v2 else ChannelAttention)(24, 3, qkv_bias=True, **kwargs)


BUILD = {
    "xca": (xca, cross_covariance),
    "xca-bias": (lambda: xca(qkv_bias=True), cross_covariance),
    "xca-fused": (fused_xca, cross_covariance),
    "edgenext": (edgenext, cross_covariance),
    "davit": (davit, channel),
    "davit-v2": (lambda: davit(v2=True), channel_v2),
    "davit-v2-static": (lambda: davit(v2=True, dynamic_scale=False), channel_v2),
}


def make(name, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    module = BUILD[name][0]().to(dtype).eval()
    with torch.no_grad():
        for p in module.parameters():
            p.normal_(std=0.3)
    return module


def inputs(dtype=torch.float64):
    return torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("name", BUILD)
def test_the_gap_over_channels_is_the_naive_one_and_folds_exactly(name):
    model, x = make(name), inputs()
    state, parameters = stock_state(model), dict(model.named_parameters())
    cls, members = type(model), set(model.__dict__)
    stock = model(x)
    matrix, values = BUILD[name][1](model, x)
    heads = (matrix - 1 / matrix.shape[-1]) @ values  # (batch, heads, channels, tokens)
    wanted = model.proj(heads.permute(0, 3, 1, 2).flatten(2))

    handle = ac.condition(model, GAP)
    conditioned = model(x)
    torch.testing.assert_close(conditioned, wanted, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(conditioned, stock)

    handle.fold()
    torch.testing.assert_close(model(x), conditioned, rtol=1e-10, atol=1e-10)
    assert type(model) is cls
    assert set(model.__dict__) == members
    assert list(model.state_dict()) == list(state)
    assert all(p is parameters[n] for n, p in model.named_parameters())
    unchanged = {n for n, p in model.named_parameters() if torch.equal(p, state[n])}
    assert unchanged == set(parameters) - {"qkv.weight", "qkv.bias"}
    fresh = make(name, seed=1)
    fresh.load_state_dict(model.state_dict(), strict=True)
    torch.testing.assert_close(fresh(x), conditioned, rtol=1e-10, atol=1e-10)
    with pytest.raises(ac.ConditioningError, match="folded"):
        handle.fold()
    ac.condition(model, GAP)  # there is no gap left to remove
    torch.testing.assert_close(model(x), conditioned, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", BUILD)
def test_only_the_rows_of_the_values_change(name):
    model = make(name)
    before = stock_state(model)
    value = ac.inspect(model).sites[0].projection("v")
    ac.condition(model, GAP).fold()
    rows = torch.zeros(72, dtype=torch.bool)
    rows[value.rows.flatten()] = True
    for key in ("qkv.weight", "qkv.bias"):
        if key in before:
            assert torch.equal(model.state_dict()[key][~rows], before[key][~rows])
    assert model.qkv.weight[value.rows].mean(1).abs().max() < 1e-15


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_fold_in_low_precision(dtype):
    model, x = make("xca-bias", dtype), inputs(dtype)
    handle = ac.condition(model, GAP)
    wanted = model(x)
    handle.fold()
    assert model.qkv.weight.dtype == dtype
    limit = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(model(x), wanted, rtol=limit, atol=limit)


def test_a_folded_model_trains():
    model = make("xca-bias")
    ac.condition(model, GAP).fold()
    model(inputs()).square().sum().backward()
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())
    assert all(p.grad is not None for p in model.parameters())


def test_the_preconditioner_stays_when_the_gap_is_folded():
    model, x = make("xca-bias"), inputs()
    second = ac.condition(model, PRE)
    first = ac.condition(model, GAP)
    wanted = model(x)
    first.fold()
    torch.testing.assert_close(model(x), wanted, rtol=1e-10, atol=1e-10)
    assert [k for k in model.state_dict() if "attncond" in k] == ["attncond_precondition"]
    with pytest.raises(ac.NotFoldableError, match="Precondition cannot be folded"):
        second.fold()
    torch.testing.assert_close(model(x), wanted, rtol=1e-10, atol=1e-10)


def test_weights_that_spectral_conditions_are_folded_first():
    model, x = make("xca-bias"), inputs()
    gap, spectral = ac.condition(model, GAP), ac.condition(model, ac.Spectral())
    wanted = model(x)
    state = stock_state(model)
    with pytest.raises(ac.NotFoldableError, match="while Spectral conditions its W_V"):
        gap.fold()
    assert same_state(model, state)
    assert torch.equal(model(x), wanted)
    spectral.fold()
    gap.fold()
    torch.testing.assert_close(model(x), wanted, rtol=1e-10, atol=1e-10)
    assert not any("attncond" in key for key in model.state_dict())


@pytest.mark.parametrize("method", [GAP, PRE], ids=["gap", "precondition"])
@pytest.mark.parametrize("name", ["timm-vit", "torch-encoder", "hf-gpt2"])
def test_what_cannot_be_folded_is_refused_and_stays(name, method):
    case = CASE[name]
    model = case.make()
    stock = case.run(model)
    handle = ac.condition(model, method)
    wanted, state = case.run(model), stock_state(model)
    site = ac.inspect(model).sites[0]
    text = f"{type(method).__name__} cannot be folded"
    with pytest.raises(ac.NotFoldableError, match=text) as error:
        handle.fold()
    if method is GAP:
        assert site.path in str(error.value)
        assert site.cls in str(error.value)
    assert same_state(model, state)
    assert torch.equal(case.run(model), wanted)
    handle.remove()
    assert torch.equal(case.run(model), stock)


class Mixed(nn.Module):
    """Attention over channels, and over tokens."""

    def __init__(self):
        super().__init__()
        self.channels, self.tokens = make("xca-bias"), nn.MultiheadAttention(24, 3).double()

    def forward(self, x):
        x = self.channels(x)
        return self.tokens(x, x, x)[0]


def test_a_model_with_both_kinds_is_folded_in_parts():
    model, x = Mixed().eval(), inputs()
    whole = ac.condition(model, GAP)
    wanted, state = model(x), stock_state(model)
    with pytest.raises(ac.NotFoldableError, match=r"in tokens \(\S*MultiheadAttention\): "):
        whole.fold()
    assert same_state(model, state)
    part = ac.handle(model.channels)
    part.fold()
    torch.testing.assert_close(model(x), wanted, rtol=1e-10, atol=1e-10)
    ac.handle(model).remove()
    assert not any("attncond" in key for key in model.state_dict())


def test_bad_weights_are_not_folded():
    model = nn.ModuleList([make("xca-bias"), make("xca-bias", seed=1)])
    handle = ac.condition(model, GAP)
    with torch.no_grad():
        model[1].qkv.weight[60, 0] = float("inf")
    state = stock_state(model)
    with pytest.raises(ac.ConditioningError, match=r"weights of 1 are not finite"):
        handle.fold()
    assert same_state(model, state)
    assert torch.isfinite(model[0](inputs())).all()


def test_tied_and_meta_weights_are_not_folded():
    model = nn.ModuleList([make("xca"), make("xca", seed=1)])
    model[1].qkv.weight = model[0].qkv.weight
    handle = ac.condition(model, GAP)
    state = stock_state(model)
    with pytest.raises(ac.NotFoldableError, match="tied"):
        handle.fold()
    assert same_state(model, state)
    meta = make("xca").to("meta")
    with pytest.raises(ac.ConditioningError, match="meta device"):
        ac.condition(meta, GAP).fold()


class Adapted(nn.Module):
    """As peft keeps a layer: the weight inside, something added to what it gives."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.down, self.up = (nn.Linear(a, b, bias=False) for a, b in ((24, 2), (2, 72)))

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(x))


def test_values_with_an_adapter_are_not_folded():
    model, x = make("xca-bias"), inputs()
    model.qkv = Adapted(model.qkv).double()
    handle = ac.condition(model, GAP)
    wanted, state = model(x), stock_state(model)
    with pytest.raises(ac.NotFoldableError, match="merge"):
        handle.fold()
    assert same_state(model, state)
    assert torch.equal(model(x), wanted)


def test_values_that_were_exchanged_since_are_folded_as_they_are():
    model, x = make("xca-bias"), inputs()
    handle = ac.condition(model, GAP)
    model.qkv = copy.deepcopy(model.qkv)
    wanted = model(x)
    handle.fold()
    torch.testing.assert_close(model(x), wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("later", [False, True], ids=["own handle", "asked for later"])
def test_values_that_can_be_read_no_more_are_not_folded(later):
    model, x = make("xca-bias"), inputs()
    handle = ac.condition(model, GAP)
    model.qkv = nn.Sequential(model.qkv)
    wanted, state = model(x), stock_state(model)
    handle = ac.handle(model) if later else handle
    with pytest.raises(ac.NotFoldableError, match=r"the model: its weights were exchanged"):
        handle.fold()
    assert same_state(model, state)
    assert torch.equal(model(x), wanted)
    handle.remove()


def test_an_interrupted_fold_changes_nothing(monkeypatch):
    model = nn.ModuleList([make("xca-bias"), make("xca-bias", seed=1)])
    handle = ac.condition(model, GAP)
    state, copy_ = stock_state(model), torch.Tensor.copy_
    count = []

    def interrupted(self, other):
        count.append(1)
        if len(count) == 3:
            raise KeyboardInterrupt
        return copy_(self, other)

    monkeypatch.setattr(torch.Tensor, "copy_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        handle.fold()
    monkeypatch.undo()
    assert same_state(model, state)
    twin = copy.deepcopy(model)
    handle.fold()
    torch.testing.assert_close(model[1](inputs()), twin[1](inputs()), rtol=1e-10, atol=1e-10)


def test_meta_weights_cannot_be_folded():
    with torch.device("meta"):
        model = vit.build()
    handle = ac.condition(model, ac.Spectral())
    with pytest.raises(ac.ConditioningError, match="meta"):
        handle.fold()


def test_a_fold_that_is_not_finite_changes_nothing():
    model = vit.make()
    handle = ac.condition(model, ac.Spectral())
    with torch.no_grad():
        model.blocks[0].attn.qkv.get_parameter("weight")[0, 0] = float("inf")
    state = stock_state(model)
    with pytest.raises(ac.ConditioningError, match=r"blocks\.0\.attn\.qkv\.weight is not finite"):
        handle.fold()
    assert same_state(model, state)
    handle.remove()


def test_a_parameter_with_two_corrections_cannot_be_folded():
    model = nn.ModuleList([nn.MultiheadAttention(16, heads) for heads in (2, 4)])
    model[1].in_proj_weight = model[0].in_proj_weight
    handle = ac.condition(model, ac.Spectral(scope="head"))
    state = stock_state(model)
    with pytest.raises(ac.NotFoldableError, match="two corrections"):
        handle.fold()
    assert same_state(model, state)
