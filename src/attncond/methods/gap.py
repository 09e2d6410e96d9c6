"""Spectral-gap removal (arXiv:2410.07799): attention without its uniform part, P − 11ᵀ/T.

The rows of P sum to one, so that its largest singular value belongs (nearly) to the constant vector
and the others are far below: the gap that makes tokens alike from layer to layer. Subtracting the
uniform matrix U takes that direction out, (P − U)·1 = 0. Where a mask hides keys, each row of U is
uniform over the keys that this row sees; a plain 1/T would let a causal model look ahead.

No attention matrix is needed: (P − U)V = PV − (mean of V over the visible keys).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RemoveGap:
    """Subtract from each query's output the mean of the values it sees."""


def centre(value: Tensor, visible: Tensor | None = None) -> Tensor:
    """``value`` (..., keys, channels) without its mean over the keys, in its own dtype.

    ``visible`` (..., 1, keys) says over which of them, if not over all.

    >>> centre(torch.tensor([[1.0, 0.0], [3.0, 4.0]]))
    tensor([[-1., -2.],
            [ 1.,  2.]])
    >>> centre(torch.tensor([[1.0, 0.0], [3.0, 4.0]]), torch.tensor([[True, False]]))
    tensor([[0., 0.],
            [2., 4.]])
    """
    wide = torch.promote_types(value.dtype, torch.float32)
    if visible is None:
        mean = value.mean(-2, keepdim=True, dtype=wide)
    else:
        seen = visible.mT
        total = torch.where(seen, value, value.new_zeros(())).sum(-2, keepdim=True, dtype=wide)
        mean = total / seen.sum(-2, keepdim=True, dtype=wide).clamp_min(1)
    return (value - mean).to(value.dtype)


def uniform(visible: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """The attention matrix that looks at every visible key alike; a blind row is zero.

    >>> uniform(torch.tensor([[True, True], [True, False], [False, False]]), 1, torch.float32)
    tensor([[0.5000, 0.5000],
            [1.0000, 0.0000],
            [0.0000, 0.0000]])
    """
    count = visible.sum(dim, keepdim=True, dtype=torch.float32).clamp_min(1)
    wide = torch.promote_types(dtype, torch.float32)
    return torch.where(visible, (1 / count.to(wide)).to(dtype), 0)


def visible_mean(
    value: Tensor, queries: int, *, causal: bool = False, visible: Tensor | None = None
) -> Tensor:
    """The mean of ``value`` (..., heads, keys, channels) over the keys that each query sees.

    The result has one row where all queries see the same keys, ``queries`` rows otherwise, and at
    least float32, whatever the values have. ``visible`` is boolean and broadcasts to
    (..., heads, queries, keys); its head axis is 1 or that of ``value``.
    """
    wide = torch.promote_types(value.dtype, torch.float32)
    keys = value.shape[-2]
    if keys == 0:
        return value.new_zeros((*value.shape[:-2], 1, value.shape[-1]), dtype=wide)
    if visible is None and not causal:
        return value.mean(-2, keepdim=True, dtype=wide)
    if visible is None:
        count = torch.arange(1, keys + 1, device=value.device, dtype=wide)
        mean: Tensor = value.cumsum(-2, dtype=wide) / count[:, None]
        if queries > keys:  # the last queries see all keys
            mean = torch.cat(
                [mean, mean[..., -1:, :].expand(*mean.shape[:-2], queries - keys, -1)], -2
            )
        return mean[..., :queries, :]
    if causal:
        visible = visible & torch.ones(queries, keys, device=value.device, dtype=torch.bool).tril()
    count = visible.sum(-1, keepdim=True, dtype=wide).clamp_min(1)
    # A sum of many values overflows there, and their mean does not.
    if _product_dtype(value) == torch.float16:
        return _masked_sum(value, (visible / count).to(value.dtype)).to(wide)
    return _masked_sum(value, visible.to(value.dtype)) / count


def _product_dtype(value: Tensor) -> torch.dtype:
    """The dtype of a matrix product with ``value``, which autocast may lower."""
    device = value.device.type
    cast = value.dtype == torch.float32 and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if cast else value.dtype


def _masked_sum(value: Tensor, weights: Tensor) -> Tensor:
    """``weights`` (..., heads or 1, queries, keys) @ ``value``, without a copy of it per head."""
    if weights.ndim < 3 or value.ndim < 3 or weights.shape[-3] != 1 or value.shape[-3] == 1:
        return weights @ value
    heads, channels = value.shape[-3], value.shape[-1]
    flat = value.transpose(-3, -2).flatten(-2)  # (..., keys, heads * channels)
    total: Tensor = weights.squeeze(-3) @ flat
    split: Tensor = total.unflatten(-1, (heads, channels))
    return split.transpose(-3, -2)
