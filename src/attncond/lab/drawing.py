"""How figures are drawn: a light canvas, colours for all eyes, bands over seeds, captions."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from attncond.errors import installed
from attncond.lab.runs import ResultsError

__all__ = ["BLUE", "COLOURS", "GREEN", "GREY", "ORANGE", "band", "canvas", "decades", "empty"]
__all__ += ["finish", "legend", "spans", "tidy", "whole_numbers"]

# Okabe and Ito's palette, told apart with any kind of colour vision; lines differ in style as well.
GREY, BLUE, ORANGE, GREEN = "#555555", "#0072B2", "#D55E00", "#009E73"
COLOURS = (BLUE, ORANGE, GREEN, "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def canvas(panels: int, columns: int, width: float, height: float) -> tuple[Any, list[Any]]:
    """A figure of so many panels, each ``width`` by ``height`` inches, and their axes."""
    matplotlib = installed("matplotlib.figure", "figures need", "lab", ResultsError)
    lines = math.ceil(panels / columns)
    size = (width * columns, height * lines + 0.7)
    image = matplotlib.Figure(figsize=size, layout="constrained", facecolor="white")
    axes = list(image.subplots(lines, columns, squeeze=False).flat)
    for ax in axes[panels:]:
        ax.set_axis_off()
    for ax in axes[:panels]:
        tidy(ax)
    return image, axes[:panels]


def band(
    ax: Any,
    points: Sequence[Mapping[float, float]],
    colour: str,
    style: str,
    label: str,
    *,
    ratio: bool,
) -> None:
    """A line through the means of several runs, and a band of one standard deviation.

    Condition numbers (``ratio``) are averaged by their logarithms, so that the band stays positive.
    """
    # Only where all runs have a value: a mean over other runs at each step would jump.
    x = sorted(set.intersection(*(set(p) for p in points))) if points else []
    lines: list[list[float]] = []
    for place in x:
        values = [math.log(p[place]) if ratio else p[place] for p in points]
        mean = statistics.fmean(values)
        std = statistics.stdev(values) if len(values) > 1 else 0.0
        line = [mean, mean - std, mean + std]
        lines.append([math.exp(v) for v in line] if ratio else line)
    if not x:
        return
    means, lows, highs = zip(*lines, strict=True)
    marker = "o" if len(x) < 4 else None
    ax.plot(
        x, means, color=colour, linestyle=style, marker=marker, linewidth=1.7, markersize=4,
        label=label,
    )  # fmt: skip
    if len(points) > 1:
        ax.fill_between(x, lows, highs, color=colour, alpha=0.17, linewidth=0)


def finish(image: Any, title: str, caption: str) -> Any:
    """Title and caption above the panels."""
    width = int(14.5 * image.get_figwidth())
    lines = textwrap.wrap(title, int(9.5 * image.get_figwidth()))
    image.suptitle("\n".join(lines), fontsize=12, fontweight="bold")
    # A second text in the room that constrained layout leaves below the panels.
    image.supxlabel("\n".join(textwrap.wrap(caption, width)), fontsize=8.5, color="#333333")
    return image


def legend(ax: Any, columns: int) -> None:
    """Below the axes: curves may be anywhere in them. Long names stand below each other."""
    handles, labels = ax.get_legend_handles_labels()
    if not labels:
        empty(ax, "nothing was recorded")
        return
    # Wider than its panel, a legend lies on its neighbour's and leaves the axes no room.
    panel = ax.figure.get_figwidth() / ax.get_gridspec().ncols
    letters = int((panel / columns - 0.5) / 0.065)
    if columns > 1 and max(map(len, labels)) > letters:
        legend(ax, 1)
        return
    texts = [textwrap.fill(label, letters, break_on_hyphens=False) for label in labels]
    # So many font sizes below the axes, however high these are.
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.0), "borderaxespad": 4.5}
    ax.legend(handles, texts, **place, ncols=columns, frameon=False, fontsize=8.5)


def empty(ax: Any, text: str) -> None:
    """Why there is nothing in a panel."""
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color=GREY)


def whole_numbers(ax: Any) -> None:
    """Ticks for epochs."""
    ax.xaxis.get_major_locator().set_params(integer=True)


def decades(ax: Any, values: Sequence[float]) -> None:
    """A logarithmic axis over these values, the same for all panels, and few plain ticks on it."""
    low, high = min(values), max(values)
    room = (high / low) ** 0.04
    ax.set_xlim(low / room, high * room)
    steps = (1, 2, 5) if high < 100 * low else (1,)
    places = [m * 10.0**n for n in range(-9, 10) for m in steps]
    shown = [x for x in places if low / room <= x <= high * room]
    ax.set_xticks(shown, [f"{x:g}" for x in shown])
    ax.set_xticks([], minor=True)


def spans(ax: Any, factor: float) -> bool:
    """Whether the curves of a panel differ by more than a factor."""
    values = [v for line in ax.lines for v in line.get_ydata() if v > 0]
    return bool(values) and max(values) > factor * min(values)


def tidy(ax: Any) -> None:
    """A grid, and no box."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25)
    ax.set_axisbelow(True)
    ax.margins(x=0.02)
