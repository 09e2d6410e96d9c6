from __future__ import annotations

import pytest
import torch
from torch import nn

import attncond as ac
from attncond.lab.config import Model, Optim
from attncond.lab.models import build
from attncond.lab.optim import parameter_groups, qkv_parameters

NAMES = ("vit_small32", "deit_small32", "swin_small32", "xcit_small32", "davit_small32")


def named(model: nn.Module, parameters: list[nn.Parameter]) -> set[str]:
    names = {id(p): n for n, p in model.named_parameters()}
    return {names[id(p)] for p in parameters}


@pytest.mark.parametrize("conditioned", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_exactly_the_projections_are_qkv(name: str, conditioned: bool) -> None:
    model = build(Model(name=name), 10, 32)
    if conditioned:
        ac.condition(model, ac.Spectral())
    qkv, rest = qkv_parameters(model)
    found = named(model, qkv)
    # XCiT's class attention has q, k and v of its own; all else in the five is fused.
    assert found == {
        n
        for n, _ in model.named_parameters()
        if n.endswith((".qkv.weight", ".q.weight", ".k.weight", ".v.weight"))
    }
    assert found
    assert len(qkv) + len(rest) == len(list(model.parameters()))
    assert not found & named(model, rest)


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_in_one_group_with_its_rate_and_decay(name: str) -> None:
    model = build(Model(name=name), 10, 32)
    optim = Optim(lr=1e-3, weight_decay=0.05, qkv_lr=0.25)
    groups = {g["name"]: g for g in parameter_groups(model, optim)}
    assert groups.keys() == {"qkv", "decay", "no_decay"}
    together = [p for g in groups.values() for p in g["params"]]
    assert len(together) == len({id(p) for p in together}) == len(list(model.parameters()))
    assert groups["qkv"]["lr"] == pytest.approx(2.5e-4)
    assert groups["decay"]["lr"] == groups["no_decay"]["lr"] == 1e-3
    assert groups["qkv"]["weight_decay"] == groups["decay"]["weight_decay"] == 0.05
    assert groups["no_decay"]["weight_decay"] == 0
    still = named(model, groups["no_decay"]["params"])
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias") or parameter.ndim < 2 or "norm" in parameter_name:
            assert parameter_name in still
        if parameter_name in ("pos_embed", "cls_token", "dist_token"):
            assert parameter_name in still
        if parameter_name.endswith("relative_position_bias_table"):
            assert parameter_name in still
    torch.optim.AdamW(list(groups.values()), betas=optim.betas, eps=optim.eps)


def test_without_decay_qkv_keeps_a_group_of_its_own() -> None:
    model = build(Model(name="vit_small32", kwargs={"depth": 1}), 10, 32)
    groups = parameter_groups(model, Optim(lr=1.0, weight_decay=0.0, qkv_lr=0.5))
    assert {g["name"]: g["lr"] for g in groups} == {"qkv": 0.5, "no_decay": 1.0}


def test_a_model_without_attention_has_no_qkv() -> None:
    model = nn.Linear(3, 3)
    assert qkv_parameters(model)[0] == []
    assert {g["name"] for g in parameter_groups(model, Optim(lr=1.0))} == {"decay", "no_decay"}


def test_frozen_parameters_are_left_out() -> None:
    model = build(Model(name="vit_small32", kwargs={"depth": 1}), 10, 32)
    model.patch_embed.requires_grad_(False)
    trained = [p for g in parameter_groups(model, Optim(lr=1.0)) for p in g["params"]]
    assert len(trained) == sum(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_output_projections_have_a_rate_of_their_own_where_one_is_asked_for(name: str) -> None:
    model = build(Model(name=name), 10, 32)
    rates = Optim(lr=1e-3, qkv_lr=0.5, output_lr=0.25)
    groups = {g["name"]: g for g in parameter_groups(model, rates)}
    assert groups["output"]["lr"] == pytest.approx(2.5e-4)
    assert groups["qkv"]["lr"] == pytest.approx(5e-4)
    found = named(model, groups["output"]["params"])
    assert found == {f"{site.path}.proj.weight" for site in ac.inspect(model)}
    together = [p for g in groups.values() for p in g["params"]]
    assert len(together) == len(list(model.parameters()))


@pytest.mark.parametrize("key", ["qkv_lr", "output_lr"])
def test_a_rate_for_weights_that_there_are_not_is_refused(key: str) -> None:
    model = nn.Linear(8, 8)
    assert parameter_groups(model, Optim(lr=1.0))
    with pytest.raises(ac.UnsupportedAttentionError, match=rf"optim\.{key}: there is no"):
        parameter_groups(model, Optim(lr=1.0, **{key: 0.5}))
