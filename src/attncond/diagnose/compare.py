"""Two reports of one model, before and after: what changed, what went away, what is new."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from attncond.diagnose.findings import Finding
from attncond.errors import DiagnosisError
from attncond.files import spelled_out
from attncond.inspection import table

if TYPE_CHECKING:
    from pandas import DataFrame

    from attncond.diagnose.report import Report

__all__ = ["Change", "Comparison", "check_report", "compare"]


@dataclass(frozen=True)
class Change:
    """One number in both reports."""

    layer: int
    path: str
    call: int
    head: int | None
    metric: str
    before: float
    after: float

    @property
    def difference(self) -> float:
        """after − before; 0 where both are the same infinity."""
        return 0.0 if self.before == self.after else self.after - self.before

    @property
    def ratio(self) -> float:
        """after/before; 1 where they are equal, NaN where that means nothing."""
        if self.before == self.after:
            return 1.0
        return self.after / self.before if self.before else math.nan


@dataclass(frozen=True)
class Comparison:
    """What :meth:`Report.compare` found; ``missing`` are rows that only one report has."""

    changes: tuple[Change, ...]
    gone: tuple[Finding, ...]
    new: tuple[Finding, ...]
    missing: tuple[str, ...]

    @property
    def frame(self) -> DataFrame:
        """One row for each number: layer, path, call, head, metric, before, after, difference."""
        from attncond.diagnose.report import pandas_for

        names = ("layer", "path", "call", "head", "metric", "before", "after")
        rows = [{n: getattr(c, n) for n in (*names, "difference", "ratio")} for c in self.changes]
        pandas = pandas_for("comparison.frame", "comparison.changes")
        frame: DataFrame = pandas.DataFrame(rows, columns=[*names, "difference", "ratio"])
        return frame.astype({"head": "Int64"})

    def of(self, metric: str, head: int | None = None) -> tuple[Change, ...]:
        """The changes of one metric, of whole attentions or of one head."""
        return tuple(c for c in self.changes if c.metric == metric and c.head == head)

    def summary(self) -> str:
        """In words: the metrics' medians over whole attentions, and the findings."""
        body = []
        for metric in dict.fromkeys(c.metric for c in self.changes):
            found = self.of(metric)
            if any(c.before != c.after for c in found):
                before, after = (
                    _median([c.before for c in found]),
                    _median([c.after for c in found]),
                )
                body.append((metric, f"{before:.4g}", f"{after:.4g}"))
        lines = [table(("median over attentions", "before", "after"), body)] if body else []
        lines += [f"gone: {f.message}" for f in self.gone]
        lines += [f"new: {f.message}" for f in self.new]
        lines += [f"only in one report: {m}" for m in self.missing[:5]]
        return "\n".join(lines) or "no difference"

    def __str__(self) -> str:
        return self.summary()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; NaN and infinities are strings."""
        plain: dict[str, Any] = spelled_out(asdict(self))
        return plain


def check_report(what: str, given: object) -> None:
    """Say what is wanted where something else than a report was given."""
    from attncond.diagnose.report import Report

    if not isinstance(given, Report):
        raise TypeError(
            f"{what} needs a Report, as attncond.diagnose returns it or Report.from_json reads it, "
            f"not {type(given).__name__}"
        )


def compare(before: Report, after: Report) -> Comparison:
    """Match the rows of two reports by path, run and head."""
    for report in (before, after):
        check_report("compare", report)
    olds, news = ({row.key: row for row in r.rows} for r in (before, after))
    if not olds.keys() & news.keys():
        raise DiagnosisError(
            "the two reports have no attention in common, so there is nothing to compare; are they "
            "of one model, under the same paths?"
        )

    def changes() -> Iterator[Change]:
        for key, old in olds.items():
            if (new := news.get(key)) is None:
                continue
            for metric in old.values:
                a, b = old.number(metric), new.number(metric)
                if a is not None and b is not None:
                    yield Change(old.layer, old.path, old.call, old.head, metric, a, b)

    first, second = ({f.key: f for f in r.findings} for r in (before, after))
    return Comparison(
        tuple(changes()),
        tuple(f for key, f in first.items() if key not in second),
        tuple(f for key, f in second.items() if key not in first),
        tuple(
            f"{path or 'the model'}, run {call}" + ("" if head is None else f", head {head}")
            for _, path, call, head in [k for k in (*olds, *news) if (k in olds) != (k in news)]
        ),
    )


def _median(values: list[float]) -> float:
    known = [v for v in values if not math.isnan(v)]
    return statistics.median(known) if known else math.nan
