"""A Monitor in the Trainer of transformers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from attncond.monitor import Monitor

__all__ = ["MonitorCallback"]


class MonitorCallback(TrainerCallback):  # type: ignore[misc]
    """Watch the attention of the model that a Trainer trains.

    Steps are the Trainer's: optimizer steps, however many batches they take. A run that is resumed
    goes on with its file. The last step is measured whatever ``every`` says; the loss of a record
    is the last one that the Trainer logged before it.

    Args:
        trainer: Whose ``report_to`` gets the curves, at the steps they are of; None does without.
        options: Those of :class:`attncond.Monitor`: ``every``, ``log``, ``batch``, ...

    ``callback.monitor`` is the Monitor, once training has begun::

        trainer.add_callback(MonitorCallback(trainer, every=100, log="curves.jsonl"))
        trainer.train()
    """

    def __init__(self, trainer: Trainer | None = None, **options: Any) -> None:
        self.trainer = trainer
        self.options = options
        self.monitor: Monitor | None = None
        self._loss: float | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Measure the model as it is before the first step, or go on."""
        options = dict(self.options)
        if self.trainer is not None:
            log = options.get("log")
            logs = list(log) if isinstance(log, list | tuple) else [] if log is None else [log]
            options["log"] = [*logs, self._report]
        self.monitor = Monitor(model, **{"start": state.global_step, **options})

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any
    ) -> None:
        """Remember the loss."""
        self._loss = (logs or {}).get("loss", self._loss)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Step with the Trainer."""
        if self.monitor is not None:
            self.monitor.step(step=state.global_step, loss=self._loss)
            if state.global_step >= state.max_steps:
                self._finish()  # trackers are closed before on_train_end gets here

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log what is left."""
        if self.monitor is not None:
            self._finish()
            self.monitor.close()

    def _finish(self) -> None:
        assert self.monitor is not None
        self.monitor.measure(loss=self._loss)
        self.monitor.flush()

    def _report(self, values: Mapping[str, float], step: int) -> None:
        """Hand the values to what ``report_to`` names; other callbacks would print them all."""
        trainer = self.trainer
        assert trainer is not None
        then = copy.copy(trainer.state)  # trackers take the step from there
        then.global_step = step
        trackers = tuple(INTEGRATION_TO_CALLBACK.values())
        callbacks: list[Any] = trainer.callback_handler.callbacks
        for callback in callbacks:
            if isinstance(callback, trackers):
                callback.on_log(
                    trainer.args, then, trainer.control, logs=dict(values), model=trainer.model
                )
