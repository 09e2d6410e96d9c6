"""Running recipes: what is planned, several at once, and what a crash, Ctrl-C or a limit leaves."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attncond.lab import run as runner
from attncond.lab.folder import RunError
from attncond.lab.recipe import RecipeError
from attncond.lab.run import main, plan, run_many, seeds_of

pytestmark = pytest.mark.xdist_group("lab-run")
VARIANTS = ("baseline", "gap")
SMOKE = ["digits", "--form", "smoke", "--variants", ",".join(VARIANTS)]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_runs_of_a_recipe(tmp_path):
    runs = plan(["digits"], tmp_path, form="smoke", seeds=[0, 2])
    assert len(runs) == 12
    assert runs[1].folder == tmp_path / "digits/smoke/baseline/seed2"
    assert runs[1].config.seed == 2
    assert runs[0].kind == runs[1].kind != runs[2].kind
    some = plan(["digits", "vit-cifar10"], tmp_path, form="smoke", variants=["gap"])
    assert [r.config.recipe for r in some] == ["digits", "vit-cifar10"]
    with pytest.raises(RecipeError, match="no variant 'gaps'"):
        plan(["digits"], tmp_path, variants=["gaps"])


def test_a_grid_has_folders_of_its_own(tmp_path):
    grid = {"optim.lr": ["1e-3", "2e-3"], "optim.weight_decay": ["0.1"]}
    runs = plan(["digits"], tmp_path, form="smoke", variants=["gap"], grid=grid)
    assert [r.folder.relative_to(tmp_path).as_posix() for r in runs] == [
        "digits/smoke/gap@lr=1e-3,weight_decay=0.1/seed0",
        "digits/smoke/gap@lr=2e-3,weight_decay=0.1/seed0",
    ]
    assert [r.config.optim.lr for r in runs] == [1e-3, 2e-3]
    assert {r.config.variant for r in runs} == {"gap"}


def test_values_of_a_grid_may_have_commas(tmp_path, monkeypatch):
    planned = []
    monkeypatch.setattr(runner, "run_many", lambda runs, **_: planned.extend(runs) or [])
    grid = ["--grid", "methods='spectral:kappa=2,scope=head',[spectral, gap]"]
    grid += ["--grid", "optim.betas=[0.9,0.99]", "--grid", "optim.betas=[0.9,0.95]"]
    call = ["digits", "--form", "smoke", "--variants", "baseline", "--out", str(tmp_path)]
    assert main([*call, *grid, "--grid", "train.batch_size=32"]) == 0
    assert [(r.config.methods, r.config.optim.betas[1]) for r in planned] == [
        (("spectral:kappa=2,scope=head",), 0.99),
        (("spectral:kappa=2,scope=head",), 0.95),
        (("spectral", "gap"), 0.99),
        (("spectral", "gap"), 0.95),
    ]
    assert planned[2].folder.relative_to(tmp_path).as_posix() == (
        "digits/smoke/baseline@methods=spectral,gap,betas=0.9,0.99,batch_size=32/seed0"
    )


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        ("optim.lr=1e-3,fast", "(--grid optim.lr=fast)"),
        ("optim.lr=", "there is no value"),
        ("optim.betas=[0.9", "--grid optim.betas=[0.9: line 1"),
        ("seed=1,2", "seed is chosen with --seeds, not with --grid"),
    ],
)
def test_mistakes_in_a_grid_are_told_as_the_grids(grid, said, tmp_path, capsys):
    assert main(["digits", "--form", "smoke", "--grid", grid, "--out", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert "--set" not in told


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("1", [0]), ("3", [0, 1, 2]), ("2-4", [2, 3, 4]), ("0,7-8", [0, 7, 8]), ("5,", [5])],
)
def test_seeds(text, wanted):
    assert seeds_of(text) == wanted


@pytest.mark.parametrize("text", ["", "0", "x", "-1", "4-2", "1,1", "1.5", ",", "1,,"])
def test_seeds_that_are_none(text, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["digits", "--seeds", text])
    assert caught.value.code == 2
    assert "seeds" in capsys.readouterr().err


def test_one_after_the_other(tmp_path, capsys):
    assert main([*SMOKE, "--out", str(tmp_path), "--seeds", "2"]) == 0
    said = capsys.readouterr().out
    assert "[4/4]" in said
    assert "4 finished" in said
    assert len(list(tmp_path.rglob("result.json"))) == 4
    before = (tmp_path / "digits/smoke/gap/seed0/result.json").stat().st_mtime_ns
    assert main([*SMOKE, "--out", str(tmp_path)]) == 0  # nothing is trained again
    assert (tmp_path / "digits/smoke/gap/seed0/result.json").stat().st_mtime_ns == before
    assert main([*SMOKE, "--out", str(tmp_path), "--restart"]) == 0
    assert (tmp_path / "digits/smoke/gap/seed0/result.json").stat().st_mtime_ns > before


def test_choosing_by_validation_leaves_the_test_set_alone(tmp_path, capsys):
    assert main([*SMOKE, "--out", str(tmp_path), "--validation-only"]) == 0
    assert ", test " not in capsys.readouterr().out
    read = [json.loads(p.read_text())["test_read"] for p in tmp_path.rglob("result.json")]
    assert read == [False, False]
    assert main([*SMOKE, "--out", str(tmp_path)]) == 0
    assert ", test " in capsys.readouterr().out


def test_a_run_that_fails_keeps_no_other_from_running(tmp_path, capsys):
    folder = tmp_path / "digits/smoke/baseline/seed0"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"recipe": "another"}')
    (folder / "metrics.jsonl").touch()
    assert main([*SMOKE, "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "baseline/seed0: failed" in said
    assert "recipe was" in said
    assert "1 failed, 1 finished" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nosuch"], "there is no recipe 'nosuch'"),
        (["digits", "--form", "tiny"], "has no form 'tiny'"),
        (["digits", "--set", "optim.rate=1"], "optim.rate"),
    ],
)
def test_mistakes(arguments, said, capsys):
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def test_data_that_is_not_there_is_told_once_and_before_anything_starts(tmp_path, capsys):
    out = tmp_path / "runs"
    call = ["vit-cifar10", "deit-cifar10", "--data", str(tmp_path / "none"), "--out", str(out)]
    assert main([*call, "--seeds", "5"]) == 2
    said = capsys.readouterr()
    assert said.err.count("cifar10_jpeg_train.parquet") == 1
    assert not said.out
    assert not out.exists()


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("model.name=vit_smal32", "'vit_smal32' is no model. Did you mean vit_small32"),
        ("model.kwargs.dept=2", "unexpected keyword argument 'dept'"),
    ],
)
def test_a_model_that_cannot_be_is_told_once_and_before_anything_starts(setting, said, capsys):
    assert main([*SMOKE, "--set", setting, "--out", "runs"]) == 2
    captured = capsys.readouterr()
    assert captured.err.count(said) == 1
    assert not captured.out
    assert not Path("runs").exists()


@pytest.mark.parametrize("wrong", [["--jobs", "0"], ["--set", "optim.lr"], ["--grid", "=1"], []])
def test_mistakes_in_the_call(wrong, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["digits", *wrong] if wrong else [])
    assert caught.value.code == 2
    said = capsys.readouterr().err  # `attncond lab run` is called by another name
    assert said.startswith("attncond: ")
    assert "python -m" not in said


def test_several_processes_take_no_jobs(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([*SMOKE, "--jobs", "2", "--out", str(tmp_path)]) == 2
    assert "--jobs is for one process" in capsys.readouterr().err


def test_one_folder_for_two_runs(tmp_path):
    runs = plan(["digits"], tmp_path, form="smoke", variants=["gap", "gap"])
    with pytest.raises(RunError, match="share the folder"):
        run_many(runs)


def test_a_limit_that_is_over_begins_nothing(tmp_path, capsys):
    assert main([*SMOKE, "--out", str(tmp_path), "--time-limit", "1"]) == 1
    said = capsys.readouterr().out
    assert "2 stopped" in said
    assert "The same command goes on" in said
    assert not list(tmp_path.rglob("result.json"))


# Workers are processes of their own, which take seconds to start: one test for all they do well.


def start(tmp_path, *more):
    call = [sys.executable, "-m", "attncond.lab.run", *SMOKE, "--out", str(tmp_path), *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def test_two_at_a_time_and_one_of_them_fails(tmp_path):
    runs = plan(["digits"], tmp_path, form="smoke", variants=["baseline", "gap"], seeds=[0, 1])
    broken = runs[1].folder
    broken.mkdir(parents=True)
    (broken / "config.json").write_text('{"recipe": "another"}')
    (broken / "metrics.jsonl").touch()
    said = []
    outcomes = run_many(runs, jobs=2, say=said.append)
    assert [o.state for o in outcomes] == ["finished", "failed", "finished", "finished"]
    assert "recipe was" in outcomes[1].message
    assert len(said) == 4
    values = outcomes[0].result.values
    assert values["hardware"]["side_by_side"] == 2
    assert "epoch 2/2" in (runs[0].folder / "log.txt").read_text()
    # As if trained alone.
    alone = run_many(plan(["digits"], tmp_path / "alone", form="smoke", variants=["gap"]))
    assert alone[0].result.values["test_loss"] == outcomes[2].result.values["test_loss"]


LONG = ("--set", "schedule.epochs=2000", "--jobs", "2")


def wait_for_checkpoints(tmp_path):
    """Until both runs are under way."""
    for _ in range(600):
        if all(
            list((tmp_path / "digits/smoke").glob(f"{v}/seed0/checkpoints/step-*"))
            for v in VARIANTS
        ):
            return
        time.sleep(0.1)
    raise AssertionError("no checkpoint was written")


def workers_of(process):
    """Their process numbers, where the system tells."""
    tasks = Path(f"/proc/{process.pid}/task")
    if not tasks.exists():
        pytest.skip("needs /proc")
    return [int(n) for task in tasks.iterdir() for n in (task / "children").read_text().split()]


def test_a_killed_worker_takes_nothing_along_and_ctrl_c_stops_all_with_checkpoints(tmp_path):
    process = start(tmp_path, *LONG)
    wait_for_checkpoints(tmp_path)
    os.kill(workers_of(process)[0], signal.SIGKILL)
    assert "failed: its process ended with code -9" in process.stdout.readline()
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 130, out + error
    assert "The same command goes on" in error
    assert "SIGTERM at step" in out


def test_workers_stop_when_their_parent_is_killed(tmp_path):
    process = start(tmp_path, *LONG)
    wait_for_checkpoints(tmp_path)
    workers = workers_of(process)
    process.kill()
    process.wait()
    for worker in workers:
        for _ in range(200):
            if not Path(f"/proc/{worker}/stat").exists():
                break
            time.sleep(0.1)
        else:
            raise AssertionError("a worker goes on")
