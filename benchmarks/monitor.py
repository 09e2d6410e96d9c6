"""What a Monitor costs a training: step time with it against without, in one run.

    python benchmarks/monitor.py                # ViT-B/16, batch 256, bf16, compiled, CUDA
    python benchmarks/monitor.py --model vit_tiny_patch16_224 --batch 2 --every 6 --rounds 2 ...

One model trains throughout; only what is called after its steps changes. A turn of a variant is
``every`` steps and holds one measurement; it stands between two turns without a Monitor, and its
ratio is to their mean. What is written after each round is complete for the rounds so far.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from _record import write
from torch import Tensor, nn

import attncond as ac

After = Callable[[Tensor], None]
LEAD = 10  # steps of a turn before its measurement; the rest is what the worker has to finish in


class Watched:
    """A Monitor that measures once in each turn, and how long its calls took."""

    def __init__(self, model: nn.Module, every: int, **options: Any) -> None:
        self.monitor = ac.Monitor(model, every=every, **options)
        self.monitor.flush()
        self.every = every
        self.count = every - min(LEAD, every // 2)
        self.calls: list[float] = []  # of the steps that measure
        self.longest_other = 0.0

    def __call__(self, loss: Tensor) -> None:
        self.count += 1
        start = time.perf_counter()
        self.monitor.step(step=self.count, loss=loss)
        took = time.perf_counter() - start
        if self.count % self.every == 0:
            self.calls.append(took)
        else:
            self.longest_other = max(self.longest_other, took)


def training(args: argparse.Namespace, device: torch.device) -> tuple[nn.Module, Any]:
    """A model, and one step of its training that calls ``after`` with its loss."""
    torch.manual_seed(0)
    model = timm.create_model(args.model).to(device)
    generator = torch.Generator().manual_seed(1)
    size = model.pretrained_cfg["input_size"]
    images = torch.randn(args.batch, *size, generator=generator).to(device)
    labels = torch.randint(1000, (args.batch,), generator=generator).to(device)
    fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.05, fused=fused)

    def loss_of() -> Tensor:
        return nn.functional.cross_entropy(model(images), labels)

    compiled = torch.compile(loss_of) if args.compile else loss_of

    def step(after: After) -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = compiled()
        loss.backward()
        optimizer.step()
        after(loss)

    return model, step


def wait(device: torch.device) -> float:
    """Until the device has nothing left to do; the time then."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(device: torch.device, function: Callable[[], Any], times: int = 3) -> float:
    """Seconds of a call, the device's work included: the least of some."""
    function()
    found = []
    for _ in range(times):
        start = wait(device)
        function()
        found.append(wait(device) - start)
    return min(found)


def alternatives(model: nn.Module, device: torch.device) -> dict[str, float]:
    """Other ways to the same numbers, in seconds for all matrices, training at rest."""
    sites = ac.inspect(model).sites
    matrices = torch.stack(
        [p.matrix().detach().flatten(0, 1) for s in sites for p in s.projections]
    )
    wide = matrices.double()
    few = wide[:3]
    scale = len(wide) / len(few)
    return {
        "matrices": len(wide),
        "gram_float64": timed(device, lambda: wide @ wide.mT),
        "gram_eigvalsh_float64": timed(device, lambda: torch.linalg.eigvalsh(wide @ wide.mT), 1),
        "svdvals_float64_estimated_from_3": scale
        * timed(device, lambda: torch.linalg.svdvals(few), 1),
        "copy_to_pageable_memory": timed(device, lambda: matrices.cpu()),
    }


def alone(model: nn.Module, device: torch.device, **options: Any) -> dict[str, float]:
    """One measurement while nothing trains: how long it holds up its caller, and takes in all."""
    with ac.Monitor(model, every=1, patience=math.inf, **options) as monitor:
        monitor.flush()
        start = wait(device)
        monitor.step()
        returned = time.perf_counter()
        copied = wait(device)
        monitor.flush()
        done = time.perf_counter()
    return {
        "call_seconds": returned - start,
        "copied_seconds": copied - start,
        "measured_seconds": done - start,
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit_base_patch16_224")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/monitor_cuda.json"))
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # what a training script sets

    start = time.perf_counter()
    model, step = training(args, device)

    def seconds(after: After, steps: int) -> float:
        began = wait(device)
        for _ in range(steps):
            step(after)
        return (wait(device) - began) / steps

    def nothing(loss: Tensor) -> None:
        pass

    seconds(nothing, args.warmup)
    print(f"compiled and warm after {time.perf_counter() - start:.1f} s", flush=True)
    settings = {k: x for k, x in vars(args).items() if k != "out"}
    record: dict[str, Any] = {"settings": settings, "device": device.type}
    record["alone"] = {"whole": alone(model, device), "heads": alone(model, device, heads=True)}
    print(record["alone"], flush=True)

    watched = {
        "monitor": Watched(model, args.every),
        "monitor_heads": Watched(model, args.every, heads=True),
    }
    variants: dict[str, After] = {"stock_again": nothing, **watched}
    times: dict[str, list[float]] = {name: [] for name in variants}
    ratios: dict[str, list[float]] = {name: [] for name in variants}
    stocks = []
    for number in range(args.rounds):
        before = seconds(nothing, args.every // 2)
        for name, after in variants.items():
            own = seconds(after, args.every)
            if isinstance(after, Watched):
                after.monitor.flush()  # what is late must not burden the stock turn
            stock = seconds(nothing, args.every // 2)
            times[name].append(own)
            ratios[name].append(2 * own / (before + stock))
            stocks.append(stock)
            before = stock
        record["rounds"] = number + 1
        record["stock_milliseconds"] = 1e3 * statistics.median(stocks)
        record["variants"] = {name: row(times[name], ratios[name]) for name in variants}
        for name, one in watched.items():
            record["variants"][name] |= {
                "measurements": len(one.monitor.history) - 1,  # without that at the start
                "call_milliseconds_max": 1e3 * max(one.calls),
                "other_call_milliseconds_max": 1e3 * one.longest_other,
            }
        write(args.out, record)
        shown = {n: round(v["ratio"], 5) for n, v in record["variants"].items()}
        print(f"round {number + 1} of {args.rounds}: {shown}", flush=True)
    for one in watched.values():
        one.monitor.close()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's about backends of its linear algebra
        size = model.pretrained_cfg["input_size"]
        probe = torch.randn(4, *size, generator=torch.Generator().manual_seed(2))
        record["alone"]["probe"] = alone(model, device, batch=probe)
        print(record["alone"]["probe"], flush=True)
        write(args.out, record)
        record["alternatives_seconds"] = alternatives(model, device)
        print(record["alternatives_seconds"], flush=True)
    write(args.out, record)
    print(f"done after {time.perf_counter() - start:.1f} s: {args.out}", flush=True)


def row(times: list[float], ratios: list[float]) -> dict[str, float]:
    """One line of the table."""
    return {
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "milliseconds": 1e3 * statistics.median(times),
    }


if __name__ == "__main__":
    main()
