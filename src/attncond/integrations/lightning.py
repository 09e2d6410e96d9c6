"""A Monitor in Lightning's Trainer, of ``lightning`` or of ``pytorch_lightning``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from attncond.monitor import Monitor

__all__ = ["MonitorCallback"]

if TYPE_CHECKING:
    Callback: Any
else:

    def _library() -> Any:
        # Both may be installed; hooks are called by name, so that either's callback serves.
        names = ("lightning.pytorch", "pytorch_lightning")
        for name in sorted(names, key=lambda n: n not in sys.modules):
            try:
                return importlib.import_module(name)
            except ModuleNotFoundError as error:
                missing = error
        raise ImportError("this callback needs lightning: pip install lightning") from missing

    Callback = _library().Callback


class MonitorCallback(Callback):  # type: ignore[misc]
    """Watch the attention of a LightningModule in training.

    Steps are the Trainer's ``global_step``; curves go to all of its loggers. A run that is resumed
    goes on with its file. The last step is measured whatever ``every`` says.

    Args:
        options: Those of :class:`attncond.Monitor`: ``every``, ``log``, ``batch``, ...

    ``callback.monitor`` is the Monitor, once training has begun::

        callback = MonitorCallback(every=100)
        Trainer(callbacks=[callback]).fit(module, data)
        callback.monitor.to_html("curves.html")
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.monitor: Monitor | None = None
        self._loss: Tensor | float | None = None
        self._step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Measure the model as it is before the first step, or go on."""

        def report(values: Mapping[str, float], step: int) -> None:
            for logger in trainer.loggers:
                logger.log_metrics(dict(values), step)

        log = self.options.get("log")
        logs = list(log) if isinstance(log, list | tuple) else [] if log is None else [log]
        self._step = trainer.global_step
        options = {"start": self._step, **self.options, "log": [*logs, report]}
        self.monitor = Monitor(pl_module, **options)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Step with the Trainer; batches whose gradients are accumulated do not count."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self._loss = loss if isinstance(loss, Tensor) else None
        if self.monitor is not None and trainer.global_step != self._step:
            self._step = trainer.global_step
            self.monitor.step(step=self._step, loss=self._loss)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Measure the end, and log what is left."""
        if self.monitor is not None:
            self.monitor.measure(loss=self._loss)
            self.monitor.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Log what was measured before things went wrong."""
        if self.monitor is not None:
            self.monitor.close()
