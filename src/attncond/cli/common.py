"""What all commands share: options, and how a user's mistake is told."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from attncond.errors import ConditioningError

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="timm:NAME, hf:FOLDER (local, with a config.json), or MODULE:FUNCTION, which is "
        "imported from the current directory and called without arguments.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, to stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of a mistake.")]


def examples(*calls: str) -> str:
    """What stands below a help text."""
    return "\n\n".join(["Examples:", *calls])


@contextlib.contextmanager
def mistakes(debug: bool) -> Iterator[None]:
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
