"""Every timm attention class against the oracle: a real forward pass tells what its rows feed."""

from __future__ import annotations

import importlib
import inspect as inspect_
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import oracle
import pytest
import torch
from torch import nn

from attncond import adapters
from attncond.errors import UnsupportedAttentionError
from attncond.inspection import inspect
from attncond.sites import Site, fused

timm = pytest.importorskip("timm")

from timm import layers  # noqa: E402
from timm.layers import (  # noqa: E402
    attention2d,
    bottleneck_attn,
    diff_attention,
    halo_attn,
    lambda_layer,
    non_local_attn,
    other_pool,
)
from timm.models import (  # noqa: E402
    cpubone,
    efficientvit_mit,
    eva,
    hieradet_sam2,
    maxxvit,
    metaformer,
    mvitv2,
    nextvit,
    tnt,
    vision_transformer,
    volo,
)

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 1, "num_heads": 3}
SWIN = {"img_size": 32, "window_size": 4, "embed_dim": 24, "depths": (2, 1), "num_heads": (2, 3)}
MAXX = {"img_size": 64, "embed_dim": (16, 32), "depths": (1, 1), "transformer_dim_head": 8}
FOUR = {"depths": (1, 1, 1, 1), "embed_dims": (16, 32, 32, 32), "num_heads": (1, 2, 2, 4)}
MVIT = mvitv2.MultiScaleVitCfg(
    depths=(1, 2), embed_dim=16, num_heads=2, stride_q=((1, 1), (2, 2)), stride_kv_adaptive=(2, 2)
)
VOLO = {
    "layers": (1, 1),
    "img_size": 64,
    "embed_dims": (24, 48),
    "num_heads": (2, 3),
    "downsamples": (True, False),
    "outlook_attention": (True, False),
    "num_classes": 7,
}


def model(name: str, **kwargs: Any) -> Callable[[], nn.Module]:
    return partial(timm.create_model, name, **kwargs)


# name of the case: (how to build it, image size, kinds, roles that are transformed on the way)
MODELS: dict[str, tuple[Callable[[], nn.Module], int, str, str | dict[str, str]]] = {
    "vit": (model("vit_tiny_patch16_224", **VIT), 32, "self", ""),
    "vit, qk norm": (model("vit_tiny_patch16_224", qk_norm=True, **VIT), 32, "self", "qk"),
    "deit": (model("deit_tiny_distilled_patch16_224", **VIT), 32, "self", ""),
    "pit": (model("pit_ti_224", img_size=64), 64, "self", ""),
    "mobilevit": (model("mobilevit_xxs"), 64, "self", ""),
    "vit rope": (model("vit_small_patch16_rope_224", **VIT), 32, "self", "qk"),
    "sapiens2, grouped": (
        model(
            "vit_base_patch16_sapiens2", **VIT | {"depth": 2, "num_heads": 4}, num_kv_heads=(4, 2)
        ),
        32,
        "self",
        "qk",
    ),
    "eva02, fused": (model("eva02_tiny_patch14_224", **VIT), 32, "self", "qk"),
    "eva02, separate": (model("eva02_base_patch14_224", **VIT), 32, "self", "qk"),
    "beit": (model("beit_base_patch16_224", **VIT), 32, "self", ""),
    "vit relpos": (model("vit_relpos_small_patch16_224", **VIT), 32, "self", ""),
    "vit parallel": (model("vit_base_patch16_xp_224", **VIT), 32, "self", "qk"),
    "vit siglip": (model("vit_base_patch16_siglip_224", **VIT), 32, "self cross", ""),
    "sam": (model("samvit_base_patch16", window_size=2, **VIT), 32, "self", ""),
    "xcit": (
        model("xcit_nano_12_p8_224", embed_dim=48, depth=1, num_heads=3),
        64,
        "cross-covariance class",
        {"XCA": "qk"},
    ),
    "cait": (model("cait_s24_224", **VIT), 32, "self class", ""),
    "gemma4": (
        model("gemma4_vit_167m", embed_dim=64, depth=1, num_heads=2),
        32,
        "self",
        "qkv",
    ),
    "tnt": (
        model(
            "tnt_s_patch16_224",
            img_size=32,
            embed_dim=48,
            inner_dim=24,
            depth=1,
            num_heads_outer=3,
            num_heads_inner=2,
        ),
        32,
        "self",
        "",
    ),
    "convit": (
        model(
            "convit_tiny",
            **VIT | {"embed_dim": 16, "depth": 2, "num_heads": 4},
            local_up_to_layer=1,
        ),
        32,
        "self",
        "",
    ),
    "crossvit": (
        model("crossvit_tiny_240", img_size=48, img_scale=(1.0, 1.0), patch_size=(12, 16)),
        48,
        "self class",
        "",
    ),
    "swin": (model("swin_tiny_patch4_window7_224", **SWIN), 32, "window", ""),
    "swinv2": (model("swinv2_tiny_window8_256", **SWIN), 32, "window", "qk"),
    "swinv2 cr": (model("swinv2_cr_tiny_224", **SWIN), 32, "window", "qk"),
    "maxvit": (
        model("maxvit_rmlp_pico_rw_256", block_type=("M", "M"), **MAXX),
        64,
        "window",
        "",
    ),
    "maxvit, not head first": (
        model("maxvit_tiny_tf_224", block_type=("M", "M"), **MAXX),
        64,
        "window",
        "",
    ),
    "maxvit, parallel": (
        model("maxvit_tiny_pm_256", block_type=("PM", "PM"), **MAXX),
        64,
        "window",
        "",
    ),
    "coatnet": (model("coatnet_pico_rw_224", block_type=("C", "T"), **MAXX), 64, "self", ""),
    "coatnet, not head first": (
        model("coatnet_0_224", block_type=("C", "T"), **MAXX),
        64,
        "self",
        "",
    ),
    "volo": (partial(volo.VOLO, **VOLO), 64, "self class", ""),
    "mvitv2": (partial(mvitv2.MultiScaleVit, MVIT, img_size=64), 64, "self", "qkv"),
    "hiera": (
        model("hiera_tiny_224", img_size=64, embed_dim=24, num_heads=1, stages=(1, 1, 2, 1)),
        64,
        "self window",
        "q",
    ),
    "pvt": (model("pvt_v2_b0", **FOUR), 32, "self", ""),
    "pvt linear": (model("pvt_v2_b2_li", **FOUR), 32, "self", ""),
    "coat": (model("coat_lite_tiny", img_size=64), 64, "linear", "k"),
    "levit": (model("levit_128s", img_size=64), 64, "self", ""),
    "levit conv": (model("levit_conv_128s", img_size=64), 64, "self", ""),
    "gcvit": (model("gcvit_xxtiny", img_size=64, window_size=(2, 2, 2, 2)), 64, "window", ""),
    "nest": (model("nest_tiny", img_size=64), 64, "window", ""),
    "twins": (
        model("twins_svt_small", img_size=64, **FOUR | {"depths": (1, 1, 2, 1)}),
        64,
        "self window",
        "",
    ),
    "mobilenetv4": (model("mobilenetv4_hybrid_medium"), 64, "self", ""),
    "davit": (
        model("davit_tiny", embed_dims=(16, 32), depths=(1, 1), num_heads=(2, 4)),
        64,
        "window channel",
        "",
    ),
    "davit, v2": (
        model("davit_base_fl", embed_dims=(16, 32), depths=(1, 1), num_heads=(2, 4)),
        64,
        "window channel",
        "",
    ),
    "iformer": (model("iformer_t"), 64, "self", "v"),
    "fastvit": (
        model("fastvit_sa12", layers=(1, 1, 1, 1), embed_dims=(16, 16, 32, 64)),
        64,
        "self",
        "",
    ),
    "efficientvit msra": (model("efficientvit_m0", img_size=64), 64, "window", "q"),
    "tiny vit": (model("tiny_vit_5m_224", **FOUR), 56, "window", ""),
    "lambda, halo, bottleneck": (
        model("lamhalobotnet50ts_256", img_size=128),
        128,
        "linear window self",
        {"LambdaLayer": "k"},
    ),
    "lambda, relative": (model("lambda_resnet26rpt_256", img_size=64), 64, "linear", "k"),
    "shvit": (model("shvit_s1"), 64, "self", ""),
    "efficientformer": (
        model("efficientformer_l1", depths=(1, 1, 1, 2), embed_dims=(16, 16, 32, 64)),
        224,
        "self",
        "",
    ),
    "efficientformer v2": (model("efficientformerv2_s0", img_size=64), 64, "self", ""),
    "edgenext": (model("edgenext_xx_small"), 64, "cross-covariance", "qk"),
    "visformer": (model("visformer_tiny", img_size=64), 64, "self", ""),
    "lowformer": (model("lowformer_b0"), 64, "self", ""),
    "cpubone": (model("cpubone_nano"), 64, "self", ""),
}

if not timm.is_model("iformer_t"):  # these two came with timm 1.0.30
    del MODELS["iformer"], MODELS["sapiens2, grouped"]

NORM = {"norm_layer": nn.LayerNorm}
TOKENS, MAP = (2, 9, 24), (2, 24, 8, 8)

# Options that no registered model uses, and layers whose models are large.
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str, str]] = {
    "wide heads": (
        partial(layers.Attention, 24, 3, attn_head_dim=10, dim_out=12, gated=True, qkv_bias=True),
        TOKENS,
        "self",
        "",
    ),
    "qk and scale norm": (
        partial(layers.Attention, 24, 3, qk_norm=True, scale_norm=True, **NORM),
        TOKENS,
        "self",
        "qk",
    ),
    "grouped queries": (
        partial(layers.AttentionRope, 24, 4, qkv_fused=False, num_kv_heads=2, attn_head_dim=5),
        TOKENS,
        "self",
        "",
    ),
    # The bias is added after the product, to q and v only.
    "eva, bias apart": (
        partial(eva.EvaAttention, 24, 3, qkv_bias_separate=True, scale_norm=False),
        TOKENS,
        "self",
        "qv",
    ),
    "differential": (
        partial(diff_attention.DiffAttention, 24, 3, qkv_bias=True),
        TOKENS,
        "self",
        "",
    ),
    "differential, parallel": (
        partial(vision_transformer.DiffParallelScalingBlock, 24, 3, qkv_bias=True),
        TOKENS,
        "self",
        "",
    ),
    "parallel": (
        partial(vision_transformer.ParallelScalingBlock, 24, 3, qkv_bias=True, fuse_out_proj=True),
        TOKENS,
        "self",
        "",
    ),
    "latent": (
        partial(layers.AttentionPoolLatent, 24, num_heads=3, latent_len=2, embed_dim=24),
        TOKENS,
        "cross",
        "",
    ),
    "latent, qk norm": (
        partial(layers.AttentionPoolLatent, 24, num_heads=3, qk_norm=True),
        TOKENS,
        "cross",
        "qk",
    ),
    "pool 2d": (partial(layers.AttentionPool2d, 24, feat_size=8, num_heads=3), MAP, "self", ""),
    "pool 2d, separate": (
        partial(layers.AttentionPool2d, 24, feat_size=8, num_heads=3, qkv_separate=True),
        MAP,
        "self",
        "",
    ),
    "pool 2d, rotary": (
        partial(layers.RotAttentionPool2d, 24, ref_feat_size=8, num_heads=3),
        MAP,
        "self",
        "qk",
    ),
    "pool 2d, rotary, separate": (
        partial(layers.RotAttentionPool2d, 24, ref_feat_size=8, num_heads=3, qkv_separate=True),
        MAP,
        "self",
        "qk",
    ),
    "2d": (partial(attention2d.Attention2d, 24, num_heads=3), MAP, "self", ""),
    "2d, head first": (
        partial(attention2d.Attention2d, 24, 48, num_heads=3, head_first=True, expand_first=True),
        MAP,
        "self",
        "",
    ),
    "maxxvit 2d, role first": (
        partial(maxxvit.Attention2d, 24, dim_head=8, head_first=False),
        MAP,
        "self",
        "",
    ),
    "multi-query": (
        partial(attention2d.MultiQueryAttention2d, 24, num_heads=3, key_dim=4, value_dim=5),
        MAP,
        "self",
        "",
    ),
    "multi-query, strided": (
        partial(attention2d.MultiQueryAttention2d, 24, num_heads=3, query_strides=2, kv_stride=2),
        MAP,
        "self",
        "",
    ),
    "bottleneck": (
        partial(
            bottleneck_attn.BottleneckAttn,
            24,
            feat_size=(8, 8),
            num_heads=3,
            dim_head=4,
            qkv_bias=True,
        ),
        MAP,
        "self",
        "",
    ),
    "halo": (
        partial(
            halo_attn.HaloAttn, 24, num_heads=3, dim_head=4, block_size=4, halo_size=1, stride=2
        ),
        MAP,
        "window",
        "",
    ),
    "lambda": (
        partial(lambda_layer.LambdaLayer, 24, num_heads=3, dim_head=4, r=3, qkv_bias=True),
        MAP,
        "linear",
        "k",
    ),
    "non-local": (partial(non_local_attn.NonLocalAttn, 24), MAP, "self", ""),
    "simpool 1d": (partial(other_pool.SimPool1d, 24, num_heads=3), TOKENS, "class", ""),
    "simpool 2d": (
        partial(other_pool.SimPool2d, 24, num_heads=3, qkv_bias=True, gamma=2.0),
        MAP,
        "class",
        "",
    ),
    "lite mla": (
        partial(efficientvit_mit.LiteMLA, 24, 24, dim=8, scales=(3, 5)),
        MAP,
        "linear",
        "qkv",
    ),
    "hieradet": (
        partial(hieradet_sam2.MultiScaleAttention, 24, 30, 3, q_pool=nn.MaxPool2d(2, 2)),
        (2, 8, 8, 24),
        "self",
        "q",
    ),
    "metaformer": (partial(metaformer.Attention, 24, head_dim=8), TOKENS, "self", ""),
    "nextvit": (
        partial(nextvit.EfficientAttention, 24, head_dim=8, sr_ratio=2),
        (2, 16, 24),
        "self",
        "",
    ),
    "tnt, narrow": (partial(tnt.Attention, 24, 12, num_heads=3), TOKENS, "self", ""),
    "cpubone": (partial(cpubone.ConvAttention, 60), (2, 60, 8, 8), "self", ""),
}

if "num_kv_heads" not in inspect_.signature(layers.AttentionRope).parameters:  # before 1.0.30
    del LAYERS["grouped queries"]

REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "timm.layers.attention2d.MultiQueryAttentionV2": (
        partial(attention2d.MultiQueryAttentionV2, 24, num_heads=3, key_dim=8, value_dim=8),
        "not a matrix",
    ),
    "timm.models.csatv2.SpatialTransformerBlock": (
        importlib.import_module("timm.models.csatv2").SpatialTransformerBlock,
        "single numbers",
    ),
    "timm.models.mobilevit.LinearSelfAttention": (
        lambda: timm.models.mobilevit.LinearSelfAttention(24),
        "separable attention",
    ),
    "timm.models.mvitv2.MultiScaleAttentionPoolFirst": (
        partial(mvitv2.MultiScaleAttentionPoolFirst, 24, 24, (4, 4), num_heads=3),
        "forward fails",
    ),
    "timm.models.swiftformer.EfficientAdditiveAttention": (
        lambda: timm.models.swiftformer.EfficientAdditiveAttention(24, 24),
        "additive attention",
    ),
    "timm.models.volo.OutlookAttention": (
        partial(volo.OutlookAttention, 24, 3),
        "no queries and keys",
    ),
}
if hasattr(layers, "AttentionPoolPrr"):  # not in all versions
    REFUSED["timm.layers.attention_pool.AttentionPoolPrr"] = (
        lambda: layers.AttentionPoolPrr(24, num_heads=3),
        "without projections",
    )


def distinct(sites: Iterable[Site]) -> list[Site]:
    """One module for each class, layout and shape; all sites of it."""
    sites = list(sites)
    chosen: dict[Any, nn.Module] = {}
    for site in sites:
        shapes = tuple((p.role, p.heads, p.head_dim, p.in_features) for p in site.projections)
        chosen.setdefault((site.cls, site.kind, site.layout, shapes), site.module)
    modules = {id(m) for m in chosen.values()}
    return [s for s in sites if id(s.module) in modules]


def build(make: Callable[[], nn.Module]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = make()
    return oracle.prepare(module)


def set_fused(module: nn.Module, on: bool) -> bool:
    """Switch between timm's two ways to attend; whether the module has them."""
    switches = [m for m in module.modules() if hasattr(m, "fused_attn")]
    for m in switches:
        m.fused_attn = on
    return bool(switches)


def run_oracle(
    module: nn.Module, shape: tuple[int, ...], kinds: str, transformed: str | dict[str, str]
) -> list[Site]:
    plan = inspect(module)
    sites = distinct(plan.sites)
    assert {s.kind for s in plan.sites} == set(kinds.split())
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    verdicts = oracle.check(module, lambda: module(x), sites=sites, transformed=transformed)
    assert len(verdicts) == len(sites) > 0
    # What is declared as transformed has to be: the weaker comparison is never a convenience.
    seen: dict[str, set[str]] = {}
    for verdict in verdicts:
        roles = seen.setdefault(verdict.cls.rsplit(".", 1)[-1], set())
        roles |= {role for role, level in verdict.levels.items() if level != "values"}
    for cls, roles in seen.items():
        declared = transformed if isinstance(transformed, str) else transformed.get(cls, "")
        assert roles == set(declared), f"{cls}: {roles} are transformed, declared {declared!r}"
    for site in plan.sites:
        for p in site.projections:
            assert p.matrix().shape == (p.heads, p.head_dim, p.in_features)
            assert p.rows.unique().numel() == p.rows.numel()
    return list(plan.sites)


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    make, size, kinds, transformed = MODELS[name]
    run_oracle(build(make), (2, 3, size, size), kinds, transformed)


@pytest.mark.parametrize("attend", ["sdpa", "eager"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, attend: str) -> None:
    make, shape, kinds, transformed = LAYERS[name]
    module = build(make)
    if not set_fused(module, attend == "sdpa") and attend == "sdpa":
        pytest.skip("this layer attends one way only")
    if attend == "sdpa" and "differential" in name:
        # Both halves are a call each; the oracle says that it cannot tell one attention from them.
        with pytest.raises(oracle.OracleError, match="2 attention products"):
            run_oracle(module, shape, kinds, transformed)
        return
    run_oracle(module, shape, kinds, transformed)


@pytest.mark.parametrize(
    "name", ["swin", "vit relpos", "xcit", "hiera", "cait", "beit", "visformer"]
)
@pytest.mark.parametrize("on", [False, True])
def test_both_ways_to_attend(name: str, on: bool) -> None:
    make, size, kinds, transformed = MODELS[name]
    module = build(make)
    assert set_fused(module, on)
    run_oracle(module, (2, 3, size, size), kinds, transformed)


def test_einsum_of_multi_query() -> None:
    module = build(partial(attention2d.MultiQueryAttention2d, 24, num_heads=3))
    module.einsum = True
    run_oracle(module, MAP, "self", "")


def test_latent_without_query_projection() -> None:
    module = build(partial(layers.AttentionPoolLatent, 24, num_heads=3, q_proj=False))
    (site,) = run_oracle(module, TOKENS, "cross", "")
    assert [p.role for p in site.projections] == ["k", "v"]


def test_global_blocks_of_gcvit_have_keys_and_values_only() -> None:
    sites = inspect(build(MODELS["gcvit"][0])).sites
    assert {"".join(p.role for p in s.projections) for s in sites} == {"qkv", "kv"}


def test_channel_attention_of_davit_reads_what_it_names_q() -> None:
    site = next(s for s in inspect(build(MODELS["davit"][0])).sites if s.kind == "channel")
    width = site.projection("v").raw.shape[0] // 3
    starts = {p.role: int(p.rows.min()) // width for p in site.projections}
    assert starts == {"v": 0, "q": 1, "k": 2}


def test_fused_norms_of_levit_leave_the_same_rows() -> None:
    """After ``fuse()`` the wrapper is gone and the layer itself is the projection."""
    module = build(MODELS["levit"][0])
    before = inspect(module).sites[0]
    before.module.qkv = before.module.qkv.fuse()
    after = inspect(module).sites[0]
    assert type(after.projections[0].owner) is nn.Linear
    for a, b in zip(before.projections, after.projections, strict=True):
        assert torch.equal(a.rows, b.rows)


class OwnAttention(layers.Attention):
    """What a user does who adds something to timm's attention."""


def test_subclass_inherits_the_adapter() -> None:
    module = build(partial(OwnAttention, 24, 3))
    run_oracle(module, TOKENS, "self", "")


class RenamedAttention(layers.Attention):
    """What a fork does that keeps the base class and moves its weight."""

    def __init__(self) -> None:
        super().__init__(24, 3)
        self.to_qkv = self.qkv
        del self.qkv


def test_subclass_that_moves_its_weight_is_refused() -> None:
    (row,) = inspect(RenamedAttention()).unsupported
    assert "not as its adapter expects it" in row.reason


def test_rows_do_not_follow_the_default_device() -> None:
    with torch.device("meta"):
        sites = inspect(nn.ModuleList([layers.Attention(24, 3), volo.ClassAttention(24, 3)])).sites
    assert {p.rows.device.type for s in sites for p in s.projections} == {"cpu"}


@pytest.mark.parametrize("name", ["levit", "maxvit", "coatnet", "efficientformer", "swin"])
def test_oracle_catches_the_other_order(name: str) -> None:
    """Fused is not stacked: reading head-major rows role-major, or the reverse, must not pass."""
    make, size, _, _ = MODELS[name]
    module = build(make)
    site = next(s for s in inspect(module).sites if s.projections[0].heads > 1)
    q, _, v = site.projections
    wrong = fused(
        q.owner,
        heads=q.heads,
        head_dim=q.head_dim,
        v_head_dim=v.head_dim,
        head_major="role" in site.layout,
    )
    site = replace(site, projections=wrong.projections)
    x = torch.randn(2, 3, size, size, dtype=torch.float64)
    with pytest.raises(oracle.OracleError):
        oracle.check(module, lambda: module(x), sites=[site])


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(name: str) -> None:
    make, reason = REFUSED[name]
    (row,) = inspect(make()).unsupported
    assert row.cls == name
    assert reason in row.reason


def test_pool_first_attention_still_fails_in_timm() -> None:
    """The day it runs, its refusal has to go."""
    module = REFUSED["timm.models.mvitv2.MultiScaleAttentionPoolFirst"][0]()
    with pytest.raises(RuntimeError):
        module(torch.randn(2, 17, 24), [4, 4])


def test_every_adapter_is_under_test() -> None:
    """No adapter without an oracle: the classes above are all that this library registers."""
    inspect(nn.Identity())  # loads the adapters
    registered = {c for c in adapters._REGISTRY if c.startswith("timm.")}
    seen: set[str] = set(REFUSED)
    for make, *_ in [*MODELS.values(), *LAYERS.values()]:
        seen |= {s.cls for s in inspect(build(make)).sites}
    if not timm.is_model("iformer_t"):
        registered -= {"timm.models.iformer.SHMA"}
    assert registered <= seen, registered - seen


@pytest.mark.parametrize(
    "name",
    [
        "bat_resnext26ts",
        "convnext_atto",
        "eca_resnet33ts",
        "efficientvim_m1",
        "focalnet_tiny_srf",
        "gcresnet33ts",
        "mixer_s32_224",
        "poolformer_s12",
        "resnest14d",
        "resnet18",
        "seresnet50",
        "skresnet18",
    ],
)
def test_no_false_alarm_without_attention(name: str) -> None:
    if not timm.is_model(name):
        pytest.skip("not in this version of timm")
    with torch.device("meta"):
        plan = inspect(timm.create_model(name))
    assert plan.sites == plan.unsupported == ()


def test_refused_modules_do_not_hide_supported_ones() -> None:
    plan = inspect(build(MODELS["volo"][0]))
    assert {u.cls for u in plan.unsupported} == {"timm.models.volo.OutlookAttention"}
    assert plan.sites
    with pytest.raises(UnsupportedAttentionError):
        adapters.find_adapter(volo.OutlookAttention(24, 3))(None)
