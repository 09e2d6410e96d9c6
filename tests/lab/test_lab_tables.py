"""The papers' tables from made-up runs: what stands in them, and what they say is missing."""

import json
from pathlib import Path

import pytest
from fabricate import Fake, study, sweep

from attncond.lab.results import collect, dumps, load_runs
from attncond.lab.runs import ResultsError
from attncond.lab.sheet import FORMATS, Table
from attncond.lab.stats import difference, holm
from attncond.lab.tables import paper_numbers, table

NUMBERS = ("1", "5", "6", "7", "pre2")


@pytest.fixture(scope="module")
def all_runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    study(root / "study")
    sweep(root / "sweep")
    return load_runs([root])


def rows(found: Table) -> list[dict[str, str]]:
    """Cells by column; the second p is that to the tuned baseline."""
    columns, body = found.shown()
    names = [f"{c} {columns[:i].count(c) + 1}" if columns.count(c) > 1 else c
             for i, c in enumerate(columns)]  # fmt: skip
    return [dict(zip(names, row, strict=True)) for row in body]


def row(found: Table, model: str, variant: str) -> dict[str, str]:
    (one,) = [r for r in rows(found) if r["model"] == model and r["variant"] == variant]
    return one


def test_the_papers_numbers_are_those_of_the_paper():
    paper = paper_numbers()
    assert "2603.07162" in paper["source"]
    assert paper["table1"]["original"][0] == [80.7, 0.41]
    assert paper["table1"]["spectral"][4] == [84.9, 0.21]
    assert (
        dict(zip(paper["table5"]["lambda"], paper["table5"]["accuracy"], strict=True))[10] == 81.7
    )
    assert paper["table6"]["spectral_no_ln"][2] == [80.5, 0.23]
    assert paper["table7"]["rows"]["ViT-B"]["thm3.5"] == [82.0, "41:38"]


def test_table_1(all_runs):
    found = table(1, all_runs)
    baseline = row(found, "ViT-B", "baseline")
    assert baseline["paper"] == "80.7 ± 0.41"
    assert baseline["seeds"] == "5"
    assert baseline["Δ baseline"] == "–"
    spectral = row(found, "ViT-B", "spectral")
    assert spectral["paper"] == "–"  # the paper's method is λ = 10, not ours
    assert spectral["Δ baseline"].startswith("+2.")
    assert spectral["step time"] == "1.002"
    assert row(found, "ViT-B", "paper")["paper"] == "81.7 ± 0.38"
    assert row(found, "ViT-B", "paper")["Δ baseline"].startswith("-44.")
    assert row(found, "ViT-B", "paper")["epochs to baseline"] == "never"
    assert any("CIFAR-10 (JPEG copy), form small, 20 epochs" in note for note in found.notes)
    # A sweep over λ has a table of its own.
    assert not [r for r in rows(found) if "lam=" in r["variant"]]


def test_a_diverged_seed_is_shown(all_runs):
    found = table(1, all_runs)
    paper = row(found, "Swin-B", "paper")
    assert paper["seeds"] == "2 + 1 diverged"
    assert (paper["p 1"], paper["p 2"]) == ("–", "–")
    assert any("1 of 3 seeds diverged" in note for note in found.notes)


def test_p_values_and_stars(all_runs):
    found = table(1, all_runs)
    data = {(d["model"], d["variant"]): d for d in found.data}
    mine = [d for (model, _), d in data.items() if model == "ViT-B"]
    by_name = {
        name: [r.accuracy() for r in all_runs if r.recipe == "vit-cifar10" and r.variant == name]
        for name in ("baseline", "spectral")
    }
    welch = difference(by_name["spectral"], by_name["baseline"])
    spectral = data["ViT-B", "spectral"]
    assert spectral["p_baseline"] == pytest.approx(welch.p)
    assert spectral["delta_baseline_low"] == pytest.approx(welch.low)
    corrected = holm([d["p_baseline"] for d in mine])
    assert [d["p_baseline_holm"] for d in mine] == pytest.approx(corrected)
    for d in mine:
        cell = row(found, "ViT-B", d["variant"])["Δ baseline"]
        p = d["p_baseline_holm"]
        stars = "" if p is None or p >= 0.05 else "**" if p < 0.01 else "*"
        assert cell.count("*") == len(stars)


def test_table_5(all_runs):
    found = table(5, all_runs)
    ten = [r for r in rows(found) if r["λ"] == "10"]
    assert {r["variant"] for r in ten} == {"literal", "norm-preserving"}
    literal = next(r for r in ten if r["variant"] == "literal")
    assert literal["paper"] == "81.7"
    assert literal["λ/σ_max"] == "16.39"
    assert next(r for r in ten if r["variant"] == "norm-preserving")["paper"] == "–"
    # The paper's other λ are there, without a number of ours.
    missing = [r["λ"] for r in rows(found) if r["own"] == "–"]
    assert missing == ["6", "8", "12", "14", "16"]
    data = [d for d in found.data if d.get("lam_over_sigma") and d["λ"] == "4"]
    assert all(d["q_kappa"] > 1 and d["entropy"] is not None for d in data)


def test_table_6(tmp_path):
    for methods, name in (((), "vit"), (("paper",), "vit+paper")):
        for norm in (True, False):
            for seed in range(3):
                fake = Fake(
                    name + ("" if norm else "-noln"), seed, 75 + seed - 5 * (not norm),
                    recipe="layernorm", methods=methods, changes={"model.norm": norm},
                )  # fmt: skip
                fake.write(tmp_path)
    found = table(6, load_runs([tmp_path]))
    without = row(found, "ViT-B", "paper, no LayerNorm")
    assert without["paper"] == "79.8 ± 0.31"
    assert without["own"] == "71.00 ± 1.00"
    assert without["Δ baseline"].split()[0] == "-5.00"
    assert row(found, "ViT-B", "paper")["paper"] == "81.7"
    assert row(found, "Swin-B", "paper, no LayerNorm")["own"] == "–"
    assert any("attncond lab run layernorm" in command for _, command in found.missing)


def test_table_7(all_runs):
    found = table(7, all_runs)
    svd = row(found, "ViT-B", "paper-svd")
    assert (svd["paper"], svd["paper time"]) == ("82.0", "41:38 (1.412)")
    assert svd["step time"] == "1.042"  # over the baselines that the Monitor did not watch
    assert row(found, "XCiT-M", "baseline")["paper time"] == "91:03 (1.000)"
    assert not [r for r in rows(found) if r["variant"] in ("gap", "precondition")]


def test_epochs(all_runs):
    found = table("pre2", all_runs)
    assert row(found, "ViT-B", "precondition")["paper: fewer epochs"] == "20–30%"
    assert row(found, "ViT-B", "precondition")["epochs to baseline"] == "never"
    spectral = row(found, "ViT-B", "spectral")
    share = 1 - float(spectral["epochs to baseline"]) / 20
    assert spectral["fewer epochs"] == f"{100 * share:.0f}%"


@pytest.mark.parametrize("number", NUMBERS)
def test_without_runs_a_table_says_how_to_get_them(number):
    found = table(number)
    assert found.missing
    assert all(command.startswith("attncond lab run ") for _, command in found.missing)
    assert not [r for r in rows(found) if r.get("own", "–") != "–"]


@pytest.mark.parametrize("number", NUMBERS)
def test_commands_of_what_is_missing_can_be_run(number):
    from attncond.lab.recipe import load

    for _, command in table(number).missing:
        words = command.split()
        recipe = load(words[3])
        options = dict(zip(words[4::2], words[5::2], strict=True))
        for variant in options.get("--variants", "").split(","):
            recipe.config(options["--form"], variant or next(iter(recipe.variants)))


@pytest.mark.parametrize("number", NUMBERS)
def test_one_unfinished_run_is_enough_for_every_table(tmp_path, number):
    Fake(state="stopped").write(tmp_path)
    found = table(number, load_runs([tmp_path]))
    for make in FORMATS.values():
        assert make(found)
    if number == "1":
        assert row(found, "ViT-B", "baseline")["seeds"] == "0 + 1 unfinished"
        command = "attncond lab run vit-cifar10 --form small --variants baseline --seeds 5"
        assert f"{command} --out {tmp_path}" in [command for _, command in found.missing]


def test_more_seeds_are_asked_for_with_the_settings_of_those_there_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Fake("gap", methods=("gap",), epochs=40).write(Path("runs"))
    folder.parent.rename(folder.parents[1] / "gap@epochs=40")
    Fake("gap", methods=("gap",), epochs=40, changes={"optim.lr": 0.002}).write(Path("a b"))
    Fake("own", methods=("gap",), recipe="mine").write(Path("runs"))
    asked = [how for what, how in table(1, load_runs(["runs", "a b"])).missing if "gap" in what]
    start = "attncond lab run vit-cifar10 --form small --variants gap --seeds 5"
    assert sorted(asked) == [
        "attncond lab run mine.yaml --form small --variants own --seeds 5",
        f"{start} --grid schedule.epochs=40",
        f"{start} --set optim.lr=0.002 --set schedule.epochs=40 --out 'a b'",
    ]


def test_what_is_missing_of_several_models_is_told_of_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Fake("vit", recipe="mine").write(Path("runs"))
    Fake("deit", recipe="mine", model="deit_small32").write(Path("runs"))
    told = {how: what for what, how in table(1, load_runs(["runs"])).missing}
    what = told["attncond lab run mine.yaml --form small --variants vit,deit --seeds 5"]
    assert what == "ViT-B, baseline: 1 of 5 seeds; DeiT-B, baseline: 1 of 5 seeds"


def test_names_that_a_shell_would_read_otherwise_are_quoted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Fake("a&b", methods=("gap",), recipe="q;k").write(Path("runs"))
    ((_, how),) = [(w, how) for w, how in table(1, load_runs(["runs"])).missing if "gap" in w]
    assert how == "attncond lab run 'q;k.yaml' --form small --variants 'a&b' --seeds 5"


def test_a_value_with_commas_is_asked_for_as_the_grid_takes_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    init = "spectral:lam=1,scope=head"
    folder = Fake("gap", methods=("gap",), changes={"model.init": init}).write(Path("runs"))
    folder.parent.rename(folder.parents[1] / f"gap@init={init}")
    asked = [how for what, how in table(1, load_runs(["runs"])).missing if "gap" in what]
    assert len(asked) == 1
    assert f"""--grid 'model.init="{init}"'""" in asked[0]


def test_what_was_set_is_asked_for_of_a_recipe_of_ones_own_as_well(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = "name: own\ntitle: t\nbase: vit-cifar10\nvariants: {a: {methods: [gap]}}"
    Path("own.yaml").write_text(own)
    Fake("a", methods=("gap",), recipe="own", epochs=40).write(Path("runs"))
    (asked,) = [how for what, how in table(1, load_runs(["runs"])).missing if "gap" in what]
    assert asked.startswith("attncond lab run own.yaml --form small --variants a --seeds 5")
    assert "--set schedule.epochs=40" in asked


def test_a_rate_that_old_runs_lack_is_asked_for_where_it_was_set(tmp_path, monkeypatch):
    """Without it the command makes other runs than those that are missing."""
    monkeypatch.chdir(tmp_path)
    made = Fake("gap", methods=("gap",), changes={"optim.output_lr": 0.5}).write(Path("runs"))
    made.parent.rename(made.parents[1] / "gap@output_lr=0.5")
    # The variant has a rate of 0.25.
    changes = {"optim.qkv_lr": 0.25, "optim.output_lr": 1.0}
    Fake("tuned-output", changes=changes).write(Path("runs"))
    asked = dict(table(1, load_runs(["runs"])).missing)
    (gap,) = [how for what, how in asked.items() if "gap" in what]
    assert "--grid optim.output_lr=0.5" in gap
    (tuned,) = [how for what, how in asked.items() if "tuned" in what]
    assert "--set optim.output_lr=1.0" in tuned


def test_what_was_set_beside_a_grid_is_asked_for_as_set(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changes = {"optim.lr": 0.002, "model.kwargs": {"depth": 4}}
    folder = Fake("gap", methods=("gap",), epochs=40, changes=changes).write(Path("runs"))
    folder.parent.rename(folder.parents[1] / "gap@lr=2e-3,kwargs=depth:4")
    (asked,) = [how for what, how in table(1, load_runs(["runs"])).missing if "gap" in what]
    for option in ("--grid optim.lr=0.002", "--grid model.kwargs.depth=4"):
        assert option in asked
    assert "--set schedule.epochs=40" in asked


def test_what_validation_images_lack_leaves_the_test_set_unread(tmp_path):
    Fake().write(tmp_path)
    found = table(1, load_runs([tmp_path]), on="validation")
    assert len(found.missing) > 1
    assert all(how.endswith(" --validation-only") for _, how in found.missing)


def test_broken_runs_are_told(tmp_path):
    Fake().write(tmp_path)
    (Fake("gap", methods=("gap",)).write(tmp_path) / "config.json").write_text("{")
    (tmp_path / "vit-cifar10/small/gap/seed0/result.json").unlink()
    found = table(1, load_runs([tmp_path]))
    assert any("no readable config.json" in note for note in found.notes)


def test_on_validation(all_runs):
    found = table(1, all_runs, on="validation")
    assert any("validation images" in note for note in found.notes)
    assert found.data[0]["on"] == "validation"


def test_a_run_that_recipes_share_is_in_the_tables_of_all_of_them(tmp_path):
    Fake(recipe="layernorm", variant="vit+spectral", methods=("spectral",)).write(tmp_path / "a")
    Fake("spectral", methods=("spectral",)).write(tmp_path / "b")
    runs = load_runs([tmp_path])
    assert row(table(1, runs), "ViT-B", "spectral")["seeds"] == "1"
    (tmp_path / "all.json").write_text(dumps(collect(runs, "attncond lab collect")))
    runs = load_runs([tmp_path / "all.json"])
    assert row(table(1, runs), "ViT-B", "spectral")["seeds"] == "1"


def test_several_data_sets_get_a_column(tmp_path):
    Fake().write(tmp_path / "a")
    Fake(epochs=40).write(tmp_path / "b")
    found = table(1, load_runs([tmp_path]))
    assert {r["data"] for r in rows(found) if r["own"] != "–"} == {
        "cifar10 at 32×32, small, 20 epochs",
        "cifar10 at 32×32, small, 40 epochs",
    }
    notes = [note for note in found.notes if note.startswith("own, cifar10 at 32×32, small, ")]
    assert len(notes) == 2  # the column's words, and all that is to be said of them
    assert all("CIFAR-10 (JPEG copy), form small" in note for note in notes)


def test_there_is_no_such_table():
    with pytest.raises(ResultsError, match="no table 2 here; there are 1, 5, 6"):
        table(2)


def test_data_has_the_numbers_behind_the_cells(all_runs):
    found = table(1, all_runs)
    assert len(found.data) == len(found.rows)
    spectral = next(r for r in found.data if r["variant"] == "spectral")
    assert 0 < spectral["p_baseline"] < 1e-4
    assert spectral["p_baseline_paired"] is not None
    assert spectral["seeds"] == "0 1 2 3 4"


def test_what_runs_call_themselves_is_no_markup(tmp_path):
    evil = "<img src=x onerror=alert(1)>"
    folder = Fake(changes={"model.name": "vit_small32"}).write(tmp_path)
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(result | {"data_note": evil}))
    Fake("x", changes={"model.init": evil}).write(tmp_path)
    found = table(1, load_runs([tmp_path]))
    for text in (found.to_html(), found.to_markdown()):
        assert "&lt;img" in text
        assert "<img" not in text
