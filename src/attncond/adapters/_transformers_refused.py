"""Classes of transformers that compute something other than softmax(Q KT) V with one weight a role.

A refusal here is a decision, not a gap: structural matching would accept some of these by their
names and be wrong. Classes that only look like attention are settled as none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from attncond.adapters import structural
from attncond.adapters._transformers_names import models
from attncond.adapters.structural import CONVOLVED, LATENT, RECURRENT
from attncond.errors import UnsupportedAttentionError
from attncond.sites import Site, separate

_DEFORMABLE = (
    "deformable attention: the weights of sampled points are predicted from the query, "
    "there are no keys"
)
_SUMMED = "queries and keys are sums or concatenations of a content and a position projection"
_BIDIRECTIONAL = "one product serves both directions: each modality's projection is Q here, K there"
_UNPROVEN = "approximated by a CUDA kernel; no forward pass to prove an adapter with"

REFUSED: dict[str, tuple[str, ...]] = {
    RECURRENT: (
        "bailing_hybrid.BailingHybridDeltaAttention",
        "glm5_next.Glm5NextTextLinearAttention",
        "kimi_linear.KimiLinearDeltaAttention",
        "olmo_hybrid.OlmoHybridGatedDeltaNet",
        "qwen3_5.Qwen3_5GatedDeltaNet",
        "qwen3_5_moe.Qwen3_5MoeGatedDeltaNet",
        "qwen3_next.Qwen3NextGatedDeltaNet",
        "qwen4_exp.Qwen4ExpTextGatedDeltaNet",
    ),
    LATENT: (
        "axk1.AXK1Attention",
        "axk2.AXK2Attention",
        "bailing_hybrid.BailingHybridAttention",
        "deepseek_v2.DeepseekV2Attention",
        "deepseek_v3.DeepseekV3Attention",
        "deepseek_v32.DeepseekV32Attention",
        "deepseek_v4.DeepseekV4Attention",
        "glm4_moe_lite.Glm4MoeLiteAttention",
        "glm5_next.Glm5NextTextAttention",
        "glm_moe_dsa.GlmMoeDsaAttention",
        "hy_v4.HYV4Attention",
        "kimi_linear.KimiLinearAttention",
        "longcat_flash.LongcatFlashMLA",
        "minicpm3.MiniCPM3Attention",
        "mistral4.Mistral4Attention",
        "mistral_large4.MistralLarge4TextAttention",
        "youtu.YoutuAttention",
    ),
    _DEFORMABLE: (
        "d_fine.DFineMultiscaleDeformableAttention",
        "deformable_detr.DeformableDetrMultiscaleDeformableAttention",
        "deimv2.Deimv2MultiscaleDeformableAttention",
        "grounding_dino.GroundingDinoMultiscaleDeformableAttention",
        "lw_detr.LwDetrMultiscaleDeformableAttention",
        "mask2former.Mask2FormerPixelDecoderEncoderMultiscaleDeformableAttention",
        "mm_grounding_dino.MMGroundingDinoMultiscaleDeformableAttention",
        "omdet_turbo.OmDetTurboMultiscaleDeformableAttention",
        "oneformer.OneFormerPixelDecoderEncoderMultiscaleDeformableAttention",
        "pp_doclayout_v2.PPDocLayoutV2MultiscaleDeformableAttention",
        "pp_doclayout_v3.PPDocLayoutV3MultiscaleDeformableAttention",
        "pp_doclayout_v4.PPDocLayoutV4MultiscaleDeformableAttention",
        "rf_detr.RfDetrMultiscaleDeformableAttention",
        "rt_detr.RTDetrMultiscaleDeformableAttention",
        "rt_detr_v2.RTDetrV2MultiscaleDeformableAttention",
    ),
    _SUMMED: (
        "conditional_detr.ConditionalDetrDecoderSelfAttention",
        "conditional_detr.ConditionalDetrDecoderCrossAttention",
        "dab_detr.DabDetrDecoderLayerSelfAttention",
        "dab_detr.DabDetrDecoderLayerCrossAttention",
    ),
    _BIDIRECTIONAL: (
        "grounding_dino.GroundingDinoBiMultiHeadAttention",
        "mm_grounding_dino.MMGroundingDinoBiMultiHeadAttention",
    ),
    "mLSTM: a gated recurrence, it has no attention matrix": ("xlstm.xLSTMLayer",),
    _UNPROVEN: ("mra.MraSelfAttention", "yoso.YosoSelfAttention"),
    "Q and K share one weight, and only K is normalised": ("reformer.LSHSelfAttention",),
    "Q, K and V are parameters of three axes (in, heads, head_dim), not matrices": (
        "xlnet.XLNetRelativeAttention",
    ),
    "differential attention: two products share Q and K, each with half of V": (
        "diffllama.DiffLlamaAttention",
    ),
    "tokens are assigned to groups: the softmax runs over queries and is then made hard": (
        "groupvit.GroupViTAssignAttention",
    ),
    "the query is a mixture of experts, one weight for each": ("jetmoe.JetMoeAttention",),
    CONVOLVED: ("zaya.ZayaAttention",),
    "lightning attention: an activation follows the projections, and there is no softmax": (
        "minimax.MiniMaxLightningAttention",
    ),
    "separable attention: the query has one channel, and there is no product of Q and K": (
        "mobilevitv2.MobileViTV2LinearSelfAttention",
    ),
    "additive attention: queries are pooled to one vector, there is no product of Q and K": (
        "swiftformer.SwiftFormerEfficientAdditiveAttention",
    ),
    "invariant point attention: logits also measure distances of points": (
        "esm.esmfold:EsmFoldInvariantPointAttention",
    ),
    "keys and values are concatenated from several projections, one for each modality": (
        "evolla.EvollaSequenceAlignerCrossAttention",
    ),
}

NO_ATTENTION = (
    "bros.BrosRelationExtractor",  # scores of pairs, a head of the model
    "pp_doclayout_v4.PPDocLayoutV4GlobalPointer",
)


def _refusal(reason: str) -> Callable[[Any], NoReturn]:
    def refuse(module: Any) -> NoReturn:
        raise UnsupportedAttentionError(reason)

    return refuse


@models(*NO_ATTENTION)
def no_attention(module: Any) -> Iterable[Site]:
    """An adapter for classes that are settled: there is no attention in them."""
    return ()


@models("luke.LukeSelfAttention")
def luke(module: Any) -> Site:
    """LUKE has four queries for one key and value where it is aware of entities."""
    if module.use_entity_aware_attention:
        raise UnsupportedAttentionError(
            "entity-aware attention: four queries share one key and value "
            "(supported with use_entity_aware_attention=False)"
        )
    heads = module.num_attention_heads
    return separate(module.query, module.key, module.value, heads=heads)


@models("zamba2.Zamba2Attention")
def zamba2(module: Any) -> Site | None:
    """Zamba 2 shares its attention between layers, which may each add an adapter of their own."""
    if module.config.use_shared_attention_adapter:
        raise UnsupportedAttentionError(
            "each layer that shares it adds a low-rank adapter of its own to Q, K and V "
            "(supported with use_shared_attention_adapter=False)"
        )
    return structural.match(module)


for _reason, _names in REFUSED.items():
    models(*_names)(_refusal(_reason))
