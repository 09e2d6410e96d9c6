"""How long `condition`, `fold` and `inspect` take on a CPU.

python benchmarks/condition_cpu.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import timm
import torch
from _record import write

import attncond as ac


def median_seconds(job: Callable[[], object], repeats: int) -> float:
    """Median wall time of a job."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        job()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit_base_patch16_224")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/condition_cpu.json"))
    args = parser.parse_args()
    model = timm.create_model(args.model)

    def once(method: ac.Spectral) -> Callable[[], None]:
        def job() -> None:
            ac.condition(model, method).remove()

        return job

    def svd() -> None:  # what a first version would do: every singular value of every matrix
        for site in ac.inspect(model):
            for p in site.projections:
                torch.linalg.svdvals(p.matrix().detach().flatten(0, 1))

    seconds = {
        "inspect": median_seconds(lambda: ac.inspect(model), args.repeats),
        "identity": median_seconds(once(ac.Spectral()), args.repeats),
        "identity_per_head": median_seconds(once(ac.Spectral(scope="head")), args.repeats),
        "paper": median_seconds(once(ac.Spectral.paper()), args.repeats),
        "polar": median_seconds(once(ac.Spectral.paper_svd()), 1),
        "svdvals_of_every_projection": median_seconds(svd, 1),
    }
    for name, value in seconds.items():
        print(f"{name:30s} {value:8.3f} s")
    write(
        args.out, {"settings": {"model": args.model, "repeats": args.repeats}, "seconds": seconds}
    )


if __name__ == "__main__":
    main()
