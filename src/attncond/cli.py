"""The command line. Exit codes: 0 fine, 1 a problem was found, 2 a user's mistake, 130 Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from attncond._version import __version__
from attncond.errors import ConditioningError
from attncond.inspection import Plan, inspect
from attncond.sources import SourceError, build

app = typer.Typer(
    name="attncond",
    help="Make the attention of a PyTorch transformer well conditioned, and see what it has.\n\n"
    "Exit codes: 0 fine; 1 the job ran and found a problem; 2 a mistake in the call; 130 Ctrl-C.",
    epilog="Examples:\n\nattncond inspect timm:vit_base_patch16_224\n\nattncond demo --out digits",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, to stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of a mistake.")]


@contextlib.contextmanager
def _mistakes(debug: bool) -> Iterator[None]:
    """One line and exit code 2 for what a user can put right."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except ConditioningError as error:
        if debug:
            raise
        # Plain: error messages hold brackets that rich would take for markup, and paths it wraps.
        print(f"attncond: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"attncond {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Options of attncond itself."""


@app.command(
    "inspect",
    epilog="Examples:\n\n"
    "attncond inspect timm:vit_base_patch16_224\n\n"
    "attncond inspect hf:./my-model --json\n\n"
    "attncond inspect my_models:build",
)
def inspect_command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="timm:NAME, hf:FOLDER (local, with a config.json), or MODULE:FUNCTION, which is "
            "imported from the current directory and called without arguments.",
        ),
    ],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List every attention of a model: where Q, K and V live, and what is not supported.

    Nothing is downloaded and no code of a checkpoint is run. Exit code 1 if some attention is not
    supported or there is none.
    """
    with _mistakes(debug):
        # A user's factory may print; stdout belongs to the answer.
        with contextlib.redirect_stdout(sys.stderr):
            model = build(source)
            plan = inspect(model)
        supported = bool(plan.sites) and not plan.unsupported
        if as_json:
            facts = {"model": source, "attncond": __version__, "supported": supported}
            print(json.dumps({**facts, **plan.to_dict()}, indent=1))
        elif sys.stdout.isatty():
            _print_plan(plan, Console())
        else:
            print(plan)  # rich would cut the columns of a pipe at 80 characters
        if not supported:
            if not plan.sites and not plan.unsupported:
                print("attncond: no attention was found in this model", file=sys.stderr)
            raise typer.Exit(1)


def _print_plan(plan: Plan, console: Console) -> None:
    shown = Table(title=f"{len(plan.sites)} attention sites", title_justify="left")
    for name in ("path", "class", "kind", "heads", "layout", "heads x head_dim x in"):
        shown.add_column(name, overflow="fold")
    for site in plan.sites:
        shown.add_row(
            site.path or "(the model)",
            site.cls.rsplit(".", 1)[-1],
            site.kind,
            str(site.heads),
            site.layout,
            "\n".join(f"{p.role} {p.heads}x{p.head_dim}x{p.in_features}" for p in site.projections),
        )
    if plan.sites:
        console.print(shown)
    if plan.unsupported:
        console.print(str(Plan((), plan.unsupported)), markup=False, highlight=False)


@app.command(
    epilog="Examples:\n\nattncond demo\n\nattncond demo --quick --out quick --json",
)
def demo(
    out: Annotated[
        Path, typer.Option(help="Folder for results.json and figure.png.", show_default=True)
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
    with _mistakes(debug):
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
        print_path = f"Written: {study.out / 'results.json'}, {study.out / 'figure.png'}"
        console.print(print_path, markup=False, highlight=False, soft_wrap=True)
    if interrupted:
        total = study.seeds * len(VARIANTS)
        kept = f"{len(study.runs)} of {total} runs were finished and kept"
        none = "nothing was finished, so nothing was written"
        print(f"attncond: interrupted; {kept if study.runs else none}", file=sys.stderr)
    if as_json:
        print(json.dumps(study.to_dict(), indent=1))


__all__ = ["SourceError", "app"]
