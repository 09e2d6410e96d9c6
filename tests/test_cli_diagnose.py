"""attncond diagnose as scripts and people meet it: what it writes, its exit codes, its messages."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("timm")
pytest.importorskip("transformers")

import timm
import tiny_models
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

import attncond as ac
from attncond import cli
from attncond.diagnose import Report

SMALL = "timm:test_vit"
QUICK = ("--no-jacobian", "--samples", "1", "--length", "12")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a module of their own, and the current directory."""
    (tmp_path / "my_own.py").write_text(
        "import time, torch\n"
        "from torch import nn\n"
        "def attention(): print('building'); return nn.TransformerEncoderLayer(8, 2)\n"
        "def batch(): return torch.randn(5, 3, 8)\n"
        "def wrong_batch(): return torch.randn(5, 3, 7)\n"
        "class Slow(nn.TransformerEncoderLayer):\n"
        "    def forward(self, *args, **kwargs):\n"
        "        print('running', flush=True); time.sleep(60)\n"
        "def slow(): return Slow(8, 2)\n"
        "def none(): return nn.Linear(8, 8)\n"
        "def blank(): return nn.TransformerEncoderLayer(8, 2, device='meta')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_own", raising=False)
    return tmp_path


def call(*args: str) -> Result:
    return CliRunner().invoke(cli.app, ["diagnose", *args])


def fine(*args: str) -> Result:
    result = call(*args)
    assert result.exit_code == 0, result.output
    return result


def refused(*args: str) -> str:
    """The message of a mistake, which is all there is."""
    result = call(*args)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    said = [line for line in result.stderr.splitlines() if line.startswith("attncond: ")]
    assert len(said) == 1, result.stderr
    return result.stderr


def test_a_summary_says_where_everything_comes_from() -> None:
    out = fine(SMALL, *QUICK).stdout
    assert f"source   {SMALL}" in out
    assert "weights  random, seed 0" in out
    assert "input    random images 1x3x160x160, seed 0" in out
    assert "blocks.0.attn" in out
    assert "--out report.html" in out
    assert "weights  random, seed 7" in fine(SMALL, *QUICK, "--seed", "7").stdout


def test_a_page_and_json_of_a_model_before_and_after() -> None:
    result = fine(
        SMALL, "--samples", "1", "--tokens", "6", "--method", "spectral:kappa=1.5",
        "--method", "gap", "--out", "new/report.html", "--out", "new/report.json",
    )  # fmt: skip
    assert "Written: new/report.html, new/report.json" in result.stdout
    assert "Before and after" in result.stdout
    report = Report.from_json("new/report.json")
    assert report.info["method"] == "spectral:kappa=1.5 + gap"
    assert report.info["weights"] == "random, seed 0"
    assert max(r.values["q_kappa"] for r in report.rows if r.head is None) <= 1.5
    page = Path("new/report.html").read_text(encoding="utf-8")
    assert page.lstrip().lower().startswith("<!doctype html>")
    assert sorted(p.name for p in Path("new").iterdir()) == ["report.html", "report.json"]
    Path("new/report.html").write_text("an old page")
    fine(SMALL, *QUICK, "--out", "new/report.html")
    assert Path("new/report.html").read_text(encoding="utf-8") != "an old page"


def test_json_is_all_there_is_on_stdout() -> None:
    result = fine("my_own:attention", "--batch", "my_own:batch", "--method", "polar", "--json")
    facts = json.loads(result.stdout)
    assert facts["info"]["input"] == "from my_own:batch"
    assert facts["info"]["weights"] == "as my_own:attention makes them, seed 0"
    assert facts["comparison"]["changes"]
    assert Report.from_dict(facts).rows
    assert "building" in result.stderr


def test_comparing_with_an_earlier_report() -> None:
    fine(SMALL, *QUICK, "--out", "old.json")
    out = fine(SMALL, *QUICK, "--compare", "old.json").stdout
    assert "no difference" in out
    out = fine(SMALL, *QUICK, "--compare", "old.json", "--method", "spectral").stdout
    assert "q_kappa" in out
    assert "is a report of another model" in refused(
        "my_own:attention", "--batch", "my_own:batch", "--compare", "old.json"
    )
    Path("bad.json").write_text("{}")
    assert "its schema is None" in refused(SMALL, "--compare", "bad.json")
    Path("bad.json").write_text("no json")
    assert "is not JSON" in refused(SMALL, "--compare", "bad.json")
    assert "cannot read gone.json" in refused(SMALL, "--compare", "gone.json")
    assert "cannot read" in refused(SMALL, "--compare", ".")


@pytest.mark.parametrize(
    "name", [n for n in tiny_models.MODELS if n not in ("whisper", "wav2vec2")]
)
def test_folders_of_transformers(name: str) -> None:
    tiny_models.save(name, Path("folder [1] ü"))
    facts = json.loads(fine("hf:folder [1] ü", *QUICK, "--json", "--method", "spectral").stdout)
    assert facts["info"]["weights"] == "folder [1] ü/model.safetensors"
    reached = [r for r in facts["rows"] if r["head"] is None and "entropy" in r["values"]]
    assert len(reached) == len(list(ac.inspect(tiny_models.make(name))))


def test_text_and_images_from_files() -> None:
    tiny_models.save("bert", Path("bert"))
    tiny_models.save_tokenizer(Path("bert"))
    Path("book.txt").write_text("Call me Ishmael. " * 20)
    out = fine("hf:bert", "--text", "book.txt", *QUICK).stdout
    assert "input    1 x 12 tokens of book.txt" in out
    tiny_models.save_images(Path("photos/deeper"), 2)
    Path("photos/broken.jpg").write_bytes(b"no image")
    out = fine(SMALL, "--images", "photos", "--samples", "2", "--no-jacobian").stdout
    assert "input    2 images of photos" in out
    assert "note: image skipped because it cannot be read: photos/broken.jpg" in out


@pytest.mark.parametrize("name", ["whisper", "wav2vec2"])
def test_models_of_sound_ask_for_a_batch(name: str) -> None:
    tiny_models.save(name, Path("sound"))
    assert "--batch MODULE:FUNCTION" in refused("hf:sound")
    assert "none: weights alone" in fine("hf:sound", "--weights-only").stdout


def test_a_conditioned_checkpoint_needs_its_method() -> None:
    model = timm.create_model("test_vit")
    ac.condition(model, ac.Spectral(kappa=1.2))
    save_file(model.state_dict(), "x.safetensors")
    arguments = (SMALL, "--checkpoint", "x.safetensors", *QUICK)
    assert "Pass the --method it was trained with, e.g. --method spectral" in refused(*arguments)
    facts = json.loads(fine(*arguments, "--method", "spectral", "--json").stdout)
    kappas = [r["values"]["q_kappa"] for r in facts["rows"] if r["head"] is None]
    assert max(kappas) <= 1.2  # the checkpoint's λ, not the one of --method spectral
    assert "scope or roles" in refused(*arguments, "--method", "spectral:scope=head")


def test_not_finite_is_exit_code_1() -> None:
    model = timm.create_model("test_vit")
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight[0, 0] = torch.nan
    save_file(model.state_dict(), "x.safetensors")
    result = call(SMALL, "--checkpoint", "x.safetensors", *QUICK, "--out", "r.html")
    assert result.exit_code == 1
    assert "W_Q holds NaN or inf" in result.stdout
    assert Path("r.html").exists()  # the report is what shows it


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("timm:tset_vit",), "Did you mean test_vit"),
        (("hf:gone",), "models are never downloaded"),
        ((SMALL, "--method", "spectrl"), "Did you mean spectral"),
        ((SMALL, "--method", "spectral:kapa=2"), "it has kappa, lam"),
        ((SMALL, "--method", "spectral", "--method", "paper"), "--method paper are both Spectral"),
        ((SMALL, "--method", "gap", "--method", "gap"), "both RemoveGap, and a model takes one"),
        ((SMALL, "--out", "report.pdf"), "ends in .html or .json, not 'report.pdf'"),
        ((SMALL, "--out", "folder.html"), "folder.html is a folder"),
        ((SMALL, "--out", "file/report.html"), "cannot write file/report.html"),
        ((SMALL, "--heads", "one"), "--heads takes numbers, as in 0,3 or 0-3, not 'one'"),
        ((SMALL, "--heads", "0-99"), "there is no head 2, the last one is"),
        ((SMALL, "--heads", "99"), "there is no head 99, the last one is"),
        ((SMALL, "--heads", "-1"), "takes numbers from 0"),
        ((SMALL, "--layers", "99"), "99 is none of the model's"),
        ((SMALL, "--layers", "nope.*"), "'nope.*' is none of the model's"),
        ((SMALL, "--time-budget", "nan"), "--time-budget must be above 0"),
        ((SMALL, "--time-budget", "0"), "--time-budget must be above 0"),
        ((SMALL, "--loss", "mean"), "'sum' or 'output', not 'mean'"),
        ((SMALL, "--device", "abacus"), "--device abacus: this device cannot be used here"),
        ((SMALL, "--device", "meta"), "could not run there"),
        ((SMALL, "--text", "my_own.py"), "reads images, not text"),
        ((SMALL, "--images", "gone"), "there is no folder gone"),
        ((SMALL, "--images", "folder.html"), "there are no images in folder.html"),
        ((SMALL, "--checkpoint", "gone.safetensors"), "there is no gone.safetensors"),
        ((SMALL, "--checkpoint", "file"), "is empty"),
        ((SMALL, "--checkpoint", "x.safetensors", "--random-weights"), "not both"),
        ((SMALL, "--weights-only", "--images", "x"), "takes no input"),
        (("my_own:attention",), "--batch MODULE:FUNCTION"),
        (("my_own:attention", "--batch", "my_own:wrong_batch"), "cannot run on this batch"),
        (("my_own:none", "--batch", "my_own:batch"), "has no attention to diagnose"),
        (("my_own:blank", "--weights-only"), "my_own:blank makes a model on the meta device"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_mistakes(arguments: tuple[str, ...], said: str) -> None:
    Path("folder.html").mkdir()
    Path("file").write_text("")
    assert said in refused(*arguments)
    assert not list(Path().glob("*.tmp"))


def test_an_input_of_ours_that_fails_points_to_one_of_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("needs something else")

    monkeypatch.setattr(timm.models.VisionTransformer, "forward", fail)
    said = refused(SMALL)
    assert "needs something else" in said
    assert "--batch MODULE:FUNCTION" in said


def test_options_reach_the_measurement() -> None:
    out = ("--json", "--samples", "1", "--tokens", "5")
    facts = json.loads(fine(SMALL, *out, "--layers", "0-1", "--weights-only").stdout)
    assert {row["layer"] for row in facts["rows"]} == {0, 1}
    facts = json.loads(fine(SMALL, *out, "--layers", "-1", "--heads", "1", "--loss", "sum").stdout)
    assert {(r["layer"], r["head"]) for r in facts["rows"]} == {(5, None), (5, 1)}
    assert facts["info"]["tokens"] == 5
    values = facts["rows"][1]["values"]
    assert "jacobian_status" in values
    assert float(values["q_grad_norm"]) >= 0
    for budget, cut in (("1e-9", True), ("inf", False)):
        result = fine(SMALL, "--json", *QUICK, "--time-budget", budget)
        assert any("time budget" in note for note in json.loads(result.stdout)["notes"]) is cut


@pytest.mark.parametrize("source", ["timm:test_vit", "hf:bert"])
def test_the_network_is_never_asked(source: str, folder: Path) -> None:
    tiny_models.save("bert", Path("bert"))
    tiny_models.save_tokenizer(Path("bert"))
    Path("book.txt").write_text("Call me Ishmael. " * 20)
    (folder / "sitecustomize.py").write_text(
        "import socket\n"
        "def refuse(*a, **k): print('NETWORK'); raise OSError('no network here')\n"
        "socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse\n"
    )
    text = ["--text", "book.txt"] if source == "hf:bert" else []
    places = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, "-m", "attncond", "diagnose", source, *QUICK, *text],
        env={**ENVIRONMENT, "PYTHONPATH": places},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "NETWORK" not in result.stdout + result.stderr


def test_code_of_a_folder_is_never_run() -> None:
    tiny_models.save("bert", Path("bert"))
    tiny_models.save_tokenizer(Path("bert"))
    Path("bert/evil.py").write_text("open('ran', 'w').close()\n")
    for name in ("config.json", "tokenizer_config.json"):
        facts: dict[str, Any] = json.loads(Path("bert", name).read_text())
        facts["auto_map"] = {
            "AutoConfig": "evil.C", "AutoModel": "evil.M", "AutoTokenizer": ["evil.T", None],
        }  # fmt: skip
        Path("bert", name).write_text(json.dumps(facts))
    Path("book.txt").write_text("Call me Ishmael. " * 20)
    call("hf:bert", "--text", "book.txt", *QUICK)
    assert not Path("ran").exists()


def test_ctrl_c_leaves_no_file(folder: Path) -> None:
    Path("report.html").write_text("an old page")
    running = subprocess.Popen(
        [sys.executable, "-m", "attncond", "diagnose", "my_own:slow", "--batch", "my_own:batch",
         "--out", "report.html", "--out", "report.json"],
        env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert running.stderr is not None
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and running.poll() is None:
        if running.stderr.readline().startswith("running"):
            break
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 130, err
    assert "Traceback" not in out + err
    assert Path("report.html").read_text() == "an old page"
    left = {p.name for p in folder.iterdir()} - {"__pycache__"}
    assert left == {"my_own.py", "report.html"}
