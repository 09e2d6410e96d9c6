"""Polar factors, held against the SVD."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from spectra import gaussian, spread, with_spectrum
from torch import Tensor

from attncond.linalg import condition_number, spectral_norm, start_block, track_norm
from attncond.polar import _schedule, polar, track_polar

props = settings(derandomize=True, deadline=None, max_examples=40)
sides = st.integers(1, 24)
seeds = st.integers(0, 2**16)


def svd_polar(a: Tensor) -> Tensor:
    left, _, right = torch.linalg.svd(a.double(), full_matrices=False)
    return left @ right


def defect(u: Tensor) -> float:
    """The largest |σ_i(U) − 1|."""
    return float((torch.linalg.svdvals(u.double()) - 1).abs().max())


def corrected_kappa(a: Tensor, u: Tensor) -> float:
    """The worst κ(A + σ_max·U) of a batch, in float64."""
    a, u = a.double(), u.double()
    top = torch.linalg.svdvals(a)[..., :1, None]
    sigma = torch.linalg.svdvals(a + top * u)
    return float((sigma[..., 0] / sigma[..., -1]).max())


@pytest.mark.parametrize("shape", [(96, 96), (160, 64), (64, 160), (1, 50), (50, 1), (1, 1)])
@pytest.mark.parametrize("kappa", [1.0, 1e2, 1e4])
@pytest.mark.parametrize(("dtype", "eps"), [(torch.float32, 2e-6), (torch.float64, 1e-13)])
def test_polar_matches_the_svd(
    shape: tuple[int, int], kappa: float, dtype: torch.dtype, eps: float
) -> None:
    a = with_spectrum(*shape, spread(kappa, min(shape))).to(dtype)
    u = polar(a)
    assert u.dtype == dtype
    assert defect(u) < eps
    # The polar factor itself moves by κ times a relative perturbation of A.
    assert torch.linalg.matrix_norm(u.double() - svd_polar(a), 2) < 20 * eps * kappa


DEFICIENT = {
    "kappa 1e6": with_spectrum(96, 96, spread(1e6, 96)),
    "kappa 1e8": with_spectrum(96, 96, spread(1e8, 96)),
    "kappa 1e30": with_spectrum(96, 96, spread(1e30, 96)),
    "half the rank": gaussian(96, 48) @ gaussian(48, 96, seed=1),
    "rank one": gaussian(96, 1) @ gaussian(1, 96, seed=1),
    "one entry": torch.zeros(96, 96).index_put_((torch.tensor(3), torch.tensor(7)), torch.ones(())),
    "zero rows and columns": gaussian(96, 96).index_fill_(0, torch.arange(9), 0)
    .index_fill_(1, torch.arange(40, 44), 0),
    "one row less": gaussian(96, 96).index_fill_(0, torch.tensor([5]), 0),
    "tall, rank one": gaussian(160, 1) @ gaussian(1, 32, seed=1),
    "wide, zero rows": gaussian(32, 160).index_fill_(0, torch.arange(9), 0),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFICIENT)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_polar_completes_what_the_matrix_leaves_open(name: str, dtype: torch.dtype) -> None:
    a = DEFICIENT[name].to(dtype)
    u = polar(a)
    assert u.dtype == torch.promote_types(dtype, torch.float32)
    assert defect(u) < 1e-5
    assert corrected_kappa(a, u) < 2.0001


def test_polar_converges_each_matrix_of_a_mixed_batch() -> None:
    batch = torch.stack([a for a in DEFICIENT.values() if a.shape == (96, 96)]).float()
    batch = torch.stack([batch, gaussian(*batch.shape, seed=3).float()])
    u = polar(batch)
    assert u.shape == batch.shape
    assert defect(u) < 1e-5
    assert corrected_kappa(batch, u) < 2.0001
    torch.testing.assert_close(u[0, 0], polar(batch[0, 0]), atol=1e-2, rtol=0)


@props
@given(m=sides, n=sides, batch=st.sampled_from([(), (3,), (2, 2)]), seed=seeds)
def test_polar_of_any_shape_is_orthonormal(
    m: int, n: int, batch: tuple[int, ...], seed: int
) -> None:
    a = gaussian(*batch, m, n, seed=seed).float()
    u = polar(a)
    assert u.shape == a.shape
    assert defect(u) < 2e-6
    assert corrected_kappa(a, u) < 2.00001


@props
@given(m=sides, n=sides, exponent=st.floats(-20, 20), seed=seeds)
def test_polar_ignores_the_scale(m: int, n: int, exponent: float, seed: int) -> None:
    a = gaussian(m, n, seed=seed)
    torch.testing.assert_close(polar(10**exponent * a), polar(a), atol=1e-9, rtol=0)


def test_polar_takes_a_norm_that_is_far_off() -> None:
    a = gaussian(3, 64, 64).float()
    sigma = spectral_norm(a)
    for factor in (0.1, 0.96, 1.0, 1.5):
        torch.testing.assert_close(polar(a, factor * sigma), polar(a), atol=1e-3, rtol=0)


def test_polar_keeps_a_near_factor_only_where_the_matrix_does_not_decide() -> None:
    a = gaussian(64, 64).index_fill_(0, torch.arange(8), 0).float()
    near = svd_polar(gaussian(64, 64, seed=5)).float()
    first = polar(a)
    second = polar(a, near=first)
    torch.testing.assert_close(second, first, atol=1e-3, rtol=0)
    third = polar(a, near=near)
    torch.testing.assert_close(third[8:], first[8:], atol=1e-3, rtol=0)
    assert defect(third) < 1e-5
    assert torch.linalg.matrix_norm(third[:8] - first[:8]) > 0.1


def test_polar_refuses_what_has_no_factor() -> None:
    with pytest.raises(ValueError, match="zero matrix"):
        polar(torch.stack([torch.eye(4), torch.zeros(4, 4)]))
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="NaN or inf"):
            polar(torch.full((3, 3), bad))
    for a in (torch.ones(3), torch.ones(3, 0), torch.ones(3, 3, dtype=torch.int64)):
        with pytest.raises(ValueError, match="expected real matrices"):
            polar(a)


def test_bf16_is_computed_in_float32() -> None:
    a = gaussian(2, 80, 40).bfloat16()
    assert torch.equal(polar(a), polar(a.float()))
    assert torch.equal(track_polar(a, polar(a), spectral_norm(a)).float(), polar_twice(a.float()))


def polar_twice(a: Tensor) -> Tensor:
    return track_polar(a, polar(a), spectral_norm(a))


def test_global_state_is_left_alone() -> None:
    a = gaussian(300, 300).float().requires_grad_()
    matmul = (torch.backends.mkldnn.matmul, torch.backends.cuda.matmul)
    before = torch.get_rng_state(), [backend.fp32_precision for backend in matmul]
    u = polar(a)
    sigma, _ = track_norm(a, start_block(a))
    assert not track_polar(a, u, sigma).requires_grad
    with pytest.raises(ValueError, match="NaN"):
        polar(a * float("nan"))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert [backend.fp32_precision for backend in matmul] == before[1]


def test_autocast_does_not_lower_the_precision() -> None:
    a = gaussian(300, 300).float()
    sigma, u = spectral_norm(a), polar(a)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(polar(a), u)
        assert torch.equal(track_polar(a, u, sigma), polar_twice(a))


def test_results_repeat_bit_for_bit() -> None:
    a = gaussian(300, 300).float()
    assert torch.equal(polar(a), polar(a))


def drift(a: Tensor, steps: int, rank: int | None, seed: int) -> list[Tensor]:
    """A walk in steps of 1% of σ, every 50th of 10%."""
    walk = []
    for t in range(steps):
        step = gaussian(*a.shape, seed=1000 * seed + t)
        if rank is not None:
            step = step[:, :rank] @ gaussian(rank, a.shape[1], seed=1000 * seed + t + 500)
        size = 0.1 if t % 50 == 49 else 0.01
        a = a + size * step * (torch.linalg.matrix_norm(a, 2) / torch.linalg.matrix_norm(step, 2))
        walk.append(a.float())
    return walk


@pytest.mark.parametrize(
    ("a", "rank"),
    [
        (gaussian(64, 64), None),
        (gaussian(64, 64, seed=1), 1),
        (gaussian(96, 32), None),
        (gaussian(32, 96).index_fill_(0, torch.arange(4), 0), 2),
    ],
    ids=["square", "square, rank-1 steps", "tall", "wide, zero rows"],
)
def test_tracking_holds_kappa_over_a_drift(a: Tensor, rank: int | None) -> None:
    v, u = start_block(a), polar(a).float()
    for t, w in enumerate(drift(a, 300, rank, seed=7)):
        sigma, v = track_norm(w, v)
        u = polar(w, sigma, near=u) if t % 16 == 15 else track_polar(w, u, sigma)
        top = torch.linalg.svdvals(w.double())[0]
        assert -1e-6 < (top - sigma) / top < 1e-2
        assert defect(u) < 3e-4
        assert condition_number(w.double() + sigma.double() * u.double()) < 2.02


def test_tracking_holds_a_matrix_that_stays_singular() -> None:
    a = gaussian(48, 48).index_fill_(0, torch.arange(6), 0)
    u = polar(a).float()
    for w in drift(a, 60, None, seed=3):
        w = w.index_fill(0, torch.arange(6), 0)
        u = track_polar(w, u, spectral_norm(w))
        assert defect(u) < 3e-4


@pytest.mark.parametrize(("steps", "tolerance"), [(2, 3e-4), (3, 2e-6)])
def test_track_polar_removes_orthogonality_errors(steps: int, tolerance: float) -> None:
    a = gaussian(2, 80, 50).float()
    u = polar(a)
    noise = gaussian(2, 80, 50, seed=2).float()
    broken = u + 0.05 * noise / torch.linalg.matrix_norm(noise, 2)[:, None, None]
    assert defect(broken) > 1e-2
    assert defect(track_polar(a, broken, spectral_norm(a), steps)) < tolerance


def test_track_polar_needs_a_step() -> None:
    with pytest.raises(ValueError, match="steps"):
        track_polar(torch.eye(3), torch.eye(3), torch.ones(()), steps=0)


def test_quintics_meet_their_interval() -> None:
    for low, high, steps, left in [(1e-4, 1.0, 8, 5e-5), (0.8, 2.2, 2, 3e-4), (0.8, 2.2, 3, 1e-10)]:
        x = torch.logspace(
            torch.tensor(low).log10().item(), torch.tensor(high).log10().item(), 20001
        ).double()
        for a, b, c in _schedule(low, high, steps, 0.024):
            x = a * x + b * x**3 + c * x**5
        assert (x - 1).abs().max() < left
