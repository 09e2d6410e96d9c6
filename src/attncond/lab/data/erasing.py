"""Random erasing as timm does it with mode "pixel": a rectangle of normalised images gets noise."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from attncond.lab.data.draws import Draw, Ints

__all__ = ["Erasing"]

_ATTEMPTS = 10
_AREA = (0.02, 1 / 3)
_ASPECT = (math.log(0.3), math.log(1 / 0.3))
_CHUNK = 65_536  # places drawn at once: ten draws for each of a million take half a gigabyte
_BANK = 64  # larger than the image by so many pixels


class Erasing:
    """Rectangles of an epoch; the first of ten draws that fits is taken, as timm does.

    Noise comes from one field for the epoch, from a random place of it for each image: fresh
    noise for every pixel would cost more to draw than all else together.
    """

    def __init__(self, draw: Draw, probability: float, size: int) -> None:
        random, count = draw.stream("erase"), draw.count
        parts = [
            _boxes(random, min(_CHUNK, count - start), probability, size)
            for start in range(0, count, _CHUNK)
        ]
        box = np.concatenate(parts)
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


def _boxes(random: np.random.Generator, count: int, probability: float, size: int) -> Ints:
    """Top, bottom, left and right of rectangles (count, 4); where nothing is erased, no rows."""
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
    return np.stack([top, top + height, left, left + width], 1)
