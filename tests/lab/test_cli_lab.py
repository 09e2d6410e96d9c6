"""attncond lab as people meet it: exit codes, messages, files."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")

import yaml
from fabricate import Fake, study
from typer.testing import CliRunner, Result

from attncond.cli import app
from attncond.lab import run as runner
from attncond.lab.config import Config
from attncond.lab.recipe import load


def call(*args: object) -> Result:
    return CliRunner().invoke(app, ["lab", *map(str, args)])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ATTNCOND_DATA", raising=False)
    return tmp_path


def test_help_of_every_command() -> None:
    for name in ("list", "show", "run", "status", "table", "figure", "collect"):
        result = call(name, "--help")
        assert result.exit_code == 0
        assert f"attncond lab {name}" in result.output.split("Examples")[1]


def test_list() -> None:
    result = call("list")
    assert result.exit_code == 0
    assert "vit-cifar10" in result.output
    found = json.loads(call("list", "table1", "--json").output)
    assert {"vit-cifar10", "swin-cifar10"} <= {r["name"] for r in found}
    assert "vit-lambda" not in {r["name"] for r in found}
    assert "baseline" in found[0]["variants"]
    assert "spectral" in found[0]["main"]
    assert "vit-lambda" in call("list", "*lambda").output


def test_list_nothing() -> None:
    result = call("list", "nope")
    assert result.exit_code == 2
    assert "no recipe is like 'nope'; there are" in result.stderr


def test_show() -> None:
    result = call("show", "vit-cifar10", "--form", "smoke")
    assert result.exit_code == 0
    assert "# variant spectral:" in result.output
    config = yaml.safe_load(result.output)
    assert (config["form"], config["variant"]) == ("smoke", "baseline")
    one = call("show", "vit-cifar10", "--variant", "spectral", "--set", "optim.lr=5e-4")
    config = yaml.safe_load(one.output)
    assert config["methods"] == ["spectral"]
    assert config["optim"]["lr"] == 5e-4


def test_show_says_what_settings_mean_and_stays_yaml() -> None:
    long = "a b " * 60 + "# c: d"
    for changes in ({}, {"train.teacher": long, "train.distill": "hard"}):
        settings = [text for k, v in changes.items() for text in ("--set", f"{k}={json.dumps(v)}")]
        output = call("show", "deit-cifar10", "--variant", "spectral", *settings).output
        assert "# Multiplies the learning rate of W_Q, W_K and W_V." in output
        assert "# Methods as attncond.methods.parse reads them, applied in this order." in output
        texts = {k: json.dumps(v) for k, v in changes.items()}
        want = load("deit-cifar10").config("small", "spectral", overrides=texts)
        assert Config.model_validate(yaml.safe_load(output)) == want


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("show", "vit-cifar"), "Did you mean vit-cifar10"),
        (("show", "vit-cifar10", "--form", "big"), "no form 'big'"),
        (("show", "vit-cifar10", "--variant", "spectrall"), "Did you mean spectral"),
        (("show", "vit-cifar10", "--set", "optim.rl=1"), "optim has lr"),
        (("show", "vit-cifar10", "--set", "optim"), "KEY=VALUE"),
        (("run", "vit-cifar10", "--grid", "optim.lr"), "KEY=VALUE"),
        (("status", "nowhere"), "there is no folder or file 'nowhere'"),
        (("status",), "there is no folder or file 'runs'"),
        (("figure", "2"), "there is no folder or file 'runs'"),
        (("figure", "4"), "there is no figure 4 here; there are"),
        (("figure", "2", "--out", "f.jpg"), "should end in .png"),
        (("table", "3"), "there are 1, 5"),
        (("table", "1", "--format", "pdf"), "there are text, markdown"),
        (("table", "1", "--out", "t.png"), "told by .txt, .md, .html, .csv or .json"),
        (("table", "1", "--on", "train"), "test and validation"),
        (("table", "1", "--out", "nowhere/t.md"), "no folder nowhere"),
    ],
)
def test_mistakes_take_one_line_and_exit_code_2(here: Path, args: tuple, words: str) -> None:
    result = call(*args)
    assert result.exit_code == 2
    assert result.stderr.startswith("attncond: ")
    assert words in result.stderr
    assert list(here.iterdir()) == []


def test_run_hands_everything_on(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(runner, "main", lambda argv: seen.append(list(argv)) or 1)
    result = call(
        "run", "digits", "vit-cifar10", "--form", "smoke", "--variants", "baseline,gap",
        "--seeds", "0-2", "--set", "optim.lr=1e-3", "--grid", "optim.qkv_lr=0.1,1",
        "--data", "images", "--out", "there", "--jobs", 3, "--time-limit", 60, "--restart",
        "--validation-only",
    )  # fmt: skip
    assert result.exit_code == 1  # the runner's
    import argparse

    parser = argparse.ArgumentParser()
    runner.add_arguments(parser)
    args = parser.parse_args(seen[0])
    assert args.names == ["digits", "vit-cifar10"]
    assert (args.form, args.variants, args.seeds) == ("smoke", "baseline,gap", [0, 1, 2])
    assert args.settings == [("optim.lr", "1e-3")]
    assert args.grid == [("optim.qkv_lr", "0.1,1")]
    assert (args.data, args.out, args.jobs) == (Path("images"), Path("there"), 3)
    assert (args.time_limit, args.restart, args.validation_only) == (60.0, True, True)


def test_data_from_the_environment(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(runner, "main", lambda argv: seen.append(list(argv)) or 0)
    monkeypatch.setenv("ATTNCOND_DATA", "/elsewhere")
    assert call("run", "digits").exit_code == 0
    assert seen[0][seen[0].index("--data") + 1] == "/elsewhere"


def test_a_real_run_from_start_to_table(here: Path) -> None:
    result = call("run", "digits", "--form", "smoke", "--variants", "baseline,spectral")
    assert result.exit_code == 0, result.output
    result = call("status", "--json")
    assert [r["state"] for r in json.loads(result.output)] == ["finished", "finished"]
    text = call("table", "1").output
    assert "scikit-learn digits" in text
    assert "form smoke" in text
    assert "spectral" in text


def test_status(here: Path) -> None:
    Fake(seed=0).write(here / "runs")
    Fake(seed=1, state="stopped").write(here / "runs")
    result = call("status")
    assert result.exit_code == 0
    assert "seed 1: epoch 10 of 20" in result.output
    (
        Fake("gap", methods=("gap",), state="stopped").write(here / "runs") / "config.json"
    ).write_text("")
    result = call("status")
    assert result.exit_code == 1
    assert "no readable config.json" in result.output


def test_status_shows_runs_that_are_there_twice(here: Path) -> None:
    Fake().write(here / "runs")
    Fake("vit", recipe="spectra").write(here / "runs")
    assert len(json.loads(call("status", "--json").output)) == 2


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("t.md", "**Table 1"),
        ("t.html", "<!doctype html>"),
        ("t.csv", "model,"),
        ("t.json", "{"),
        ("t.txt", "Table 1"),
        ("t", "Table 1"),
    ],
)
def test_a_table_in_a_file(here: Path, name: str, start: str) -> None:
    study(here / "runs", ("vit-cifar10",), seeds=2)
    result = call("table", "1", "--out", name)
    assert result.exit_code == 0
    assert result.output == f"Written: {name}\n"
    assert (here / name).read_text().startswith(start)


def test_a_table_without_runs_is_the_papers(here: Path) -> None:
    result = call("table", "1")
    assert result.exit_code == 0
    assert "80.7 ± 0.41" in result.output
    assert "attncond lab run vit-cifar10" in result.output
    assert json.loads(call("table", "5", "--format", "json").output)["rows"]


def test_figure(here: Path) -> None:
    study(here / "runs", ("vit-cifar10",), seeds=2)
    result = call("figure", "2", "--out", "f.png")
    assert result.exit_code == 0, result.output
    assert (here / "f.png").stat().st_size > 10_000
    result = call("figure", "3")
    assert result.exit_code == 2
    assert "XCiT-M" in result.stderr


def test_collect(here: Path) -> None:
    study(here / "runs", ("vit-cifar10",), seeds=2)
    Fake("late", seed=7, state="stopped").write(here / "runs")
    result = call("collect", "--out", "all.json")
    assert result.exit_code == 0
    assert "1 of them have not finished" in result.stderr
    record = json.loads((here / "all.json").read_text())
    assert record["command"] == "attncond lab collect runs --out all.json"
    assert call("table", "1", "all.json").output == call("table", "1", "runs").output


@pytest.mark.parametrize("command", [("table", "1"), ("collect",)], ids=lambda c: c[0])
def test_a_full_disk_is_told_with_the_file_and_what_to_do(
    here: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    Fake().write(here / "runs")

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    result = call(*command, "--out", "there.json")
    assert result.exit_code == 2
    assert result.stderr == (
        "attncond: there.json cannot be written: No space left on device; make room there, or "
        "name another place with --out\n"
    )
    assert [p.name for p in here.iterdir()] == ["runs"]


def test_what_to_install_is_told(here: Path) -> None:
    code = (
        "import sys; sys.modules['yaml'] = None\n"
        "from attncond.__main__ import main\n"
        "sys.argv = ['attncond', 'lab', 'list']\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "attncond: attncond lab needs yaml, which is not installed: pip install 'attncond[lab]'"
    )
