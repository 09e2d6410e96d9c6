"""torchvision's attention classes against the oracle, and against reading weights past forward."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import oracle
import pytest
import torch
from torch import Tensor, nn

import attncond as ac
from attncond.sites import fused

torchvision = pytest.importorskip("torchvision")

from torchvision.models import MaxVit, SwinTransformer, VisionTransformer  # noqa: E402
from torchvision.models.swin_transformer import (  # noqa: E402
    PatchMergingV2,
    SwinTransformerBlockV2,
)
from torchvision.models.video import MViT, SwinTransformer3d  # noqa: E402
from torchvision.models.video.mvit import MSBlockConfig  # noqa: E402


def vit() -> nn.Module:
    return VisionTransformer(16, 8, 1, 3, 24, 32, num_classes=4)


def swin() -> nn.Module:
    # Two blocks: the second one shifts its windows.
    return SwinTransformer([2, 2], 12, [2], [3], [4, 4], num_classes=4)


def swin_v2() -> nn.Module:
    return SwinTransformer(
        [2, 2], 12, [2], [3], [4, 4], num_classes=4,
        block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2,
    )  # fmt: skip


def swin_3d() -> nn.Module:
    return SwinTransformer3d([2, 2, 2], 12, [2], [3], [2, 4, 4], num_classes=4)


def maxvit() -> nn.Module:
    # Windows and grids, each an attention of its own.
    return MaxVit((32, 32), 8, 4, [16], [1], 8, 0.0, num_classes=4)


def mvit() -> MViT:
    # The first block pools nothing, the second all three, and more of keys and values.
    blocks = [
        MSBlockConfig(2, 12, 12, [], [], [], []),
        MSBlockConfig(3, 12, 24, [3, 3, 3], [3, 3, 3], [1, 2, 2], [1, 4, 4]),
    ]
    return MViT(
        (16, 16), 4, blocks, True, True, True, True, num_classes=4,
        stochastic_depth_prob=0.0, dropout=0.0,
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str, int, str]] = {
    # factory, input, class, sites, roles whose length is normalised between projection and product
    "vit": (vit, (2, 3, 16, 16), "MultiheadAttention", 1, ""),
    "swin": (swin, (2, 3, 16, 16), "ShiftedWindowAttention", 2, ""),
    "swin-v2": (swin_v2, (2, 3, 16, 16), "ShiftedWindowAttentionV2", 2, "qk"),
    "swin-3d": (swin_3d, (1, 3, 4, 16, 16), "ShiftedWindowAttention3d", 2, ""),
    "maxvit": (maxvit, (2, 3, 32, 32), "RelativePositionalMultiHeadAttention", 2, ""),
}


def make(name: str) -> tuple[nn.Module, Tensor]:
    factory, shape, *_ = MODELS[name]
    return oracle.prepare(factory()), torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("name", MODELS)
def test_oracle(name: str) -> None:
    _, _, cls, count, directions = MODELS[name]
    model, x = make(name)
    plan = ac.inspect(model)
    assert [s.cls.rsplit(".", 1)[-1] for s in plan] == [cls] * count
    assert not plan.unsupported
    verdicts = oracle.check(model, lambda: model(x), transformed=directions)
    assert len(verdicts) == count
    for verdict in verdicts:
        want = {r: "direction" if r in directions else "values" for r in "qkv"}
        assert verdict.levels == want


@pytest.mark.parametrize("name", ["swin", "swin-v2", "swin-3d", "maxvit"])
def test_oracle_refuses_a_wrong_order(name: str) -> None:
    model, x = make(name)
    good = ac.inspect(model).sites
    owners = [s.projections[0].owner for s in good]
    wrong = [
        ac.Site(
            fused(owner, "kqv", heads=site.heads).projections,
            site.layout,
            site.kind,
            site.module,
            site.path,
        )
        for site, owner in zip(good, owners, strict=True)
    ]
    with pytest.raises(oracle.OracleError):
        oracle.check(model, lambda: model(x), sites=wrong)


@pytest.mark.parametrize("name", MODELS)
def test_conditioning_reaches_weights_that_are_read_directly(name: str) -> None:
    """Swin hands qkv.weight to a function, ViT in_proj_weight to a fused kernel."""
    model, x = make(name)
    stock = model(x)
    handle = ac.condition(model, ac.Spectral())
    conditioned = model(x)
    assert not torch.allclose(stock, conditioned, rtol=1e-3)
    handle.fold()
    torch.testing.assert_close(model(x), conditioned, rtol=1e-12, atol=1e-12)


def mvit_on_a_clip() -> tuple[nn.Module, Tensor]:
    return oracle.prepare(mvit()), torch.randn(1, 3, 4, 16, 16, dtype=torch.float64)


def test_oracle_of_attention_that_pools_its_tokens() -> None:
    model, clip = mvit_on_a_clip()
    plan = ac.inspect(model)
    assert [(s.heads, s.layout) for s in plan] == [(h, "fused qkv, role-major") for h in (2, 3)]
    assert not plan.unsupported
    verdicts = oracle.check(model, lambda: model(clip), transformed="qkv")
    assert [set(v.levels.values()) for v in verdicts] == [{"values"}, {"support"}]
    wrong = [
        replace(s, projections=fused(s.projections[0].owner, "kqv", heads=s.heads).projections)
        for s in plan
    ]
    for site in wrong:
        with pytest.raises(oracle.OracleError):
            oracle.check(model, lambda: model(clip), sites=[site], transformed="qkv")


def test_the_gap_of_attention_that_pools_its_tokens() -> None:
    model, _ = mvit_on_a_clip()
    for site, thw in zip(ac.inspect(model), [(2, 4, 4), (2, 4, 4)], strict=True):
        module = site.module
        tokens = torch.randn(1, 33, 12, dtype=torch.float64)
        with torch.no_grad():  # without queries every token's output is the mean: all of it is gap
            module.qkv.weight[: module.output_dim] = 0
            module.qkv.bias[: module.output_dim] = 0
            if module.pool_q is not None:
                module.pool_q.norm_act[0].bias.zero_()  # q is added to the outputs
        stock = module(tokens, thw)[0]
        ac.condition(module, ac.RemoveGap())
        outputs = module(tokens, thw)[0]
        assert (stock - module.project[0].bias).abs().max() > 1e-3
        torch.testing.assert_close(outputs, module.project[0].bias.expand_as(outputs))


def test_torchvision_is_not_imported_for_those_who_do_not_use_it() -> None:
    code = (
        "import sys, torch, attncond as ac; ac.inspect(torch.nn.MultiheadAttention(8, 2));"
        "sys.exit(sum(m in sys.modules for m in ('torchvision', 'timm', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
