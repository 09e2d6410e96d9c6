"""The command line as scripts and people meet it: exit codes, JSON, messages, Ctrl-C."""

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

pytest.importorskip("typer")
pytest.importorskip("timm")

from typer.testing import CliRunner, Result

import attncond
from attncond import cli

QUIET = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}


def call(*args: str) -> Result:
    return CliRunner().invoke(cli.app, list(args))


def process(*args: str, cwd: Path | None = None, code: str | None = None) -> Any:
    start = ["-c", code] if code else ["-m", "attncond"]
    return subprocess.run(
        [sys.executable, *start, *args],
        cwd=cwd, env=QUIET, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def test_version_and_help() -> None:
    assert call("--version").output.strip() == f"attncond {attncond.__version__}"
    whole = call("--help")
    assert whole.exit_code == 0
    for command in ("inspect", "diagnose", "demo"):
        assert f"attncond {command}" in whole.output  # an example of each
        assert f"attncond {command}" in call(command, "--help").output.split("Examples")[1]


@pytest.mark.parametrize(
    "arguments",
    [["inspect"], ["inspect", "timm:x", "--bogus"], ["demo", "--seeds", "0"], ["demos"]],
    ids=" ".join,
)
def test_a_bad_call_is_exit_code_2(arguments: list[str]) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_quick_demo_with_json(tmp_path: Path) -> None:
    from attncond.demo import VARIANTS

    result = call(
        "demo", "--quick", "--epochs", "1", "--out", str(tmp_path / "new" / "out"), "--json"
    )
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["complete"] is True
    assert [r["variant"] for r in facts["runs"]] == list(VARIANTS)
    assert facts == json.loads((tmp_path / "new" / "out" / "results.json").read_text())
    assert (tmp_path / "new" / "out" / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "not evidence" in result.stderr
    page = tmp_path / "new" / "out" / "report.html"
    assert "<!doctype html>" in page.read_text(encoding="utf-8").lower()
    assert f"Open {page}" in result.stderr


def test_a_folder_that_cannot_be_written_is_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = call("demo", "--quick", "--out", str(tmp_path / "file" / "below"))
    assert result.exit_code == 2
    assert "cannot write" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_ctrl_c_keeps_what_is_done(tmp_path: Path) -> None:
    """Epochs enough that the demo cannot end by itself while the test waits."""
    running = subprocess.Popen(
        [sys.executable, "-m", "attncond", "demo", "--seeds=50", "--epochs=2", "--out=out"],
        cwd=tmp_path, env=QUIET, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    results = tmp_path / "out" / "results.json"
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and running.poll() is None:
        if results.exists() and len(json.loads(results.read_text())["runs"]) >= 2:
            break  # it parses at every moment of the run
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 130, err
    facts = json.loads(results.read_text())
    assert facts["complete"] is False
    assert 2 <= len(facts["runs"]) < 250
    assert f"{len(facts['runs'])} of 250 runs were finished and kept" in err
    assert "stock" in out  # the partial table
    assert "Traceback" not in out + err
    names = {p.name for p in results.parent.iterdir()}
    assert names == {"results.json", "figure.png", "report.html"}  # stock and Spectral() are done


def test_ctrl_c_before_anything_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attncond import demo

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "train", interrupted)
    result = call("demo", "--out", str(tmp_path / "out"))
    assert result.exit_code == 130
    assert "nothing was finished" in result.stderr
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_typer_one_line_says_what_to_install(missing: str) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None; from attncond.__main__ import main; main()"
    )
    result = process(code=code)
    assert result.returncode == 2
    assert "pip install 'attncond[cli]'" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_without_timm_one_line_says_what_to_install() -> None:
    code = "import sys; sys.modules['timm'] = None; from attncond.__main__ import main; main()"
    result = process("inspect", "timm:vit_tiny_patch16_224", code=code)
    assert result.returncode == 2
    assert "pip install 'attncond[timm]'" in result.stderr
    assert len(result.stderr.splitlines()) == 1
