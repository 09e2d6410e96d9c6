"""kill -9 anywhere, and the same call ends with the same weights, bit for bit (on the CPU)."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.xdist_group("faults")

# Drop path draws from torch's generator, so that its state counts; the mean moves; two parts.
SETTINGS = {
    "model.drop_path": "0.2",
    "train.ema": "0.9",
    "train.accumulate": "2",
    "data.augment.crop": "1",
    "schedule.epochs": "4",
    "train.checkpoint_every": "3",
    "watch.every": "5",
}
STEPS = 20


@pytest.fixture(scope="module")
def runner():
    """Trains in a child process: exit status of it."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("runner.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def run(folder, kill=None, variant="spectral", seed=0, settings=SETTINGS):
        told = {"folder": str(folder), "kill": kill, "variant": variant, "seed": seed}
        process.stdin.write(json.dumps({**told, "settings": settings}) + "\n")
        process.stdin.flush()
        return int(process.stdout.readline())

    yield run
    process.stdin.close()
    process.wait()


@pytest.fixture(scope="module")
def uninterrupted(runner, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert runner(folder) == 0
    return folder


def same(folder, other):
    """Weights bit for bit, and everything that was measured but times."""
    for name in ("model.safetensors",):
        ours, theirs = load_file(folder / name), load_file(other / name)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[k], theirs[k]) for k in ours)
    assert rows(folder / "metrics.jsonl") == rows(other / "metrics.jsonl")
    assert (folder / "history.jsonl").read_text() == (other / "history.jsonl").read_text()
    timed = (
        "seconds",
        "step_milliseconds",
        "warm_up_seconds",
        "peak_memory_bytes",
        "finished",
        "git",
    )
    ours, theirs = (json.loads((f / "result.json").read_text()) for f in (folder, other))
    for key in timed:
        ours.pop(key), theirs.pop(key)
    assert ours == theirs
    return True


def rows(path):
    found = [json.loads(line) for line in path.read_text().splitlines()]
    for row in found:
        del row["seconds"], row["images_per_second"]
    return found


@pytest.mark.parametrize("attempt", range(5))
def test_a_killed_run_ends_with_the_same_weights(runner, uninterrupted, tmp_path, attempt):
    """At a random step; then the run that goes on is killed too, while it writes a checkpoint."""
    draw = random.Random(20_000 + attempt)
    first = draw.randrange(1, STEPS)
    assert runner(tmp_path, ["step", first]) == -9
    where = draw.choice(["write", "rename", "step", "metrics"])
    left = 1 + (STEPS - first) // 8 if where != "step" else draw.randrange(1, STEPS - first + 1)
    assert runner(tmp_path, [where, draw.randint(1, left)]) == -9
    assert not (tmp_path / "result.json").exists()
    assert runner(tmp_path) == 0
    assert same(tmp_path, uninterrupted)


def test_two_runs_with_one_seed_are_identical(runner, uninterrupted, tmp_path):
    assert runner(tmp_path) == 0
    assert same(tmp_path, uninterrupted)


def test_another_seed_gives_another_run(runner, uninterrupted, tmp_path):
    assert runner(tmp_path, seed=1) == 0
    ours, theirs = (load_file(f / "model.safetensors") for f in (tmp_path, uninterrupted))
    assert not torch.equal(ours["blocks.0.attn.qkv.weight"], theirs["blocks.0.attn.qkv.weight"])
    assert rows(tmp_path / "metrics.jsonl") != rows(uninterrupted / "metrics.jsonl")


def test_a_killed_run_with_the_polar_factor(runner, tmp_path):
    """Its correction is a buffer that follows the optimizer: tracked, so that history counts."""
    settings = {**SETTINGS, "methods": "polar:refresh_every=2"}
    assert runner(tmp_path / "whole", settings=settings) == 0
    assert runner(tmp_path / "killed", ["step", 11], settings=settings) == -9
    assert runner(tmp_path / "killed", settings=settings) == 0
    assert same(tmp_path / "killed", tmp_path / "whole")


def test_a_damaged_checkpoint_costs_steps_and_nothing_else(runner, uninterrupted, tmp_path):
    assert runner(tmp_path, ["step", 14]) == -9
    newest = max((tmp_path / "checkpoints").iterdir())
    assert newest.name == "step-00000012"
    with open(newest / "model.safetensors", "r+b") as file:
        file.truncate(1000)
    assert runner(tmp_path) == 0
    assert same(tmp_path, uninterrupted)


def test_a_full_disk_costs_no_checkpoint(runner, uninterrupted, tmp_path):
    assert runner(tmp_path, ["full", 8]) == 3
    assert [p.name for p in sorted((tmp_path / "checkpoints").iterdir())] == [
        "step-00000003",
        "step-00000006",
    ]
    assert runner(tmp_path) == 0
    assert same(tmp_path, uninterrupted)
