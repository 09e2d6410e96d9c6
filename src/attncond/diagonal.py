"""Where each row of a weight carries λ, as bytes that survive what is done to buffers."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["decode", "encode", "with_code"]

_DIGITS = 5


def encode(columns: Tensor) -> Tensor:
    """Where each row carries λ, or -1, as bytes (rows, 5) that survive being averaged.

    Averages of models average buffers, too, and of equal whole numbers may make the one below:
    0.9·7 + 0.1·7 is 6.9999995 in float32. So each hexadecimal digit is the middle of 16 numbers.

    >>> encode(torch.tensor([-1, 0, 20]))
    tensor([[ 8,  8,  8,  8,  8],
            [24,  8,  8,  8,  8],
            [88, 24,  8,  8,  8]], dtype=torch.uint8)
    """
    return ((((columns[:, None] + 1) >> _bits(columns)) % 16 << 4) + 8).to(torch.uint8)


def decode(code: Tensor) -> Tensor:
    """Undo :func:`encode`."""
    return (code >> 4 << _bits(code)).sum(1) - 1


def with_code(key: str, value: Tensor) -> Tensor:
    """A tensor of a checkpoint; those written before there was a code have plain columns."""
    return encode(value) if key.endswith("_diagonal") and value.ndim == 1 else value


def _bits(like: Tensor) -> Tensor:
    return torch.arange(0, 4 * _DIGITS, 4, device=like.device)
