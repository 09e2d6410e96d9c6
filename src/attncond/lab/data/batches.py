"""One rank's batches: the same for the same seed, whatever came before and however many ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from attncond.lab.data.source import DataSettings, Files, Split

__all__ = ["Batches"]


class Batches:
    """One rank's share of every batch of ``batch_size * world`` images."""

    def __init__(
        self,
        split: Split | Files,
        data: DataSettings,
        *,
        batch_size: int,
        seed: int,
        device: torch.device | str,
        train: bool,
        classes: int,
        rank: int = 0,
        world: int = 1,
        smoothing: float = 0.0,
    ) -> None:
        assert isinstance(split, Split)
        self.device = torch.device(device)
        self.images = split.images.to(self.device)
        self.labels = split.labels.to(self.device)
        self.mean = torch.tensor(split.mean, device=self.device).view(1, -1, 1, 1) * 255
        self.std = torch.tensor(split.std, device=self.device).view(1, -1, 1, 1) * 255
        self.augment, self.train, self.seed = data.augment, train, seed
        self.batch_size, self.rank, self.world = batch_size, rank, world
        n, whole = len(split), batch_size * world
        self.steps_per_epoch = n // whole if train else -(-n // whole)

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of an epoch from step ``start`` on: normalised float images, and targets."""
        n, chunks = len(self.labels), self.steps_per_epoch * self.world
        if not self.train:
            for step in range(start, self.steps_per_epoch):
                c = step * self.world + self.rank
                here = slice(c * n // chunks, (c + 1) * n // chunks)
                yield (self.images[here].float() - self.mean) / self.std, self.labels[here]
            return
        random = np.random.default_rng([self.seed, number])
        order = torch.from_numpy(random.permutation(n)).to(self.device)
        pad = self.augment.crop
        shift = torch.from_numpy(random.integers(0, 2 * pad + 1, (n, 2))).to(self.device)
        mirrored = torch.from_numpy(random.random(n) < 0.5).to(self.device) & self.augment.flip
        for step in range(start, self.steps_per_epoch):
            first = (step * self.world + self.rank) * self.batch_size
            here = slice(first, first + self.batch_size)
            x = self.images[order[here]]
            size = x.shape[-1]
            along = torch.arange(size, device=self.device)
            rows = shift[here, 0, None] + along
            along = torch.where(mirrored[here, None], along.flip(0), along)
            columns = shift[here, 1, None] + along
            x = F.pad(x, (pad,) * 4)
            each = torch.arange(len(x), device=self.device).view(-1, 1, 1)
            x = x.permute(0, 2, 3, 1)[each, rows[:, :, None], columns[:, None, :]]
            yield (x.permute(0, 3, 1, 2).float() - self.mean) / self.std, self.labels[order[here]]
