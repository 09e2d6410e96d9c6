"""RandAugment and colour jitter on the device: a few operations on each image, drawn per image.

The host knows which image gets which operation, because it has drawn it. So a batch is sorted by
operation, each operation runs once on its images, and nothing is asked back from the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attncond.lab.data.draws import Draw, Floats, Ints
from attncond.lab.data.operations import OPERATIONS
from attncond.lab.data.source import DataError

__all__ = ["Layers", "colour_jitter", "rand_augment", "read_policy"]

_NAMES = tuple(OPERATIONS)
_JITTER = ("Brightness", "Contrast", "Color")
# What an operation does with a level from 0 to 10 and a random sign, as timm has it.
_Amount = Callable[[Floats, Floats, int], Floats]


class Layers:
    """Operations of an epoch, one after another: ``kinds`` and ``amounts`` (count, layers[, 6])."""

    def __init__(self, draw: Draw, kinds: Ints, amounts: Floats, fill: Tensor) -> None:
        self.fill = fill
        kinds, amounts = kinds[draw.places], amounts[draw.places]  # (steps, batch, layers[, 6])
        steps, batch, layers = kinds.shape
        order = np.argsort(kinds, axis=1, kind="stable")
        self.sizes = [[_sizes(kinds[s, :, k]) for k in range(layers)] for s in range(steps)]
        sorted_amounts = np.take_along_axis(amounts, order[..., None], 1)
        # Each layer's order starts from where the layer before has put an image.
        moves = np.empty((steps, batch, layers + 1), np.int64)
        before = np.broadcast_to(np.arange(batch), (steps, batch))
        for k in range(layers):
            moves[..., k] = np.take_along_axis(before, order[..., k], 1)
            before = np.argsort(order[..., k], axis=1)
        moves[..., layers] = before
        self.moves = draw.moved(moves.transpose(0, 2, 1))
        self.amounts = draw.moved(sorted_amounts.transpose(0, 2, 1, 3), torch.float32)

    def __call__(self, images: Tensor, step: int) -> Tensor:
        """Images as float that hold whole numbers from 0 to 255."""
        images = images.float()
        for k, groups in enumerate(self.sizes[step]):
            sizes = [size for _, size in groups]
            parts = images[self.moves[step, k]].split(sizes)
            amounts = self.amounts[step, k].split(sizes)
            done = [
                OPERATIONS[name](part, amount, self.fill)
                for (name, _), part, amount in zip(groups, parts, amounts, strict=True)
            ]
            images = torch.cat(done)
        return images[self.moves[step, -1]]


def _sizes(kinds: Ints) -> list[tuple[str, int]]:
    counts = np.bincount(kinds, minlength=len(_NAMES))
    return [(name, int(n)) for name, n in zip(_NAMES, counts, strict=True) if n]


def colour_jitter(draw: Draw, strength: float, fill: Tensor) -> Layers:
    """torchvision's ColorJitter(strength, strength, strength), in a random order for each image."""
    random = draw.stream("jitter")
    kinds = np.array([_NAMES.index(name) for name in _JITTER])
    turns = np.argsort(random.random((draw.count, 3)), axis=1)
    amounts = np.zeros((draw.count, 3, 6))
    amounts[..., 0] = random.uniform(max(0.0, 1 - strength), 1 + strength, (draw.count, 3))
    return Layers(draw, kinds[turns], amounts, fill)


def rand_augment(draw: Draw, text: str, size: int, fill: Tensor) -> Layers:
    """timm's RandAugment, as timm reads ``text``."""
    policy = read_policy(text, in_memory=True)
    operations = policy.ops
    random = draw.stream("randaugment")
    shape = (draw.count, policy.num_layers)
    chosen = random.integers(0, len(operations), shape)
    applied = random.random(shape) <= operations[0].prob
    levels = _levels(random, shape, operations[0])
    signs = np.where(random.random(shape) > 0.5, -1.0, 1.0)
    kinds, amounts = np.zeros(shape, np.int64), np.zeros((*shape, 6))
    for i, operation in enumerate(operations):
        here = applied & (chosen == i)
        kind, amount = _AMOUNTS[operation.name]
        kinds[here] = _NAMES.index(kind)
        amounts[here] = amount(levels[here], signs[here], size)
    return Layers(draw, kinds, amounts, fill)


def read_policy(text: str, in_memory: bool) -> Any:
    """RandAugment as timm reads ``text``.

    Raises:
        DataError: timm cannot read it, or it asks for more than images in memory get.
    """
    from timm.data.auto_augment import rand_augment_transform

    hint = "as timm writes it, e.g. rand-m9-mstd0.5-inc1"
    try:
        policy = rand_augment_transform(text, {"img_mean": (0, 0, 0)})
    except (AssertionError, ValueError) as error:
        raise DataError(f"data.augment.randaugment: '{text}' is no RandAugment, {hint}") from error
    unknown = sorted({each.name for each in policy.ops} - _AMOUNTS.keys())
    if in_memory and (policy.choice_weights is not None or unknown):
        what = f"operations {', '.join(unknown)}" if unknown else "weighted choices"
        raise DataError(
            f"data.augment.randaugment: '{text}' asks for {what}, which images in memory do not "
            f"get: leave out its -t section, or read the images with image_folder"
        )
    return policy


def _levels(random: np.random.Generator, shape: tuple[int, int], operation: Any) -> Floats:
    level, spread = float(operation.magnitude), operation.magnitude_std
    if spread == float("inf"):
        levels = random.uniform(0, level, shape)
    else:
        levels = random.normal(level, spread, shape)
    return np.clip(levels, 0, operation.magnitude_max or 10.0)


def _row(*columns: Floats | float) -> Floats:
    """Columns of an amount, the rest 0."""
    given = np.stack(np.broadcast_arrays(*columns), axis=1)  # no images: no rows
    return np.pad(given, ((0, 0), (0, 6 - len(columns))))


def _rotated(levels: Floats, signs: Floats, size: int) -> Floats:
    angle = -np.radians(signs * levels * 3)
    cos, sin, middle = np.cos(angle), np.sin(angle), size / 2
    right = middle - cos * middle - sin * middle
    down = middle + sin * middle - cos * middle
    return _row(cos, sin, right, -sin, cos, down)


def _enhanced(levels: Floats, signs: Floats, size: int) -> Floats:
    return _row(levels * 0.18 + 0.1)


def _enhanced_more(levels: Floats, signs: Floats, size: int) -> Floats:
    return _row(np.maximum(0.1, 1 + signs * levels * 0.09))


def _bits(levels: Floats) -> Floats:
    return np.trunc(levels / 10 * 4)


def _thresholds(levels: Floats) -> Floats:
    return np.minimum(256, np.trunc(levels / 10 * 256))


_AMOUNTS: dict[str, tuple[str, _Amount]] = {
    "AutoContrast": ("AutoContrast", lambda level, sign, size: _row(level)),
    "Equalize": ("Equalize", lambda level, sign, size: _row(level)),
    "Invert": ("Invert", lambda level, sign, size: _row(level)),
    "Rotate": ("affine", _rotated),
    "ShearX": ("affine", lambda level, sign, size: _row(1, sign * level * 0.03, 0, 0, 1, 0)),
    "ShearY": ("affine", lambda level, sign, size: _row(1, 0, 0, sign * level * 0.03, 1, 0)),
    "TranslateXRel": (
        "affine",
        lambda level, sign, size: _row(1, 0, sign * level * 0.045 * size, 0, 1, 0),
    ),
    "TranslateYRel": (
        "affine",
        lambda level, sign, size: _row(1, 0, 0, 0, 1, sign * level * 0.045 * size),
    ),
    "Posterize": ("Posterize", lambda level, sign, size: _row(2 ** (8 - _bits(level)))),
    "PosterizeIncreasing": (
        "Posterize",
        lambda level, sign, size: _row(2 ** (4 + _bits(level))),
    ),
    "Solarize": ("Solarize", lambda level, sign, size: _row(_thresholds(level))),
    "SolarizeIncreasing": (
        "Solarize",
        lambda level, sign, size: _row(256 - _thresholds(level)),
    ),
    "SolarizeAdd": (
        "SolarizeAdd",
        lambda level, sign, size: _row(np.minimum(128, np.trunc(level / 10 * 110))),
    ),
    "Color": ("Color", _enhanced),
    "Contrast": ("Contrast", _enhanced),
    "Brightness": ("Brightness", _enhanced),
    "Sharpness": ("Sharpness", _enhanced),
    "ColorIncreasing": ("Color", _enhanced_more),
    "ContrastIncreasing": ("Contrast", _enhanced_more),
    "BrightnessIncreasing": ("Brightness", _enhanced_more),
    "SharpnessIncreasing": ("Sharpness", _enhanced_more),
}
