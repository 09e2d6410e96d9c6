from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import attncond as ac
from attncond.lab.config import Model
from attncond.lab.models import MODELS, ModelError, build, check, remove_layer_norms
from attncond.lab.recipe import list_recipes
from attncond.methods.parse import parse_method

SMALL = ("vit_small32", "deit_small32", "swin_small32", "xcit_small32", "davit_small32")
PAPER = ("vit_b", "deit_b", "swin_b", "xcit_m24", "davit_b")
METHODS = ("spectral", "paper", "polar", "paper-svd", "precondition", "gap")

# CIFAR-10's 10 classes at 32 pixels, ImageNet's 1000 at 224.
PARAMETERS = {
    "vit_small32": 4_028_170,
    "deit_small32": 4_030_484,
    "swin_small32": 3_040_694,
    "xcit_small32": 4_724_994,
    "davit_small32": 3_074_570,
    "vit_b": 86_567_656,
    "deit_b": 87_338_192,
    "swin_b": 87_768_224,
    "xcit_m24": 84_395_752,
    "davit_b": 87_954_408,
}
ATTENTIONS = {
    "vit_small32": 9,
    "deit_small32": 9,
    "swin_small32": 2 + 6 + 2,
    "xcit_small32": 8 + 2,
    "davit_small32": 2 * (1 + 3 + 1),
}


def images(size: int = 32, channels: int = 3, count: int = 2) -> torch.Tensor:
    return torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(1))


def logits(output: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.cat(output) if isinstance(output, tuple) else output


def learn(model: nn.Module, x: torch.Tensor) -> None:
    """One forward and backward pass; every gradient is there and finite."""
    model.train()
    out = logits(model(x))
    assert torch.isfinite(out).all()
    out.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_the_parameters_it_is_known_for(name: str) -> None:
    small = name in SMALL
    with torch.device("meta"):
        model = MODELS[name](
            img_size=32 if small else 224, num_classes=10 if small else 1000, in_chans=3
        )
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]
    if small:
        assert 2e6 < PARAMETERS[name] < 5e6


@pytest.mark.parametrize(("small", "paper"), list(zip(SMALL, PAPER, strict=True)))
def test_a_small_model_is_of_the_same_class_as_the_large_one(small: str, paper: str) -> None:
    with torch.device("meta"):
        a = MODELS[small](img_size=32, num_classes=10, in_chans=3)
        b = MODELS[paper](img_size=224, num_classes=1000, in_chans=3)
    assert type(a) is type(b)
    assert {site.cls for site in ac.inspect(a)} == {site.cls for site in ac.inspect(b)}
    assert {site.kind for site in ac.inspect(a)} == {site.kind for site in ac.inspect(b)}


@pytest.mark.parametrize("name", SMALL)
def test_a_small_model_has_no_attention_that_cannot_be_conditioned(name: str) -> None:
    plan = ac.inspect(build(Model(name=name), 10, 32))
    assert len(plan.sites) == ATTENTIONS[name]
    assert not plan.unsupported


def test_an_xcit_for_small_images_has_patches_of_four_pixels() -> None:
    model = build(Model(name="xcit_small32", kwargs={"depth": 1}), 10, 32)
    tokens, grid = model.patch_embed(images())
    assert grid == (8, 8)
    assert tokens.shape == (2, 64, 192)


def test_a_davit_for_small_images_halves_them_in_its_stem() -> None:
    model = build(Model(name="davit_small32"), 10, 32)
    assert model.stem(images()).shape == (2, 64, 16, 16)
    assert model.forward_features(images()).shape == (2, 256, 4, 4)


def test_a_swin_for_small_images_shifts_its_windows() -> None:
    model = build(Model(name="swin_small32"), 10, 32)
    shifts = [[block.shift_size for block in stage.blocks] for stage in model.layers]
    assert shifts == [[(0, 0), (2, 2)], [(0, 0), (2, 2)] * 3, [(0, 0), (0, 0)]]


def test_a_deit_answers_twice_in_training_and_once_in_evaluation() -> None:
    model = build(Model(name="deit_small32", kwargs={"depth": 1}), 10, 32)
    first, second = model.train()(images())
    assert first.shape == second.shape == (2, 10)
    model.eval()
    x = model.forward_features(images())
    mean = (model.head(x[:, 0]) + model.head_dist(x[:, 1])) / 2
    torch.testing.assert_close(model(images()), mean)


@pytest.mark.parametrize("name", [*SMALL, *PAPER])
def test_drop_path_reaches_the_model(name: str) -> None:
    small = name in SMALL
    with torch.device("meta"):
        size = 32 if small else 224
        stock = build(Model(name=name), 10, size)
        model = build(Model(name=name, drop_path=0.3), 10, size)

    def rates(net: nn.Module) -> list[float]:
        return [m.drop_prob for m in net.modules() if type(m).__name__ == "DropPath"]

    assert max(rates(model)) == pytest.approx(0.3)
    assert not any(rates(stock)), "timm's own default must not slip in"


def cases() -> list[tuple[str, Model, tuple[str, ...], int]]:
    """Every model and methods of the smoke forms, each once."""
    found = {}
    for recipe in list_recipes():
        for variant in recipe.variants:
            c = recipe.config("smoke", variant)
            key = (c.model.model_dump_json(), c.methods, c.data.image_size)
            found.setdefault(key, (f"{recipe.name}/{variant}", c.model, c.methods, key[2]))
    return list(found.values())


@pytest.mark.parametrize(
    ("model", "methods", "size"), [pytest.param(*c[1:], id=c[0]) for c in cases()]
)
def test_every_smoke_model_learns_with_the_methods_of_every_variant(
    model: Model, methods: tuple[str, ...], size: int
) -> None:
    torch.manual_seed(0)
    net = build(model, 10, size)
    for text in methods:
        ac.condition(net, parse_method(text))
    learn(net, images(size))


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("method", METHODS)
def test_every_small_model_learns_with_every_method(name: str, method: str) -> None:
    torch.manual_seed(0)
    net = build(Model(name=name), 10, 32)
    handle = ac.condition(net, parse_method(method))
    learn(net, images())
    handle.remove()


@pytest.mark.parametrize("name", SMALL)
def test_without_layer_norm_none_is_left_and_nothing_else_is_changed(name: str) -> None:
    torch.manual_seed(0)
    stock = build(Model(name=name), 10, 32)
    torch.manual_seed(0)
    bare = build(Model(name=name, norm=False), 10, 32)
    assert any(isinstance(m, nn.LayerNorm) for m in stock.modules())
    assert not any(isinstance(m, nn.LayerNorm) for m in bare.modules())
    norms = {n for n, m in stock.named_modules() if isinstance(m, nn.LayerNorm)}
    kept = {k: v for k, v in stock.state_dict().items() if k.rpartition(".")[0] not in norms}
    assert kept.keys() == bare.state_dict().keys()
    assert all(torch.equal(v, bare.state_dict()[k]) for k, v in kept.items())
    batch_norms = [
        sum(isinstance(m, nn.BatchNorm2d) for m in net.modules()) for net in (stock, bare)
    ]
    assert batch_norms[0] == batch_norms[1]
    learn(bare, images())


def test_without_layer_norm_a_block_is_the_plain_sum_of_its_parts() -> None:
    model = build(Model(name="vit_small32", kwargs={"depth": 1}, norm=False), 10, 32).eval()
    block, x = model.blocks[0], torch.randn(2, 5, 192)
    y = x + block.attn(x)
    torch.testing.assert_close(block(x), y + block.mlp(y))


def test_layer_norms_are_removed_at_any_depth_once() -> None:
    shared = nn.LayerNorm(4)
    model = nn.Sequential(nn.Sequential(shared), shared, nn.Linear(4, 4))
    remove_layer_norms(model)
    assert [type(m) for m in (model[0][0], model[1], model[2])] == [
        nn.Identity,
        nn.Identity,
        nn.Linear,
    ]


def test_a_method_as_initialisation_leaves_a_stock_model_with_its_outputs() -> None:
    torch.manual_seed(0)
    folded = build(Model(name="vit_small32", kwargs={"depth": 2}, init="spectral:lam=1"), 10, 32)
    torch.manual_seed(0)
    conditioned = build(Model(name="vit_small32", kwargs={"depth": 2}), 10, 32)
    keys = list(conditioned.state_dict())
    ac.condition(conditioned, ac.Spectral(lam=1.0))
    assert list(folded.state_dict()) == keys
    assert type(folded.blocks[0].attn.qkv) is nn.Linear
    torch.testing.assert_close(folded.eval()(images()), conditioned.eval()(images()))


def test_several_methods_are_folded_one_after_the_other() -> None:
    def weight(init: str) -> torch.Tensor:
        torch.manual_seed(0)
        net = build(Model(name="vit_small32", kwargs={"depth": 1}, init=init), 10, 32)
        return net.get_parameter("blocks.0.attn.qkv.weight")

    both = weight("spectral:roles=qk,kappa=1.25 + spectral:roles=v,kappa=3")
    assert torch.equal(both[:384], weight("spectral:roles=qk,kappa=1.25")[:384])
    assert torch.equal(both[384:], weight("spectral:roles=v,kappa=3")[384:])
    assert not torch.equal(both[384:], weight("default")[384:])


@pytest.mark.parametrize("init", ["output", "mimetic", "spectral"])
def test_a_start_that_a_model_cannot_have_is_refused_by_its_key(init: str) -> None:
    with pytest.raises(ModelError, match=rf"model\.init '{init}' of 'resnet18': .*attention"):
        build(Model(name="resnet18", init=init), 10, 32)


def test_the_seed_decides_every_weight() -> None:
    def weights(init: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        return build(Model(name="swin_small32", init=init), 10, 32).state_dict()

    for init in ("default", "mimetic", "spectral"):
        a, b = weights(init), weights(init)
        assert all(torch.equal(a[k], b[k]) for k in a)


def test_any_timm_model_can_be_named() -> None:
    model = build(Model(name="vit_tiny_patch16_224", kwargs={"depth": 1}), 7, 64, channels=1)
    assert model(images(64, 1)).shape == (2, 7)
    assert build(Model(name="convit_tiny", kwargs={"depth": 1}), 7, 224) is not None


def test_a_timm_model_that_takes_any_size_is_told_none() -> None:
    net = build(Model(name="pvt_v2_b0"), num_classes=10, image_size=64)
    assert net(torch.zeros(1, 3, 64, 64)).shape == (1, 10)


def test_a_timm_model_without_stochastic_depth_is_told_none_of_it() -> None:
    assert build(Model(name="efficientvit_m0"), 10, 224).num_classes == 10
    assert build(Model(name="efficientvit_m0"), 10, 64).num_classes == 10  # nor has it img_size
    with pytest.raises(ModelError, match="drop_path_rate"):
        build(Model(name="efficientvit_m0", drop_path=0.1), 10, 224)


def test_an_unknown_model_is_answered_with_close_names() -> None:
    with pytest.raises(ModelError, match=r"model.name: 'vit_smal32' is no model.*vit_small32"):
        build(Model(name="vit_smal32"), 10, 32)


@pytest.mark.parametrize(
    ("name", "kwargs", "size"),
    [
        ("vit_small32", {"depht": 3}, 32),
        ("xcit_small32", {}, 30),
        ("vit_small32", {"num_heads": 5}, 32),
    ],
)
def test_what_cannot_be_built_is_told_with_its_arguments(
    name: str, kwargs: dict[str, int], size: int
) -> None:
    with pytest.raises(ModelError, match=name):
        build(Model(name=name, kwargs=kwargs), 10, size)


@pytest.mark.parametrize("name", ["vit_small32", "deit_small32"])
def test_what_reads_its_images_is_fine(name: str) -> None:
    check(Model(name=name, kwargs={"depth": 1}), 32)


@pytest.mark.parametrize(
    ("name", "kwargs", "size", "said"),
    [
        ("vit_tiny_patch16_224", {}, 8, "data.image_size 8 .*cannot read an image: .*Kernel size"),
        ("vit_small32", {"depth": 1, "global_pool": ""}, 32, r"of shape \(1, 65, 10\) for one"),
        ("resnet18", {"features_only": True}, 32, "gives no tensor for one image"),
        ("vit_small32", {"norm_layer": "layernrom"}, 32, "cannot be built"),
    ],
)
def test_what_cannot_read_its_images_is_told(
    name: str, kwargs: dict[str, Any], size: int, said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        check(Model(name=name, kwargs=kwargs), size)
