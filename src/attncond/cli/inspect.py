"""attncond inspect: list every attention of a model."""

from __future__ import annotations

import contextlib
import json
import sys

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attncond._version import __version__
from attncond.cli.common import Debug, Json, Model, mistakes
from attncond.inspection import Plan, inspect
from attncond.sources import build

EXAMPLES = (
    "attncond inspect timm:vit_base_patch16_224",
    "attncond inspect hf:./my-model --json",
    "attncond inspect my_models:build",
)


def inspect_command(
    source: Model,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List every attention of a model: where Q, K and V live, and what is not supported.

    Nothing is downloaded and no code of a checkpoint is run. Exit code 1 if some attention is not
    supported or there is none.
    """
    with mistakes(debug):
        # A user's factory may print; stdout belongs to the answer.
        with contextlib.redirect_stdout(sys.stderr):
            model = build(source)
            plan = inspect(model)
        supported = bool(plan.sites) and not plan.unsupported
        if as_json:
            facts = {"model": source, "attncond": __version__, "supported": supported}
            print(json.dumps({**facts, **plan.to_dict()}, indent=1))
        elif sys.stdout.isatty():
            print_plan(plan, Console())
        else:
            print(plan)  # rich would cut the columns of a pipe at 80 characters
        if not supported:
            if not plan.sites and not plan.unsupported:
                print("attncond: no attention was found in this model", file=sys.stderr)
            raise typer.Exit(1)


def print_plan(plan: Plan, console: Console) -> None:
    """The sites as a table that folds long paths instead of cutting them."""
    count = len(plan.sites)
    title = f"{count} attention site" + ("" if count == 1 else "s")
    shown = Table(title=title, title_justify="left")
    for name in ("path", "class", "kind", "heads", "layout", "heads x head_dim x in"):
        shown.add_column(name, overflow="fold")
    for site in plan.sites:
        shown.add_row(
            escape(site.path) or "(the model)",
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
