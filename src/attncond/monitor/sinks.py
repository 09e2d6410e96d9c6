"""Where a Monitor's numbers go: TensorBoard, any logger, a function of yours."""

from __future__ import annotations

import logging
import math
import os
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from attncond.monitor.history import Record

__all__ = ["Log", "Sink", "scalars", "sink_of"]


class _Scalars(Protocol):
    """What TensorBoard's SummaryWriter is used for."""

    def add_scalar(self, tag: str, scalar_value: Any, global_step: Any = None) -> Any:
        """One number."""


class _Metrics(Protocol):
    """What Lightning's loggers are used for."""

    def log_metrics(self, metrics: Any, step: Any = None) -> Any:
        """Several numbers by name."""


Sink = Callable[[Mapping[str, float], int], Any]
Log = Sink | _Scalars | _Metrics | logging.Logger | str | os.PathLike[str]

_SPECTRUM = [f"{role}_{name}" for role in "qkv" for name in ("kappa", "sigma_max", "sigma_min")]
_LOGGED = (
    *_SPECTRUM,
    *("entropy", "saturation", "attention_sigma_2", "token_stable_rank", "jacobian_kappa"),
)


def scalars(record: Record) -> dict[str, float]:
    """The curves of a record: ``attncond.q_kappa/blocks.0.attn`` and so on, of whole attentions.

    Of stored weights only where they differ from those that the forward pass uses.
    """
    found: dict[str, float] = {}
    rows = [row for row in record.rows if row.head is None]
    paths = Counter(row.path for row in rows)
    for row in rows:
        name = row.path or "model"
        name += f"#{row.layer}" if paths[row.path] > 1 else ""  # two attentions in one module
        for column in _LOGGED:
            value, raw = row.values.get(column), row.values.get(f"raw_{column}")
            if value is None:
                continue
            found[f"attncond.{column}/{name}"] = value
            if column in _SPECTRUM and raw is not None and raw != value and not math.isnan(raw):
                found[f"attncond.raw_{column}/{name}"] = raw
    return found


def sink_of(log: Any) -> Sink:
    """One function for each of the things that ``log=`` may be, but a file."""
    if isinstance(log, logging.Logger):
        return lambda values, step: log.info("step %d: %s", step, _line(values))
    if callable(getattr(log, "add_scalar", None)):

        def write(values: Mapping[str, float], step: int) -> None:
            for name, value in values.items():
                log.add_scalar(name, value, step)

        return write
    if callable(getattr(log, "log_metrics", None)):
        return lambda values, step: log.log_metrics(dict(values), step)
    if callable(log):
        found: Sink = log
        return found
    raise TypeError(
        "log must be a SummaryWriter, a logger, a path, a function of (values, step), or a list of "
        f"them, not {type(log).__name__}"
    )


def _line(values: Mapping[str, float]) -> str:
    """κ of the roles over layers, for people: the median and the worst."""
    parts = []
    for role in "qkv":
        found: Sequence[float] = [
            v for k, v in values.items() if k.startswith(f"attncond.{role}_kappa/")
        ]
        if found:
            worst = max(found, key=lambda v: math.inf if math.isnan(v) else v)
            middle = statistics.median(found)
            parts.append(f"κ(W_{role.upper()}) median {middle:.3g} worst {worst:.3g}")
    return ", ".join(parts) or "nothing measured"
