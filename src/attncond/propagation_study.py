"""The command behind ``python -m attncond.propagation``: measure, check, train, record, draw."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from attncond._version import __version__
from attncond.files import write_text
from attncond.propagation import (
    Stack,
    attention_matrix,
    constant_gradient_norm,
    depth_profile,
    excess_limit,
    generator_of,
    gradient_norms,
    initial_weights,
    orthonormal_tokens,
    stable_rank_limit,
)
from attncond.propagation_training import TARGETS, train

STACKS = [
    Stack(attention, gap, norm, skip)
    for attention in ("A", "A(X)")
    for norm, skip in ((False, False), (True, False), (False, True), (True, True))
    for gap in (False, True)
]
RATES = [1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0]
DEPTHS = [1, 4, 10]
WIDTHS = [20, 40, 80, 150, 300]
# Stable ranks after layers 1 and 10 at T = d = 150, read off the authors' plots.
PLOTTED = {
    "A": (1.0, 1.0),
    "A + LN": (1.0, 1.0),
    "A + skip": (1.0, 1.0),
    "A⊥": (9.7, 1.9),
    "A⊥ + LN": (11.7, 3.1),
    "A⊥ + skip": (13.8, 8.8),
    "A⊥ + skip + LN": (16.7, 9.5),
}

Record = dict[str, Any]


def spectra(t: int, seed: int) -> Record:
    """Singular values of A and of the first layer's A(X) with W_Q, W_K ~ N(0, 1), times √T."""
    found: Record = {"tokens": t, "seed": seed}
    for attention in ("A", "A(X)"):
        stack = Stack(attention)
        generator = generator_of(seed)
        x = orthonormal_tokens(t, t, generator)
        weights = initial_weights(stack, 1, t, t, generator, key_query_std=1.0)
        a = attention_matrix(stack, weights, 0, x)
        found[attention] = (torch.linalg.svdvals(a) * math.sqrt(t)).tolist()
    return found


def by_depth(t: int, depth: int, seeds: int, key_query_std: float | None = None) -> list[Record]:
    """Profiles over the layers: the mean of each quantity over the seeds.

    Of every stack, or of those whose keys and queries ``key_query_std`` changes.
    """
    rows = []
    for stack in STACKS:
        if key_query_std is not None and stack.attention == "A":
            continue
        profiles = [depth_profile(stack, t, depth, seed, key_query_std) for seed in range(seeds)]
        mean = {
            key: [statistics.fmean(p[key][i] for p in profiles) for i in range(depth)]
            for key in profiles[0]
        }
        std = "1/√d" if key_query_std is None else f"{key_query_std:g}"
        rows.append(
            {"stack": str(stack), "key_query_std": std, "tokens": t, "seeds": seeds, **mean}
        )
    return rows


def by_width(widths: Sequence[int], seeds: int) -> list[Record]:
    """What the limits speak of, at several T = d: means over the seeds."""
    rows = []
    for t in widths:
        plain = [depth_profile(Stack(), t, 2, seed) for seed in range(seeds)]
        fixed = [depth_profile(Stack(remove_gap=True), t, 2, seed) for seed in range(seeds)]
        seconds = [spectra(t, seed)["A"][1] for seed in range(seeds)]
        row: Record = {
            "tokens": t,
            "seeds": seeds,
            "second_singular_value": statistics.fmean(seconds),
        }
        for stack in (Stack(), Stack(remove_gap=True)):
            squares = [_gradient(stack, t, 2, 4, seed) ** 2 for seed in range(seeds)]
            row[f"gradient_{stack}"] = statistics.geometric_mean(squares)
        for layer in (1, 2):
            row[f"excess_{layer}"] = statistics.fmean(p["excess"][layer - 1] for p in plain)
            row[f"fixed_{layer}"] = statistics.fmean(p["stable_rank"][layer - 1] for p in fixed)
        rows.append(row)
    return rows


def _gradient(stack: Stack, t: int, layer: int, last: int, seed: int) -> float:
    generator = generator_of(seed)
    x = orthonormal_tokens(t, t, generator)
    weights = initial_weights(stack, last, t, t, generator)
    return constant_gradient_norm(stack, weights, x, layer, last)


def gradients(stack: Stack, t: int, layer: int, depth: int, seeds: int) -> Record:
    """Geometric mean over the seeds of ‖∂X_L/∂W_V of ``layer``‖_F, L = layer, ..., depth."""
    logs = []
    for seed in range(seeds):
        generator = generator_of(seed)
        x = orthonormal_tokens(t, t, generator)
        norms = gradient_norms(stack, initial_weights(stack, depth, t, t, generator), x, layer)
        logs.append([math.log(n) if n > 0 else math.nan for n in norms])
    mean = [math.exp(statistics.fmean(values)) for values in zip(*logs, strict=True)]
    return {"stack": str(stack), "tokens": t, "layer": layer, "seeds": seeds, "norm": mean}


def check(name: str, found: float, expected: float, low: float, high: float) -> Record:
    """One constant: what was found, what was expected, and whether it lies in its range."""
    holds = low <= found <= high
    return {
        "name": name,
        "found": found,
        "expected": expected,
        "range": [low, high],
        "holds": holds,
    }


def checks(depths: list[Record], widths: list[Record]) -> list[Record]:
    """The constants of the figures, by the widest T, and the layers of the paper's plot."""
    widest = widths[-1]
    t = widest["tokens"]
    rows = [
        check("√T·σ₂ of A", widest["second_singular_value"], 2.0, 1.8, 2.2),
        check("T·(sr(Σ₁) − 1) of A", t * widest["excess_1"], excess_limit(1), 2.0, 3.5),
        check("T³·(sr(Σ₂) − 1) of A", t**3 * widest["excess_2"], excess_limit(2), 4.0, 6.0),
        check("sr(Σ₁)/T of A⊥", widest["fixed_1"] / t, stable_rank_limit(1), 0.060, 0.075),
        check("sr(Σ₂)/T of A⊥", widest["fixed_2"] / t, stable_rank_limit(2), 0.030, 0.042),
        check("‖∂X₄/∂W₂‖²/T⁴ of A", widest["gradient_A"] / t**4, 1.0, 0.7, 1.4),
        check("‖∂X₄/∂W₂‖²/T of A⊥", widest["gradient_A⊥"] / t, 1.0, 0.7, 1.4),
    ]
    by_stack = {row["stack"]: row["stable_rank"] for row in depths}
    for stack, plotted in PLOTTED.items():
        for value, layer in zip(plotted, (1, 10), strict=True):
            found = by_stack[stack][layer - 1]
            # A plot is read to a few percent, and single draws of a deep stack differ by a third.
            low, high = (0.99, 1.1) if value == 1 else (0.6 * value, 1.4 * value)
            rows.append(check(f"sr(Σ) of {stack}, layer {layer}", found, value, low, high))
    return rows


def measure(seeds: int, t: int = 150, depth: int = 10) -> Record:
    """All of the figures but the training, with the checks of their constants."""
    depths, widths = by_depth(t, depth, seeds), by_width(WIDTHS, 2 * seeds)
    return {
        "checks": checks(depths, widths),
        "spectra": spectra(t, 0),
        "by_depth": depths + by_depth(t, depth, seeds, key_query_std=1.0),
        "by_width": widths,
        "gradients": [gradients(stack, 32, 2, depth, min(seeds, 3)) for stack in STACKS],
    }


def compare(
    seeds: int, t: int, samples: int, steps: int, target: str, rates: list[float]
) -> Record:
    """Train every stack, with the paper's W_V ~ N(0, 1) and, as a control, with N(0, 1/d)."""
    rows: list[Record] = []
    for scale, std in (("1", 1.0), ("1/√d", t**-0.5)):
        for stack in STACKS:
            for depth in DEPTHS:
                runs = train(
                    stack,
                    depth,
                    rates=rates,
                    seeds=range(seeds),
                    t=t,
                    samples=samples,
                    steps=steps,
                    target=target,
                    value_std=std,
                )
                for rate in rates:
                    mine = [r for r in runs if r["rate"] == rate]
                    rows.append(
                        {
                            "stack": str(stack),
                            "value_std": scale,
                            "depth": depth,
                            "rate": rate,
                            "first_loss": [r["losses"][0] for r in mine],
                            "last_loss": [r["losses"][-1] for r in mine],
                            "outcome": [r["outcome"] for r in mine],
                        }
                    )
                print(f"W_V std {scale}, {stack}, {depth} layers: trained", flush=True)
    constant = statistics.fmean(r["constant"] for r in runs)
    setting = {
        "tokens": t,
        "width": t,
        "samples": samples,
        "steps": steps,
        "target": target,
        "optimizer": "Adam",
        "seeds": list(range(seeds)),
        "constant_loss": constant,
    }
    return {"setting": setting, "summary": summary(rows, constant), "rows": rows}


def summary(rows: list[Record], constant: float) -> list[Record]:
    """For each stack and depth: outcomes over all rates and seeds, and the best rate's loss.

    The best rate is the one of the least median last loss, the median over the seeds.
    """
    found = []
    for key in dict.fromkeys((r["value_std"], r["stack"], r["depth"]) for r in rows):
        mine = [r for r in rows if (r["value_std"], r["stack"], r["depth"]) == key]
        outcomes = [o for r in mine for o in r["outcome"]]
        medians = {r["rate"]: _median(r["last_loss"]) for r in mine}
        best = min(medians, key=lambda rate: medians[rate])
        found.append(
            {
                "value_std": key[0],
                "stack": key[1],
                "depth": key[2],
                "runs": len(outcomes),
                **{o: outcomes.count(o) for o in ("learned", "stuck", "diverged")},
                "best_rate": best,
                "best_median_loss": medians[best],
                "best_over_constant": medians[best] / constant,
            }
        )
    return found


def _median(losses: Sequence[float]) -> float:
    return statistics.median(x if math.isfinite(x) else math.inf for x in losses)


def circumstances(words: Sequence[str]) -> Record:
    """The command without its folder, the versions and the machine."""
    kept = list(words)
    if "--out" in kept:
        i = kept.index("--out")
        del kept[i : i + 2]
    return {
        "command": " ".join(["python -m attncond.propagation", *kept]),
        "versions": {
            "attncond": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "hardware": {
            "cpu_cores": os.cpu_count(),
            "machine": platform.machine(),
            "torch_threads": 1,
        },
    }


def write(path: Path, record: Record) -> None:
    """Write a record as JSON, whole or not at all; what is not finite becomes null."""
    text = json.dumps(_plain(record), indent=1, ensure_ascii=False, allow_nan=False)
    write_text(path, text + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, train and draw; exit with 1 where a constant of the figures was not found."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(
        prog="python -m attncond.propagation",
        description="Signal propagation in random attention stacks (arXiv:2410.07799).",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for JSON and PNG")
    parser.add_argument("--seeds", type=int, default=10, help="for the measurements")
    parser.add_argument("--train-seeds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32, help="T = d of the training comparison")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--target", choices=sorted(TARGETS), default="heaviside")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--only", choices=("measure", "train", "draw"), help="one part of it")
    args = parser.parse_args(words)
    for name in ("seeds", "train_seeds", "tokens", "samples", "steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if min(args.rates) <= 0:
        parser.error("--rates must be above 0")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        from attncond import propagation_view
    except (OSError, ImportError) as error:
        parser.error(str(error))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the matrices are small: threads would wait for each other
    try:
        facts = circumstances(words)
        measured, trained = args.out / "measured.json", args.out / "training.json"
        if args.only in (None, "measure"):
            write(measured, {**facts, **measure(args.seeds)})
        if args.only in (None, "train"):
            setting = (args.train_seeds, args.tokens, args.samples, args.steps)
            write(trained, {**facts, **compare(*setting, args.target, args.rates)})
    finally:
        torch.set_num_threads(threads)
    records = {}
    for file in (measured, trained):
        if file.exists():
            try:
                records[file] = json.loads(file.read_text(encoding="utf-8"))
            except ValueError as error:
                parser.error(f"{file} is no JSON ({error}): make it again, without --only draw")
    if not records:
        parser.error(f"{args.out} has neither {measured.name} nor {trained.name} to draw")
    failed = 0
    if record := records.get(measured):
        propagation_view.draw_measured(record, args.out)
        for row in record["checks"]:
            failed += not row["holds"]
            mark = "ok " if row["holds"] else "NOT"
            print(f"{mark} {row['name']}: {row['found']:.4g}, expected {row['expected']:.4g}")
    if record := records.get(trained):
        propagation_view.draw_training(record, args.out)
    sys.exit(1 if failed else 0)
