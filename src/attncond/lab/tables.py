"""The tables of arXiv:2603.07162 with a column of the paper's numbers and one of our own."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from attncond.errors import ConditioningError
from attncond.lab.compare import ARCHITECTURES, Group, Setting, Study, group
from attncond.lab.rows import COLUMNS, Line, Paper, cells, explained, numbers, paper_text
from attncond.lab.rows import significance as corrected_for_several
from attncond.lab.runs import ADDED, ResultsError, Run, flat
from attncond.lab.sheet import Table
from attncond.methods import Spectral

__all__ = ["TABLES", "paper_numbers", "table"]

WANTED = 3  # seeds below which a table asks for more


@cache
def paper_numbers() -> dict[str, Any]:
    """The papers' numbers, as printed."""
    text = (resources.files("attncond.lab") / "paper.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def table(number: str | int, runs: Sequence[Run] = (), on: str = "test") -> Table:
    """One of `TABLES` from any runs, also none: what is missing is listed with its command.

    ``on`` is "test", or "validation" while settings are still being chosen.

    Raises:
        ResultsError: There is no such table here.
    """
    name = str(number)
    if name not in TABLES:
        raise ResultsError(f"there is no table {name} here; there are {', '.join(TABLES)}")
    made = TABLES[name](group(runs, on), runs)
    if on == "test":
        return made
    unread = ((what, f"{how} --validation-only") for what, how in made.missing)
    return replace(made, missing=tuple(unread))


def _accuracy(study: Study, runs: Sequence[Run]) -> Table:
    rows = paper_numbers()["table1"]
    original = dict(zip(rows["columns"], rows["original"], strict=True))
    spectral = dict(zip(rows["columns"], rows["spectral"], strict=True))

    def expected(architecture: str) -> dict[str, Paper]:
        known = original.get(architecture), spectral.get(architecture)
        return {"baseline": known[0], "paper": known[1]}

    lines = _lines(study, expected, lambda g: _norm(g) and _belongs(g, "table1"))
    title = "Table 1: top-1 accuracy with and without conditioning (paper: ImageNet-1k)"
    return _table(title, lines, runs, "table1")


def _lambda(study: Study, runs: Sequence[Run]) -> Table:
    rows = paper_numbers()["table5"]
    known = dict(zip(rows["lambda"], rows["accuracy"], strict=True))
    lines, seen = [], set()
    for setting in study:
        sweep = setting.sweep
        by_hand = [g for _, g in sweep if g.spectral and g.spectral.lam is not None]
        if all(_is_paper(g) for g in by_hand):
            continue
        for g in setting.references:
            lead = {"model": setting.architecture, "variant": g.label, "λ": "", "λ/σ_max": ""}
            lines.append(Line(lead, None, setting, g))
        for ratio, g in sorted(sweep, key=lambda pair: (_kept(pair[1]), pair[0] or 0.0)):
            method = g.spectral
            assert method is not None
            literal = setting.architecture == "ViT-B" and not method.preserve_norm
            paper = known.get(method.lam) if literal and method.lam is not None else None
            seen.update([method.lam] if paper is not None else [])
            lead = {
                "model": setting.architecture,
                "variant": _kept(g) + (f", κ target {method.target:g}" if method.target else ""),
                "λ": "" if method.lam is None else f"{method.lam:g}",
                "λ/σ_max": "" if ratio is None else f"{ratio:.2f}",
            }
            curves = {
                name: g.average(name)
                for name in ("q_kappa", "k_kappa", "v_kappa", "entropy", "jacobian_kappa")
            }
            lines.append(Line(lead, paper, setting, g, {"lam_over_sigma": ratio, **curves}))
    for lam, accuracy in known.items():
        if lam not in seen:
            lead = {"model": "ViT-B", "variant": "literal", "λ": f"{lam:g}", "λ/σ_max": ""}
            lines.append(Line(lead, accuracy))
    title = "Table 5: accuracy over λ (paper: ViT-B, ImageNet-1k, literal)"
    return _table(title, lines, runs, "table5", ("model", "variant", "λ", "λ/σ_max"))


def _layer_norm(study: Study, runs: Sequence[Run]) -> Table:
    rows = paper_numbers()["table6"]
    by_model = {
        name: {"baseline": original, "paper": spectral, "paper, no LayerNorm": without}
        for name, original, spectral, without in zip(
            rows["columns"],
            rows["original_ln"],
            rows["spectral_ln"],
            rows["spectral_no_ln"],
            strict=True,
        )
    }

    def taken(setting: Setting, g: Group) -> bool:
        without = [other.first.methods for other in setting.groups if not _norm(other)]
        plain = g.first.get("model.init", "default") == "default"
        return not _norm(g) or (plain and g.first.methods in without)

    lines = _lines(
        study, lambda a: by_model.get(a, {}), lambda g: True,
        lambda s, g: taken(s, g) or g.is_baseline or _is_paper(g),
    )  # fmt: skip
    title = "Table 6: with and without LayerNorm (paper: ImageNet-1k)"
    return _table(title, lines, runs, "table6")


def _theorems(study: Study, runs: Sequence[Run]) -> Table:
    rows = paper_numbers()["table7"]["rows"]
    names = {"baseline": "original", "paper-svd": "thm3.5", "paper": "thm3.8"}

    def expected(architecture: str) -> dict[str, Paper]:
        row = rows.get(architecture, {})
        return {ours: row[theirs][0] for ours, theirs in names.items() if row}

    def time(architecture: str, label: str) -> tuple[str, float | None]:
        row = rows.get(architecture, {}).get(names.get(label, ""))
        if row is None:
            return "–", None
        ratio = _minutes(row[1]) / _minutes(rows[architecture]["original"][1])
        return f"{row[1]} ({ratio:.3f})", ratio

    lines = []
    for line in _lines(study, expected, lambda g: _norm(g) and _theorem(g)):
        text, ratio = time(line.lead["model"], _role(line))
        lead = {**line.lead, "paper time": text}
        lines.append(replace(line, lead=lead, more={**line.more, "paper_time_ratio": ratio}))
    title = "Table 7: Theorem 3.5 against 3.8, accuracy and time (paper: ImageNet-1k, hh:mm)"
    return _table(title, lines, runs, "table7", ("model", "variant", "paper time"))


def _epochs(study: Study, runs: Sequence[Run]) -> Table:
    lines = []
    expected: dict[str, Paper] = {"baseline": None, "precondition": None}
    for line in _lines(
        study, lambda a: expected, lambda g: _norm(g) and _belongs(g, "figure-pre2", "table1")
    ):
        saved, share = "–", None
        if line.own is not None:
            setting, g = line.own
            reached = setting.epochs_to_level(g)
            known = [epoch for epoch in reached if epoch is not None]
            if known and len(known) == len(reached):
                share = 1 - sum(known) / len(known) / setting.epochs
                saved = f"{100 * share:.0f}%"
        theirs = "20–30%" if _role(line) == "precondition" else "–"
        lead = {**line.lead, "paper: fewer epochs": theirs, "fewer epochs": saved}
        lines.append(replace(line, lead=lead, more={"share_of_epochs_saved": share}))
    title = "Preconditioned attention, Figure 2: epochs to the baseline's accuracy"
    first = ("model", "variant", "paper: fewer epochs", "fewer epochs")
    return _table(title, lines, runs, "figure-pre2", first, paper=False)


def _costs(which: str) -> Callable[[Study, Sequence[Run]], Table]:
    def make(study: Study, runs: Sequence[Run]) -> Table:
        from attncond.lab import costs  # builds models

        return costs.memory(study) if which == "8" else costs.flops()

    return make


TABLES: dict[str, Callable[[Study, Sequence[Run]], Table]] = {
    "1": _accuracy,
    "5": _lambda,
    "6": _layer_norm,
    "7": _theorems,
    "8": _costs("8"),
    "9": _costs("9"),
    "pre2": _epochs,
}


def _lines(
    study: Study,
    expected: Callable[[str], dict[str, Paper]],
    take: Callable[[Group], bool],
    also: Callable[[Setting, Group], bool] = lambda setting, g: True,
) -> list[Line]:
    """All experiments that a table takes, and the paper's rows that none of them answers."""
    lines: list[Line] = []
    for setting in study:
        for g in setting.groups:
            if take(g) and also(setting, g):
                lead = {"model": setting.architecture, "variant": g.label}
                line = Line(lead, None, setting, g)
                paper = expected(setting.architecture).get(_role(line))
                lines.append(replace(line, paper=paper))
    answered = {(line.lead["model"], _role(line)) for line in lines}
    for architecture in ARCHITECTURES:
        for role, paper in expected(architecture).items():
            if (architecture, role) not in answered:
                lines.append(Line({"model": architecture, "variant": role}, paper))
    places = {name: place for place, name in enumerate(ARCHITECTURES)}
    return sorted(lines, key=lambda line: places.get(line.lead["model"], len(places)))


def _table(
    title: str,
    lines: Sequence[Line],
    runs: Sequence[Run],
    name: str,
    lead: tuple[str, ...] = ("model", "variant"),
    *,
    paper: bool = True,
) -> Table:
    corrected = corrected_for_several(lines)
    places = {line.setting.own for line in lines if line.setting is not None}
    several = len(places) > 1
    columns = (*lead, *(("data",) if several else ()), *(("paper",) if paper else ()), *COLUMNS)
    rows = []
    for place, line in enumerate(lines):
        start = [line.lead[key] for key in lead]
        start += [line.setting.short if line.setting else "–"] if several else []
        start += [paper_text(line.paper)] if paper else []
        rows.append((*start, *cells(line, corrected[place])))
    data = tuple(numbers(line, corrected[place]) for place, line in enumerate(lines))
    notes = ["paper: Saratchandran & Lucey, arXiv:2603.07162v1, as printed."] if paper else []
    broken = [
        f"{run.source}: {note}" for run in runs if run.state == "broken" for note in run.notes
    ]
    notes = [*notes, *explained(lines), *broken]
    return Table(title, columns, tuple(rows), data, tuple(notes), tuple(_missing(lines, name)))


def _missing(lines: Sequence[Line], name: str) -> Iterable[tuple[str, str]]:
    """What would complete a table, and the commands for it, each once."""
    asked: dict[str, list[str]] = {}
    more: dict[tuple[str, str], list[Group]] = {}  # before and after the variants
    for line in lines:
        if line.own is None:
            command = _recipe_for(name, line.lead["model"])
            asked.setdefault(command, []).append(f"{line.lead['model']}, {line.lead['variant']}")
        elif len(line.own[1].finished) + line.own[1].diverged < WANTED:
            more.setdefault(_as_it_was(line.own[1].first), []).append(line.own[1])
    for (start, end), groups in more.items():
        variants = ",".join(dict.fromkeys(g.first.variant for g in groups))
        command = f"{start} --variants {shlex.quote(variants)} --seeds 5{end}"
        said = [f"{g.first.architecture}, {g.label}: {g.seeds} of 5 seeds" for g in groups]
        asked.setdefault(command, []).extend(said)
    return [("; ".join(dict.fromkeys(what)), command) for command, what in asked.items()]


def _as_it_was(run: Run) -> tuple[str, str]:
    """How a run was made: recipe and form, and what was said besides."""
    from attncond.lab.recipe import load

    name = run.recipe if run.recipe in _recipes() else f"{run.recipe}.yaml"  # one's own
    said = ""
    place = Path(run.source)
    try:
        own = {**ADDED, **flat(load(name).config(run.form, run.variant).model_dump(mode="json"))}
    except ConditioningError:  # a file in another folder, or a variant that there was once
        pass
    else:
        point = f",{place.parent.name.partition('@')[2]}"
        for key, value in {**ADDED, **flat(run.config)}.items():
            of_point = any(f",{part}=" in point for part in key.split("."))
            option = "--grid" if of_point else "--set"
            known = key in own or key.startswith("model.kwargs.")
            if known and value != own.get(key):
                plain = isinstance(value, str) and (option == "--set" or "," not in value)
                text = value if plain else json.dumps(value)
                said += f" {option} {shlex.quote(f'{key}={text}')}"
    for root in place.parents[3:4]:
        if root != Path("runs") and root / run.recipe / run.form == place.parents[1]:
            said += f" --out {shlex.quote(str(root))}"
    return f"attncond lab run {shlex.quote(name)} --form {run.form}", said


def _recipe_for(name: str, architecture: str) -> str:
    exact = [r for r, tables in _recipes().items() if f"{name}:{architecture}" in tables]
    if exact:  # these have many variants more
        more = ",paper-svd" if name == "table7" else ""
        variants = f"--variants baseline,tuned,spectral,paper{more} "
        return f"attncond lab run {exact[0]} --form small {variants}--seeds 5"
    for recipe, tables in _recipes().items():
        if any(t.startswith(name) for t in tables):
            return f"attncond lab run {recipe} --form small --seeds 5"
    return "attncond lab list"


@cache
def _recipes() -> dict[str, tuple[str, ...]]:
    """Recipe -> tables that it is for; nothing where recipes cannot be read."""
    try:
        from attncond.lab.recipe import list_recipes

        return {recipe.name: tuple(recipe.tables) for recipe in list_recipes()}
    except (ImportError, ConditioningError):
        return {}


def _belongs(g: Group, *names: str) -> bool:
    """Whether a table wants it: a sweep over λ, say, has a table of its own."""
    if g.is_baseline or g.is_tuned or _role_of(g) in ("paper", "paper-svd"):
        return True
    known = [_recipes().get(name) for run in g.runs for name in (run.recipe, *run.shared)]
    return any(not tables or any(t.startswith(names) for t in tables) for tables in known)


def _role(line: Line) -> str:
    """Which of the paper's rows it answers."""
    return line.lead["variant"] if line.group is None else _role_of(line.group)


def _role_of(g: Group) -> str:
    if g.spectral is not None and replace(g.spectral, refresh_every=1) == Spectral.paper_svd():
        return "paper-svd"
    return g.name if g.first.methods else g.label


def _is_paper(g: Group) -> bool:
    return g.spectral == Spectral.paper()


def _theorem(g: Group) -> bool:
    spectral = g.spectral in (Spectral(), Spectral.paper())
    polar = g.spectral is not None and g.spectral.correction == "polar"
    return g.is_baseline or g.is_tuned or spectral or polar


def _kept(g: Group) -> str:
    return "norm-preserving" if g.spectral and g.spectral.preserve_norm else "literal"


def _norm(g: Group) -> bool:
    return bool(g.first.get("model.norm", True))


def _minutes(text: str) -> int:
    hours, minutes = text.split(":")
    return 60 * int(hours) + int(minutes)
