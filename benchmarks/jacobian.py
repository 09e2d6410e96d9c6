"""How long the exact spectrum of a head's Jacobian takes, and how much memory.

    OMP_NUM_THREADS=2 python benchmarks/jacobian.py          # a small head and one of ViT-B/16
    python benchmarks/jacobian.py --device cuda --stages     # and all 144 heads of ViT-B/16

The small head (64 tokens of width 128, head_dim 24) is compared with torch.func.jacrev and svdvals
in the same run. Those of ViT-B/16 have its initial weights and what a random image becomes on its
way to each layer; both are made on the CPU, so that every device is given the same. On CUDA small
heads are first held against the CPU's. --stages says where the time of a head goes and what other
ways would cost. Writes results/benchmarks/jacobian_<device>.json after each part, and starts
nothing new once --budget seconds are over.
"""

from __future__ import annotations

import argparse
import math
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import timm
import torch
from _jacobian_stages import Head, agreement, seconds, stages
from _record import write
from torch import Tensor

import attncond as ac
from attncond.jacobian import JacobianSpectrum, attention_jacobian


def peak_bytes(device: str) -> int:
    """The most memory so far: of the GPU's allocator, or of the process."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def figures(found: JacobianSpectrum) -> dict[str, Any]:
    """What was computed, beside how fast."""
    return {
        "shape": found.shape,
        "convention": found.convention,
        "path": found.path,
        "sigma_max": found.sigma_max,
        "sigma_min": found.sigma_min,
        "kappa": found.kappa,
        "kappa_error": found.kappa_error,
        "rank": found.rank,
        "rank_rule": found.rank_rule,
    }


def vit_heads(device: str) -> list[Head]:
    """Tokens, weights and biases of every head of ViT-B/16, layer by layer."""
    torch.manual_seed(0)
    model = timm.create_model("vit_base_patch16_224").eval()
    tokens: dict[str, Tensor] = {}
    plan = ac.inspect(model)
    hooks = [
        site.module.register_forward_pre_hook(
            lambda _, given, path=site.path: tokens.update({path: given[0][0].detach()})
        )
        for site in plan
    ]
    with torch.no_grad():
        model(torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(1)))
    for hook in hooks:
        hook.remove()
    heads: list[Head] = []
    for site in plan:
        for h in range(site.heads):
            parts: dict[str, Tensor] = {}
            for p in site.projections:
                parts[f"w_{p.role}"] = p.matrix()[h].detach().to(device)
                bias = p.owner.get_parameter("bias")
                parts[f"bias_{p.role}"] = bias[p.rows[h]].detach().to(device)
            heads.append((tokens[site.path].to(device), parts))
    return heads


def small_head(device: str, repeats: int) -> dict[str, Any]:
    """One head both ways."""
    generator = torch.Generator().manual_seed(0)
    n, width, d = 64, 128, 24
    x = torch.randn(n, width, generator=generator, dtype=torch.float64).to(device)
    w = torch.randn(3, d, width, generator=generator, dtype=torch.float64).to(device)
    w_q, w_k, w_v = w / math.sqrt(width)

    def head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = (x @ q.mT) @ (x @ k.mT).mT / math.sqrt(d)
        return torch.softmax(logits, -1) @ (x @ v.mT)

    parts: tuple[Tensor, ...] = ()
    sigma = w.new_empty(0)

    def differentiate() -> None:
        nonlocal parts
        parts = torch.func.jacrev(head, argnums=(0, 1, 2))(w_q, w_k, w_v)

    def decompose() -> None:
        nonlocal sigma
        sigma = torch.linalg.svdvals(torch.cat([p.reshape(n * d, -1) for p in parts], 1))

    attention_jacobian(x, w_q, w_k, w_v)
    times = [seconds(lambda: attention_jacobian(x, w_q, w_k, w_v), device) for _ in range(repeats)]
    found = attention_jacobian(x, w_q, w_k, w_v)
    if device == "cuda":  # what the first call loads is not what is measured
        differentiate()
        torch.linalg.svdvals(torch.randn(64, 64, device=device, dtype=torch.float64))
    by_jacrev, by_svd = seconds(differentiate, device), seconds(decompose, device)
    reference = float(sigma[0] / sigma[-1])
    assert found.kappa is not None
    return {
        **figures(found),
        "tokens_width_head_dim": (n, width, d),
        "seconds": statistics.median(times),
        "seconds_least": min(times),
        "seconds_most": max(times),
        "seconds_jacrev": by_jacrev,
        "seconds_svdvals": by_svd,
        "times_faster": (by_jacrev + by_svd) / statistics.median(times),
        "kappa_jacrev_svdvals": reference,
        "relative_difference": abs(found.kappa / reference - 1),
    }


def one_head(head: Head, convention: Any, device: str, repeats: int) -> dict[str, Any]:
    """A ViT-B head; the first call is reported as such."""
    x, parts = head
    results: list[JacobianSpectrum] = []

    def job() -> None:
        results.append(attention_jacobian(x, **parts, convention=convention))

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = [seconds(job, device) for _ in range(repeats)]
    return {
        **figures(results[-1]),
        "tokens_width_head_dim": (*x.shape, len(parts["w_q"])),
        "seconds_first": times[0],
        "seconds": statistics.median(times[1:] or times),
        "peak_bytes": peak_bytes(device),
    }


def all_heads(heads: list[Head], device: str, until: float) -> dict[str, Any]:
    """Every head in turn, as many as the time allows."""
    results: list[JacobianSpectrum] = []
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for x, parts in heads:
        if time.perf_counter() > until:
            break
        results.append(attention_jacobian(x, **parts))  # its answer is numbers: nothing is pending
        if len(results) % 12 == 0:
            print(f"  {len(results)} heads: {time.perf_counter() - start:.1f} s", flush=True)
    return {
        "heads": len(results),
        "seconds": time.perf_counter() - start,
        "peak_bytes": peak_bytes(device),
        "resolved": sum(r.resolved for r in results),
        "kappa": [r.kappa for r in results],
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--heads", type=int, help="of ViT-B/16 in turn; all on CUDA, else none")
    parser.add_argument("--stages", action="store_true", help="time the steps of one head, too")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    until = time.perf_counter() + args.budget
    out = args.out or Path(f"results/benchmarks/jacobian_{args.device}.json")
    heads = vit_heads(args.device)
    record: dict[str, Any] = {}

    def keep(name: str, row: dict[str, Any], text: str) -> None:
        record[name] = row
        write(out, record)
        left = until - time.perf_counter()
        print(f"{text} ({left:.0f} s left)", flush=True)

    if args.device == "cuda":
        row = agreement(args.device)
        worst = row["worst_relative_difference"]
        keep("agreement_with_cpu", row, f"σ on the GPU and the CPU differ by {worst:.1e} at most")
    # The largest first: a process's peak never falls.
    for convention in ("wide", "stacked"):
        row = one_head(heads[0], convention, args.device, 4 if args.device == "cuda" else 1)
        figure = f"{row['seconds']:.2f} s, κ {row['kappa']:.6g}, {row['peak_bytes'] / 1e9:.2f} GB"
        keep(f"vit_b_head_{convention}", row, f"ViT-B head, {convention}: {figure}")
    count = (len(heads) if args.device == "cuda" else 0) if args.heads is None else args.heads
    if count:
        row = all_heads(heads[:count], args.device, until)
        text = f"{row['heads']} heads: {row['seconds']:.1f} s, {row['resolved']} resolved"
        keep("vit_b_heads", row, text)
    if time.perf_counter() < until:
        row = small_head(args.device, args.repeats)
        text = (
            f"small head: {row['seconds']:.4f} s, {row['times_faster']:.0f} times faster than "
            f"jacrev and svdvals, κ {row['kappa']:.8g} against {row['kappa_jacrev_svdvals']:.8g}"
        )
        keep("small_head", row, text)
    if args.stages:
        took: dict[str, Any] = {}
        for name, each in stages(heads[0], args.device):
            took[name] = each
            keep("stages", took, f"  {name}: {each:.4f} s")
            if time.perf_counter() > until:
                break


if __name__ == "__main__":
    main()
