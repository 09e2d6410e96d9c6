"""When a run has to stop, and how long its steps take without waiting for each of them."""

from __future__ import annotations

import math
import signal
import statistics
import threading
import time
from types import FrameType, TracebackType
from typing import Any

__all__ = ["WARM_UP", "Stop", "Stopwatch"]

WARM_UP = 8
"""The first steps of a process: compiling, recording CUDA graphs, first allocations."""


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


class Stop:
    """Asks a run to end after its current step: Ctrl-C, SIGTERM, or the time is up.

    A signal in the middle of a step would leave half of the weights updated. A second Ctrl-C ends
    the process at once.
    """

    def __init__(self, deadline: float | None = None) -> None:
        self.deadline = deadline  # in the seconds of time.time()
        self.signal: int | None = None
        self._handlers: dict[int, Any] = {}

    @property
    def reason(self) -> str | None:
        """Why to stop now; None: go on."""
        if self.signal is not None:
            return "Ctrl-C" if self.signal == signal.SIGINT else "SIGTERM"
        if self.deadline is not None and time.time() >= self.deadline:
            return "time limit"
        return None

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
