"""Trains runs in children of one process, for tests that kill them; started once, forks often.

Each line of standard input is a job: {"folder", "settings", "kill": null | ["step", n] |
["write", n] | ["rename", n] | ["metrics", n] | ["full", n]}. The answer is the child's exit status:
0; -9 if it killed itself, before step n or in its n-th write; 3 if it could not write, because from
step n on files cannot grow.
"""

import json
import os
import resource
import signal
import sys
import tempfile
import warnings
from pathlib import Path

import torch

torch.set_num_threads(1)

from attncond.lab import checkpoint, train  # noqa: E402
from attncond.lab.checkpoint import CheckpointError  # noqa: E402
from attncond.lab.data import load as load_data  # noqa: E402
from attncond.lab.folder import RunFolder  # noqa: E402
from attncond.lab.progress import tensorboard  # noqa: E402
from attncond.lab.recipe import load  # noqa: E402
from attncond.lab.trained import make  # noqa: E402


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def dying(function, at, after=lambda *args: None):
    """The function, until its ``at``-th call, in which the process dies without a word."""
    calls = 0

    def wrapped(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == at:
            after(*args)
            die()
        return function(*args, **kwargs)

    return wrapped


def once(function, at, before):
    """The function, with something done before its ``at``-th call."""
    calls = 0

    def wrapped(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == at:
            before()
        return function(*args, **kwargs)

    return wrapped


def no_space():
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))


def half(tensors, path):
    """What a write leaves that ends in the middle."""
    real_save(tensors, path)
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)


real_save = checkpoint.save_file


def child(told):
    where, at = told["kill"] or (None, 0)
    if where == "step":
        train.cosine = dying(train.cosine, at)
    elif where == "full":
        train.cosine = once(train.cosine, at, no_space)
    elif where == "write":
        checkpoint.save_file = dying(checkpoint.save_file, at, half)
    elif where == "rename":
        Path.rename = dying(Path.rename, at)
    elif where == "metrics":
        RunFolder.add = dying(RunFolder.add, at)
    config = load("digits").config("smoke", told["variant"], told["seed"], told["settings"])
    warnings.simplefilter("ignore")
    train.train(config, Path(told["folder"]), progress=False)


def main():
    # What a child would otherwise import again and again.
    config = load("digits").config("smoke", "spectral")
    load_data(config.data)
    make(config, 10, 3)
    with tempfile.TemporaryDirectory() as folder:
        if writer := tensorboard(Path(folder), 0):
            writer.close()
    for line in sys.stdin:
        told = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                child(told)
                code = 0
            except CheckpointError as error:
                print(error, file=sys.stderr)
                code = 3
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
