"""Causal attention less its gap: each row of the output less the mean of the values up to it.

The mean comes off in one pass over the output that attention has just written. Stock attention
saves its output for the backward pass, and the layer after it saves what it is given; to keep both
would be one more tensor in every layer. So only what is given on is kept, and the mean is put back
before the backward pass of attention, which then runs as it would have. With O = PV, U the causal
matrix that looks at all visible keys alike and G the gradient of O − UV:

    dQ and dK are those of attention alone,    dV = PᵀG − UᵀG,

where −UᵀG, a sum over later rows, is added to attention's own PᵀG in one pass.
``methods.gap.visible_mean`` is the formula without a kernel.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from attncond.kernels.layout import dense, empty_heads, strides

# Rows and channels at a time, warps, stages, and programs that share the rows of a head: the
# fastest on an H200 (benchmarks/head_tuning.py).
TILE = (64, 32, 4, 3, 1)

# cuDNN's attention is what torch prefers on the cards that kernels/__init__.py asks for.
_cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention.default
_cudnn_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default


# Sums over rows are products with ones, which are exact in half precision: a scan takes longer than
# to load and store. Each program sums the rows before (or after) its own once more, as others write
# nothing that it could wait for.


@triton.jit
def _tile(x, row, channel, rows, stride):
    return tl.load(
        x + row[:, None] * stride + channel[None, :], mask=row[:, None] < rows, other=0.0
    )


@triton.jit
def _add_mean(x, v, out, heads, rows, xb, xh, xn, vb, vh, vn, rb, rh, rn,
              B: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr,
              SIGN: tl.constexpr):  # fmt: skip
    """out_i = x_i ± (v_1 + ... + v_i)/i for some channels of one head, B rows at a time."""
    head = tl.program_id(0)
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    x += b * xb + h * xh
    v += b * vb + h * vh
    out += b * rb + h * rh
    part = tl.cdiv(tl.cdiv(rows, B), PARTS) * B
    first = tl.program_id(2) * part
    local = tl.arange(0, B)
    ones = tl.full([B, B], 1.0, v.dtype.element_ty)
    until = (local[:, None] >= local[None, :]).to(v.dtype.element_ty)
    before = tl.zeros([B, C], dtype=tl.float32)  # the same in all rows
    for start in range(0, first, B):
        tile = _tile(v, start + local, channel, rows, vn)
        before = tl.dot(ones, tile, before, input_precision="ieee")
    for start in range(first, min(first + part, rows), B):
        row = start + local
        tile = _tile(v, row, channel, rows, vn)
        mean = tl.dot(until, tile, before, input_precision="ieee")
        mean /= (row + 1).to(tl.float32)[:, None]
        before = tl.dot(ones, tile, before, input_precision="ieee")
        y = _tile(x, row, channel, rows, xn).to(tl.float32) + SIGN * mean
        tl.store(
            out + row[:, None] * rn + channel[None, :],
            y.to(out.dtype.element_ty),
            mask=row[:, None] < rows,
        )


@triton.jit
def _shares(g, start, channel, rows, stride, B: tl.constexpr):
    """g_i·start/i of B rows: weights beside one, so that half precision holds the products."""
    row = start + tl.arange(0, B)
    weight = (start + 1.0) / (row + 1).to(tl.float32)
    tile = _tile(g, row, channel, rows, stride)
    return (tile.to(tl.float32) * weight[:, None]).to(tile.dtype)


@triton.jit
def _less_later(x, g, out, heads, rows, xb, xh, xn, gb, gh, gn, rb, rh, rn,
                B: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """out_j = x_j − (g_j/j + g_{j+1}/(j+1) + ...), from the last rows to the first."""
    head = tl.program_id(0)
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    x += b * xb + h * xh
    g += b * gb + h * gh
    out += b * rb + h * rh
    part = tl.cdiv(tl.cdiv(rows, B), PARTS) * B
    first = tl.program_id(2) * part
    last = min(first + part, tl.cdiv(rows, B) * B)
    local = tl.arange(0, B)
    ones = tl.full([B, B], 1.0, g.dtype.element_ty)
    since = (local[:, None] <= local[None, :]).to(g.dtype.element_ty)
    after = tl.zeros([B, C], dtype=tl.float32)
    for start in range(last, rows, B):
        tile = _shares(g, start, channel, rows, gn, B)
        after += tl.dot(ones, tile, input_precision="ieee") / (start + 1.0)
    for step in range(first, last, B):
        start = first + last - B - step
        row = start + local
        tile = _shares(g, start, channel, rows, gn, B)
        later = tl.dot(since, tile, input_precision="ieee") / (start + 1.0) + after
        after += tl.dot(ones, tile, input_precision="ieee") / (start + 1.0)
        y = _tile(x, row, channel, rows, xn).to(tl.float32) - later
        tl.store(
            out + row[:, None] * rn + channel[None, :],
            y.to(out.dtype.element_ty),
            mask=row[:, None] < rows,
        )


def _pass(kernel: Any, x: Tensor, other: Tensor, into: Tensor | None = None, **more: Any) -> Tensor:
    """One of the two kernels over all heads: x and what it says to add to it."""
    batch, heads, rows, channels = x.shape
    result = empty_heads(x) if into is None else into
    block, width, warps, stages, parts = TILE
    width = min(width, channels)
    options = {"B": block, "C": width, "PARTS": parts, "num_warps": warps, "num_stages": stages}
    wrap_triton(kernel)[(batch * heads, channels // width, parts)](
        *(x, other, result, heads, rows, *strides(x, other, result)), **options, **more
    )
    return result


@triton_op("attncond::causal_attention", mutates_args={})
def _attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    found = _cudnn(query, key, value, None, True, 0.0, True, False, scale=scale)
    output, logsumexp, seed, offset = dense(found[0]), found[1], found[6], found[7]
    return _pass(_add_mean, output, value, into=output, SIGN=-1.0), logsumexp, seed, offset


@triton_op("attncond::causal_attention_backward", mutates_args={})
def _attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    seed: Tensor,
    offset: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    output = _pass(_add_mean, out, value, SIGN=1.0)
    dq, dk, dv = _cudnn_backward(
        *(grad, query, key, value, output, logsumexp, seed, offset),
        *(None, None, None, query.shape[2], key.shape[2], 0.0, True),
        scale=scale,
    )
    dv = dense(dv)
    return dq, dk, _pass(_less_later, dv, grad, into=dv)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    return (*_attend_backward(dense(grad), *ctx.saved_tensors, ctx.scale), None)


torch.library.register_autograd("attncond::causal_attention", _differentiate, setup_context=_save)


def attend(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None = None) -> Tensor:
    """Causal softmax(QKᵀ·scale)V less the mean of the values that each query sees.

    For (batch, heads, tokens, channels) with as many queries as keys.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    result: Tensor = _attend(query, key, value, scale)[0]
    return result
