"""A recipe's data section without a recipe, and data sets small enough to write in a test."""

import io
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from attncond.lab.data import Split


@dataclass(frozen=True)
class Augment:
    crop: int = 0
    flip: bool = False
    randaugment: str | None = None
    mixup: float = 0.0
    cutmix: float = 0.0
    mixup_prob: float = 1.0
    erase: float = 0.0
    jitter: float = 0.0
    repeats: int = 1


@dataclass(frozen=True)
class Data:
    name: str = "digits"
    image_size: int = 8
    validation: float = 0.1
    limit: int | None = None
    augment: Augment = field(default_factory=Augment)
    workers: int = 0


EVERYTHING = Augment(
    crop=4,
    flip=True,
    randaugment="rand-m9-mstd0.5-inc1",
    mixup=0.8,
    cutmix=1.0,
    mixup_prob=0.8,
    erase=0.5,
    repeats=2,
)


def noise_split(count: int = 64, size: int = 32, classes: int = 10) -> Split:
    """Images of smooth noise, all different, with every class among their labels."""
    random = torch.Generator().manual_seed(7)
    coarse = torch.rand(count, 3, 8, 8, generator=random)
    images = torch.nn.functional.interpolate(coarse, size, mode="bicubic").clamp(0, 1) * 255
    labels = torch.arange(count) % classes
    return Split(images.to(torch.uint8), labels, (0.5, 0.4, 0.3), (0.2, 0.25, 0.3))


def encoded(image: np.ndarray, form: str = "JPEG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, form)
    return buffer.getvalue()


def write_folders(root, count=4, classes=("n02", "n01", "n10")):
    """Images as ImageNet is laid out."""
    images = noise_split(count).images.permute(0, 2, 3, 1).numpy()
    for part in ("train", "val"):
        for name in classes:
            (root / part / name).mkdir(parents=True)
            for i, image in enumerate(images):
                (root / part / name / f"{name}_{i}.JPEG").write_bytes(encoded(image))
    return root


def real_data() -> Path:
    """The folder with real data, or a skip."""
    names = [os.environ.get("ATTNCOND_DATA"), Path(__file__).parents[4] / "shared" / "data"]
    for name in names:
        if name and (Path(name) / "cifar10_jpeg_train.parquet").is_file():
            return Path(name)
    pytest.skip("real data is not here: ATTNCOND_DATA names a folder with its Parquet files")
