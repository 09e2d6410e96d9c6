"""Tables 8 and 9 of the paper, from models and against what torch counts, saves and computes."""

from __future__ import annotations

import pytest
import torch
from cases import CASE
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import attncond as ac
from attncond import accounting, adapters


class Elementwise(TorchDispatchMode):
    """How many numbers the additions and multiplications of a pass compute."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.add, torch.ops.aten.mul):
            self.count += result.numel()
        return result


def saved_for_backward(run) -> int:
    """Numbers that autograd keeps, storages counted once, parameters and buffers included."""
    kept: dict[int, int] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        keep_alive = run()  # addresses are only comparable while the tensors live
    del keep_alive
    return sum(kept.values())


def test_tables_8_and_9_of_one_head(monkeypatch: pytest.MonkeyPatch) -> None:
    adapters.find_adapter(nn.Identity())  # the libraries' adapters are loaded on first use
    monkeypatch.setattr(adapters, "_REGISTRY", dict(adapters._REGISTRY))
    n, dim, d = 7, 12, 4
    model = nn.ModuleDict({r: nn.Linear(dim, d, bias=False) for r in ("q", "k", "v")})
    site = ac.separate(model["q"], model["k"], model["v"], heads=1)
    ac.register(nn.ModuleDict)(lambda module: site)
    costs = accounting.account(model, tokens=n)
    assert costs.total("parameters") == 3 * dim * d
    assert costs.total("activations") == 3 * n * d
    assert costs.total("flops") == 6 * n * dim * d
    assert (
        costs.total("flops") + costs.total("flops_added_to_output") == 6 * n * dim * d + 3 * n * d
    )
    assert costs.overhead_output == pytest.approx(1 / (2 * dim))
    assert costs.overhead_weight == pytest.approx(1 / n)
    assert costs.correction_bytes == 0


@pytest.mark.parametrize("name", ["timm-vit", "hf-gpt2", "hf-llama", "hf-bloom", "hf-albert"])
@pytest.mark.parametrize("conditioned", [False, True])
def test_torch_counts_the_same_flops(name: str, conditioned: bool) -> None:
    model = CASE[name].make(torch.float32)
    if conditioned:
        ac.condition(model, ac.Spectral())

    def run() -> None:
        CASE[name].run(model)

    costs = accounting.account(model, accounting.count_tokens(model, run))
    counted = accounting.counted_flops(model, run)
    assert sum(counted.values()) == costs.total("flops") > 0


def test_grouped_queries_cost_less() -> None:
    rows = accounting.account(CASE["hf-llama"].make(), tokens=6).rows
    by_role = {row.role: row.flops for row in rows if row.path == rows[0].path}
    assert by_role["q"] == 2 * by_role["k"] == 2 * by_role["v"]


@pytest.mark.parametrize("name", ["timm-vit", "hf-llama", "hf-gpt2"])
def test_forming_the_weight_computes_what_is_claimed(name: str) -> None:
    model, case = CASE[name].make(torch.float32), CASE[name]
    counts = []
    for conditioned in (False, True):
        if conditioned:
            ac.condition(model, ac.Spectral())
        with torch.no_grad(), Elementwise() as mode:
            case.run(model)
        counts.append(mode.count)
    costs = accounting.account(model, tokens=1)
    assert counts[1] - counts[0] == costs.total("flops_added_to_weight")


def test_the_effective_weight_is_kept_for_backward() -> None:
    model = CASE["timm-vit"].make(torch.float32)
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    stock = saved_for_backward(lambda: model(x))
    ac.condition(model, ac.Spectral())
    conditioned = saved_for_backward(lambda: model(x))
    costs = accounting.account(model, tokens=1)
    scales = sum(b.numel() for n, b in model.named_buffers() if n.endswith("_weight_scale"))
    # The raw weight is no longer kept in its place, but it is there anyway, as a parameter.
    replaced = costs.total("parameters")
    assert conditioned - stock + replaced == costs.kept_for_backward + scales


def test_corrections_take_a_few_numbers_a_row_or_a_whole_matrix() -> None:
    model = CASE["timm-vit"].make(torch.float32)
    handle = ac.condition(model, ac.Spectral())
    identity = accounting.account(model, tokens=1)
    out = sum(row.out_features for row in identity.rows)
    assert identity.correction_bytes == out * (4 + 4 + 5)  # s, λ and the place of λ
    handle.remove()
    ac.condition(model, ac.Spectral.paper_svd())
    polar = accounting.account(model, tokens=1)
    assert polar.correction_bytes > 4 * polar.total("parameters")


def test_tokens_are_seen_where_they_pass() -> None:
    model = CASE["torch-cross"].make()
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    found = accounting.count_tokens(model, lambda: model(x))
    assert found == {("attn", role): 10 for role in "qkv"}
    assert not model.attn._forward_pre_hooks
    cross = nn.MultiheadAttention(8, 2, batch_first=True)
    query, key = torch.zeros(1, 3, 8), torch.zeros(1, 7, 8)
    found = accounting.count_tokens(cross, lambda: cross(query, key, value=key))
    assert found == {("", "q"): 3, ("", "k"): 7, ("", "v"): 7}
    assert [row.tokens for row in accounting.account(cross, found).rows] == [3, 7, 7]


def test_hooks_are_taken_away_after_an_error() -> None:
    model = CASE["timm-vit"].make()
    with pytest.raises(ZeroDivisionError):
        accounting.count_tokens(model, lambda: 1 / 0)
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_the_table_for_a_reader() -> None:
    costs = accounting.account(
        CASE["timm-vit"].make(), tokens={"blocks.0.attn": 5, "blocks.1.attn": 5}
    )
    text = str(costs)
    assert f"{6 * 5 * 24 * 24 * 2:,}" in text
    assert "(+2.083%)" in text  # 1/(2·24)
    assert "(+20.000%)" in text  # 1/5


def test_what_cannot_be_read_is_said_to_be_missing() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(4, 12)

    model = nn.Sequential(nn.MultiheadAttention(4, 1), Odd())
    costs = accounting.account(model, tokens=2)
    assert costs.uncounted == ("1",)
    assert str(costs).endswith("not counted: 1")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: accounting.account(nn.Linear(2, 2), 3), "no attention"),
        (lambda: accounting.account(nn.MultiheadAttention(4, 1), 0), "whole number above 0"),
        (lambda: accounting.account(nn.MultiheadAttention(4, 1), {"x": 3}), "says nothing of ''"),
        (
            lambda: accounting.count_tokens(nn.MultiheadAttention(4, 1), lambda: None),
            "no tokens were seen",
        ),
        (
            lambda: accounting.counted_flops(nn.MultiheadAttention(4, 1), lambda: None),
            "together with its other products",
        ),
    ],
)
def test_bad_input_is_named(call, message: str) -> None:
    with pytest.raises(ac.ConditioningError, match=message):
        call()
