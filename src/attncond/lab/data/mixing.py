"""Mixup and cutmix with timm's meaning: one draw for a batch, partners from its other end."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from attncond.lab.data.draws import Draw
from attncond.lab.data.source import AugmentSettings

__all__ = ["Mixing", "soft_targets"]

_SWITCH = 0.5  # share of cutmix where both are on, as timm has it by default


class Mixing:
    """What is mixed in each step of an epoch, and how much of it."""

    def __init__(
        self, augment: AugmentSettings, draw: Draw, size: int, classes: int, smoothing: float
    ) -> None:
        random = draw.stream("mix")
        steps = len(draw.places)
        self.classes, self.smoothing = classes, smoothing
        mixed = random.random(steps) < augment.mixup_prob
        switch = random.random(steps)
        alphas = np.array([augment.mixup or 1.0, augment.cutmix or 1.0])
        shares = random.beta(alphas, alphas, (steps, 2))
        self.cut = (switch < _SWITCH) if augment.mixup and augment.cutmix else switch < 0
        if not augment.mixup:
            self.cut = switch >= 0
        self.share = np.where(mixed, np.where(self.cut, shares[:, 1], shares[:, 0]), 1.0)
        centre = random.integers(0, size, (steps, 2))
        side = (size * np.sqrt(1 - self.share)).astype(np.int64)[:, None]
        low, high = np.clip([centre - side // 2, centre + (side + 1) // 2], 0, size)
        self.box = np.concatenate([low, high], 1)  # top, left, bottom, right
        area = (high - low).prod(1) / size**2
        # A box that hangs over the border is smaller than was drawn; the share follows it.
        self.share = np.where(self.cut, 1 - area, self.share)

    def __call__(self, images: Tensor, labels: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Mixed images, and targets (B, classes)."""
        share = float(self.share[step])
        if share != 1.0:
            other = images.flip(0)
            if self.cut[step]:
                top, left, bottom, right = self.box[step].tolist()
                images = images.clone()
                images[:, :, top:bottom, left:right] = other[:, :, top:bottom, left:right]
            else:
                images = images * share + other * (1.0 - share)
        return images, soft_targets(labels, self.classes, share, self.smoothing)


def soft_targets(labels: Tensor, classes: int, share: float, smoothing: float) -> Tensor:
    """Label-smoothed targets of images mixed with those from the other end of the batch."""
    off = smoothing / classes
    targets = torch.full((len(labels), classes), off, device=labels.device)
    targets.scatter_(1, labels[:, None], 1.0 - smoothing + off)
    return targets * share + targets.flip(0) * (1.0 - share)
