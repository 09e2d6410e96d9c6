"""The command line. Exit codes: 0 fine, 1 a problem was found, 2 a user's mistake, 130 Ctrl-C."""

from __future__ import annotations

from typing import Annotated

import typer

from attncond._version import __version__
from attncond.cli import demo, diagnose, inspect, lab
from attncond.cli.common import examples

app = typer.Typer(
    name="attncond",
    help="Make the attention of a PyTorch transformer well conditioned, and see what it has.\n\n"
    "Exit codes: 0 fine; 1 the job ran and found a problem; 2 a mistake in the call; 130 Ctrl-C.",
    epilog=examples(
        "attncond inspect timm:vit_base_patch16_224",
        "attncond diagnose timm:vit_tiny_patch16_224 --out report.html",
        "attncond demo --out digits",
        "attncond lab list",
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


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


app.command("inspect", epilog=examples(*inspect.EXAMPLES))(inspect.inspect_command)
app.command("diagnose", epilog=examples(*diagnose.EXAMPLES))(diagnose.diagnose_command)
app.command("demo", epilog=examples(*demo.EXAMPLES))(demo.demo_command)
app.add_typer(lab.app)

__all__ = ["app"]
