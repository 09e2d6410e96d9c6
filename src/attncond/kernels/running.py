"""Causal attention less its gap: each row of the output less the mean of the values up to it.

The mean comes off the output that attention has just written, in place. Stock attention saves its
output for the backward pass, and the layer after it saves what it is given; to keep both would be
one more tensor in every layer. So only what is given on is kept, and the mean is put back before
the backward pass of attention, which then runs as it would have. With O = PV, U the causal
matrix that looks at all visible keys alike and G the gradient of O − UV:

    dQ and dK are those of attention alone,    dV = PᵀG − UᵀG,

where −UᵀG, a sum over later rows, is added to attention's own PᵀG in one pass.
``methods.gap.visible_mean`` is the formula without a kernel.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from attncond.kernels.layout import dense, empty_heads, strides

# Rows and channels at a time, warps, stages, and programs that share the rows of a head: among the
# best of benchmarks/head_tuning.py on an H200, which are within 1 µs of each other.
TILE = (8, 256, 1, 3, 16)

# cuDNN's attention is what torch prefers on the cards that kernels/__init__.py asks for.
_cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention.default
_cudnn_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default


@torch.compiler.assume_constant_result
def has_cudnn() -> bool:
    """Whether torch may use cuDNN's attention, which the causal kernels build on."""
    return bool(torch.backends.cuda.cudnn_sdp_enabled())


# The rows of a head go to PARTS programs, and the sum of what lies before (or after) each part is
# known to all of them from a pass before, over one of the two tensors and all parts but one. A warp
# is as wide as a tile of B rows: each thread has all B of its channels, and no sum leaves its
# registers.


@triton.jit
def _tile(x, row, channel, rows, stride):
    return tl.load(
        x + row[:, None] * stride + channel[None, :], mask=row[:, None] < rows, other=0.0
    )


@triton.jit
def _weight(row):
    """Of each key that a row sees."""
    return (1.0 / (row + 1).to(tl.float32))[:, None]


@triton.jit
def _place(heads, rows, number, B: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr,
           EACH: tl.constexpr):  # fmt: skip
    """Which item, head, channels and rows a program is for that has this number of the parts."""
    head = tl.program_id(0)
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    # Said to be contiguous for EACH only, or a thread would take more channels and fewer rows.
    channel = tl.program_id(1) * C + tl.max_contiguous(tl.arange(0, C), EACH)
    part = tl.cdiv(tl.cdiv(rows, B), PARTS) * B
    first = number * part
    return b, h, channel, first, min(first + part, tl.cdiv(rows, B) * B)


@triton.jit
def _sums_of(sums, b, h, heads, channel, C: tl.constexpr, PARTS: tl.constexpr):
    """Where the sums of all parts are: (PARTS, C) of the (items, PARTS, heads, channels)."""
    width = tl.num_programs(1) * C
    part = tl.arange(0, PARTS)
    return sums + ((b * PARTS + part[:, None]) * heads + h) * width + channel[None, :]


@triton.jit
def _sum_parts(x, sums, heads, rows, xb, xh, xn, B: tl.constexpr, C: tl.constexpr,
               PARTS: tl.constexpr, EACH: tl.constexpr, SHARES: tl.constexpr,
               STAGES: tl.constexpr):  # fmt: skip
    """The sum of x_i over the rows of each part but the last, or of x_i/i of each but the first."""
    number = tl.program_id(2) + (1 if SHARES else 0)
    b, h, channel, first, last = _place(heads, rows, number, B, C, PARTS, EACH)
    x += b * xb + h * xh
    total = tl.zeros([C], dtype=tl.float32)
    for start in tl.range(first, last, B, num_stages=STAGES):
        row = start + tl.arange(0, B)
        tile = _tile(x, row, channel, rows, xn).to(tl.float32)
        if SHARES:
            tile *= _weight(row)
        total += tl.sum(tile, 0)
    width = tl.num_programs(1) * C
    tl.store(sums + ((b * PARTS + number) * heads + h) * width + channel, total)


@triton.jit
def _add_mean(x, v, sums, out, heads, rows, xb, xh, xn, vb, vh, vn, rb, rh, rn,
              B: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr, EACH: tl.constexpr,
              SIGN: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """out_i = x_i ± (v_1 + ... + v_i)/i for some channels and rows of one head."""
    b, h, channel, first, last = _place(heads, rows, tl.program_id(2), B, C, PARTS, EACH)
    x += b * xb + h * xh
    v += b * vb + h * vh
    out += b * rb + h * rh
    earlier = tl.arange(0, PARTS)[:, None] < tl.program_id(2)
    all_sums = _sums_of(sums, b, h, heads, channel, C, PARTS)
    before = tl.sum(tl.load(all_sums, mask=earlier, other=0.0), 0)
    for start in tl.range(first, last, B, num_stages=STAGES):
        row = start + tl.arange(0, B)
        tile = _tile(v, row, channel, rows, vn).to(tl.float32)
        y = _tile(x, row, channel, rows, xn).to(tl.float32)
        y += SIGN * _weight(row) * (tl.cumsum(tile, 0) + before[None, :])
        before += tl.sum(tile, 0)
        tl.store(
            out + row[:, None] * rn + channel[None, :],
            y.to(out.dtype.element_ty),
            mask=row[:, None] < rows,
        )


@triton.jit
def _less_later(x, g, sums, out, heads, rows, xb, xh, xn, gb, gh, gn, rb, rh, rn,
                B: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr, EACH: tl.constexpr,
                STAGES: tl.constexpr):  # fmt: skip
    """out_j = x_j − (g_j/j + g_{j+1}/(j+1) + ...) for some channels and rows of one head."""
    b, h, channel, first, last = _place(heads, rows, tl.program_id(2), B, C, PARTS, EACH)
    x += b * xb + h * xh
    g += b * gb + h * gh
    out += b * rb + h * rh
    later = tl.arange(0, PARTS)[:, None] > tl.program_id(2)
    all_sums = _sums_of(sums, b, h, heads, channel, C, PARTS)
    rest = tl.sum(tl.load(all_sums, mask=later, other=0.0), 0)
    for back in tl.range(0, last - first, B, num_stages=STAGES):  # from the last row to the first
        row = last - B - back + tl.arange(0, B)
        share = _tile(g, row, channel, rows, gn).to(tl.float32) * _weight(row)
        y = _tile(x, row, channel, rows, xn).to(tl.float32)
        rest += tl.sum(share, 0)
        y -= rest[None, :] - tl.cumsum(share, 0) + share
        tl.store(
            out + row[:, None] * rn + channel[None, :],
            y.to(out.dtype.element_ty),
            mask=row[:, None] < rows,
        )


def _launch(kernel: Any, given: list[Tensor], sums: Tensor, **more: Any) -> None:
    """A kernel over all heads of ``given``, the last of which is what it writes, if not sums."""
    batch, heads, rows, channels = given[0].shape
    if all(t.stride(1) == channels for t in given):  # heads side by side are one wide head
        heads, channels = 1, heads * channels
    block, width, warps, stages, parts = TILE
    width = math.gcd(width, channels)
    options = {"B": block, "C": width, "PARTS": parts, "STAGES": stages, "num_warps": warps}
    options["EACH"] = max(1, width // (32 * warps))
    arguments = [*given[:2], sums, *given[2:]]
    programs = parts if len(given) > 1 else parts - 1
    wrap_triton(kernel)[(batch * heads, channels // width, programs)](
        *arguments, heads, rows, *strides(*given), **options, **more
    )


def _sums(x: Tensor, shares: bool) -> Tensor:
    """Of x_i, or of x_i/i, over the rows of each part: (items, parts, heads, channels)."""
    batch, heads, _, channels = x.shape
    sums = x.new_empty((batch, TILE[-1], heads, channels), dtype=torch.float32)
    _launch(_sum_parts, [x], sums, SHARES=shares)
    return sums


def _pass(kernel: Any, x: Tensor, other: Tensor, sums: Tensor, into: Tensor | None = None,
          **more: Any) -> Tensor:  # fmt: skip
    """One of the two kernels over all heads: x and what it says to add to it."""
    result = empty_heads(x) if into is None else into
    _launch(kernel, [x, other, result], sums, **more)
    return result


@triton_op("attncond::causal_attention", mutates_args={})
def _attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    found = _cudnn(query, key, value, None, True, 0.0, True, False, scale=scale)
    output, logsumexp, seed, offset = dense(found[0]), found[1], found[6], found[7]
    sums = _sums(value, shares=False)
    output = _pass(_add_mean, output, value, sums, into=output, SIGN=-1.0)
    return output, sums, logsumexp, seed, offset


@triton_op("attncond::causal_attention_backward", mutates_args={})
def _attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    logsumexp: Tensor,
    seed: Tensor,
    offset: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    shares = _sums(grad, shares=True)  # first, while what made it has left it in the cache
    output = _pass(_add_mean, out, value, sums, SIGN=1.0)
    dq, dk, dv = _cudnn_backward(
        *(grad, query, key, value, output, logsumexp, seed, offset),
        *(None, None, None, query.shape[2], key.shape[2], 0.0, True),
        scale=scale,
    )
    dv = dense(dv)
    return dq, dk, _pass(_less_later, dv, grad, shares, into=dv)


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
