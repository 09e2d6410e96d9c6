"""Row equilibration by itself: lengths, zeros, precision, derivatives, and the bound it is from."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attncond as ac


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    dim=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_rows_have_length_one_and_keep_their_direction(shape, dim, seed):
    dim = dim % len(shape)
    torch.manual_seed(seed)
    output = torch.randn(shape, dtype=torch.float64)
    result = ac.Precondition().equilibrate(output, dim)
    lengths = result.square().sum(dim).sqrt()
    torch.testing.assert_close(lengths, torch.ones_like(lengths), rtol=1e-12, atol=0)
    factors = result / output
    assert (factors > 0).all()
    torch.testing.assert_close(
        factors, factors.movedim(dim, 0)[:1].movedim(0, dim).expand_as(factors)
    )


def test_short_rows_are_divided_by_eps_and_zeros_stay():
    rows = torch.tensor([[3e-3, 4e-3], [0.0, 0.0], [3.0, 4.0]], dtype=torch.float64)
    result = ac.Precondition(eps=0.01).equilibrate(rows)
    wanted = torch.tensor([[0.3, 0.4], [0.0, 0.0], [0.6, 0.8]], dtype=torch.float64)
    torch.testing.assert_close(result, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [300.0, 1.0, 1e-3])
def test_half_precision_squares_neither_overflow_nor_vanish(dtype, size):
    rows = size * torch.randn(5, 64, dtype=torch.float64)
    result = ac.Precondition().equilibrate(rows.to(dtype))
    assert result.dtype == dtype
    eps = torch.finfo(dtype).eps
    lengths = torch.linalg.vector_norm(result.double(), dim=-1)
    torch.testing.assert_close(lengths, torch.ones_like(lengths), rtol=2 * eps, atol=0)


def test_the_derivative():
    rows = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ac.Precondition().equilibrate, rows)
    small = torch.full((2, 3), 1e-3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ac.Precondition(eps=0.5).equilibrate, small)


def test_detached_lengths_are_constants():
    rows = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    direction = torch.randn(3, 4, dtype=torch.float64)
    results = [ac.Precondition(detach=d).equilibrate(rows) for d in (False, True)]
    assert torch.equal(*results)
    plain, detached = (torch.autograd.grad((r * direction).sum(), rows)[0] for r in results)
    lengths = torch.linalg.vector_norm(rows.detach(), dim=-1, keepdim=True)
    torch.testing.assert_close(detached, direction / lengths)
    # The length of a row has no influence on its direction: the true gradient is orthogonal to it.
    torch.testing.assert_close((plain * rows).sum(-1), torch.zeros(3, dtype=torch.float64))
    assert (detached * rows).sum(-1).abs().min() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("detach", [False, True])
def test_the_gradient_of_a_row_of_zeros_passes_as_it_is(dtype, detach):
    """It must not be 1/eps times as large: such rows see nothing, or lost all to the gap."""
    rows = torch.randn(3, 4).to(dtype)
    rows[1] = 0
    rows.requires_grad_()
    direction = torch.randn(3, 4).to(dtype)
    (ac.Precondition(detach=detach).equilibrate(rows) * direction).sum().backward()
    assert torch.isfinite(rows.grad).all()
    assert torch.equal(rows.grad[1], direction[1])


def test_no_other_diagonal_has_a_smaller_guggenheimer_bound():
    def log_bound(m):
        n = len(m)
        length = torch.linalg.matrix_norm(m) / math.sqrt(n)
        return math.log(2) - torch.linalg.slogdet(m).logabsdet + n * torch.log(length)

    for n in (2, 3, 8):
        head = torch.randn(n, n, dtype=torch.float64) * torch.rand(n, 1, dtype=torch.float64).exp()
        best = log_bound(ac.Precondition().equilibrate(head))
        assert best < log_bound(head)
        for _ in range(50):
            other = torch.randn(n, 1, dtype=torch.float64).exp() * head
            assert best <= log_bound(other) + 1e-12


@pytest.mark.parametrize("eps", [0, -1e-6, float("nan"), float("inf"), True, "small", None])
def test_a_bad_eps_is_refused(eps):
    with pytest.raises(ac.ConditioningError, match="eps must be"):
        ac.Precondition(eps=eps)


@pytest.mark.parametrize("detach", [0, 1, "no", None])
def test_detach_is_a_boolean(detach):
    with pytest.raises(ac.ConditioningError, match="detach must be True or False"):
        ac.Precondition(detach=detach)
