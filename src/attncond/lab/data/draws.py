"""Everything random about an epoch's batches, as a function of seed and epoch alone.

Numbers are drawn on the CPU for all images of an epoch at once, by their place in the epoch, and
moved to the device together. So a run that goes on in the middle of an epoch needs no saved state,
CPU and GPU see the same, ranks share one draw of which each takes its places, and no step waits
for another transfer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Draw", "evaluation_bounds", "image_order", "rank_places"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Draw:
    """Random numbers of one epoch for ``count`` places, of which a rank takes ``places``."""

    seed: int
    epoch: int
    count: int
    places: Ints  # (steps, batch)
    device: torch.device

    def stream(self, purpose: str) -> np.random.Generator:
        """Independent of all other purposes, so that one augmentation does not change another."""
        return np.random.default_rng([self.seed, self.epoch, *purpose.encode()])

    def mine(self, values: np.ndarray, dtype: torch.dtype | None = None) -> Tensor:
        """Values (count, ...) of all places as the rank's (steps, batch, ...) on its device."""
        return self.moved(values[self.places], dtype)

    def moved(self, values: np.ndarray, dtype: torch.dtype | None = None) -> Tensor:
        """An array on the device."""
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        if dtype is not None:
            tensor = tensor.to(dtype)
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)


def image_order(images: int, repeats: int, seed: int, epoch: int) -> Ints:
    """Which image is at which place of an epoch: every one once, or some of them ``repeats`` times.

    As in DeiT, an epoch is as long with repeats as without: it shows fewer images more often.
    """
    order = np.random.default_rng([seed, epoch, *b"order"]).permutation(images)
    return np.repeat(order[: -(-images // repeats)], repeats)[:images]


def rank_places(steps: int, batch: int, rank: int, world: int, paired: bool) -> Ints:
    """A rank's places in an epoch, (steps, batch).

    A slice of each global batch; or, where images are mixed in pairs (i, last - i) as timm does,
    a slice of the first half and the partners of it, so that a pair is never torn apart and its
    members are again at i and last - i.
    """
    whole = batch * world
    if paired:
        first = np.arange(rank * (batch // 2), (rank + 1) * (batch // 2))
        inside = np.concatenate([first, (whole - 1 - first)[::-1]])
    else:
        inside = np.arange(rank * batch, (rank + 1) * batch)
    places: Ints = np.arange(steps)[:, None] * whole + inside
    return places


def evaluation_bounds(images: int, batch: int, rank: int, world: int) -> list[tuple[int, int]]:
    """First and last + 1 of a rank's batches: together all images, each once.

    All ranks have equally many batches, or a rank with less to do would leave the others waiting
    where weights are sharded; and none is empty (with batches of at least two images, and at least
    as many images as ranks). So sizes are equal up to one, not up to the last.
    """
    chunks = -(-images // (batch * world)) * world
    return [(c * images // chunks, (c + 1) * images // chunks) for c in range(rank, chunks, world)]
