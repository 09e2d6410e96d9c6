"""What the kernels have to agree with, and by how much they do not.

Run as a script, with TRITON_INTERPRET=1, it prints the errors of every case on the CPU as JSON.
"""

from __future__ import annotations

import json
import math
import sys

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attncond.methods.gap import centre
from attncond.methods.precondition import Precondition

# batch, heads, queries, keys, channels
SHORT = [(2, 3, 37, 37, 16), (1, 2, 5, 70, 32), (1, 1, 130, 100, 64), (32, 2, 1, 3, 16)]
SHORT += [(1, 1, 64, 64, 32), (1, 1, 197, 197, 64), (1, 1, 256, 256, 16), (2, 1, 3, 129, 64)]
FORMS = [(gap, rows, fixed) for gap in (0, 1) for rows, fixed in ((0, 0), (1, 0), (1, 1))]
RUNNING = [(2, 3, 37, 16), (1, 2, 200, 32), (1, 1, 64, 64), (1, 1, 65, 128), (1, 1, 1, 16)]
PARTS = (2, 8)  # programs that share the rows of a head


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, gap: int, rows: int, fixed: int):
    """The definition: the attention matrix, the matrix that looks at all keys alike, the rows."""
    p = (q @ k.mT * scale).softmax(-1)
    a = (p - gap / k.shape[-2]) @ v
    if not rows:
        return a
    length = a.norm(dim=-1, keepdim=True)
    return a / (length.detach() if fixed else length)


def running_mean(o: Tensor, v: Tensor) -> Tensor:
    n = v.shape[-2]
    mean = torch.ones(n, n, dtype=v.dtype, device=v.device).tril() @ v
    return o - mean / torch.arange(1, n + 1, device=v.device)[:, None]


def heads(batch: int, count: int, tokens: int, channels: int, device: str) -> Tensor:
    """As a fused projection leaves them: (batch, tokens, heads, channels), seen transposed."""
    return torch.randn(batch, tokens, 2, count, channels, device=device)[:, :, 1].transpose(1, 2)


def errors(ours, theirs, inputs: list[Tensor], dtype: torch.dtype) -> list[float]:
    """Relative distances from float64, of the output and of each gradient."""
    near = [t.to(dtype).requires_grad_() for t in inputs]
    far = [t.detach().double().requires_grad_() for t in near]
    a, b = ours(*near), theirs(*far)
    grad = torch.randn_like(b).to(dtype)
    pairs = zip(
        (a, *torch.autograd.grad(a, near, grad)),
        (b, *torch.autograd.grad(b, far, grad.double())),
        strict=True,
    )
    # A gradient may be zero: compare it with what went in then.
    scale = max(grad.double().norm().item() * 1e-3, 1e-12)
    return [((x.double() - y).norm() / max(y.norm().item(), scale)).item() for x, y in pairs]


def short_errors(case, form, dtype: torch.dtype, device: str) -> list[float]:
    import attncond.kernels.short as short  # in the package it is None before load()

    gap, rows, fixed = (bool(x) for x in form)
    options = {"scale": 0.3, "gap": gap, "rows": rows, "fixed": fixed, "eps": 1e-12}
    return _short(lambda *x: short.attend(*x, **options), case, form, dtype, device)


def plain_short_errors(case, form, dtype: torch.dtype, device: str) -> list[float]:
    """Of what runs without the kernels."""
    gap, rows, fixed = form

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        a = scaled_dot_product_attention(q, k, centre(v) if gap else v, scale=0.3)
        return Precondition(eps=1e-12, detach=bool(fixed)).equilibrate(a) if rows else a

    return _short(plain, case, form, dtype, device)


def _short(call, case, form, dtype: torch.dtype, device: str) -> list[float]:
    torch.manual_seed(math.prod(case) + sum(form))
    b, h, queries, keys, d = case
    inputs = [heads(b, h, n, d, device) for n in (queries, keys, keys)]
    inputs[2] = inputs[2] + 3.0  # values with a mean to take off
    return errors(call, lambda *x: attention(*x, 0.3, *form), inputs, dtype)


def running_errors(case, parts: int, dtype: torch.dtype, device: str) -> list[float]:
    """Of the two passes beside attention: outputs less the mean, and what adds to dV.

    Once with the heads of a token side by side, once with the tokens of a head.
    """
    import attncond.kernels.running as running

    running.TILE = (*running.TILE[:-1], parts)
    torch.manual_seed(math.prod(case))
    o, v, grad = (heads(*case, device).to(dtype) for _ in range(3))
    v = v + 3.0
    wide = v.double().requires_grad_()
    right = running_mean(o.double(), wide)
    (later,) = torch.autograd.grad(right, wide, grad.double())
    pairs: list[tuple[Tensor, Tensor]] = []
    for lay in (lambda t: t, Tensor.contiguous):
        x, y, g = lay(o), lay(v), lay(grad)
        sums, shares = running._sums(y, shares=False), running._sums(g, shares=True)
        less = running._pass(running._add_mean, x, y, sums, SIGN=-1.0)
        back = running._pass(running._add_mean, lay(less), y, sums, SIGN=1.0)
        place = x.clone()
        added = running._pass(running._less_later, place, g, shares, into=place)
        assert added is place
        pairs += [(less, right), (back, o), (added, o + later)]
    return [((a.double() - b).norm() / b.norm().clamp_min(1)).item() for a, b in pairs]


def causal_errors(case, dtype: torch.dtype, device: str) -> list[float]:
    import attncond.kernels.running as running

    torch.manual_seed(math.prod(case))
    inputs = [heads(*case, device) for _ in range(3)]
    inputs[2] = inputs[2] + 3.0

    def right(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=device).triu(1)
        p = (q @ k.mT * 0.3).masked_fill(hidden, -math.inf).softmax(-1)
        return running_mean(p @ v, v)

    return errors(lambda *x: running.attend(*x, scale=0.3), right, inputs, dtype)


def compiled_for_hopper(kernel, constants: dict[str, object], warps: int, stages: int) -> str:
    """The PTX of a kernel for half-precision tensors; needs no card."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    wide = {"mean", "norm", "ratio", "sums"}
    tensors = wide | {"q", "k", "v", "x", "g", "out", "grad", "dq", "dk", "dv"}
    signature = {
        name: "constexpr"
        if name in constants
        else ("*fp32" if name in wide else "*bf16")
        if name in tensors
        else "i32"
        for name in kernel.arg_names
    }
    source = ASTSource(kernel, signature, constexprs=constants)
    options = {"num_warps": warps, "num_stages": stages}
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    text: str = found.asm["ptx"]
    return text


def main() -> None:
    import torch.library

    torch.library.wrap_triton = lambda kernel: kernel  # it knows compiled kernels only
    found: dict[str, list[float]] = {}
    for case in SHORT:
        for form in FORMS:
            found[f"short {case} {form}"] = short_errors(case, form, torch.float32, "cpu")
    for case in RUNNING:
        for parts in PARTS:
            found[f"running {case} {parts}"] = running_errors(case, parts, torch.float32, "cpu")
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
