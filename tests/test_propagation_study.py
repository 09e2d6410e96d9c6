"""The command behind the propagation study: its record, its checks, its options."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import pytest
import torch

from attncond import propagation_study
from attncond.propagation import Stack, depth_profile

RESULTS = Path(__file__).parents[1] / "results" / "propagation"


def test_the_spectral_gap() -> None:
    t = 300
    values = [propagation_study.spectra(t, seed)["A"] for seed in range(6)]
    for sigma in values:
        assert sigma[0] == pytest.approx(math.sqrt(t), rel=0.01)  # σ₁ = 1
    # σ₂ = 2/√T; single draws go up to 2.3, for the largest of T² log-normal entries stands out.
    assert statistics.fmean(sigma[1] for sigma in values) == pytest.approx(2, abs=0.2)


def test_keys_and_queries_have_the_gap_too() -> None:
    sigma = propagation_study.spectra(150, 0)["A(X)"]
    assert sigma[0] == pytest.approx(math.sqrt(150), rel=0.03)
    assert sigma[1] < 0.3 * sigma[0]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(propagation_study, "WIDTHS", [10, 20])
    monkeypatch.setattr(propagation_study, "DEPTHS", [1, 2])
    measure = propagation_study.measure
    monkeypatch.setattr(propagation_study, "gradients", _few_gradients(propagation_study.gradients))
    monkeypatch.setattr(propagation_study, "measure", lambda seeds: measure(seeds, t=12))


def _few_gradients(gradients):
    return lambda stack, t, layer, depth, seeds: gradients(stack, 5, layer, depth, seeds)


@pytest.mark.usefixtures("quick")
def test_the_command_writes_records_and_figures(tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib")
    words = "--seeds 1 --train-seeds 1 --tokens 6 --samples 2 --steps 2 --rates 0.001 0.1"
    with pytest.raises(SystemExit) as end:
        propagation_study.main([*words.split(), "--out", str(tmp_path)])
    assert end.value.code == 1  # the constants are those of larger sizes
    assert "NOT" in capsys.readouterr().out
    for name in ("measured", "training"):
        text = (tmp_path / f"{name}.json").read_text(encoding="utf-8")
        record = json.loads(text)
        assert record["command"] == f"python -m attncond.propagation {words}"
        assert str(tmp_path) not in text
        assert {"attncond", "torch", "python"} <= set(record["versions"])
    assert {row["runs"] for row in record["summary"]} == {2}
    names = ["spectra", "stable_rank", "width", "gradients", "training", "training_scaled"]
    for name in names:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*.part"))


def test_the_committed_constants_hold() -> None:
    record = json.loads((RESULTS / "measured.json").read_text(encoding="utf-8"))
    assert all(row["holds"] for row in record["checks"])
    for row in record["checks"]:
        low, high = row["range"]
        assert low <= row["found"] <= high


def test_the_committed_table_is_what_the_runs_say() -> None:
    record = json.loads((RESULTS / "training.json").read_text(encoding="utf-8"))
    rows = [
        {**row, "last_loss": [math.nan if v is None else v for v in row["last_loss"]]}
        for row in record["rows"]
    ]
    found = propagation_study.summary(rows, record["setting"]["constant_loss"])
    for again, committed in zip(found, record["summary"], strict=True):
        for key in ("stack", "depth", "learned", "stuck", "diverged", "best_rate"):
            assert again[key] == committed[key]


def test_diverged_runs_are_null_in_json_and_counted() -> None:
    rows = [
        {
            "value_std": "1",
            "stack": "A",
            "depth": 1,
            "rate": rate,
            "last_loss": losses,
            "outcome": outcomes,
        }
        for rate, losses, outcomes in (
            (0.1, [math.nan, 1.0, math.inf], ["diverged", "stuck", "diverged"]),
            (0.01, [0.1, 0.2, math.nan], ["learned", "learned", "diverged"]),
        )
    ]
    (row,) = propagation_study.summary(rows, constant=0.25)
    assert (row["learned"], row["stuck"], row["diverged"]) == (2, 1, 3)
    assert (row["best_rate"], row["best_median_loss"]) == (0.01, 0.2)
    assert propagation_study._plain([math.nan, math.inf, 1 / 3]) == [None, None, 0.333333]


@pytest.mark.parametrize(
    "words", ["--seeds 0", "--rates -1", "--only nothing", "--target nothing", "--steps x"]
)
def test_bad_options_are_named(words: str, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        propagation_study.main([*words.split(), "--out", str(tmp_path)])
    assert end.value.code == 2
    assert words.split()[0].removeprefix("--") in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_named(tmp_path, capsys) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as end:
        propagation_study.main(["--out", str(tmp_path / "file" / "folder")])
    assert end.value.code == 2
    assert "folder" in capsys.readouterr().err


def test_profiles_are_means_over_the_seeds() -> None:
    rows = propagation_study.by_depth(8, 2, 3)
    assert len(rows) == 16
    row = next(r for r in rows if r["stack"] == "A⊥ + LN")
    stack = Stack(remove_gap=True, layer_norm=True)
    single = [depth_profile(stack, 8, 2, seed)["stable_rank"][1] for seed in range(3)]
    assert row["stable_rank"][1] == pytest.approx(sum(single) / 3)
    assert (row["tokens"], row["seeds"], row["key_query_std"]) == (8, 3, "1/√d")
    keyed = propagation_study.by_depth(8, 2, 1, key_query_std=1.0)
    assert len(keyed) == 8  # a given standard deviation changes those with keys alone
    assert all(r["stack"].startswith("A(X)") for r in keyed)
    assert {r["key_query_std"] for r in keyed} == {"1"}


@pytest.mark.parametrize(
    ("found", "holds"), [(1.0, True), (2.0, True), (0.99, False), (2.01, False), (math.nan, False)]
)
def test_a_check_holds_within_its_range(found: float, holds: bool) -> None:
    row = propagation_study.check("x", found, 1.5, 1.0, 2.0)
    assert row["holds"] is holds
    assert (row["expected"], row["range"]) == (1.5, [1.0, 2.0])


def test_a_record_is_exchanged_whole(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    propagation_study.write(path, {"a": [1 / 3, math.nan], "b": "κ"})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": [0.333333, None], "b": "κ"}
    with pytest.raises(TypeError):
        propagation_study.write(path, {"a": object()})
    assert json.loads(path.read_text(encoding="utf-8"))["b"] == "κ"
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_the_command_is_recorded_without_its_folder() -> None:
    told = propagation_study.circumstances(["--seeds", "3", "--out", "/some/where", "--steps", "2"])
    assert told["command"] == "python -m attncond.propagation --seeds 3 --steps 2"
    assert told["versions"]["torch"] == torch.__version__


@pytest.mark.usefixtures("quick")
def test_threads_are_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        assert torch.get_num_threads() == 1
        raise RuntimeError("in the middle")

    monkeypatch.setattr(propagation_study, "measure", fail)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(RuntimeError, match="in the middle"):
            propagation_study.main(["--only", "measure", "--out", str(tmp_path)])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_nothing_to_draw_is_told(tmp_path: Path, capsys) -> None:
    words = ["--only", "draw", "--out", str(tmp_path)]
    for content, said in ((None, "neither measured.json nor training.json"), ("{", "is no JSON")):
        if content is not None:
            (tmp_path / "measured.json").write_text(content)
        with pytest.raises(SystemExit) as caught:
            propagation_study.main(words)
        assert caught.value.code == 2
        assert said in capsys.readouterr().err
