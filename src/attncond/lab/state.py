"""All that a training remembers from one step to the next, so that it can go on after any."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from attncond.lab import checkpoint, facts
from attncond.lab.average import Average
from attncond.lab.folder import RunFolder
from attncond.lab.timing import Stopwatch

__all__ = ["State"]


@dataclass
class State:
    """A training between two steps. The learning rate and the batches are functions of ``step``."""

    accelerator: Accelerator
    module: nn.Module
    optimizer: torch.optim.Optimizer
    average: Average | None
    step: int = 0
    losses: int = 0  # steps since the last evaluation
    clock: Stopwatch = field(default_factory=Stopwatch)
    peak: int = 0  # bytes, of the processes before this one
    left: int = 0  # bytes that are not of this run

    def __post_init__(self) -> None:
        device = self.accelerator.device
        self.loss_sum = torch.zeros((), device=device)  # over those steps
        self._here = facts.hardware(device, self.accelerator.num_processes)
        self.hardware = self._here  # that steps were timed on

    def add(self, loss: Tensor, parts: int) -> None:
        """Count a loss without waiting for it."""
        self.loss_sum += loss.detach() / parts

    def mean_loss(self) -> float:
        """Over all processes, since the last evaluation. Waits until the device has it."""
        return float(self.accelerator.reduce(self.loss_sum, "mean")) / max(self.losses, 1)

    def forget_losses(self) -> None:
        """A new mean begins."""
        self.loss_sum.zero_()
        self.losses = 0

    def lap(self, steps: int) -> None:
        """Time so many steps; what they took elsewhere, or in other company, is forgotten."""
        if self.hardware != self._here:
            self.hardware, self.peak = self._here, 0
            self.clock.laps.clear()
        self.clock.lap(steps)

    @property
    def memory(self) -> int:
        """The most bytes that were ever in use."""
        return max(self.peak, (facts.peak_memory(self.accelerator.device) or 0) - self.left)

    def save(self, folder: RunFolder) -> None:
        """Write a checkpoint; every process has to call it, the first one writes."""
        tensors = {"model": checkpoint.whole(self.module.state_dict())}
        tensors["optimizer"] = checkpoint.optimizer_state(self.optimizer, self.module)
        if self.average is not None:
            tensors["ema"] = checkpoint.whole(self.average.tensors)
        scaler = self.accelerator.scaler
        plain = {
            "loss_sum": float(self.accelerator.reduce(self.loss_sum, "mean")),
            "losses": self.losses,
            "laps": self.clock.laps,
            "seconds": self.clock.seconds,
            "peak": self.memory,
            "hardware": self.hardware,
            "scaler": None if scaler is None else scaler.state_dict(),
            "random": gather_object([checkpoint.random_state()]),
        }
        if self.accelerator.is_main_process:
            checkpoint.save(folder.checkpoints, self.step, tensors, plain)
        self.accelerator.wait_for_everyone()

    def load(self, folder: RunFolder) -> None:
        """Go on from the newest checkpoint that is whole, if there is one."""
        with self.accelerator.main_process_first():
            saved = checkpoint.newest(folder.checkpoints)
        if saved is None:
            return
        checkpoint.load_model(self.module, saved.tensors["model"])
        checkpoint.load_optimizer(self.optimizer, self.module, saved.tensors["optimizer"])
        if self.average is not None:
            self.average.load(saved.tensors["ema"])
        plain: dict[str, Any] = saved.state
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(plain["scaler"])
        if len(plain["random"]) == self.accelerator.num_processes:  # else they start anew
            checkpoint.load_random(plain["random"][self.accelerator.process_index])
        self.step, self.losses, self.peak = saved.step, plain["losses"], plain["peak"]
        self.loss_sum.fill_(plain["loss_sum"])
        self.clock = Stopwatch(plain["laps"], plain["seconds"])
        self.hardware = plain.get("hardware", self._here)
