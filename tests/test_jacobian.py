"""Spectra of heads against torch.func.jacrev and float64 SVDs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from attention_heads import attend, heads, jacobian, plain_head
from hypothesis import assume, given, settings
from spectra import gaussian
from torch import Tensor

from attncond import lanczos
from attncond.errors import ConditioningError
from attncond.jacobian import (
    JacobianSpectrum,
    attention_jacobian,
    attention_jacobians,
    derivatives,
    gram,
    jacobian_of,
)

props = settings(derandomize=True, deadline=None, max_examples=400)


@pytest.fixture(scope="module", params=["svd", "gram"])
def route(request):
    """Both ways to the spectrum: of J itself, and of its Gram matrix as large heads go."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "gram":
            patch.setattr(lanczos, "SMALL", 0)
        yield request.param


def whole(inputs: tuple[Tensor, ...], details: dict[str, Any]) -> Tensor:
    x, *weights = inputs
    rest = {k: v for k, v in details.items() if k != "convention"}
    return jacobian(
        tuple(weights), details["convention"], lambda q, k, v: attend(x, q, k, v, **rest)
    )


def agrees(found: JacobianSpectrum, sigma: Tensor) -> None:
    """Everything that a spectrum claims, against all singular values."""
    top, rank = float(sigma[0]), found.rank
    assert rank is not None
    assert found.sigma_max == pytest.approx(top, rel=1e-10)
    assert abs(found.sigma_max - top) <= found.sigma_max_error + 1e-14 * top
    assert 0 < found.floor <= 1.001 * top * math.sqrt(2**-52 * min(found.shape))
    beyond = float(sigma[rank]) if rank < len(sigma) else 0.0
    last = float(sigma[rank - 1]) if rank else 0.0
    limit = 1e-12 * top if found.rank_rule != "numerical" else found.floor
    assert beyond <= limit
    if found.sigma_min is None:
        assert last <= 1.01 * found.floor
        assert found.kappa is None
        assert found.kappa_error is None
        assert not found.resolved
    else:
        assert last >= 0.99 * found.floor
        assert found.resolved
        assert found.sigma_min_error is not None
        assert found.kappa is not None
        off = abs(found.sigma_min - last)
        assert off <= found.sigma_min_error + 1e-14 * top
        assert off <= 1e-8 * last or last < 1e-6 * top  # where an SVD has few more digits itself
        assert found.kappa == pytest.approx(found.sigma_max / found.sigma_min)
        assert found.numerical_rank == rank


@props
@given(heads())
def test_spectra_are_those_of_jacrev(route: str, case: Any) -> None:
    inputs, details = case
    reference = whole(inputs, details)
    sigma = torch.linalg.svdvals(reference)
    assume(float(sigma[0]) > 1e-6)
    found = attention_jacobian(*inputs, **details)
    agrees(found, sigma)
    assert found.path == "closed form"
    assert found.convention == details["convention"]
    assert found.shape == tuple(reference.shape)


@props
@given(heads())
def test_derivatives_and_gram_are_those_of_jacrev(case: Any) -> None:
    inputs, details = case
    reference = whole(inputs, details)
    parts = [j.flatten(2).flatten(0, 1) for j in derivatives(*inputs, **details)]
    stacked = details["convention"] == "stacked"
    torch.testing.assert_close(torch.cat(parts, 0 if stacked else 1), reference)
    square = reference.mT @ reference if stacked else reference @ reference.mT
    torch.testing.assert_close(gram(*inputs, **details), square)


@pytest.mark.parametrize(
    ("n", "width", "d", "details", "rule"),
    [
        (40, 12, 8, {}, "formula"),  # more tokens than channels: the null space is taken out
        (40, 12, 8, {"bias_q": gaussian(8)}, "formula"),
        (40, 12, 8, {"causal": True}, "attained"),
        (40, 12, 8, {"convention": "stacked"}, "formula"),
        (18, 24, 16, {}, "formula"),
        (18, 24, 16, {"causal": True}, "attained"),
        (30, 24, 12, {"convention": "stacked", "causal": True}, "attained"),
        (6, 40, 8, {"convention": "stacked", "x_kv": gaussian(60, 40, seed=9)}, "attained"),
    ],
)
def test_heads_too_large_for_the_svd(n, width, d, details, rule, monkeypatch) -> None:
    monkeypatch.setattr(lanczos, "SMALL", 100)
    inputs = plain_head(n, width, d)
    reference = whole(inputs, {"convention": "wide", **details})
    found = attention_jacobian(*inputs, **details)
    agrees(found, torch.linalg.svdvals(reference))
    assert found.resolved
    assert found.rank_rule == rule


@pytest.mark.parametrize(
    ("n", "width", "d", "ones", "wide"),
    [
        (6, 9, 3, False, 18),  # N·d: fewer tokens than channels
        (20, 7, 3, False, 54),  # 3rd − d²
        (20, 7, 3, True, 51),  # 3rd − d² − d: a constant shift of the keys changes nothing
        (30, 5, 5, True, 45),
    ],
)
def test_the_rank_of_a_plain_head(n, width, d, ones, wide, route) -> None:
    x, *weights = plain_head(n, width, d)
    if ones:
        x[:, 0] = 1
    found = attention_jacobian(x, *weights)
    assert (found.rank, found.rank_rule, found.numerical_rank) == (wide, "formula", wide)
    assert attention_jacobian(x, *weights, convention="stacked").rank == min(n, width) * d


@pytest.mark.parametrize(("alpha", "kappa"), [(100, 54.7), (1000, 547)])
def test_a_counterexample_to_the_papers_bound(alpha: float, kappa: float, route: str) -> None:
    # The bound of Thm 3.4 is 6.19 here whatever α; the true κ grows with W_V.
    u = torch.tensor([0, 1, -1], dtype=torch.float64) / math.sqrt(2)
    w = torch.tensor([-2, 1, 1], dtype=torch.float64) / math.sqrt(6)
    o = torch.ones(3, dtype=torch.float64) / math.sqrt(3)
    w_q = math.sqrt(2 * math.sqrt(2)) * torch.stack([u, w])
    found = attention_jacobian(
        torch.eye(3, dtype=torch.float64), w_q, w_q, alpha * torch.stack([o, u])
    )
    assert found.kappa == pytest.approx(kappa, rel=2e-3)


@pytest.mark.parametrize(("n", "width", "d"), [(8, 12, 4), (12, 6, 3)])
@pytest.mark.parametrize("convention", ["wide", "stacked"])
def test_tokens_like_those_of_smooth_images(
    n: int, width: int, d: int, convention: str, route: str
) -> None:
    # Patches of an image are much alike: κ of the tokens is in the thousands, of J in the millions.
    x, *weights = plain_head(n, width, d)
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    x = (u * torch.logspace(1, -4, len(s), dtype=torch.float64)) @ vh
    found = attention_jacobian(x, *weights, convention=convention)
    sigma = torch.linalg.svdvals(whole((x, *weights), {"convention": convention}))
    agrees(found, sigma)
    assert found.kappa is not None
    assert found.kappa > 1e5
    assert found.kappa == pytest.approx(float(sigma[0] / sigma[found.rank - 1]), rel=1e-5)


def test_what_float64_cannot_resolve_is_no_number(route: str) -> None:
    x, w_q, w_k, w_v = plain_head(8, 12, 4)
    found = attention_jacobian(x, 60 * w_q, 60 * w_k, w_v)  # saturated: rows of P nearly coincide
    sigma = torch.linalg.svdvals(whole((x, 60 * w_q, 60 * w_k, w_v), {"convention": "wide"}))
    assert float(sigma[-1]) < found.floor
    assert found.sigma_min is found.kappa is found.kappa_error is found.sigma_min_error is None
    assert found.rank == 32
    assert found.numerical_rank == int((sigma > found.floor).sum()) < 32
    assert "unresolved" in str(found)


def test_nothing_depends_on_weights_that_read_zeros(route: str) -> None:
    _, *weights = plain_head(3, 5, 2)
    found = attention_jacobian(torch.zeros(3, 5), *weights)
    assert (found.sigma_max, found.sigma_min, found.rank, found.numerical_rank) == (0, None, 0, 0)


def same(a: JacobianSpectrum, b: JacobianSpectrum) -> bool:
    return (a.rank, a.sigma_max, a.sigma_min) == (
        b.rank,
        pytest.approx(b.sigma_max, rel=1e-12),
        pytest.approx(b.sigma_min, rel=1e-9),
    )


def test_masks_that_say_the_same() -> None:
    x, *weights = plain_head(7, 9, 3)
    keep = torch.arange(7) < 5
    shorter = attention_jacobian(x, *weights, x_kv=x[:5])
    assert shorter.rank_rule == "formula"
    for mask in (keep, keep.expand(7, 7), torch.where(keep, 0.0, -1e9)[None]):
        assert same(attention_jacobian(x, *weights, mask=mask), shorter)
    lower = torch.ones(7, 7, dtype=torch.bool).tril()
    causal = attention_jacobian(x, *weights, causal=True)
    assert same(causal, attention_jacobian(x, *weights, mask=lower))
    # A query that sees nothing has no output to change; one whose logits all sink alike does.
    blind = torch.ones(7, 7, dtype=torch.bool)
    blind[2] = False
    rest = [0, 1, 3, 4, 5, 6]
    some = attention_jacobian(x[rest], *weights, x_kv=x)
    assert same(attention_jacobian(x, *weights, mask=blind), some)
    sunk = torch.zeros(7, 7)
    sunk[2] = torch.finfo(torch.float32).min
    assert same(attention_jacobian(x, *weights, mask=sunk), attention_jacobian(x, *weights))


def test_a_bias_of_the_keys_changes_nothing() -> None:
    inputs = plain_head(6, 9, 3)
    assert same(attention_jacobian(*inputs, bias_k=gaussian(3)), attention_jacobian(*inputs))


@pytest.mark.parametrize("convention", ["wide", "stacked"])
def test_heads_in_groups(convention) -> None:
    x = gaussian(5, 8)
    w_q, w_k, w_v = (gaussian(h, 3, 8, seed=h + i) / 3 for i, h in enumerate((4, 2, 2)))
    biases = {"bias_q": gaussian(4, 3), "bias_k": gaussian(2, 3), "bias_v": gaussian(2, 3)}
    mask = gaussian(4, 5, 5)
    found = attention_jacobians(x, w_q, w_k, w_v, mask=mask, convention=convention, **biases)
    assert len(found) == 4
    for h, spectrum in enumerate(found):
        alone = attention_jacobian(
            x,
            w_q[h],
            w_k[h // 2],
            w_v[h // 2],
            bias_q=biases["bias_q"][h],
            bias_v=biases["bias_v"][h // 2],
            mask=mask[h],
            convention=convention,
        )
        assert same(spectrum, alone)
    per_head = attention_jacobians(x.expand(4, 5, 8), w_q, w_k, w_v, x_kv=x.expand(4, 5, 8))
    assert all(
        same(a, b) for a, b in zip(per_head, attention_jacobians(x, w_q, w_k, w_v), strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_inputs_of_any_dtype_stay_as_they_are(dtype) -> None:
    inputs = [t.to(dtype).requires_grad_() for t in plain_head(6, 9, 3)]
    copies = [t.detach().clone() for t in inputs]
    state = torch.get_rng_state()
    found = attention_jacobian(*inputs)
    assert type(found.sigma_max) is type(found.sigma_min) is float
    assert same(found, attention_jacobian(*[t.detach().double() for t in inputs]))
    assert not gram(*inputs).requires_grad
    assert not any(j.requires_grad for j in derivatives(*inputs))
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))
    assert all(t.grad is None for t in inputs)
    assert torch.equal(state, torch.get_rng_state())
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16):
            assert attention_jacobian(*inputs) == found
    finally:
        torch.set_default_dtype(before)


def bad(**changes: Any) -> dict[str, Any]:
    x, w_q, w_k, w_v = plain_head(5, 6, 2)
    return {"x": x, "w_q": w_q, "w_k": w_k, "w_v": w_v, **changes}


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (bad(x=torch.full((5, 6), math.nan)), "x holds NaN or inf: look for the first layer"),
        (bad(w_k=torch.full((2, 6), math.inf)), "w_k holds NaN"),
        (bad(x=torch.zeros(2, 5, 6)), "take one sample of a batch"),
        (bad(x=torch.zeros(0, 6)), "x has shape"),
        (bad(w_q=torch.zeros(6, 2)), r"give weights as \(head_dim, in\)"),
        (bad(w_q=torch.zeros(3, 6)), "they must agree"),
        (bad(x_kv=torch.zeros(5, 7)), "w_k of shape"),
        (bad(x=torch.zeros(5, 6, dtype=torch.long)), "real numbers"),
        (bad(bias_v=torch.zeros(3)), "bias_v has 3 entries, its weight 2"),
        (bad(mask=torch.ones(5, 4, dtype=torch.bool)), "one that broadcasts to"),
        (bad(mask=torch.ones(5, 5, dtype=torch.long)), "make it bool"),
        (bad(mask=torch.full((5, 5), math.nan)), "use -inf where"),
        (bad(mask=torch.zeros(5, 5, dtype=torch.bool)), "True in a boolean mask means"),
        (bad(scale=math.inf), "finite"),
        (bad(convention="tall"), "'wide' or 'stacked'"),
        (bad(w_v=torch.zeros(3, 6), convention="stacked"), "use 'wide'"),
        (bad(w_v=torch.zeros(2, 6, device="meta")), "move them together"),
        (bad(memory=1000), "0.3 GB, 0.0 GB are allowed: take fewer tokens, or smallest=False"),
    ],
)
def test_errors_say_what_to_do(inputs, message) -> None:
    with pytest.raises(ConditioningError, match=message):
        attention_jacobian(**inputs)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 3), (4, 2, 3), (4, 2, 3)), r"w_q must be \(heads, head_dim, in\)"),
        (((4, 2, 3), (3, 2, 3), (3, 2, 3)), "must divide that of Q"),
        (((4, 2, 3), (2, 2, 3), (4, 2, 3)), "equally many"),
    ],
)
def test_errors_of_several_heads(shapes, message) -> None:
    with pytest.raises(ConditioningError, match=message):
        attention_jacobians(gaussian(5, 3), *[gaussian(*s) for s in shapes])
    w = gaussian(4, 2, 3)
    with pytest.raises(ConditioningError, match="bias_q of shape"):
        attention_jacobians(gaussian(5, 3), w, w, w, bias_q=gaussian(2))


def test_a_head_that_does_not_fit_still_has_a_largest_singular_value() -> None:
    inputs = plain_head(64, 40, 16)
    with pytest.raises(ConditioningError, match="raise memory="):
        attention_jacobian(*inputs, memory=100_000_000)
    found = attention_jacobian(*inputs, memory=100_000_000, smallest=False)
    assert found.sigma_max == pytest.approx(attention_jacobian(*inputs).sigma_max, rel=1e-10)
    assert found.kappa is None
    with pytest.raises(ConditioningError, match="fewer tokens"):
        gram(*inputs, memory=1000)
    with pytest.raises(ConditioningError, match="fewer tokens"):
        derivatives(*inputs, memory=1000)


def rotate(t: Tensor) -> Tensor:
    angle = torch.arange(len(t), dtype=t.dtype)[:, None] / torch.arange(1, t.shape[1] // 2 + 1)
    a, b = t.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def rotary(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return sdpa(*[t[None] for t in (rotate(x @ q.mT), rotate(x @ k.mT), x @ v.mT)])


def normalised(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    unit = torch.nn.functional.normalize
    return torch.softmax(10 * unit(x @ q.mT, dim=-1) @ unit(x @ k.mT, dim=-1).mT, -1) @ (x @ v.mT)


def cross_covariance(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    unit = torch.nn.functional.normalize
    p = torch.softmax(unit(x @ q.mT, dim=0).mT @ unit(x @ k.mT, dim=0), -1)
    return (x @ v.mT) @ p.mT


@pytest.mark.parametrize("convention", ["wide", "stacked"])
@pytest.mark.parametrize("head", [rotary, normalised, cross_covariance])
def test_other_attention_as_a_function(head, convention, route) -> None:
    x, *weights = plain_head(6, 9, 4)
    leaves = [w.float().requires_grad_() for w in weights]
    found = jacobian_of(lambda *w: head(x, *w), leaves, convention=convention)
    exact = tuple(w.detach().double() for w in leaves)
    agrees(found, torch.linalg.svdvals(jacobian(exact, convention, lambda *w: head(x, *w))))
    assert found.path == {"svd": "dense", "gram": "matrix-free"}[route]
    assert all(w.grad is None for w in leaves)


@pytest.mark.parametrize("convention", ["wide", "stacked"])
def test_a_function_and_the_closed_form_agree(convention, route) -> None:
    x, *weights = plain_head(6, 9, 3)
    exact = attention_jacobian(x, *weights, convention=convention)
    given = jacobian_of(lambda *w: attend(x, *w), weights, convention=convention, rank=exact.rank)
    assert given.rank_rule == "given"
    assert same(given, exact)
    assert given.shape == exact.shape
    counted = jacobian_of(lambda *w: attend(x, *w), weights, convention=convention)
    assert same(counted, exact)
    largest = jacobian_of(lambda *w: attend(x, *w), weights, convention=convention, smallest=False)
    assert largest.sigma_max == pytest.approx(exact.sigma_max)
    assert largest.path == "matrix-free"


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (lambda w: w.float(), {}, "must return one float64 tensor, not torch.float32"),
        (lambda w: (w, w), {}, "must return one float64 tensor"),
        (lambda w: torch.eye(2) @ w, {}, "make the tensors that it uses"),
        (lambda w: w / 0, {}, "returned NaN or inf"),
        (lambda w: w, {"rank": 9}, "rank is 9"),
        (lambda w: w, {"convention": "tall"}, "'wide' or 'stacked'"),
        (lambda w: w, {"memory": 10}, "raise memory="),
    ],
)
def test_errors_of_functions_say_what_to_do(function, options, message) -> None:
    with pytest.raises(ConditioningError, match=message):
        jacobian_of(function, [torch.eye(2)], **options)


def test_errors_of_weights_say_what_to_do() -> None:
    with pytest.raises(ConditioningError, match="non-empty"):
        jacobian_of(lambda: torch.zeros(1), [])
    with pytest.raises(ConditioningError, match="NaN or inf"):
        jacobian_of(lambda w: w, [torch.tensor([math.nan])])
    with pytest.raises(ConditioningError, match="weights of one shape"):
        jacobian_of(lambda a, b: a, [torch.eye(2), torch.eye(3)], convention="stacked")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("convention", ["wide", "stacked"])
def test_a_gpu_says_what_the_cpu_says(convention, route) -> None:
    for n, width, d in ((24, 32, 16), (60, 12, 8)):
        inputs = plain_head(n, width, d)
        on_gpu = attention_jacobian(*[t.cuda() for t in inputs], convention=convention)
        assert same(on_gpu, attention_jacobian(*inputs, convention=convention))
