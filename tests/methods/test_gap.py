"""The mean over visible keys, against loops over rows and keys."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attncond as ac
from attncond.methods.gap import centre, uniform, visible_mean


def by_loops(value, visible):
    """(heads, S, e) and (heads, L, S) to (heads, L, e)."""
    heads, queries, keys = visible.shape
    mean = value.new_zeros(heads, queries, value.shape[-1])
    for h in range(heads):
        for i in range(queries):
            seen = [value[h, j] for j in range(keys) if visible[h, i, j]]
            if seen:
                mean[h, i] = sum(seen) / len(seen)
    return mean


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_mean_is_that_of_the_visible_keys(data):
    size = st.integers(1, 5)
    heads, queries, keys, channels = (data.draw(size) for _ in range(4))
    batch = data.draw(st.sampled_from([(), (1,), (3,), (2, 2)]))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    causal = data.draw(st.booleans())
    value = torch.randn(*batch, heads, keys, channels, dtype=torch.float64)
    shapes = [None, (queries, keys), (1, keys), (1, queries, keys), (heads, queries, keys)]
    if batch:
        shapes += [(*batch, 1, queries, keys), (*batch, heads, 1, keys), (*batch, 1, 1, keys)]
    shape = data.draw(st.sampled_from(shapes))
    visible = None if shape is None else torch.rand(shape) < 0.6
    full = torch.ones(*batch, heads, queries, keys, dtype=torch.bool)
    if visible is not None:
        full = full & visible
    if causal:
        full = full & torch.ones(queries, keys, dtype=torch.bool).tril()

    mean = visible_mean(value, queries, causal=causal, visible=visible)

    flat_value, flat_visible = value.reshape(-1, keys, channels), full.reshape(-1, queries, keys)
    wanted = by_loops(flat_value, flat_visible).view(*batch, heads, queries, channels)
    torch.testing.assert_close(mean.expand_as(wanted), wanted, rtol=1e-12, atol=1e-12)
    if not causal and (visible is None or visible.shape[-2] == 1):
        assert mean.shape[-2] == 1  # one row serves all queries


def test_a_matrix_without_heads():
    value = torch.randn(5, 3, dtype=torch.float64)
    visible = torch.ones(4, 5, dtype=torch.bool).tril()
    wanted = torch.stack([value[: i + 1].mean(0) for i in range(4)])
    torch.testing.assert_close(visible_mean(value, 4, visible=visible), wanted)
    torch.testing.assert_close(visible_mean(value, 4, causal=True), wanted)
    late = visible_mean(value, 7, causal=True)  # more queries than keys: the last see all
    torch.testing.assert_close(late[4:], value.mean(0).expand(3, 3))


@pytest.mark.parametrize("causal", [False, True])
def test_no_keys_have_a_mean_of_zero(causal):
    mean = visible_mean(torch.randn(2, 3, 0, 4), 5, causal=causal)
    assert torch.equal(mean.expand(2, 3, 5, 4), torch.zeros(2, 3, 5, 4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_does_not_overflow_either(dtype):
    value = 100 + torch.randn(1, 2, 1024, 3)
    visible = torch.ones(1, 1, 1024, 1024, dtype=torch.bool)
    with torch.autocast("cpu", dtype):
        mean = visible_mean(value, 1024, visible=visible)
    assert mean.dtype == torch.float32
    wanted = value.mean(-2, keepdim=True).expand_as(mean)
    torch.testing.assert_close(mean, wanted, rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("how", ["all", "causal", "mask", "heads"])
def test_half_precision_neither_overflows_nor_drifts(dtype, how):
    value = (100 + torch.randn(1, 2, 1024, 3)).to(dtype)
    visible = {"mask": (1, 1, 1024, 1024), "heads": (1, 2, 1024, 1024)}.get(how)
    visible = visible and torch.ones(visible, dtype=torch.bool)
    mean = visible_mean(value, 1024, causal=how == "causal", visible=visible)
    assert mean.dtype == torch.float32
    wanted = value.double().mean(-2)
    exact = 1e-5 if visible is None else torch.finfo(dtype).eps
    torch.testing.assert_close(mean[..., -1, :].double(), wanted, rtol=exact, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dim", [-1, -2, 1])
def test_the_uniform_matrix_sums_to_one_where_something_is_seen(dtype, dim):
    visible = torch.rand(3, 6, 7) < 0.4
    visible[0] = False
    matrix = uniform(visible, dim, dtype)
    assert matrix.dtype == dtype
    assert not matrix[~visible].any()
    seen = visible.any(dim)
    exact = {torch.float64: 1e-15}.get(dtype, 4 * torch.finfo(dtype).eps)
    torch.testing.assert_close(matrix.double().sum(dim), seen.double(), rtol=0, atol=exact)
    rows = matrix.movedim(dim, -1)[visible.movedim(dim, -1)]
    counts = visible.sum(dim, keepdim=True).expand_as(visible)
    torch.testing.assert_close(
        rows.double(),
        1 / counts.movedim(dim, -1)[visible.movedim(dim, -1)].double(),
        rtol=exact,
        atol=0,
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_centred_values_have_no_mean(dtype):
    value = (100 + torch.randn(2, 3, 1024, 4, dtype=torch.float64)).to(dtype)
    centred = centre(value)
    assert centred.dtype == dtype
    wanted = value.double() - value.double().mean(-2, keepdim=True)
    exact = {torch.float32: 1e-4, torch.float64: 1e-12}.get(dtype, 4 * torch.finfo(dtype).eps)
    torch.testing.assert_close(centred.double(), wanted, rtol=0, atol=exact)
    small = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(centre, small)
    assert not centre(value[..., :1, :]).any()


def test_the_gradient_is_shared_by_the_visible_keys():
    value = torch.randn(1, 2, 4, 3, dtype=torch.float64, requires_grad=True)
    visible = torch.rand(1, 1, 5, 4) < 0.6
    visible[0, 0, 2] = False
    for kwargs in ({}, {"causal": True}, {"visible": visible}):
        assert torch.autograd.gradcheck(lambda v, k=kwargs: visible_mean(v, 5, **k), value)


def test_a_removed_gap_takes_the_constant_out_of_the_matrix():
    matrix = torch.softmax(torch.randn(2, 6, 6, dtype=torch.float64), -1)
    rest = matrix - uniform(torch.ones(2, 6, 6, dtype=torch.bool), -1, torch.float64)
    assert (rest @ torch.ones(6, 1, dtype=torch.float64)).abs().max() < 1e-15
    gap = torch.linalg.svdvals(matrix)[:, 0] / torch.linalg.svdvals(matrix)[:, 1]
    left = torch.linalg.svdvals(rest)[:, 0] / torch.linalg.svdvals(rest)[:, 1]
    assert (left < gap).all()


def test_it_has_no_settings():
    assert ac.RemoveGap() == ac.RemoveGap()
    with pytest.raises(TypeError):
        ac.RemoveGap(1)
