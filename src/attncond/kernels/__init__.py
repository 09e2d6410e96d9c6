"""Triton kernels for what the compiler makes slow of the head methods, and when to use them.

Everything here has a formula in plain torch that it agrees with, in :mod:`attncond.methods`; that
is what runs on CPUs, in float32, with masks and in exported programs.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from attncond.methods.precondition import Precondition

ENABLED = True  # False: plain torch everywhere

short: Any = None
running: Any = None


def load() -> None:
    """Import the kernels where there can be any; too slow (a second) for ``import attncond``.

    So would torch._dynamo be, which comes with the mark of a constant: those are there, too.
    """
    global short, running
    if short is None and torch.version.cuda is not None:
        try:
            short = importlib.import_module("attncond.kernels.short")
            running = importlib.import_module("attncond.kernels.running")
        except ImportError:  # no Triton
            short = running = None


_DTYPES = (torch.bfloat16, torch.float16)
_ANY_ROWS = Precondition()  # made here: its checks cannot be traced with dynamic shapes


def _suit(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Half precision on a recent card, as many heads of keys as of queries, dense channels."""
    return (
        ENABLED
        and short is not None
        and query.is_cuda
        and not isinstance(query, DTensor)
        and query.ndim == 4
        and query.dtype in _DTYPES
        and query.dtype == key.dtype == value.dtype
        and query.shape[:2] == key.shape[:2] == value.shape[:2]
        and query.shape[-1] == key.shape[-1] == value.shape[-1]
        and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
        and not torch.compiler._is_exporting_flag  # is_exporting() is True in every compilation
        and short.is_hopper(query.device.index)
    )


def suit_short(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether :func:`short_attention` can take the place of attention without mask or dropout."""
    return (
        _suit(query, key, value)
        and query.shape[-1] in (16, 32, 64)
        and 1 <= query.shape[-2] <= short.LONGEST
        and 2 <= key.shape[-2] <= short.LONGEST
    )


def short_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    gap: bool,
    precondition: Precondition | None,
) -> Tensor:
    """Attention, with the gap removed and the rows equilibrated where that is asked for."""
    rows = _ANY_ROWS if precondition is None else precondition
    result: Tensor = short.attend(
        *(query, key, value),
        **{"scale": scale, "gap": gap, "rows": precondition is not None},
        **{"fixed": rows.detach, "eps": rows.eps},
    )
    return result


def suit_causal(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether :func:`causal_attention` can take the place of causal attention without dropout."""
    return (
        _suit(query, key, value)
        and query.shape[-1] in (16, 32, 64, 128)
        and query.shape[-2] == key.shape[-2] > 1
        and running.has_cudnn()
    )


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Causal attention with the gap removed."""
    result: Tensor = running.attend(query, key, value, scale=scale)
    return result
