"""The mathematics of Spectral: its certificates hold, and its targets are reached."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from spectra import drift_bound, gaussian
from torch import Tensor

import attncond as ac
from attncond.methods.spectral import (
    PolarState,
    follow,
    shift_certificate,
)
from attncond.weights import _polar_certificate

props = settings(derandomize=True, deadline=None, max_examples=60)
sides = st.integers(1, 16)
seeds = st.integers(0, 2**16)
targets = st.floats(1.01, 50.0)

ROUNDING = 1 + 1e-10


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """Random, graded, of low rank, or a diagonal of ±σ, against which λI works hardest."""
    m, n, seed = draw(sides), draw(sides), draw(seeds)
    kind = draw(st.sampled_from(["random", "graded", "rank one", "signs", "minus identity"]))
    a = gaussian(m, n, seed=seed)
    if kind == "graded":
        a = a * torch.logspace(0, -8, n, dtype=a.dtype)
    elif kind == "rank one":
        a = a[:, :1] @ a[:1]
    elif kind == "signs":
        a = torch.eye(m, n, dtype=a.dtype) * torch.sign(a[:1])
    elif kind == "minus identity":
        a = -torch.eye(m, n, dtype=a.dtype)
    return a * draw(st.sampled_from([1e-3, 1.0, 40.0]))


def kappa(a: Tensor) -> float:
    sigma = torch.linalg.svdvals(a)
    return float(sigma[0] / sigma[-1])


def norm(a: Tensor) -> float:
    return float(torch.linalg.svdvals(a)[0])


def shifted(a: Tensor, lam: float) -> Tensor:
    return a + lam * torch.eye(*a.shape, dtype=a.dtype)


# Arguments ----------------------------------------------------------------------------------------

NOT_NUMBERS = [math.nan, math.inf, -math.inf, True, "2", [2.0]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(({"kappa": k}, "kappa must be a finite number above 1") for k in (1, 1.0, 0.5, 0, -2)),
        *(({"kappa": k}, "kappa must be a finite number above 1") for k in NOT_NUMBERS),
        *(({"lam": x}, "lam must be a finite number above 0") for x in (0, 0.0, -1.0)),
        *(({"lam": x}, "lam must be a finite number above 0") for x in NOT_NUMBERS),
        ({"kappa": 2.0, "lam": 1.0}, "kappa or lam, not both"),
        ({"correction": "svd"}, "correction must be 'identity' or 'polar', not 'svd'"),
        ({"correction": None}, "correction must be"),
        ({"scope": "row"}, "scope must be 'projection' or 'head', not 'row'"),
        ({"scope": None}, "scope must be"),
        *(
            ({"roles": r}, "roles must be some of 'qkv', each once")
            for r in ("", "qx", "qq", "QK", None, ("q", "k"), 3)
        ),
        *(
            ({"correction": "polar", "refresh_every": n}, "refresh_every must be a whole number")
            for n in (0, -1, 1.5, True, math.nan, math.inf, None, "2")
        ),
        *(({"preserve_norm": p}, "preserve_norm must be True or False") for p in ("no", None, 1)),
        *(({"gain": g}, "gain must be a finite number above 0") for g in NOT_NUMBERS),
        ({"refresh_every": 2}, "refresh_every belongs to correction='polar'"),
        ({"correction": "polar", "kappa": 1.5}, "takes neither kappa nor lam"),
        ({"correction": "polar", "lam": 1.5}, "takes neither kappa nor lam"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ac.ConditioningError) as caught:
        ac.Spectral(**arguments)
    assert message in str(caught.value)
    if len(arguments) == 1 and "belongs" not in message:
        assert repr(next(iter(arguments.values()))) in str(caught.value)


def test_numbers_of_numpy_become_plain() -> None:
    method = ac.Spectral(kappa=np.float32(1.5), gain=np.int64(2))
    assert json.loads(json.dumps(dataclasses.asdict(method))) == dataclasses.asdict(
        ac.Spectral(kappa=1.5, gain=2)
    )
    assert ac.Spectral(correction="polar", refresh_every=np.int64(3)).refresh_every == 3
    with pytest.raises(ac.ConditioningError, match="kappa must be a finite number above 1"):
        ac.Spectral(kappa=np.float32("nan"))


@pytest.mark.parametrize(
    ("method", "target"),
    [
        (ac.Spectral(), 2.0),
        (ac.Spectral(kappa=3), 3),
        (ac.Spectral(lam=3), None),
        (ac.Spectral.paper(), None),
        (ac.Spectral.paper_svd(), 2.0),
        (ac.Spectral(correction="polar", refresh_every=7), 2.0),
    ],
)
def test_the_target_is_what_is_guaranteed(method: ac.Spectral, target: float | None) -> None:
    assert method.target == target


def test_the_paper_in_its_own_words() -> None:
    assert (ac.Spectral.paper().lam, ac.Spectral.paper().preserve_norm) == (10.0, False)
    assert ac.Spectral.paper().correction == "identity"
    assert ac.Spectral.paper_svd().correction == "polar"
    assert not ac.Spectral.paper_svd().preserve_norm
    assert ac.Spectral.paper_svd().refresh_every == 1


def test_a_method_is_a_value() -> None:
    assert ac.Spectral(kappa=3) == ac.Spectral(kappa=3)
    assert len({ac.Spectral(), ac.Spectral(), ac.Spectral(kappa=3)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        ac.Spectral().kappa = 3  # type: ignore[misc]


# λI -----------------------------------------------------------------------------------------------


@props
@given(a=matrices(), ratio=st.floats(1.05, 30.0))
def test_the_certificate_of_a_shift_holds(a: Tensor, ratio: float) -> None:
    lam = ratio * norm(a)
    assert kappa(shifted(a, lam)) <= shift_certificate(lam, norm(a)) * ROUNDING


@pytest.mark.parametrize("lam", [1.5, 3.0, 20.0])
def test_the_certificate_of_a_shift_is_sharp(lam: float) -> None:
    """No smaller bound can hold for every matrix of norm σ: diag(σ, −σ) attains it."""
    worst = torch.diag(torch.tensor([1.0, -1.0], dtype=torch.float64))
    assert kappa(shifted(worst, lam)) == pytest.approx(shift_certificate(lam, 1.0), rel=1e-12)


@pytest.mark.parametrize(("lam", "size"), [(1.0, 1.0), (1.0, 2.0), (0.0, 0.0)])
def test_there_is_no_certificate_once_the_weights_outgrew_the_shift(
    lam: float, size: float
) -> None:
    assert shift_certificate(lam, size) == math.inf


def test_the_inequality_printed_in_the_paper_is_false() -> None:
    a, lam = torch.diag(torch.tensor([-9.9, 1.0], dtype=torch.float64)), 10.0
    sigma = torch.linalg.svdvals(a)
    true = kappa(shifted(a, lam))
    printed = float((lam + sigma[0]) / (lam - sigma[-1]))
    assert true == pytest.approx(110)
    assert printed == pytest.approx(2.2111, abs=1e-4)
    assert true > 49 * printed
    assert true <= shift_certificate(lam, float(sigma[0]))


@props
@given(a=matrices(), target=targets)
def test_identity_terms_reach_the_target_and_keep_the_norm(a: Tensor, target: float) -> None:
    s, lam = ac.Spectral(kappa=target).identity_terms(a[None])
    result = s * shifted(a, float(lam))
    assert kappa(result) <= target * ROUNDING
    assert norm(result) == pytest.approx(norm(a), rel=1e-10)
    assert float(lam) == pytest.approx(norm(a) * (target + 1) / (target - 1), rel=1e-10)


@pytest.mark.parametrize("size", [1, 5, 16])
def test_the_target_is_not_missed_by_a_rounding(size: int) -> None:
    """λ is rounded upwards: on the worst matrix the certificate itself stays below the target."""
    worst = torch.eye(size, dtype=torch.float32) * torch.tensor([1.0, -1.0] * size)[:size]
    for target in (1.1, 1.5, 2.0, 7.0):
        for scale in (1e-3, 0.3, 1.0, 17.0):
            a = scale * worst
            _, lam = ac.Spectral(kappa=target).identity_terms(a[None])
            assert shift_certificate(float(lam), norm(a.double())) <= target


@props
@given(a=matrices(), factor=st.floats(1e-2, 1e2), target=targets)
def test_scaling_the_weights_scales_only_the_shift(a: Tensor, factor: float, target: float) -> None:
    method = ac.Spectral(kappa=target)
    s, lam = method.identity_terms(a[None])
    scaled_s, scaled_lam = method.identity_terms(factor * a[None])
    torch.testing.assert_close(scaled_s, s, rtol=1e-9, atol=0)
    torch.testing.assert_close(scaled_lam, factor * lam, rtol=1e-9, atol=0)
    before, after = shifted(a, float(lam)), shifted(factor * a, float(scaled_lam))
    assert kappa(after) == pytest.approx(kappa(before), rel=1e-8)
    assert kappa(float(s) * before) == pytest.approx(kappa(before), rel=1e-8)


@props
@given(heads=st.integers(1, 4), dim=st.integers(1, 6), columns=st.integers(1, 24), seed=seeds)
def test_the_whole_projection_bounds_its_heads(
    heads: int, dim: int, columns: int, seed: int
) -> None:
    """A block of rows has σ_max no larger and, in a wide matrix, σ_min no smaller."""
    a = gaussian(heads * dim, max(columns, heads * dim), seed=seed)
    _, lam = ac.Spectral().identity_terms(a[None])
    whole = shifted(a, float(lam))
    assert max(kappa(block) for block in whole.view(heads, dim, -1)) <= kappa(whole) * ROUNDING


def test_heads_say_nothing_of_the_whole_projection() -> None:
    block = gaussian(3, 8)
    assert kappa(block) < 10
    assert kappa(torch.cat([block, block + 1e-6 * gaussian(3, 8, seed=1)])) > 1e5


def test_by_hand_and_literal_terms() -> None:
    a = gaussian(3, 6, 4)
    s, lam = ac.Spectral(lam=0.25).identity_terms(a)
    assert lam.tolist() == [0.25] * 3
    for i in range(3):
        assert norm(s[i] * shifted(a[i], 0.25)) == pytest.approx(norm(a[i]), rel=1e-10)
    kept = s
    s, lam = ac.Spectral(kappa=3, preserve_norm=False).identity_terms(a)
    assert s.tolist() == [1.0] * 3
    assert torch.allclose(ac.Spectral(lam=0.25, gain=3).identity_terms(a)[0], 3 * kept)
    assert [float(x) for x in lam] == pytest.approx([2 * norm(x) for x in a], rel=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_terms_are_computed_in_float32_at_least_and_leave_the_weights_alone(
    dtype: torch.dtype,
) -> None:
    a = gaussian(2, 6, 4).to(dtype)
    before = a.clone()
    s, lam = ac.Spectral().identity_terms(a)
    polar_s, state = ac.Spectral(correction="polar").polar_terms(a, 4)
    assert {t.dtype for t in (s, lam, polar_s, *state)} == {torch.float32}
    assert torch.equal(a, before)


# The polar correction -----------------------------------------------------------------------------


def polar_state(a: Tensor, width: int = 8) -> PolarState:
    return ac.Spectral(correction="polar").polar_terms(a, min(width, *a.shape[-2:]))[1]


def corrected(a: Tensor, state: PolarState) -> Tensor:
    return a + state.norm[:, None, None] * state.factor


def worst_kappa(a: Tensor, state: PolarState) -> float:
    return max(kappa(x) for x in corrected(a, state).double())


@props
@given(m=sides, n=sides, seed=seeds)
def test_polar_terms_at_the_start(m: int, n: int, seed: int) -> None:
    a = gaussian(2, m, n, seed=seed)
    s, state = ac.Spectral(correction="polar").polar_terms(a, min(8, m, n))
    for i in range(2):
        sigma = torch.linalg.svdvals(a[i])
        expected = float(2 * sigma[0] / (sigma[0] + sigma[-1]))
        result = s[i] * corrected(a, state)[i]
        # Directions below the resolution of the factor are completed as if they were not there.
        assert kappa(result) == pytest.approx(expected, rel=1e-5)
        assert norm(result) == pytest.approx(norm(a[i]), rel=1e-9)
    literal, _ = ac.Spectral.paper_svd().polar_terms(a, 1)
    assert literal.tolist() == [1.0, 1.0]


def test_a_matrix_without_full_rank_is_corrected_too() -> None:
    a = gaussian(1, 6, 1) @ gaussian(1, 1, 5)
    assert worst_kappa(a, polar_state(a)) == pytest.approx(2.0, rel=1e-6)


SHAPES = [(12, 12), (24, 12), (5, 20), (1, 7)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("how", "limit"), [("track", 2.02), ("anchor", 2.02), ("scratch", 2.002)])
def test_following_the_weights_keeps_the_promise(
    how: Any, limit: float, shape: tuple[int, int]
) -> None:
    """Weights that drift to another matrix, by 2% of their norm at each of fifty steps.

    The singular values stay above a tenth of the largest: a sign that flips is for the anchors.
    """
    left, _, right = torch.linalg.svd(gaussian(3, *shape), full_matrices=False)
    a = left * torch.linspace(1, 0.3, left.shape[-1], dtype=left.dtype) @ right
    a = a.float()
    state = polar_state(a)
    start = state.factor
    for step in range(50):
        turn = 0.02 * gaussian(3, shape[0], shape[0], seed=step).float() / shape[0] ** 0.5
        a = torch.linalg.matrix_exp(turn - turn.mT) @ a * 1.01
        state = follow(a, state, how)
        assert worst_kappa(a, state) <= limit
        # The norm is kept a little high, for the tracked one comes from below.
        sizes = torch.tensor([norm(x.double()) for x in a])
        assert ((state.norm / sizes - 1.01).abs() <= 0.011).all()
    if shape[0] > 1:
        assert (state.factor - start).abs().max() > 0.05


def test_an_anchor_takes_in_a_sign_that_tracking_cannot() -> None:
    """σ_min passes through zero: the polar factor flips there, and a tracked one does not."""
    state = polar_state(torch.diag(torch.tensor([1.0, 0.7, 0.2]))[None])
    for value in torch.linspace(0.2, -0.2, 41).tolist():
        a = torch.diag(torch.tensor([1.0, 0.7, value]))[None]
        state = follow(a, state, "track")
    assert worst_kappa(a, state) == pytest.approx(2.003 / (1.003 - 0.2), rel=1e-3)
    for how in ("anchor", "scratch"):
        assert worst_kappa(a, follow(a, state, how)) <= 2.002


@pytest.mark.parametrize("how", ["track", "anchor", "scratch"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_diverged_do_not_raise(how: Any, value: float) -> None:
    a = gaussian(2, 6, 4).float()
    state = polar_state(a)
    a[0, 2, 1] = value
    after = follow(a, state, how)
    assert not after.factor[0].isfinite().all()
    assert worst_kappa(a[1:], PolarState(*(t[1:] for t in after))) <= 2.02


@props
@given(m=sides, n=sides, seed=seeds, ratio=st.floats(0.0, 0.9))
def test_the_certificate_of_a_drift_holds_and_the_measured_one_is_no_worse(
    m: int, n: int, seed: int, ratio: float
) -> None:
    """W moved by e after an exact refresh: κ ≤ measured bound ≤ (2σ + e)/(σ − e)."""
    a, move = gaussian(m, n, seed=seed), gaussian(m, n, seed=seed + 1)
    left, sigma, right = torch.linalg.svd(a, full_matrices=False)
    correction = sigma[0] * (left @ right)
    moved = a + move * (ratio * float(sigma[0]) / norm(move))
    drift = norm(moved - a)
    promised = drift_bound(float(sigma[0]), drift)
    measured = _polar_certificate(moved, correction, norm(moved))
    assert kappa(moved + correction) <= measured * ROUNDING
    assert measured <= promised * ROUNDING


@pytest.mark.parametrize("drift", [0.1, 0.5, 0.9])
def test_the_certificate_of_a_drift_is_sharp(drift: float) -> None:
    """σ₁ grows by e while a singular value of zero falls by e: no smaller bound can hold."""
    moved = torch.diag(torch.tensor([1 + drift, -drift], dtype=torch.float64))
    correction = torch.eye(2, dtype=torch.float64)  # of diag(1, 0), a factor of which is I
    promised = drift_bound(1.0, drift)
    assert kappa(moved + correction) == pytest.approx(promised, rel=1e-12)
    assert _polar_certificate(moved, correction, 1 + drift) == pytest.approx(promised, rel=1e-12)
