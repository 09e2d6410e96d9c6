"""What a data set is to the rest of the lab: its images, its labels and an honest note."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from attncond.errors import ConditioningError

__all__ = ["AugmentSettings", "DataError", "DataSettings", "Files", "Source", "Split"]


class DataError(ConditioningError):
    """Data is missing, broken or not what was asked for: the message says what to do."""


class AugmentSettings(Protocol):
    """The part of a recipe that says how training images are changed."""

    @property
    def crop(self) -> int: ...
    @property
    def flip(self) -> bool: ...
    @property
    def randaugment(self) -> str | None: ...
    @property
    def mixup(self) -> float: ...
    @property
    def cutmix(self) -> float: ...
    @property
    def mixup_prob(self) -> float: ...
    @property
    def erase(self) -> float: ...
    @property
    def jitter(self) -> float: ...
    @property
    def repeats(self) -> int: ...


class DataSettings(Protocol):
    """The part of a recipe that says which images are learned from."""

    @property
    def name(self) -> str: ...
    @property
    def image_size(self) -> int: ...
    @property
    def validation(self) -> float: ...
    @property
    def limit(self) -> int | None: ...
    @property
    def augment(self) -> AugmentSettings: ...
    @property
    def workers(self) -> int: ...


@dataclass(frozen=True)
class Split:
    """Decoded images, uint8 (N, C, H, W), and labels, int64 (N,).

    ``mean`` and ``std`` are of images in [0, 1], one number per channel.
    """

    images: Tensor
    labels: Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, places: Tensor) -> Split:
        """The images at these places, in this order."""
        return replace(self, images=self.images[places], labels=self.labels[places])


@dataclass(frozen=True)
class Files:
    """Images that stay on disk, below ``root``, and their labels, int64 (N,)."""

    root: Path
    names: NDArray[np.bytes_]  # an array, not objects: workers share its memory for good
    labels: Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, places: Tensor) -> Files:
        """The files at these places, in this order."""
        return replace(self, names=self.names[places.numpy()], labels=self.labels[places])

    def path(self, place: int) -> Path:
        """Where an image is."""
        return self.root / os.fsdecode(self.names[place])


@dataclass(frozen=True)
class Source:
    """A data set in three parts; nothing is ever chosen by its test part.

    ``note`` says what the images are and what is wrong with them.
    """

    train: Split | Files
    validation: Split | Files | None
    test: Split | Files
    classes: int
    note: str


def checked_labels(labels: Tensor, classes: int, where: str) -> None:
    """Refuse what has no images, labels out of range, or a class without images."""
    if not len(labels):
        raise DataError(f"{where} has no images")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        wrong = low if low < 0 else high
        row = int((labels == wrong).nonzero()[0])
        raise DataError(f"{where}, row {row}: label {wrong} is not one of 0 to {classes - 1}")
    present = set(labels.unique().tolist())
    if missing := sorted(set(range(classes)) - present):
        named = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
        raise DataError(
            f"{where} has images of {len(present)} classes instead of {classes} (none of {named}): "
            "it is a part of the data set, or another one"
        )
