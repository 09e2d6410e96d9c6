"""What a run shows while it trains: a bar on a terminal, plain lines elsewhere, TensorBoard."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attncond.diagnose.progress import bar

__all__ = ["Progress", "tensorboard"]


class Progress:
    """One run's lines, each with the run's name, and its bar where there is a terminal and rich."""

    def __init__(self, name: str, total: int, shown: bool) -> None:
        self.name, self.shown = name, shown
        self._bar = bar() if shown and sys.stderr.isatty() else None
        if self._bar is not None:
            from rich.markup import escape

            self._label = escape(name)
            self._task = self._bar.add_task(self._label, total=total)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def at(self, step: int, loss: float) -> None:
        """How far it is."""
        if self._bar is not None:
            about = f"{self._label}  loss {loss:.3f}"
            self._bar.update(self._task, completed=step, description=about)

    def line(self, text: str) -> None:
        """Something worth a line of its own."""
        if self._bar is not None:
            self._bar.console.print(f"{self.name}: {text}", highlight=False, markup=False)
        elif self.shown:
            print(f"{self.name}: {text}", file=sys.stderr, flush=True)

    def evaluation(self, epochs: int, row: Mapping[str, Any]) -> None:
        """The line of an evaluation."""
        parts = [f"epoch {row['epoch']}/{epochs}", f"loss {row['train_loss']:.4f}"]
        if row["validation_accuracy"] is not None:
            parts.append(f"validation {row['validation_accuracy']:.2f}%")
        parts.append(f"{row['images_per_second']:,.0f} images/s")
        self.line(", ".join(parts))


def tensorboard(folder: Path, step: int) -> Any:
    """A SummaryWriter that goes on after ``step``; None where TensorBoard is not installed.

    What a killed process has written beyond it is not shown: without a checkpoint, all it wrote.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=step + 1 if step else 0)
