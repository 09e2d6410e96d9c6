"""Random erasing as timm does it with mode "pixel": a rectangle of normalised images gets noise."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from attncond.lab.data.draws import Draw

__all__ = ["Erasing"]

_ATTEMPTS = 10
_AREA = (0.02, 1 / 3)
_ASPECT = (math.log(0.3), math.log(1 / 0.3))
_BANK = 64  # larger than the image by so many pixels


class Erasing:
    """Rectangles of an epoch; the first of ten draws that fits is taken, as timm does.

    Noise comes from one field for the epoch, from a random place of it for each image: fresh
    noise for every pixel would cost more to draw than all else together.
    """

    def __init__(self, draw: Draw, probability: float, size: int) -> None:
        random = draw.stream("erase")
        count = draw.count
        chosen = random.random(count) < probability
        area = random.uniform(*_AREA, (count, _ATTEMPTS)) * size * size
        aspect = np.exp(random.uniform(*_ASPECT, (count, _ATTEMPTS)))
        heights = np.rint(np.sqrt(area * aspect)).astype(np.int64)
        widths = np.rint(np.sqrt(area / aspect)).astype(np.int64)
        fits = (heights < size) & (widths < size)
        first = fits.argmax(1)[:, None]
        height = np.take_along_axis(heights, first, 1)[:, 0]
        width = np.take_along_axis(widths, first, 1)[:, 0]
        height = np.where(chosen & fits.any(1), height, 0)
        top = np.floor(random.random(count) * (size - height + 1)).astype(np.int64)
        left = np.floor(random.random(count) * (size - width + 1)).astype(np.int64)
        box = np.stack([top, top + height, left, left + width], 1)
        self.box = draw.mine(box)[..., None]
        self.offset = draw.mine(random.integers(0, _BANK, (count, 2)))
        field = random.standard_normal((size + _BANK, size + _BANK, 3))
        self.field = draw.moved(field, torch.float32)
        self.along = torch.arange(size, device=draw.device)

    def __call__(self, images: Tensor, step: int) -> Tensor:
        """Normalised images (B, 3, H, W) with their rectangles filled."""
        top, bottom, left, right = self.box[step].unbind(1)
        rows = (self.along >= top) & (self.along < bottom)
        columns = (self.along >= left) & (self.along < right)
        inside = (rows[:, :, None] & columns[:, None, :])[:, None]
        offset = self.offset[step]
        across = (offset[:, 1, None] + self.along)[:, None, :]
        noise = self.field[(offset[:, 0, None] + self.along)[:, :, None], across]
        return torch.where(inside, noise.permute(0, 3, 1, 2), images)
