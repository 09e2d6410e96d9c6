"""Several runs side by side: worker processes that share a device and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch

from attncond.lab.timing import Starts
from attncond.lab.worker import SECONDS_TO_SAVE

__all__ = ["Pool"]

SECONDS_TO_STOP = 120.0  # after Ctrl-C: for a checkpoint, and the evaluation before it
_CUT = "the same command goes on from its last checkpoint, if it has one"


class _Run(Protocol):
    @property
    def folder(self) -> Path: ...

    @property
    def kind(self) -> tuple[Hashable, Hashable]: ...


Run = TypeVar("Run", bound=_Run)


class Pool(Generic[Run]):
    """Hands runs to ``jobs`` workers until none is left.

    A worker gets a run of the kind that it had before, if there is one, because that is compiled
    already; then one of its architecture; workers spread over the kinds first. Across processes,
    torch.compile's cache on disk serves (TORCHINDUCTOR_CACHE_DIR says where, if not in /tmp).

    Args:
        runs: What to do.
        jobs: How many at a time.
        tell: A run as what ``attncond.lab.worker`` reads.
        ended: Called with each run, its state and a message, as they end.
        deadline: Runs stop by themselves then. A worker that has not stopped after half of
            :data:`SECONDS_TO_SAVE` is asked to, and after all of them it is killed; no checkpoint
            suffers by that.
        starts: What is known of how long runs take to their first step. None is begun that would
            not reach it before the deadline.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        jobs: int,
        tell: Callable[[Run], dict[str, Any]],
        ended: Callable[[Run, str, str], None],
        deadline: float | None = None,
        starts: Starts | None = None,
    ) -> None:
        self.waiting = list(runs)
        self.jobs = min(jobs, len(runs))
        self.tell, self.ended, self.deadline = tell, ended, deadline
        self.starts = starts or Starts()
        self.stopping = False
        self._hurried: float | None = None  # when workers were asked to stop after the deadline
        self._lock = threading.Lock()
        self._busy: dict[int, Run] = {}
        self._workers: dict[int, subprocess.Popen[str]] = {}

    def run(self) -> None:
        """Return when everything has ended.

        Raises:
            KeyboardInterrupt: Ctrl-C; the runs under way have written their checkpoints by then.
        """
        # Not by Thread.join: one that Ctrl-C interrupts takes its thread for ended (Python < 3.13).
        ends = [threading.Event() for _ in range(self.jobs)]
        try:
            for number, end in enumerate(ends):
                threading.Thread(target=self._serve, args=(number, end)).start()
            for end in ends:
                while not end.wait(0.2):  # Ctrl-C is heard in between
                    self._hurry()
        except KeyboardInterrupt:
            try:
                self._stop()
                last = time.monotonic() + SECONDS_TO_STOP
                for end in ends:
                    end.wait(max(0.0, last - time.monotonic()))
            finally:  # a second Ctrl-C, too
                self._each(_kill)
            raise

    def _stop(self) -> None:
        with self._lock:
            self.stopping = True
        self._each(subprocess.Popen.terminate)

    def _hurry(self) -> None:
        """End the workers that the deadline has not ended."""
        now, half = time.monotonic(), SECONDS_TO_SAVE / 2
        if self._hurried is not None:
            if now > self._hurried + half:
                self._each(_kill)
        elif self.deadline is not None and time.time() > self.deadline + half:
            self._hurried = now
            self._each(subprocess.Popen.terminate)

    def _each(self, what: Callable[[subprocess.Popen[str]], None]) -> None:
        for worker in list(self._workers.values()):
            if worker.poll() is None:
                what(worker)

    def _serve(self, number: int, end: threading.Event) -> None:
        try:
            self._all(number)
        finally:
            end.set()

    def _all(self, number: int) -> None:
        last: Run | None = None
        while (run := self._next(number, last)) is not None:
            state, message = self._do(number, run, last)
            last = run
            with self._lock:
                del self._busy[number]
                self.ended(run, state, message)
        worker = self._workers.get(number)
        if worker is not None and worker.stdin is not None:
            with contextlib.suppress(OSError):  # it is gone already
                worker.stdin.close()  # no more: it leaves
            worker.wait()

    def _next(self, number: int, last: Run | None) -> Run | None:
        with self._lock:
            if self.stopping or not self.waiting:
                return None
            many = Counter(run.kind for run in self.waiting)
            taken = {run.kind for run in self._busy.values()}
            architectures = {architecture for architecture, _ in taken}

            def worth(run: Run) -> tuple[bool, bool, bool, int]:
                if last is None:
                    known, near = False, run.kind[0] not in architectures
                else:
                    known, near = run.kind == last.kind, run.kind[0] == last.kind[0]
                return known, run.kind not in taken, near, many[run.kind]

            found = max(self.waiting, key=worth)
            if not self.starts.worth(self.deadline, compiled=_same(found, last)):
                return None
            self.waiting.remove(found)
            self._busy[number] = found
            return found

    def _do(self, number: int, run: Run, last: Run | None) -> tuple[str, str]:
        began, worker = time.time(), self._workers.get(number)
        if worker is None or worker.poll() is not None:
            worker, last = self._start(number), None
            self._workers[number] = worker
            if self.stopping:  # it came too late for the signal that the others got
                worker.terminate()
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            worker.stdin.write(json.dumps(self.tell(run)) + "\n")
            worker.stdin.flush()
            answer = worker.stdout.readline()
        except (BrokenPipeError, OSError):
            answer = ""
        if answer.endswith("\n"):  # else it was killed before the end of what it had to say
            told = json.loads(answer)
            state = "failed" if told["state"] == "broken" else told["state"]
            if told["state"] == "broken":
                worker.wait()
            if told.get("first_step"):
                with self._lock:
                    self.starts.add(told["first_step"] - began, compiled=_same(run, last))
            return str(state), str(told["message"])
        code = worker.wait()
        if self.stopping:
            return "stopped", f"ended before it could save; {_CUT}"
        if self._hurried is not None:
            return "stopped", f"ended by force after the time limit; {_CUT}"
        killed = f" ({signal.strsignal(-code)})" if code < 0 else ""
        log = run.folder / "log.txt"
        return "failed", f"its process ended with code {code}{killed}; see {log}; {_CUT}"

    def _start(self, number: int) -> subprocess.Popen[str]:
        environment = dict(os.environ)
        cores = str(max(1, (os.cpu_count() or 1) // self.jobs))
        environment.setdefault("OMP_NUM_THREADS", cores)
        environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", cores)
        environment["ATTNCOND_LAB_JOBS"] = str(self.jobs)
        if os.name == "posix":  # elsewhere another process may stand between us and a worker
            environment["ATTNCOND_LAB_PARENT"] = str(os.getpid())
        environment["ATTNCOND_LAB_COMMAND"] = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
        gpus = torch.cuda.device_count()
        if gpus > 1 and "CUDA_VISIBLE_DEVICES" not in environment:
            environment["CUDA_VISIBLE_DEVICES"] = str(number % gpus)
        return subprocess.Popen(
            [sys.executable, "-m", "attncond.lab.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,  # the terminal's Ctrl-C comes to us alone
        )


def _same(run: _Run, last: _Run | None) -> bool:
    """Whether a worker has compiled for the one what the other needs."""
    return last is not None and run.kind == last.kind


def _kill(worker: subprocess.Popen[str]) -> None:
    """With the processes that it has started: they hold on to its output, and we wait for that."""
    if os.name == "posix":
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has just ended
            os.killpg(worker.pid, signal.SIGKILL)
    else:
        worker.kill()
