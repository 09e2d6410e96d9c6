"""What docs/lab.md, docs/results.md and README say of the lab holds."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")

from fabricate import Fake, study, sweep
from typer.testing import CliRunner

from attncond.cli import app
from attncond.lab import run as runner
from attncond.lab.plan import plan
from attncond.lab.recipe import load
from attncond.lab.results import collect, dumps, load_runs

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/lab.md", "docs/results.md")


def commands(start: str) -> list[str]:
    """Lines of the shell that start so; a backslash goes on."""
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
        for block in re.findall(r"^```sh\n(.*?)^```$", text, re.M | re.S):
            found += [line for line in block.splitlines() if start in line.split("#")[0]]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with all that the commands of the pages speak of."""
    path = tmp_path_factory.mktemp("user")
    study(path / "runs", ("vit-cifar10",), seeds=2)
    sweep(path / "runs", seeds=1)
    Fake(seed=8).write(path / "other" / "runs")
    text = (ROOT / "docs" / "lab.md").read_text(encoding="utf-8")
    (yaml,) = re.findall(r'write_text\("""\n(.*?)"""\)', text, re.S)
    assert len(yaml.splitlines()) <= 10  # the recipe of one's own
    (path / "mine.yaml").write_text(yaml)
    return path


@pytest.mark.parametrize("line", commands("attncond lab "))
def test_commands_of_the_pages(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    planned: list[object] = []

    def checked(argv: list[str]) -> int:
        parser = argparse.ArgumentParser()
        runner.add_arguments(parser)
        args = parser.parse_args(argv)
        variants = args.variants.split(",") if args.variants else None
        kinds = {"form": args.form, "variants": variants, "seeds": args.seeds}
        settings = dict(args.settings)
        planned.extend(plan(args.names, args.out, overrides=settings, **kinds))
        return 0

    monkeypatch.setattr(runner, "main", checked)
    words = shlex.split(line, comments=True)
    assert words[:2] == ["attncond", "lab"]
    result = CliRunner().invoke(app, words[1:])
    assert result.exit_code == 0, result.output
    assert planned or words[2] != "run"


@pytest.mark.parametrize("line", commands("attncond.lab.run "))
def test_commands_for_several_processes(line: str) -> None:
    words = shlex.split(line.split("-m attncond.lab.run ")[1].replace("$", ""))
    parser = argparse.ArgumentParser()
    runner.add_arguments(parser)
    args = parser.parse_args(words)
    for name in args.names:
        for variant in args.variants.split(",") if args.variants else load(name).main:
            load(name).config(args.form, variant)


@pytest.fixture
def lab_tables(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import lab_tables

    yield lab_tables
    sys.modules.pop("lab_tables")


def test_the_page_of_results_is_what_the_committed_runs_say(lab_tables) -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert lab_tables.render(page, lab_tables.committed()) == page
    with pytest.raises(ValueError, match="section marked lambda"):
        lab_tables.render(page.replace("<!-- /lambda -->", ""), [])


def test_every_section_is_filled_from_runs(lab_tables, tmp_path: Path) -> None:
    study(tmp_path / "runs")
    sweep(tmp_path / "runs", seeds=2)
    for seed in range(2):
        changes = {"data.name": "tiny_imagenet32"}
        Fake("t", seed, 40.0 + seed, changes=changes).write(tmp_path / "runs")
        Fake("n", seed, 60.0 + seed, changes={"model.norm": False}).write(tmp_path / "runs")
    Fake("smoke", form="smoke", accuracy=1.23).write(tmp_path / "runs")
    runs = load_runs([tmp_path / "runs"])
    lab = tmp_path / "lab"
    lab.mkdir()
    (lab / "all.json").write_text(dumps(collect(runs, "attncond lab collect")))
    for name in ("lambda", "2"):
        (lab / f"figure-{name}.png").touch()
    times = {"ratio": 1.0004, "ratio_min": 0.98, "ratio_max": 1.02, "peak_memory_ratio": 1.005}
    times |= {"fastest_ratio": 1.003, "kernel_ratio": 1.007}
    timed = {"command": "python step_time.py", "settings": {"model": "vit_small32"}}
    steps = tmp_path / "benchmarks" / "step_time_vit_small32.json"
    steps.parent.mkdir()
    steps.write_text(json.dumps({**timed, "variants": {"identity": times}}))
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    text = lab_tables.render(page, lab_tables.committed(lab), lab)
    assert "No runs are committed" not in text
    assert "| 1.23" not in text  # smoke runs are no results
    parts = {
        name: re.search(rf"<!-- {name}: .*?<!-- /{name} -->", text, re.S)[0]
        for name in lab_tables.SECTIONS
    }
    assert "DaViT-B | spectral" in parts["cifar10"]
    assert "40.50 ± 0.71" in parts["tinyimagenet"]
    assert "40.50 ± 0.71" not in parts["cifar10"]
    assert "norm-preserving" in parts["lambda"]
    assert "figure-lambda.png" in parts["lambda"]
    assert re.search(r"\| paper \| 29.90 \| 1.12 \| 1.34 \| .* \| 0.07 \| 0.06 \|", parts["order"])
    assert "no LayerNorm" in parts["layernorm"]
    assert "paper-svd" in parts["theorems"]
    assert "| Spectral() | 1.000 | 0.980 to 1.020 | 1.003 | 1.007 | 1.005 |" in parts["steps"]
    assert "fewer epochs" in parts["epochs"]
    assert "figure-2.png" in parts["spectra"]
    assert lab_tables.render(text, lab_tables.committed(lab), lab) == text


def test_ranks_count_what_float64_cannot_resolve_as_the_largest(lab_tables, tmp_path: Path) -> None:
    for seed, accuracy in enumerate((70.0, 60.0, 50.0, 40.0)):
        Fake("s", seed, accuracy, watch=True, lam=1.0 + seed).write(tmp_path / "runs")
    runs = load_runs([tmp_path / "runs"])
    records = [run.curves.to_dict() for run in runs]
    for record, kappa in zip(
        records, ([9.0, 1.0], [8.0, 3.0], [7.0, 2.0], [6.0, None]), strict=True
    ):
        record |= {"steps": [0, 9], "values": {"jacobian_kappa": kappa}}
        record["left_out"] = {"jacobian_kappa": 9} if None in kappa else {}
    collected = collect(runs, "attncond lab collect")
    for entry, record in zip(collected["runs"], records, strict=True):
        entry["curves"] = record
    lab = tmp_path / "lab"
    lab.mkdir()
    (lab / "all.json").write_text(dumps(collected))
    found = lab_tables.SECTIONS["order"](lab_tables.committed(lab), lab)
    last = [cell.strip() for cell in found.splitlines()[-3].split("|")]
    # Ranks 4 3 2 1 of accuracies against 4 3 2 1 and 1 3 2 4: 1 - 6 Σd²/(n(n² - 1)).
    assert last[3:5] == ["+1.00 (n = 4)", "-0.80 (n = 4)"]
    assert "| unresolved |" in found
