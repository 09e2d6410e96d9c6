"""Runs handed to worker processes: who gets which, and what a worker that dies leaves.

The workers are real processes that speak the worker's language and train nothing.
"""

import _thread
import json
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from attncond.lab import pool as pools
from attncond.lab.pool import Pool

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")

GOES_ON = "the same command goes on from its last checkpoint, if it has one"
WORKER = """#!{python} -S
import json, os, signal, sys, time

begun = {begun!r}
if {deaf}:
    os.close(0)
    open(os.path.join(begun, "deaf"), "w").close()
    time.sleep(0.2)
    sys.exit(3)
for line in sys.stdin:
    told = json.loads(line)

    def polite(*_):
        time.sleep(0.6)
        print(json.dumps({{"state": "stopped", "message": "SIGTERM at step 7"}}), flush=True)
        os._exit(0)

    handlers = {{"wait": polite, "vanish": signal.SIG_DFL, "stay": signal.SIG_IGN}}
    signal.signal(signal.SIGTERM, handlers.get(told["do"], signal.SIG_DFL))
    note = {{"pid": os.getpid(), "args": sys.argv[1:], "env": dict(os.environ)}}
    with open(os.path.join(begun, told["name"] + ".part"), "w") as file:
        json.dump(note, file)
    os.rename(file.name, os.path.join(begun, told["name"]))
    if told["do"] in handlers:
        time.sleep(60)
    if told["do"] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if told["do"] == "half":
        print('{{"state": "finished", "mess', end="", flush=True)
        sys.exit(5)
    said = {{"state": told["do"], "message": "said " + told["name"]}}
    if "start" in told:
        said["first_step"] = time.time() + told["start"]
    print(json.dumps(said), flush=True)
    if told["do"] == "broken":
        sys.exit(1)
"""


class Run:
    def __init__(self, name, do="finished", kind=("a", "a1")):
        self.folder, self.do, self.kind = Path(name), do, kind

    @property
    def told(self):
        return {"name": self.folder.name, "do": self.do}


@pytest.fixture
def begun(tmp_path):
    """A folder with a file for each run that a worker has begun."""
    folder = tmp_path / "begun"
    folder.mkdir()
    return folder


@pytest.fixture
def workers(tmp_path, begun, monkeypatch):
    """Let pools start workers that do as they are told."""

    def made(deaf=False):
        program = tmp_path / "worker"
        program.write_text(WORKER.format(python=sys.executable, begun=str(begun), deaf=deaf))
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))

    return made


def note(begun, name):
    return json.loads((begun / name).read_text())


def pooled(runs, jobs, tell=lambda run: run.told, deadline=None):
    """A pool, and the list that it fills with (name, state, message)."""
    seen = []
    return Pool(
        runs, jobs, tell, lambda run, *how: seen.append((run.folder.name, *how)), deadline
    ), seen


def test_a_worker_keeps_to_what_it_has_compiled():
    runs = [Run(f"{a}{k}{seed}", kind=(a, a + k)) for seed in "01" for a in "xy" for k in "12"]
    pool, _ = pooled(runs, 2)
    first, second = pool._next(0, None), pool._next(1, None)
    assert first.kind[0] != second.kind[0]  # they spread over the architectures
    third = pool._next(0, first)
    assert third.kind == first.kind  # the other seed
    fourth = pool._next(0, third)
    assert fourth.kind[0] == third.kind[0]  # then the same architecture
    pool.stopping = True
    assert pool._next(1, second) is None


def test_the_kind_with_the_most_runs_comes_first():
    runs = [Run("few", kind=("x", "x1")), *(Run(f"m{n}", kind=("x", "x2")) for n in range(3))]
    pool, _ = pooled(runs, 2)
    first, second = pool._next(0, None), pool._next(1, None)
    assert [first.folder.name, second.folder.name] == ["m0", "few"]


def test_every_run_ends_once_and_workers_serve_several(workers, begun, monkeypatch):
    workers()
    monkeypatch.setattr(sys, "argv", ["/somewhere/attncond", "lab", "run", "a b"])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "7")
    runs = [Run(f"run{n}", "diverged" if n == 3 else "finished") for n in range(6)]
    pool, seen = pooled(runs, 2)
    pool.run()
    assert sorted(seen) == [
        (f"run{n}", "diverged" if n == 3 else "finished", f"said run{n}") for n in range(6)
    ]
    notes = [note(begun, f"run{n}") for n in range(6)]
    assert len({told["pid"] for told in notes}) <= 2
    assert notes[0]["args"] == ["-m", "attncond.lab.worker"]
    env = notes[0]["env"]
    assert env["ATTNCOND_LAB_JOBS"] == "2"
    assert env["ATTNCOND_LAB_PARENT"] == str(os.getpid())
    assert env["ATTNCOND_LAB_COMMAND"] == "attncond lab run 'a b'"
    assert env["OMP_NUM_THREADS"] == str(max(1, os.cpu_count() // 2))
    assert env["TORCHINDUCTOR_COMPILE_THREADS"] == "7"  # what the user chose stays
    for told in notes:  # and none is left behind
        with pytest.raises(ProcessLookupError):
            os.kill(told["pid"], 0)


def test_no_more_workers_than_runs(workers, begun):
    workers()
    pool, _ = pooled([Run("only")], 8)
    pool.run()
    assert note(begun, "only")["env"]["ATTNCOND_LAB_JOBS"] == "1"


def see(name):
    return f"see {Path(name, 'log.txt')}; {pools._CUT}"


@pytest.mark.parametrize(
    ("do", "message"),
    [
        ("die", f"its process ended with code -9 (Killed); {see('first')}"),
        ("half", f"its process ended with code 5; {see('first')}"),
        ("broken", "said first"),
    ],
)
def test_the_next_run_gets_a_new_worker_after_one_that_is_gone(workers, begun, do, message):
    workers()
    pool, seen = pooled([Run("first", do), Run("second")], 1)
    pool.run()
    assert seen == [("first", "failed", message), ("second", "finished", "said second")]
    assert note(begun, "first")["pid"] != note(begun, "second")["pid"]


def test_a_worker_that_reads_nothing(workers, begun):
    workers(deaf=True)

    def tell(run):
        wait_for(begun, "deaf")
        return run.told

    pool, seen = pooled([Run("run")], 1, tell)
    pool.run()
    assert seen == [("run", "failed", f"its process ended with code 3; {see('run')}")]


def test_nothing_begins_after_the_deadline(workers, begun):
    workers()
    pool, seen = pooled([Run("late")], 1, deadline=time.time())
    pool.run()
    assert seen == []
    assert list(begun.iterdir()) == []


def wait_for(begun, *names):
    for _ in range(1000):
        if all((begun / name).exists() for name in names):
            return
        time.sleep(0.01)
    raise AssertionError(f"{names} did not begin")


def interrupted(pool, begun, *names):
    """Ctrl-C once these runs are under way."""

    def press():
        wait_for(begun, *names)
        _thread.interrupt_main()

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        pool.run()
    thread.join()


def test_ctrl_c_lets_workers_save_and_begins_nothing_more(workers, begun):
    workers()
    runs = [Run("saves", "wait"), Run("starts", "vanish"), Run("waiting")]
    pool, seen = pooled(runs, 2)
    interrupted(pool, begun, "saves", "starts")
    assert sorted(seen) == [
        ("saves", "stopped", "SIGTERM at step 7"),
        ("starts", "stopped", f"ended before it could save; {GOES_ON}"),
    ]
    assert not (begun / "waiting").exists()


def test_a_worker_that_does_not_stop_is_killed(workers, begun, monkeypatch):
    workers()
    monkeypatch.setattr(pools, "SECONDS_TO_STOP", 0.3)
    pool, _ = pooled([Run("stubborn", "stay")], 1)
    began = time.monotonic()
    interrupted(pool, begun, "stubborn")
    assert 0.3 < time.monotonic() - began < 20
    pool._workers[0].wait(10)
    assert pool._workers[0].returncode == -9


def test_a_worker_that_heeds_no_deadline_is_asked_to_stop_and_then_killed(
    workers, begun, monkeypatch
):
    """As one that compiles does; the others have saved by then."""
    workers()
    monkeypatch.setattr(pools, "SECONDS_TO_SAVE", 4.0)
    runs = [Run("stuck", "stay"), Run("saves", "wait"), Run("never")]
    deadline = time.time() + 3
    pool, seen = pooled(runs, 2, deadline=deadline)
    pool.run()
    assert 4 <= time.time() - deadline < 8
    assert (begun / "stuck").exists()
    assert sorted(seen) == [
        ("saves", "stopped", "SIGTERM at step 7"),
        ("stuck", "stopped", f"ended by force after the time limit; {GOES_ON}"),
    ]
    assert sorted(worker.returncode for worker in pool._workers.values()) == [-9, 0]


def test_processes_of_a_worker_end_with_it(workers, begun, monkeypatch):
    """They hold its output open: to wait for its end would be to wait for theirs."""
    workers()
    program = Path(sys.executable)
    child = "import subprocess; subprocess.Popen(['sleep', '60'])\nfor line in sys.stdin:"
    program.write_text(program.read_text().replace("for line in sys.stdin:", child))
    monkeypatch.setattr(pools, "SECONDS_TO_SAVE", 0.4)
    pool, seen = pooled([Run("stuck", "stay")], 1, deadline=time.time() + 2)
    began = time.monotonic()
    pool.run()
    assert time.monotonic() - began < 20
    assert [state for _, state, _ in seen] == ["stopped"]


def test_no_run_begins_that_would_not_make_a_step(workers, begun):
    workers()
    runs = [Run("first"), *(Run(f"other{n}", kind=("b", f"b{n}")) for n in range(2))]
    told = lambda run: run.told | {"start": 1000.0}  # noqa: E731
    pool, seen = pooled(runs, 1, told, deadline=time.time() + 500)
    pool.run()
    assert [name for name, *_ in seen] == ["first"]
    assert len(list(begun.iterdir())) == 1
    assert [run.folder.name for run in pool.waiting] == ["other0", "other1"]


def test_what_a_worker_has_compiled_begins_sooner(workers):
    workers()
    runs = [Run("first"), Run("again"), Run("other", kind=("b", "b1"))]
    told = lambda run: run.told | {"start": 1.0 if run.folder.name == "again" else 1000.0}  # noqa: E731
    pool, seen = pooled(runs, 1, told, deadline=time.time() + 500)
    pool.starts.add(1.0, compiled=True)
    pool.run()
    assert [name for name, *_ in seen] == ["first", "again"]
