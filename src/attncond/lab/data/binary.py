"""CIFAR-10 and CIFAR-100 in their own binary format: label bytes, then 3,072 bytes of image."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from attncond.lab.data.places import readable, reading
from attncond.lab.data.source import DataError, Split, checked_labels

__all__ = ["BINARY", "BinarySet"]

_SIZE = 32
_PIXELS = 3 * _SIZE * _SIZE
_PICKLES = ("data_batch_1", "train")
_PICKLE_FOLDERS = ("cifar-10-batches-py", "cifar-100-python")


@dataclass(frozen=True)
class BinarySet:
    """The files of a binary version, as they are called in its archive."""

    title: str
    folder: str
    train: tuple[str, ...]
    test: str
    counts: tuple[int, int]
    classes: int
    label_bytes: int  # the last of them counts
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    note: str
    archive: str

    def files(self, folder: Path) -> tuple[list[Path], list[Path]]:
        """Training and test files, in the folder or in the archive's folder below it."""
        with reading(folder):
            inner = folder / self.folder
            here = inner if inner.is_dir() else folder
            pickles = [name for name in _PICKLES if (here / name).is_file()]
            pickles += [name for name in _PICKLE_FOLDERS if (here / name).is_dir()]
            if pickles and not (here / self.test).exists():
                raise DataError(
                    f"{here / pickles[0]} belongs to the Python version of CIFAR, which is stored "
                    "as pickles; a pickle can run any program when it is read, so none is ever "
                    f"loaded here. Get the binary version, {self.archive}, and unpack it into "
                    f"{folder}"
                )
        how = f"Get {self.archive} and unpack it there."
        files = readable(here, (*self.train, self.test), self.title, how)
        return files[:-1], files[-1:]

    def read(self, paths: list[Path]) -> Split:
        """All images of some files, one after another."""
        record = self.label_bytes + _PIXELS
        parts = []
        for path in paths:
            with reading(path):
                content = np.fromfile(path, np.uint8)
            if not len(content) or len(content) % record:
                raise DataError(
                    f"{path} has {len(content):,} bytes, which are not one or more images of "
                    f"{record:,} bytes each: it was cut off or is another file. Get it again from "
                    f"{self.archive}"
                )
            parts.append(content.reshape(-1, record))
        rows = torch.from_numpy(np.concatenate(parts))
        labels = rows[:, self.label_bytes - 1].long()
        names = ", ".join(path.name for path in paths)
        try:
            checked_labels(labels, self.classes, f"{paths[0].parent}: {names}")
        except DataError as error:
            raise DataError(f"{error}. Get {self.archive} again") from error
        images = rows[:, self.label_bytes :].reshape(-1, 3, _SIZE, _SIZE).contiguous()
        return Split(images, labels, self.mean, self.std)


BINARY = {
    "cifar10_binary": BinarySet(
        title="CIFAR-10, binary version",
        folder="cifar-10-batches-bin",
        train=tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
        test="test_batch.bin",
        counts=(50_000, 10_000),
        classes=10,
        label_bytes=1,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        note="CIFAR-10, original images",
        archive="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    ),
    "cifar100_binary": BinarySet(
        title="CIFAR-100, binary version",
        folder="cifar-100-binary",
        train=("train.bin",),
        test="test.bin",
        counts=(50_000, 10_000),
        classes=100,
        label_bytes=2,
        mean=(0.5071, 0.4867, 0.4408),
        std=(0.2675, 0.2565, 0.2761),
        note="CIFAR-100, original images, fine labels",
        archive="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
    ),
}
