"""Figures over training, from what the Monitor recorded: spectra, Jacobians, heads' outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from attncond.lab import drawing
from attncond.lab.compare import Group, Setting, Study
from attncond.lab.curves import OFF, is_ratio
from attncond.lab.drawing import BLUE, GREEN, GREY, ORANGE
from attncond.lab.runs import ResultsError, Run
from attncond.methods import Precondition, Spectral

__all__ = [
    "UNRESOLVED",
    "Draw",
    "condition_numbers",
    "is_called",
    "jacobian",
    "lost",
    "nothing",
    "overview",
    "seeds_text",
    "separate",
]

Draw = Callable[[Study, str | None], Any]
UNRESOLVED = "A κ that float64 cannot resolve, which is a large one, is left out."
_ROLES = {"q": ("$W_Q$", BLUE), "k": ("$W_K$", ORANGE), "v": ("$W_V$", GREEN)}
_SYMBOLS = {"sigma_min": r"$\sigma_{\min}$", "sigma_max": r"$\sigma_{\max}$", "kappa": "κ"}


@dataclass(frozen=True)
class Choice:
    """What a figure over training is drawn from: a setting, its baseline and one variant."""

    setting: Setting
    stock: Group | None
    variant: Group
    drawn: set[tuple[str, str]] = field(default_factory=set)  # (run, column)
    absent: list[str] = field(default_factory=list)  # curves that have no value
    lost: str = ""  # records that could not be read

    def curve(
        self, ax: Any, g: Group | None, column: str, colour: str, style: str, label: str
    ) -> None:
        """Mean and spread over the seeds of ``g``, over epochs where they are known."""
        if g is None:
            return
        if not _watched(g, column):
            self.absent.append(label)
            return
        points, in_epochs = [], True
        for run in _watched(g, column):
            scale = run.steps_per_epoch
            in_epochs = in_epochs and scale is not None
            points.append({s / (scale or 1.0): v for s, v in run.curves.points(column).items()})
            self.drawn.add((run.source, column))
        drawing.band(ax, points, colour, style, label, ratio=is_ratio(column))
        ax.set_xlabel("epoch" if in_epochs else "step")
        drawing.whole_numbers(ax)

    def spectrum(self, ax: Any, g: Group | None, name: str, which: str, style: str) -> None:
        """One quantity of W_Q, W_K and W_V, stored or effective."""
        for role, (symbol, colour) in _ROLES.items():
            column = f"{'raw_' if which == 'stored' else ''}{role}_{name}"
            label = f"{symbol}, {g.label}" if g is not None else ""
            self.curve(ax, g, column, colour, style, label)

    def jacobians(self, ax: Any) -> None:
        """κ without and with the variant, the certificate, and the paper's bound."""
        v = self.variant
        self.curve(ax, self.stock, "jacobian_kappa", GREY, "--", "κ, baseline")
        self.curve(ax, v, "jacobian_kappa", BLUE, "-", f"κ, {v.label}")
        self.curve(ax, v, "jacobian_certificate", GREEN, "-.", f"certificate, {v.label}")
        theirs = f"right side of Thm 3.4, {v.label}"
        self.curve(ax, v, "jacobian_paper_bound", ORANGE, ":", theirs)
        ax.set(yscale="log", ylabel="κ", title="κ of the attention's Jacobian")
        drawing.legend(ax, 1)

    def caption(self) -> str:
        """Model, data and seeds; how it was averaged; what was left out."""
        both = [g for g in (self.stock, self.variant) if g is not None]
        seeds = ", ".join(f"{g.label} {seeds_text(len(_watched(g)))}" for g in both)
        text = f"{self.setting.model} on {self.setting.own}: {seeds}. "
        runs = [run for g in both for run in _watched(g)]
        over = "layers and heads" if any(run.curves.by_head for run in runs) else "layers"
        text += f"Mean over {over} (of κ the geometric one), band ± one std over seeds."
        columns = {column for _, column in self.drawn}
        if any(column.startswith("jacobian") for column in columns) and over == "layers":
            text += " Jacobian: the worst head of each layer on a fixed probe."
        if any(column.startswith("jacobian") for column in columns):
            text += " " + UNRESOLVED
        if self.absent:
            text += f" Without any value: {', '.join(dict.fromkeys(self.absent))}."
        if "jacobian_paper_bound" in columns:
            text += (
                " The right side of Thm 3.4 is not a bound (docs/theory.md), the certificate is."
            )
        left = sum(
            run.curves.left_out.get(column, 0)
            for run in runs
            for source, column in self.drawn
            if source == run.source
        )
        return text + (f" Not finite and left out: {left} values." if left else "") + self.lost

    def title(self, name: str, what: str) -> str:
        """The paper's figure and model, and what ours shows."""
        return f"Figure {name} (paper: {self.setting.architecture}): {what}"


def overview(name: str, architecture: str) -> Draw:
    """Figures 2 and 3: σ_min, κ and the Jacobian's κ side by side."""

    def draw(study: Study, variant: str | None) -> Any:
        found = _choose(study, architecture, variant, "q_kappa", name)
        image, axes = drawing.canvas(3, 3, 4.9, 4.6)
        for ax, quantity in zip(axes, ("sigma_min", "kappa"), strict=False):
            found.spectrum(ax, found.stock, quantity, "stored", "--")
            found.spectrum(ax, found.variant, quantity, "effective", "-")
            symbol = _SYMBOLS[quantity]
            ax.set(yscale="log", ylabel=symbol, title=f"{symbol} of weights as they are used")
            drawing.legend(ax, 2)
        found.jacobians(axes[2])
        title = found.title(name, f"spectra over training, {found.variant.label}")
        return drawing.finish(image, title, found.caption())

    return draw


def separate(name: str, architecture: str, quantity: str) -> Draw:
    """Figures 5 to 7 and 9 to 11: one quantity, stored and effective, on scales of their own."""

    def draw(study: Study, variant: str | None) -> Any:
        found = _choose(study, architecture, variant, f"q_{quantity}", name)
        image, (left, right) = drawing.canvas(2, 2, 5.6, 4.6)
        symbol = _SYMBOLS[quantity]
        found.spectrum(left, found.stock, quantity, "stored", "-")
        found.spectrum(left, found.variant, quantity, "stored", ":")
        found.spectrum(right, found.variant, quantity, "effective", "-")
        left.set(ylabel=symbol, title=f"{symbol} of stored weights")
        right.set(ylabel=symbol, title=f"{symbol} of effective weights")
        for ax in (left, right):
            if quantity == "kappa" and drawing.spans(ax, 20):
                ax.set_yscale("log")
            elif quantity != "kappa" and ax.lines:
                # With room above in proportion to the axis, not to how much the curves vary.
                ax.set_ylim(0, 1.05 * ax.dataLim.y1 or None)
            drawing.legend(ax, 2)
        title = found.title(name, f"{symbol} over training, {found.variant.label}")
        return drawing.finish(image, title, found.caption())

    return draw


def jacobian(name: str, architecture: str) -> Draw:
    """Figures 8 and 12."""

    def draw(study: Study, variant: str | None) -> Any:
        found = _choose(study, architecture, variant, "jacobian_kappa", name)
        image, (ax,) = drawing.canvas(1, 1, 7.6, 4.9)
        found.jacobians(ax)
        title = found.title(name, f"Jacobian, {found.variant.label}")
        return drawing.finish(image, title, found.caption())

    return draw


def condition_numbers(study: Study, variant: str | None) -> Any:
    """Preconditioned attention, Figure 3: κ of the heads' outputs in training."""
    found = _choose(study, "ViT-B", variant, "output_kappa", "pre3", prefer=(Precondition(),))
    image, (ax,) = drawing.canvas(1, 1, 7.6, 4.6)
    found.curve(ax, found.stock, "output_kappa", GREY, "--", "baseline")
    found.curve(ax, found.variant, "output_kappa", BLUE, "-", found.variant.label)
    ax.set(yscale="log", ylabel="κ of a head's output")
    drawing.legend(ax, 2)
    title = f"κ of heads' outputs, {found.variant.label} (Preconditioned Attention, Figure 3)"
    return drawing.finish(image, title, found.caption())


def _choose(
    study: Study,
    architecture: str,
    variant: str | None,
    column: str,
    name: str,
    prefer: Sequence[Any] = (Spectral(), Spectral.paper()),
) -> Choice:
    """The setting with the most watched runs, and in it the variant that was asked for."""
    choices: list[tuple[bool, int, Choice]] = []
    others: list[str] = []
    unread = lost(g for s in study if s.architecture == architecture for g in s.groups)
    for setting in study:
        watched = [g for g in setting.groups if _watched(g, column)]
        stock = next((g for g in setting.groups if g.is_baseline and _watched(g)), None)
        ranked = [g for method in prefer for g in watched if g.first.methods == (method,)]
        ranked += [g for g in watched if not (g.is_baseline or g.is_tuned)]
        if variant is not None:
            ranked = [g for g in watched if is_called(g, variant)]
        if setting.architecture == architecture:
            others += [g.label for g in watched]
        if setting.architecture == architecture and ranked:
            points = [
                len(run.curves.points(column))
                for g in (ranked[0], *([stock] if stock else []))
                for run in _watched(g, column)
            ]
            choices.append(
                (stock is not None, sum(points), Choice(setting, stock, ranked[0], lost=unread))
            )
    if not choices:
        raise nothing(
            name,
            "spectra",
            f"{architecture} with {variant or 'a conditioned variant'}, watched by the Monitor "
            f"(watch.every, and watch.probe for Jacobians and outputs), so that {column} is known",
            others,
            unread,
        )
    return max(choices, key=lambda choice: choice[:2])[2]


def nothing(
    name: str, recipe: str, what: str, others: Sequence[str] = (), unread: str = ""
) -> ResultsError:
    """The error for a figure without runs: what others there are, the command that makes them."""
    command = f"attncond lab run {recipe} --form small --seeds 5"
    have = "; ".join(dict.fromkeys(others)) or "none"
    return ResultsError(
        f"figure {name} needs {what}.{unread} These runs have {have}; try: {command}"
    )


def _watched(g: Group, column: str = "q_kappa") -> list[Run]:
    return [run for run in g.runs if run.state != "diverged" and run.curves.points(column)]


def lost(groups: Iterable[Group]) -> str:
    """Which of the Monitor's records could not be read, as a sentence; nothing without any."""
    troubles = dict.fromkeys(run.curves.trouble for g in groups for run in g.runs)
    told = "; ".join(trouble for trouble in troubles if trouble not in ("", OFF))
    return f" Left out: {told}." if told else ""


def is_called(g: Group, variant: str) -> bool:
    """Whether tables or a recipe call an experiment so."""
    return variant == g.label or any(run.variant == variant for run in g.runs)


def seeds_text(count: int) -> str:
    """1 seed, 2 seeds."""
    return "1 seed" if count == 1 else f"{count} seeds"
