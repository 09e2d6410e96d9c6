"""How many small trainings a GPU does in a minute: alone, and several side by side.

    python benchmarks/lab_throughput.py --data data/lab --out OUT --budget 280

Trains a few epochs of each recipe's small form, alone and with several jobs, and writes
OUT/throughput.json after every phase: step times, what starting and compiling costs, and the runs
of 20 epochs a minute that follow from them. What does not fit into the budget is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MPS = {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/mps", "CUDA_MPS_LOG_DIRECTORY": "/tmp/mps"}
ARCHITECTURES = ("vit", "deit", "swin", "xcit", "davit")
EPOCHS = 20  # of a whole run, for which runs a minute are given


@dataclass(frozen=True)
class Phase:
    """One call of the lab: so many runs of these recipes, so many at a time."""

    name: str
    recipes: tuple[str, ...]
    jobs: int
    seeds: int
    epochs: int
    mps: bool = False
    seconds: float = 60.0  # what it may need, at the least


PHASES = (
    Phase("cold", ARCHITECTURES, 5, 1, 1, seconds=90),
    Phase("alone", ARCHITECTURES, 1, 1, 3),
    Phase("jobs4", ("vit",), 4, 8, 4),
    Phase("jobs8", ("vit",), 8, 16, 4),
    Phase("jobs4-mps", ("vit",), 4, 8, 4, mps=True),
    Phase("jobs8-mps", ("vit",), 8, 16, 4, mps=True),
    Phase("jobs2", ("vit",), 2, 4, 4),
    Phase("jobs6", ("vit",), 6, 12, 4),
    Phase("mixed5", ARCHITECTURES, 5, 2, 4),
)


def measure(phase: Phase, args: argparse.Namespace, limit: float) -> dict[str, Any]:
    """Run a phase; what its runs say."""
    with tempfile.TemporaryDirectory() as folder:
        call = [sys.executable, "-m", "attncond.lab.run"]
        call += [f"{name}-cifar10" for name in phase.recipes]
        call += ["--variants", args.variant, "--seeds", str(phase.seeds), "--jobs", str(phase.jobs)]
        call += ["--set", f"schedule.epochs={phase.epochs}", "--set", "schedule.warmup_epochs=0"]
        call += ["--set", f"train.evaluate_every={phase.epochs}", "--form", args.form]
        call += ["--data", str(args.data), "--out", folder, "--time-limit", f"{limit:.0f}"]
        environment = {**os.environ, **(MPS if phase.mps else {})}
        start = time.perf_counter()
        done = subprocess.run(call, env=environment, capture_output=True, text=True)
        wall = time.perf_counter() - start
        runs = [json.loads(p.read_text()) for p in sorted(Path(folder).rglob("result.json"))]
        logs = sorted(Path(folder).rglob("log.txt"))
        tails = [p.read_text()[-1500:] for p in logs] if done.returncode else []
    kept = [
        {
            "recipe": r["config"]["recipe"],
            "seed": r["config"]["seed"],
            **{k: r[k] for k in ("step_milliseconds", "warm_up_seconds", "seconds", "steps")},
            "peak_memory_bytes": r["peak_memory_bytes"],
            "validation_accuracy": r["validation_accuracy"],
            "hardware": r["hardware"]["name"],
        }
        for r in runs
    ]
    found: dict[str, Any] = {
        "phase": phase.name,
        "jobs": phase.jobs,
        "mps": phase.mps,
        "epochs": phase.epochs,
        "wall_seconds": wall,
        "exit_code": done.returncode,
        "said": (done.stdout + done.stderr)[-3000:],
        "logs": tails[:4],
        "runs": kept,
    }
    steps = [r["step_milliseconds"] for r in kept if r["step_milliseconds"]]
    if steps and len(phase.recipes) == 1:
        whole = kept[0]["steps"] / phase.epochs * EPOCHS
        seconds = whole * statistics.median(steps) / 1000
        found["median_step_milliseconds"] = statistics.median(steps)
        found["runs_per_minute"] = 60 * phase.jobs / seconds  # of steps alone
        again = [r["warm_up_seconds"] for r in kept if r["seed"] >= phase.jobs]
        if again:  # a worker's second run, whose code is compiled already
            found["second_warm_up_seconds"] = statistics.median(again)
    return found


def main() -> None:
    """Phase by phase, as long as the budget lasts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--budget", type=float, default=280.0)
    parser.add_argument("--form", default="small")
    parser.add_argument("--variant", default="baseline")
    parser.add_argument("--phases", help="some of them, with commas")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.budget
    chosen = args.phases.split(",") if args.phases else [p.name for p in PHASES]
    record: dict[str, Any] = {"phases": [], "left_out": []}
    mps = shutil.which("nvidia-cuda-mps-control")
    for phase in (p for p in PHASES if p.name in chosen):
        left = end - time.monotonic()
        if left < phase.seconds or (phase.mps and mps is None):
            record["left_out"].append(
                [phase.name, "no MPS here" if phase.mps and not mps else "time"]
            )
        else:
            if phase.mps:
                Path("/tmp/mps").mkdir(exist_ok=True)
                subprocess.run([str(mps), "-d"], env={**os.environ, **MPS}, timeout=20)
            found = measure(phase, args, left)
            record["phases"].append(found)
            brief = {k: v for k, v in found.items() if k not in ("runs", "said", "logs")}
            print(json.dumps(brief), flush=True)
            for run in found["runs"]:
                print("   ", json.dumps(run), flush=True)
            if found["exit_code"]:
                print(found["said"], *found["logs"][:1], sep="\n", flush=True)
        (args.out / "throughput.json").write_text(json.dumps(record, indent=1))
    if any(p["mps"] for p in record["phases"]):
        subprocess.run([str(mps)], input="quit\n", text=True, env={**os.environ, **MPS}, timeout=20)


if __name__ == "__main__":
    main()
