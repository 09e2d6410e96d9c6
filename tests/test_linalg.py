"""Norms against float64 SVDs, from easy to rank-deficient inputs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from spectra import gaussian, spread, with_spectrum

from attncond import linalg
from attncond.linalg import (
    condition_number,
    spectral_norm,
    start_block,
    track_norm,
)

props = settings(derandomize=True, deadline=None, max_examples=40)
sides = st.integers(1, 24)
seeds = st.integers(0, 2**16)


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


def test_bf16_is_computed_in_float32() -> None:
    a = gaussian(2, 80, 40).bfloat16()
    assert torch.equal(spectral_norm(a), spectral_norm(a.float()))


def test_autocast_does_not_lower_the_precision() -> None:
    a = gaussian(300, 300).float()
    sigma = spectral_norm(a)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(spectral_norm(a), sigma)
        tracked, _ = track_norm(a, start_block(a))
    torch.testing.assert_close(tracked, sigma, rtol=1e-2, atol=0)


def test_results_repeat_bit_for_bit() -> None:
    a = gaussian(300, 300).float()
    assert torch.equal(spectral_norm(a), spectral_norm(a))
    assert torch.equal(start_block(a), start_block(a))


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
