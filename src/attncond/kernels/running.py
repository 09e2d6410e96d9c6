"""Causal attention's gap: outputs less the mean of the values up to their own row.

The mean up to row i needs a running sum over all rows before. Two kernels share it: one adds up
blocks of rows, all at the same time; the other takes the blocks before its own from there and only
has to run through its own. ``methods.gap.visible_mean`` is the formula without a kernel.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from attncond.kernels.layout import dense, empty_heads, strides

# rows at a time and warps; the fastest on an H200 (benchmarks/head_tuning.py)
BLOCK, WARPS = 64, 2


@triton.jit
def _totals(x, total, heads, rows, blocks, xb, xh, xn,
            B: tl.constexpr, D: tl.constexpr, WEIGHTED: tl.constexpr):  # fmt: skip
    """The sum of one block of rows, each divided by its number first if WEIGHTED."""
    block, head = tl.program_id(0), tl.program_id(1)
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    row, channel = block * B + tl.arange(0, B), tl.arange(0, D)
    at = x + b * xb + h * xh + row[:, None] * xn + channel[None, :]
    tile = tl.load(at, mask=row[:, None] < rows, other=0.0).to(tl.float32)
    if WEIGHTED:
        tile /= (row + 1).to(tl.float32)[:, None]
    tl.store(total + (head * blocks + block) * D + channel, tl.sum(tile, 0))


@triton.jit
def _less_mean(o, v, total, out, heads, rows, blocks, ob, oh, on, vb, vh, vn, rb, rh, rn,
               B: tl.constexpr, C: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """out_i = o_i − (v_1 + ... + v_i)/i for one block."""
    block, head = tl.program_id(0), tl.program_id(1)
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    row, channel, other = block * B + tl.arange(0, B), tl.arange(0, D), tl.arange(0, C)
    inside = row[:, None] < rows
    before = tl.load(
        total + (head * blocks + other[:, None]) * D + channel[None, :],
        mask=other[:, None] < block, other=0.0,
    )  # fmt: skip
    at = v + b * vb + h * vh + row[:, None] * vn + channel[None, :]
    run = tl.cumsum(tl.load(at, mask=inside, other=0.0).to(tl.float32), 0)
    mean = (run + tl.sum(before, 0)[None, :]) / (row + 1).to(tl.float32)[:, None]
    at = o + b * ob + h * oh + row[:, None] * on + channel[None, :]
    tile = tl.load(at, mask=inside, other=0.0).to(tl.float32) - mean
    at = out + b * rb + h * rh + row[:, None] * rn + channel[None, :]
    tl.store(at, tile.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _suffix(g, total, out, heads, rows, blocks, gb, gh, gn, rb, rh, rn,
            B: tl.constexpr, C: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """out_j = −(g_j/j + g_{j+1}/(j+1) + ...), the adjoint for v, for one block."""
    block, head = tl.program_id(0), tl.program_id(1)
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    row, channel, other = block * B + tl.arange(0, B), tl.arange(0, D), tl.arange(0, C)
    inside = row[:, None] < rows
    after = tl.load(
        total + (head * blocks + other[:, None]) * D + channel[None, :],
        mask=(other[:, None] > block) & (other[:, None] < blocks), other=0.0,
    )  # fmt: skip
    at = g + b * gb + h * gh + row[:, None] * gn + channel[None, :]
    tile = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tile /= (row + 1).to(tl.float32)[:, None]
    run = tl.sum(tile, 0)[None, :] - tl.cumsum(tile, 0) + tile + tl.sum(after, 0)[None, :]
    at = out + b * rb + h * rh + row[:, None] * rn + channel[None, :]
    tl.store(at, (-run).to(out.dtype.element_ty), mask=inside)


def _sums(x: Tensor, weighted: bool) -> Tensor:
    batch, heads, rows, channels = x.shape
    blocks = triton.cdiv(rows, BLOCK)
    total = x.new_empty((batch, heads, blocks, channels), dtype=torch.float32)
    wrap_triton(_totals)[(blocks, batch * heads)](
        *(x, total, heads, rows, blocks, *strides(x)),
        **{"B": BLOCK, "D": channels, "WEIGHTED": weighted, "num_warps": WARPS},
    )
    return total


@triton_op("attncond::less_running_mean", mutates_args={})
def _less(output: Tensor, value: Tensor) -> Tensor:
    batch, heads, rows, channels = output.shape
    total, result = _sums(value, False), empty_heads(output)
    wrap_triton(_less_mean)[(total.shape[2], batch * heads)](
        *(
            output,
            value,
            total,
            result,
            heads,
            rows,
            total.shape[2],
            *strides(output, value, result),
        ),
        **{"B": BLOCK, "C": triton.next_power_of_2(total.shape[2]), "D": channels},
        num_warps=WARPS,
    )
    return result


@triton_op("attncond::less_running_mean_backward", mutates_args={})
def _less_backward(grad: Tensor) -> Tensor:
    batch, heads, rows, channels = grad.shape
    total, result = _sums(grad, True), empty_heads(grad)
    wrap_triton(_suffix)[(total.shape[2], batch * heads)](
        *(grad, total, result, heads, rows, total.shape[2], *strides(grad, result)),
        **{"B": BLOCK, "C": triton.next_power_of_2(total.shape[2]), "D": channels},
        num_warps=WARPS,
    )
    return result


def _differentiate(_: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    return grad, _less_backward(dense(grad))


torch.library.register_autograd("attncond::less_running_mean", _differentiate)


def less_running_mean(output: Tensor, value: Tensor) -> Tensor:
    """``output`` less the mean of ``value`` up to each row; (batch, heads, tokens, channels)."""
    result: Tensor = _less(output, value)
    return result
