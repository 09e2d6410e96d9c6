"""When a run has to stop, whether it is worth beginning, and how long its steps take."""

from __future__ import annotations

import math
import os
import signal
import statistics
import threading
import time
from types import FrameType
from typing import Any, ClassVar

from attncond.lab.folder import Interrupted

__all__ = ["WARM_UP", "Starts", "Stop", "Stopwatch", "first_step", "heard"]

WARM_UP = 8
"""The first steps of a process: compiling, recording CUDA graphs, first allocations."""
SECONDS_TO_BEGIN = 4.0  # after the deadline, for the first step; then there is nothing to save


class Stopwatch:
    """Milliseconds of a step, from intervals between points where the host waits anyway.

    The first :data:`WARM_UP` steps of a process are an interval of their own, ``warm_up``, which
    counts neither in the milliseconds nor, beyond what so many steps take, in the seconds.
    """

    def __init__(self, laps: list[float] | None = None, seconds: float = 0.0) -> None:
        self.laps = list(laps or ())  # milliseconds of a step, one for each interval
        self.before = seconds  # of the processes that worked on the run before this one
        self.warm_up: float | None = None  # seconds
        self.last = math.nan  # milliseconds of a step in the last interval
        self._warm_steps = 0
        self.began = self._mark = time.perf_counter()

    def go(self) -> None:
        """An interval begins: what came since the last one was no training."""
        self._mark = time.perf_counter()

    def lap(self, steps: int) -> None:
        """An interval of so many steps ends, the device having finished them."""
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        self.last = 1000 * seconds / max(steps, 1)
        if self.warm_up is None:
            self.warm_up, self._warm_steps = seconds, steps
        elif steps:
            self.laps.append(self.last)

    @property
    def milliseconds(self) -> float | None:
        """The median over intervals; None for a run that ended in its warm-up."""
        return statistics.median(self.laps) if self.laps else None

    @property
    def seconds(self) -> float:
        """All of the run so far: training, evaluation, checkpoints, without the warm-up's extra."""
        extra = self.warm_up or 0.0
        if self.milliseconds is not None:
            extra = max(0.0, extra - self._warm_steps * self.milliseconds / 1000)
        return self.before + time.perf_counter() - self.began - extra


def heard() -> list[int]:
    """The signals by which a run is asked to stop; what nohup has switched off stays so."""
    names = ("SIGINT", "SIGTERM", "SIGHUP")  # the last: its terminal was closed
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    return [n for n in numbers if n == signal.SIGINT or signal.getsignal(n) != signal.SIG_IGN]


class Stop:
    """Asks a run to end after its current step: Ctrl-C, SIGTERM, SIGHUP, or the time is up.

    A signal in the middle of a step would leave half of the weights updated. A second one ends the
    run at once. So does the first, or the deadline, before any step is made: compiling may take
    minutes, and there is nothing to save. (Several processes stop together, after a step.)
    """

    latest: ClassVar[float | None] = None  # when this process last made a first step

    def __init__(self, deadline: float | None = None) -> None:
        self.deadline = deadline  # in the seconds of time.time()
        self.signal: int | None = None
        self._stepped = int(os.environ.get("WORLD_SIZE", "1")) > 1
        self._handlers: dict[int, Any] = {}
        self._timer: threading.Timer | None = None

    @property
    def reason(self) -> str | None:
        """Why to stop now; None: go on. To be asked after each step, never before the first."""
        if not self._stepped:
            self._stepped, Stop.latest = True, time.time()
        return self._reason()

    def _reason(self) -> str | None:
        if self.deadline is not None and time.time() >= self.deadline:
            return "time limit"
        if self.signal is not None:
            return "Ctrl-C" if self.signal == signal.SIGINT else signal.Signals(self.signal).name
        return None

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for number in heard():
                self._handlers[number] = signal.signal(number, self._note)
            if self.deadline is not None and not self._stepped and os.name == "posix":
                left = max(0.0, self.deadline - time.time()) + SECONDS_TO_BEGIN
                self._timer = threading.Timer(min(left, threading.TIMEOUT_MAX), self._expire)
                self._timer.daemon = True
                self._timer.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()
        if isinstance(error, KeyboardInterrupt) and not self._stepped and (why := self._reason()):
            raise Interrupted(why, f"{why} before its first step") from error

    def _expire(self) -> None:
        main = threading.main_thread().ident
        if not self._stepped and main is not None:
            signal.pthread_kill(main, signal.SIGTERM)  # which is told as the time limit

    def _note(self, number: int, frame: FrameType | None) -> None:
        again, self.signal = self.signal is not None, number
        if again or not self._stepped:
            raise KeyboardInterrupt


def first_step(since: float) -> float | None:
    """When the run that this process began at ``since`` had made a step; None: it made none."""
    return Stop.latest if Stop.latest is not None and Stop.latest >= since else None


class Starts:
    """Whether a run is worth beginning, by how long those before needed until their first step.

    It is if more time is left than the median of them needed. A model that the process has compiled
    already starts in seconds, another in a minute or two: they count apart. The first of a kind is
    always begun.
    """

    def __init__(self) -> None:
        self._seconds: dict[bool, list[float]] = {True: [], False: []}

    def add(self, seconds: float, compiled: bool) -> None:
        """A run needed so long."""
        self._seconds[compiled].append(seconds)

    def worth(self, deadline: float | None, compiled: bool) -> bool:
        """Whether a run that begins now has a chance to make a step before the deadline."""
        needed = statistics.median(self._seconds[compiled] or [0.0])
        return deadline is None or deadline - time.time() > needed
