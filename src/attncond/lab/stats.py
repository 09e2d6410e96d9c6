"""Means, Welch's test and Holm's correction for a handful of seeds; scipy does the arithmetic.

Five seeds say little, and one says nothing about spread: where there is no answer, it is None and
not a number that looks like one.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Difference", "Sample", "difference", "holm", "paired"]


@dataclass(frozen=True)
class Sample:
    """Values of several seeds.

    >>> print(Sample.of([77.68, 77.48, 77.32]))
    77.49 ± 0.18
    """

    n: int
    mean: float | None
    std: float | None  # of the sample, n - 1 in the denominator; None for fewer than two

    @classmethod
    def of(cls, values: Sequence[float]) -> Sample:
        """Of finite values; a run without one must be told of elsewhere."""
        if not all(map(math.isfinite, values)):
            raise ValueError(f"a sample needs finite values, not {list(values)}")
        mean = statistics.fmean(values) if values else None
        return cls(len(values), mean, statistics.stdev(values) if len(values) > 1 else None)

    def __str__(self) -> str:
        if self.mean is None:
            return "–"
        return f"{self.mean:.2f}" + (f" ± {self.std:.2f}" if self.std is not None else "")


@dataclass(frozen=True)
class Difference:
    """How much higher the first mean is; a 95% interval and a p-value where the data allow them."""

    delta: float
    low: float | None = None
    high: float | None = None
    p: float | None = None


def difference(a: Sequence[float], b: Sequence[float]) -> Difference | None:
    """a against b by Welch's t-test: two-sided, without assuming equal variances.

    None without values on either side; no p-value for a single value, or where nothing varies.

    >>> found = difference([77.68, 77.48, 77.32], [75.14, 74.79, 75.11])
    >>> round(found.delta, 2), found.p < 0.001
    (2.48, True)
    """
    if not a or not b:
        return None
    delta = statistics.fmean(a) - statistics.fmean(b)
    if min(len(a), len(b)) < 2 or (_constant(a) and _constant(b)):
        return Difference(delta)
    from scipy import stats

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of seeds that agree to the last digit
        found = stats.ttest_ind(a, b, equal_var=False)
    low, high = found.confidence_interval()
    return Difference(delta, float(low), float(high), float(found.pvalue))


def paired(a: Mapping[int, float], b: Mapping[int, float]) -> Difference | None:
    """The same over the seeds that both have, which share initialisation and order of the data.

    Tables test by Welch, which was settled on before the runs. This one stands beside it in their
    JSON; to show whichever p-value is smaller would be to choose by the outcome.
    """
    seeds = sorted(set(a) & set(b))
    gains = [a[seed] - b[seed] for seed in seeds]
    if not gains:
        return None
    if len(gains) < 2 or _constant(gains):
        return Difference(statistics.fmean(gains))
    from scipy import stats

    found = stats.ttest_1samp(gains, 0.0)
    low, high = found.confidence_interval()
    return Difference(statistics.fmean(gains), float(low), float(high), float(found.pvalue))


def holm(p: Sequence[float | None]) -> list[float | None]:
    """p-values of several variants against one reference, corrected for there being several.

    None stays None and does not count: nothing was tested there.

    >>> holm([0.01, None, 0.04, 0.03])
    [0.03, None, 0.06, 0.06]
    """
    order = sorted((value, place) for place, value in enumerate(p) if value is not None)
    corrected: list[float | None] = [None] * len(p)
    highest = 0.0
    for rank, (value, place) in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - rank) * value))
        corrected[place] = highest
    return corrected


def _constant(values: Sequence[float]) -> bool:
    return max(values) == min(values)
