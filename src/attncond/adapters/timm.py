"""Adapters for timm, by qualified class name, so that timm itself is never imported.

Most of timm's attention classes differ only in where one fused weight keeps its rows. Those stand
in tables; a function each is left for the rest. What a class calls q, k and v counts as Q, K and V
unless its forward says otherwise (DaViT). Classes that are no softmax or linear attention over
projected queries and keys are refused by name, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from attncond.adapters import Adapter, register
from attncond.errors import UnsupportedAttentionError
from attncond.sites import Kind, Role, Site, fused, join, project, raw_parameter, separate

# A projection followed by a norm, or after a pooling layer, sits in a small wrapper.
_INNER = ("proj", "ln", "linear", "conv", "c")


def _weight(module: nn.Module) -> nn.Module:
    """The layer that holds the matrix: itself, or the one inside its wrapper.

    Wrappers dissolve when a user fuses their norm (``fuse()``), so their presence is optional.
    """
    while "weight" not in module._parameters:
        names = ("base_layer", *_INNER)  # peft keeps the layer that it adapts in `base_layer`
        inner = next((m for n in names if (m := module._modules.get(n)) is not None), None)
        if inner is None:
            break
        module = inner
    return module


def _register(adapter: Callable[..., Any], kind: Kind, *classes: str) -> None:
    register(*(f"timm.{c}" for c in classes))(partial(adapter, kind=kind))


def _stacked(module: Any, kind: Kind) -> Site:
    """[q; k; v] in ``qkv``, each head by head; or a ``q``, ``k``, ``v`` each where not fused."""
    if getattr(module, "qkv", None) is None:
        names = ("q_proj", "k_proj", "v_proj") if hasattr(module, "q_proj") else ("q", "k", "v")
        q, k, v = (_weight(getattr(module, n)) for n in names)
        kv_heads = getattr(module, "num_kv_heads", None)
        return separate(q, k, v, heads=module.num_heads, kv_heads=kv_heads, kind=kind)
    return fused(_weight(module.qkv), heads=module.num_heads, kind=kind)


_register(
    _stacked,
    "self",
    "layers.attention.Attention",
    "layers.attention.AttentionRope",
    "layers.attention_pool2d.AttentionPool2d",
    "layers.attention_pool2d.RotAttentionPool2d",
    "models.beit.Attention",
    "models.cait.TalkingHeadAttn",
    "models.convit.MHSA",
    "models.efficientformer_v2.Attention2d",
    "models.efficientformer_v2.Attention2dDownsample",
    "models.eva.EvaAttention",
    "models.fastvit.Attention",
    "models.gemma4_vit.Gemma4Attention",
    "models.hieradet_sam2.MultiScaleAttention",
    "models.metaformer.Attention",
    "models.mvitv2.MultiScaleAttention",
    "models.nextvit.EfficientAttention",
    "models.visformer.Attention",
    "models.vision_transformer_relpos.RelPosAttention",
    "models.vision_transformer_sam.Attention",
    "models.volo.Attention",
)
_register(
    _stacked,
    "window",
    "models.davit.WindowAttention",
    "models.nest.Attention",
    "models.twins.LocallyGroupedAttn",
)
_register(_stacked, "cross-covariance", "models.edgenext.CrossCovarianceAttn", "models.xcit.XCA")
_register(_stacked, "linear", "models.coat.FactorAttnConvRelPosEnc")


def _shifted_window(module: Any, kind: Kind) -> Site:
    """[q; k; v]; the mask of shifted windows is -100."""
    return replace(_stacked(module, kind), hidden=-50.0)


_register(
    _shifted_window,
    "window",
    "models.swin_transformer.WindowAttention",
    "models.swin_transformer_v2.WindowAttention",
    "models.swin_transformer_v2_cr.WindowMultiHeadAttention",
)


def _head_major(module: Any, kind: Kind) -> Site:
    """[q; k; v] of the first head, then of the second; values may be wider than keys."""
    return fused(
        _weight(module.qkv),
        heads=module.num_heads,
        head_dim=module.key_dim,
        v_head_dim=module.val_dim,
        head_major=True,
        kind=kind,
    )


_register(_head_major, "self", "models.efficientformer.Attention", "models.levit.Attention")
_register(_head_major, "window", "models.tiny_vit.Attention")


def _head_first(module: Any, kind: Kind) -> Site:
    """Either order, as the module's own flag says."""
    return fused(module.qkv, heads=module.num_heads, head_major=module.head_first, kind=kind)


_register(_head_first, "self", "layers.attention2d.Attention2d", "models.maxxvit.Attention2d")
_register(_head_first, "window", "models.maxxvit.AttentionCl")


def _pointwise(module: Any, kind: Kind) -> Site:
    return fused(module.pwise, heads=module.num_heads, head_major=True, kind=kind)


_register(_pointwise, "self", "models.cpubone.ConvAttention", "models.lowformer.ConvAttention")


def _q_and_kv(module: Any, kind: Kind) -> Site:
    """``q`` and [k; v] in ``kv``. A latent query may come without a projection."""
    kv = fused(_weight(module.kv), "kv", heads=module.num_heads, kind=kind)
    if isinstance(module.q, nn.Identity):
        return kv
    return join(separate(_weight(module.q), None, None, heads=module.num_heads, kind=kind), kv)


_register(_q_and_kv, "self", "models.pvt_v2.Attention", "models.twins.GlobalSubSampleAttn")
_register(_q_and_kv, "class", "models.volo.ClassAttention")
_register(_q_and_kv, "cross", "layers.attention_pool.AttentionPoolLatent")


def _qk_and_v(module: Any, kind: Kind) -> Site:
    qk = fused(module.qk, "qk", heads=module.num_heads, kind=kind)
    return join(qk, separate(None, None, module.v, heads=module.num_heads, kind=kind))


_register(_qk_and_v, "self", "models.tnt.Attention")


@register("timm.models.convit.GPSA")
def _gated_positional(module: Any) -> Site:
    return replace(
        _qk_and_v(module, "self"),
        opaque="its attention matrix is a gated sum of two softmaxes, one of positions alone, "
        "divided by its row sums, which are zero for one without its gap",
    )


def _class_attention(module: Any, kind: Kind) -> Site:
    names = ("q", "k", "v") if hasattr(module, "q") else ("wq", "wk", "wv")
    q, k, v = (getattr(module, n) for n in names)
    return separate(q, k, v, heads=module.num_heads, kind=kind)


_register(_class_attention, "class", "models.cait.ClassAttn", "models.crossvit.CrossAttention")


def _rows(start: int, heads: int, dim: int) -> torch.Tensor:
    return torch.arange(start, start + heads * dim, device="cpu").view(heads, dim)


def _differential(module: Any) -> Site:
    """Two queries and keys for each value head: the difference of two attention matrices."""
    heads, dim = module.num_heads, module.head_dim
    owner, start = module.qkv if hasattr(module, "qkv") else module.in_proj, 0
    if not hasattr(module, "qkv"):
        start = module.in_split[0]
    width = 2 * heads * dim
    blocks: tuple[tuple[Role, int, int], ...] = (
        ("q", 2 * heads, dim),
        ("k", 2 * heads, dim),
        ("v", heads, 2 * dim),
    )
    projections = tuple(
        project(role, owner, _rows(start + i * width, count, size))
        for i, (role, count, size) in enumerate(blocks)
    )
    return Site(
        projections,
        "fused qkv, role-major",
        scattered="a head's output is the difference of two attentions (and has its rows "
        "normalised right after)",
    )


register(
    "timm.layers.diff_attention.DiffAttention",
    "timm.models.vision_transformer.DiffParallelScalingBlock",
)(_differential)


@register("timm.models.vision_transformer.ParallelScalingBlock")
def _parallel_block(module: Any) -> Site:
    """The block's one input projection: rows of the MLP first, then [q; k; v]."""
    return fused(
        module.in_proj, heads=module.num_heads, head_dim=module.head_dim, start=module.in_split[0]
    )


@register("timm.models.levit.AttentionDownsample")
def _levit_downsample(module: Any) -> Site:
    q = separate(_weight(module.q), None, None, heads=module.num_heads)
    kv = fused(
        _weight(module.kv),
        "kv",
        heads=module.num_heads,
        head_dim=module.key_dim,
        v_head_dim=module.val_dim,
        head_major=True,
    )
    return join(q, kv)


@register("timm.layers.halo_attn.HaloAttn")
def _halo(module: Any) -> Site:
    """The convolution's channels fold into (batch * heads), which makes ``kv`` head-major."""
    kv = fused(
        module.kv,
        "kv",
        heads=module.num_heads,
        head_dim=module.dim_head_qk,
        v_head_dim=module.dim_head_v,
        head_major=True,
    )
    return join(separate(module.q, None, None, heads=module.num_heads), kv, kind="window")


@register("timm.layers.bottleneck_attn.BottleneckAttn")
def _bottleneck(module: Any) -> Site:
    return fused(
        module.qkv,
        heads=module.num_heads,
        head_dim=module.dim_head_qk,
        v_head_dim=module.dim_head_v,
    )


@register("timm.layers.lambda_layer.LambdaLayer")
def _lambda(module: Any) -> Site:
    """Linear attention with one key and one value head for all queries, beside a position path."""
    heads, dim = module.num_heads, module.dim_qk
    width = heads * dim
    return Site(
        (
            project("q", module.qkv, _rows(0, heads, dim)),
            project("k", module.qkv, _rows(width, 1, dim)),
            project("v", module.qkv, _rows(width + dim, 1, module.dim_v)),
        ),
        "fused qkv, role-major",
        "linear",
    )


@register("timm.layers.attention2d.MultiQueryAttention2d")
def _multi_query(module: Any) -> Site:
    q, k, v = (_weight(getattr(module, n)) for n in ("query", "key", "value"))
    return separate(q, k, v, heads=module.num_heads, kv_heads=1)


@register("timm.layers.non_local_attn.NonLocalAttn")
def _non_local(module: Any) -> Site:
    """One head; the names follow the paper's theta, phi and g."""
    return separate(module.t, module.p, module.g, heads=1)


@register("timm.layers.other_pool.SimPool1d", "timm.layers.other_pool.SimPool2d")
def _sim_pool(module: Any) -> Site:
    """One query, the mean token. Its values are the normalised tokens, without a projection."""
    site = separate(module.q, module.k, None, heads=module.num_heads, kind="class")
    if module.gamma is None:
        return site
    return replace(
        site,
        opaque="gamma makes it a power mean of the values: roots are taken of the heads' outputs, "
        "which have to be positive for that",
    )


@register("timm.models.davit.ChannelAttention")
def _davit_channel(module: Any) -> Site:
    """Computes softmax(kT v) qT: what is named k asks, what is named v answers, q is read."""
    return fused(module.qkv, "vqk", heads=module.num_heads, kind="channel")


@register("timm.models.davit.ChannelAttentionV2")
def _davit_channel_v2(module: Any) -> Site:
    return fused(module.qkv, heads=module.groups, kind="channel")


@register("timm.models.efficientvit_mit.LiteMLA")
def _lite_mla(module: Any) -> Site:
    """Head-major ReLU attention. Its further scales are convolutions of the same heads."""
    owner = _weight(module.qkv)
    heads = raw_parameter(owner, "weight").shape[0] // (3 * module.dim)
    return fused(owner, heads=heads, head_dim=module.dim, head_major=True, kind="linear")


@register("timm.models.efficientvit_msra.CascadedGroupAttention")
def _cascaded(module: Any) -> list[Site]:
    """A projection for each head, fed with the output of the head before it: a site each."""
    return [
        fused(
            _weight(qkv), heads=1, head_dim=module.key_dim, v_head_dim=module.val_dim, kind="window"
        )
        for qkv in module.qkvs
    ]


@register("timm.models.gcvit.WindowAttentionGlobal")
def _gcvit(module: Any) -> Site:
    """Global blocks get their queries from outside and hold keys and values only."""
    order = "kv" if module.use_global else "qkv"
    return fused(module.qkv, order, heads=module.num_heads, kind="window")


@register("timm.models.hiera.MaskUnitAttention")
def _hiera(module: Any) -> Site:
    kind: Kind = "window" if module.use_mask_unit_attn else "self"
    return fused(module.qkv, heads=module.heads, kind=kind)


@register("timm.models.iformer.SHMA")
def _iformer(module: Any) -> Site:
    """One head. ``v_gate`` holds the values, which pass through a sigmoid, and then their gate."""
    kind: Kind = "window" if module.window_size else "self"
    gate = _weight(module.v_gate)
    width = raw_parameter(gate, "weight").shape[0] // 2
    qk = separate(_weight(module.q), _weight(module.k), None, heads=1, kind=kind)
    values = Site((project("v", gate, _rows(0, 1, width)),), "v of v and gate", kind)
    return join(qk, values)


@register("timm.models.shvit.SHSA")
def _shvit(module: Any) -> Site:
    return fused(_weight(module.qkv), heads=1, head_dim=module.qk_dim, v_head_dim=module.pdim)


def _refuse(reason: str) -> Adapter:
    def adapter(module: nn.Module) -> Site:
        raise UnsupportedAttentionError(reason)

    return adapter


for _class, _reason in {
    "layers.attention_pool.AttentionPoolPrr": "its queries, keys and values are the tokens "
    "themselves, without projections",
    "layers.attention2d.MultiQueryAttentionV2": "its queries are a tensor of (heads, key_dim, in), "
    "not a matrix with rows",
    "models.csatv2.SpatialTransformerBlock": "its Q, K and V are single numbers (one channel)",
    "models.mobilevit.LinearSelfAttention": "separable attention: queries are one number for each "
    "token and never meet the keys in a product",
    "models.mvitv2.MultiScaleAttentionPoolFirst": "its forward fails in timm, so nothing can be "
    "checked against it",
    "models.swiftformer.EfficientAdditiveAttention": "additive attention: queries and keys never "
    "meet in a product, and there are no values",
    "models.volo.OutlookAttention": "outlook attention: its weights come straight from a linear "
    "map, there are no queries and keys",
}.items():
    register(f"timm.{_class}")(_refuse(_reason))
