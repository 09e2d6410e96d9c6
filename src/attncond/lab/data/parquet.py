"""CIFAR-10 and Tiny-ImageNet at 32x32 from Parquet: a column of encoded images, one of labels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attncond.lab.data.decoding import decoded
from attncond.lab.data.places import readable, reading, required
from attncond.lab.data.source import DataError, Split, checked_labels

__all__ = ["PARQUET", "ParquetSet"]

_COLUMNS = ("image", "label")


@dataclass(frozen=True)
class ParquetSet:
    """Two files, what is in them, and where their images come from."""

    title: str
    train: str
    test: str
    counts: tuple[int, int]
    classes: int
    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    note: str
    origin: str

    def files(self, folder: Path) -> tuple[list[Path], list[Path]]:
        """Training and test file, both there."""
        train, test = readable(folder, (self.train, self.test), self.title, self.origin)
        return [train], [test]

    def read(self, paths: list[Path]) -> Split:
        """All images of one file, decoded, in the order of its rows."""
        (path,) = paths
        encoded, labels = _columns(path, self)
        try:
            checked_labels(labels, self.classes, str(path))
            images = decoded(encoded, self.size, str(path))
        except DataError as error:
            raise DataError(f"{error}. {self.origin}") from error
        return Split(images, labels, self.mean, self.std)


PARQUET = {
    "cifar10": ParquetSet(
        title="CIFAR-10 as Parquet",
        train="cifar10_jpeg_train.parquet",
        test="cifar10_jpeg_test.parquet",
        counts=(50_000, 10_000),
        classes=10,
        size=32,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        note=(
            "CIFAR-10, JPEG copy (quality 75, 4:2:0, about 30 dB from the original): not exactly "
            "comparable with published CIFAR-10 numbers"
        ),
        origin=(
            "The original images are at https://www.cs.toronto.edu/~kriz/cifar.html; "
            "data.name=cifar10_binary reads its binary version "
            "(https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz)."
        ),
    ),
    "tiny_imagenet32": ParquetSet(
        title="Tiny-ImageNet at 32x32 as Parquet",
        train="tinyimagenet32_train.parquet",
        test="tinyimagenet32_val.parquet",
        counts=(100_000, 10_000),
        classes=200,
        size=32,
        mean=(0.4802, 0.4481, 0.3975),
        std=(0.2770, 0.2691, 0.2821),
        note=(
            "Tiny-ImageNet scaled from 64x64 to 32x32, JPEG copy: not comparable with published "
            "numbers; its validation images are the test here (its own test has no labels); 20 "
            "training images are there twice, each with two different labels"
        ),
        origin=(
            "The original images are at http://cs231n.stanford.edu/tiny-imagenet-200.zip; scale "
            "them to 32x32 and write columns image (encoded bytes) and label (0 to 199)."
        ),
    ),
}


def _columns(path: Path, what: ParquetSet) -> tuple[list[bytes | None], Tensor]:
    arrow, parquet = required("pyarrow", what.title), required("pyarrow.parquet", what.title)
    with reading(path):
        try:
            file = parquet.ParquetFile(path)
            _check_columns(path, file.schema_arrow, arrow, what)
            table = file.read(columns=list(_COLUMNS))
        except (arrow.ArrowException, OSError) as error:
            if getattr(error, "errno", None) is not None:  # the file system's, not Arrow's
                raise
            raise DataError(
                f"{path} is no whole Parquet file ({path.stat().st_size:,} bytes): it was cut off "
                f"or damaged on its way; get it again. {what.origin}"
            ) from error
    if table["label"].null_count:
        raise DataError(f"{path}: {table['label'].null_count} rows have no label. {what.origin}")
    labels = torch.from_numpy(table["label"].to_numpy().astype(np.int64))
    return table["image"].to_pylist(), labels


def _check_columns(path: Path, schema: Any, arrow: Any, what: ParquetSet) -> None:
    found = ", ".join(f"{field.name}: {field.type}" for field in schema)
    wanted = "image: binary and label: integer"
    if any(schema.names.count(name) != 1 for name in _COLUMNS):  # a table may have one twice
        raise DataError(f"{path} has columns {found}; it needs {wanted}. {what.origin}")
    image, label = schema.field("image").type, schema.field("label").type
    binary = arrow.types.is_binary(image) or arrow.types.is_large_binary(image)
    if not binary or not arrow.types.is_integer(label):
        raise DataError(f"{path} has columns {found}; it needs {wanted}. {what.origin}")
