"""Run recipes: one run after the other, or several side by side on one GPU.

    python -m attncond.lab.run vit-cifar10 --variants baseline,spectral --seeds 5 --jobs 4

Several small trainings share a GPU well. Each worker is a process of its own, which trains runs of
one kind in turn, so that what was compiled for the first serves the others; one that crashes takes
its own run with it, and nothing else. What is finished is skipped, what was interrupted goes on, so
that the answer to any accident is the same command again.

Settings are chosen on the validation images, with ``--validation-only`` and ``--grid``:

    python -m attncond.lab.run vit-cifar10 --variants spectral --grid optim.lr=5e-4,1e-3,2e-3 \\
        --validation-only

The test set is not read then, and result.json says so. The same call without it reads the test set
of what was trained already.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from attncond.errors import ConditioningError
from attncond.lab.config import Config
from attncond.lab.folder import Interrupted, Result, RunError, RunFolder
from attncond.lab.plan import Planned, grid_values, plan, seeds_of
from attncond.lab.pool import Pool
from attncond.lab.timing import Starts, first_step, heard
from attncond.lab.worker import SECONDS_TO_SAVE, job

__all__ = ["MARGIN", "Outcome", "add_arguments", "interruptible", "main", "run", "run_many"]

MARGIN = SECONDS_TO_SAVE + 5
"""Seconds before the time limit in which runs under way are saved, and processes end."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended: finished, diverged, stopped or failed."""

    folder: Path
    state: str
    message: str = ""
    result: Result | None = None  # of those that finished or diverged

    def __str__(self) -> str:
        if self.result is None:
            return f"{self.state}: {self.message}"
        v, parts = self.result.values, [self.state]
        for what in ("test", "validation"):
            if v[f"{what}_accuracy"] is not None:
                parts.append(f"{what} {v[f'{what}_accuracy']:.2f}%")
        if v["step_milliseconds"] is not None:
            parts.append(f"{v['step_milliseconds']:.2f} ms a step")
        return ", ".join([*parts, f"{v['seconds']:.0f} s"])


def run_many(
    runs: Sequence[Planned],
    *,
    jobs: int = 1,
    data: Path | None = None,
    resume: bool = True,
    test: bool = True,
    deadline: float | None = None,
    starts: Starts | None = None,
    say: Callable[[str], None] = lambda text: print(text, flush=True),
) -> list[Outcome]:
    """Train all of them, ``jobs`` at a time, and say how each one ended.

    With one job they are trained in this process, which torchrun or accelerate may have started
    several times. A run that fails does not keep the others from being trained. One that would not
    make a step before the deadline, by what those before it needed, is not begun.

    Args:
        runs: What :func:`attncond.lab.plan.plan` gives.
        jobs: Worker processes; they share the GPU, or the GPUs, of this machine.
        data, resume, test, deadline: As for :func:`attncond.lab.train.train`.
        starts: What earlier calls with the same deadline learnt of how long runs take to begin.
        say: Gets a line for each run.

    Raises:
        KeyboardInterrupt: Ctrl-C; the runs under way have written checkpoints by then.
    """
    if double := [f for f, n in Counter(r.folder for r in runs).items() if n > 1]:
        raise RunError(
            f"two runs would share the folder {double[0]}: name each recipe, variant and value of "
            "a grid once"
        )
    outcomes: dict[Path, Outcome] = {}

    def ended(run: Planned, state: str, message: str) -> None:
        result = RunFolder(run.folder).result() if state in ("finished", "diverged") else None
        outcome = outcomes[run.folder] = Outcome(run.folder, state, message, result)
        say(f"[{len(outcomes)}/{len(runs)}] {run.folder}: {outcome}")

    starts = starts or Starts()
    if jobs > 1 and len(runs) > 1:
        pool = Pool(
            list(runs),
            jobs,
            lambda run: job(run.config, run.folder, data, resume, test, deadline),
            ended,
            deadline,
            starts,
        )
        pool.run()
    else:
        last = None
        for run in runs:
            compiled, last, began = run.kind == last, run.kind, time.time()
            if not starts.worth(deadline, compiled):
                break
            ended(run, *_here(run, data, resume, test, deadline))
            # None for several processes: each would decide for itself.
            if (first := first_step(began)) is not None:
                starts.add(first - began, compiled)
    for run in runs:
        if run.folder not in outcomes:
            ended(run, "stopped", "not begun before the time limit")
    return [outcomes[run.folder] for run in runs]


def _here(
    run: Planned, data: Path | None, resume: bool, test: bool, deadline: float | None
) -> tuple[str, str]:
    from attncond.lab.distributed import SharedError
    from attncond.lab.train import train

    try:
        result = train(
            run.config, run.folder, data=data, resume=resume, test=test, deadline=deadline
        )
    except Interrupted as error:
        if error.reason != "time limit":
            raise
        return "stopped", str(error)
    except ConditioningError as error:
        if _several() and not isinstance(error, SharedError):
            raise  # the others wait for this process: its end is what the launcher ends them by
        return "failed", str(error)
    return result.status, ""


def _several() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"'{text}' must be KEY=VALUE, e.g. optim.lr=1e-3")
    return key.strip(), value


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"'{text}' must be a number from 1 on")
    return int(text)


class _Parser(argparse.ArgumentParser):
    """Tells a mistake as all others are told: whoever calls the command has many names for it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"attncond: {message}. --help lists the options\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``python -m attncond.lab.run`` and ``attncond lab run`` take."""
    add = parser.add_argument
    add("names", nargs="+", metavar="NAME", help="recipes: names, or paths of YAML files")
    add("--form", default="small", help="paper, small or smoke (default: small)")
    add("--variants", help="some of the recipe's, with commas, or all (default: its main ones)")
    add("--seeds", type=seeds_of, default=[0], help="5: the first five; 0-4 or 0,7: these")
    add("--set", type=_pair, action="append", default=[], metavar="KEY=VALUE", dest="settings")
    add(
        "--grid",
        type=_pair,
        action="append",
        default=[],
        metavar="KEY=A,B",
        help="a run for each value; values with commas in quotes or brackets",
    )
    add("--data", type=Path, help="folder of the data (default: $ATTNCOND_DATA, or data)")
    add("--out", type=Path, default=Path("runs"), help="folder of the runs (default: runs)")
    add("--jobs", type=_count, default=1, help="runs side by side on this machine's GPUs")
    add("--time-limit", type=float, metavar="SECONDS", help="stop, with checkpoints, before it")
    add("--validation-only", action="store_true", help="leave the test set unread")
    add("--restart", action="store_true", help="start over instead of going on")


def run(args: argparse.Namespace) -> int:
    """Do what the arguments say; the exit code."""
    began = time.time()
    grid: dict[str, list[str]] = {}
    for key, text in args.grid:
        grid.setdefault(key, []).extend(grid_values(key, text))
    runs = plan(
        args.names,
        args.out,
        form=args.form,
        variants=None if args.variants is None else [v.strip() for v in args.variants.split(",")],
        seeds=args.seeds,
        overrides=dict(args.settings),
        grid=grid,
    )
    # To start over is to delete what is there: not for a training that cannot begin.
    due = [r for r in runs if args.restart or not (r.folder / "result.json").exists()]
    _check([r.config for r in due], args.data)
    if _several() and args.jobs > 1:
        raise RunError("--jobs is for one process; torchrun and accelerate started several")

    def say(text: str) -> None:
        if not (_several() and _rank()):
            print(text, flush=True)

    outcomes = run_many(
        runs,
        jobs=args.jobs,
        data=args.data,
        resume=not args.restart,
        test=not args.validation_only,
        deadline=None if args.time_limit is None else began + args.time_limit - MARGIN,
        say=say,
    )
    counts = Counter(outcome.state for outcome in outcomes)
    say(f"{', '.join(f'{n} {state}' for state, n in counts.items())}; runs are in {args.out}")
    if counts["stopped"]:
        say(f"The same command{_without(args)} goes on with what was stopped.")
    return 1 if counts["stopped"] or counts["failed"] else 0


def _check(configs: Sequence[Config], folder: Path | None) -> None:
    """Whether data and models are there: told once, at the start, and not by every run."""
    from attncond.lab.data import find
    from attncond.lab.models import check

    for data in {(c.data.name, c.data.augment.randaugment): c.data for c in configs}.values():
        find(data, folder)
    # What a model starts with changes nothing about whether it can be built and read images.
    models = [(c.model.model_copy(update={"init": "default"}), c.data.image_size) for c in configs]
    for model, size in {repr(both): both for both in models}.values():
        check(model, size)


def _without(args: argparse.Namespace) -> str:
    return " without --restart" if args.restart else ""


def _as_interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def interruptible(work: Callable[[], int], without: str = "") -> int:
    """The exit code of a command that trains, whatever ends it.

    SIGTERM, and SIGHUP where it is not ignored, end it as Ctrl-C does: with checkpoints, and with
    no worker left behind (130); ``without`` is what the command has to do without to go on then.
    Mistakes are told (2).
    """
    for number in heard():
        if number != signal.SIGINT:
            signal.signal(number, _as_interrupt)
    try:
        return work()
    except (KeyboardInterrupt, Interrupted) as error:
        said = f"{error}. " if str(error) else ""
        print(f"{said}The same command{without} goes on from here.", file=sys.stderr)
        return 130
    except ConditioningError as error:
        process = f" (process {_rank()})" if _rank() else ""
        print(f"attncond{process}: {error}", file=sys.stderr)
        return 2


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code.

    0 all runs ended; 1 some failed, or the time limit came first; 2 a mistake in the call; 130
    Ctrl-C.
    """
    parser = _Parser(prog="python -m attncond.lab.run", description="Run recipes of the lab.")
    add_arguments(parser)
    args = parser.parse_args(argv)
    return interruptible(lambda: run(args), _without(args))


if __name__ == "__main__":
    ended = main()
    if _several():
        from attncond.lab.distributed import leave

        leave(ended)
    sys.exit(ended)
