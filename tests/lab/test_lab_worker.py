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


PARENT = """
import os, subprocess, sys
environment = {**os.environ, "ATTNCOND_LAB_PARENT": str(os.getpid())}
worker = subprocess.Popen(sys.argv[1:], stdin=0, env=environment)
print("started", flush=True)
worker.wait()
"""


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_a_worker_does_not_outlive_the_process_that_started_it():
    """Even while its standard input stays open, and if that process is killed at once."""
    read, write = os.pipe()
    call = [sys.executable, "-S", "-c", PARENT, *WORKER]
    with subprocess.Popen(call, stdin=read, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "started\n"
        parent.kill()
        # The end of this output comes when nobody holds it any more: the worker does, too.
        watch = threading.Timer(60, os.close, [write])
        watch.start()
        assert parent.stdout.read() == ""
        assert watch.is_alive()
        watch.cancel()
    os.close(read)
    os.close(write)
