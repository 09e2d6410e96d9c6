"""Two processes, with DDP and with FSDP2, train like one; the first one writes.

In float32 the sums over a batch are rounded in another order: losses agree to 1e-5 relative over 20
steps, weights to 1e-3 absolute (AdamW divides small gradients by their small roots).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed_runs import CASES, config, normed
from safetensors.torch import load_file

import attncond as ac
from attncond.lab.distributed import accelerated, blocks
from attncond.lab.folder import RunFolder
from attncond.lab.plan import plan
from attncond.lab.recipe import load
from attncond.lab.train import train
from attncond.lab.trained import make

pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo"),
    pytest.mark.xdist_group("lab-distributed"),
]
KINDS = ("ddp", "fsdp")


def launched(*call, code=0):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_FSDP": "false"}
    done = subprocess.run(
        [sys.executable, "-m", *call], capture_output=True, text=True, env=environment
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    root = tmp_path_factory.mktemp("together")
    script = Path(__file__).with_name("distributed_runs.py")
    torchrun = ["torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    launched(*torchrun, "--rdzv-endpoint", "localhost:0", str(script), str(root))
    return root


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    root = tmp_path_factory.mktemp("alone")
    for case in CASES:
        train(config(case), root / case, progress=False)
    return root


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def close(ours, theirs):
    for key in ("train_loss", "validation_loss"):
        a, b = ([row[key] for row in rows(folder)] for folder in (ours, theirs))
        assert a == pytest.approx(b, rel=1e-5)
    a, b = (load_file(folder / "model.safetensors") for folder in (ours, theirs))
    assert a.keys() == b.keys()
    for key, value in a.items():
        if key.endswith("qkv.bias"):
            continue  # the softmax does not see a bias of keys: its gradient is rounding alone
        torch.testing.assert_close(value, b[key], rtol=1e-3, atol=1e-3)
    return True


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_like_one(together, alone, kind, case):
    ours = together / kind / case
    assert close(ours, alone / case)
    result = json.loads((ours / "result.json").read_text())
    assert result["hardware"]["processes"] == 2
    other = json.loads((alone / case / "result.json").read_text())
    assert result["test_loss"] == pytest.approx(other["test_loss"], rel=1e-5)
    steps = [[r.step for r in ac.Monitor.read(f / "history.jsonl")] for f in (ours, alone / case)]
    assert steps[0] == steps[1] == [0, 10, 20]


@pytest.mark.parametrize("kind", KINDS)
def test_all_processes_stop_at_one_step_and_go_on(together, alone, kind):
    assert "time limit at step 10 of 20" in (together / kind / "stopped.txt").read_text()
    assert close(together / kind / "stopped", alone / "polar")


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_goes_on_with_what_two_began(together, alone, kind):
    folder = together / kind / "left"
    assert (folder / "checkpoints" / "step-00000010").is_dir()
    train(config("polar"), folder, progress=False)
    assert close(folder, alone / "polar")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_tested_is_what_is_saved(together, kind):
    tested = json.loads((together / kind / "tested/result.json").read_text())
    alone = train(normed(), together / kind / "untested", progress=False)
    assert tested["test_loss"] == pytest.approx(alone.values["test_loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("name", "said"),
    [("mixed", "holds a run with other settings"), ("bare", "optim.output_lr: there is no")],
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_one_process_refuses_all_refuse_and_go_on_with_the_next_run(
    together, kind, name, said
):
    told = [(together / kind / f"refused-{name}-{rank}.txt").read_text() for rank in (0, 1)]
    assert said in told[0]
    assert told[0] == told[1]


def test_a_run_that_one_process_cannot_go_on_with_ends_them_all(tmp_path):
    """They would wait for it for ever, in the middle of the next run."""
    call = ["torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    call += ["--rdzv-endpoint", "localhost:0", "-m", "attncond.lab.run", "digits"]
    call += ["--form", "smoke", "--variants", "baseline,spectral", "--out", str(tmp_path)]
    (run,) = plan(["digits"], tmp_path, form="smoke", variants=["baseline"], seeds=[0])
    run.folder.mkdir(parents=True)
    RunFolder(run.folder).claim(run.config, resume=True)
    (run.folder / "checkpoints").touch()  # where the first process wants a folder
    done = launched(*call, code=1)
    assert "attncond: the checkpoint of step 4 could not be written" in done.stderr
    assert not (tmp_path / "digits/smoke/spectral").exists()


def test_accelerate_launch(tmp_path, alone):
    """The documented command, on two CPU processes."""
    call = ["accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1"]
    call += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    run = ["-m", "attncond.lab.run", "digits", "--form", "smoke", "--variants", "spectral"]
    settings = [part for k, v in CASES["spectral"][2].items() for part in ("--set", f"{k}={v}")]
    launched(*call, *run, *settings, "--out", str(tmp_path))
    assert close(tmp_path / "digits/smoke/spectral/seed0", alone / "spectral")


@pytest.mark.parametrize("name", ["vit", "deit", "swin", "xcit", "davit"])
def test_every_attention_has_a_block_to_shard(name):
    from attncond.lab.recipe import load

    model, _ = make(load(f"{name}-cifar10").config("smoke", "baseline"), 10, 3)
    found = blocks(model)
    assert len(found) == len(ac.inspect(model).sites)
    inside = {id(m) for block in found for m in block.modules()} - {id(b) for b in found}
    assert not any(id(block) in inside for block in found)


@pytest.mark.parametrize("parts", [1, 2])
def test_what_accumulates_is_the_recipe_s(parts, monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    asked = load("digits").config("smoke", "gap", 0, {"train.accumulate": parts})
    with accelerated(asked) as accelerator:
        assert accelerator.gradient_accumulation_steps == parts
