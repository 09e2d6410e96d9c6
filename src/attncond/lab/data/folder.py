"""Images in folders, as ImageNet is laid out: train/CLASS/*.JPEG and val/CLASS/*.JPEG."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from attncond.lab.data.places import reading
from attncond.lab.data.source import DataError, Files

__all__ = ["folder_note", "image_folders", "read_folders"]

ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_HOW = (
    "ImageNet-1k (ILSVRC 2012) is at https://image-net.org/download.php, after registration; each "
    "class has a folder of its own in train and, with the same name, in val. Nothing is downloaded "
    "for you."
)


def image_folders(root: Path) -> list[Path]:
    """Those of training and test images, both there."""
    with reading(root):
        for part in (root, root / "train", root / "val"):
            if not part.is_dir():
                raise DataError(
                    f"images in folders: looked for train/CLASS and val/CLASS in "
                    f"{root.absolute()}, but there is no folder {part}. Name theirs with --data or "
                    f"ATTNCOND_DATA. {_HOW}"
                )
    return [root / "train", root / "val"]


def read_folders(root: Path) -> tuple[Files, Files, list[str]]:
    """Training and test files, and the names of the classes in the order of their labels."""
    train, val = image_folders(root)
    classes = _classes(train)
    if len(classes) < 2:
        raise DataError(
            f"{train} has {len(classes)} folders; at least two classes are needed, each "
            f"in a folder of its own. {_HOW}"
        )
    other = _classes(val)
    if other != classes:
        odd = sorted(set(classes) ^ set(other))
        where = "val" if odd[0] in other else "train"
        raise DataError(
            f"{root}: train has {len(classes)} classes and val {len(other)}; {odd[0]} is in "
            f"{where} alone. {_HOW}"
        )
    return _files(train, classes), _files(val, classes), classes


def folder_note(root: Path, classes: int, train: int, test: int) -> str:
    """What the folder holds; what the images are, nobody can know."""
    return (
        f"images in folders ({root.absolute().name}): {classes} classes, {train:,} training and "
        f"{test:,} test images"
    )


def _classes(folder: Path) -> list[str]:
    with reading(folder), os.scandir(folder) as entries:
        return sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))


def _files(folder: Path, classes: list[str]) -> Files:
    names: list[bytes] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        with reading(folder / name):
            found = sorted(_below(folder / name, name))
        if not found:
            raise DataError(
                f"{folder / name} has no images, nor below it: looked for {', '.join(ENDINGS)}"
            )
        names += found
        labels += [label] * len(found)
    return Files(folder, np.array(names), torch.tensor(labels), MEAN, STD)


def _below(folder: Path, name: str) -> list[bytes]:
    def refuse(error: OSError) -> None:
        raise error

    found = []
    for place, below, files in os.walk(folder, onerror=refuse):
        below[:] = [each for each in below if not each.startswith(".")]
        inner = os.path.join(name, os.path.relpath(place, folder))
        found += [
            os.fsencode(os.path.normpath(os.path.join(inner, file)))
            for file in files
            if file.lower().endswith(ENDINGS) and not file.startswith(".")
        ]
    return found
