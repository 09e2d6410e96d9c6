"""Numbers against scipy's own and against the pilot's, by hand."""

import math

import pytest
from scipy import stats as scipy_stats

from attncond.lab.stats import Sample, difference, holm, paired

BASELINE = [75.14, 74.79, 75.11]
SPECTRAL = [77.68, 77.48, 77.32]


def test_a_sample_by_hand():
    sample = Sample.of([1.0, 2.0, 4.0])
    assert sample.mean == pytest.approx(7 / 3)
    assert sample.std == pytest.approx(math.sqrt((16 + 1 + 25) / 9 / 2))  # n - 1
    assert str(sample) == "2.33 ± 1.53"


def test_small_samples_say_no_more_than_they_know():
    assert Sample.of([75.0]) == Sample(1, 75.0, None)
    assert str(Sample.of([75.0])) == "75.00"
    assert str(Sample.of([])) == "–"
    with pytest.raises(ValueError, match="finite"):
        Sample.of([75.0, math.nan])


def test_welch_is_scipys():
    found = difference(SPECTRAL, BASELINE)
    theirs = scipy_stats.ttest_ind(SPECTRAL, BASELINE, equal_var=False)
    assert found.delta == pytest.approx(sum(SPECTRAL) / 3 - sum(BASELINE) / 3)
    assert found.p == pytest.approx(theirs.pvalue)
    assert (found.low, found.high) == pytest.approx(tuple(theirs.confidence_interval(0.95)))
    assert found.low < found.delta < found.high


def test_welch_by_hand():
    a, b = [1.0, 2.0, 3.0, 4.0], [2.0, 4.0, 6.0]
    t = (2.5 - 4.0) / math.sqrt((5 / 3) / 4 + 4.0 / 3)
    u, v = (5 / 3) / 4, 4.0 / 3
    freedom = (u + v) ** 2 / (u**2 / 3 + v**2 / 2)  # Welch and Satterthwaite
    assert difference(a, b).p == pytest.approx(2 * scipy_stats.t.cdf(t, freedom))


def test_one_seed_has_no_p_value():
    found = difference([77.0], BASELINE)
    assert found.delta == pytest.approx(77.0 - sum(BASELINE) / 3)
    assert (found.p, found.low, found.high) == (None, None, None)
    assert difference([], BASELINE) is None
    assert difference(SPECTRAL, []) is None


def test_where_nothing_varies_there_is_nothing_to_test():
    assert difference([1.0, 1.0], [2.0, 2.0]).p is None
    assert difference([1.0, 1.0, 1.0], [2.0, 2.1, 1.9]).p is not None


def test_paired_takes_the_seeds_that_both_have():
    a, b = {0: 77.0, 1: 78.0, 2: 79.5, 7: 0.0}, {0: 75.0, 1: 75.5, 2: 76.0, 8: 99.0}
    theirs = scipy_stats.ttest_rel([77.0, 78.0, 79.5], [75.0, 75.5, 76.0])
    found = paired(a, b)
    assert found.p == pytest.approx(theirs.pvalue)
    assert found.delta == pytest.approx(8 / 3)
    assert paired({0: 1.0}, {1: 1.0}) is None
    assert paired({0: 1.0}, {0: 3.0}).p is None


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([None, 0.04, None]) == [None, 0.04, None]
    assert holm([]) == []
