"""Triton kernels that head_kernels.py compares with what the compiler makes; the library has none.

TRITON_INTERPRET=1 runs them on a CPU, which shows that they are right and says nothing of speed.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

_ROWS = 64


@triton.jit
def _centre(v, out, heads, keys, vb, vh, vn, ob, oh, on, ROWS: tl.constexpr, D: tl.constexpr):
    """One program a head: its mean over the keys, then the difference, the second read cached."""
    head = tl.program_id(0)
    batch, head = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    column = tl.arange(0, D)[None, :]
    v += batch * vb + head * vh
    out += batch * ob + head * oh
    total = tl.zeros([1, D], dtype=tl.float32)
    for start in range(0, keys, ROWS):
        row = (start + tl.arange(0, ROWS))[:, None]
        x = tl.load(v + row * vn + column, mask=row < keys, other=0.0).to(tl.float32)
        total += tl.sum(x, 0)[None, :]
    for start in range(0, keys, ROWS):
        row = (start + tl.arange(0, ROWS))[:, None]
        x = tl.load(v + row * vn + column, mask=row < keys, other=0.0).to(tl.float32)
        tl.store(out + row * on + column, (x - total / keys).to(out.dtype.element_ty), row < keys)


@triton.jit
def _less_running_mean(
    o, v, out, heads, keys, ob, oh, on, vb, vh, vn, rb, rh, rn, ROWS: tl.constexpr, D: tl.constexpr
):
    """One program a head: o minus the mean of v up to each row, the sum carried along."""
    head = tl.program_id(0)
    batch, head = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    column = tl.arange(0, D)[None, :]
    o += batch * ob + head * oh
    v += batch * vb + head * vh
    out += batch * rb + head * rh
    carry = tl.zeros([1, D], dtype=tl.float32)
    for start in range(0, keys, ROWS):
        row = (start + tl.arange(0, ROWS))[:, None]
        x = tl.load(v + row * vn + column, mask=row < keys, other=0.0).to(tl.float32)
        mean = (tl.cumsum(x, 0) + carry) / (row + 1).to(tl.float32)
        carry += tl.sum(x, 0)[None, :]
        y = tl.load(o + row * on + column, mask=row < keys, other=0.0).to(tl.float32) - mean
        tl.store(out + row * rn + column, y.to(out.dtype.element_ty), mask=row < keys)


@triton.jit
def _less_suffix_sum(
    g, out, heads, keys, gb, gh, gn, rb, rh, rn, ROWS: tl.constexpr, D: tl.constexpr
):
    """The adjoint for v: minus the sum of g/(row + 1) from each row on, blocks from the last."""
    head = tl.program_id(0)
    batch, head = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    column = tl.arange(0, D)[None, :]
    g += batch * gb + head * gh
    out += batch * rb + head * rh
    carry = tl.zeros([1, D], dtype=tl.float32)
    blocks = tl.cdiv(keys, ROWS)
    for block in range(0, blocks):
        row = ((blocks - 1 - block) * ROWS + tl.arange(0, ROWS))[:, None]
        x = tl.load(g + row * gn + column, mask=row < keys, other=0.0).to(tl.float32)
        x /= (row + 1).to(tl.float32)
        total = tl.sum(x, 0)[None, :]
        y = total - tl.cumsum(x, 0) + x + carry
        carry += total
        tl.store(out + row * rn + column, (-y).to(out.dtype.element_ty), mask=row < keys)


def _empty(like: Tensor) -> Tensor:
    """As the attention kernels lay it out: (batch, tokens, heads, channels), seen transposed."""
    batch, heads, keys, channels = like.shape
    return like.new_empty((batch, keys, heads, channels)).transpose(1, 2)


def _run(kernel: Any, out: Tensor, *inputs: Tensor) -> Tensor:
    batch, heads, keys, channels = out.shape
    strides = [s for t in (*inputs, out) for s in t.stride()[:3]]
    wrap_triton(kernel)[(batch * heads,)](
        *inputs, out, heads, keys, *strides, ROWS=_ROWS, D=channels
    )
    return out


@triton_op("attncond_benchmarks::centre", mutates_args={})
def centre(value: Tensor) -> Tensor:
    """Values without their mean over the keys; channels have to be a power of two."""
    return _run(_centre, _empty(value), value)


@triton_op("attncond_benchmarks::less_running_mean", mutates_args={})
def less_running_mean(output: Tensor, value: Tensor) -> Tensor:
    """Causal outputs minus the mean of the values that each query sees."""
    return _run(_less_running_mean, _empty(output), output, value)


@triton_op("attncond_benchmarks::less_suffix_sum", mutates_args={})
def less_suffix_sum(grad: Tensor) -> Tensor:
    """The gradient of :func:`less_running_mean` by its values."""
    return _run(_less_suffix_sum, _empty(grad), grad)


def _dense(grad: Tensor) -> Tensor:
    return grad if grad.stride(-1) == 1 else grad.contiguous()


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    return grad, less_suffix_sum(_dense(grad))


torch.library.register_autograd("attncond_benchmarks::centre", lambda _, g: centre(_dense(g)))
torch.library.register_autograd("attncond_benchmarks::less_running_mean", _backward)
