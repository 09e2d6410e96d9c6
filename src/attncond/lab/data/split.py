"""Which images train, which choose and which judge: drawn once and for all, never by a run's seed.

Every seed and every variant of an experiment shares the same split, so that what is chosen on the
validation images is chosen on images that no run has learned from.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from attncond.lab.data.source import DataError

__all__ = ["SPLIT_SEED", "hold_out", "shuffled"]

SPLIT_SEED = 20260307


def hold_out(labels: Tensor, share: float, purpose: str) -> tuple[Tensor, Tensor]:
    """Places that are kept and places that are held out, the same share of every class.

    A class that has images keeps at least one of them, and gives one where ``share`` is not 0.
    """
    if not 0 <= share < 1:
        raise DataError(
            f"data.{purpose} is a share of the training images, 0 <= share < 1: {share}"
        )
    random = np.random.default_rng([SPLIT_SEED, *purpose.encode()])
    kept: list[np.ndarray] = []
    held: list[np.ndarray] = []
    values = labels.numpy()
    for label in np.unique(values):
        places = random.permutation(np.flatnonzero(values == label))
        count = min(max(round(share * len(places)), int(share > 0)), len(places) - 1)
        held.append(places[:count])
        kept.append(places[count:])
    return _sorted(kept), _sorted(held)


def shuffled(count: int, seed: int) -> Tensor:
    """A random order of ``count`` places."""
    return torch.from_numpy(np.random.default_rng([SPLIT_SEED, seed]).permutation(count))


def _sorted(parts: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.sort(np.concatenate(parts))) if parts else torch.empty(0).long()
