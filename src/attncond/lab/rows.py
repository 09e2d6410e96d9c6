"""Rows of the tables: one experiment beside the paper's number, compared and costed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from attncond.lab.compare import Group, Setting
from attncond.lab.results import OTHERWISE, TWICE, UNREAD
from attncond.lab.stats import Difference, holm

__all__ = ["COLUMNS", "Line", "cells", "explained", "numbers", "paper_text", "significance"]

COLUMNS = (
    *("own", "seeds", "Δ baseline", "p", "Δ tuned", "p"),
    *("step time", "memory", "epochs to baseline"),
)
NONE = "–"
Paper = float | Sequence[float] | None


@dataclass(frozen=True)
class Line:
    """A row: what the paper has, what we have, or both."""

    lead: dict[str, str]
    paper: Paper = None
    setting: Setting | None = None
    group: Group | None = None
    more: dict[str, Any] = field(default_factory=dict)  # further numbers, for CSV and JSON

    @property
    def own(self) -> tuple[Setting, Group] | None:
        """Both, where there are runs."""
        if self.setting is None or self.group is None:
            return None
        return self.setting, self.group


Corrected = dict[int, tuple[float | None, float | None]]  # line -> to baseline, to tuned


def significance(lines: Sequence[Line]) -> Corrected:
    """Welch's p-values after Holm, over the variants of one setting that a table shows."""
    found: dict[int, list[float | None]] = {i: [None, None] for i in range(len(lines))}
    settings = {id(line.setting): line.setting for line in lines if line.setting is not None}
    for setting in settings.values():
        for which, reference in enumerate((setting.baseline, setting.tuned)):
            places, values = [], []
            for place, line in enumerate(lines):
                if line.setting is setting and line.group is not None:
                    if which == 1 and line.group is setting.baseline:
                        continue  # counted once: the baseline's row shows no differences
                    versus = setting.versus(line.group, reference)
                    places.append(place)
                    values.append(versus.p if versus else None)
            for place, value in zip(places, holm(values), strict=True):
                found[place][which] = value
    return {place: (pair[0], pair[1]) for place, pair in found.items()}


def cells(line: Line, corrected: tuple[float | None, float | None]) -> tuple[str, ...]:
    """The texts below `COLUMNS`."""
    if line.own is None:
        return (NONE,) * len(COLUMNS)
    setting, group = line.own
    shown: list[str] = [str(group.sample), group.seeds]
    references = (setting.baseline, None if group is setting.baseline else setting.tuned)
    for reference, p in zip(references, corrected, strict=True):
        shown += _difference(setting.versus(group, reference), p)
    for key in ("step_milliseconds", "peak_memory_bytes"):
        ratio = setting.ratio(group, key)
        shown.append(NONE if ratio is None else f"{ratio:.3f}")
    shown.append(epochs_text(setting.epochs_to_level(group)))
    return tuple(shown)


def epochs_text(reached: Sequence[float | None]) -> str:
    """Mean of the epochs that it took, and how many runs never got there."""
    known = [epoch for epoch in reached if epoch is not None]
    never = len(reached) - len(known)
    if not reached:
        return NONE
    if not known:
        return "never"
    text = f"{statistics.fmean(known):.1f}"
    return f"{text} ({never} of {len(reached)} never)" if never else text


def numbers(line: Line, corrected: tuple[float | None, float | None]) -> dict[str, Any]:
    """The same, unrounded."""
    mean, std = _paper(line.paper)
    found: dict[str, Any] = {**line.lead, "paper_mean": mean, "paper_std": std, **line.more}
    if line.own is None:
        return found
    setting, group = line.own
    sample, reached = group.sample, setting.epochs_to_level(group)
    known = [epoch for epoch in reached if epoch is not None]
    found |= {
        "own_model": setting.model,
        "data": setting.data,
        "form": setting.form,
        "epochs": setting.epochs,
        "on": group.on,
        "mean": sample.mean,
        "std": sample.std,
        "n": sample.n,
        "seeds": " ".join(str(seed) for seed in group.finished),
        "diverged": group.diverged,
        "unfinished": group.unfinished,
    }
    references = {"baseline": setting.baseline, "tuned": setting.tuned}
    for (name, reference), p in zip(references.items(), corrected, strict=True):
        if name == "tuned" and group is setting.baseline:
            reference = None
        versus, by_seed = setting.versus(group, reference), setting.paired(group, reference)
        found |= {
            f"delta_{name}": versus.delta if versus else None,
            f"delta_{name}_low": versus.low if versus else None,
            f"delta_{name}_high": versus.high if versus else None,
            f"p_{name}": versus.p if versus else None,
            f"p_{name}_holm": p,
            f"p_{name}_paired": by_seed.p if by_seed else None,
        }
    found |= {
        "step_time_ratio": setting.ratio(group, "step_milliseconds"),
        "memory_ratio": setting.ratio(group, "peak_memory_bytes"),
        "epochs_to_baseline": statistics.fmean(known) if known else None,
        "never_reached": len(reached) - len(known),
    }
    return found


def explained(lines: Sequence[Line]) -> list[str]:
    """What a reader of the columns must know, as far as it applies."""
    own = [line.own for line in lines if line.own is not None]
    if not own:
        return []
    on = own[0][1].on
    which = "test set, read once at the end" if on == "test" else "validation images"
    notes = []
    places = {setting.own: setting.short for setting, _ in own}
    for place, short in places.items():
        models = dict.fromkeys(setting.model for setting, _ in own if setting.own == place)
        start = f"own, {short}" if len(places) > 1 else "own"
        notes.append(
            f"{start}: {place}, {', '.join(models)}; accuracy in percent on the {which}, mean ± "
            "std of the seeds."
        )
    notes.append(
        "p: Welch's t-test, two-sided, uncorrected; * and ** are below 0.05 and 0.01 after Holm's "
        "correction over the variants shown of one model. No p-value for one seed, or where a seed "
        "diverged; means are of the seeds that finished. Tuned: the stock model with the learning "
        "rate of W_Q, W_K, W_V (times the others') that was best on validation images."
    )
    notes.append(
        "Step time and peak memory over the baseline's on the same hardware. Epochs to baseline: "
        "first evaluation at or above the baseline's last validation accuracy (mean of its seeds)."
    )
    if any(setting.crowded(group) for setting, group in own):
        notes.append("No step time and memory where several runs shared the device.")
    if any(setting.unlike(group) for setting, group in own):
        notes.append("No step time and memory where the Monitor watched more than the baseline's.")
    for setting, group in own:
        if group.diverged:
            notes.append(
                f"{setting.architecture}, {group.label}: {group.diverged} of {len(group.runs)} "
                "seeds diverged. That is a failure of the variant, not of the seed."
            )
    told = {(run.name, note) for _, group in own for run in group.runs for note in run.notes}
    twice = sum(note.startswith(TWICE) for _, note in told)
    if twice:
        runs = "1 run is" if twice == 1 else f"{twice} runs are"
        notes.append(f"{runs} there twice, and count{'s' if twice == 1 else ''} once.")
    told_apart = ((run, note.partition(OTHERWISE)[2]) for run, note in told)
    differ = sorted(f"{run} at {end}" for run, end in told_apart if end)
    if differ and on == "test":  # who chooses settings is told nothing of the test
        notes.append(f"What was left out of them ended otherwise: {', '.join(differ)}.")
    unread = sum(note == UNREAD for _, note in told)
    if unread and on == "test":
        runs = "1 run ended" if unread == 1 else f"{unread} runs ended"
        notes.append(f"{runs} with the test set left unread: seeds has them as without test.")
    counted = (TWICE, UNREAD)
    return notes + sorted(f"{run}: {note}" for run, note in told if not note.startswith(counted))


def paper_text(value: Paper) -> str:
    """80.70 ± 0.41 as the paper prints it."""
    mean, std = _paper(value)
    if mean is None:
        return NONE
    return f"{mean:.1f}" + (f" ± {std:.2f}" if std is not None else "")


def _paper(value: Paper) -> tuple[float | None, float | None]:
    if value is None or isinstance(value, int | float):
        return value, None
    return value[0], value[1]


def _difference(found: Difference | None, corrected: float | None) -> tuple[str, str]:
    if found is None:
        return NONE, NONE
    stars = ""
    if corrected is not None:
        stars = " **" if corrected < 0.01 else " *" if corrected < 0.05 else ""
    return f"{found.delta:+.2f}{stars}", _p(found.p)


def _p(value: float | None) -> str:
    if value is None:
        return NONE
    return "<0.0001" if value < 1e-4 else f"{value:.4f}"
