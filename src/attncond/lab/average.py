"""A moving average of a model's weights, to be evaluated instead of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from attncond.corrections import like
from attncond.lab.checkpoint import Tensors

__all__ = ["Average"]


class Average:
    """Averages everything in the state dict: weights, and the buffers of conditioning.

    timm's ModelEmaV3 and torch's AveragedModel keep a second model. Tensors alone do as well, are
    what a checkpoint holds, can be sharded by FSDP2, and need no second compilation: to evaluate,
    they change places with the model's.

    The decay grows from 0.1 to ``decay`` over the first steps, min(decay, (1 + t) / (10 + t)), for
    an average over a short training would otherwise be one of random weights.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self.tensors = {k: v.clone() for k, v in _each_once(model).items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """After optimizer step number ``step``, which is 1 for the first one."""
        decay = min(self.decay, (1 + step) / (10 + step))
        pairs = [(_own(self.tensors[k]), _own(v)) for k, v in _each_once(self.model).items()]
        means = [(a, b) for a, b in pairs if a.is_floating_point()]
        get_ema_multi_avg_fn(decay)([a for a, _ in means], [b for _, b in means], step)
        for a, b in pairs:
            if not a.is_floating_point():  # counters
                a.copy_(b)

    def load(self, tensors: Tensors) -> None:
        """Go on from ``whole(average.tensors)``."""
        for name, own in self.tensors.items():
            own.copy_(like(tensors[name], own))

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the average's weights for as long as this lasts."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, own in _each_once(self.model).items():
            held: Tensor = own.clone()
            own.copy_(self.tensors[name])
            self.tensors[name].copy_(held)


def _each_once(model: nn.Module) -> Tensors:
    """The state dict without the second names of shared tensors, which would change places twice.

    That is, back: the model would train on with its average (CoaT's blocks share their encodings).
    """
    named = {id(v): (k, v.detach()) for k, v in reversed(model.state_dict(keep_vars=True).items())}
    return dict(reversed(named.values()))


def _own(tensor: Tensor) -> Tensor:
    """What this process has of a sharded tensor: a mean is taken number by number."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
