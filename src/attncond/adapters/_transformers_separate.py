"""transformers' attention classes with separate weights that names and shapes do not give away.

A gate or a second attention beside the query, keys and values that another layer computes, weights
inside wrappers: structural matching would refuse these, miss them or take too much.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attncond.adapters import structural
from attncond.adapters._transformers_names import models
from attncond.errors import UnsupportedAttentionError
from attncond.sites import Site, fused, join, project, separate

_BLOCKS = "a head's output is a sum of products with parts of the attention matrix"
_MAP = "the softmax is the output itself (a mask for each query): there are no values"


def _matched(module: Any) -> Site:
    """What names and shapes tell, for a class that has more to say."""
    site = structural.match(module)
    if site is None:
        raise UnsupportedAttentionError("its projections are not where its class has them")
    return site


@models(
    "clap.ClapAudioSelfAttention",
    "donut.donut_swin:DonutSwinSelfAttention",
    "maskformer.maskformer_swin:MaskFormerSwinSelfAttention",
    "swin.SwinAttention",
    "swin2sr.Swin2SRSelfAttention",
    "swinv2.Swinv2SelfAttention",
)
def shifted_windows(module: Any) -> Site:
    """Three linear projections; the mask of shifted windows is -100."""
    return replace(_matched(module), kind="window", hidden=-50.0)


@models("big_bird.BigBirdAttention", "bigbird_pegasus.BigBirdPegasusEncoderAttention")
def block_sparse(module: Any) -> Site:
    """Three linear projections; windows, random blocks and global blocks of keys, or all of them.

    They are in a module inside, which transformers exchanges where an input is too short for
    blocks, with the same projections: so the one around it, which stays, is the site.
    """
    site = _matched(module.self)
    if module.attention_type == "original_full":
        return site
    return replace(site, scattered=f"{_BLOCKS}: window, random and global blocks")


@models(
    "big_bird.BigBirdBlockSparseAttention",
    "big_bird.BigBirdSelfAttention",
    "bigbird_pegasus.BigBirdPegasusBlockSparseAttention",
    "bigbird_pegasus.BigBirdPegasusSelfAttention",
)
def inside_block_sparse(module: Any) -> tuple[Site, ...]:
    """The part of :func:`block_sparse` that is exchanged."""
    return ()


@models("pegasus_x.PegasusXGlobalLocalAttention")
def global_local(module: Any) -> Site:
    """Three linear projections, of the tokens of a block and of global ones."""
    return replace(_matched(module), scattered=f"{_BLOCKS}: tokens of the block, and global ones")


@models("vits.VitsAttention")
def vits(module: Any) -> Site:
    """Three linear projections; relative positions have keys and values of their own."""
    if module.window_size is None:
        return _matched(module)
    scattered = f"{_BLOCKS}: with the values, and with embeddings of the relative positions"
    return replace(_matched(module), scattered=scattered)


@models("nystromformer.NystromformerSelfAttention")
def nystromformer(module: Any) -> Site:
    """Three linear projections; attention to landmarks is a product of three matrices.

    A head's output is K1 Z (K3 V), where K1, K2 and K3 are softmaxes, in this order, and Z inverts
    K2. Without the gap of K3, the rows of the whole product sum to zero.
    """
    if module.num_landmarks == module.seq_len:
        return _matched(module)
    return replace(
        _matched(module),
        softmax=3,
        scattered="its attention matrix is a product of three, and only the one next to the "
        "values is reached",
    )


@models("informer.InformerProbSparseAttention")
def prob_sparse(module: Any) -> Site:
    """Three linear projections; only the queries that differ most from the average attend."""
    return replace(
        _matched(module),
        opaque="only some of its queries attend; the others get the mean of the values (their sum "
        "in a decoder), where no softmax tells what to change",
    )


@models("autoformer.AutoformerAttention")
def autocorrelation(module: Any) -> Site:
    """Three linear projections; values are shifted by the delays at which Q and K correlate."""
    return replace(
        _matched(module),
        opaque="auto-correlation: whole series are shifted and weighted, there is no matrix of "
        "queries and keys",
    )


@models("aria.AriaCrossAttention")
def around_multihead(module: Any) -> tuple[Site, ...]:
    """Its projections lead into those of the nn.MultiheadAttention inside, which is the site."""
    return ()


@models("reformer.LocalSelfAttention")
def reformer_local(module: Any) -> Site:
    """Three linear projections, in chunks."""
    return replace(
        _matched(module),
        opaque="its softmax is written with logsumexp and exp, where it cannot be told from other "
        "arithmetic",
    )


@models(
    "granite_speech.GraniteSpeechConformerAttention",
    "granite_speech_plus.GraniteSpeechPlusConformerAttention",
)
def q_and_kv(module: Any) -> Site:
    """``to_q``, and ``to_kv`` chunked into [k; v]; attention within blocks of frames."""
    return join(
        separate(module.to_q, None, None, heads=module.num_heads),
        fused(module.to_kv, "kv", heads=module.num_heads),
        kind="window",
    )


@models("evolla.EvollaSequenceCompressorAttention")
def evolla_compressor(module: Any) -> Site:
    """``to_q`` of the latents, ``to_kv`` chunked into [k; v]."""
    return join(
        separate(module.to_q, None, None, heads=module.heads),
        fused(module.to_kv, "kv", heads=module.heads),
        kind="cross",
    )


@models(
    "qwen3_5.Qwen3_5Attention",
    "qwen3_5_moe.Qwen3_5MoeAttention",
    "qwen3_next.Qwen3NextAttention",
    "qwen4_exp.Qwen4ExpTextAttention",
)
def gated_query(module: Any) -> Site:
    """``q_proj`` viewed as (heads, 2 · head_dim): each head's query, then its output gate."""
    dim = module.head_dim
    rows = torch.arange(structural.row_count(module.q_proj), device="cpu")
    rows = rows.view(-1, 2 * dim)[:, :dim]
    kv_heads = structural.row_count(module.k_proj) // dim
    kv = separate(None, module.k_proj, module.v_proj, heads=kv_heads, kv_heads=kv_heads)
    return Site((project("q", module.q_proj, rows), *kv.projections), "separate, q with its gate")


@models(
    "gemma3n.Gemma3nTextAttention",
    "gemma4.Gemma4TextAttention",
    "gemma4_unified.Gemma4UnifiedTextAttention",
    "diffusion_gemma.DiffusionGemmaEncoderTextAttention",
    "diffusion_gemma.DiffusionGemmaDecoderTextAttention",
)
def shared_value(module: Any) -> Site:
    """Layers may use K as V, or take both from an earlier layer: then a site has fewer roles."""
    dim = module.head_dim
    k, v = getattr(module, "k_proj", None), getattr(module, "v_proj", None)
    kv_heads = structural.row_count(k) // dim if k is not None else None
    heads = structural.row_count(module.q_proj) // dim
    site = separate(module.q_proj, k, v, heads=heads, kv_heads=kv_heads)
    if k is None:
        return replace(site, layout="separate, k and v of another layer")
    return replace(site, layout="separate" if v is not None else "separate, k is v")


@models("gemma4.Gemma4AudioAttention", "gemma4.Gemma4VisionAttention")
def clippable(module: Any) -> Site:
    """Linear projections inside modules that may clip what goes in and comes out."""
    dim = module.head_dim
    q, k, v = (p.linear for p in (module.q_proj, module.k_proj, module.v_proj))
    rows, kv_rows = structural.row_count(q), structural.row_count(k)
    return separate(q, k, v, heads=rows // dim, kv_heads=kv_rows // dim)


@models("kyutai_speech_to_text.KyutaiSpeechToTextAttention", "moshi.MoshiAttention")
def moshi(module: Any) -> Site:
    """Linear projections in a wrapper; the depth decoder has one for each codebook instead."""
    if module.q_proj.use_flexible_linear:
        raise UnsupportedAttentionError(
            "each position has projections of its own, one for each codebook"
        )
    q, k, v = (p.linear for p in (module.q_proj, module.k_proj, module.v_proj))
    return separate(q, k, v, heads=module.num_heads, kv_heads=module.num_key_value_heads)


@models("chameleon.ChameleonVQVAEEncoderAttnBlock", "janus.JanusVQVAEAttnBlock")
def vqvae(module: Any) -> Site:
    """1x1 convolutions and one head, of which no attribute speaks."""
    return separate(module.q, module.k, module.v, heads=1)


@models("cvt.CvtSelfAttention")
def cvt(module: Any) -> Site:
    """Linear projections, after depthwise convolutions of the input."""
    return separate(
        module.projection_query,
        module.projection_key,
        module.projection_value,
        heads=module.num_heads,
    )


@models("aimv2.Aimv2AttentionPoolingHead")
def aimv2_pooling(module: Any) -> Site:
    """The query is a learned token without a projection."""
    return separate(None, module.k_proj, module.v_proj, heads=module.num_heads, kind="class")


@models(
    "lilt.LiltSelfAttention",
)
def lilt(module: Any) -> tuple[Site, Site]:
    """Text and layout attend apart, and add their logits."""
    heads = module.num_attention_heads
    # The layout product is the first one in forward.
    return (
        separate(module.layout_query, module.layout_key, module.layout_value, heads=heads),
        separate(module.query, module.key, module.value, heads=heads),
    )


@models(
    "longformer.LongformerSelfAttention",
    "led.LEDEncoderSelfAttention",
)
def longformer(module: Any) -> tuple[Site, Site]:
    """Sliding windows, and projections of their own for global tokens."""
    heads = module.num_heads
    scattered = f"{_BLOCKS}: tokens of the window, and global tokens"
    return (
        replace(
            separate(module.query, module.key, module.value, heads=heads, kind="window"),
            scattered=scattered,
        ),
        replace(
            separate(module.query_global, module.key_global, module.value_global, heads=heads),
            scattered=scattered,
            optional=True,
        ),
    )


@models(
    "conditional_detr.ConditionalDetrMHAttentionMap",
    "detr.DetrMHAttentionMap",
    "maskformer.MaskFormerDetrMHAttentionMap",
)
def attention_map(module: Any) -> Site:
    """The mask head's attention: a softmax of q kT, and no value."""
    heads = structural.row_count(module.q_proj) // module.head_dim
    site = separate(module.q_proj, module.k_proj, None, heads=heads, kind="cross")
    return replace(site, opaque=_MAP)


@models("visual_bert.VisualBertRegionToPhraseAttention")
def region_to_phrase(module: Any) -> Site:
    """Its output are the logits: of regions, for each phrase."""
    return replace(_matched(module), opaque="the logits are the output itself: values are not used")


@models("dab_detr.DabDetrMHAttentionMap")
def dab_detr_attention_map(module: Any) -> Site:
    """The same, under other names."""
    site = separate(module.q_linear, module.k_linear, None, heads=module.num_heads, kind="cross")
    return replace(site, opaque=_MAP)


@models("levit.LevitAttention")
def levit(module: Any) -> Site:
    """Head by head: key_dim of q, key_dim of k and attention_ratio · key_dim of v."""
    return fused(
        module.queries_keys_values.linear,
        heads=module.num_attention_heads,
        head_dim=module.key_dim,
        v_head_dim=module.attention_ratio * module.key_dim,
        head_major=True,
    )


@models("levit.LevitAttentionSubsample")
def levit_subsample(module: Any) -> Site:
    """``queries`` of every second token, ``keys_values`` head by head."""
    heads = module.num_attention_heads
    return join(
        separate(module.queries.linear, None, None, heads=heads),
        fused(
            module.keys_values.linear,
            "kv",
            heads=heads,
            head_dim=module.key_dim,
            v_head_dim=module.attention_ratio * module.key_dim,
            head_major=True,
        ),
    )
