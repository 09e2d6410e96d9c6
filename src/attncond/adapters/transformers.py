"""Where transformers' attention classes keep Q, K and V when they share a weight.

Separate projections need no adapter (see :mod:`attncond.adapters.structural`), so that most of the
library's attention classes are not named here. Each class below was read in its ``forward`` and is
named by string: transformers is never imported from this file.
"""

from __future__ import annotations

from typing import Any

import torch

from attncond.adapters import _transformers_refused, _transformers_separate, structural
from attncond.adapters._transformers_names import models
from attncond.errors import UnsupportedAttentionError
from attncond.sites import Kind, Site, fused, join, project, separate

__all__ = ["_transformers_refused", "_transformers_separate"]  # imported to register their classes


def _heads(module: Any) -> int:
    heads = structural.heads_of(module)
    if heads is None:
        raise UnsupportedAttentionError("no attribute tells the number of heads")
    return heads


# One weight, [q; k; v], as many heads each ---------------------------------------------------


@models(
    "blip.BlipAttention",
    "blip_2.Blip2Attention",
    "cohere_compass.CohereCompassVisionAttention",
    "dots3_note.Dots3NoteVisionAttention",
    "ernie4_5_vl_moe.Ernie4_5_VLMoeVisionAttention",
    "glm4v.Glm4vVisionAttention",
    "glm4v_moe.Glm4vMoeVisionAttention",
    "glm5_next.Glm5NextVisionAttention",
    "glm_image.GlmImageVisionAttention",
    "glm_ocr.GlmOcrVisionAttention",
    "instructblip.InstructBlipAttention",
    "instructblipvideo.InstructBlipVideoAttention",
    "mgp_str.MgpstrAttention",
    "pp_ocrv5_mobile_rec.PPOCRV5MobileRecAttention",
    "pp_ocrv5_server_rec.PPOCRV5ServerRecAttention",
    "pp_ocrv6_small_rec.PPOCRV6SmallRecAttention",
    "qwen2_5_vl.Qwen2_5_VLVisionAttention",
    "qwen2_vl.VisionAttention",
    "qwen3_5.Qwen3_5VisionAttention",
    "qwen3_5_moe.Qwen3_5MoeVisionAttention",
    "qwen3_omni_moe.Qwen3OmniMoeVisionAttention",
    "qwen3_vl.Qwen3VLVisionAttention",
    "qwen3_vl_moe.Qwen3VLMoeVisionAttention",
    "qwen4_exp.Qwen4ExpVisionAttention",
    "sam2.Sam2MultiScaleAttention",
    "seggpt.SegGptAttention",
    "timesformer.TimesformerSelfAttention",
    "vitdet.VitDetAttention",
)
def stacked(module: Any) -> Site:
    """``qkv`` reshaped to (3, heads, head_dim)."""
    return fused(module.qkv, heads=_heads(module))


@models(
    "deepseek_ocr2.DeepseekOcr2SamVisionAttention",
    "got_ocr2.GotOcr2VisionAttention",
    "pp_formulanet.PPFormulaNetVisionAttention",
    "sam.SamVisionAttention",
    "sam_hq.SamHQVisionAttention",
    "slanext.SLANeXtVisionAttention",
    "unlimited_ocr.UnlimitedOcrSamVisionAttention",
    "florence2.Florence2VisionWindowAttention",
)
def windowed(module: Any) -> Site:
    """``qkv`` reshaped to (3, heads, head_dim), in windows (SAM's layer partitions its input)."""
    return fused(module.qkv, heads=_heads(module), kind="window")


@models("hiera.HieraMaskUnitAttention")
def hiera(module: Any) -> Site:
    """(3, heads, head_dim); mask units are windows, and the last stages attend globally."""
    kind: Kind = "window" if module.use_mask_unit_attn else "self"
    return fused(module.qkv, heads=module.num_heads, kind=kind)


@models("florence2.Florence2VisionChannelAttention")
def florence2_channel(module: Any) -> Site:
    """(3, groups, channels), transposed before the product: channels attend to channels."""
    return fused(module.qkv, heads=module.groups, kind="channel")


@models("bark.BarkSelfAttention")
def bark(module: Any) -> Site:
    """``att_proj`` split into embed_dim each."""
    return fused(module.att_proj, heads=module.num_heads)


@models("modernbert.ModernBertAttention")
def modernbert(module: Any) -> Site:
    """``Wqkv`` viewed as (3, heads, head_dim); the module itself knows head_dim only."""
    rows = structural.row_count(module.Wqkv)
    return fused(module.Wqkv, heads=rows // (3 * module.head_dim))


@models("mpt.MptAttention")
def mpt(module: Any) -> Site:
    """``Wqkv`` chunked by three."""
    return fused(module.Wqkv, heads=module.n_heads)


@models("layoutlmv2.LayoutLMv2SelfAttention")
def layoutlmv2(module: Any) -> Site:
    """``qkv_linear`` chunked by three where fast_qkv is set, else separate projections."""
    heads = module.num_attention_heads
    if not module.fast_qkv:
        return separate(module.query, module.key, module.value, heads=heads)
    return fused(module.qkv_linear, heads=heads)


# One weight, [q; k; v], fewer heads for K and V -----------------------------------------------


@models("phi3.Phi3Attention", "phi4_multimodal.Phi4MultimodalAttention")
def phi3(module: Any) -> Site:
    """``qkv_proj`` sliced into heads · head_dim and twice kv_heads · head_dim."""
    return fused(
        module.qkv_proj,
        heads=module.config.num_attention_heads,
        kv_heads=module.num_key_value_heads,
        head_dim=module.head_dim,
    )


@models("dbrx.DbrxAttention")
def dbrx(module: Any) -> Site:
    """``Wqkv`` split like Phi-3's."""
    return fused(
        module.Wqkv,
        heads=module.num_heads,
        kv_heads=module.num_key_value_heads,
        head_dim=module.head_dim,
    )


@models("exaone4_5.Exaone4_5_VisionAttention")
def exaone4_5(module: Any) -> Site:
    """``qkv`` split into q_dim and twice kv_dim."""
    return fused(
        module.qkv,
        heads=module.num_heads,
        kv_heads=module.num_key_value_heads,
        head_dim=module.head_dim,
    )


# One weight, head by head ---------------------------------------------------------------------


@models(
    "bloom.BloomAttention",
    "gpt_neox.GPTNeoXAttention",
    "gpt_neox_japanese.GPTNeoXJapaneseAttention",
    "persimmon.PersimmonAttention",
)
def head_major(module: Any) -> Site:
    """``query_key_value`` viewed as (heads, 3, head_dim)."""
    return fused(module.query_key_value, heads=_heads(module), head_major=True)


@models("deberta.DisentangledSelfAttention")
def deberta(module: Any) -> Site:
    """``in_proj`` viewed as (heads, 3 · head_dim); the biases of q and v are parameters apart."""
    return fused(module.in_proj, heads=module.num_attention_heads, head_major=True)


@models("esm.esmfold:EsmFoldSelfAttention")
def esmfold(module: Any) -> Site:
    """``proj`` viewed as (heads, 3 · head_dim)."""
    return fused(module.proj, heads=module.num_heads, head_major=True)


@models("falcon.FalconAttention")
def falcon(module: Any) -> Site:
    """``query_key_value`` per key-value group, per head, or [all q; k; v], by two flags."""
    owner, heads, dim = module.query_key_value, module.num_heads, module.head_dim
    if module.new_decoder_architecture:
        groups = module.num_kv_heads
        index = torch.arange((heads + 2 * groups) * dim, device="cpu")
        index = index.view(groups, heads // groups + 2, dim)
        parts = (index[:, :-2].reshape(heads, dim), index[:, -2], index[:, -1])
        projections = (
            project("q", owner, parts[0]),
            project("k", owner, parts[1]),
            project("v", owner, parts[2]),
        )
        return Site(projections, "fused qkv, group-major")
    if module.multi_query:
        return fused(owner, heads=heads, kv_heads=1, head_dim=dim)
    return fused(owner, heads=heads, head_major=True)


@models("codegen.CodeGenAttention")
def codegen(module: Any) -> Site:
    """``qkv_proj`` in four blocks, each [q; v; k] of a quarter of the heads."""
    owner, heads, dim = module.qkv_proj, module.num_attention_heads, module.head_dim
    if heads % 4:
        raise UnsupportedAttentionError(f"CodeGen splits its heads by 4, there are {heads}")
    index = torch.arange(3 * heads * dim, device="cpu").view(4, 3, heads // 4, dim)
    q, v, k = index.reshape(4, 3, -1, dim).unbind(1)
    projections = (
        project("q", owner, q.reshape(heads, dim)),
        project("k", owner, k.reshape(heads, dim)),
        project("v", owner, v.reshape(heads, dim)),
    )
    return Site(projections, "fused qvk, in four blocks")


# GPT-2 and its children ------------------------------------------------------------------------


@models(
    "gpt2.GPT2Attention",
    "decision_transformer.DecisionTransformerGPT2Attention",
    "imagegpt.ImageGPTAttention",
)
def gpt2(module: Any) -> Site:
    """``c_attn`` (Conv1D) split by embed_dim; cross attention has ``q_attn`` and [k; v]."""
    heads = module.num_heads
    if module.is_cross_attention:
        return join(
            separate(module.q_attn, None, None, heads=heads),
            fused(module.c_attn, "kv", heads=heads),
            kind="cross",
        )
    return fused(module.c_attn, heads=heads)


@models("openai.Attention")
def openai_gpt(module: Any) -> Site:
    """``c_attn`` (Conv1D) split by n_embd."""
    return fused(module.c_attn, heads=module.n_head)


@models("gpt_bigcode.GPTBigCodeAttention")
def gpt_bigcode(module: Any) -> Site:
    """``c_attn`` as [q; k; v] with one key and value head, or head by head."""
    heads, dim = module.num_heads, module.head_dim
    if module.is_cross_attention:
        raise UnsupportedAttentionError(
            "the class splits its cross attention's key and value by head_dim, "
            "which fails for the weight it makes (twice embed_dim)"
        )
    if module.multi_query:
        return fused(module.c_attn, heads=heads, kv_heads=1, head_dim=dim)
    return fused(module.c_attn, heads=heads, head_major=True)
