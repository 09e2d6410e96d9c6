"""Which tiles, warps and stages are fastest for the kernels in attncond.kernels, on this card.

    python benchmarks/head_tuning.py        # CUDA; about two minutes

The constants at the top of kernels/short.py and kernels/running.py come from here. Each choice is
checked against the formulas in float64 before it is timed. A choice that does not fit the card says
so and the next one is tried.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _record import write
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as attend
from triton.testing import do_bench, do_bench_cudagraph

import attncond.kernels.running as running
import attncond.kernels.short as short
from attncond.methods import Precondition
from attncond.methods.gap import centre, visible_mean

# (queries, keys, warps, stages)
FORWARD = [
    *((64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (64, 32, 4, 3), (128, 64, 4, 2)),
    *((128, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 8, 3)),
]
# (keys, warps, stages)
BACKWARD = [(64, 8, 1), (64, 8, 2), (32, 8, 1), (32, 8, 2), (64, 4, 1), (64, 16, 1), (128, 8, 1)]
# (rows, channels, warps, stages, programs a head)
RUNNING = [(16, 256, 1, 1, 16), (8, 256, 1, 3, 16), (16, 128, 1, 3, 16), (8, 256, 1, 3, 8)]
RUNNING += [(16, 64, 1, 4, 2), (16, 128, 1, 4, 2), (16, 128, 1, 4, 4), (8, 256, 1, 4, 4)]


def heads(batch: int, tokens: int, count: int = 12, channels: int = 64) -> list[Tensor]:
    """Q, K and V as a fused projection lays them out, in bf16."""
    qkv = torch.randn(batch, tokens, 3, count, channels, device="cuda", dtype=torch.bfloat16)
    return [t.detach().requires_grad_() for t in qkv.permute(2, 0, 3, 1, 4).unbind(0)]


def times(forward: Callable[[], Any], backward: Callable[[], Any]) -> dict[str, float]:
    """Of the two passes."""
    return {"forward": on_device(forward), "backward": on_device(backward)}


def on_device(call: Callable[[], Any]) -> float:
    """Microseconds of it on the device, launched from a graph: no time of the host."""
    return 1e3 * float(do_bench_cudagraph(call, rep=60))


def short_times(qkv: list[Tensor], gap: bool, rows: bool) -> dict[str, float]:
    """Of the fused kernels."""
    x = [t.detach() for t in qkv]
    x.append(x[2].mean(-2, dtype=torch.float32) if gap else x[2].new_empty(0))
    forward = lambda: short._attend(*x, 0.125, gap, rows, False, 1e-12)  # noqa: E731
    kept = forward()
    grad = torch.randn_like(kept[0])
    return times(forward, lambda: short._attend_backward(grad, *x, *kept, 0.125, gap, rows))


def stock_times(qkv: list[Tensor], **options: Any) -> dict[str, float]:
    """Of the attention that torch chooses."""
    output = attend(*qkv, **options)
    grad = torch.randn_like(output)
    return {
        "forward": 1e3 * do_bench(lambda: attend(*[t.detach() for t in qkv], **options)),
        "backward": 1e3
        * do_bench(lambda: torch.autograd.grad(output, qkv, grad, retain_graph=True)),
    }


def error(call: Callable[[list[Tensor]], Tensor], plain: Callable[[list[Tensor]], Tensor],
          inputs: list[Tensor]) -> list[float]:  # fmt: skip
    """Relative distance of the output and the gradients from those of the formulas in float64."""
    wide = [t.detach().double().requires_grad_() for t in inputs]
    ours, theirs = call(inputs), plain(wide)
    grad = torch.randn_like(ours)
    a = (ours, *torch.autograd.grad(ours, inputs, grad))
    b = (theirs, *torch.autograd.grad(theirs, wide, grad.double()))
    return [((x - y).norm() / y.norm()).item() for x, y in zip(a, b, strict=True)]


def main() -> None:
    """Time every choice and write what is known so far after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=197)
    parser.add_argument("--part", choices=["short", "running"], help="one of the two alone")
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/head_tuning.json"))
    args = parser.parse_args()
    torch.manual_seed(0)
    found: dict[str, Any] = {}

    def record(name: str, row: Callable[[], Any]) -> None:
        try:
            found[name] = row()
        except Exception as problem:
            found[name] = f"{type(problem).__name__}: {str(problem)[:200]}"
        print(name, found[name], flush=True)
        write(args.out, {"settings": {"batch": args.batch, "tokens": args.tokens}, "rows": found})

    if args.part != "running":
        tune_short(args, found, record)
    if args.part != "short":
        tune_running(record)


def tune_short(
    args: argparse.Namespace,
    found: dict[str, Any],
    record: Callable[[str, Callable[[], Any]], None],
) -> None:
    """Attention of up to 256 keys."""
    forms = {"plain": (False, False), "gap": (True, False), "rows": (False, True)}
    for name, (gap, rows) in {**forms, "both": (True, True)}.items():

        def ours(x: list[Tensor], gap: bool = gap, rows: bool = rows) -> Tensor:
            return short.attend(*x, gap=gap, rows=rows)

        def plain(x: list[Tensor], gap: bool = gap, rows: bool = rows) -> Tensor:
            y = attend(x[0], x[1], centre(x[2]) if gap else x[2])
            return Precondition().equilibrate(y) if rows else y

        for tokens in (197, 50):
            x = heads(3, tokens)
            record(f"error {name} {tokens}", lambda x=x, o=ours, p=plain: error(o, p, x))
    qkv = heads(args.batch, args.tokens)
    record("stock", lambda: stock_times(qkv))
    best: dict[str, tuple[float, tuple[int, int, int]]] = {}
    for which, choices in (("forward", FORWARD), ("backward", BACKWARD)):
        for choice in choices:
            setattr(short, which.upper(), choice)
            record(f"{which} {choice}", lambda: short_times(qkv, True, False))
            row = found[f"{which} {choice}"]
            if isinstance(row, dict):
                best[which] = min(best.get(which, (1e9, choice)), (row[which], choice))
        setattr(short, which.upper(), best[which][1])
    for name, (g, r) in forms.items():
        record(f"best {name}", lambda g=g, r=r: short_times(qkv, g, r))


def tune_running(record: Callable[[str, Callable[[], Any]], None]) -> None:
    """The passes beside causal attention, at GPT-2's size with 16 texts of 1,024 tokens."""
    q, k, v = heads(16, 1024)
    o, g, x = q.detach(), k.detach(), v.detach()
    record("causal stock", lambda: stock_times([q, k, v], is_causal=True))

    def ours(x: list[Tensor]) -> Tensor:
        return running.attend(*x)

    def plain(x: list[Tensor]) -> Tensor:
        return attend(*x, is_causal=True) - visible_mean(x[2], x[0].shape[-2], causal=True)

    for running.TILE in RUNNING:
        sums = running._sums(x, shares=False)
        record(
            f"running {running.TILE}",
            lambda sums=sums: {
                "error": max(error(ours, plain, heads(2, 1024))),
                "sums": on_device(lambda: running._sums(x, shares=True)),
                "mean": on_device(
                    lambda: running._pass(running._add_mean, o, x, sums, into=o, SIGN=-1.0)
                ),
                "later": on_device(lambda: running._pass(running._less_later, o, g, sums, into=o)),
            },
        )


if __name__ == "__main__":
    main()
