"""Where a Monitor's numbers go: which curves, under which names, by which call."""

import logging
import math

import pytest

from attncond.monitor.history import Record, Row
from attncond.monitor.sinks import scalars, sink_of


def record(*rows):
    return Record(7, rows)


def test_curves_are_of_whole_attentions_and_of_what_was_measured():
    values = {"q_kappa": 2.0, "entropy": 1.5, "q_stable_rank": 9.0, "v_kappa": None}
    found = scalars(record(Row(0, "a.attn", None, values), Row(0, "a.attn", 1, {"q_kappa": 3.0})))
    assert found == {"attncond.q_kappa/a.attn": 2.0, "attncond.entropy/a.attn": 1.5}


def test_stored_weights_have_curves_where_they_differ():
    values = {"q_kappa": 2.0, "raw_q_kappa": 50.0, "k_kappa": 4.0, "raw_k_kappa": 4.0}
    values |= {"v_kappa": math.inf, "raw_v_kappa": math.nan, "raw_q_sigma_max": 1.0}
    assert scalars(record(Row(0, "a", None, values))) == {
        "attncond.q_kappa/a": 2.0,
        "attncond.raw_q_kappa/a": 50.0,
        "attncond.k_kappa/a": 4.0,
        "attncond.v_kappa/a": math.inf,
    }


def test_attentions_of_one_module_are_told_apart():
    rows = [Row(n, path, None, {"q_kappa": n + 1.0}) for n, path in enumerate(["a", "a", ""])]
    assert scalars(record(*rows)) == {
        "attncond.q_kappa/a#0": 1.0,
        "attncond.q_kappa/a#1": 2.0,
        "attncond.q_kappa/model": 3.0,
    }


VALUES = {"attncond.q_kappa/a": 2.0, "attncond.q_kappa/b": 8.0, "attncond.entropy/a": 1.0}


def test_a_writer_gets_numbers_one_by_one():
    class Writer:
        def __init__(self):
            self.seen = []

        def add_scalar(self, tag, value, step):
            self.seen.append((tag, value, step))

        def __call__(self, *_):
            raise AssertionError("a writer is not called")

    writer = Writer()
    sink_of(writer)(VALUES, 7)
    assert writer.seen == [(name, value, 7) for name, value in VALUES.items()]


def test_a_logger_of_metrics_gets_a_dictionary_of_its_own():
    class Metrics:
        def log_metrics(self, metrics, step):
            metrics["epoch"] = step  # as Lightning's loggers do

    given = dict(VALUES)
    sink_of(Metrics())(given, 7)
    assert given == VALUES


def test_a_function_gets_both():
    seen = []
    sink_of(lambda *args: seen.append(args))(VALUES, 7)
    assert seen == [(VALUES, 7)]


def said(values, caplog):
    caplog.clear()
    with caplog.at_level(logging.INFO, "attncond.sinks"):
        sink_of(logging.getLogger("attncond.sinks"))(values, 7)
    return caplog.messages


def test_a_logger_gets_a_line_for_people(caplog):
    values = {**VALUES, "attncond.q_kappa/c": 3.0, "attncond.v_kappa/a": 1234.5678}
    assert said(values, caplog) == [
        "step 7: κ(W_Q) median 3 worst 8, κ(W_V) median 1.23e+03 worst 1.23e+03"
    ]
    assert said({}, caplog) == ["step 7: nothing measured"]
    broken = {"attncond.q_kappa/a": math.nan, "attncond.q_kappa/b": math.inf}
    assert said(broken, caplog)[0].endswith("worst nan")  # worse than any number


@pytest.mark.parametrize("log", [3, None, {"a": 1}], ids=str)
def test_anything_else_is_refused_by_its_type(log):
    name = type(log).__name__
    with pytest.raises(
        TypeError, match=rf"log must be a SummaryWriter, .* list of them, not {name}"
    ):
        sink_of(log)
