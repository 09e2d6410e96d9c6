"""The runs behind docs/results.md, stage by stage, as long as the time lasts.

    python benchmarks/lab_runs.py rates main --data DIR --jobs 7 --time-limit 560
    python benchmarks/lab_runs.py why --form smoke --out /tmp/runs     # to see that it runs

What is finished is skipped and what was stopped goes on, so that the same command again continues.
So is what is committed: --known names the collections, results/lab unless said otherwise. Stages
that choose leave the test set unread. `attncond lab run` makes any single one of these runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from attncond.lab.plan import Planned, plan
from attncond.lab.results import load_runs
from attncond.lab.run import MARGIN, interruptible, run_many
from attncond.lab.runs import Run
from attncond.lab.timing import Starts

ROOT = Path(__file__).parents[1]
ALL = ("davit", "xcit", "swin", "deit", "vit")
Part = tuple[Sequence[str], Sequence[str], Sequence[int]]  # architectures, variants, seeds

# Costly architectures first, so that none of them is left alone at the end.
CHOOSE: dict[str, list[Part]] = {
    # Rates of the stock model.
    "rates": [
        (["xcit"], ["tuned-0.25", "tuned-0.5", "tuned-2"], [0]),
        (["davit", "deit", "vit"], ["tuned-0.1", "tuned-0.25", "tuned-0.5"], [0]),
        (["swin"], ["tuned-0.05", "tuned-0.1", "tuned-0.25", "tuned-0.5"], [0]),
    ],
    # Strength, scope and roles of the correction.
    "explore": [
        (["swin"], ["spectral-1.5", "spectral-1.25"], [0, 1]),
        (["swin"], ["spectral-tuned-0.5", "spectral-qk", "spectral-v", "spectral-head"], [0]),
        (["davit"], ["spectral-1.5", "spectral-1.25", "spectral-qk", "spectral-v"], [0]),
        (["davit"], ["spectral-head"], [0]),
        (["xcit"], ["spectral-tuned-2", "spectral-3", "spectral-qk", "spectral-v"], [0]),
        (["vit"], ["spectral-qk", "spectral-v", "spectral-head"], [0]),
        (["deit", "vit"], ["spectral-1.5"], [0]),
    ],
    # Larger effective weights, and smaller ones.
    "gain": [
        (["swin"], ["spectral-gain-2-tuned-0.5", "spectral-gain-2"], [0, 1]),
        (["davit"], ["spectral-gain-2-tuned-0.5", "spectral-gain-2"], [0, 1]),
        (["xcit"], ["spectral-gain-2"], [0]),
        (["swin", "davit"], ["spectral-gain-3-tuned-0.35"], [0]),
        (["deit", "vit"], ["spectral-gain-1.5", "spectral-gain-2-tuned-0.5"], [0]),
        (["swin", "davit"], ["spectral-gain-0.5", "spectral-gain-0.7"], [0]),
        (["swin"], ["spectral-gain-0.5", "spectral-gain-0.7"], [1]),
        (["deit", "vit"], ["spectral-gain-0.7"], [0]),
    ],
    # Starts: λI that is folded in before training (where it is as good as one that stays, a
    # schedule of λ between the two has nothing to win), the polar factor in its place, only some
    # roles, and strengths that differ between them.
    "start": [
        (["vit"], ["folded-qk-tuned", "folded-v-tuned"], [0, 1]),
        (["swin", "davit", "xcit"], ["folded-tuned", "folded-polar-tuned"], [0]),
        (["swin", "davit"], ["folded-qk-tuned", "folded-v-tuned"], [0]),
        (["swin", "davit"], ["folded-qk-1.25-v-3", "folded-qk-3-v-1.25"], [0]),
        (["swin", "davit"], ["folded-qk-gain-1.5-v", "folded-qk-v-gain-1.5"], [0]),
        (["swin"], ["folded-tuned", "folded-polar-tuned"], [1]),
        (["swin"], ["folded-qk-1.25-v-3", "folded-qk-3-v-1.25"], [1]),
        (["xcit"], ["folded"], [0]),
        (["davit"], ["folded-polar-tuned"], [1]),
    ],
    # The output projection as well, and what had one good seed in XCiT and DaViT.
    "output": [
        (["swin"], ["spectral-output", "spectral-minus-output"], [0, 1]),
        (["swin"], ["tuned-output", "spectral-tuned-output"], [0, 1]),
        (["davit"], ["spectral-output", "spectral-minus-output"], [0]),
        (["davit"], ["tuned-output", "spectral-tuned-output"], [0]),
        (["xcit"], ["spectral-3"], [1, 2]),
        (["davit"], ["spectral-head"], [1, 2]),
    ],
    # Methods together, and RemoveGap() at the rates that the stock Swin likes.
    "combine": [
        (["swin"], ["spectral+gap", "gap-tuned-0.25", "gap-tuned-0.1"], [0, 1]),
        (ALL, ["spectral+precondition"], [0]),
        (["davit", "deit", "vit"], ["spectral+gap"], [0]),
        (["xcit"], ["spectral-tuned-2"], [0, 1, 2]),
    ],
}
TEST: dict[str, list[Part]] = {
    "main": [
        (["davit", "deit", "vit"], ["baseline", "tuned-0.25", "spectral"], range(5)),
        (["xcit"], ["baseline", "spectral"], range(5)),
        (["swin"], ["baseline", "tuned-0.1", "spectral"], range(5)),
    ],
    **{name: [(ALL, [name], range(3))] for name in ("paper", "gap", "precondition", "polar")},
    # The two methods that were best together on the validation images.
    "best": [
        (["swin"], ["spectral+gap"], range(5)),
        (["davit", "xcit", "deit", "vit"], ["spectral+precondition"], range(3)),
    ],
    "why": [
        (["vit"], ["folded", "folded-tuned", "mimetic", "mimetic-tuned"], range(3)),
        (["vit"], ["folded-polar-tuned"], range(3)),
    ],
}
LAMBDA = [
    *("lambda-0.1", "lambda-0.5", "lambda-1", "lambda-4", "lambda-10", "baseline", "tuned"),
    *("norm-lambda-0.1", "norm-lambda-0.5", "norm-lambda-1", "norm-lambda-4", "norm-lambda-10"),
    *("norm-kappa-1.25", "norm-kappa-2", "kappa-2"),
]
WATCHED = ["xcit", "xcit+spectral", "vit", "vit+spectral", "vit+precondition"]
WITHOUT_NORM = [f"{name}{method}-noln" for name in ALL for method in ("", "+spectral")]
OTHERS: dict[str, tuple[str, Sequence[str], Sequence[int]]] = {
    "lambda": ("vit-lambda", LAMBDA, range(2)),
    "spectra": ("spectra", WATCHED, range(1)),
    "layernorm": ("layernorm", WITHOUT_NORM, range(1)),
    "tiny": ("vit-tinyimagenet", ["baseline", "tuned", "spectral"], range(3)),
}
STAGES = [*CHOOSE, *TEST, *OTHERS]


def runs(stage: str, form: str, out: Path) -> Iterator[Planned]:
    """What belongs to a stage."""
    if stage in OTHERS:
        recipe, variants, seeds = OTHERS[stage]
        for seed in seeds:  # all variants once before any of them twice
            # Only the first is watched: Jacobians take longer than the training.
            more = {"watch.every": "0", "watch.probe": "false"} if seed else None
            yield from plan(
                [recipe], out, form=form, variants=variants, seeds=[seed], overrides=more
            )
        return
    for architectures, variants, seeds in (CHOOSE | TEST)[stage]:
        names = [f"{name}-cifar10" for name in architectures]
        yield from plan(names, out, form=form, variants=variants, seeds=seeds)


def known(places: Sequence[Path], test: bool) -> set[tuple[str, int, bool]]:
    """Experiment, seed, and whether it was watched, of runs that have ended."""
    found = set()
    for run in load_runs(places, once=False) if places else ():
        if run.state in ("finished", "diverged") and (
            (run.result or {}).get("test_read") or not test
        ):
            found |= {
                (run.experiment, run.seed, watched) for watched in {False, bool(run.curves.steps)}
            }
    return found


def key(planned: Planned) -> tuple[str, int, bool]:
    """The same of one that is to be run."""
    run = Run("", json.loads(planned.config.model_dump_json()), (), None, "stopped")
    return run.experiment, run.seed, planned.config.watch.every > 0


def main() -> int:
    """Stage after stage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "stages", nargs="+", choices=STAGES, metavar="STAGE", help=", ".join(STAGES)
    )
    parser.add_argument("--form", default="small")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--known", type=Path, nargs="*", default=[ROOT / "results" / "lab"])
    parser.add_argument("--plan", action="store_true", help="only say what would be run")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--time-limit", type=float)
    args = parser.parse_args()
    return interruptible(lambda: all_of(args))


def all_of(args: argparse.Namespace) -> int:
    """The exit code: 0 if all runs have ended."""
    end = None if args.time_limit is None else time.time() + args.time_limit - MARGIN
    bad, starts = 0, Starts()
    # One queue for all stages that read the test set, and one for those that do not: a worker that
    # waits for the last run of a stage is a part of the GPU that waits.
    for test, stages in itertools.groupby(args.stages, lambda stage: stage not in CHOOSE):
        there = known(args.known, test)
        # Recipes share experiments: each is run once.
        wanted: dict[tuple[str, int, bool], Planned] = {}
        for stage in stages:
            for run in runs(stage, args.form, args.out):
                wanted.setdefault(key(run), run)
        todo = [run for name, run in wanted.items() if name not in there]
        print(
            f"{len(todo)} runs to make, {len(wanted) - len(todo)} are in the collections",
            flush=True,
        )
        if args.plan:
            print(*(run.folder for run in todo), sep="\n")
            continue
        found = run_many(
            todo,
            jobs=args.jobs,
            data=args.data,
            test=test,
            deadline=end,
            starts=starts,
        )
        bad += sum(outcome.state in ("failed", "stopped") for outcome in found)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
