"""The examples run as a user runs them: offline, in a process of their own, and they learn."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

import attncond as ac

EXAMPLES = Path(__file__).parents[1] / "examples"
# Far above chance (50% for train_trainer, 10%), and below what each reaches: a break is caught.
ACCURACY = {
    "train_timm": 80.0,
    "train_pytorch": 85.0,
    "train_trainer": 90.0,
    "heads": 75.0,
    "monitor": 60.0,
}
OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def test_every_example_is_run() -> None:
    assert {p.stem for p in EXAMPLES.glob("*.py")} == set(ACCURACY)


@pytest.mark.parametrize("name", ACCURACY)
def test_example(name: str, tmp_path: Path) -> None:
    source = EXAMPLES / f"{name}.py"
    assert len(source.read_text(encoding="utf-8").splitlines()) < 60
    done = subprocess.run(
        [sys.executable, str(source), "out"] if name == "train_trainer"
        else [sys.executable, str(source)],
        cwd=tmp_path, env={**os.environ, **OFFLINE}, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    (reached,) = re.findall(r"test accuracy.*?([\d.]+)%", done.stdout)
    assert float(reached) > ACCURACY[name]
    if name == "heads":
        (counted,) = re.findall(r"cached or not: ([\d.]+)%", done.stdout)
        assert float(counted) > 60  # the third that is given is right in any case
    if name == "monitor":
        for variant in ("stock", "conditioned"):
            assert len(ac.Monitor.read(tmp_path / f"{variant}.jsonl")) >= 6
            assert "blocks.2.attn" in (tmp_path / f"{variant}.html").read_text(encoding="utf-8")
    for checkpoint in tmp_path.rglob("*.safetensors"):
        assert not [key for key in load_file(checkpoint) if "attncond" in key]
    saved = {p.name for p in tmp_path.rglob("*.safetensors")}
    expected = {"train_timm": {"vit-digits.safetensors"}, "train_trainer": {"model.safetensors"}}
    assert saved == expected.get(name, set())
