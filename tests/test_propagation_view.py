"""The figures and the table of the propagation study, from records."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from attncond import propagation_view

RESULTS = Path(__file__).parents[1] / "results" / "propagation"


def committed(name: str):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def cell(stack: str, depth: int, ratio: float | None, counts=(1, 2, 3)):
    learned, stuck, diverged = counts
    told = {"value_std": "1", "stack": stack, "depth": depth, "best_over_constant": ratio}
    return {**told, "learned": learned, "stuck": stuck, "diverged": diverged}


def test_the_table_counts_outcomes_and_tells_the_best_loss() -> None:
    rows = [cell("A", 4, 1234.5), cell("A", 1, 0.123), cell("A⊥", 1, None, (0, 0, 6))]
    rows.append(cell("A⊥", 4, 99.994))
    assert propagation_view.training_table({"summary": rows}).splitlines() == [
        "| W_V | stack | 1 layer | 4 layers |",
        "|---|---|---|---|",
        "| 1 | A | 1/2/3, 0.12 | 1/2/3, 1e+03 |",
        "| 1 | A⊥ | 0/0/6, none finite | 1/2/3, 99.99 |",
    ]


def test_the_committed_page_shows_the_committed_table() -> None:
    page = (RESULTS / "README.md").read_text(encoding="utf-8")
    assert propagation_view.training_table(committed("training")) in page


def test_stacks_are_told_apart_by_colour_and_the_fix_by_the_line() -> None:
    stacks = [a + rest for a in ("A", "A⊥") for rest in ("", " + LN", " + skip", " + skip + LN")]
    styles = [propagation_view._style(stack) for stack in stacks]
    assert len({(s["color"], s["linestyle"]) for s in styles}) == 8
    assert [s["linestyle"] for s in styles] == ["--"] * 4 + ["-"] * 4
    assert propagation_view._style("A(X)⊥ + LN")["color"] == styles[1]["color"]


def test_figures_over_depth_have_a_panel_for_each_kind_of_attention() -> None:
    pytest.importorskip("matplotlib")
    rows = committed("measured")["by_depth"]
    image = propagation_view._by_depth(rows)
    assert [len(axes.lines) for axes in image.axes] == [8, 8, 8]
    line = next(x for x in image.axes[0].lines if x.get_label() == "A⊥")
    row = next(r for r in rows if r["stack"] == "A⊥")
    assert list(line.get_ydata()) == row["stable_rank"]
    assert list(line.get_xdata()) == list(range(1, 11))


def test_what_is_not_finite_is_drawn_on_the_upper_edge() -> None:
    pytest.importorskip("matplotlib")
    rows = [
        {"stack": stack, "depth": 1, "rate": rate, "value_std": "1", "last_loss": losses}
        for stack in ("A", "A(X)")
        for rate, losses in ((0.1, [0.1, 0.2, 0.4]), (1.0, [None, None, 0.1]))
    ]
    setting = {"constant_loss": 0.25, "target": "heaviside", "tokens": 4, "steps": 1, "seeds": [0]}
    image = propagation_view._training(rows, setting, "1")
    assert list(image.axes[0].lines[0].get_ydata()) == [0.2, 40 * 0.25]
    assert image.axes[0].get_ylim()[1] > 40 * 0.25


def test_medians_count_what_is_missing_as_the_worst() -> None:
    assert propagation_view._median([0.3, 0.1, 0.2]) == 0.2
    assert propagation_view._median([0.1, 0.3]) == pytest.approx(0.2)
    assert propagation_view._median([None, 0.1, 0.2]) == 0.2
    assert propagation_view._median([None, None, 0.2]) == math.inf


def test_the_figures_of_the_committed_measurements_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = propagation_view.draw_measured(committed("measured"), tmp_path)
    names = ["spectra.png", "stable_rank.png", "width.png", "gradients.png"]
    assert [p.name for p in paths] == names
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in paths)


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'attncond\[demo\]'"):
        propagation_view.draw_measured(committed("measured"), Path())
