"""The demo: fair by construction, honest in its summary, and readable whenever it stops."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("timm")

from attncond import demo as module
from attncond.demo import VARIANTS, Demo, DemoError, condition_numbers


@pytest.fixture(scope="module")
def data() -> module.Digits:
    return module.load_digits()


def fake_run(variant: str, seed: int, accuracy: float, epochs: int = 2) -> dict[str, Any]:
    kappa = {"kappa_stock": [100.0, 300.0], "kappa_start": [1.5, 1.9], "kappa_trained": [3.0, 5.0]}
    curve = [accuracy / 2] * (epochs - 1) + [accuracy]
    return {
        "variant": variant, "seed": seed, "accuracy": accuracy, "seconds": 1.0, "method": None,
        "test_accuracy_by_epoch": curve, "train_loss_by_epoch": [1.0] * epochs, **kappa,
    }  # fmt: skip


def filled(tmp_path: Path, accuracies: dict[str, list[float]], seeds: int = 3) -> Demo:
    study = Demo(tmp_path, seeds, 2)
    study.runs = [
        fake_run(variant, seed, value)
        for variant, values in accuracies.items()
        for seed, value in enumerate(values)
    ]
    return study


def test_variants_differ_in_nothing_but_the_method(
    data: module.Digits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without methods and their rates every variant must be the same run, bit for bit."""
    monkeypatch.setattr(module, "VARIANTS", dict.fromkeys(VARIANTS))
    monkeypatch.setattr(module, "RATES", dict.fromkeys(VARIANTS, 2e-3))
    runs = [module.train(variant, 0, 1, data) for variant in VARIANTS]
    for run in runs:
        for key in ("variant", "seconds"):
            run.pop(key)
    assert all(run == runs[0] for run in runs)
    other = module.train("stock", 1, 1, data)
    assert other["train_loss_by_epoch"] != runs[0]["train_loss_by_epoch"]


def test_a_run_learns_and_reports_the_last_epoch(data: module.Digits) -> None:
    seen: list[tuple[int, float]] = []
    run = module.train("Spectral()", 0, 8, data, lambda *report: seen.append(report))
    assert [epoch for epoch, _ in seen] == list(range(1, 9))
    assert run["accuracy"] == run["test_accuracy_by_epoch"][-1] == seen[-1][1]
    assert run["accuracy"] > 30  # chance is 10
    assert run["train_loss_by_epoch"][-1] < run["train_loss_by_epoch"][0]
    assert max(run["kappa_start"]) <= 2 < max(run["kappa_stock"])
    assert run["method"]["parameters"]["preserve_norm"] is True


@pytest.mark.parametrize("variant", ["Precondition()", "RemoveGap()"])
def test_methods_for_heads_leave_the_weights_alone(
    data: module.Digits, tmp_path: Path, variant: str
) -> None:
    stock, run = (module.train(name, 0, 1, data, rate=2e-3) for name in ("stock", variant))
    assert run["kappa_start"] == run["kappa_stock"] == stock["kappa_start"]
    assert run["train_loss_by_epoch"] != stock["train_loss_by_epoch"]  # and yet it does something
    assert run["method"]["method"] == variant.removesuffix("()")
    study = Demo(tmp_path, 1, 1)
    study.runs = [stock, run]
    assert [row["own_start"] for row in study.summary()] == [True, False]


def test_the_split_is_fixed_and_disjoint(data: module.Digits) -> None:
    again = module.load_digits()
    assert torch.equal(again.test_images, data.test_images)
    assert (len(data.train_labels), len(data.test_labels)) == (1257, 540)
    assert data.train_images.shape[1:] == (1, 8, 8)
    assert -1 <= data.train_images.min() < data.train_images.max() <= 1


def test_condition_numbers_are_those_of_the_effective_weights() -> None:
    import attncond as ac

    model = module.build_model(0)
    before = condition_numbers(model)
    handle = ac.condition(model, ac.Spectral(kappa=1.5))
    assert max(condition_numbers(model)) <= 1.5 < min(before)
    handle.remove()
    assert condition_numbers(model) == before
    weight = model.get_parameter("blocks.0.attn.qkv.weight")
    with torch.no_grad():
        weight[0, 0] = math.nan
    assert math.isnan(condition_numbers(model)[0])


def test_summary_and_verdict_say_what_happened(tmp_path: Path) -> None:
    study = filled(
        tmp_path,
        {"stock": [90, 92, 94], "Spectral()": [95, 96, 97], "Spectral.paper()": [90, 93, 93]},
    )
    first = study.summary()[0]
    assert (first["accuracy_mean"], first["accuracy_std"], first["seeds"]) == (92, 2, 3)
    assert (first["kappa_trained_median"], first["kappa_trained_worst"]) == (4, 5)
    gained, tied, caution = study.verdict().splitlines()
    assert "Spectral(): +4.00 points" in gained
    assert "3 of 3 seeds" in gained
    assert "no difference" not in gained
    assert "Spectral.paper(): +0.00 points" in tied
    assert "no difference was shown" in tied
    assert "not evidence" in caution


def test_a_loss_is_called_a_loss(tmp_path: Path) -> None:
    study = filled(tmp_path, {"stock": [90, 91], "Spectral()": [80, 80.5]}, seeds=2)
    assert "Spectral(): -10.25 points" in study.verdict()
    assert "0 of 2 seeds" in study.verdict()


def test_half_a_demo_has_a_verdict(tmp_path: Path) -> None:
    study = filled(tmp_path, {"stock": [90, 91], "Spectral()": [93]})
    assert not study.complete
    assert "+3.00" in study.verdict()
    assert Demo(tmp_path).verdict() == "Nothing to compare yet."


def test_results_are_strict_json(tmp_path: Path) -> None:
    study = filled(tmp_path, {"stock": [90.0]}, seeds=1)
    study.runs[0]["kappa_trained"] = [math.inf, 2.0]
    study.runs[0]["train_loss_by_epoch"] = [math.nan, 1.0]
    study.write()

    def refuse(word: str) -> None:
        raise AssertionError(word)

    text = (tmp_path / "results.json").read_text()
    facts = json.loads(text, parse_constant=refuse)
    assert facts["runs"][0]["kappa_trained"] == [None, 2.0]
    assert set(facts) >= {"command", "versions", "hardware", "seeds", "runs", "summary", "complete"}
    assert str(tmp_path) not in text


def test_a_full_disk_leaves_the_old_results_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = filled(tmp_path, {"stock": [90]}, seeds=1)
    study.write()
    before = (tmp_path / "results.json").read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    study.runs.append(fake_run("Spectral()", 0, 95))
    with pytest.raises(DemoError, match=r"results\.json.*No space left.*--out"):
        study.write()
    assert (tmp_path / "results.json").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


def test_prepare_refuses_a_file_in_the_way_and_keeps_old_results(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DemoError, match="cannot write"):
        Demo(tmp_path / "file").prepare()
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "results.json").write_text("of an earlier demo")
    Demo(tmp_path).prepare()
    assert (tmp_path / "results.json").read_text() == "of an earlier demo"


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(DemoError, match=r"timm.*attncond\[demo\]"):
        Demo(tmp_path / "out").prepare()
    assert not (tmp_path / "out").exists()


def test_rates_are_those_that_the_benchmark_chose() -> None:
    chosen = Path(__file__).parents[1] / "results" / "demo" / "rates.json"
    assert json.loads(chosen.read_text())["best"] == module.RATES
