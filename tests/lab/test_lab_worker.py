"""A worker process: a JSON line for each job, whatever happens to the job."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from attncond.lab.config import Config
from attncond.lab.recipe import load
from attncond.lab.worker import job

WORKER = [sys.executable, "-m", "attncond.lab.worker"]
ENDS = ("finished", "diverged")


def config(variant="baseline", **settings):
    named = {key.replace("__", "."): str(value) for key, value in settings.items()}
    return load("digits").config("smoke", variant, 1, named)


@pytest.mark.parametrize("variant", ["baseline", "spectral+gap"])
def test_a_job_says_all_of_the_configuration(tmp_path, variant):
    made = config(variant, optim__clip=0.1, optim__betas="[0.9, 0.99]")
    told = json.loads(json.dumps(job(made, tmp_path / "run", tmp_path, False, True, 12.5)))
    assert Config.model_validate_json(told.pop("config")) == made
    assert told == {
        "folder": str(tmp_path / "run"),
        "data": str(tmp_path),
        "resume": False,
        "test": True,
        "deadline": 12.5,
    }
    assert job(made, tmp_path, None, True, True, None)["data"] is None


def test_jobs_are_answered_in_turn_until_one_breaks_the_process(tmp_path):
    """Starting a process takes seconds: one test for all that a job can come to."""
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "config.json").write_text('{"recipe": "another"}')
    (taken / "metrics.jsonl").touch()
    broken = job(config(), tmp_path / "broken", None, True, True, None) | {"config": "{}"}
    jobs = [
        job(config(), tmp_path / "good", None, True, False, None),
        job(config(), taken, None, True, True, None),
        job(config(), taken / "config.json" / "no", None, True, True, None),
        job(config(), tmp_path / "late", None, True, True, time.time()),
        job(config(optim__lr=1e20), tmp_path / "wild", None, True, True, None),
        broken,
        job(config(), tmp_path / "after", None, True, True, None),
    ]
    began = time.time()
    done = subprocess.run(
        WORKER,
        input="".join(json.dumps(told) + "\n" for told in jobs),
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    states = ["finished", "failed", "failed", "stopped", "diverged", "broken"]
    assert [a["state"] for a in answers] == states
    assert done.returncode == 1
    good, failed, nowhere, late, wild, last = (a["message"] for a in answers)
    assert (good, wild) == ("", "")
    assert [a.get("first_step", 0) > began for a in answers] == [s in ENDS for s in states]
    assert 'recipe was "another" and is "digits"' in failed
    assert nowhere.endswith("cannot be written: Not a directory. Choose another with --out")
    assert "time limit at step 1 of 10" in late
    assert "validation errors for Config" in last
    assert last.endswith(f"see {tmp_path / 'broken' / 'log.txt'}")
    # What a run prints stands in its folder, and nowhere else.
    assert "epoch 2/2" in (tmp_path / "good/log.txt").read_text()
    assert (taken / "log.txt").read_text().startswith("attncond: ")
    assert "Traceback" in (tmp_path / "broken/log.txt").read_text()
    assert "Traceback" not in done.stderr
    assert json.loads((tmp_path / "good/result.json").read_text())["test_read"] is False
    assert not (tmp_path / "after").exists()


STUCK = """
import sys, time, types
from attncond.lab import worker
from attncond.lab.timing import Stop

def train(config, folder, **options):
    with Stop(options["deadline"]):
        (folder / "begun").touch()
        end = time.time() + 60
        while time.time() < end:  # compiling
            try:
                time.sleep(60)
            except KeyboardInterrupt:
                if "deaf" in sys.argv:
                    continue
                raise

sys.modules["attncond.lab.train"] = types.SimpleNamespace(train=train)
worker.SECONDS_TO_SAVE = 2.0
sys.exit(worker.work())
"""


def wait_for(path):
    for _ in range(600):
        if path.exists():
            return
        time.sleep(0.1)
    raise AssertionError(f"{path} is not there")


@pytest.mark.parametrize(("late", "reason"), [(False, "SIGTERM"), (True, "time limit")])
def test_a_worker_that_is_asked_to_stop_before_the_first_step_does(tmp_path, late, reason):
    call = [sys.executable, "-c", STUCK]
    deadline = time.time() if late else None
    with subprocess.Popen(
        call, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        process.stdin.write(json.dumps(job(config(), tmp_path, None, True, True, deadline)) + "\n")
        process.stdin.flush()
        wait_for(tmp_path / "begun")
        process.terminate()
        answer = json.loads(process.stdout.readline())
        assert answer == {"state": "stopped", "message": f"{reason} before its first step"}
        assert process.communicate(timeout=30) == ("", None)
        assert process.returncode == 0


PARENT = """
import os, subprocess, sys
environment = {**os.environ, "ATTNCOND_LAB_PARENT": str(os.getpid())}
alone = "-c" in sys.argv
worker = subprocess.Popen(sys.argv[1:], stdin=0, env=environment, start_new_session=alone)
print("started", flush=True)
worker.wait()
"""


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
@pytest.mark.parametrize("doing", ["starts", "compiles", "hangs"])
def test_a_worker_does_not_outlive_the_process_that_started_it(tmp_path, doing):
    """Even while its standard input stays open, and if that process is killed at once."""
    read, write = os.pipe()
    program = {"compiles": [sys.executable, "-c", STUCK]}
    program["hangs"] = [*program["compiles"], "deaf"]
    call = [sys.executable, "-S", "-c", PARENT, *program.get(doing, WORKER)]
    with subprocess.Popen(call, stdin=read, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "started\n"
        if doing in program:
            told = job(config(), tmp_path, None, True, True, None)
            os.write(write, json.dumps(told).encode() + b"\n")
            wait_for(tmp_path / "begun")
        parent.kill()
        # The end of this output comes when nobody holds it any more: the worker does, too.
        watch = threading.Timer(30, os.close, [write])
        watch.start()
        assert "finished" not in parent.stdout.read()
        assert watch.is_alive()
        watch.cancel()
    os.close(read)
    os.close(write)
