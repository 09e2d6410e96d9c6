"""Rows of the tables: what is compared with what, rounded for the eye and unrounded for files."""

import json

import pytest
from fabricate import NOTE, Fake, dump
from scipy import stats

from attncond.lab.compare import group
from attncond.lab.results import load_runs
from attncond.lab.rows import COLUMNS, Line, cells, explained, numbers, paper_text, significance
from attncond.lab.rows import epochs_text as epochs

BASE = (75.0, 75.2, 75.4)
VALUES = {
    "baseline": BASE,
    "gap": (75.1, 75.2, 75.5),
    "precondition": (76.0, 76.5, 77.0),
    "spectral": (78.0, 78.1, 78.2),
    "tuned": (76.0, 76.1, 76.2),
}


@pytest.fixture
def setting(tmp_path):
    for name, values in VALUES.items():
        methods = () if name in ("baseline", "tuned") else (name,)
        changes = {"optim.qkv_lr": 0.35} if name == "tuned" else {}
        milliseconds = 21.0 if name == "spectral" else 20.0
        for seed, value in enumerate(values):
            fake = Fake(
                name, seed, value, methods=methods, changes=changes, milliseconds=milliseconds
            )
            fake.write(tmp_path)
    (found,) = group(load_runs([tmp_path]))
    return found


def line(setting, name, **more):
    (found,) = [g for g in setting.groups if g.first.variant == name]
    return Line({"model": "ViT-B", "variant": name}, setting=setting, group=found, **more)


def shown(setting, name, corrected=(None, None)):
    """Cells; the second pair of Δ and p is to the tuned baseline."""
    return dict(zip((*COLUMNS[:5], "p tuned", *COLUMNS[6:]), cells(line(setting, name), corrected),
                    strict=True))  # fmt: skip


def welch(name, reference):
    return stats.ttest_ind(VALUES[name], VALUES[reference], equal_var=False).pvalue


def test_a_row_of_cells(setting):
    found = shown(setting, "spectral", (0.003, 0.04))
    assert found["own"] == "78.10 ± 0.10"
    assert found["seeds"] == "3"
    assert found["Δ baseline"] == "+2.90 **"
    assert found["p"] == f"{welch('spectral', 'baseline'):.4f}"
    assert found["Δ tuned"] == "+2.00 *"
    assert found["p tuned"] == "<0.0001"
    assert welch("spectral", "tuned") < 1e-4
    assert (found["step time"], found["memory"]) == ("1.050", "1.000")


@pytest.mark.parametrize(("p", "stars"), [(0.0099, " **"), (0.01, " *"), (0.05, ""), (None, "")])
def test_stars_are_of_the_corrected_value(setting, p, stars):
    assert shown(setting, "spectral", (p, None))["Δ baseline"] == f"+2.90{stars}"


def test_the_baseline_is_compared_with_nothing(setting):
    found = shown(setting, "baseline")
    assert [found[k] for k in ("Δ baseline", "p", "Δ tuned", "p tuned")] == ["–"] * 4
    told = numbers(line(setting, "baseline"), (None, None))
    assert told["delta_baseline"] is told["delta_tuned"] is told["p_tuned_paired"] is None


def test_a_row_without_runs():
    told = Line({"model": "ViT-B"}, paper=(80.7, 0.41), more={"lam": 10})
    assert told.own is None
    assert cells(told, (None, None)) == ("–",) * len(COLUMNS)
    assert numbers(told, (None, None)) == {
        "model": "ViT-B", "paper_mean": 80.7, "paper_std": 0.41, "lam": 10
    }  # fmt: skip
    assert explained([told]) == []


def test_significance_corrects_over_the_variants_that_are_shown(setting):
    names = ("baseline", "gap", "precondition", "spectral")
    found = significance([line(setting, name) for name in names])
    raw = sorted(welch(name, "baseline") for name in names[1:])
    by_hand = [min(1.0, 3 * raw[0]), 2 * raw[1], raw[2]]
    for place in range(1, 3):
        by_hand[place] = max(by_hand[place - 1 : place + 1])  # Holm never goes down
    assert found[0] == (None, None)
    assert sorted(found[n][0] for n in (1, 2, 3)) == pytest.approx(by_hand)
    assert found[3][1] == pytest.approx(3 * welch("spectral", "tuned"))
    # One alone needs no correction, and a line without runs is none.
    alone = significance([line(setting, "spectral"), Line({"model": "Swin-B"})])
    assert alone[0][0] == pytest.approx(welch("spectral", "baseline"))
    assert alone[1] == (None, None)


def test_numbers_are_those_of_the_runs(setting):
    told = numbers(line(setting, "spectral", paper=81.7), (0.003, 0.04))
    assert (told["paper_mean"], told["paper_std"]) == (81.7, None)
    assert told["mean"] == pytest.approx(78.1)
    assert told["std"] == pytest.approx(0.1)
    assert (told["n"], told["seeds"], told["diverged"], told["unfinished"]) == (3, "0 1 2", 0, 0)
    assert (told["data"], told["form"], told["epochs"], told["on"]) == (NOTE, "small", 20, "test")
    assert told["delta_baseline"] == pytest.approx(2.9)
    assert told["p_baseline"] == pytest.approx(welch("spectral", "baseline"))
    assert told["delta_baseline_low"] < told["delta_baseline"] < told["delta_baseline_high"]
    assert (told["p_baseline_holm"], told["p_tuned_holm"]) == (0.003, 0.04)
    gains = [a - b for a, b in zip(VALUES["spectral"], BASE, strict=True)]
    assert told["p_baseline_paired"] == pytest.approx(stats.ttest_1samp(gains, 0).pvalue)
    assert told["step_time_ratio"] == pytest.approx(1.05)
    assert told["never_reached"] == 0
    assert 1 <= told["epochs_to_baseline"] <= 20


@pytest.mark.parametrize(
    ("reached", "text"),
    [
        ([], "–"),
        ([None, None], "never"),
        ([10.0, 15.0], "12.5"),
        ([10.0, None, 11.0], "10.5 (1 of 3 never)"),
    ],
)
def test_epochs(reached, text):
    assert epochs(reached) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, "–"), (81.7, "81.7"), (80, "80.0"), ([80.7, 0.41], "80.7 ± 0.41")]
)
def test_the_paper_s_numbers_as_it_prints_them(value, text):
    assert paper_text(value) == text


def test_notes_say_what_applies_and_nothing_else(setting, tmp_path):
    notes = explained([line(setting, "baseline"), line(setting, "spectral")])
    assert notes[0].startswith(f"own: {NOTE}, form small, 20 epochs, vit_small32; accuracy")
    assert "test set, read once" in notes[0]
    assert not any("diverged. That" in note or "twice" in note for note in notes)
    Fake("paper", 1, methods=("paper",), state="diverged").write(tmp_path / "more")
    Fake("baseline", 0).write(tmp_path / "more")
    Fake("baseline", 0, recipe="spectra").write(tmp_path / "more")
    Fake("paper", 2, 30.0, methods=("paper",)).write(tmp_path / "more")
    Fake("paper", 2, 31.0, methods=("paper",), recipe="theorems").write(tmp_path / "more")
    (other,) = group(load_runs([tmp_path / "more"]), "validation")
    notes = explained([line(other, "baseline"), line(other, "paper")])
    assert "on the validation images" in notes[0]
    assert any("ViT-B, paper: 1 of 2 seeds diverged. That is a failure" in n for n in notes)
    assert "2 runs are there twice, and count once." in notes
    differ = "What was left out of them ended otherwise: theorems/small/paper/seed2 at 30.0."
    assert differ not in notes  # that is of the test
    (tested,) = group(load_runs([tmp_path / "more"]))
    assert differ in explained([line(tested, "paper")])
    assert not any("Monitor" in note for note in notes)
    Fake("gap", methods=("gap",), watch=True).write(tmp_path / "more")
    (other,) = group(load_runs([tmp_path / "more"]))
    assert any("the Monitor watched more" in note for note in explained([line(other, "gap")]))


def test_runs_without_test_are_counted_and_not_listed(tmp_path):
    Fake().write(tmp_path)
    for seed in (0, 1):
        folder = Fake("gap", seed, methods=("gap",)).write(tmp_path)
        result = json.loads((folder / "result.json").read_text())
        dump(folder / "result.json", {**result, "test_accuracy": None})
    for on in ("test", "validation"):
        (found,) = group(load_runs([tmp_path]), on)
        notes = explained([line(found, "baseline"), line(found, "gap")])
        told = [note for note in notes if "unread" in note]
        assert told == (
            ["2 runs ended with the test set left unread: seeds has them as without test."]
            if on == "test"
            else []
        )
