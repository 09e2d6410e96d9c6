"""Signal propagation against closed forms, autograd and the constants of arXiv:2410.07799."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attncond import propagation, propagation_study
from attncond.propagation import Stack, forward, generator_of

F64 = torch.float64
PROPERTY = settings(max_examples=40, deadline=None, derandomize=True)
STACKS = propagation_study.STACKS

stacks = st.sampled_from(STACKS)


def draw(stack: Stack, depth: int, t: int, d: int, seed: int):
    generator = generator_of(seed)
    x = propagation.orthonormal_tokens(t, d, generator)
    return propagation.initial_weights(stack, depth, t, d, generator), x


def mean(values) -> float:
    return statistics.fmean(values)


# The pieces


@PROPERTY
@given(st.integers(1, 12), st.integers(0, 8), st.integers(0, 10**6))
def test_tokens_are_orthonormal(t: int, more: int, seed: int) -> None:
    x = propagation.orthonormal_tokens(t, t + more, generator_of(seed))
    torch.testing.assert_close(x @ x.T, torch.eye(t, dtype=F64), atol=1e-12, rtol=0)


@PROPERTY
@given(st.integers(1, 30), st.integers(0, 10**6))
def test_a_random_markov_matrix_is_one(t: int, seed: int) -> None:
    a = propagation.random_markov(t, generator_of(seed))
    assert bool((a > 0).all())
    torch.testing.assert_close(a.sum(1), torch.ones(t, dtype=F64))


def test_the_exponentials_of_the_logits_have_mean_and_variance_one() -> None:
    e = propagation.markov_logits(1500, generator_of(0)).exp()
    assert float(e.mean()) == pytest.approx(1, abs=0.01)
    assert float(e.var()) == pytest.approx(1, abs=0.05)


@PROPERTY
@given(stacks, st.integers(2, 6), st.integers(0, 3), st.integers(0, 10**6))
def test_a_layer_is_what_the_paper_writes(stack: Stack, t: int, more: int, seed: int) -> None:
    d = t + more
    weights, x = draw(stack, 2, t, d, seed)
    for layer, found in enumerate(forward(stack, weights, x)):
        if stack.attention == "A":
            logits = weights.logits[layer]
        else:
            logits = x @ weights.query[layer] @ (x @ weights.key[layer]).T / math.sqrt(d)
        a = logits.exp() / logits.exp().sum(1, keepdim=True)
        if stack.remove_gap:
            a = a - torch.ones(t, t, dtype=F64) / t
        expected = a @ x @ weights.value[layer]
        if stack.skip:
            expected = expected + x
        if stack.layer_norm:
            centred = expected - expected.mean(1, keepdim=True)
            expected = centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt()
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
        x = found


@PROPERTY
@given(st.integers(1, 30), st.integers(0, 10**6))
def test_removing_the_gap_needs_no_attention_matrix(t: int, seed: int) -> None:
    generator = generator_of(seed)
    a = propagation.random_markov(t, generator)
    v = torch.randn(t, 4, generator=generator, dtype=F64)
    torch.testing.assert_close((a - 1 / t) @ v, a @ v - v.mean(0))


@PROPERTY
@given(st.integers(2, 20), st.integers(0, 10**6))
def test_without_the_gap_attention_is_singular(t: int, seed: int) -> None:
    a = propagation.random_markov(t, generator_of(seed)) - 1 / t
    assert a.sum(1).abs().max() < 1e-14  # A⊥·1 = 0, so that κ(A⊥) would be infinite
    sigma = torch.linalg.svdvals(a)
    assert sigma[-1] < 1e-13 * sigma[0]


@PROPERTY
@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 10**6))
def test_the_stable_rank_is_that_of_the_covariance(t: int, d: int, seed: int) -> None:
    x = torch.randn(t, d, generator=generator_of(seed), dtype=F64)
    s = torch.linalg.svdvals(x @ x.T)
    rank, excess = propagation.stable_rank(x)
    assert rank == pytest.approx(float((s**2).sum() / s[0] ** 2), rel=1e-9)
    assert 1 <= rank <= min(t, d) + 1e-9
    assert rank - 1 == pytest.approx(excess, abs=1e-12)


def test_the_excess_is_not_lost_in_the_one() -> None:
    assert propagation.stable_rank(torch.diag(torch.tensor([1.0, 1e-6], dtype=F64)))[1] == (
        pytest.approx(1e-24)
    )
    assert all(map(math.isnan, propagation.stable_rank(torch.zeros(2, 2))))
    assert all(map(math.isnan, propagation.stable_rank(torch.full((2, 2), math.inf))))


def test_the_residue_of_equal_and_of_centred_tokens() -> None:
    assert propagation.residue(torch.ones(4, 3)) == 0
    assert propagation.residue(torch.tensor([[1.0], [-1.0]])) == 1


# Gradients


def autograd_norm(stack: Stack, weights, x: Tensor, layer: int, last: int) -> float:
    def output(value: Tensor) -> Tensor:
        values = [value if i == layer - 1 else weights.value[i] for i in range(last)]
        cut = weights._replace(value=torch.stack(values))
        *_, out = forward(stack, cut, x)
        return out

    return float(torch.func.jacrev(output)(weights.value[layer - 1]).norm())


@pytest.mark.parametrize("stack", STACKS, ids=str)
def test_gradient_norms_are_those_of_autograd(stack: Stack) -> None:
    weights, x = draw(stack, 4, 4, 5, seed=3)
    for layer in (1, 2, 4):
        found = propagation.gradient_norms(stack, weights, x, layer, chunk=7)
        expected = [autograd_norm(stack, weights, x, layer, last) for last in range(layer, 5)]
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("gap", [False, True])
def test_the_closed_form_of_constant_attention(gap: bool) -> None:
    stack = Stack(remove_gap=gap)
    weights, x = draw(stack, 5, 6, 6, seed=0)
    for layer in (1, 3, 5):
        expected = propagation.gradient_norms(stack, weights, x, layer)
        found = [
            propagation.constant_gradient_norm(stack, weights, x, layer, last)
            for last in range(layer, 6)
        ]
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("gap", "power"), [(False, 4), (True, 1)])
def test_gradients_explode_with_the_gap_and_not_without(gap: bool, power: int) -> None:
    stack, t = Stack(remove_gap=gap), 200
    squares = []
    for seed in range(6):
        weights, x = draw(stack, 4, t, t, seed)
        squares.append(propagation.constant_gradient_norm(stack, weights, x, 2, 4) ** 2)
    assert statistics.geometric_mean(squares) / t**power == pytest.approx(1, abs=0.35)


# The constants of the figures


def test_rank_collapses_in_width() -> None:
    t = 200
    profiles = [propagation.depth_profile(Stack(), t, 2, seed) for seed in range(12)]
    first = mean(p["excess"][0] for p in profiles)
    second = mean(p["excess"][1] for p in profiles)
    assert 2 <= t * first <= 3.6
    assert propagation.excess_limit(1) == 3
    assert 3.5 <= t**3 * second <= 6
    assert propagation.excess_limit(2) == 5


def test_without_the_gap_it_does_not() -> None:
    stack = Stack(remove_gap=True)
    for t in (80, 200):
        ranks = [
            propagation.depth_profile(stack, t, 1, seed)["stable_rank"][0] for seed in range(6)
        ]
        assert mean(ranks) / t == pytest.approx(0.07, abs=0.012)
    assert propagation.stable_rank_limit(1) == pytest.approx(3 / (27 / 4) ** 2)


def test_the_limits_are_moments_and_edges_of_gaussian_products() -> None:
    t, moments, ranks = 300, [], []
    for seed in range(5):
        noise = torch.randn(2, t, t, generator=generator_of(seed), dtype=F64) / math.sqrt(t)
        moments.append(float((torch.linalg.svdvals(noise[0] @ noise[1]) ** 4).mean()))
        ranks.append(propagation.stable_rank(noise[0] @ noise[1])[0] / t)
    assert mean(moments) == pytest.approx(propagation.excess_limit(1), rel=0.05)
    assert mean(ranks) == pytest.approx(propagation.stable_rank_limit(1), rel=0.15)


@pytest.mark.parametrize(("name", "plotted"), propagation_study.PLOTTED.items())
def test_the_layers_of_the_papers_plot(name: str, plotted: tuple[float, float]) -> None:
    (stack,) = (s for s in STACKS if str(s) == name)
    profiles = [propagation.depth_profile(stack, 150, 10, seed) for seed in range(4)]
    for layer, value in zip((1, 10), plotted, strict=True):
        found = mean(p["stable_rank"][layer - 1] for p in profiles)
        assert found == pytest.approx(value, abs=0.1 if value == 1 else 0.4 * value)


def test_plain_tokens_become_one_with_depth() -> None:
    plain = propagation.depth_profile(Stack(), 60, 6, 0)["residue"]
    fixed = propagation.depth_profile(Stack(remove_gap=True), 60, 6, 0)["residue"]
    assert plain[0] < 0.9
    assert plain[-1] < 1e-3
    assert min(fixed) > 0.9


def test_keys_and_queries_without_the_gap_vanish() -> None:
    # What is not in the paper's model "A": the logits shrink with the tokens, and the tokens with
    # the logits, until nothing is left.
    norms = propagation.depth_profile(Stack("A(X)", remove_gap=True), 60, 4, 0)["norm"]
    assert norms[1] < 1e-4 * norms[0]
    assert norms[3] < 1e-40


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Stack("B"), "'A' or 'A\\(X\\)'"),
        (lambda: propagation.orthonormal_tokens(4, 3, generator_of(0)), "1 <= t <= d"),
        (lambda: propagation.random_markov(0, generator_of(0)), "t must be a whole number"),
        (lambda: draw(Stack(), 0, 3, 3, 0), "depth must be a whole number"),
        (
            lambda: propagation.gradient_norms(Stack(), *draw(Stack(), 2, 3, 3, 0), layer=3),
            "between 1 and 2",
        ),
        (
            lambda: propagation.constant_gradient_norm(
                Stack(skip=True), *draw(Stack(), 2, 3, 3, 0), 1, 2
            ),
            "the closed form is for",
        ),
    ],
)
def test_bad_input_is_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
