"""How attention kernels lay out heads in memory."""

from __future__ import annotations

from torch import Tensor


def empty_heads(like: Tensor) -> Tensor:
    """(batch, heads, tokens, channels) that lies as (batch, tokens, heads, channels)."""
    batch, heads, tokens, channels = like.shape
    return like.new_empty((batch, tokens, heads, channels)).transpose(1, 2)


def strides(*tensors: Tensor) -> list[int]:
    """The strides of all axes but the channels, which have to be dense."""
    return [s for t in tensors for s in t.stride()[:3]]


def dense(tensor: Tensor) -> Tensor:
    """The tensor, laid out anew if its channels do not lie side by side."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
