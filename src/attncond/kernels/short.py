"""Attention over up to 256 keys with the gap and the rows' lengths dealt with on the way.

A head that short fits into one multiprocessor. The forward pass takes the mean off and divides the
rows before they are written; the backward pass, one program for each head, starts from what is
written and needs no sums from elsewhere. So neither method costs a pass over memory of its own, and
nothing is saved that stock attention does not save as well. The formulas without a kernel, which
these agree with, are ``methods.gap.centre`` and ``Precondition.equilibrate``.

With P = softmax(QKᵀ·scale), U = 11ᵀ/keys, A = (P − U)V (or PV) and R = diag(r)A, r_i = 1/‖A_i‖:

    dA = diag(r)(G − (G·R)R),  dV = (P − U)ᵀ dA,  dS = P ∘ (dA Vᵀ − rowsum(dA ∘ PV)),

where the last sum is dA·(A + mean of V), and dA·A = 0 unless r was a constant.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from attncond.kernels.layout import dense, empty_heads, strides

LONGEST = 256
# The fastest on an H200 (benchmarks/head_tuning.py).
FORWARD = (64, 64, 4, 3)  # queries and keys at a time, warps, stages
BACKWARD = (64, 8, 2)  # keys at a time, warps, stages
_LOG2E = tl.constexpr(1.4426950408889634)


@torch.compiler.assume_constant_result
def is_hopper(index: int | None) -> bool:
    """The kernels were made for, and measured on, multiprocessors with that much memory."""
    if not torch.cuda.is_available():  # of tensors that are fake
        return False
    # The consumer's cards after these (12) have 99 KiB, and the backward pass asks for more.
    return torch.cuda.get_device_capability(index)[0] in (9, 10)


# Numbers such as the scale are constants of the kernels: the compiler hands floats on as float64.


@triton.jit
def _tile(start, row, column, stride, length, TAIL: tl.constexpr):
    """Some rows of a matrix; if they may lie beyond its length (TAIL), zeros there."""
    at = start + row[:, None] * stride + column[None, :]
    if TAIL:
        return tl.load(at, mask=row[:, None] < length, other=0.0)
    return tl.load(at)


@triton.jit
def _attend_block(tq, k, v, top, total, a, key, channel, kn, vn, keys,
                  SCALE: tl.constexpr, TAIL: tl.constexpr):  # fmt: skip
    """Add some keys to the sums of a softmax; only the last block has to look where they end."""
    tk = _tile(k, key, channel, kn, keys, TAIL)
    s = tl.dot(tq, tl.trans(tk)) * (SCALE * _LOG2E)
    if TAIL:
        s = tl.where(key[None, :] < keys, s, -float("inf"))
    higher = tl.maximum(top, tl.max(s, 1))
    fade = tl.exp2(top - higher)
    tv = _tile(v, key, channel, vn, keys, TAIL)
    p = tl.exp2(s - higher[:, None]).to(tv.dtype)
    # The sum of the rounded weights: they add up to one, so that a mean comes off exactly.
    total = total * fade + tl.sum(p.to(tl.float32), 1)
    return higher, total, tl.dot(p, tv, a * fade[:, None])


@triton.jit
def _forward(
    q, k, v, mean, out, norm, ratio, heads, queries, keys,
    qb, qh, qn, kb, kh, kn, vb, vh, vn, ob, oh, on,
    M: tl.constexpr, N: tl.constexpr, T: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr,
    GAP: tl.constexpr, ROWS: tl.constexpr, FIXED: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """M queries of one head, N keys at a time and T for the rest.

    ``norm`` gets log₂ of the softmax's sums, ``ratio`` the r_i.
    """
    head = tl.program_id(1)
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    query = tl.program_id(0) * M + tl.arange(0, M)
    channel = tl.arange(0, D)
    k += b * kb + h * kh
    v += b * vb + h * vh
    tq = _tile(q + b * qb + h * qh, query, channel, qn, queries, True)
    top = tl.full([M], -float("inf"), dtype=tl.float32)
    total = tl.zeros([M], dtype=tl.float32)
    a = tl.zeros([M, D], dtype=tl.float32)
    whole = keys // N * N
    for start in range(0, whole, N):
        key = start + tl.arange(0, N)
        top, total, a = _attend_block(
            tq, k, v, top, total, a, key, channel, kn, vn, keys, SCALE, False
        )
    if T > 0:
        key = whole + tl.arange(0, T)
        top, total, a = _attend_block(
            tq, k, v, top, total, a, key, channel, kn, vn, keys, SCALE, True
        )
    a /= total[:, None]
    if GAP:
        a -= tl.load(mean + head * D + channel)[None, :]
    if ROWS:
        square = tl.sum(a * a, 1)
        r = tl.where(square == 0.0, 1.0, tl.rsqrt(tl.maximum(square, LEAST)))
        a *= r[:, None]
        if FIXED:
            r = -r
        else:  # a negative sign: constant in the backward pass
            r = tl.where(square < LEAST, -r, r)
        tl.store(ratio + head * queries + query, r, mask=query < queries)
    tl.store(norm + head * queries + query, top + tl.log2(total), mask=query < queries)
    at = out + b * ob + h * oh + query[:, None] * on + channel[None, :]
    tl.store(at, a.to(out.dtype.element_ty), mask=query[:, None] < queries)


@triton.jit
def _backward_block(
    tq, g, n, along, sum_q, k, v, dk, dv, key, channel, kn, vn, dkn, dvn, keys,
    SCALE: tl.constexpr, TAIL: tl.constexpr, GAP: tl.constexpr,
):  # fmt: skip
    """Write dK and dV of some keys and add what they give to dQ."""
    tk = _tile(k, key, channel, kn, keys, TAIL)
    tv = _tile(v, key, channel, vn, keys, TAIL)
    p = tl.exp2(tl.dot(tq, tl.trans(tk)) * (SCALE * _LOG2E) - n[:, None])
    if TAIL:
        p = tl.where(key[None, :] < keys, p, 0.0)
    ds = (p * (tl.dot(g, tl.trans(tv)) - along[:, None])).to(tq.dtype)
    if GAP:
        p -= 1.0 / keys
    tdv = tl.dot(tl.trans(p.to(g.dtype)), g)
    sum_q = tl.dot(ds, tk, sum_q)
    tdk = tl.dot(tl.trans(ds), tq) * SCALE
    dk += key[:, None] * dkn + channel[None, :]
    dv += key[:, None] * dvn + channel[None, :]
    if TAIL:
        tl.store(dk, tdk.to(dk.dtype.element_ty), mask=key[:, None] < keys)
        tl.store(dv, tdv.to(dv.dtype.element_ty), mask=key[:, None] < keys)
    else:
        tl.store(dk, tdk.to(dk.dtype.element_ty))
        tl.store(dv, tdv.to(dv.dtype.element_ty))
    return sum_q


@triton.jit
def _backward(
    grad, q, k, v, mean, out, norm, ratio, dq, dk, dv, heads, queries, keys,
    gb, gh, gn, qb, qh, qn, kb, kh, kn, vb, vh, vn, ob, oh, on,
    dqb, dqh, dqn, dkb, dkh, dkn, dvb, dvh, dvn,
    M: tl.constexpr, N: tl.constexpr, T: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr,
    GAP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One head: all its queries (M) stay, N keys at a time and T for the rest."""
    head = tl.program_id(0)
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    query, channel = tl.arange(0, M), tl.arange(0, D)
    tq = _tile(q + b * qb + h * qh, query, channel, qn, queries, True)
    g = _tile(grad + b * gb + h * gh, query, channel, gn, queries, True)
    wide = g.to(tl.float32)
    a = _tile(out + b * ob + h * oh, query, channel, on, queries, True).to(tl.float32)
    # Beyond the last query the weights come out as exp2(-inf).
    n = tl.load(norm + head * queries + query, mask=query < queries, other=float("inf"))
    if ROWS:
        # dA is at right angles to A, except where r is a constant.
        r = tl.load(ratio + head * queries + query, mask=query < queries, other=1.0)
        along = tl.sum(wide * a, 1)
        wide = (wide - tl.where(r < 0.0, 0.0, along)[:, None] * a) * tl.abs(r)[:, None]
        along = tl.where(r < 0.0, along, 0.0)
        g = wide.to(g.dtype)
        # Of the rounded dA, for that is what meets V below; a mean that V has would show otherwise.
        rounded = g.to(tl.float32)
        along += tl.sum((rounded - wide) * a, 1) / tl.abs(r)
        if GAP:
            along += tl.sum(rounded * tl.load(mean + head * D + channel)[None, :], 1)
    else:
        if GAP:  # the output before the mean came off it
            a += tl.load(mean + head * D + channel)[None, :]
        along = tl.sum(wide * a, 1)
    sum_q = tl.zeros([M, D], dtype=tl.float32)
    k += b * kb + h * kh
    v += b * vb + h * vh
    dk += b * dkb + h * dkh
    dv += b * dvb + h * dvh
    whole = keys // N * N
    for start in range(0, whole, N):
        key = start + tl.arange(0, N)
        sum_q = _backward_block(
            tq, g, n, along, sum_q, k, v, dk, dv, key, channel, kn, vn, dkn, dvn, keys, SCALE,
            False, GAP,
        )  # fmt: skip
    if T > 0:
        key = whole + tl.arange(0, T)
        sum_q = _backward_block(
            tq, g, n, along, sum_q, k, v, dk, dv, key, channel, kn, vn, dkn, dvn, keys, SCALE,
            True, GAP,
        )  # fmt: skip
    at = dq + b * dqb + h * dqh + query[:, None] * dqn + channel[None, :]
    tl.store(at, (sum_q * SCALE).to(dq.dtype.element_ty), mask=query[:, None] < queries)


def _tail(keys: int | torch.SymInt, block: int) -> int:
    """The smallest tile for the keys that whole blocks leave over."""
    if isinstance(keys, torch.SymInt):  # any number of them
        return block
    return max(16, triton.next_power_of_2(keys % block)) if keys % block else 0


def _resident(queries: int | torch.SymInt) -> int:
    """A tile for all queries."""
    return (
        LONGEST if isinstance(queries, torch.SymInt) else max(64, triton.next_power_of_2(queries))
    )


@triton_op("attncond::short_attention", mutates_args={})
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mean: Tensor,
    scale: float,
    gap: bool,
    rows: bool,
    fixed: bool,
    least: float,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, queries, channels = query.shape
    keys = key.shape[2]
    out = empty_heads(query)
    norm = query.new_empty((batch, heads, queries), dtype=torch.float32)
    ratio = query.new_empty((batch, heads, queries if rows else 0), dtype=torch.float32)
    m, n, warps, stages = FORWARD
    wrap_triton(_forward)[(triton.cdiv(queries, m), batch * heads)](
        *(query, key, value, mean, out, norm, ratio, heads, queries, keys),
        *strides(query, key, value, out),
        **{"M": m, "N": n, "T": _tail(keys, n), "D": channels, "SCALE": scale},
        **{"GAP": gap, "ROWS": rows, "FIXED": fixed, "LEAST": least},
        **{"num_warps": warps, "num_stages": stages},
    )
    return out, norm, ratio


@triton_op("attncond::short_attention_backward", mutates_args={})
def _attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mean: Tensor,
    out: Tensor,
    norm: Tensor,
    ratio: Tensor,
    scale: float,
    gap: bool,
    rows: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, queries, channels = query.shape
    keys = key.shape[2]
    dq, dk, dv = empty_heads(query), empty_heads(key), empty_heads(value)
    n, warps, stages = BACKWARD
    wrap_triton(_backward)[(batch * heads,)](
        *(grad, query, key, value, mean, out, norm, ratio, dq, dk, dv),
        *(heads, queries, keys),
        *strides(grad, query, key, value, out, dq, dk, dv),
        **{"M": _resident(queries), "N": n, "T": _tail(keys, n), "D": channels, "SCALE": scale},
        **{"GAP": gap, "ROWS": rows, "num_warps": warps, "num_stages": stages},
    )
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, mean, scale, gap, rows, _, _ = inputs
    ctx.save_for_backward(query, key, value, mean, *output)
    ctx.options = scale, gap, rows
    ctx.mark_non_differentiable(*output[1:])


def _differentiate(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    grads = _attend_backward(dense(grad), *ctx.saved_tensors, *ctx.options)
    return (*grads, None, None, None, None, None, None)


torch.library.register_autograd("attncond::short_attention", _differentiate, setup_context=_save)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    gap: bool = False,
    rows: bool = False,
    fixed: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """softmax(QKᵀ·scale)V for (batch, heads, tokens, channels), conditioned on the way.

    ``gap``: without the uniform part. ``rows``: divided by their lengths, which the backward pass
    takes for constants if ``fixed``; ``eps`` as in :class:`attncond.Precondition`.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    # Detached: the kernels know what of the gradient goes through it.
    mean = value.detach().mean(-2, dtype=torch.float32) if gap else value.new_empty(0)
    result: Tensor = _attend(query, key, value, mean, scale, gap, rows, fixed, eps**2)[0]
    return result
