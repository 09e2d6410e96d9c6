"""Write the sections of docs/results.md from the runs in results/lab, so that nothing is typed.

python benchmarks/lab_tables.py            # rewrites the marked sections
python benchmarks/lab_tables.py --count    # counts memory and FLOPs anew: results/lab/costs.json
python benchmarks/lab_tables.py --figures  # draws the figures anew: results/lab/*.png

Runs get there by `attncond lab collect RUNS --out results/lab/NAME.json`.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from scipy.stats import spearmanr

from attncond.lab.figures import FIGURES, figure
from attncond.lab.results import load_runs
from attncond.lab.runs import ResultsError, Run
from attncond.lab.sheet import Table
from attncond.lab.tables import table

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "results" / "lab"
PAGE = ROOT / "docs" / "results.md"
TRAINED = ("2", "5", "6", "7", "8", "3", "9", "10", "11", "12", "pre3")

Section = Callable[[Sequence[Run], Path], str]


def committed(folder: Path = FOLDER) -> list[Run]:
    """The runs that are in the repository; smoke forms say nothing."""
    try:
        return [run for run in load_runs([folder]) if run.form != "smoke"]
    except ResultsError:
        return []


def _table(number: str, runs: Sequence[Run], on: str) -> str:
    found: Table = table(number, runs, on)
    # Rows of the paper that we have nothing for are in `attncond lab table`.
    kept = [i for i, data in enumerate(found.data) if data.get("mean") is not None]
    shown = replace(
        found,
        rows=tuple(found.rows[i] for i in kept),
        data=tuple(found.data[i] for i in kept),
        notes=tuple(note for note in found.notes if "left unread" not in note),
        missing=(),
    )
    return shown.to_markdown()


def _section(
    number: str,
    command: str,
    wanted: Callable[[Run], bool],
    needed: Callable[[Run], bool] = lambda run: True,
    pictures: Sequence[str] = (),
    on: str = "test",
) -> Section:
    """A table of the runs that are wanted, if any of them is one that it needs, and figures."""

    def make(runs: Sequence[Run], folder: Path) -> str:
        mine = [run for run in runs if wanted(run)]
        ended = [run for run in mine if run.state in ("finished", "diverged")]
        if not any(map(needed, ended)):
            return f"No runs are committed yet. They are made by `{command}`."
        return "\n\n".join([_table(number, mine, on), *_pictures(pictures, folder)])

    return make


def _spectra(runs: Sequence[Run], folder: Path) -> str:
    found = _pictures(TRAINED, folder)
    command = "attncond lab run spectra --form small --seeds 5"
    return "\n\n".join(found) or f"No runs are committed yet. They are made by `{command}`."


def _costs(runs: Sequence[Run], folder: Path) -> str:
    file = folder / "costs.json"
    if not file.exists():
        return "Not counted yet: `python benchmarks/lab_tables.py --count`."
    record = json.loads(file.read_text(encoding="utf-8"))
    return "\n\n".join([f"`{record['command']}`:", record["memory"], record["flops"]])


STEP = "python benchmarks/step_time.py --model {} --graphs --profile --variants identity gap"
STEPS = {
    "stock_again": "stock, again",
    "identity": "Spectral()",
    "polar_every_10": "polar, refresh_every=10",
    "gap": "RemoveGap()",
    "precondition": "Precondition()",
}


def _steps(runs: Sequence[Run], folder: Path) -> str:
    """Step times of models alone on a card: runs that share one have none."""
    rows: list[tuple[str, ...]] = []
    commands: set[str] = set()
    for file in sorted((folder.parent / "benchmarks").glob("step_time_*_small32.json")):
        record = json.loads(file.read_text(encoding="utf-8"))
        model = record["settings"]["model"]
        commands.add(record["command"].replace(model, "MODEL"))
        for name, label in STEPS.items():
            if (row := record["variants"].get(name)) is not None:
                spread = f"{row['ratio_min']:.3f} to {row['ratio_max']:.3f}"
                numbers = [row.get(key) for key in ("ratio", "fastest_ratio", "kernel_ratio")]
                median, fastest, kernels = ("–" if n is None else f"{n:.3f}" for n in numbers)
                memory = f"{row['peak_memory_ratio']:.3f}"
                rows.append((model, label, median, spread, fastest, kernels, memory))
    if not rows:
        return f"Not measured yet: `{STEP.format('vit_small32')}`."
    columns = (
        *("model", "variant", "step time / stock", "least to most", "of the fastest rounds"),
        *("of the kernels alone", "peak memory / stock"),
    )
    shown = Table("A training step beside the stock model's", columns, tuple(rows))
    return "\n\n".join([*(f"`{command}`:" for command in sorted(commands)), shown.to_markdown()])


STARTS = {
    "baseline": "stock",
    "spectral": "`Spectral()`",
    "folded": "`Spectral()`, folded",
    "mimetic": "mimetic initialisation",
    "polar": "polar, norm kept",
    "paper": "`Spectral.paper()`",
    "gap": "`RemoveGap()`",
    "precondition": "`Precondition()`",
}


def _start(runs: Sequence[Run], folder: Path) -> str:
    """κ of the Jacobian before training."""
    file = folder.parent / "benchmarks" / "start_kappa.json"
    if not file.exists():
        return "Not measured yet: `python benchmarks/start_kappa.py --data DIR`."
    record = json.loads(file.read_text(encoding="utf-8"))
    settings, rows = record["settings"], []
    for name, label in STARTS.items():
        found = record["variants"][name]
        count = len(found["heads"])
        shown = [_power(found[key]) for key in ("jacobian_kappa", "jacobian_kappa_max")]
        bounds = [_power(found[f"jacobian_{key}"]) for key in ("certificate", "paper_bound")]
        resolved = f"{found['resolved']} of {count}"
        rows.append((label, *shown, *bounds, resolved, f"{found['entropy']:.2f}"))
    columns = (
        *("start", "κ(J), geometric mean", "largest resolved", "certificate"),
        *("right side of Thm 3.4", "heads resolved", "entropy, nats"),
    )
    what = (
        f"`{record['command']}`: small ViT before its first step, {settings['images']} validation "
        f"images, layers {', '.join(map(str, settings['layers']))}, all heads, "
        f"{settings['tokens']} tokens, float64. {settings['data']}."
    )
    return (
        f"{what}\n\n{Table('κ of the Jacobian at the start', columns, tuple(rows)).to_markdown()}"
    )


def _power(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}"


# Column of the Monitor, its name, whether it is a condition number.
WATCHED = (
    ("kappa", "κ of weights", True),
    ("jacobian_kappa", "κ(J)", True),
    ("entropy", "entropy", False),
)


def _order(runs: Sequence[Run], folder: Path) -> str:
    """What of the Monitor's numbers orders the accuracies of the runs that it watched."""
    watched = [r for r in runs if r.curves.steps and r.architecture == "ViT-B" and r.accuracy()]
    if not watched:
        return "No watched runs are committed yet."
    # Of equal runs, ``runs`` has one, and not always the accuracy of the one that was watched.
    wanted = {run.experiment for run in watched}
    every = load_runs([folder], once=False)
    watched = [r for r in every if r.curves.steps and r.experiment in wanted and r.accuracy()]
    watched.sort(key=lambda run: -run.accuracy())
    columns, cells = ["variant", "accuracy"], [[r.variant, f"{r.accuracy():.2f}"] for r in watched]
    last = ["Spearman's ρ with accuracy", ""]
    for column, name, ratio in WATCHED:
        for when in ("start", "end"):
            found = [_at(run, column, when) for run in watched]
            columns.append(f"{name}, {when}")
            for line, value in zip(cells, found, strict=True):
                line.append(_value(value, ratio))
            pairs = [(v, r.accuracy()) for v, r in zip(found, watched, strict=True) if v]
            varies = len({value for value, _ in pairs}) > 1
            rho = spearmanr(*zip(*pairs, strict=True)).statistic if varies else None
            last.append("–" if rho is None else f"{rho:+.2f} (n = {len(pairs)})")
    shown = Table(
        "Conditioning and accuracy of each watched run of the small ViT",
        tuple(columns),
        (*map(tuple, cells), tuple(last)),
        notes=(
            "κ of weights: effective W_Q, W_K and W_V, geometric mean over roles and layers; κ(J): "
            "worst head of each layer on a probe, geometric mean over the layers which float64 "
            "resolves; unresolved: it resolves none, which ranks as the largest; –: no Jacobians "
            "were watched. Entropy of the attention in nats.",
        ),
    )
    return shown.to_markdown()


def _at(run: Run, column: str, when: str) -> float | None:
    """A value before or after training; inf where float64 cannot tell it."""
    curves = run.curves
    names = [f"{role}_kappa" for role in "qkv"] if column == "kappa" else [column]
    values = [curves.first(n) if when == "start" else curves.last(n) for n in names]
    known = [v for v in values if v is not None]
    if known:
        return statistics.geometric_mean(known)
    return math.inf if curves.left_out.get(column) else None


def _value(value: float | None, ratio: bool) -> str:
    if value is None or not ratio:
        return "–" if value is None else f"{value:.2f}"
    return "unresolved" if math.isinf(value) else f"{value:.3g}" if value < 1e4 else _power(value)


def _pictures(names: Sequence[str], folder: Path) -> list[str]:
    files = {name: folder / f"figure-{name}.png" for name in names}
    return [f"![Figure {n}](../results/lab/{f.name})" for n, f in files.items() if f.exists()]


def _on(data: str) -> Callable[[Run], bool]:
    return lambda run: str(run.get("data.name")).startswith(data)


def _method(*texts: str) -> Callable[[Run], bool]:
    return lambda run: any(text in m for m in run.get("methods") or () for text in texts)


CALL = "attncond lab run {} --form small --seeds {}"
SECTIONS: dict[str, Section] = {
    "cifar10": _section("1", CALL.format("vit-cifar10", 5), _on("cifar10")),
    "choosing": _section(
        "1",
        CALL.format("vit-cifar10", 1) + " --validation-only",
        _on("cifar10"),
        lambda run: not (run.result or {}).get("test_read"),
        on="validation",
    ),
    "tinyimagenet": _section("1", CALL.format("vit-tinyimagenet", 5), _on("tiny_imagenet")),
    "tinyvalidation": _section(
        "1", CALL.format("vit-tinyimagenet", 5), _on("tiny_imagenet"), on="validation"
    ),
    "lambda": _section(
        "5",
        CALL.format("vit-lambda", 3),
        lambda run: run.architecture == "ViT-B" and _on("cifar10")(run),
        _method("lam="),
        ["lambda"],
    ),
    "order": _order,
    "start": _start,
    "layernorm": _section(
        "6", CALL.format("layernorm", 3), _on("cifar10"), lambda run: not run.get("model.norm")
    ),
    "theorems": _section(
        "7", CALL.format("theorems", 3), _on("cifar10"), _method("paper-svd", "polar")
    ),
    "costs": _costs,
    "steps": _steps,
    "epochs": _section(
        "pre2", CALL.format("epochs-to-baseline", 5), _on("cifar10"), pictures=["pre2"]
    ),
    "spectra": _spectra,
}


def render(text: str, runs: Sequence[Run], folder: Path = FOLDER) -> str:
    """The page with every marked section written anew."""
    for name, make in SECTIONS.items():
        pattern = rf"(<!-- {name}: [^>]*-->\n).*?(<!-- /{name} -->)"
        found = make(runs, folder)
        text, count = re.subn(
            pattern, lambda m, found=found: m[1] + found + "\n" + m[2], text, flags=re.S
        )
        if count != 1:
            raise ValueError(f"docs/results.md needs one section marked {name}, it has {count}")
    return text


def count() -> None:
    """Tables 8 and 9, which need no runs."""
    import _record

    tables = {"memory": table(8), "flops": table(9)}
    figures = {name: replace(found, missing=()).to_markdown() for name, found in tables.items()}
    rows = {f"{name}_rows": found.data for name, found in tables.items()}
    _record.write(FOLDER / "costs.json", {**figures, **rows})


def draw(runs: Sequence[Run]) -> None:
    """Every figure that there are runs for."""
    for name in FIGURES:
        try:
            print(figure(name, runs, FOLDER / f"figure-{name}.png"))
        except ResultsError as error:
            print(error)


def main() -> None:
    """Rewrite the page."""
    runs = committed()
    if "--count" in sys.argv:
        count()
    if "--figures" in sys.argv:
        draw(runs)
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8"), runs), encoding="utf-8")


if __name__ == "__main__":
    main()
