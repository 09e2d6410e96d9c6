"""attncond demo: a small ViT on digits, stock and with each method."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from attncond.cli.common import Debug, Json, mistakes

EXAMPLES = ("attncond demo", "attncond demo --quick --out quick --json")


def demo_command(
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for results.json, figure.png and report.html.", show_default=True
        ),
    ] = Path("attncond-demo"),
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Runs per variant.  [default: 2]")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Epochs per run.  [default: 25]")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One seed, three epochs.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train a small ViT on digits: stock and with each method, from the same start.

    About three minutes on two cores. Each run is written when it is done, so Ctrl-C loses only the
    one in progress.
    """
    from attncond.demo import Demo

    seeds = seeds or (1 if quick else 2)
    epochs = epochs or (3 if quick else 25)
    command = f"attncond demo --seeds {seeds} --epochs {epochs}"
    with mistakes(debug):
        study = Demo(out, seeds, epochs, command)
        study.prepare()
        console = Console(stderr=as_json)
        interrupted = False
        try:
            _run_demo(study, console)
        except KeyboardInterrupt:
            interrupted = True
        _finish_demo(study, console, as_json=as_json, interrupted=interrupted)
        if interrupted:
            raise typer.Exit(130)


def _run_demo(study: Any, console: Console) -> None:
    from attncond.demo import VARIANTS

    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    with progress:
        whole = progress.add_task(
            "all runs", total=study.seeds * len(VARIANTS) * study.epochs, note=""
        )
        tasks: dict[tuple[str, int], Any] = {}

        def on_epoch(variant: str, seed: int, epoch: int, accuracy: float) -> None:
            key = (variant, seed)
            if key not in tasks:
                tasks[key] = progress.add_task(
                    f"{variant}, seed {seed}", total=study.epochs, note=""
                )
            progress.update(tasks[key], advance=1, note=f"test {accuracy:.1f}%")
            progress.update(whole, advance=1)

        study.run(on_epoch)


def _finish_demo(study: Any, console: Console, *, as_json: bool, interrupted: bool) -> None:
    from attncond.demo import VARIANTS, replace_file
    from attncond.demo_view import figure, table

    if study.runs:
        replace_file(study.out / "figure.png", figure(study))
        console.print(table(study))
        console.print(study.verdict(), markup=False, highlight=False, soft_wrap=True)
        page = study.write_page()
        written = [study.out / "results.json", study.out / "figure.png", *([page] if page else [])]
        told = [f"Written: {', '.join(map(str, written))}"]
        if page:
            told.append(f"Open {page} to see the attention of both models, layer by layer.")
        console.print("\n".join(told), markup=False, highlight=False, soft_wrap=True)
    if interrupted:
        total = study.seeds * len(VARIANTS)
        kept = f"{len(study.runs)} of {total} runs were finished and kept"
        none = "nothing was finished, so nothing was written"
        print(f"attncond: interrupted; {kept if study.runs else none}", file=sys.stderr)
    if as_json:
        print(json.dumps(study.to_dict(), indent=1))
