"""CUDA kernels in Triton, for what the compiler leaves on the table. Each has a plain reference.

``centre`` takes the mean over the keys out of the values. The plain form, compiled, is two kernels
that lay the result out anew; this one reads a slab of one sequence twice, the second time from the
cache, and writes it where the attention kernels want it. Centring is its own adjoint, so that the
backward pass is the same kernel.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

_ROWS, _COLUMNS = 64, 128
_LONGEST = 4096  # keys; beyond, one program a slab leaves the card idle


def can_centre(value: Tensor) -> bool:
    """Whether the kernel takes these values (batch, heads, keys, channels)."""
    return (
        value.ndim == 4
        and value.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and 0 < value.shape[2] <= _LONGEST
        and value.numel() > 0
        and value.stride(3) == 1
        and _compiled() is not None
    )


def centre(value: Tensor) -> Tensor:
    """``value`` minus its mean over the keys; :func:`attncond.methods.gap.centre` says the same."""
    result: Tensor = _compiled()(value)
    return result


@functools.cache
def _compiled() -> Any:
    """The operator, or None where there is no Triton."""
    try:
        import triton
        import triton.language as tl
    except ImportError:
        return None
    from torch.library import triton_op, wrap_triton

    @triton.jit  # type: ignore[untyped-decorator]
    def slab(  # type: ignore[no-untyped-def]
        value,
        out,
        heads,
        keys,
        channels,
        batch_stride,
        head_stride,
        key_stride,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
    ):
        batch = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < heads * channels
        source = batch * batch_stride + (column // channels) * head_stride + column % channels
        total = tl.zeros([COLUMNS], dtype=tl.float32)
        for start in range(0, keys, ROWS):
            row = start + tl.arange(0, ROWS)
            ok = (row < keys)[:, None] & inside[None, :]
            at = row[:, None].to(tl.int64) * key_stride + source[None, :]
            total += tl.sum(tl.load(value + at, mask=ok, other=0.0).to(tl.float32), 0)
        mean = total / keys
        for start in range(0, keys, ROWS):
            row = start + tl.arange(0, ROWS)
            ok = (row < keys)[:, None] & inside[None, :]
            at = row[:, None].to(tl.int64) * key_stride + source[None, :]
            centred = tl.load(value + at, mask=ok, other=0.0).to(tl.float32) - mean[None, :]
            to = (batch * keys + row[:, None]) * heads * channels + column[None, :]
            tl.store(out + to, centred.to(out.dtype.element_ty), mask=ok)

    @triton_op("attncond::centre", mutates_args={})
    def operator(value: Tensor) -> Tensor:
        batch, heads, keys, channels = value.shape
        out = torch.empty((batch, keys, heads, channels), dtype=value.dtype, device=value.device)
        grid = (batch, triton.cdiv(heads * channels, _COLUMNS))
        wrap_triton(slab)[grid](
            value,
            out,
            heads,
            keys,
            channels,
            *value.stride()[:3],
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
        )
        return out.transpose(1, 2)

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        result: Tensor = operator(grad if grad.stride(3) == 1 else grad.contiguous())
        return result

    operator.register_autograd(backward)
    return operator
