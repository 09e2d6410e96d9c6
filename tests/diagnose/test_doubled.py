"""The module in float64, and the module afterwards."""

import pytest
import torch
from cases import CASE
from torch import nn

import attncond as ac
from attncond.diagnose.doubled import Shell, doubled, doubled_copy, stock
from attncond.diagnose.tokenwise import ReplayError
from attncond.effective import Conditioned


def conditioned():
    model = CASE["timm-vit"].make().float()
    ac.condition(model, ac.Spectral())
    ac.condition(model, ac.RemoveGap())
    return ac.inspect(model).sites[0]


def test_weights_are_the_effective_ones_in_copies_of_their_own():
    site = conditioned()
    state, known = doubled(site)
    want = site.module.qkv.weight.detach().as_subclass(torch.Tensor)
    assert torch.equal(state["module.qkv.weight"], want.double())
    assert all(t.dtype == torch.float64 for t in state.values())
    (projections,) = known.values()
    assert [p.role for p in projections] == ["q", "k", "v"]
    assert known.keys() == {state["module.qkv.weight"].untyped_storage().data_ptr()}
    state["module.qkv.bias"].zero_()
    assert bool(site.module.qkv.bias.any())


def test_float64_is_copied_too():
    t = torch.ones(3, dtype=torch.float64)
    doubled_copy(t).zero_()
    assert t.tolist() == [1, 1, 1]
    assert doubled_copy(torch.arange(3)).dtype == torch.int64


def test_stock_is_what_the_library_made_and_ends_with_an_error():
    site = conditioned()
    modules = [m for m in site.module.modules() if isinstance(m, Conditioned)]
    assert len(modules) == 2  # the attention, and the owner of its weight
    before = [type(m) for m in modules]
    with stock(site.module):
        assert not any(isinstance(m, Conditioned) for m in modules)
    assert [type(m) for m in modules] == before
    with pytest.raises(KeyboardInterrupt), stock(site.module):
        raise KeyboardInterrupt
    assert [type(m) for m in modules] == before


def test_the_shell_runs_past_hooks():
    linear = nn.Linear(2, 2)
    linear.register_forward_hook(lambda *_: 1 / 0)
    shell = Shell(linear, linear.forward)
    weight = torch.zeros(2, 2, dtype=torch.float64)
    state = {"module.weight": weight, "module.bias": torch.ones(2, dtype=torch.float64)}
    x = torch.ones(1, 2, dtype=torch.float64)
    assert torch.func.functional_call(shell, state, (x,)).tolist() == [[1, 1]]
    assert linear.weight.dtype == torch.float32


def test_projections_elsewhere_are_told():
    site = ac.inspect(CASE["timm-vit"].make()).sites[0]
    from dataclasses import replace

    with pytest.raises(ReplayError, match="outside"):
        doubled(replace(site, module=nn.Identity()))
