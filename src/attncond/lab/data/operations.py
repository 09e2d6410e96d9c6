"""timm's image operations (Pillow's, in fact) for a batch of images on any device.

Images are float tensors (N, 3, H, W) that hold whole numbers from 0 to 255. Each operation takes
one row of ``amount`` (N, 6) per image and rounds as Pillow does, so that it gives what timm gives.
What deviates: geometric operations interpolate linearly, where timm takes linear or cubic at random
(and, in single precision, a few pixels end one below or above Pillow's).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["OPERATIONS", "Operation"]

Operation = Callable[[Tensor, Tensor, Tensor], Tensor]  # images, amount, fill (3,)


def _whole(images: Tensor) -> Tensor:
    """Pillow cuts off what is behind the point."""
    return images.floor().clamp_(0, 255)


def _one(amount: Tensor) -> Tensor:
    return amount[:, 0].view(-1, 1, 1, 1)


def _keep(images: Tensor, amount: Tensor, fill: Tensor) -> Tensor:
    return images


def _affine(images: Tensor, amount: Tensor, fill: Tensor) -> Tensor:
    """Each output pixel from where ``amount`` (a, b, c, d, e, f) puts it: x' = ax + by + c."""
    height, width = images.shape[-2:]
    y = torch.arange(height, device=images.device).view(1, -1, 1) + 0.5
    x = torch.arange(width, device=images.device).view(1, 1, -1) + 0.5
    a, b, c, d, e, f = (each.view(-1, 1, 1) for each in amount.unbind(1))
    from_x, from_y = a * x + b * y + c, d * x + e * y + f
    grid = torch.stack([from_x * (2 / width) - 1, from_y * (2 / height) - 1], -1)
    moved = F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)
    # A little more, or 255 times weights that add up to 0.9999999 would be cut off to 254.
    moved = _whole(moved + 1e-4)
    inside = (from_x >= 0) & (from_x < width) & (from_y >= 0) & (from_y < height)
    return torch.where(inside[:, None], moved, fill.view(1, -1, 1, 1))


def _auto_contrast(images: Tensor, amount: Tensor, fill: Tensor) -> Tensor:
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    # In double, and as Pillow writes it: 85 * 3.0 less 0 is one of many numbers at the edge.
    scale = 255 / (high - low).double().clamp(min=1)
    stretched = _whole(images * scale - low * scale).to(images.dtype)
    return torch.where(high > low, stretched, images)


def _equalize(images: Tensor, amount: Tensor, fill: Tensor) -> Tensor:
    values = images.flatten(2).long()
    channels = values.shape[0] * values.shape[1]
    # Counted in one dimension, the only form that torch's deterministic mode has on GPUs.
    start = torch.arange(channels, device=images.device).view(*values.shape[:2], 1) * 256
    counts = values.new_zeros(channels * 256)
    counts.scatter_add_(0, (values + start).flatten(), torch.ones_like(values).flatten())
    counts = counts.view(*values.shape[:2], 256)
    below = counts.cumsum(2) - counts  # pixels that are darker
    darker_than_the_brightest = below.gather(2, values.amax(2, keepdim=True))
    step = darker_than_the_brightest // 255
    table = (step // 2 + below) // step.clamp(min=1)
    table = torch.where(step > 0, table.clamp(max=255), torch.arange(256, device=images.device))
    return table.gather(2, values).view(images.shape).to(images.dtype)


def _invert(images: Tensor, amount: Tensor, fill: Tensor) -> Tensor:
    return 255 - images


def _posterize(images: Tensor, amount: Tensor, fill: Tensor) -> Tensor:
    """``amount`` is the smallest difference that is kept, 2 ** (8 - bits)."""
    step = _one(amount)
    return (images / step).floor() * step


def _solarize(images: Tensor, amount: Tensor, fill: Tensor) -> Tensor:
    return torch.where(images < _one(amount), images, 255 - images)


def _solarize_add(images: Tensor, amount: Tensor, fill: Tensor) -> Tensor:
    return torch.where(images < 128, (images + _one(amount)).clamp(max=255), images)


def _blend(degenerate: Tensor, images: Tensor, amount: Tensor) -> Tensor:
    return _whole(degenerate + _one(amount) * (images - degenerate))


def _grey(images: Tensor) -> Tensor:
    red, green, blue = images.split(1, 1)
    grey: Tensor = ((red * 19595 + green * 38470 + blue * 7471 + 32768) / 65536).floor()
    return grey


def _colour(images: Tensor, amount: Tensor, fill: Tensor) -> Tensor:
    return _blend(_grey(images), images, amount)


def _contrast(images: Tensor, amount: Tensor, fill: Tensor) -> Tensor:
    mean = (_grey(images).mean((1, 2, 3), keepdim=True) + 0.5).floor()
    return _blend(mean, images, amount)


def _brightness(images: Tensor, amount: Tensor, fill: Tensor) -> Tensor:
    return _blend(torch.zeros_like(images), images, amount)


def _sharpness(images: Tensor, amount: Tensor, fill: Tensor) -> Tensor:
    # Sums of shifted images, because a convolution on the GPU may round to ten bits.
    h, w = images.shape[-2] - 2, images.shape[-1] - 2
    total = images[:, :, 1:-1, 1:-1] * 4
    for i in range(3):
        for j in range(3):
            total = total + images[:, :, i : i + h, j : j + w]
    smooth = images.clone()
    smooth[:, :, 1:-1, 1:-1] = (total / 13 + 0.5).floor()
    return _blend(smooth, images, amount)


OPERATIONS: dict[str, Operation] = {
    "keep": _keep,
    "affine": _affine,
    "AutoContrast": _auto_contrast,
    "Equalize": _equalize,
    "Invert": _invert,
    "Posterize": _posterize,
    "Solarize": _solarize,
    "SolarizeAdd": _solarize_add,
    "Color": _colour,
    "Contrast": _contrast,
    "Brightness": _brightness,
    "Sharpness": _sharpness,
}
