"""How long all weight spectra of ViT-B/16 take, beside WeightWatcher's in the same run.

    pip install weightwatcher
    OMP_NUM_THREADS=2 python benchmarks/spectra.py

ac.diagnose(model) without a batch solves W_Q, W_K and W_V of every layer, whole and head by head:
468 matrices. WeightWatcher's analyze() is given three things: the model, of which it solves every
layer (50, of which 12 hold Q, K and V as one matrix); those 12 alone; and the very 468 matrices,
each as a layer. It fits a power law to each spectrum besides, which is what it is for. The other
way round, the Linear layers that it solves are given to what solves ours. Each round runs all, one
after the other, and ratios are taken within rounds. Writes results/benchmarks/spectra_cpu.json.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
import weightwatcher
from _record import write
from torch import nn

import attncond as ac
from attncond.diagnose.measure import singular_values
from attncond.diagnose.threads import side_by_side

warnings.filterwarnings("ignore")
logging.getLogger("weightwatcher").setLevel(logging.ERROR)


def matrices(model: nn.Module) -> dict[tuple[str, str, int | None], nn.Linear]:
    """Every W_Q, W_K and W_V, whole (head None) and by head, as a layer without bias."""
    layers = {}
    for site in ac.inspect(model).sites:
        for p in site.projections:
            parts = {None: p.matrix().flatten(0, 1)} | dict(enumerate(p.matrix()))
            for head, part in parts.items():
                layer = nn.Linear(part.shape[1], part.shape[0], bias=False)
                layer.weight.data.copy_(part.detach())
                layers[site.path, p.role, head] = layer
    return layers


def ids(watcher: Any, ending: str) -> list[int]:
    """WeightWatcher's numbers of the layers with a name."""
    table = watcher.describe()
    pairs = zip(table.layer_id, table.longname, strict=True)
    return [int(i) for i, name in pairs if name.endswith(ending)]


def agreement(
    report: ac.diagnose.Report, named: dict[tuple[str, str, int | None], nn.Linear], table: Any
) -> dict[str, float]:
    """The largest relative differences: to WeightWatcher's, and to one SVD in float64 each."""
    rows = {(r.path, r.head): r.values for r in report.rows}
    worst = {"weightwatcher_sigma_max": 0.0, "weightwatcher_sigma_min": 0.0}
    worst |= {"svd_sigma_max": 0.0, "svd_sigma_min": 0.0}
    found = {int(name): row for name, row in zip(table.name, table.itertuples(), strict=True)}
    for i, ((path, role, head), layer) in enumerate(named.items()):
        sigma = torch.linalg.svdvals(layer.weight.detach().double())
        ours = rows[path, head]
        row: Any = found[i]
        for name, end, theirs in (("max", 0, row.sv_max), ("min", -1, row.sv_min)):
            mine: Any = ours[f"{role}_sigma_{name}"]
            for who, value in (("svd", float(sigma[end])), ("weightwatcher", float(theirs))):
                key = f"{who}_sigma_{name}"
                worst[key] = max(worst[key], abs(mine / value - 1))
    return worst


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit_base_patch16_224")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/spectra_cpu.json"))
    args = parser.parse_args()
    torch.manual_seed(0)
    model = timm.create_model(args.model)
    named = matrices(model)
    same = weightwatcher.WeightWatcher(model=nn.ModuleList(named.values()))
    whole = weightwatcher.WeightWatcher(model=model)
    qkv = ids(whole, "attn.qkv")
    linear = [m.weight.detach() for m in model.modules() if isinstance(m, nn.Linear)]
    jobs: dict[str, Callable[[], Any]] = {
        "attncond": lambda: ac.diagnose(model),
        "weightwatcher_model": lambda: whole.analyze(),
        "weightwatcher_qkv": lambda: whole.analyze(layers=qkv),
        "weightwatcher_same": lambda: same.analyze(),
        "attncond_linear": lambda: list(side_by_side(singular_values, linear)),
    }
    times: dict[str, list[float]] = {name: [] for name in jobs}
    results: dict[str, Any] = {}
    for round_ in range(args.rounds + 1):  # the first loads what it needs
        for name, job in jobs.items():
            start = time.perf_counter()
            results[name] = job()
            if round_:
                times[name].append(time.perf_counter() - start)
        load = os.getloadavg()[0]
        if round_:
            line = ", ".join(f"{n} {t[-1]:.2f} s" for n, t in times.items())
            print(f"round {round_}: {line}; load {load:.1f}", flush=True)
    ratios = {
        name: [t / o for t, o in zip(times[name], times["attncond"], strict=True)]
        for name in ("weightwatcher_model", "weightwatcher_qkv", "weightwatcher_same")
    }
    record = {
        "model": args.model,
        "rounds": args.rounds,
        "matrices": {
            "attncond": len(named),
            "weightwatcher_model": len(results["weightwatcher_model"]),
            "weightwatcher_qkv": len(qkv),
            "weightwatcher_same": len(results["weightwatcher_same"]),
            "attncond_linear": len(linear),
        },
        "seconds": {name: statistics.median(t) for name, t in times.items()},
        "seconds_all": times,
        "times_faster_than": {name: statistics.median(r) for name, r in ratios.items()},
        "times_faster_than_least": {name: min(r) for name, r in ratios.items()},
        "largest_relative_difference": agreement(
            results["attncond"], named, results["weightwatcher_same"]
        ),
    }
    write(args.out, record)
    for name, ratio in record["times_faster_than"].items():
        print(f"{ratio:.2f} times faster than {name}")
    print(record["largest_relative_difference"])


if __name__ == "__main__":
    main()
