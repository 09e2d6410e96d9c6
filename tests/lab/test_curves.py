"""A Monitor's record, averaged."""

import math

import pytest

from attncond.lab.curves import Curves, is_ratio
from attncond.monitor.history import History, Record, Row


def record(step, *layers, head=None):
    rows = [Row(i, f"blocks.{i}.attn", head, values) for i, values in enumerate(layers)]
    return Record(step, tuple(rows))


def test_sigmas_are_averaged_and_condition_numbers_by_their_logarithms():
    layers = {"q_sigma_max": 1.0, "q_kappa": 10.0}, {"q_sigma_max": 3.0, "q_kappa": 1000.0}
    curves = Curves.of(History("m", [record(0, *layers), record(5, *layers)]))
    assert curves.points("q_sigma_max") == {0: 2.0, 5: 2.0}
    assert curves.points("q_kappa") == pytest.approx({0: 100.0, 5: 100.0})
    assert (curves.layers, curves.by_head) == (2, False)
    assert curves.first("q_sigma_max") == curves.last("q_sigma_max") == 2.0
    assert curves.points("jacobian_kappa") == {}


def test_what_is_not_finite_is_left_out_and_counted():
    first = record(0, {"q_kappa": 10.0}, {"q_kappa": math.inf})
    second = record(1, {"q_kappa": math.nan}, {"q_kappa": math.inf})
    curves = Curves.of(History("m", [first, second, record(2, {"q_kappa": None})]))
    assert curves.points("q_kappa") == pytest.approx({0: 10.0})
    assert curves.left_out == {"q_kappa": 3}
    assert curves.last("q_kappa") is None  # what was so at the start is not so at the end


def test_a_layer_with_an_unresolved_head_has_no_worst_one():
    known = {"jacobian_kappa": 10.0, "jacobian_certificate": 20.0}
    curves = Curves.of(History("m", [record(0, known, known | {"jacobian_unresolved": 2.0})]))
    assert curves.points("jacobian_kappa") == pytest.approx({0: 10.0})
    assert curves.left_out["jacobian_kappa"] == 1
    every = [known | {"jacobian_unresolved": 1.0}] * 2
    assert Curves.of(History("m", [record(0, *every)])).points("jacobian_kappa") == {}


def test_heads_are_taken_where_the_monitor_took_them():
    rows = (
        Row(0, "a", None, {"q_kappa": 7.0, "token_stable_rank": 3.0}),
        Row(0, "a", 0, {"q_kappa": 2.0}),
        Row(0, "a", 1, {"q_kappa": 8.0}),
    )
    curves = Curves.of(History("m", [Record(0, rows)]))
    assert curves.by_head
    assert curves.points("q_kappa") == pytest.approx({0: 4.0})
    assert curves.points("token_stable_rank") == {0: 3.0}


def test_there_is_no_start_where_nobody_looked():
    curves = Curves.of(History("m", [record(100, {"raw_q_sigma_max": 1.0})]))
    assert curves.first("raw_q_sigma_max") is None


def test_there_and_back():
    curves = Curves.of(History("m", [record(0, {"q_kappa": 1.2345678, "entropy": None})]))
    again = Curves.from_dict(curves.to_dict())
    assert again.points("q_kappa") == {0: 1.2346}
    assert Curves.of(History("m", [])).steps == ()


def test_which_columns_are_ratios():
    assert is_ratio("raw_q_kappa")
    assert is_ratio("jacobian_paper_bound")
    assert not is_ratio("entropy")
