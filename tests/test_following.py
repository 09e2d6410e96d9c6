"""The polar factor follows the optimizer: when it is refreshed, and what attach() refuses."""

import itertools

import pytest
import torch
from cases import CASE, train
from torch import nn

import attncond as ac

vit = CASE["timm-vit"]


def test_the_polar_factor_follows_the_optimizer():
    model = vit.make(dtype=torch.float32)
    handle = ac.condition(model, ac.Spectral.paper_svd())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    assert handle.attach(optimizer) is handle
    start = model.blocks[0].attn.qkv.attncond_weight_correction.clone()
    train(model, handle, optimizer, 30, torch.Generator().manual_seed(0))
    assert not torch.allclose(model.blocks[0].attn.qkv.attncond_weight_correction, start)
    assert max(row.kappa for row in handle.certificates()) <= 2.02
    with pytest.raises(ac.ConditioningError, match="attached already"):
        handle.attach(optimizer)
    handle.remove()
    train(model, handle, optimizer, 1, torch.Generator())  # the hook is gone


def test_lazy_refresh_and_its_certificate():
    model = vit.make(dtype=torch.float32)
    handle = ac.condition(model, ac.Spectral(correction="polar", refresh_every=4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle.attach(optimizer)
    generator = torch.Generator().manual_seed(0)
    seen = []
    for _ in range(9):
        train(model, handle, optimizer, 1, generator)
        seen.append(model.blocks[0].attn.qkv.attncond_weight_correction.clone())
        for row in handle.certificates():
            assert row.kappa <= row.bound * (1 + 1e-5)
    changed = [not torch.equal(a, b) for a, b in itertools.pairwise(seen)]
    assert changed == [False, False, True, False, False, False, True, False]


def test_attach_refuses_what_it_cannot_follow():
    model = vit.make()
    handle = ac.condition(model, ac.Spectral.paper_svd())
    with pytest.raises(ac.ConditioningError, match="none of the conditioned"):
        handle.attach(torch.optim.SGD(vit.make().parameters(), lr=1.0))
    with pytest.raises(ac.ConditioningError, match="Optimizer"):
        handle.attach("adam")


def test_an_optimizer_that_is_gone_is_not_taken_for_the_next_one():
    model = nn.MultiheadAttention(4, 2)
    handle = ac.condition(model, ac.Spectral.paper_svd())
    for _ in range(20):  # the allocator gives the same address again
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        handle.attach(optimizer)
        with pytest.raises(ac.ConditioningError, match="attached already"):
            handle.attach(optimizer)
        del optimizer


def test_attach_has_nothing_to_do_for_a_fixed_correction():
    model = vit.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ac.condition(model, ac.Spectral()).attach(optimizer)
    assert not optimizer._optimizer_step_post_hooks


def test_optimizers_follow_what_each_of_them_trains():
    model = vit.make(dtype=torch.float32)
    handle = ac.condition(model, ac.Spectral(correction="polar", refresh_every=2))
    first = torch.optim.SGD(model.blocks[0].parameters(), lr=0.05)
    second = torch.optim.SGD(model.blocks[1].parameters(), lr=0.05)
    handle.attach(first).attach(second)
    train(model, handle, first, 2, torch.Generator().manual_seed(0))
    assert model.blocks[0].attn.qkv.attncond_weight_age == 2
    assert model.blocks[1].attn.qkv.attncond_weight_age == 0
    ac.handle(model).fold()
    train(model, handle, first, 1, torch.Generator().manual_seed(0))  # nothing left to follow


@pytest.mark.parametrize("again", [ac.Spectral(), ac.Spectral.paper_svd()])
def test_an_optimizer_lets_go_of_what_another_handle_removed(again: ac.Spectral) -> None:
    model = nn.MultiheadAttention(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ac.condition(model, ac.Spectral.paper_svd()).attach(optimizer)
    ac.handle(model).remove()
    ac.condition(model, again).attach(optimizer)
    x = torch.randn(3, 1, 8)
    model(x, x, x)[0].sum().backward()
    optimizer.step()
    assert getattr(model, "attncond_in_proj_weight_age", 1) == 1  # counted once


def test_an_optimizer_is_attached_once_whichever_handle_asks() -> None:
    model = nn.MultiheadAttention(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ac.condition(model, ac.Spectral.paper_svd()).attach(optimizer)
    with pytest.raises(ac.ConditioningError, match="attached already"):
        ac.handle(model).attach(optimizer)


def test_weights_that_an_optimizer_takes_on_later_are_followed():
    torch.manual_seed(0)
    model = nn.ModuleList(nn.MultiheadAttention(8, 2) for _ in range(2))
    handle = ac.condition(model, ac.Spectral.paper_svd())
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    handle.attach(optimizer)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    before = [m.attncond_in_proj_weight_correction.clone() for m in model]
    x = torch.randn(3, 1, 8)
    sum(m(x, x, x)[0].square().sum() for m in model).backward()
    optimizer.step()
    for module, old in zip(model, before, strict=True):
        assert not torch.equal(module.attncond_in_proj_weight_correction, old)


def test_calibrating_starts_the_count_of_steps_anew():
    model = vit.make(dtype=torch.float32)
    handle = ac.condition(model, ac.Spectral(correction="polar", refresh_every=3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handle.attach(optimizer)
    owner = model.blocks[0].attn.qkv
    train(model, handle, optimizer, 2, torch.Generator().manual_seed(0))
    handle.calibrate()
    fresh = owner.attncond_weight_correction.clone()
    train(model, handle, optimizer, 2, torch.Generator().manual_seed(0))
    assert owner.attncond_weight_age == 2
    assert torch.equal(owner.attncond_weight_correction, fresh)
    train(model, handle, optimizer, 1, torch.Generator().manual_seed(0))
    assert not torch.equal(owner.attncond_weight_correction, fresh)
