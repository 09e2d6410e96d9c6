"""The papers' statements against autograd and float64 SVDs: what holds, and what does not."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from spectra import gaussian
from torch import Tensor

from attncond import theory
from attncond.linalg import spectral_norm
from attncond.polar import polar

F64 = torch.float64
PROPERTY = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
SLACK = 1 + 1e-9


def make_head(
    n: int, dim: int, d: int, seed: int, *, scale: float | None = None, size: float = 1.0
) -> theory.Head:
    x, q, k, v = (
        gaussian(*s, seed=4 * seed + i)
        for i, s in enumerate([(n, dim), (dim, d), (dim, d), (dim, d)])
    )
    return theory.Head(x, q * size, k * size, v, scale=scale)


def attention(x: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Written apart from theory.py, for autograd to differentiate."""
    return ((x @ q) @ (x @ k).T * scale).softmax(-1) @ (x @ v)


def autograd_blocks(head: theory.Head) -> list[Tensor]:
    """∂A/∂W with rows (token, channel) and columns (in, channel): torch's order, not vec's."""
    n, dim, d = head.shape
    blocks = torch.func.jacrev(lambda q, k, v: attention(head.x, q, k, v, head.factor), (0, 1, 2))(
        head.w_q, head.w_k, head.w_v
    )
    return [b.reshape(n * d, dim * d) for b in blocks]


def autograd_condition(head: theory.Head, convention: str, rank: int) -> float:
    blocks = autograd_blocks(head)
    sigma = torch.linalg.svdvals(torch.cat(blocks, 1 if convention == "wide" else 0))
    return float(sigma[0] / sigma[rank - 1])


heads = st.builds(
    make_head,
    n=st.integers(2, 6),
    dim=st.integers(3, 6),
    d=st.integers(1, 2),
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([None, 1.0, 0.25]),
    size=st.sampled_from([0.1, 1.0]),
)
matrices = st.builds(
    gaussian, st.integers(1, 8), st.integers(1, 8), seed=st.integers(0, 10**6)
) | st.integers(1, 6).map(lambda n: -torch.eye(n, dtype=F64))


# Lemma 3.2 and Thm 3.3


@PROPERTY
@given(st.integers(1, 9), st.integers(0, 10**6), st.sampled_from([0.1, 1.0, 20.0]))
def test_the_derivative_of_softmax(n: int, seed: int, size: float) -> None:
    z = size * gaussian(n, seed=seed)
    expected = torch.func.jacrev(lambda t: t.softmax(-1))(z)
    found = theory.softmax_jacobian(z.softmax(-1))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)
    assert found.sum(-1).abs().max() < 1e-15  # hence singular, whatever z is


def test_the_derivative_of_softmax_takes_batches() -> None:
    p = gaussian(2, 3, 5, seed=0).softmax(-1)
    assert torch.equal(theory.softmax_jacobian(p)[1, 2], theory.softmax_jacobian(p[1, 2]))


@PROPERTY
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 99))
def test_the_commutation_matrix(m: int, n: int, seed: int) -> None:
    w, t = gaussian(m, n, seed=seed), theory.commutation(m, n)
    assert torch.equal(t @ w.T.flatten(), w.flatten())  # vec stacks columns: vec(W) = flat(Wᵀ)
    assert torch.equal(t @ t.T, torch.eye(m * n, dtype=F64))


@PROPERTY
@given(heads)
def test_theorem_3_3_is_the_derivative(head: theory.Head) -> None:
    n, dim, d = head.shape
    for found, expected in zip(theory.jacobian_blocks(head), autograd_blocks(head), strict=True):
        rows, columns = theory.commutation(d, n), theory.commutation(d, dim)
        as_vec = rows @ expected @ columns.T
        torch.testing.assert_close(found, as_vec, rtol=1e-9, atol=1e-12)


def test_lambda_of_a_matrix_has_to_be_read_row_by_row() -> None:
    head = make_head(3, 3, 2, seed=0)
    vec = head.p.T.flatten()
    literal = torch.diag(vec) - torch.outer(vec, vec)
    v, k = head.x @ head.w_v, head.x @ head.w_k
    wrong = head.factor * torch.kron(v.T.contiguous(), torch.eye(3, dtype=F64)) @ literal
    assert not torch.allclose(wrong @ torch.kron(k, head.x), theory.jacobian_blocks(head).q)


@PROPERTY
@given(heads)
def test_both_conventions_are_made_of_the_same_blocks(head: theory.Head) -> None:
    n, dim, d = head.shape
    wide, stacked = theory.jacobian(head, "wide"), theory.jacobian(head, "stacked")
    assert wide.shape == (n * d, 3 * dim * d)
    assert stacked.shape == (3 * n * d, dim * d)
    gram = sum(b @ b.T for b in theory.jacobian_blocks(head))
    torch.testing.assert_close(wide @ wide.T, gram)


@pytest.mark.parametrize("ones", [False, True])
@pytest.mark.parametrize(
    ("n", "dim", "d"), [(6, 3, 2), (9, 3, 2), (12, 2, 1), (4, 7, 2), (5, 5, 1), (8, 3, 1)]
)
def test_the_generic_rank(n: int, dim: int, d: int, ones: bool) -> None:
    head = make_head(n, dim, d, seed=1, size=0.3)
    if ones:
        x = head.x.clone()
        x[:, 0] = 1
        head = theory.Head(x, head.w_q, head.w_k, head.w_v)
    blocks = autograd_blocks(head)
    for convention, axis in (("wide", 1), ("stacked", 0)):
        expected = int(torch.linalg.matrix_rank(torch.cat(blocks, axis), rtol=1e-10))
        assert theory.jacobian_rank(head, convention) == expected


def test_the_rank_of_a_wide_jacobian_is_not_full_for_a_long_sequence() -> None:
    head = make_head(12, 3, 2, seed=0)
    assert theory.jacobian_rank(head) == 3 * 3 * 2 - 4 < min(theory.jacobian(head).shape)


# Thm 3.4 and the certificate


@pytest.mark.parametrize(("alpha", "kappa"), [(100.0, 54.7), (1000.0, 547.0)])
def test_theorem_3_4_fails_in_both_conventions(alpha: float, kappa: float) -> None:
    head = theory.bound_counterexample(alpha)
    bound = theory.paper_bound(head)
    assert round(bound, 2) == 6.19
    wide, stacked = (autograd_condition(head, c, rank=6) for c in ("wide", "stacked"))
    assert wide == pytest.approx(kappa, rel=1e-3)
    assert stacked > 0.99 * wide > 8 * bound
    # Full rank is what the theorem assumes, and here the Jacobian has it in either convention.
    for convention in ("wide", "stacked"):
        full = theory.jacobian(head, convention)
        assert theory.jacobian_rank(head, convention) == min(full.shape) == 6
        assert torch.linalg.matrix_rank(full) == 6


def test_theorem_3_4_fails_without_the_scale_too() -> None:
    head = theory.bound_counterexample(1000.0)
    unscaled = theory.Head(head.x, head.w_q, head.w_k, head.w_v, scale=1.0)
    assert autograd_condition(unscaled, "stacked", 6) > 40 * theory.paper_bound(unscaled)


def test_the_printed_bound_cannot_see_the_size_of_w_v() -> None:
    small, large = theory.bound_counterexample(1.0), theory.bound_counterexample(1e4)
    assert theory.paper_bound(small) == pytest.approx(theory.paper_bound(large), rel=1e-12)
    assert theory.jacobian_condition(large) > 1e3 * theory.jacobian_condition(small)


def test_theorem_3_4_is_infinite_with_the_ordinary_condition_number() -> None:
    head = theory.bound_counterexample(1.0)
    sigma = torch.linalg.svdvals(torch.block_diag(*theory.softmax_jacobian(head.p)))
    assert sigma[-1] < 1e-15 * sigma[0] + 1e-16


@pytest.mark.parametrize("cosine", [0.5, 1e-2, 1e-6])
def test_the_pseudo_condition_number_is_not_submultiplicative(cosine: float) -> None:
    c, d = theory.product_counterexample(math.acos(cosine))
    assert theory.pseudo_condition(c) == 1
    assert theory.pseudo_condition(d) == pytest.approx(1)
    assert torch.linalg.matrix_rank(c @ d) == 2  # the product has full rank, as the proof asks
    assert theory.pseudo_condition(c @ d) == pytest.approx(1 / cosine, rel=1e-6)


def test_random_heads_violate_theorem_3_4_now_and_then() -> None:
    drawn = [make_head(5, 8, 2, seed=s) for s in range(300)]
    drawn = [theory.Head(h.x, h.w_q, h.w_k, 30 * h.w_v) for h in drawn]
    broken = sum(theory.jacobian_condition(h) > theory.paper_bound(h) for h in drawn)
    assert 3 <= broken < 150


@PROPERTY
@given(heads, st.sampled_from(["wide", "stacked"]))
def test_the_certificate_holds(head: theory.Head, convention: theory.Convention) -> None:
    rank = theory.jacobian_rank(head, convention)
    kappa = autograd_condition(head, convention, rank)
    exact = theory.jacobian_certificate(head, convention)
    cheap = theory.jacobian_certificate(head, convention, cheap=True)
    blocks = autograd_blocks(head)
    assert exact.norm_q == pytest.approx(float(torch.linalg.matrix_norm(blocks[0], 2)), rel=1e-9)
    assert exact.norm_k == pytest.approx(float(torch.linalg.matrix_norm(blocks[1], 2)), rel=1e-9)
    assert exact.norm_q <= cheap.norm_q * SLACK
    assert exact.norm_k <= cheap.norm_k * SLACK
    assert kappa <= exact.bound * SLACK
    assert exact.bound <= cheap.bound * SLACK


@pytest.mark.parametrize("alpha", [1.0, 100.0, 1e4])
@pytest.mark.parametrize("convention", ["wide", "stacked"])
def test_the_certificate_survives_the_counterexample(
    alpha: float, convention: theory.Convention
) -> None:
    head = theory.bound_counterexample(alpha)
    certificate = theory.jacobian_certificate(head, convention)
    assert theory.jacobian_condition(head, convention) <= certificate.bound
    assert certificate.bound < 2 * theory.jacobian_condition(head, convention)


def test_the_certificate_is_infinite_where_its_condition_fails() -> None:
    assert theory.jacobian_certificate(make_head(5, 3, 2, seed=0), "wide").bound == math.inf
    assert theory.jacobian_certificate(make_head(5, 3, 2, seed=0), "stacked").bound < math.inf
    x = gaussian(4, 4, seed=0)
    zero = torch.zeros(4, 2, dtype=F64)
    uniform = theory.Head(x, zero, zero, x[:, :2])  # P = 11ᵀ/N
    for convention in ("wide", "stacked"):
        assert theory.jacobian_certificate(uniform, convention).bound == math.inf


# Thm 3.5


@PROPERTY
@given(matrices)
def test_theorem_3_5(w: Tensor) -> None:
    sigma = torch.linalg.svdvals(w)
    after = torch.linalg.svdvals(w + theory.polar_correction(w))
    assert after[0] / after[-1] == pytest.approx(theory.polar_condition(w), rel=1e-9)
    assert theory.polar_condition(w) == pytest.approx(
        float(2 * sigma[0] / (sigma[0] + sigma[-1])), rel=1e-12
    )
    assert theory.polar_condition(w) <= 2


def test_theorem_3_5_reaches_two_for_a_singular_matrix() -> None:
    w = torch.diag(torch.tensor([3.0, 1.0, 0.0], dtype=F64))  # the proof ends with '< 2'
    after = torch.linalg.svdvals(w + theory.polar_correction(w))
    assert after[0] / after[-1] == 2 == theory.polar_condition(w)


def test_the_correction_is_the_norm_times_the_polar_factor() -> None:
    w = gaussian(6, 4, seed=3)
    expected = spectral_norm(w) * polar(w)
    torch.testing.assert_close(theory.polar_correction(w), expected, rtol=1e-9, atol=1e-9)


# Thm 3.8


def test_theorem_3_8_is_false_not_only_its_proof() -> None:
    a, lam = theory.shift_counterexample()
    sigma = torch.linalg.svdvals(a)
    kappa = float(torch.linalg.cond(a))
    printed = theory.shift_bound_printed(a, lam)
    assert lam >= 2
    assert printed == pytest.approx(float((sigma[0] + lam) / (lam - sigma[1])))
    assert printed <= kappa  # the assumption of the theorem
    true = float(torch.linalg.cond(a + lam * torch.eye(2, dtype=F64)))
    assert round(true) == 110
    assert round(printed, 2) == 2.21
    assert round(kappa, 1) == 9.9
    assert true > kappa  # its conclusion is κ(A + λI) < κ(A)
    assert theory.shift_condition(a, lam) == pytest.approx(true)
    assert true <= theory.shift_bound(a, lam)


def test_square_gaussian_matrices_exceed_the_printed_inequality_as_a_rule() -> None:
    drawn = [0.02 * gaussian(48, 48, seed=s) for s in range(40)]
    exceeded = sum(theory.shift_condition(a, 10) > theory.shift_bound_printed(a, 10) for a in drawn)
    assert exceeded >= 38


@settings(PROPERTY, max_examples=300)
@given(matrices, st.floats(1.001, 50))
def test_theorem_3_8_corrected(a: Tensor, ratio: float) -> None:
    lam = ratio * float(torch.linalg.svdvals(a)[0])
    shifted = a + lam * torch.eye(*a.shape, dtype=F64)
    true = float(torch.linalg.cond(shifted))
    bound = theory.shift_bound(a, lam)
    assert true <= bound * SLACK
    assert theory.shift_condition(a, lam) == pytest.approx(true, rel=1e-9)
    if bound <= theory.pseudo_condition(a):
        assert true <= float(torch.linalg.cond(a)) * SLACK


@PROPERTY
@given(matrices, st.floats(1.01, 20))
def test_lam_for_a_target(a: Tensor, kappa: float) -> None:
    lam = theory.lam_for(kappa, float(torch.linalg.svdvals(a)[0]))
    assert theory.shift_bound(a, lam) == pytest.approx(kappa, rel=1e-9)
    assert theory.shift_condition(a, lam) <= kappa * SLACK


def test_two_needs_three_times_the_norm_and_is_reached() -> None:
    assert theory.lam_for(2.0, 1.0) == 3.0
    assert theory.shift_condition(torch.diag(torch.tensor([1.0, -1.0])), 3.0) == 2.0


def test_no_bound_once_the_shift_is_below_the_norm() -> None:
    a = torch.diag(torch.tensor([3.0, 1.0]))
    assert theory.shift_bound(a, 3.0) == math.inf
    assert theory.shift_bound_printed(a, 0.5) == math.inf
    assert theory.shift_condition(-a, 3.0) == math.inf


def test_a_shift_of_ten_saturates_the_softmax() -> None:
    n, dim, d = 197, 768, 64
    x = torch.nn.functional.layer_norm(gaussian(n, dim, seed=0), (dim,))
    q, k = 0.02 * gaussian(dim, d, seed=1), 0.02 * gaussian(dim, d, seed=2)
    entropy, diagonal = {}, {}
    for lam in (0, 1, 2, 10):
        shift = lam * torch.eye(dim, d, dtype=F64)
        head = theory.Head(x, q + shift, k + shift, q)
        entropy[lam] = float(torch.special.entr(head.p).sum(1).mean())
        logits = head.factor * (x @ head.w_q) @ (x @ head.w_k).T
        diagonal[lam] = float(logits.diagonal().mean())
    assert entropy[0] == pytest.approx(5.24, abs=0.02)  # ln 197 is 5.28
    assert entropy[1] == pytest.approx(1.25, abs=0.25)
    assert entropy[2] < 1e-3
    assert entropy[10] < 1e-60
    assert diagonal[10] == pytest.approx(800, rel=0.02)  # λ²·√d


# Guggenheimer


@PROPERTY
@given(matrices)
def test_guggenheimers_bound_holds(m: Tensor) -> None:
    sigma = torch.linalg.svdvals(m)
    assume(float(sigma[-1]) > 1e-9)
    bound = theory.guggenheimer_bound(m)
    assert sigma[0] / sigma[-1] < bound
    if m.shape[0] == m.shape[1]:
        n = m.shape[0]
        by_hand = 2 / abs(float(torch.linalg.det(m))) * (float(m.norm()) / math.sqrt(n)) ** n
        assert bound == pytest.approx(by_hand, rel=1e-6)


@PROPERTY
@given(st.integers(1, 6), st.integers(0, 10**6))
def test_equal_rows_minimise_guggenheimers_bound_of_a_square_matrix(n: int, seed: int) -> None:
    m = gaussian(n, n, seed=seed)
    c = gaussian(n, seed=seed + 1).exp()
    best = theory.guggenheimer_bound(m / m.norm(dim=1, keepdim=True))
    assert best <= theory.guggenheimer_bound(c[:, None] * m) * SLACK


def test_equal_rows_do_not_minimise_it_for_a_tall_matrix() -> None:
    m = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=F64)  # rows of length one
    c = torch.tensor([1.0, 1.0, 2**0.5], dtype=F64)
    assert theory.guggenheimer_bound(c[:, None] * m) < (theory.guggenheimer_bound(m))


def test_guggenheimers_bound_of_large_and_singular_matrices() -> None:
    assert theory.guggenheimer_bound(1e-3 * torch.eye(400)) == pytest.approx(2)
    assert theory.guggenheimer_bound(torch.diag(torch.tensor([1.0, 0.0]))) == math.inf
    assert theory.guggenheimer_bound(torch.diag(torch.logspace(0, -300, 50, dtype=F64))) == math.inf


# What is refused


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: theory.pseudo_condition(torch.zeros(2, 2)), "zero matrix"),
        (lambda: theory.pseudo_condition(torch.ones(2)), "must be a real matrix"),
        (lambda: theory.pseudo_condition([[1.0]]), "must be a real matrix, not list"),
        (lambda: theory.polar_correction(torch.full((2, 2), math.nan)), "w holds NaN or inf"),
        (lambda: theory.lam_for(1.0, 1.0), "kappa must be a finite number above 1"),
        (lambda: theory.jacobian(make_head(2, 2, 1, 0), "tall"), "'wide' or 'stacked'"),
        (lambda: make_head(2, 2, 1, 0, scale=-1.0), "scale must be a finite number above 0"),
        (lambda: theory.Head(*[torch.ones(3, 2)] * 4), "w_q, w_k, w_v all"),
        (lambda: theory.jacobian_rank(make_head(4, 2, 3, 0)), "d <= rank"),
    ],
)
def test_bad_input_is_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_half_precision_and_gradients_are_no_obstacle() -> None:
    x = torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True)
    head = theory.Head(x, *(torch.randn(4, 2) for _ in range(3)))
    assert head.x.dtype == F64
    assert not head.a.requires_grad
