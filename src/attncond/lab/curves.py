"""A Monitor's record as the papers draw it: one value for each step, averaged over the layers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attncond.errors import DiagnosisError
from attncond.monitor.history import History, Record

__all__ = ["OFF", "Curves", "is_ratio"]

OFF = "the Monitor was off (watch.every = 0), or has written nothing yet"
_SPECTRUM = ("sigma_max", "sigma_min", "kappa")
COLUMNS = (
    *(f"{raw}{role}_{name}" for raw in ("raw_", "") for role in "qkv" for name in _SPECTRUM),
    *("entropy", "saturation", "token_stable_rank", "output_kappa"),
    *("jacobian_kappa", "jacobian_paper_bound", "jacobian_certificate"),
)


def is_ratio(column: str) -> bool:
    """Whether a column is a condition number or a bound on one, which is drawn by its logarithm.

    Of those the geometric mean is taken: the arithmetic one of square random matrices does not even
    exist, and what it gives for a few layers is the worst layer.
    """
    return column.endswith(("_kappa", "_bound", "_certificate"))


@dataclass(frozen=True)
class Curves:
    """Averages over the layers (over heads as well, where the Monitor took them) by step."""

    steps: tuple[int, ...] = ()
    values: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)  # infinite or NaN, by column
    layers: int = 0
    by_head: bool = False
    trouble: str = ""

    @classmethod
    def read(cls, path: Path) -> Curves:
        """From the Monitor's file; what is wrong with it is told in ``trouble``."""
        if not path.exists():
            return cls(trouble=OFF)
        try:
            return cls.of(History.read(path))
        except (DiagnosisError, OSError) as error:
            return cls(trouble=str(error))

    @classmethod
    def of(cls, history: History) -> Curves:
        """Average each record."""
        by_head = any(
            row.head is not None and "q_kappa" in row.values for r in history for row in r.rows
        )
        values: dict[str, list[float | None]] = {}
        left_out: dict[str, int] = {}
        for name in COLUMNS:
            column = []
            for record in history:
                found = list(_column(record, name, by_head))
                finite = [v for v in found if math.isfinite(v) and (v > 0 or not is_ratio(name))]
                if len(finite) < len(found):
                    left_out[name] = left_out.get(name, 0) + len(found) - len(finite)
                column.append(_average(name, finite))
            if any(value is not None for value in column):
                values[name] = column
        layers = max((len({row.layer for row in record.rows}) for record in history), default=0)
        steps = tuple(record.step for record in history)
        kept = {name: tuple(column) for name, column in values.items()}
        return cls(steps, kept, left_out, layers, by_head)

    def first(self, column: str) -> float | None:
        """The value before training."""
        found = self.values.get(column)
        return found[0] if found and self.steps[0] == 0 else None

    def last(self, column: str) -> float | None:
        """The value of the last record; None where it has none, whatever those before it had."""
        found = self.values.get(column)
        return found[-1] if found else None

    def points(self, column: str) -> dict[int, float]:
        """Step -> value, where there is one."""
        pairs = zip(self.steps, self.values.get(column, ()), strict=False)
        return {step: value for step, value in pairs if value is not None}

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with five digits: no eye sees more in a figure."""
        return {
            "steps": list(self.steps),
            "values": {k: [_short(v) for v in vs] for k, vs in self.values.items()},
            "left_out": dict(self.left_out),
            "layers": self.layers,
            "by_head": self.by_head,
            "trouble": self.trouble,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Curves:
        """Undo :meth:`to_dict`."""
        return cls(
            tuple(data["steps"]),
            {name: tuple(values) for name, values in data["values"].items()},
            dict(data["left_out"]),
            int(data["layers"]),
            bool(data["by_head"]),
            str(data["trouble"]),
        )


def _column(record: Record, name: str, by_head: bool) -> Iterable[float]:
    for row in record.rows:
        value = row.values.get(name)
        if name.startswith("jacobian_") and row.values.get("jacobian_unresolved"):
            value = math.inf  # the worst head is not among those that are known
        # Tokens are of a whole attention; all else is of heads, where there are rows of heads.
        whole = not by_head or name.startswith("token_")
        if value is not None and (row.head is None) == whole:
            yield value


def _average(name: str, values: list[float]) -> float | None:
    if not values:
        return None
    return statistics.geometric_mean(values) if is_ratio(name) else statistics.fmean(values)


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")
