"""Weights as they are at one step, copied off the device without holding it up, and their spectra.

Exact singular values of a ViT-B's 36 projections take an eigensolver seconds, on a GPU too, where
they would also be in the way of the training. The copy is what has to happen between two optimizer
steps; it takes milliseconds, and the host needs not even wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attncond.corrections import check_calibrated, effective, full, records
from attncond.diagnose import measure
from attncond.monitor.history import Row
from attncond.sites import Projection, Site

__all__ = ["Snapshot", "Stage", "measured"]

Numbers = dict[str, float | None]
_NAMES = ("sigma_max", "sigma_min", "kappa", "stable_rank")


@dataclass(frozen=True, eq=False)
class Weight:
    """One projection as it was: its stored values, and those that the forward pass used."""

    layer: int
    site: Site
    projection: Projection
    raw: Tensor
    effective: Tensor  # the same tensor where nothing is conditioned


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Copies in the host's memory; those from a GPU are there once ``events`` have happened."""

    weights: list[Weight]
    loss: Tensor | float | None
    events: list[torch.cuda.Event]

    def wait(self) -> None:
        """Until the copies are there."""
        for event in self.events:
            event.synchronize()


class Stage:
    """Copies tensors to the host. Memory is kept: pinning it anew would stall a GPU each time."""

    def __init__(self, keep: bool = True) -> None:
        self._keep = keep  # False: only help the others to gather what is sharded
        self._pinned: list[Tensor] = []
        self._used = 0

    @torch.no_grad()
    def take(
        self, sites: Sequence[tuple[int, Site]], roles: str, loss: Tensor | float | None
    ) -> Snapshot:
        """Copy what is asked for, as it is in the order of the current stream.

        The last snapshot's memory is used again: it must have been dealt with.
        """
        self._used = 0
        devices: set[torch.device] = set()
        seen: dict[int, Tensor] = {}
        made: dict[tuple[int, int], Tensor] = {}
        weights = []
        for layer, site in sites:
            for p in site.projections:
                if p.role not in roles:
                    continue
                value = p.raw.detach()
                key = id(p.raw)  # a fused or tied parameter is copied once
                if key not in seen:
                    value = full(value)
                    devices.add(value.device)
                    seen[key] = self._copy(value)
                used = seen[key]
                if p.name in records(p.owner):
                    owner = (key, id(p.owner))
                    check_calibrated(p.owner)
                    if owner not in made:
                        made[owner] = self._copy(effective(p.owner, p.name, full(value)))
                    used = made[owner]
                weights.append(Weight(layer, site, p, seen[key], used))
        if isinstance(loss, Tensor):
            if loss.numel() != 1:
                raise ValueError(f"loss must be one number, not a tensor of {tuple(loss.shape)}")
            loss = full(loss.detach()).reshape(())
            devices.add(loss.device)
            loss = self._copy(loss)
        events = [_event(device) for device in devices if device.type == "cuda"]
        return Snapshot(weights, loss, events)

    def _copy(self, value: Tensor) -> Tensor:
        if not self._keep:
            return torch.empty(0, device="cpu")
        if value.device.type != "cuda":
            return value.to("cpu", copy=True)
        index, self._used = self._used, self._used + 1
        if index == len(self._pinned):
            self._pinned.append(torch.empty(0, device="cpu"))
        host = self._pinned[index]
        if host.shape != value.shape or host.dtype != value.dtype or not host.is_pinned():
            host = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
            self._pinned[index] = host
        return host.copy_(value, non_blocking=True)


def _event(device: torch.device) -> torch.cuda.Event:
    """What happens when all that is queued on a device so far is done."""
    event = torch.cuda.Event(blocking=True)  # waiting for it must not take a core
    event.record(torch.cuda.current_stream(device))
    return event


@torch.no_grad()
def measured(weights: Sequence[Weight], heads: bool) -> tuple[list[Row], list[str]]:
    """Exact spectra of all of them, and what went wrong: NaN values, by name.

    Nothing here touches a setting of the process: training goes on in another thread.
    """
    cache: dict[Any, dict[int | None, Numbers]] = {}
    table: dict[tuple[int, int | None], Numbers] = {}
    paths: dict[int, str] = {}
    troubles: list[str] = []
    for weight in weights:
        p, site = weight.projection, weight.site
        paths[weight.layer] = site.path
        wanted = [None, *range(site.heads)] if heads else [None]
        for prefix, tensor in (("raw_", weight.raw), ("", weight.effective)):
            # Tied weights are solved once, as are those that nothing conditions.
            key = (id(tensor), p.axis, p.rows.numpy().tobytes(), tuple(p.rows.shape), site.heads)
            if key not in cache:
                cache[key], trouble = _spectra(p, tensor, wanted)
                if trouble:
                    name = f"W_{p.role.upper()} of {site.path or 'the model'}"
                    troubles.append(f"{name} {trouble}")
            for head in wanted:
                row = table.setdefault((weight.layer, head), {})
                row |= {f"{prefix}{p.role}_{k}": v for k, v in cache[key][head].items()}
    rows = [Row(layer, paths[layer], head, values) for (layer, head), values in table.items()]
    return rows, troubles


def _spectra(
    p: Projection, tensor: Tensor, wanted: Sequence[int | None]
) -> tuple[dict[int | None, Numbers], str]:
    matrix = p.matrix(tensor)
    try:
        whole = measure.singular_values(matrix.flatten(0, 1))
        split = len(wanted) > 1 and p.heads > 1
        parts = measure.singular_values(matrix) if split else whole[None]
    except (RuntimeError, MemoryError) as error:  # no convergence, no memory
        return {h: dict.fromkeys(_NAMES, math.nan) for h in wanted}, f"cannot be solved: {error}"
    found: dict[int | None, Numbers] = {}
    query_heads = max(1, len(wanted) - 1)
    for head in wanted:
        if head is None:
            sigma, shape = whole, (p.heads * p.head_dim, matrix.shape[-1])
        else:  # several query heads may share one of keys and values
            sigma, shape = parts[p.serving(head, query_heads)], (p.head_dim, matrix.shape[-1])
        values = measure.weight(sigma, shape)
        found[head] = {k: v for k, v in values.items() if not isinstance(v, str)}
    return found, "holds NaN or Inf" if math.isnan(float(whole[0])) else ""
