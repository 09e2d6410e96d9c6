"""attncond lab: run the papers' experiments, see how far they are, make tables and figures."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import json
import math
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attncond.cli.common import Debug, Json, examples, mistakes
from attncond.errors import ConditioningError
from attncond.inspection import table as aligned

if TYPE_CHECKING:
    from attncond.lab.config import Section
    from attncond.lab.runs import Run, State

app = typer.Typer(
    name="lab",
    help="Train the papers' models with and without conditioning, and make tables and figures.\n\n"
    "Needs `pip install 'attncond[lab]'`.",
    epilog=examples(
        "attncond lab list",
        "attncond lab run vit-cifar10 --variants baseline,spectral --seeds 5 --data DIR",
        "attncond lab status",
        "attncond lab table 1 runs",
        "attncond lab figure 2 runs --out figure2.png",
    ),
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

Runs = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="[RUNS]...",
        help="Folders of runs or above them, patterns, files of `lab collect`.  [default: runs]",
        show_default=False,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting: --set optim.lr=5e-4."),
]
Form = Annotated[str, typer.Option(help="paper, small (one GPU, minutes) or smoke (two cores).")]
_DEFAULT = Path("runs")


@contextlib.contextmanager
def _told(debug: bool) -> Iterator[None]:
    """Mistakes as everywhere, and what to install where the lab's libraries are missing."""
    with mistakes(debug):
        try:
            yield
        except ImportError as error:
            if debug or (error.name or "").startswith("attncond"):
                raise
            raise ConditioningError(
                f"attncond lab needs {error.name or error}, which is not installed: "
                "pip install 'attncond[lab]'"
            ) from error
        except BrokenPipeError:  # `| head`
            raise
        except OSError as error:
            raise ConditioningError(str(error)) from error


@app.command("list", epilog=examples("attncond lab list", "attncond lab list 'table1*' --json"))
def list_command(
    pattern: Annotated[
        str | None, typer.Argument(help="Of a recipe's name, or of the tables it is for.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List the recipes: their names, what they are for, their variants."""
    with _told(debug):
        from attncond.lab.recipe import list_recipes

        found = [r for r in list_recipes() if _matches(pattern, [r.name, *r.tables])]
        if not found:
            names = ", ".join(r.name for r in list_recipes())
            raise ConditioningError(f"no recipe is like '{pattern}'; there are {names}")
        if as_json:
            facts = [
                {"name": r.name, "title": r.title, "tables": list(r.tables)}
                | {"forms": list(r.forms), "variants": list(r.variants), "main": list(r.main)}
                for r in found
            ]
            print(json.dumps(facts, indent=1, ensure_ascii=False))
            return
        body = [(r.name, str(len(r.main)), str(len(r.variants)), r.title) for r in found]
        print(aligned(("recipe", "main", "variants", "what it asks"), body))
        print("\nattncond lab show NAME shows one; attncond lab run NAME runs its main variants.")


@app.command("show", epilog=examples("attncond lab show vit-cifar10 --form paper"))
def show_command(
    name: Annotated[str, typer.Argument(help="A recipe's name, or the path of a YAML file.")],
    form: Form = "small",
    variant: Annotated[
        str | None, typer.Option(help="Only this one's settings, ready for a file of your own.")
    ] = None,
    settings: Set = None,
    debug: Debug = False,
) -> None:
    """Show a recipe: its variants, and all settings of one form as YAML, with what they mean."""
    with _told(debug):
        from attncond.lab.recipe import load

        recipe = load(name)
        if variant is None:
            print(f"# {recipe.name}: {recipe.title}")
            print(
                f"# tables: {', '.join(recipe.tables) or 'none'}; forms: {', '.join(recipe.forms)}"
            )
            if len(recipe.main) < len(recipe.variants):
                print(f"# run unless others are named: {', '.join(recipe.main)}")
            for key, changes in recipe.variants.items():
                text = json.dumps(changes, ensure_ascii=False) if changes else "as it is"
                print(f"# variant {key}: {text}")
            print()
        first = variant or next(iter(recipe.variants))
        config = recipe.config(form, first, 0, _settings(settings))
        print(f"# form {form}, variant {first}")
        for line in _explained(config):
            print(line)


@app.command(
    "run",
    epilog=examples(
        "attncond lab run digits --form smoke",
        "attncond lab run vit-cifar10 --seeds 5 --jobs 4 --data DIR",
        "attncond lab run vit-cifar10 --variants baseline,spectral --set schedule.epochs=40",
    ),
)
def run_command(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="Recipes: names, or paths of YAML files.")
    ],
    form: Form = "small",
    variants: Annotated[
        str | None,
        typer.Option(help="Some, by commas, or all.  [default: main]", show_default=False),
    ] = None,
    seeds: Annotated[str, typer.Option(help="5 for the seeds 0 to 4; 0-2 or 0,3 for those.")] = "1",
    settings: Set = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid",
            metavar="KEY=A,B",
            help="A run for each value, to choose from; values with commas in quotes or brackets.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(envvar="ATTNCOND_DATA", help="Where data sets are.  [default: data]"),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where runs go.")] = _DEFAULT,
    jobs: Annotated[int, typer.Option(min=1, help="Runs side by side on one device.")] = 1,
    time_limit: Annotated[
        float | None, typer.Option(min=0, metavar="SECONDS", help="Stop before, resumably.")
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Start over instead of going on.")
    ] = False,
    validation_only: Annotated[
        bool,
        typer.Option(
            "--validation-only", help="Leave the test set unread while settings are chosen."
        ),
    ] = False,
    debug: Debug = False,
) -> None:
    """Run recipes, their main variants or others; what is there is kept, what was stopped goes on.

    Exit code 1 if a run failed, or the time limit came before the end. For several processes use
    `torchrun -m attncond.lab.run` or `accelerate launch -m attncond.lab.run` with these options.
    """
    with _told(debug):
        from attncond.lab import run as runner

        call = [*names, "--form", form, "--seeds", seeds, "--out", str(out), "--jobs", str(jobs)]
        call += ["--variants", variants] if variants is not None else []
        _settings([*(settings or ()), *(grid or ())])  # a mistake is told before anything starts
        for option, pairs in (("--set", settings), ("--grid", grid)):
            for pair in pairs or ():
                call += [option, pair]
        call += ["--data", str(data)] if data else []
        call += ["--time-limit", str(time_limit)] if time_limit is not None else []
        call += ["--restart"] if restart else []
        call += ["--validation-only"] if validation_only else []
        raise typer.Exit(runner.main(call))


@app.command("status", epilog=examples("attncond lab status", "attncond lab status runs/vit*"))
def status_command(runs: Runs = None, as_json: Json = False, debug: Debug = False) -> None:
    """Say how far runs are. Exit code 1 if one of them cannot be read."""
    with _told(debug):
        from attncond.lab.results import load_runs, status

        found = load_runs(runs or [_DEFAULT], once=False)
        states: tuple[State, ...] = ("finished", "running", "stopped", "diverged", "broken")
        if as_json:
            facts = [
                {"name": r.name, "source": r.source, "state": r.state, "epochs": r.epochs}
                | {"epoch": _epoch(r), "notes": list(r.notes)}
                | {f"{on}_accuracy": r.accuracy(on) for on in ("validation", "test")}
                for r in found
            ]
            print(json.dumps(facts, indent=1, ensure_ascii=False))
        else:
            body = []
            for group in status(found):
                counts = [str(group.count(state) or "") for state in states]
                body.append((group.recipe, group.form, group.variant, *counts, _last(group.runs)))
            head = ("recipe", "form", "variant", *states, "now")
            used = [i for i in range(len(head)) if i < 3 or any(row[i] for row in body)]
            print(aligned(tuple(head[i] for i in used), [tuple(r[i] for i in used) for r in body]))
            for run in found:
                for note in run.notes:
                    print(f"{run.source}: {note}")
        if any(run.state == "broken" for run in found):
            raise typer.Exit(1)


@app.command(
    "table", epilog=examples("attncond lab table 1", "attncond lab table 5 runs --out table5.html")
)
def table_command(
    number: Annotated[str, typer.Argument(help="1, 5, 6, 7, 8, 9 (arXiv:2603.07162) or pre2.")],
    runs: Runs = None,
    kind: Annotated[
        str | None,
        typer.Option("--format", help="text, markdown, html, csv or json.  [default: text]"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="A file; its ending says the format, too.")
    ] = None,
    on: Annotated[
        str, typer.Option(help="test, or validation while settings are chosen.")
    ] = "test",
    debug: Debug = False,
) -> None:
    """Make one of the papers' tables from runs, beside the papers' numbers.

    Any runs will do; what is missing is listed, with the command that makes it.
    """
    with _told(debug):
        from attncond.lab.sheet import FORMATS
        from attncond.lab.tables import table

        endings = {".md": "markdown", ".html": "html", ".csv": "csv", ".json": "json"}
        endings |= {".txt": "text", "": "text"}
        if kind is None and out is not None and out.suffix.lower() not in endings:
            raise ConditioningError(
                f"--out {out}: a table's format is told by .txt, .md, .html, .csv or .json; "
                "another ending needs --format"
            )
        kind = kind or (endings[out.suffix.lower()] if out else "text")
        if kind not in FORMATS:
            raise ConditioningError(f"--format {kind}: there are {', '.join(FORMATS)}")
        if on not in ("test", "validation"):
            raise ConditioningError(f"--on {on}: there are test and validation")
        text = FORMATS[kind](table(number, _runs(runs), on))
        if out is None:
            print(text.rstrip())
        else:
            _write(out, text.rstrip() + "\n")


@app.command(
    "figure",
    epilog=examples(
        "attncond lab figure 2 runs --out figure2.png",
        "attncond lab figure pre2 --variant precondition --out epochs.svg",
    ),
)
def figure_command(
    number: Annotated[
        str, typer.Argument(help="2, 3, 5 to 12 (arXiv:2603.07162), pre2, pre3 or lambda.")
    ],
    runs: Runs = None,
    out: Annotated[Path | None, typer.Option(help="A .png, .svg or .pdf.")] = None,
    variant: Annotated[
        str | None, typer.Option(help="Which one beside the baseline.  [default: spectral]")
    ] = None,
    debug: Debug = False,
) -> None:
    """Draw one of the papers' figures from runs."""
    with _told(debug):
        from attncond.lab.figures import check_figure, figure
        from attncond.lab.results import load_runs

        path = check_figure(number, out or Path(f"figure-{number}.png"))
        print(f"Written: {figure(number, load_runs(runs or [_DEFAULT]), path, variant)}")


@app.command("collect", epilog=examples("attncond lab collect runs/vit-cifar10 --out vit.json"))
def collect_command(
    runs: Runs = None,
    out: Annotated[Path, typer.Option(help="A .json file.")] = Path("runs.json"),
    debug: Debug = False,
) -> None:
    """Put runs into one small file that tables and figures read, to keep or to commit.

    It has results, settings, accuracies by epoch and the Monitor's curves, but no weights.
    """
    with _told(debug):
        from attncond.lab.results import collect, dumps, load_runs

        found = load_runs(runs or [_DEFAULT])
        places = " ".join(shlex.quote(str(place)) for place in runs or [_DEFAULT])
        record = collect(found, f"attncond lab collect {places} --out {shlex.quote(str(out))}")
        _write(out, dumps(record))
        unfinished = [run.name for run in found if run.state in ("running", "stopped", "broken")]
        if unfinished:
            print(f"attncond: {len(unfinished)} of them have not finished", file=sys.stderr)


def _write(path: Path, text: str) -> None:
    from attncond.files import write_text

    try:
        write_text(path, text)
    except OSError as error:
        if error.errno is None:  # says it all
            raise
        room = "make room there, or " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise ConditioningError(
            f"{path} cannot be written: {error.strerror}; {room}name another place with --out"
        ) from error
    print(f"Written: {path}")


def _runs(runs: list[Path] | None) -> list[Run]:
    from attncond.lab.results import load_runs

    if not runs and not _DEFAULT.exists():
        return []  # a table without runs is the paper's, and says how to make ours
    return load_runs(runs or [_DEFAULT])


def _settings(pairs: list[str] | None) -> dict[str, str]:
    found = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals:
            raise ConditioningError(f"'{pair}' is no setting: write KEY=VALUE, like optim.lr=5e-4")
        found[key.strip()] = value
    return found


def _explained(section: Section, indent: str = "") -> Iterator[str]:
    """The lines of a section as YAML, what each setting means behind it."""
    import yaml

    from attncond.lab.config import Section

    plain = section.model_dump(mode="json")
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield f"{indent}{name}:"
            yield from _explained(value, f"{indent}  ")
            continue
        lines = yaml.safe_dump({name: plain[name]}, sort_keys=False, width=math.inf).splitlines()
        meaning = " ".join((info.description or "").split())
        yield (
            f"{indent}{lines[0]:<{32 - len(indent)}} # {meaning}" if meaning else indent + lines[0]
        )
        yield from (indent + line for line in lines[1:])


def _matches(pattern: str | None, texts: list[str]) -> bool:
    if pattern is None:
        return True
    return any(fnmatch.fnmatch(t, pattern) or t.startswith(pattern) for t in texts)


def _epoch(run: Run) -> float | None:
    return float(run.metrics[-1]["epoch"]) if run.metrics else None


def _last(runs: tuple[Run, ...]) -> str:
    """Where the runs are that have not ended."""
    open_ = [run for run in runs if run.state in ("running", "stopped")]
    return ", ".join(f"seed {r.seed}: epoch {_epoch(r) or 0:g} of {r.epochs}" for r in open_)
