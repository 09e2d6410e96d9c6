"""How the demo shows itself: a table that fits a terminal, and a figure of whatever is done."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("timm")

from attncond.demo import VARIANTS, Demo
from attncond.demo_view import figure, kappa_text, table


def run(variant: str, seed: int, accuracy: float, **changes: Any) -> dict[str, Any]:
    kappa = {"kappa_stock": [100.0, 300.0], "kappa_start": [1.5, 1.9], "kappa_trained": [3.0, 5.0]}
    return {
        "variant": variant, "seed": seed, "accuracy": accuracy, "seconds": 1.25, "method": None,
        "test_accuracy_by_epoch": [accuracy / 2, accuracy], "train_loss_by_epoch": [1.0, 0.5],
        **kappa, **changes,
    }  # fmt: skip


def shown(*runs: dict[str, Any], seeds: int = 3) -> tuple[Demo, list[str]]:
    """A demo with these runs, and the lines of its table."""
    study = Demo(Path("out"), seeds, 2)
    study.runs = list(runs)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table(study))
    return study, console.export_text().splitlines()


def line(lines: list[str], variant: str) -> list[str]:
    (found,) = [text for text in lines if text.strip().startswith(variant)]
    return found.split()


def test_kappa_text() -> None:
    assert [kappa_text(k) for k in (1.0, 99.99, 160257.2, 3.2e9, math.inf)] == [
        "1.00", "99.99", "160,257", "3e+09", "inf",
    ]  # fmt: skip


def test_half_a_demo_can_be_shown() -> None:
    study, lines = shown(run("stock", 0, 90), run("stock", 1, 91), run("Spectral()", 0, 93))
    assert lines[0].strip() == "ViT on digits, 2 epochs, 3 seeds, 3 of 15 runs"
    assert line(lines, "stock") == ["stock", "90.50", "±", "0.71", "1.70/1.90", "4.00/5.00", "1.2"]
    assert line(lines, "Spectral()")[1:3] == ["93.00", "1.70/1.90"]  # no spread of one seed
    assert figure(study).startswith(b"\x89PNG")


def test_a_whole_demo_fits_a_terminal_of_80_columns() -> None:
    wide = {"kappa_start": [123456.0, 999999.0], "kappa_trained": [123456.0, 3e9]}
    _, lines = shown(*(run(v, seed, 99.5, **wide) for v in VARIANTS for seed in range(3)))
    assert max(map(len, lines)) <= 80
    assert not any("…" in text for text in lines)
    assert "15 of 15 runs" in lines[0]
    assert all(any(v in text for text in lines) for v in VARIANTS)


def test_methods_that_leave_the_weights_alone_start_as_stock() -> None:
    _, lines = shown(*(run(variant, 0, 90) for variant in VARIANTS))
    as_stock = [v for v in VARIANTS if "as stock" in " ".join(line(lines, v))]
    assert as_stock == ["Precondition()", "RemoveGap()"]


@pytest.mark.parametrize("kappas", [[math.inf, 2.0], [math.nan, math.nan]], ids=str)
def test_weights_that_diverged_are_drawn_as_far_as_they_can_be(kappas: list[float]) -> None:
    study, lines = shown(run("stock", 0, 90), run("Spectral.paper()", 0, 10, kappa_trained=kappas))
    assert line(lines, "Spectral.paper()")[-2].endswith(("inf", "nan"))
    assert figure(study).startswith(b"\x89PNG")


def test_nothing_is_done_yet() -> None:
    _, lines = shown()
    assert "0 of 15 runs" in lines[0]
