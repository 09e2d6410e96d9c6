"""Matrices to test with: drawn, or of a given spectrum."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def with_spectrum(m: int, n: int, sigma: Tensor | Sequence[float], seed: int = 0) -> Tensor:
    left = torch.linalg.qr(gaussian(m, len(sigma), seed=seed))[0]
    right = torch.linalg.qr(gaussian(n, len(sigma), seed=seed + 1))[0]
    return (left * torch.as_tensor(sigma, dtype=torch.float64)) @ right.mT


def spread(kappa: float, n: int) -> Tensor:
    """Singular values from 1 down to 1/κ."""
    return torch.logspace(0, -torch.tensor(kappa).log10().item(), n, dtype=torch.float64)


def drift_bound(norm: float, drift: float) -> float:
    """What docs/methods.md says of κ(W_t + σU) once W moved by ``drift`` from where σ, U are of."""
    return (2 * norm + drift) / (norm - drift) if norm > drift else math.inf
