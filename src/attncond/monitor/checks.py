"""What a Monitor may measure, and in which process."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from attncond.diagnose.run import choose_sites
from attncond.errors import ConditioningError, DiagnosisError, UnsupportedAttentionError
from attncond.inspection import inspect, unsupported_table
from attncond.sites import Site

__all__ = ["chosen", "is_first_process", "replaced", "sharded"]


def chosen(model: nn.Module, layers: Iterable[int | str] | None) -> list[tuple[int, Site]]:
    """The attentions to measure, numbered as in the plan."""
    plan = inspect(model)
    if not plan.sites:
        unread = f"\n\n{unsupported_table(plan.unsupported)}" if plan.unsupported else ""
        raise UnsupportedAttentionError(
            f"{type(model).__name__} has no attention to monitor.{unread}"
        )
    return choose_sites(plan.sites, layers)


def replaced(model: nn.Module, sites: Sequence[tuple[int, Site]]) -> bool:
    """Whether a module that is measured is no longer one of the model's."""
    there = set(model.modules())
    return any(
        module not in there
        for _, site in sites
        for module in (site.module, *(p.owner for p in site.projections))
    )


def sharded(model: nn.Module, gather: bool, probe: bool) -> bool:
    """Whether weights are sharded; refused where that cannot be helped."""
    if any(p.is_meta for p in model.parameters()):
        raise DiagnosisError("the model is on the meta device and holds no numbers: load weights")
    if not any(isinstance(p, DTensor) for p in model.parameters()):
        return False
    if probe:
        raise ConditioningError("a probe (batch=) cannot run on a model with sharded weights")
    if not gather:
        raise ConditioningError(
            "the model's weights are sharded over processes (FSDP2), so that no process has them "
            "whole. Pass gather=True, make a Monitor in every process, and step all of them."
        )
    return True


def is_first_process() -> bool:
    """Whether it is this process that measures, of all that train together."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    return int(os.environ.get("RANK", "0")) == 0  # torchrun's, before the processes have met
