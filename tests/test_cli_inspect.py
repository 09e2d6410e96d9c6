"""attncond inspect: what it prints, its exit codes, and what a mistake is told."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("timm")

from rich.console import Console
from torch import nn
from typer.testing import CliRunner, Result

import attncond
from attncond import cli
from attncond.cli.inspect import print_plan

QUIET = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}


def call(*args: str) -> Result:
    return CliRunner().invoke(cli.app, list(args))


def process(*args: str, cwd: Path) -> Any:
    return subprocess.run(
        [sys.executable, "-m", "attncond", *args],
        cwd=cwd, env=QUIET, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a module of factories, and the current directory."""
    (tmp_path / "their_models.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "print('a print of the user')\n"
        "number = 3\n"
        "def good(): print('building'); return nn.MultiheadAttention(8, 2)\n"
        "def empty(): return nn.Linear(2, 2)\n"
        "def broken(): raise RuntimeError('no such luck\\nsecond line')\n"
        "def wrong(): return 'a string'\n"
        "class Odd(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.qkv = nn.Linear(8, 24)\n"
        "def odd(): return nn.Sequential(nn.MultiheadAttention(8, 2), Odd())\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "their_models", raising=False)
    return tmp_path


def test_inspect_a_timm_model() -> None:
    result = call("inspect", "timm:vit_tiny_patch16_224.augreg_in21k")
    assert result.exit_code == 0
    assert "12 attention sites, 0 not supported" in result.output
    assert "blocks.11.attn" in result.output


def test_json_is_all_there_is_on_stdout(models: Path) -> None:
    result = call("inspect", "their_models:good", "--json")
    assert result.exit_code == 0
    facts = json.loads(result.stdout)
    assert facts["supported"] is True
    assert facts["model"] == "their_models:good"
    assert [p["role"] for p in facts["sites"][0]["projections"]] == ["q", "k", "v"]
    assert "a print of the user" in result.stderr


def test_a_terminal_gets_a_table(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sys.path.insert(0, str(models))
    their_models = importlib.import_module("their_models")

    print_plan(attncond.inspect(their_models.odd()), Console(width=200))
    shown = capsys.readouterr().out
    assert "MultiheadAttention" in shown
    assert "q 2x4x8" in shown
    assert "cannot be guessed" in shown
    assert "@ac.register" in shown  # not eaten as markup


@pytest.mark.parametrize(
    ("source", "code", "said"),
    [
        ("their_models:odd", 1, "1 attention site, 1 not supported"),
        ("their_models:empty", 1, "no attention was found"),
        ("their_models:broken", 2, "failed with RuntimeError: no such luck (--debug"),
        ("their_models:wrong", 2, "returned no torch.nn.Module but a value of type str"),
        ("their_models:number", 2, "is not a function but of type int"),
        ("their_models:goood", 2, "Did you mean good?"),
        ("their_model:good", 2, "Did you mean their_models?"),
        ("nowhere.at.all:good", 2, "no module named 'nowhere.at.all'"),
        ("timm:vit_bas_patch16_224", 2, "Did you mean vit_base_patch16_224"),
        ("vit_base_patch16_224", 2, "timm:vit_base_patch16_224"),
        ("timm:", 2, "is not a model"),
        ("hf:missing", 2, "models are never downloaded"),
        ("", 2, "is not a model"),
    ],
)
def test_exit_codes_and_messages(models: Path, source: str, code: int, said: str) -> None:
    result = call("inspect", source)
    assert said in result.output
    assert result.exit_code == code
    if code == 2:
        assert result.stdout == "" or "their_models" in source
        assert len(result.stderr.replace("a print of the user\n", "").splitlines()) == 1


def test_a_mistake_has_a_traceback_only_with_debug(models: Path) -> None:
    plain = process("inspect", "their_models:broken", cwd=models)
    assert (plain.returncode, plain.stdout) == (2, "")
    assert "Traceback" not in plain.stderr
    debug = process("inspect", "their_models:broken", "--debug", cwd=models)
    assert debug.returncode != 0
    assert "Traceback" in debug.stderr
    assert "def broken" in debug.stderr


def config(folder: Path, **content: object) -> str:
    (folder / "config.json").write_text(json.dumps(content))
    return f"hf:{folder}"


def test_inspect_a_local_configuration(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    source = config(
        tmp_path, model_type="gpt2", architectures=["GPT2LMHeadModel"], n_embd=8192, n_head=64,
        n_layer=96, vocab_size=50257,
    )  # fmt: skip
    for named in (source, f"{source}/config.json"):  # 77 billion parameters: on the meta device
        result = call("inspect", named, "--json")
        assert result.exit_code == 0, result.output
        sites = json.loads(result.stdout)["sites"]
        assert len(sites) == 96
        assert sites[0]["path"].startswith("transformer.")  # the architecture that it names
        assert sites[0]["projections"][0]["transposed"] is True


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"hidden_size": 8}, "has no model_type"),
        ({"model_type": "mistrall"}, "Did you mean mistral"),
        ({"model_type": "gpt2", "n_embd": "wide"}, "gpt2"),
        ({"model_type": "gpt2", "n_embd": 10, "n_head": 3}, "cannot be built"),
    ],
)
def test_a_bad_configuration_is_exit_code_2(
    tmp_path: Path, content: dict[str, object], said: str
) -> None:
    pytest.importorskip("transformers")
    result = call("inspect", config(tmp_path, **content))
    assert result.exit_code == 2, result.output
    assert said in result.stderr


def test_a_broken_json_file_is_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{'single': quotes}")
    result = call("inspect", f"hf:{tmp_path}")
    assert result.exit_code == 2
    assert "cannot be read as JSON" in result.stderr


@pytest.mark.parametrize("model_type", ["their_own", "gpt2"])
def test_code_of_a_checkpoint_is_never_run(tmp_path: Path, model_type: str) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    source = config(
        tmp_path, model_type=model_type, n_embd=8, n_head=2, n_layer=1, vocab_size=9,
        auto_map={"AutoConfig": "evil.Config", "AutoModel": "evil.Model"},
    )  # fmt: skip
    result = call("inspect", source)
    assert not (tmp_path / "ran").exists()
    if model_type == "their_own":
        assert result.exit_code == 2
        assert "trust_remote_code is never on" in result.stderr
    else:  # transformers knows the type: its own class is used
        assert result.exit_code == 0, result.output


def test_names_are_not_taken_for_markup(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.ModuleDict({"[red]": nn.MultiheadAttention(8, 2)})
    print_plan(attncond.inspect(model), Console(width=200))
    shown = capsys.readouterr().out
    assert "[red]" in shown
    assert shown.startswith("1 attention site ")


def test_a_model_that_is_one_attention(capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(attncond.inspect(nn.MultiheadAttention(8, 2)), Console(width=200))
    shown = capsys.readouterr().out
    assert "(the model)" in shown
    assert "not supported" not in shown
