"""The figures of the propagation study, from its JSON."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from attncond.errors import installed
from attncond.propagation import excess_limit, stable_rank_limit

# Okabe and Ito's palette, told apart with any kind of colour vision; the fix is told by the line.
_COLOURS = {"": "#555555", " + LN": "#0072B2", " + skip": "#D55E00", " + skip + LN": "#009E73"}

Record = dict[str, Any]


def _style(stack: str) -> dict[str, Any]:
    head, _, rest = stack.partition(" ")
    fixed = head.endswith("⊥")
    return {
        "color": _COLOURS[f" {rest}" if rest else ""],
        "linestyle": "-" if fixed else "--",
        "marker": "o" if fixed else "x",
        "markersize": 4,
        "label": stack,
    }


def _attention(stack: str) -> str:
    return "A(X)" if stack.startswith("A(X)") else "A"


def _figure(width: float, height: float) -> Any:
    matplotlib = installed("matplotlib.figure", "the figures need", "demo", ImportError)
    return matplotlib.Figure(figsize=(width, height), dpi=140, layout="constrained")


def _tidy(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)


def _below(axes: Any) -> None:
    # Outside of the axes: the curves may be anywhere.
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.14)}
    axes.legend(**place, ncols=2, frameon=False, fontsize=8)


def draw_measured(record: Record, out: Path) -> list[Path]:
    """spectra.png, stable_rank.png, width.png and gradients.png."""
    drawn = {
        "spectra.png": _spectra(record["spectra"]),
        "stable_rank.png": _by_depth(record["by_depth"]),
        "width.png": _by_width(record["by_width"]),
        "gradients.png": _gradients(record["gradients"]),
    }
    for name, image in drawn.items():
        image.savefig(out / name)
    return [out / name for name in drawn]


def _spectra(found: Record) -> Any:
    image = _figure(9, 3.4)
    for axes, attention in zip(image.subplots(1, 2), ("A", "A(X)"), strict=True):
        values = found[attention]
        axes.hist(values[1:], bins=30, color="#0072B2", alpha=0.7, density=True)
        axes.axvline(values[0], color="#D55E00", label=f"the largest, {values[0]:.1f}")
        axes.axvline(
            values[1], color="#555555", linestyle=":", label=f"the second, {values[1]:.2f}"
        )
        kind = "random Markov" if attention == "A" else "keys and queries ~ N(0, 1)"
        axes.set(
            title=f"{attention}: {kind}, T = {found['tokens']}",
            xlabel="singular value × √T",
            ylabel="density of the others",
        )
        axes.legend(frameon=False)
        _tidy(axes)
    return image


def _by_depth(rows: list[Record]) -> Any:
    image = _figure(13.5, 4.6)
    panels = [("A", "1/√d"), ("A(X)", "1/√d"), ("A(X)", "1")]
    for axes, (attention, std) in zip(image.subplots(1, 3, sharey=True), panels, strict=True):
        for row in rows:
            if _attention(row["stack"]) != attention or row["key_query_std"] != std:
                continue
            ranks = [math.nan if v is None else v for v in row["stable_rank"]]
            axes.plot(range(1, len(ranks) + 1), ranks, **_style(row["stack"]))
        keys = "" if attention == "A" else f", std of W_Q and W_K {std}"
        axes.set(title=attention + keys, xlabel="layer", yscale="log")
        _below(axes)
        _tidy(axes)
    image.axes[0].set_ylabel("stable rank of XXᵀ")
    image.suptitle(f"T = d = {rows[0]['tokens']}, mean of {rows[0]['seeds']} seeds", fontsize=9)
    return image


def _by_width(rows: list[Record]) -> Any:
    image = _figure(10, 3.8)
    left, right = image.subplots(1, 2)
    sizes = [row["tokens"] for row in rows]
    for layer, colour in ((1, "#0072B2"), (2, "#D55E00")):
        excess, rank, power = excess_limit(layer), stable_rank_limit(layer), 2 * layer - 1
        left.loglog(
            sizes,
            [row[f"excess_{layer}"] for row in rows],
            "o",
            color=colour,
            label=f"layer {layer}",
        )
        left.loglog(
            sizes,
            [excess / t**power for t in sizes],
            color=colour,
            label=f"{excess:g}/T" + (f"$^{power}$" if power > 1 else ""),
        )
        right.loglog(
            sizes,
            [row[f"fixed_{layer}"] for row in rows],
            "o",
            color=colour,
            label=f"layer {layer}",
        )
        right.loglog(
            sizes,
            [rank * t for t in sizes],
            color=colour,
            label=f"{rank:.4f} T",
        )
    left.set(title="A: the stable rank tends to 1", xlabel="T = d", ylabel="stable rank − 1")
    right.set(title="A⊥: it grows with T", xlabel="T = d", ylabel="stable rank")
    for axes in (left, right):
        axes.set_xticks(sizes, [str(t) for t in sizes])
        axes.set_xticks([], minor=True)
        axes.legend(frameon=False)
        _tidy(axes)
    return image


def _gradients(rows: list[Record]) -> Any:
    image = _figure(10.5, 4.6)
    for axes, attention in zip(image.subplots(1, 2), ("A", "A(X)"), strict=True):
        for row in rows:
            if _attention(row["stack"]) != attention:
                continue
            norms = [math.nan if v is None else v for v in row["norm"]]
            first = row["layer"]
            axes.plot(range(first, first + len(norms)), norms, **_style(row["stack"]))
        axes.set_yscale("log")
        axes.set(
            title=f"{attention}, T = d = {rows[0]['tokens']}, {rows[0]['seeds']} seeds",
            xlabel="L",
            ylabel=rf"$\|\partial X_L/\partial W_{rows[0]['layer']}\|_F$",
        )
        # Keys and queries without gap, LayerNorm and skip vanish doubly exponentially: one curve
        # leaves the frame so that the others can be told apart.
        axes.set_ylim(max(axes.get_ylim()[0], 1e-6))
        _below(axes)
        _tidy(axes)
    return image


def training_table(record: Record) -> str:
    """The summary as a table of Markdown: outcomes of all runs, and the best rate's loss.

    The loss is the seeds' median over that of the best constant.
    """
    rows = record["summary"]
    depths = sorted({row["depth"] for row in rows})
    cells = {(r["value_std"], r["stack"], r["depth"]): r for r in rows}
    heads = [f"{d} layer" if d == 1 else f"{d} layers" for d in depths]
    lines = [
        f"| W_V | stack | {' | '.join(heads)} |",
        "|---|---|" + "---|" * len(depths),
    ]
    for scale, stack in dict.fromkeys((r["value_std"], r["stack"]) for r in rows):
        found = [cells[scale, stack, depth] for depth in depths]
        shown = [
            f"{r['learned']}/{r['stuck']}/{r['diverged']}, {_short(r['best_over_constant'])}"
            for r in found
        ]
        lines.append(f"| {scale} | {stack} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _short(ratio: float | None) -> str:
    if ratio is None:
        return "none finite"
    return f"{ratio:.2f}" if ratio < 100 else f"{ratio:.0e}"


def draw_training(record: Record, out: Path) -> list[Path]:
    """training.png (W_V ~ N(0, 1), the paper's) and training_scaled.png (the control)."""
    paths = []
    for scale, name in (("1", "training.png"), ("1/√d", "training_scaled.png")):
        rows = [row for row in record["rows"] if row["value_std"] == scale]
        path = out / name
        _training(rows, record["setting"], scale).savefig(path)
        paths.append(path)
    return paths


def _training(rows: list[Record], setting: Record, scale: str) -> Any:
    depths = sorted({row["depth"] for row in rows})
    image = _figure(3.9 * len(depths), 8.2)
    grid = image.subplots(2, len(depths), sharex=True, sharey=True, squeeze=False)
    constant = setting["constant_loss"]
    ceiling = 40 * constant
    least = min(_median(row["last_loss"]) for row in rows)
    for line, attention in zip(grid, ("A", "A(X)"), strict=True):
        for axes, depth in zip(line, depths, strict=True):
            here = [r for r in rows if r["depth"] == depth and _attention(r["stack"]) == attention]
            for stack in dict.fromkeys(row["stack"] for row in here):
                mine = [row for row in here if row["stack"] == stack]
                # What is beyond the frame, or not finite, is drawn on its upper edge.
                last = [min(_median(row["last_loss"]), ceiling) for row in mine]
                axes.plot([row["rate"] for row in mine], last, **_style(stack))
            axes.axhline(constant, color="black", linewidth=0.8, linestyle=":")
            layers = f"{depth} layer" if depth == 1 else f"{depth} layers"
            axes.set(xscale="log", yscale="log", title=f"{attention}, {layers}")
            axes.set_ylim(0.8 * min(least, constant), 1.25 * ceiling)
            _tidy(axes)
        line[0].set_ylabel("last loss, median of the seeds")
    for axes in grid[-1]:
        axes.set_xlabel("learning rate (Adam)")
    handles, labels = grid[0][0].get_legend_handles_labels()
    image.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    image.suptitle(
        f"W_V with standard deviation {scale} at the start, {setting['target']} of orthonormal "
        f"tokens, T = d = {setting['tokens']}, {setting['steps']} steps, "
        f"{len(setting['seeds'])} seeds.\nDotted: the best constant. Upper edge: {ceiling:.3g} or "
        "more, or not finite. A(X) has the colours of A.",
        fontsize=9,
    )
    return image


def _median(losses: list[float | None]) -> float:
    return statistics.median(math.inf if v is None else v for v in losses)
