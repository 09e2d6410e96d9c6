"""What a command asks for: recipes, variants, seeds and grids as runs, each with a folder."""

from __future__ import annotations

import argparse
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from attncond.lab.config import Config, RecipeError
from attncond.lab.folder import run_path

__all__ = ["Planned", "grid_values", "plan", "seeds_of"]

LONGEST = 255  # bytes of a file's name, on nearly every drive
MOST = 10_000  # seeds: who asks for more means the one with that number


@dataclass(frozen=True)
class Planned:
    """A run, and where."""

    config: Config
    folder: Path

    @property
    def kind(self) -> tuple[str, str]:
        """The architecture, and all that a compiled step depends on."""
        from attncond.lab.objective import compile_key

        return repr(self.config.model), compile_key(self.config)


def plan(
    names: Sequence[str],
    root: Path,
    *,
    form: str = "small",
    variants: Sequence[str] | None = None,
    seeds: Sequence[int] = (0,),
    overrides: Mapping[str, str] | None = None,
    grid: Mapping[str, Sequence[str]] | None = None,
) -> list[Planned]:
    """The runs of recipes: of the variants that are named, ``["all"]``, or else their main ones.

    Each point of a grid has a folder of its own: ``VARIANT@lr=1e-3``.

    Raises:
        RecipeError: No such recipe, form or variant, or settings that cannot be run.
    """
    from attncond.lab.recipe import load

    grid = grid or {}
    points = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    planned = []
    for recipe in map(load, names):
        wanted = recipe.variants if list(variants or ()) == ["all"] else variants or recipe.main
        for variant, point, seed in itertools.product(wanted, points, seeds):
            config = recipe.config(form, variant, seed, overrides, point)
            folder = run_path(root, config)
            if point:
                label = ",".join(f"{k.rpartition('.')[2]}={_named(v)}" for k, v in point.items())
                folder = folder.parents[1] / f"{variant}@{label}" / folder.name
                if len(os.fsencode(folder.parent.name)) > LONGEST:
                    raise RecipeError(
                        f"--grid: '{folder.parent.name}' is too long for the name of a folder; "
                        "give this point by --set, with an --out of its own"
                    )
            planned.append(Planned(config, folder))
    return planned


def _named(value: str) -> str:
    """A value of a grid in a folder's name: without what YAML writes around it.

    >>> _named("['spectral:kappa=2,scope=head', gap]")
    'spectral:kappa=2,scope=head,gap'
    """
    return re.sub(r"[/\\]", "-", re.sub(r"[\[\]{}\"'\s]", "", value))


def seeds_of(text: str) -> list[int]:
    """``5``: the first five; ``2-4``: two, three and four; ``0,7``: these; ``5,``: this one.

    >>> seeds_of("3"), seeds_of("2-4"), seeds_of("0,7"), seeds_of("5,")
    ([0, 1, 2], [2, 3, 4], [0, 7], [5])
    """
    try:
        spans = []
        for part in text.removesuffix(",").split(","):
            first, _, last = part.partition("-")
            spans.append(range(int(first), int(last or first) + 1))
        if text.isdecimal():
            spans = [range(int(text))]
        if sum(span.stop - span.start for span in spans) > MOST:
            raise argparse.ArgumentTypeError(
                f"'{text}' are more than {MOST:,} seeds; one seed has a comma behind it, as 42,"
            )
        found = [seed for span in spans for seed in span]
        if found and len(set(found)) == len(found):
            return found
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"'{text}' is no number of seeds, nor a range as 0-4 or 0,7")


def grid_values(key: str, text: str) -> list[str]:
    """Those of ``--grid KEY=A,B``; what has a comma of its own stands in quotes or brackets.

    >>> grid_values("methods", "gap, [spectral, gap]")
    ['gap', '[spectral, gap]']

    Raises:
        RecipeError: There is none, or a quote or bracket has no end.
    """
    from attncond.lab.reading import YamlError, split_values

    try:
        values = split_values(text)
    except YamlError as error:
        raise RecipeError(f"--grid {key}={text}: {error}") from error
    if not values:
        raise RecipeError(f"--grid {key}={text}: there is no value")
    return values
