"""The span of tokens, the rank that follows, and what a head can do without effect."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_heads import heads
from hypothesis import given, settings
from spectra import gaussian

from attncond.head_inputs import Inputs
from attncond.rank import gauge, reduce_tokens, wide_rank

props = settings(derandomize=True, deadline=None, max_examples=150)


@pytest.mark.parametrize(
    ("x", "rank", "centred"),
    [
        (gaussian(4, 7), 4, 3),  # as many as tokens: some combination of channels is constant
        (gaussian(7, 4), 4, 4),
        (torch.cat([gaussian(7, 3), torch.ones(7, 1)], 1), 4, 3),
        (gaussian(7, 2) @ gaussian(2, 9, seed=1), 2, 2),
        (torch.ones(5, 3).double(), 1, 0),
        (gaussian(1, 3), 1, 0),
    ],
)
def test_the_span_of_tokens(x, rank, centred) -> None:
    tokens = reduce_tokens(x.double(), 1e-13)
    assert (tokens.rank, tokens.centred) == (rank, centred)
    torch.testing.assert_close(tokens.left @ tokens.basis.mT, x.double())
    torch.testing.assert_close(tokens.basis.mT @ tokens.basis, torch.eye(rank).double())
    if centred < rank:
        torch.testing.assert_close(tokens.left @ tokens.ones, torch.ones(len(x), 1).double())


@props
@given(heads(stacked=False))
def test_what_has_no_effect_has_none(case: Any) -> None:
    inputs, details = case
    problem = Inputs.of(*inputs, **details).distinct()
    jacobian, bound = problem.jacobian()
    tokens = [reduce_tokens(x, problem.rtol) for x in (problem.x_q, problem.x_kv)]
    null = gauge(problem.w_q, problem.w_k, problem.bias_q, (tokens[0], tokens[1]))
    if null is not None:
        matrix = jacobian.dense()
        assert float((matrix[:, : len(null)] @ null).abs().max()) <= 1e-9 * float(matrix.norm())
    if bound.null is not None:
        assert bound.rank == jacobian.shape[1] - bound.null.shape[1]


def test_the_rank_of_a_query_bias() -> None:
    free, fixed = reduce_tokens(gaussian(30, 6), 1e-13), gaussian(30, 6)
    fixed[:, 0] = 1
    constant = reduce_tokens(fixed, 1e-13)
    plain = 3 * 6 * 2 - 4
    assert wide_rank(30, 2, 2, (free, free), biased=False) == plain
    # The bias ties d of the d² turns of W_Q against W_K, unless the tokens can take it in.
    assert wide_rank(30, 2, 2, (free, free), biased=True) == plain + 2
    assert wide_rank(30, 2, 2, (constant, constant), biased=False) == plain - 2
    assert wide_rank(30, 2, 2, (constant, constant), biased=True) == plain - 2
