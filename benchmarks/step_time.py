"""Training-step time and memory of conditioned against stock attention, in one run.

    python benchmarks/step_time.py                      # ViT-B/16, batch 256, bf16, compiled, CUDA
    python benchmarks/step_time.py --model gpt2 --batch 16 --variants stock_again gap [--causal]
    python benchmarks/step_time.py --model swin_small32 --graphs --variants stock_again identity gap
    python benchmarks/step_time.py --model vit_tiny_patch16_224 --batch 4 --rounds 2 --steps 4 ...

Each turn of a variant stands between two turns of the stock model, and its ratio is to their mean:
measured once a round instead, the model after the slowest variant looked 1% faster than its twin.
The ratio given is the median over rounds. A second stock model shows the noise. Where others use
the machine, rounds differ by more than a method costs; what they do takes time and never gives any,
so that `fastest_ratio`, of the fastest rounds of both, is nearer to the truth then. So is
`kernel_ratio` (--profile): the time on the device of all kernels of a step, without what lies
between them, which is `idle_microseconds`.

What is multiplied decides how much power a card draws, and so its clock: a model that learns its
one batch by heart becomes faster or slower with it. With --lr 0 all variants keep the weights that
they started with, and every kernel still runs.

Models of the lab's recipes go by their names there; --graphs launches a step as CUDA graphs, as the
lab does, for small models are bound by their launches else.

Before torch 2.14, transformers hands its attention an explicit mask inside torch.compile; since
then it is is_causal=True, as outside, for which kernels are faster. --causal asks for that in the
older ones, too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import timm
import torch
import torch._dynamo
from _record import write
from head_kernels import profiled
from torch import Tensor, nn

import attncond as ac
from attncond.conditioning import Handle
from attncond.lab.config import Model
from attncond.lab.models import MODELS
from attncond.lab.models import build as build_model
from attncond.lab.objective import objective


@dataclass
class Variant:
    """A model in training, and what it does after each optimizer step."""

    name: str
    model: nn.Module
    step: Callable[[], None]
    handle: Handle | None
    few: bool = False  # too slow for as many steps as the others


def svd_refresh(handle: Handle) -> None:
    """Thm 3.5 as the paper computes it: one SVD for each matrix."""
    for weight in handle._weights:
        matrix = weight.raw.detach()
        for _, index in weight.correction.matrices():
            part = matrix[index.to(matrix.device)]
            u, s, vh = torch.linalg.svd(part, full_matrices=False)
            weight.buffer("correction")[index.to(matrix.device)] = s[0] * (u @ vh)


METHODS: dict[str, list[ac.Spectral | ac.RemoveGap | ac.Precondition]] = {
    "identity": [ac.Spectral()],
    "paper": [ac.Spectral.paper()],
    "polar": [ac.Spectral.paper_svd()],
    "polar_scratch": [ac.Spectral.paper_svd()],
    "polar_svd": [ac.Spectral.paper_svd()],
    "polar_every_10": [ac.Spectral(correction="polar", preserve_norm=False, refresh_every=10)],
    "folded": [ac.Spectral()],
    "gap": [ac.RemoveGap()],
    "precondition": [ac.Precondition()],
    "precondition_detached": [ac.Precondition(detach=True)],
    "all_three": [ac.Spectral(), ac.RemoveGap(), ac.Precondition()],
}


def task(args: argparse.Namespace, device: torch.device) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A model and its loss on one fixed batch: a classifier, or GPT-2 on 1,024 tokens."""
    generator = torch.Generator().manual_seed(1)
    if args.model in MODELS:
        net = build_model(Model(name=args.model), num_classes=10, image_size=32).to(device)
        small = torch.randn(args.batch, 3, 32, 32, generator=generator).to(device)
        classes = torch.randint(10, (args.batch,), generator=generator).to(device)
        return net, lambda: objective(net, small, classes, dtype=torch.bfloat16)
    if args.model == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel, masking_utils

        if args.causal:
            masking_utils.is_tracing = lambda *_: False
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
        language = GPT2LMHeadModel(GPT2Config(**off, loss_type="ForCausalLM")).to(device)
        tokens = torch.randint(50257, (args.batch, args.tokens), generator=generator).to(device)
        return language, lambda: language(tokens, labels=tokens).loss
    model = timm.create_model(args.model).to(device)
    size = model.pretrained_cfg["input_size"]
    images = torch.randn(args.batch, *size, generator=generator).to(device)
    labels = torch.randint(1000, (args.batch,), generator=generator).to(device)
    return model, lambda: nn.functional.cross_entropy(model(images), labels)


def build(name: str, args: argparse.Namespace, device: torch.device) -> Variant:
    """One variant, ready to train on its own copy of the same weights."""
    torch.manual_seed(0)
    model, loss_of = task(args, device)
    handles = [ac.condition(model, method) for method in METHODS.get(name, [])]
    handle = handles[0] if handles and handles[0].certificates(exact=False) else None
    if name == "folded":
        assert handle is not None
        handle.fold()
        handle = None
    fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05, fused=fused)
    if handle and name in ("polar", "polar_every_10"):
        handle.attach(optimizer)
    mode = "reduce-overhead" if args.graphs else None
    compiled = torch.compile(loss_of, mode=mode) if args.compile else loss_of

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = compiled()
        loss.backward()
        optimizer.step()
        if name == "polar_scratch":
            assert handle is not None
            handle.refresh()
        elif name == "polar_svd":
            assert handle is not None
            svd_refresh(handle)

    return Variant(name, model, step, handle, few=name in ("polar_svd", "polar_scratch"))


def seconds(variant: Variant, steps: int, device: torch.device) -> float:
    """Mean time of one step."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        variant.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def peak_memory(variant: Variant) -> int:
    """Bytes that one step needs at the most, beyond what lives between steps of other variants."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    own = sum(t.numel() * t.element_size() for t in variant.model.state_dict().values())
    torch.cuda.reset_peak_memory_stats()
    variant.step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before + 3 * own  # weights and two Adam moments


def main() -> None:
    """Measure and write."""
    names = ["stock_again", *METHODS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit_base_patch16_224")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1024, help="of GPT-2")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--lr", type=float, default=3e-4, help="0: all multiply the same numbers")
    parser.add_argument("--variants", nargs="+", default=names, choices=names)
    parser.add_argument("--profile", action="store_true", help="the kernels' own times, too (CUDA)")
    parser.add_argument("--graphs", action="store_true", help="launch steps as CUDA graphs")
    parser.add_argument("--causal", action="store_true", help="no explicit mask (GPT-2)")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/step_time.json"))
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # what a training script sets
    torch._dynamo.config.recompile_limit = 64  # one code, many models

    variants = []
    for name in dict.fromkeys(["stock", *args.variants]):
        start = time.perf_counter()
        variant = build(name, args, device)
        seconds(variant, 2 if variant.few else args.warmup, device)
        print(f"{name}: ready after {time.perf_counter() - start:.1f} s", flush=True)
        variants.append(variant)

    stock_model, *others = variants
    memory = {v.name: peak_memory(v) for v in variants} if device.type == "cuda" else {}
    settings = {k: x for k, x in vars(args).items() if k != "out"}
    figures: dict[str, dict[str, float]] = {}
    kernel_times: dict[str, list[tuple[str, float]]] = {}
    for v in sorted(others, key=lambda v: v.few):
        times: list[float] = []
        stock_times: list[float] = []
        ratios: list[float] = []
        for _ in range(2 if v.few else args.rounds):
            before = seconds(stock_model, args.steps, device)
            own = seconds(v, 3 if v.few else args.steps, device)
            after = seconds(stock_model, args.steps, device)
            times.append(own)
            stock_times += [before, after]
            ratios.append(2 * own / (before + after))
        row = {
            "ratio": statistics.median(ratios),
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "fastest_ratio": min(times) / min(stock_times),
            "milliseconds": 1e3 * statistics.median(times),
        }
        if args.profile:
            # As many steps as a turn has: a rested card runs at a higher clock.
            profiles = [profiled(m.step, 1, args.steps) for m in (stock_model, v) * 3]
            sums = [sum(time for _, time in one) for one, _ in profiles]
            row["kernel_ratio"] = statistics.median(sums[1::2]) / statistics.median(sums[::2])
            idle = [between for _, between in profiles]
            row["idle_microseconds"] = statistics.median(idle[1::2])
            row["idle_microseconds_stock"] = statistics.median(idle[::2])
            kernel_times |= {"stock": profiles[0][0][:40], v.name: profiles[1][0][:40]}
        if memory:
            row["peak_memory_ratio"] = memory[v.name] / memory["stock"]
        if v.handle:
            row["kappa_max_float64"] = max(c.kappa or 0 for c in v.handle.certificates())
        figures[v.name] = row
        print(v.name, {k: round(x, 4) for k, x in row.items()}, flush=True)
        record = {"settings": settings, "device": device.type, "variants": figures}
        if kernel_times:
            record["microseconds_of_kernels"] = kernel_times
        write(args.out, record)


if __name__ == "__main__":
    main()
