"""Leave a model as it was: what a forward pass may change is written down before, and put back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attncond import kernels

__all__ = ["unchanged", "unwrapped"]


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside ``torch.compile``, DDP and DataParallel, whose paths a user knows."""
    while True:
        inner = model._modules.get("_orig_mod")
        if inner is None and isinstance(
            model, nn.DataParallel | nn.parallel.DistributedDataParallel
        ):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Run in eval mode and without compiled code; afterwards everything is as it was before.

    Also after an error or Ctrl-C: classes, attributes, hooks, parameters' flags and gradients,
    buffers and their values, training modes, and the random states of torch, numpy and Python.
    """
    with ExitStack() as stack:
        stack.enter_context(_random_states(model))
        stack.callback(_restorer(model))
        # Compiled code would be traced anew because of what is put into the modules, and again
        # once that is gone.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        # The fused kernels of TransformerEncoderLayer never call its attention.
        fast = torch.backends.mha.get_fastpath_enabled()
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
        torch.backends.mha.set_fastpath_enabled(False)
        # Nor do our own kernels, where heads are conditioned, call torch's attention.
        stack.callback(setattr, kernels, "ENABLED", kernels.ENABLED)
        kernels.ENABLED = False
        for module in model.modules():
            # Not model.eval(): a train() of one's own may merge adapters into the weights.
            module.__dict__["training"] = False
        yield


@contextmanager
def _random_states(model: nn.Module) -> Iterator[None]:
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    python, numbers = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numbers)


def _restorer(model: nn.Module) -> Any:
    modules = [(m, type(m), dict(m.__dict__), _dicts(m)) for m in model.modules()]
    buffers = [(b, _version(b), b.detach().clone()) for b in model.buffers()]
    flags = [(p, p.requires_grad, p.grad) for p in model.parameters()]

    def restore() -> None:
        for module, cls, attributes, dicts in modules:
            if type(module) is not cls:
                module.__class__ = cls
            _put_back(module.__dict__, attributes)
            for found, before in dicts:
                _put_back(found, before)
        with torch.no_grad():
            for buffer, version, value in buffers:
                if version is None or _version(buffer) != version:
                    buffer.copy_(value)
        for parameter, wanted, grad in flags:
            if parameter.requires_grad != wanted:
                parameter.requires_grad_(wanted)
            if parameter.grad is not grad:
                parameter.grad = grad

    return restore


def _dicts(module: nn.Module) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
    """Hooks, parameters, buffers, submodules, and caches that a class keeps in a dictionary."""
    return [(d, dict(d)) for d in module.__dict__.values() if isinstance(d, dict)]


def _put_back(found: dict[Any, Any], before: dict[Any, Any]) -> None:
    if list(found) == list(before) and all(found[k] is v for k, v in before.items()):
        return  # untouched dictionaries keep compiled code's guards valid
    for key in [k for k in found if k not in before]:
        del found[key]
    found.update(before)


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
