"""How the demo shows itself: a table for the terminal and a figure for the folder."""

from __future__ import annotations

import io
import math
import statistics
from typing import Any

from rich import box
from rich.table import Table

from attncond.demo import VARIANTS, Demo

# Okabe and Ito's palette: told apart with any kind of colour vision.
_PALETTE = ("#555555", "#0072B2", "#D55E00", "#009E73", "#CC79A7")
_COLOURS = dict(zip(VARIANTS, _PALETTE, strict=True))


def kappa_text(value: float) -> str:
    """A condition number as a person reads it.

    >>> kappa_text(1.234), kappa_text(12345.6), kappa_text(3.2e9)
    ('1.23', '12,346', '3e+09')
    """
    if value < 100:
        return f"{value:.2f}"
    return f"{value:,.0f}" if value < 1e6 else f"{value:.0e}"


def _median_and_worst(row: dict[str, Any], when: str) -> str:
    values = (row[f"kappa_{when}_median"], row[f"kappa_{when}_worst"])
    return "/".join(kappa_text(value) for value in values)


def table(demo: Demo) -> Table:
    """Accuracy, κ and time of each variant, over the seeds that are done."""
    done = f"{len(demo.runs)} of {demo.seeds * len(VARIANTS)} runs"
    seeds = "1 seed" if demo.seeds == 1 else f"{demo.seeds} seeds"
    title = f"ViT on digits, {demo.epochs} epochs, {seeds}, {done}"
    # Narrow enough for 80 columns, where rich would cut the names of the variants.
    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    shown.add_column("variant", no_wrap=True)
    shown.add_column("accuracy %\nmean ± std", justify="right", no_wrap=True)
    shown.add_column("κ at start\nmedian/worst", justify="right", no_wrap=True)
    shown.add_column("κ at end\nmedian/worst", justify="right", no_wrap=True)
    shown.add_column("seconds\na run", justify="right", no_wrap=True)
    for row in demo.summary():
        std = row["accuracy_std"]
        shown.add_row(
            row["variant"],
            f"{row['accuracy_mean']:.2f}" + (f" ± {std:.2f}" if std is not None else ""),
            _median_and_worst(row, "start") if row["own_start"] else "as stock",
            _median_and_worst(row, "trained"),
            f"{row['seconds_mean']:.1f}",
        )
    return shown


def figure(demo: Demo) -> bytes:
    """A PNG: test accuracy over the epochs, and κ before and after training."""
    from matplotlib.figure import Figure

    image: Any = Figure(figsize=(11.5, 4.8), dpi=150, layout="constrained")
    curves, bars = image.subplots(1, 2, width_ratios=(1, 1))
    rows = demo.summary()
    for row in rows:
        variant = row["variant"]
        runs = [r["test_accuracy_by_epoch"] for r in demo.runs if r["variant"] == variant]
        epochs = range(1, demo.epochs + 1)
        by_epoch = list(zip(*runs, strict=True))
        mean = [statistics.fmean(values) for values in by_epoch]
        curves.plot(epochs, mean, color=_COLOURS[variant], label=f"{variant}  {mean[-1]:.1f}%")
        if len(runs) > 1:
            std = [statistics.stdev(values) for values in by_epoch]
            curves.fill_between(
                epochs,
                [m - s for m, s in zip(mean, std, strict=True)],
                [m + s for m, s in zip(mean, std, strict=True)],
                color=_COLOURS[variant],
                alpha=0.18,
                linewidth=0,
            )
    seeds = max((row["seeds"] for row in rows), default=0)
    band = f"mean ± std of {seeds} seeds" if seeds > 1 else "one seed"
    curves.set(xlabel="epoch", ylabel="test accuracy (%)", title=f"Digits, small ViT ({band})")
    curves.set_ylim(0, 101)
    curves.set_xlim(1, max(demo.epochs, 2))
    curves.xaxis.get_major_locator().set_params(integer=True)
    # Below the axes: a variant that fails may draw its curve anywhere.
    curves.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, frameon=False, columnspacing=1.2
    )

    whens, whiches = ("start", "trained"), ("median", "worst")
    kinds = [f"kappa_{when}_{which}" for when in whens for which in whiches]
    known = [row[kind] for row in rows for kind in kinds if math.isfinite(row[kind])]
    top = 8 * max(known, default=10)
    for place, row in enumerate(rows):
        both = ((-0.2, "start", 0.45), (0.2, "trained", 1.0))
        # Methods that leave the weights alone have no start of their own to show.
        for offset, when, alpha in both if row["own_start"] else ((0.0, "trained", 1.0),):
            median, worst = row[f"kappa_{when}_median"], row[f"kappa_{when}_worst"]
            x = place + offset
            # What is not finite ends below the upper edge; its number says what it is.
            low, high = (v if math.isfinite(v) else top / 4 for v in (median, worst))
            bars.bar(x, low, 0.36, color=_COLOURS[row["variant"]], alpha=alpha)
            bars.vlines(x, low, high, color="black", linewidth=1)
            bars.plot(x, high, marker="_", color="black", markersize=9)
            bars.annotate(
                f"{kappa_text(median)}\n({kappa_text(worst)})",
                (x, high),
                xytext=(0, 4),
                textcoords="offset points",
                ha="center",
                fontsize=7,
            )
    bars.set_yscale("log")
    bars.set_ylim(0.8, top)
    names = [row["variant"] + ("" if row["own_start"] else "\nstarts as stock") for row in rows]
    bars.set_xticks(range(len(rows)), names, fontsize=8)
    bars.set_ylabel("κ of the whole projections")
    bars.set_title("κ at start (pale) and end: median (worst)")
    for axes in (curves, bars):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
    stream = io.BytesIO()
    image.savefig(stream, format="png")
    return stream.getvalue()
