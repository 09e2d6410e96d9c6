"""Running recipes: what is said, several at once, and what a crash, Ctrl-C or a limit leaves."""

import importlib.util
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
from attncond.lab.plan import plan
from attncond.lab.run import main, run_many
from attncond.lab.timing import Starts

pytestmark = pytest.mark.xdist_group("lab-run")
VARIANTS = ("baseline", "gap")
SMOKE = ["digits", "--form", "smoke", "--variants", ",".join(VARIANTS)]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


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


def test_no_variant_is_not_all_of_them(capsys):
    assert main([*SMOKE, "--variants", ""]) == 2  # of a script whose variable is not set
    assert "'digits' has no variant ''" in capsys.readouterr().err


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


@pytest.mark.parametrize("text", ["rand-w0", "rand-m9-t3a"])
def test_what_timm_or_the_lab_does_to_no_image_is_told_before_anything_starts(text, capsys):
    assert main([*SMOKE, "--grid", f"data.augment.randaugment=rand-m9,{text}"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"attncond: data.augment.randaugment: '{text}'")
    assert not said.out
    assert not Path("runs").exists()


def test_starting_over_needs_the_data_before_it_deletes_anything(tmp_path, capsys):
    folder = tmp_path / "runs/vit-cifar10/small/baseline/seed0"
    folder.mkdir(parents=True)
    (folder / "result.json").write_text("{}")
    call = ["vit-cifar10", "--variants", "baseline", "--restart", "--data", str(tmp_path / "none")]
    assert main(call) == 2
    assert "cifar10_jpeg_train.parquet" in capsys.readouterr().err
    assert (folder / "result.json").exists()


def test_what_was_started_over_goes_on_without_starting_over_again(tmp_path, capsys, monkeypatch):
    assert main([*SMOKE, "--restart", "--time-limit", "0"]) == 1
    assert "The same command without --restart goes on" in capsys.readouterr().out

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run_many", interrupted)
    assert main([*SMOKE, "--restart"]) == 130
    assert "The same command without --restart goes on" in capsys.readouterr().err
    assert main(SMOKE) == 130
    assert "The same command goes on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("model.name=vit_smal32", "'vit_smal32' is no model. Did you mean vit_small32"),
        ("model.kwargs.dept=2", "unexpected keyword argument 'dept'"),
        ("model.name=vit_tiny_patch16_224", "cannot read an image"),
    ],
)
def test_a_model_that_cannot_be_is_told_once_and_before_anything_starts(setting, said, capsys):
    assert main([*SMOKE, "--set", setting, "--out", "runs"]) == 2
    captured = capsys.readouterr()
    assert captured.err.count(said) == 1
    assert not captured.out
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "wrong",
    [["--jobs", "0"], ["--set", "optim.lr"], ["--grid", "=1"], ["--seeds", "20260307"], []],
)
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
    with pytest.raises(RunError, match=r"share the folder .* variant and value of a grid once"):
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


def gone(workers):
    for worker in workers:
        for _ in range(200):
            if not Path(f"/proc/{worker}/stat").exists():
                break
            time.sleep(0.1)
        else:
            raise AssertionError("a worker goes on")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_workers_stop_with_their_parent(tmp_path, number):
    process = start(tmp_path, *LONG)
    wait_for_checkpoints(tmp_path)
    workers = workers_of(process)
    process.send_signal(number)
    out, error = process.communicate(timeout=60)
    if number == signal.SIGKILL:
        assert process.returncode == -9
    else:
        assert process.returncode == 130, out + error
        assert out.count("SIGTERM at step") == 2
        assert "The same command goes on" in error
    gone(workers)


STUCK = """#!{python}
import sys, time, types
from attncond.lab import worker
from attncond.lab.timing import Stop

def train(config, folder, **options):
    with Stop(options["deadline"]):
        (folder / "begun").touch()
        time.sleep(100)  # compiling

sys.modules["attncond.lab.train"] = types.SimpleNamespace(train=train)
sys.exit(worker.work())
"""


@pytest.fixture
def stuck(tmp_path, monkeypatch):
    """Workers that do not come to a first step."""
    program = tmp_path / "stuck"
    program.write_text(STUCK.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


def test_a_time_limit_holds_while_models_are_compiled(tmp_path, stuck, capsys, monkeypatch):
    monkeypatch.setattr(runner, "MARGIN", 10.0)  # of 40 s
    began = time.time()
    assert main([*SMOKE, "--jobs", "2", "--out", str(tmp_path), "--time-limit", "30"]) == 1
    assert 20 < time.time() - began < 32
    said = capsys.readouterr().out
    assert len(list(tmp_path.rglob("begun"))) == 2
    assert said.count("stopped: time limit before its first step") == 2
    assert "2 stopped" in said


def benchmark():
    path = Path(__file__).parents[2] / "benchmarks/lab_runs.py"
    spec = importlib.util.spec_from_file_location("lab_runs", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_benchmarks_stages_share_a_time_limit_and_what_was_learnt(monkeypatch, tmp_path):
    module, calls = benchmark(), []
    monkeypatch.setattr(module, "run_many", lambda runs, **how: calls.append(how) or [])
    call = ["lab_runs.py", "rates", "why", "--known", "--out", str(tmp_path), "--time-limit", "100"]
    monkeypatch.setattr(sys, "argv", call)
    assert module.main() == 0
    assert abs(calls[0]["deadline"] - time.time() - 100 + runner.MARGIN) < 10
    for name in ("deadline", "starts"):
        assert calls[0][name] is calls[1][name]
    monkeypatch.setattr(sys, "argv", call[:-2])
    assert module.main() == 0
    assert calls[-1]["deadline"] is None


def test_the_benchmark_makes_no_run_that_is_committed(monkeypatch, tmp_path):
    module, planned = benchmark(), []
    monkeypatch.setattr(module, "run_many", lambda runs, **how: planned.extend(runs) or [])
    smoke = {"form": "smoke", "seeds": [0]}
    (run,) = plan(["vit-cifar10"], tmp_path / "a", variants=["mimetic"], **smoke)
    run_many([run])
    call = ["lab_runs.py", "why", "--form", "smoke", "--out", str(tmp_path / "b"), "--known"]
    monkeypatch.setattr(sys, "argv", [*call, str(tmp_path / "a")])
    assert module.main() == 0
    names = {(p.config.variant, p.config.seed) for p in planned}
    whole = {(p.config.variant, p.config.seed) for p in module.runs("why", "smoke", tmp_path)}
    assert whole - names == {("mimetic", 0)}
    watched = plan(["vit-lambda"], tmp_path, variants=["mimetic"], **smoke)[0]
    known = module.known([tmp_path / "a"], True)
    assert module.key(run) in known
    assert module.key(watched) not in known  # it would have been watched


def test_the_benchmark_stops_as_the_command_does(monkeypatch, tmp_path, capsys):
    module = benchmark()

    def training(runs, **_):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    monkeypatch.setattr(module, "run_many", training)
    monkeypatch.setattr(sys, "argv", ["lab_runs.py", "why", "--out", str(tmp_path)])
    assert module.main() == 130
    assert "The same command goes on" in capsys.readouterr().err


def test_what_would_not_make_a_step_is_not_begun(monkeypatch, tmp_path):
    """One after the other, too: by what those before it needed."""
    runs = plan(["digits"], tmp_path, form="smoke", variants=["baseline", "gap"], seeds=[0, 1])
    starts, said = Starts(), []
    starts.add(1000.0, compiled=False)
    outcomes = run_many(runs, deadline=time.time() + 500, starts=starts, say=said.append)
    assert {str(o) for o in outcomes} == {"stopped: not begun before the time limit"}
    outcomes = run_many(runs[:1], starts=starts, say=said.append)
    assert outcomes[0].state == "finished"
    assert starts._seconds[False][1] < 60
