"""A process that trains one run after another, as ``run_many`` tells it to.

Jobs come as JSON lines on standard input, and for each one a JSON line goes to standard output.
What a run prints goes to log.txt in its folder. Whatever happens here, the process that asked lives
on; when that one is gone, however it ended, so is this one a few seconds later.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

__all__ = ["SECONDS_TO_SAVE", "job", "work"]

PATIENCE = 1.0  # seconds between two looks at whether the parent lives
SECONDS_TO_SAVE = 10.0
"""For the step and the checkpoint of a run that has to end; then its process is killed."""


def job(
    config: Any, folder: Path, data: Path | None, resume: bool, test: bool, deadline: float | None
) -> dict[str, Any]:
    """What a worker is told, as plain data."""
    return {
        "config": config.model_dump_json(),
        "folder": str(folder),
        "data": None if data is None else str(data),
        "resume": resume,
        "test": test,
        "deadline": deadline,
    }


def work() -> int:
    """Do the jobs until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    # Told, because a parent that is killed while we import would not be our parent any more.
    parent = int(os.environ.get("ATTNCOND_LAB_PARENT") or os.getppid())
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    for line in sys.stdin:
        told = json.loads(line)
        folder = Path(told["folder"])
        try:
            folder.mkdir(parents=True, exist_ok=True)
            log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            message = f"{folder} cannot be written: {error.strerror}. Choose another with --out"
            print(json.dumps({"state": "failed", "message": message}), file=answers, flush=True)
            continue
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        answer = _one(told, folder)
        print(json.dumps(answer), file=answers, flush=True)
        if answer["state"] == "broken":
            return 1  # a device that has failed once fails in all that follows
    return 0


def _one(told: dict[str, Any], folder: Path) -> dict[str, Any]:
    began = time.time()
    try:  # imported here, so that a broken installation is told as well
        from attncond.errors import ConditioningError
        from attncond.lab.config import Config
        from attncond.lab.folder import Interrupted
        from attncond.lab.timing import first_step
        from attncond.lab.train import train
    except Exception as error:
        traceback.print_exc()
        return {"state": "broken", "message": repr(error)}
    try:
        result = train(
            Config.model_validate_json(told["config"]),
            folder,
            data=None if told["data"] is None else Path(told["data"]),
            resume=told["resume"],
            test=told["test"],
            deadline=told["deadline"],
        )
    except Interrupted as error:
        return {"state": "stopped", "message": str(error)}
    except ConditioningError as error:
        with contextlib.suppress(OSError):  # the disk may be full
            print(f"attncond: {error}", file=sys.stderr, flush=True)
        return {"state": "failed", "message": str(error)}
    except BaseException as error:
        traceback.print_exc()
        return {"state": "broken", "message": f"{error!r}; see {folder / 'log.txt'}"}
    return {"state": result.status, "message": "", "first_step": first_step(began)}


def _follow(parent: int) -> None:
    """Stop, with a checkpoint if that is soon done, when the process that gives the jobs is gone.

    It was killed, maybe. A worker that lived on would keep the device busy.
    """
    while os.getppid() == parent:
        time.sleep(PATIENCE)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SECONDS_TO_SAVE)
    if os.getpgrp() == os.getpid():  # with the processes that it has started
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(work())
