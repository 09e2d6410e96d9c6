"""How long a diagnosis may take, and a bar that shows how far it is."""

from __future__ import annotations

import sys
import time
from typing import Any

__all__ = ["Clock", "bar"]


def bar() -> Any:
    """A bar of rich on stderr that is gone when it ends; None where rich is not installed."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        return None
    return Progress(console=Console(stderr=True), transient=True)


class Clock:
    """Counts steps and seconds; ``spent`` once the budget is used up."""

    def __init__(self, budget: float | None, progress: bool | None) -> None:
        self.budget = budget
        self.start = time.monotonic()
        self._bar = bar() if (sys.stderr.isatty() if progress is None else progress) else None

    @property
    def spent(self) -> bool:
        """Whether nothing new should be started."""
        return self.budget is not None and time.monotonic() - self.start > self.budget

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self.start

    def begin(self, what: str, total: int) -> None:
        """A new stage of so many steps."""
        if self._bar is not None:
            self._task = self._bar.add_task(what, total=total)

    def step(self) -> None:
        """One of them is done."""
        if self._bar is not None:
            self._bar.advance(self._task)

    def __enter__(self) -> Clock:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
