"""CIFAR-10 and Tiny-ImageNet at 32x32 from Parquet: a column of encoded images, one of labels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attncond.lab.data.source import DataError, Split

__all__ = ["PARQUET", "ParquetSet", "read_parquet"]

_CHUNK = 2048  # images handed to the decoder at once


@dataclass(frozen=True)
class ParquetSet:
    """Two files, what is in them, and where they come from."""

    train: str
    test: str
    classes: int
    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    note: str
    origin: str


PARQUET = {
    "cifar10": ParquetSet(
        train="cifar10_jpeg_train.parquet",
        test="cifar10_jpeg_test.parquet",
        classes=10,
        size=32,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        note=(
            "CIFAR-10, JPEG copy (quality 75, 4:2:0; about 30 dB from the original): not exactly "
            "comparable with published CIFAR-10 numbers"
        ),
        origin="https://www.cs.toronto.edu/~kriz/cifar.html",
    ),
    "tiny_imagenet32": ParquetSet(
        train="tinyimagenet32_train.parquet",
        test="tinyimagenet32_val.parquet",
        classes=200,
        size=32,
        mean=(0.4802, 0.4481, 0.3975),
        std=(0.2770, 0.2691, 0.2821),
        note=(
            "Tiny-ImageNet scaled to 32x32, JPEG copy; its validation images are the test here "
            "(its own test has no labels); 20 images share their bytes with another"
        ),
        origin="http://cs231n.stanford.edu/tiny-imagenet-200.zip",
    ),
}


def read_parquet(path: Path, what: ParquetSet) -> Split:
    """All images of one file, decoded."""
    encoded, labels = _columns(path, what)
    images = _decoded(path, encoded, what.size)
    return Split(images, labels, what.mean, what.std)


def _columns(path: Path, what: ParquetSet) -> tuple[list[bytes], Tensor]:
    import pyarrow.parquet as pq

    table = pq.read_table(path, columns=["image", "label"])
    labels = torch.from_numpy(table["label"].to_numpy().astype(np.int64))
    return table["image"].to_pylist(), labels


def _decoded(path: Path, encoded: list[bytes], size: int) -> Tensor:
    from torchvision.io import ImageReadMode, decode_jpeg

    images = torch.empty(len(encoded), 3, size, size, dtype=torch.uint8)
    for start in range(0, len(encoded), _CHUNK):
        part = encoded[start : start + _CHUNK]
        inputs = [torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in part]
        images[start : start + len(part)] = torch.stack(decode_jpeg(inputs, mode=ImageReadMode.RGB))
    return images
