"""Choose the demo's learning rates: each variant's best on held-out training images.

The test images are not looked at, and the seeds are not those of the demo.
Run: python benchmarks/demo_rates.py  (about five minutes on one core; what is in the file already
is not trained again, so delete it to start over)
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import torch
from _record import write

from attncond import demo

GRID = (1e-3, 2e-3, 4e-3, 8e-3, 16e-3)
SEEDS = (100, 101)
EPOCHS = 25
OUT = Path(__file__).parents[1] / "results" / "demo" / "rates.json"


def main() -> None:
    """Train the grid and write results/demo/rates.json."""
    torch.set_num_threads(1)
    data = demo.load_digits()
    kept, held = slice(0, 1000), slice(1000, None)
    part = demo.Digits(
        data.train_images[kept],
        data.train_labels[kept],
        data.train_images[held],
        data.train_labels[held],
    )
    table: dict[str, dict[str, list[float]]] = {}
    if OUT.exists():
        table = json.loads(OUT.read_text())["accuracy"]
    for variant in demo.VARIANTS:
        for rate in GRID:
            if str(rate) in table.setdefault(variant, {}):
                continue
            runs = [demo.train(variant, seed, EPOCHS, part, rate=rate) for seed in SEEDS]
            table[variant][str(rate)] = [run["accuracy"] for run in runs]
            print(variant, rate, table[variant][str(rate)], flush=True)
    best = {
        variant: float(max(rates, key=lambda rate: statistics.fmean(rates[rate])))
        for variant, rates in table.items()
    }
    figures = {
        "what": "accuracy in % on 257 training images held out of 1,257, after the last epoch",
        "epochs": EPOCHS,
        "seeds": SEEDS,
        "accuracy": table,
        "best": best,
    }
    write(OUT, figures)
    print(best)


if __name__ == "__main__":
    main()
