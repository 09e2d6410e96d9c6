"""Norms and polar factors against float64 SVDs, from easy to rank-deficient inputs."""

from __future__ import annotations

import doctest
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attncond import linalg
from attncond.linalg import (
    condition_number,
    polar,
    spectral_norm,
    start_block,
    track_norm,
    track_polar,
)

props = settings(derandomize=True, deadline=None, max_examples=40)
sides = st.integers(1, 24)
seeds = st.integers(0, 2**16)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def with_spectrum(m: int, n: int, sigma: Tensor, seed: int = 0) -> Tensor:
    left = torch.linalg.qr(gaussian(m, len(sigma), seed=seed))[0]
    right = torch.linalg.qr(gaussian(n, len(sigma), seed=seed + 1))[0]
    return (left * sigma) @ right.mT


def spread(kappa: float, n: int) -> Tensor:
    return torch.logspace(0, -torch.tensor(kappa).log10().item(), n, dtype=torch.float64)


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


def test_the_examples_in_the_docstrings_run() -> None:
    outcome = doctest.testmod(linalg, extraglobs={"torch": torch})
    assert outcome.attempted >= 10
    assert outcome.failed == 0


SPECTRA = {
    "random": None,
    "all equal": torch.ones(300, dtype=torch.float64),
    "one, then clustered": torch.cat([torch.ones(1), 1 - 1e-4 * torch.rand(299)]).double(),
    "twenty at the top": torch.cat([torch.ones(20), 0.5 * torch.ones(280)]).double(),
    "dense near the top": 1 - 1e-2 * torch.linspace(0, 1, 300, dtype=torch.float64) ** 0.5,
    "close pair": torch.cat([torch.tensor([1, 1 - 1e-5]), torch.linspace(0.99, 0, 298)]).double(),
    "rank one": torch.ones(1, dtype=torch.float64),
    "decaying": spread(1e12, 300),
}


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_spectral_norm_is_accurate(name: str, dtype: torch.dtype, tolerance: float) -> None:
    sigma = SPECTRA[name]
    a = gaussian(300, 310) if sigma is None else with_spectrum(300, 310, sigma)
    batch = torch.stack([a, 3e-7 * a]).to(dtype)
    expected = torch.linalg.svdvals(batch.double())[:, 0]
    found = spectral_norm(batch)
    assert found.dtype == dtype
    assert ((found - expected).abs() <= tolerance * expected).all()
    assert ((spectral_norm(batch.mT) - expected).abs() <= tolerance * expected).all()


def test_spectral_norm_of_a_full_size_projection() -> None:
    a = gaussian(2, 768, 768).float()
    expected = torch.linalg.svdvals(a.double())[:, 0]
    assert ((spectral_norm(a) - expected).abs() <= 1e-6 * expected).all()


def test_lanczos_converges_without_the_dense_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linalg, "_dense_norm", lambda x: pytest.fail("fell back"))
    assert spectral_norm(gaussian(600, 600).float()) > 0


def test_the_dense_fallback_is_used_where_lanczos_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linalg, "_lanczos_norm", lambda x: (x[:, 0, 0] * 0, x[:, 0, 0] > 9e9))
    a = gaussian(2, 300, 300)
    torch.testing.assert_close(spectral_norm(a), torch.linalg.svdvals(a)[:, 0])


@props
@given(m=sides, n=sides, batch=st.sampled_from([(), (3,), (2, 2)]), seed=seeds)
def test_spectral_norm_of_any_shape(m: int, n: int, batch: tuple[int, ...], seed: int) -> None:
    a = gaussian(*batch, m, n, seed=seed)
    torch.testing.assert_close(
        spectral_norm(a), torch.linalg.svdvals(a)[..., 0], rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("n", [20, 300])
def test_spectral_norm_of_odd_inputs(n: int) -> None:
    a = torch.eye(n).repeat(5, 1, 1)
    a[1] = 0
    a[2, 3, 4] = float("nan")
    a[3] *= 1e30  # squares overflow in float32
    a[4] *= 1e-30
    found = spectral_norm(a)
    assert torch.isnan(found[2])
    keep = [0, 1, 3, 4]
    torch.testing.assert_close(
        found[keep], torch.tensor([1.0, 0.0, 1e30, 1e-30]), atol=0, rtol=1e-6
    )
    assert spectral_norm(torch.full((n, n), float("inf"))) == float("inf")
    for size in (1e200, 1e-200):
        assert spectral_norm(size * torch.eye(n).double()).item() == pytest.approx(size, rel=1e-12)


def test_condition_number() -> None:
    a = with_spectrum(40, 30, spread(1e5, 30))
    assert condition_number(a).item() == pytest.approx(1e5, rel=1e-8)
    assert condition_number(torch.zeros(2, 3)).item() == float("inf")
    assert condition_number(torch.diag(torch.tensor([1.0, 0.0]))).item() == float("inf")
    assert condition_number(torch.tensor([[float("nan")]])).isnan()
    assert condition_number(torch.ones(2, 3, 4, 1, dtype=torch.bfloat16)).shape == (2, 3)


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
    assert torch.equal(spectral_norm(a), spectral_norm(a.float()))
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
        assert torch.equal(spectral_norm(a), sigma)
        assert torch.equal(polar(a), u)
        assert torch.equal(track_polar(a, u, sigma), polar_twice(a))
        tracked, _ = track_norm(a, start_block(a))
    torch.testing.assert_close(tracked, sigma, rtol=1e-2, atol=0)


def test_results_repeat_bit_for_bit() -> None:
    a = gaussian(300, 300).float()
    assert torch.equal(spectral_norm(a), spectral_norm(a))
    assert torch.equal(start_block(a), start_block(a))
    assert torch.equal(polar(a), polar(a))


@pytest.mark.parametrize("shape", [(60, 60), (90, 40), (40, 90), (1, 9), (9, 1)])
def test_track_norm_converges_on_a_fixed_matrix(shape: tuple[int, int]) -> None:
    a = gaussian(2, *shape).float()
    expected = torch.linalg.svdvals(a.double())[:, 0]
    v = start_block(a)
    for _ in range(20):
        sigma, v = track_norm(a, v)
    assert v.shape == (2, shape[1], min(8, *shape))
    assert (sigma <= expected * (1 + 1e-6)).all()
    torch.testing.assert_close(sigma.double(), expected, rtol=1e-5, atol=0)


def test_track_norm_recovers_from_low_rank_and_zero_matrices() -> None:
    a = gaussian(50, 50).float()
    low = (gaussian(50, 1) @ gaussian(1, 50, seed=1)).float()
    v = start_block(a)
    for stage, expected in ((low, spectral_norm(low)), (0 * a, torch.tensor(0.0))):
        for _ in range(5):
            sigma, v = track_norm(stage, v)
        torch.testing.assert_close(sigma, expected, rtol=1e-5, atol=0)
    for _ in range(40):
        sigma, v = track_norm(a, v)
    torch.testing.assert_close(sigma, spectral_norm(a), rtol=1e-4, atol=0)


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
        for a, b, c in linalg._schedule(low, high, steps, 0.024):
            x = a * x + b * x**3 + c * x**5
        assert (x - 1).abs().max() < left


def test_threads_do_not_restore_each_others_precision() -> None:
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        a = gaussian(2, 300, 300).float()
        with ThreadPoolExecutor(4) as pool:
            norms = list(pool.map(lambda _: spectral_norm(a), range(8)))
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
    assert all(torch.equal(norm, norms[0]) for norm in norms)
