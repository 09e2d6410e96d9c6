"""The exact κ of attention's Jacobian before the first step, with each method, on real images.

    python benchmarks/start_kappa.py --data DIR     # CIFAR-10 as Parquet; about twenty minutes

The small ViT of the lab as its recipe starts it (seed 0), in evaluation mode, on two of the
validation images that its runs are watched with: first, middle and last layer, all heads, 32 of 65
tokens, float64. Beside it the right side of Theorem 3.4, the certificate that holds, and the
entropy of the attention. Writes results/benchmarks/start_kappa.json.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from pathlib import Path
from typing import Any

import timm  # noqa: F401  (for its version in the record)
import torch
from _record import write

import attncond as ac
from attncond.lab import recipe
from attncond.lab.data import Batches, load
from attncond.lab.trained import make

VARIANTS = ["baseline", "spectral", "paper", "polar", "gap", "precondition", "folded", "mimetic"]
LAYERS, IMAGES, TOKENS = [0, 4, 8], 2, 32
MEANS = ["jacobian_kappa", "jacobian_paper_bound", "jacobian_certificate", "output_kappa"]
OUT = Path(__file__).parents[1] / "results" / "benchmarks" / "start_kappa.json"


def measure(variant: str, images: torch.Tensor) -> dict[str, Any]:
    """Every head by itself, and the geometric mean over all of them."""
    config = recipe.load("vit-cifar10").config("small", variant)
    torch.manual_seed(0)
    model, _ = make(config, 10, 3)
    model.eval()
    rows: list[dict[str, Any]] = []
    begin = time.perf_counter()
    for i, image in enumerate(images):
        report = ac.diagnose(model, image[None], layers=LAYERS, samples=1, tokens=TOKENS)
        heads = [row for row in report.rows if row.head is not None]
        keys = [*MEANS, "jacobian_kappa_error", "jacobian_status", "entropy"]
        rows += [
            {"image": i, "layer": row.layer, "head": row.head}
            | {key: _finite(row.values.get(key)) for key in keys}
            for row in heads
        ]
    found: dict[str, Any] = {"seconds": time.perf_counter() - begin, "heads": rows}
    for key in MEANS:
        values = [row[key] for row in rows if row[key] is not None]
        found[key] = statistics.geometric_mean(values) if len(values) == len(rows) else None
    found["jacobian_kappa_max"] = max((row["jacobian_kappa"] or 0.0) for row in rows) or None
    found["resolved"] = sum(row["jacobian_kappa"] is not None for row in rows)
    found["entropy"] = statistics.fmean(row["entropy"] for row in rows)
    return found


def _finite(value: Any) -> Any:
    """JSON has no infinity; where there is no bound, or no κ, there is none."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main() -> None:
    """Variant after variant."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--variants", nargs="+", default=VARIANTS)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    config = recipe.load("vit-cifar10").config("small")
    source = load(config.data, args.data, 0)
    held = Batches(
        source.validation, config.data, batch_size=IMAGES, seed=0, device=torch.device("cpu"),
        train=False, rank=0, world=1, smoothing=0.0, classes=source.classes,
    )  # fmt: skip
    images = next(iter(held.epoch(0)))[0][:IMAGES]
    figures: dict[str, Any] = {}
    for variant in args.variants:
        figures[variant] = measure(variant, images)
        print(variant, {k: v for k, v in figures[variant].items() if k != "heads"}, flush=True)
    settings = {"layers": LAYERS, "images": IMAGES, "tokens": TOKENS, "data": source.note}
    write(args.out, {"settings": settings, "variants": figures})


if __name__ == "__main__":
    main()
