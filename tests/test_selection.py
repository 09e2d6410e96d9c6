"""What is refused, by name and with the model as it was."""

import pytest
import torch
from cases import CASE, METHODS, same_state, stock_state
from torch import nn

import attncond as ac

vit = CASE["timm-vit"]


def break_weight(value):
    def apply(model):
        with torch.no_grad():
            model.blocks[1].attn.qkv.weight[30, 2] = value

    return apply


def zero_keys(model):
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight[24:48] = 0


def quantise(model):
    weight = model.blocks[1].attn.qkv.weight
    model.blocks[1].attn.qkv.weight = nn.Parameter(weight.to(torch.int8), requires_grad=False)


def float8(model):
    weight = model.blocks[1].attn.qkv.weight
    model.blocks[1].attn.qkv.weight = nn.Parameter(weight.to(torch.float8_e4m3fn))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_weight(float("nan")), r"blocks\.1\.attn\.qkv\.weight holds NaN or Inf"),
        (break_weight(float("inf")), "NaN or Inf"),
        (zero_keys, "W_K in blocks.1.attn.qkv.weight is all zeros"),
        (quantise, "quantised"),
        (float8, "quantised"),
    ],
)
@pytest.mark.parametrize("method", ["default", "paper-svd"])
def test_bad_weights_are_named_and_the_model_is_untouched(damage, message, method):
    model = vit.make(dtype=torch.float32)
    damage(model)
    before, classes = stock_state(model), [type(m) for m in model.modules()]
    with pytest.raises(ac.ConditioningError, match=message):
        ac.condition(model, METHODS[method])
    assert list(model.state_dict()) == list(before)
    for k, v in model.state_dict().items():
        assert v.dtype == before[k].dtype
        assert torch.equal(torch.nan_to_num(v.double()), torch.nan_to_num(before[k].double()))
    assert [type(m) for m in model.modules()] == classes


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (nn.Sequential(nn.Linear(3, 3), nn.ReLU()), ac.UnsupportedAttentionError, "no attention"),
        ("not a model", TypeError, r"torch\.nn\.Module"),
    ],
)
def test_models_without_attention(model, error, message):
    with pytest.raises(error, match=message):
        ac.condition(model, ac.Spectral())


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads, self.qkv = 2, nn.Linear(8, 24)

    def forward(self, x):
        return self.qkv(x)


def test_unsupported_attention_is_told_or_skipped():
    model = nn.ModuleList([Odd(), nn.MultiheadAttention(8, 2)])
    state = stock_state(model)
    with pytest.raises(ac.UnsupportedAttentionError) as caught:
        ac.condition(model, ac.Spectral())
    for word in ("Odd", "qkv", "cannot be guessed", "ac.register", "skip_unsupported"):
        assert word in str(caught.value)
    assert same_state(model, state)
    handle = ac.condition(model, ac.Spectral(), skip_unsupported=True)
    assert len(handle.certificates()) == 3
    assert type(model[0].qkv) is nn.Linear


def test_a_weight_tied_to_something_else_is_refused():
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(16, 2), "out": nn.Linear(16, 48)})
    model["out"].weight = model["attn"].in_proj_weight
    with pytest.raises(ac.ConditioningError, match=r"tied to out\.weight, which this call leaves"):
        ac.condition(model, ac.Spectral())


def test_one_weight_for_two_roles_is_not_split_by_roles():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads, self.q_proj, self.v_proj = 2, nn.Linear(8, 8), nn.Linear(8, 8)
            self.k_proj = self.q_proj

    with pytest.raises(ac.ConditioningError, match=r"W_K shares q_proj\.weight with W_Q"):
        ac.condition(Tied(), ac.Spectral(roles="q"))
    handle = ac.condition(Tied(), ac.Spectral())
    assert len(handle.certificates()) == 2


def test_lazy_and_sparse_weights_are_refused_by_name():
    class Own(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.num_heads = 2
            self.q_proj, self.k_proj, self.v_proj = (layer() for _ in range(3))

    with pytest.raises(ac.UnsupportedAttentionError, match="no shape yet"):
        ac.condition(Own(lambda: nn.LazyLinear(8)), ac.Spectral())
    sparse = Own(lambda: nn.Linear(8, 8))
    sparse.k_proj.weight = nn.Parameter(torch.eye(8).to_sparse())
    with pytest.raises(ac.ConditioningError, match="sparse"):
        ac.condition(sparse, ac.Spectral())


# Heads that cannot be reached ---------------------------------------------------------------------

HEADS = pytest.mark.parametrize("method", [ac.RemoveGap(), ac.Precondition()], ids=repr)


def refused(model, method, message):
    """It is refused with this message, and the model is as it was."""
    before, classes = stock_state(model), [type(m) for m in model.modules()]
    members = [set(m.__dict__) for m in model.modules()]
    with pytest.raises(ac.UnsupportedAttentionError, match=message) as error:
        ac.condition(model, method)
    assert same_state(model, before)
    assert [type(m) for m in model.modules()] == classes
    assert [set(m.__dict__) for m in model.modules()] == members
    return str(error.value)


@HEADS
def test_a_forward_that_is_replaced_on_the_instance_is_refused(method):
    from accelerate.hooks import ModelHook, add_hook_to_module

    model = vit.make()
    add_hook_to_module(model.blocks[1].attn, ModelHook())
    text = refused(model, method, "replaced on the instance")
    assert "blocks.1.attn" in text
    assert "blocks.0.attn" not in text
    assert type(method).__name__ in text
    stock = vit.run(model)
    ac.condition(model, method, skip_unsupported=True)
    assert not torch.allclose(vit.run(model), stock)
    assert type(model.blocks[0].attn).__name__ == "ConditionedAttention"
    assert type(model.blocks[1].attn).__name__ == "Attention"


@HEADS
@pytest.mark.parametrize(
    "implementation", ["flash_attention_2", "flex_attention", "paged|flash_mla"]
)
def test_kernels_of_their_own_are_refused(method, implementation):
    case = CASE["hf-llama"]
    model = case.make()
    model.config._attn_implementation_internal = implementation
    text = refused(model, method, "kernel of its own")
    assert repr(implementation) in text
    assert "set_attn_implementation('sdpa')" in text
    for reachable in ("eager", "sdpa"):
        model.config._attn_implementation_internal = reachable
        ac.condition(model, method).remove()


@HEADS
def test_a_kernel_of_its_own_that_is_chosen_later_is_refused_too(method):
    case = CASE["hf-llama"]
    model = case.make()
    ac.condition(model, method)
    wanted = case.run(model)
    model.config._attn_implementation_internal = "flex_attention"
    with pytest.raises(ac.ConditioningError, match=r"flex_attention.*set_attn_implementation"):
        case.run(model)
    model.config._attn_implementation_internal = "sdpa"
    assert torch.equal(case.run(model), wanted)


def test_linear_attention_has_no_matrix_to_change():
    from timm.models.efficientvit_mit import LiteMLA

    for method in (ac.RemoveGap(), ac.Precondition()):
        refused(nn.Sequential(LiteMLA(16, 16, dim=8)), method, "no softmax")


def test_attention_inside_of_attention_is_told_apart_or_refused():
    class Outer(nn.MultiheadAttention):
        def __init__(self):
            super().__init__(8, 2)
            self.inner = nn.MultiheadAttention(8, 2)

    refused(nn.Sequential(Outer()), ac.RemoveGap(), "holds another attention")


@pytest.mark.parametrize("reason", ["opaque", "scattered"])
def test_what_an_adapter_says_of_heads(reason):
    class Opaque(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))

    @ac.register(Opaque)
    def adapter(module):
        site = ac.separate(module.q, module.k, module.v, heads=2)
        return ac.Site(site.projections, site.layout, **{reason: "because of the weather"})

    refused(nn.Sequential(Opaque()), ac.Precondition(), "because of the weather")
    if reason == "opaque":
        refused(nn.Sequential(Opaque()), ac.RemoveGap(), "because of the weather")
        with pytest.raises(ac.UnsupportedAttentionError, match="weather"):
            ac.condition(Opaque(), ac.RemoveGap(), skip_unsupported=True)  # nothing would be left
    else:
        ac.condition(Opaque(), ac.RemoveGap())
    ac.condition(Opaque(), ac.Spectral())


@pytest.mark.parametrize("method", [ac.Spectral(), ac.Precondition(), ac.RemoveGap()])
def test_a_model_of_which_nothing_is_known_is_told_what_was_found(method):
    class Unknown(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(4, 12)

    for skip in (False, True):
        with pytest.raises(ac.UnsupportedAttentionError) as caught:
            ac.condition(nn.Sequential(Unknown()), method, skip_unsupported=skip)
        assert "order of rows in 'qkv'" in str(caught.value)
        assert "@ac.register" in str(caught.value)


@HEADS
@pytest.mark.parametrize("prefix", ["", "0."])
def test_an_attention_with_an_unsupported_part_has_no_heads_to_condition(method, prefix):
    attention = nn.Module()
    attention.heads, attention.processor = 2, nn.Module()
    attention.to_q, attention.to_k, attention.to_v = (nn.Linear(4, 4) for _ in "qkv")
    attention.processor.to_k_ip, attention.processor.to_v_ip = nn.Linear(4, 4), nn.Linear(4, 4)
    model = nn.ModuleList([attention, nn.MultiheadAttention(4, 2)]) if prefix else attention
    with pytest.raises(ac.UnsupportedAttentionError, match="a part of it is not supported"):
        ac.condition(model, method)
    if prefix:
        handle = ac.condition(model, method, skip_unsupported=True)
        assert handle._heads == [model[1]]
    assert ac.condition(model, ac.Spectral(), skip_unsupported=True).certificates()


@HEADS
def test_models_without_attention_have_no_heads(method):
    with pytest.raises(ac.UnsupportedAttentionError, match="no attention was found"):
        ac.condition(nn.Linear(3, 3), method)
