"""Rows of every layout against slices written out by hand, and what cannot be read is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import attncond as ac
from attncond import adapters
from attncond.errors import UnsupportedAttentionError
from attncond.sites import Site, fused, join, project, raw_parameter, separate


class Conv1D(nn.Module):
    """GPT-2's: a linear layer that stores (in, out)."""

    def __init__(self, out: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(columns, out))


class LoraLinear(nn.Module):
    """As peft's: the weight is kept a level below, or several."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_a = nn.Linear(4, 2)


def blocks(site: Site, role: Any) -> Tensor:
    found = site.projection(role)
    assert found is not None
    return found.matrix()


def test_separate_rows_are_heads_in_order() -> None:
    q, k, v = nn.Linear(6, 12), nn.Linear(5, 8), nn.Linear(7, 4)
    site = separate(q, k, v, heads=6, kv_heads=2)
    assert [p.role for p in site.projections] == ["q", "k", "v"]
    assert [p.owner for p in site.projections] == [q, k, v]
    for h in range(6):
        assert torch.equal(blocks(site, "q")[h], q.weight[2 * h : 2 * h + 2])
    for h in range(2):
        assert torch.equal(blocks(site, "k")[h], k.weight[4 * h : 4 * h + 4])
        assert torch.equal(blocks(site, "v")[h], v.weight[2 * h : 2 * h + 2])
    assert [(p.heads, p.head_dim, p.in_features) for p in site.projections] == [
        (6, 2, 6),
        (2, 4, 5),
        (2, 2, 7),
    ]
    assert (site.heads, site.layout, site.kind) == (6, "separate", "self")


def test_separate_without_a_role() -> None:
    site = separate(None, nn.Linear(6, 12), None, heads=3)
    assert [p.role for p in site.projections] == ["k"]
    assert site.projection("q") is None
    assert blocks(site, "k").shape == (3, 4, 6)


def test_separate_names_of_one_owner() -> None:
    module = nn.MultiheadAttention(8, 2, kdim=6, vdim=4)
    names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    site = separate(module, module, module, heads=2, names=names)
    for role, name in zip("qkv", names, strict=True):
        assert torch.equal(blocks(site, role).flatten(0, 1), getattr(module, name))


def test_fused_role_by_role() -> None:
    linear = nn.Linear(6, 24)
    site = fused(linear, heads=2)
    for i, role in enumerate("qkv"):
        for h in range(2):
            start = 8 * i + 4 * h
            assert torch.equal(blocks(site, role)[h], linear.weight[start : start + 4])
    assert site.layout == "fused qkv, role-major"


def test_fused_head_by_head() -> None:
    linear = nn.Linear(6, 24)
    site = fused(linear, heads=2, head_major=True)
    for i, role in enumerate("qkv"):
        for h in range(2):
            start = 12 * h + 4 * i
            assert torch.equal(blocks(site, role)[h], linear.weight[start : start + 4])
    assert site.layout == "fused qkv, head-major"


def test_fused_keys_and_values_head_by_head_under_more_queries() -> None:
    linear = nn.Linear(6, 16)
    site = fused(linear, "kv", heads=6, kv_heads=2, head_major=True)
    assert torch.equal(blocks(site, "k"), linear.weight.view(2, 2, 4, 6)[:, 0])
    assert torch.equal(blocks(site, "v"), linear.weight.view(2, 2, 4, 6)[:, 1])


def test_fused_in_another_order_is_still_listed_as_q_k_v() -> None:
    linear = nn.Linear(6, 24)
    site = fused(linear, "vkq", heads=2)
    assert [p.role for p in site.projections] == ["q", "k", "v"]
    assert torch.equal(blocks(site, "v").flatten(0, 1), linear.weight[:8])
    assert torch.equal(blocks(site, "k").flatten(0, 1), linear.weight[8:16])
    assert torch.equal(blocks(site, "q").flatten(0, 1), linear.weight[16:])


def test_fused_with_fewer_keys_and_values() -> None:
    linear = nn.Linear(6, 24)
    site = fused(linear, heads=4, kv_heads=1)
    assert torch.equal(blocks(site, "q"), linear.weight[:16].view(4, 4, 6))
    assert torch.equal(blocks(site, "k"), linear.weight[16:20][None])
    assert torch.equal(blocks(site, "v"), linear.weight[20:][None])


@pytest.mark.parametrize("head_major", [False, True])
def test_fused_with_values_of_their_own_size_from_a_later_row_on(head_major: bool) -> None:
    """Five rows of something else first, and three at the end."""
    linear = nn.Linear(6, 5 + 2 * (3 + 3 + 4) + 3)
    site = fused(linear, heads=2, head_dim=3, v_head_dim=4, start=5, head_major=head_major)
    if head_major:
        starts = {"q": (5, 15), "k": (8, 18), "v": (11, 21)}
    else:
        starts = {"q": (5, 8), "k": (11, 14), "v": (17, 21)}
    for role, firsts in starts.items():
        size = 4 if role == "v" else 3
        for h, first in enumerate(firsts):
            assert torch.equal(blocks(site, role)[h], linear.weight[first : first + size])


@pytest.mark.parametrize("head_major", [False, True])
def test_the_size_of_a_head_is_what_values_of_their_own_size_leave(head_major: bool) -> None:
    linear = nn.Linear(6, 2 * (8 + 8 + 2))
    given = fused(linear, heads=2, head_dim=8, v_head_dim=2, head_major=head_major)
    inferred = fused(linear, heads=2, v_head_dim=2, head_major=head_major)
    for p, q in zip(inferred.projections, given.projections, strict=True):
        assert torch.equal(p.rows, q.rows)
    assert fused(linear, "v", heads=2, v_head_dim=9).projections[0].rows.shape == (2, 9)


def test_transposed_weights_and_convolutions() -> None:
    conv1d = Conv1D(24, 6)
    site = fused(conv1d, heads=2)
    assert site.projections[1].axis == 1
    assert torch.equal(blocks(site, "k").flatten(0, 1), conv1d.weight.T[8:16])
    assert site.projections[1].in_features == 6
    for conv, dims in ((nn.Conv1d, 1), (nn.Conv2d, 2), (nn.Conv3d, 3)):
        layer = conv(6, 24, 1)
        site = fused(layer, heads=2)
        assert layer.weight.ndim == 2 + dims
        assert torch.equal(blocks(site, "k").flatten(0, 1), layer.weight.flatten(1)[8:16])


def test_a_subclass_of_conv1d_is_transposed_too() -> None:
    class Mine(Conv1D):
        pass

    assert fused(Mine(24, 6), heads=2).projections[0].axis == 1


def test_project_takes_any_rows() -> None:
    linear = nn.Linear(6, 8)
    projection = project("k", linear, torch.tensor([[7, 0], [2, 5]]))
    expected = torch.stack([linear.weight[[7, 0]], linear.weight[[2, 5]]])
    assert torch.equal(projection.matrix(), expected)
    assert torch.equal(projection.matrix(2 * linear.weight), 2 * expected)


def test_join_orders_the_roles_and_keeps_the_parts() -> None:
    q, kv = nn.Linear(6, 8), nn.Linear(5, 16)
    parts = fused(kv, "kv", heads=2), separate(q, None, None, heads=2)
    site = join(*parts, kind="cross")
    assert [p.role for p in site.projections] == ["q", "k", "v"]
    assert [p.owner for p in site.projections] == [q, kv, kv]
    assert torch.equal(blocks(site, "v").flatten(0, 1), kv.weight[8:])
    assert site.kind == "cross"
    assert site.layout == "fused kv, role-major + separate"
    assert join(*parts, layout="mine").layout == "mine"
    assert join(*parts).kind == "self"
    twice = join(separate(q, None, None, heads=2), separate(None, q, None, heads=2))
    assert twice.layout == "separate"


@pytest.mark.parametrize("depth", [1, 2])
def test_adapted_layers_are_read_at_their_base(depth: int) -> None:
    linear: nn.Module = nn.Linear(6, 24)
    wrapped = linear
    for _ in range(depth):
        wrapped = LoraLinear(wrapped)
    for site in (
        fused(wrapped, heads=2),
        separate(wrapped, None, None, heads=2),
        Site((project("q", wrapped, torch.arange(4).view(2, 2)),), "own"),
    ):
        assert all(p.owner is linear for p in site.projections)


def test_a_base_layer_that_is_no_module_is_ignored() -> None:
    linear = nn.Linear(6, 24)
    linear.base_layer = "something else"
    assert fused(linear, heads=2).projections[0].owner is linear


# Refusals -----------------------------------------------------------------------------------------


def odd_weight(*shape: int) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(torch.randn(shape))
    return module


def parametrised() -> nn.Module:
    return parametrizations.orthogonal(nn.Linear(24, 24))


def bare() -> nn.Module:
    return nn.Module()


def no_weight() -> nn.Module:
    module = nn.Module()
    module.register_parameter("weight", None)
    return module


def scripted() -> nn.Module:
    return torch.jit.script(nn.Linear(6, 24))


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit:FutureWarning", "ignore:.*torch.jit:DeprecationWarning"
)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Conv2d(6, 24, 3), r"kernel \(3, 3\) is not 1x1"),
        (lambda: nn.Conv2d(6, 24, (1, 2)), r"kernel \(1, 2\) is not 1x1"),
        (lambda: nn.Conv2d(6, 24, 1, groups=2), "grouped convolution"),
        (lambda: nn.LayerNorm(24), r"weight of shape \(24,\) is not a matrix"),
        (lambda: odd_weight(24, 2, 3), r"weight of shape \(24, 2, 3\) is not a matrix"),
        (scripted, "TorchScript modules cannot be changed; use the eager model"),
        (parametrised, r"'weight' of \S*Linear is not a plain Parameter"),
        (bare, "is not a plain Parameter"),
        (no_weight, "is not a plain Parameter"),
        (
            lambda: nn.Sequential(nn.Linear(6, 24), nn.LayerNorm(24)),
            r"Sequential has no 'weight' of its own, but holds layers that have \(0, 1\)",
        ),
        (lambda: LoraLinear(bare()), "is not a plain Parameter"),
        (lambda: nn.Linear(6, 24).weight, "the layer that holds the weight is wanted"),
    ],
)
def test_weights_that_cannot_be_read(make: Any, message: str) -> None:
    owner = make()
    for call in (
        lambda: fused(owner, heads=2),
        lambda: separate(None, owner, None, heads=2),
        lambda: project("q", owner, torch.arange(4).view(2, 2)),
    ):
        with pytest.raises(UnsupportedAttentionError, match=message):
            call()


def test_a_layer_that_calls_something_else_groups_is_read() -> None:
    linear = nn.Linear(6, 24)
    linear.groups = 4
    assert fused(linear, heads=2).heads == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: separate(nn.Linear(6, 10), None, None, heads=4), "Q: 10 rows .* into 4 heads"),
        (
            lambda: separate(nn.Linear(6, 8), nn.Linear(6, 8), None, heads=4, kv_heads=3),
            "K: 8 rows do not divide into 3 heads",
        ),
        (lambda: separate(nn.Linear(6, 8), None, None, heads=0), "into 0 heads"),
        (lambda: separate(nn.Linear(6, 8), None, None, heads=-2), "into -2 heads"),
        (lambda: fused(nn.Linear(6, 24), heads=5), "fused weight: 24 rows .* into 15 heads"),
        (lambda: fused(nn.Linear(6, 25), heads=2), "25 rows do not divide into 6 heads"),
        (lambda: fused(nn.Linear(6, 24), heads=2, v_head_dim=12), "0 rows do not divide into 4"),
        (lambda: fused(nn.Linear(6, 24), heads=2, v_head_dim=14), "-4 rows do not divide into 4"),
        (lambda: fused(nn.Linear(6, 24), heads=2, start=1), "23 rows do not divide into 6"),
        (lambda: fused(nn.Linear(6, 24), heads=2, head_dim=5), "has 24 rows, qkv .* needs 30"),
        (
            lambda: fused(nn.Linear(6, 24), heads=2, head_dim=4, v_head_dim=5),
            "has 24 rows, qkv .* needs 26",
        ),
        (
            lambda: fused(nn.Linear(6, 24), heads=4, kv_heads=1, head_major=True),
            "head-major weights need as many K, V as Q heads",
        ),
        (lambda: project("q", nn.Linear(6, 8), torch.arange(8)), r"rows must be .* not \(8,\)"),
        (lambda: project("q", nn.Linear(6, 8), torch.empty(0, 2).long()), r"not \(0, 2\)"),
        (
            lambda: project("q", nn.Linear(6, 8), torch.tensor([[7, 8]])),
            "reach 8, the weight has 8",
        ),
        (lambda: project("q", nn.Linear(6, 8), torch.tensor([[-1, 2]])), "the weight has 8"),
        (
            lambda: project("q", nn.Linear(6, 8), torch.arange(8, device="meta").view(2, 4)),
            "meta device",
        ),
    ],
)
def test_rows_that_do_not_fit(call: Any, message: str) -> None:
    with pytest.raises(UnsupportedAttentionError, match=message):
        call()


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kind must be one of self, cross, .* not 'spatial'"):
        fused(nn.Linear(6, 24), heads=2, kind="spatial")


def test_raw_parameters_are_read_past_the_conditioning() -> None:
    model = nn.TransformerEncoderLayer(8, 2)
    raw = model.self_attn.in_proj_weight
    ac.condition(model, ac.Spectral())
    assert raw_parameter(model.self_attn, "in_proj_weight") is raw
    (site,) = ac.inspect(model)
    assert torch.equal(site.projections[0].matrix().flatten(0, 1), raw[:8])
    assert site.cls == "torch.nn.modules.activation.MultiheadAttention"


# The default device -------------------------------------------------------------------------------


def test_rows_do_not_follow_the_default_device() -> None:
    linear, conv1d = nn.Linear(6, 24), Conv1D(24, 6)
    with torch.device("meta"):
        found = [
            fused(linear, heads=2),
            fused(conv1d, heads=2, head_major=True),
            separate(linear, conv1d, linear, heads=3),
            join(separate(linear, None, None, heads=2), fused(conv1d, "kv", heads=2)),
        ]
        assert not blocks(found[0], "q").is_meta
    assert {p.rows.device.type for s in found for p in s.projections} == {"cpu"}


def test_weights_on_the_meta_device_are_described_all_the_same() -> None:
    site = fused(nn.Linear(6, 24, device="meta"), heads=2)
    assert site.projections[2].rows.tolist() == [[16, 17, 18, 19], [20, 21, 22, 23]]
    assert site.projections[2].in_features == 6
    assert blocks(site, "v").shape == (2, 4, 6)


class FromTheRight(nn.Module):
    """Attention whose weights are parameters of its own, (in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.w_q = nn.Parameter(torch.randn(8, 12))
        self.w_kv = nn.Parameter(torch.randn(8, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        k, v = (x @ self.w_kv).chunk(2, -1)
        q, k, v = (t.unflatten(-1, (3, 4)).transpose(1, 2) for t in (x @ self.w_q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v)


def from_the_right(module: FromTheRight, transposed: bool = True) -> Site:
    names = ("w_q", "", "")
    return join(
        separate(module, None, None, heads=3, names=names, transposed=transposed),
        fused(module, "kv", heads=3, name="w_kv", transposed=transposed),
    )


def test_weights_that_multiply_from_the_right(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = oracle.prepare(FromTheRight()), torch.randn(2, 5, 8, dtype=torch.float64)
    site = replace(from_the_right(model), module=model)
    oracle.check(model, lambda: model(x), sites=[site])
    rows = site.projection("v").rows
    assert project("v", model, rows, name="w_kv", transposed=True).matrix().shape == (3, 4, 8)
    with pytest.raises(UnsupportedAttentionError):
        from_the_right(model, transposed=False)

    monkeypatch.setattr(adapters, "_REGISTRY", dict(adapters._REGISTRY))
    ac.register(FromTheRight)(from_the_right)
    handle = ac.condition(model, ac.Spectral())
    assert max(c.kappa for c in handle.certificates()) <= 2
    for p in ac.inspect(model).sites[0].projections:
        matrix = p.matrix(getattr(model, p.name)).flatten(0, 1)
        assert torch.linalg.cond(matrix) <= 2
    outputs = model(x)
    handle.fold()
    torch.testing.assert_close(model(x), outputs)
