"""Random crop of a padded image and random flip, for a whole batch in one gather."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from attncond.lab.data.draws import Draw, Ints
from attncond.lab.data.source import AugmentSettings

__all__ = ["Crops", "padded"]


def padded(images: Tensor, crop: int) -> Tensor:
    """Images (N, C, H, W) with ``crop`` black pixels on each side, as (N, H, W, C).

    With its channels together, a pixel is one thing to fetch.
    """
    return F.pad(images, (crop,) * 4).permute(0, 2, 3, 1).contiguous()


class Crops:
    """Views of an epoch: which image, moved by how much, mirrored or not."""

    def __init__(self, augment: AugmentSettings, draw: Draw, order: Ints, size: int) -> None:
        random = draw.stream("crop")
        shift = random.integers(0, 2 * augment.crop + 1, (draw.count, 2))
        mirrored = random.random(draw.count) < (0.5 if augment.flip else 0.0)
        self.which = draw.mine(order)
        self.shift = draw.mine(shift)
        self.mirrored = draw.mine(mirrored)
        self.along = torch.arange(size, device=draw.device)
        self.plain = not augment.crop and not augment.flip

    def __call__(self, padded_images: Tensor, step: int) -> Tensor:
        """uint8 (B, C, H, W) of a step."""
        which = self.which[step]
        if self.plain:
            return padded_images[which].permute(0, 3, 1, 2).contiguous()
        rows = self.shift[step, :, 0, None] + self.along
        across = torch.where(self.mirrored[step, :, None], self.along.flip(0), self.along)
        columns = self.shift[step, :, 1, None] + across
        pixels = padded_images[which[:, None, None], rows[:, :, None], columns[:, None, :]]
        return pixels.permute(0, 3, 1, 2).contiguous()
