"""Adapters for torch.nn."""

from __future__ import annotations

from weakref import WeakSet

from torch import nn

from attncond.adapters import register
from attncond.sites import Kind, Site, fused, separate

# Packed weights look the same in self- and cross-attention; only the decoder layer around them
# knows. It is visited before its children and leaves word here instead of marking the model.
_CROSS: WeakSet[nn.Module] = WeakSet()


@register(nn.TransformerDecoderLayer)
def transformer_decoder_layer(module: nn.TransformerDecoderLayer) -> None:
    """No site of its own: it only tells which of its attentions reads the encoder.

    It leaves its insides unsettled, for one of them may have been exchanged for something unknown.
    """
    cross = module._modules.get("multihead_attn")
    if cross is not None:
        _CROSS.add(cross)


@register(nn.MultiheadAttention)
def multihead_attention(module: nn.MultiheadAttention) -> Site:
    """Packed (3·embed_dim, embed_dim) when K and V have the width of Q, three weights otherwise.

    ``bias_k``, ``bias_v`` and the zero token are appended after the projections, so they leave
    the rows alone.

    >>> multihead_attention(nn.MultiheadAttention(8, 2, kdim=6)).projections[1].in_features
    6
    """
    # in_proj_weight itself is no guide: parametrised, it is not where it used to be.
    if module._qkv_same_embed_dim:
        kind: Kind = "cross" if module in _CROSS else "self"
        return fused(module, "qkv", heads=module.num_heads, name="in_proj_weight", kind=kind)
    names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    return separate(module, module, module, heads=module.num_heads, names=names, kind="cross")
