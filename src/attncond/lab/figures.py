"""The papers' figures from any runs: spectra over training, epochs to accuracy, the λ curve."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attncond.lab import drawing
from attncond.lab.compare import Group, Setting, Study, group
from attncond.lab.drawing import BLUE, GREY, ORANGE
from attncond.lab.runs import ResultsError, Run, number
from attncond.lab.watched import (
    UNRESOLVED,
    Draw,
    condition_numbers,
    is_called,
    jacobian,
    lost,
    nothing,
    overview,
    seeds_text,
    separate,
)

__all__ = ["FIGURES", "figure"]

SUFFIXES = (".png", ".svg", ".pdf")
_BELOW = 12.0  # points of accuracy below the baseline, where the λ curve is cut off


def figure(
    name: str | int, runs: Sequence[Run], path: str | os.PathLike[str], variant: str | None = None
) -> Path:
    """Draw one of `FIGURES` into a .png, .svg or .pdf.

    ``variant`` is what is shown beside the baseline, by the name that tables or the recipe give it.

    Raises:
        ResultsError: No such figure, another ending, or no runs that it could be drawn from; the
            message has the command that makes them.
    """
    path = check_figure(name, path)
    image = FIGURES[str(name)](group(runs), variant)
    draft = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        image.savefig(draft, dpi=150)
        os.replace(draft, path)  # in one piece, or not at all
    except OSError as error:
        raise ResultsError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):  # a drive that takes no writes refuses this one, too
            draft.unlink(missing_ok=True)
    return path


def check_figure(name: str | int, path: str | os.PathLike[str]) -> Path:
    """The path, or `ResultsError` where it or the figure's name is wrong, whatever the runs."""
    path = Path(path)
    if str(name) not in FIGURES:
        raise ResultsError(f"there is no figure {name} here; there are {', '.join(FIGURES)}")
    if path.suffix.lower() not in SUFFIXES:
        raise ResultsError(f"{path} should end in {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise ResultsError(f"{path} cannot be written: there is no folder {path.parent}")
    return path


def _epochs(study: Study, variant: str | None) -> Any:
    """Preconditioned attention, Figure 2: validation accuracy, and where the baseline is met."""
    settings = [s for s in study if s.level is not None and _compared(s, variant)]
    if not settings:
        beside = variant or "tuned, spectral or precondition (or another --variant)"
        others = [g.label for s in study if s.level is not None for g in s.groups if g.finished]
        what = f"a finished baseline and {beside} beside it"
        raise nothing("pre2", "epochs-to-baseline", what, others)
    image, axes = drawing.canvas(len(settings), min(3, len(settings)), 4.9, 4.0)
    kinds = list(dict.fromkeys(_kind(g) for s in settings for g in _compared(s, variant)))
    for ax, setting in zip(axes, settings, strict=True):
        level = setting.level
        assert level is not None
        assert setting.baseline is not None
        drawing.band(ax, _accuracies(setting.baseline), GREY, "--", "baseline", ratio=False)
        met: list[tuple[float, str]] = []
        for g in _compared(setting, variant):
            colour = drawing.COLOURS[kinds.index(_kind(g)) % len(drawing.COLOURS)]
            drawing.band(ax, _accuracies(g), colour, "-", g.label, ratio=False)
            reached = [epoch for epoch in setting.epochs_to_level(g) if epoch is not None]
            if len(reached) == len(g.finished):
                met.append((statistics.fmean(reached), colour))
        for place, (mean, colour) in enumerate(sorted(met)):
            # They lie close together: in turns above and below, and further off.
            away, below = 11 * (place // 2), place % 2
            start, end = ax.get_xlim()
            right = below or mean < start + 0.12 * (end - start)  # or it lies on the axis
            up = -13 - away if below else 5 + away
            ax.plot(mean, level, "o", color=colour, markersize=6, zorder=5)
            ax.annotate(
                f"{mean:.1f}", (mean, level), xytext=(4 if right else -4, up),
                textcoords="offset points", ha="left" if right else "right", fontsize=9,
                color=colour, fontweight="bold",
            )  # fmt: skip
        ax.axhline(level, color=GREY, linewidth=1, linestyle=":")
        ax.set_ylim(bottom=max(ax.get_ylim()[0], level - 20))
        ax.set(xlabel="epoch", ylabel="validation accuracy (%)")
        title = f"{setting.model}, {setting.short}"
        ax.set_title(textwrap.fill(title, 60, break_on_hyphens=False), fontsize=10)
        drawing.whole_numbers(ax)
        drawing.legend(ax, 2)
    counts = [len(g.finished) for s in settings for g in _compared(s, variant)]
    caption = (
        f"{_texts(s.data for s in settings)}; form {_texts(s.form for s in settings)}, "
        f"{_texts(s.epochs for s in settings)} epochs, "
        f"{_range(counts)}, mean and band of ± one std. Dotted: the baseline's last validation "
        "accuracy, mean of its seeds. Dots: mean of the epochs at which the runs of a variant "
        "first reach it, where all of them do."
    )
    title = "Epochs to the baseline's accuracy (Preconditioned Attention, Figure 2)"
    return drawing.finish(image, title, caption)


def _lambda(study: Study, variant: str | None) -> Any:
    """Table 5 as curves, literal and norm-preserving; beside accuracy what might explain it."""
    setting = max(study, key=lambda s: len(_swept(s)), default=None)
    if setting is None or len(_swept(setting)) < 3:
        raise nothing("lambda", "vit-lambda", "finished runs with at least three different λ")
    image, axes = drawing.canvas(4, 2, 5.8, 4.1)
    panels: tuple[tuple[str, Callable[[Group], list[float]], bool], ...] = (
        ("test accuracy (%)", lambda g: g.values, False),
        ("κ of effective $W_Q$, $W_K$, $W_V$ at the end", _weights_kappa, True),
        ("entropy of the attention at the end (nats)", _at_end("entropy"), False),
        ("κ of the attention's Jacobian at the end", _at_end("jacobian_kappa"), True),
    )
    forms = ((False, ORANGE, "s", "literal, W + λI"), (True, BLUE, "o", "norm kept, s(W + λI)"))
    for ax, (label, values, ratio) in zip(axes, panels, strict=True):
        for keeps, colour, marker, text in forms:
            swept = [
                (x, values(g))
                for x, g in _swept(setting)
                if g.spectral and g.spectral.preserve_norm is keeps and values(g)
            ]
            if swept:
                x = [ratio_ for ratio_, _ in swept]
                y = [_mean(found, ratio) for _, found in swept]
                spread = [_spread(found, ratio) for _, found in swept]
                ax.errorbar(
                    x, y, yerr=list(zip(*spread, strict=True)), color=colour, marker=marker,
                    markersize=5, linewidth=1.6, capsize=2.5, label=text,
                )  # fmt: skip
        for g in setting.references:
            if values(g):
                mean, style = _mean(values(g), ratio), "--" if g.is_baseline else ":"
                ax.axhline(mean, color=GREY, linestyle=style, linewidth=1.4, label=g.label)
        ax.set(xscale="log", xlabel=r"λ / $\sigma_{\max}$ at the start", ylabel=label)
        drawing.decades(ax, [x for x, _ in _swept(setting)])
        if ratio:
            ax.set_yscale("log")
        if ax.containers:
            drawing.legend(ax, 2)
        else:
            drawing.empty(ax, "no record of the Monitor:\nneeds watch.every and watch.probe")
    _cut_off(axes[0], setting)
    counts = [len(g.finished) for _, g in _swept(setting)]
    failed = sum(g.diverged for g in setting.groups if g.spectral)
    caption = (
        f"{setting.model} on {setting.own}: {_range(counts)}, mean ± one std; κ is the geometric "
        f"mean over layers and seeds, of the Jacobian that of each layer's worst head. {UNRESOLVED}"
        + (f" {failed} runs diverged and are not in the means." if failed else "")
        + lost(setting.groups)
    )
    return drawing.finish(image, "Accuracy and conditioning over λ (paper: Table 5)", caption)


def _cut_off(ax: Any, setting: Setting) -> None:
    """Keep a collapse from flattening everything else: it is told in numbers at the edge."""
    level = setting.baseline.sample.mean if setting.baseline else None
    low, high = ax.get_ylim()
    if level is None or low > level - _BELOW:
        return
    edge = level - _BELOW
    ax.set_ylim(edge, high)
    for x, g in _swept(setting):
        mean = g.sample.mean
        if mean is not None and mean < edge and g.spectral is not None:
            colour = BLUE if g.spectral.preserve_norm else ORANGE
            ax.annotate(
                f"{mean:.1f}", (x, edge), xytext=(0, 16), textcoords="offset points", ha="center",
                fontsize=8.5, color=colour, arrowprops={"arrowstyle": "->", "color": colour},
            )  # fmt: skip


def _figures() -> dict[str, Draw]:
    found: dict[str, Draw] = {"2": overview("2", "ViT-B"), "3": overview("3", "XCiT-M")}
    for first, architecture in ((5, "ViT-B"), (9, "XCiT-M")):
        for place, quantity in enumerate(("sigma_min", "sigma_max", "kappa")):
            name = str(first + place)
            found[name] = separate(name, architecture, quantity)
        found[str(first + 3)] = jacobian(str(first + 3), architecture)
    return {**found, "pre2": _epochs, "pre3": condition_numbers, "lambda": _lambda}


FIGURES = _figures()


def _compared(setting: Setting, variant: str | None) -> list[Group]:
    plain = ("precondition", "spectral", "spectral + precondition")  # and not started otherwise
    return [
        g
        for g in setting.groups
        if g.finished
        and not g.is_baseline
        and g.first.get("model.norm", True)
        and (is_called(g, variant) if variant else g is setting.tuned or g.name in plain)
    ]


def _kind(g: Group) -> str:
    """What has one colour in all panels."""
    return "tuned" if g.is_tuned else g.label


def _accuracies(g: Group) -> list[dict[float, float]]:
    found = []
    for run in g.runs:
        if run.state == "finished":
            points = [(p["epoch"], number(p.get("validation_accuracy"))) for p in run.metrics]
            found.append({float(epoch): value for epoch, value in points if value is not None})
    return found


def _swept(setting: Setting) -> list[tuple[float, Group]]:
    return [(ratio, g) for ratio, g in setting.sweep if ratio and g.values]


def _at_end(column: str) -> Callable[[Group], list[float]]:
    def values(g: Group) -> list[float]:
        found = [run.curves.last(column) for run in g.runs if run.state == "finished"]
        return [value for value in found if value is not None]

    return values


def _weights_kappa(g: Group) -> list[float]:
    by_role = [_at_end(f"{role}_kappa")(g) for role in "qkv"]
    return [statistics.geometric_mean(values) for values in zip(*by_role, strict=False)]


def _mean(values: Sequence[float], ratio: bool) -> float:
    return statistics.geometric_mean(values) if ratio else statistics.fmean(values)


def _spread(values: Sequence[float], ratio: bool) -> tuple[float, float]:
    """One standard deviation down and up; of a ratio by its logarithm, so that none is below 0."""
    mean = _mean(values, ratio)
    if len(values) < 2:
        return 0.0, 0.0
    if not ratio:
        return (statistics.stdev(values),) * 2
    factor = math.exp(statistics.stdev(math.log(value) for value in values))
    return mean - mean / factor, mean * factor - mean


def _range(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return seeds_text(low) if low == high else f"{low} to {high} seeds"


def _texts(values: Any) -> str:
    return "/".join(str(value) for value in dict.fromkeys(values))
