"""Find, read and split a data set."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch.nn import functional as F

from attncond.errors import close
from attncond.lab.data.binary import BINARY, BinarySet
from attncond.lab.data.cache import kept
from attncond.lab.data.digits import NOTE, read_digits
from attncond.lab.data.folder import folder_note, image_folders, read_folders
from attncond.lab.data.layers import read_policy
from attncond.lab.data.parquet import PARQUET, ParquetSet
from attncond.lab.data.places import data_folder
from attncond.lab.data.source import DataError, DataSettings, Files, Source, Split
from attncond.lab.data.split import hold_out, shuffled

__all__ = ["NAMES", "find", "load"]

_SETS: dict[str, ParquetSet | BinarySet] = {**PARQUET, **BINARY}
NAMES = ("digits", *_SETS, "image_folder")
_SMALLEST = 8
_LARGEST_BYTES = 16e9

Part = TypeVar("Part", Split, Files)


def find(data: DataSettings, root: Path | None = None) -> None:
    """See that the files of a data set are there, without reading them, and what is done to them.

    Raises:
        DataError: They are not, with what was looked for, where, and how to get it; or nobody can
            read how training images are varied.
    """
    if data.augment.randaugment is not None:
        read_policy(data.augment.randaugment, in_memory=data.name != "image_folder")
    folder = data_folder(root)
    if data.name == "image_folder":
        image_folders(folder)
    elif data.name in _SETS:
        _SETS[data.name].files(folder)


def load(data: DataSettings, root: Path | None = None, seed: int = 0) -> Source:
    """The data set that a recipe names, decoded and split.

    ``root`` is the folder with its files; None is the environment's ATTNCOND_DATA, or ``data``.
    ``seed`` decides nothing but which images are taken where ``data.limit`` is set: the split into
    training and validation is the same for every seed, and the test is never split.

    >>> load(recipe.data).note  # doctest: +SKIP
    'scikit-learn digits (1,797 images of 8x8), 20% of each class for the test'
    """
    folder = data_folder(root)
    if data.name == "image_folder":
        files, test_files, classes = read_folders(folder)
        note = folder_note(folder, len(classes), len(files), len(test_files))
        return _parts(data, files, test_files, len(classes), note, seed)
    if data.name == "digits":
        train, test = read_digits()
        number, note = 10, NOTE
    elif data.name in _SETS:
        what = _SETS[data.name]
        train, test = (
            kept(data.name, paths, partial(what.read, paths)) for paths in what.files(folder)
        )
        number, note = what.classes, what.note + _unusual(train, test, what.counts)
    else:
        hint = close(data.name, NAMES, n=1)
        raise DataError(f"no data set is called '{data.name}': {', '.join(NAMES)}.{hint}")
    native = train.images.shape[-1]
    if native != data.image_size:
        train, test = _resized(train, data.image_size), _resized(test, data.image_size)
        note += f"; scaled from {native}x{native} to {data.image_size}x{data.image_size}"
    return _parts(data, train, test, number, note, seed)


def _parts(
    data: DataSettings, train: Part, test: Part, classes: int, note: str, seed: int
) -> Source:
    validation: Part | None = None
    if data.validation:
        kept_places, held = hold_out(train.labels, data.validation, "validation")
        train, validation = train.take(kept_places), train.take(held)
    if data.limit is not None:
        train, test = _limited(train, data.limit, seed), _limited(test, data.limit, seed)
        validation = None if validation is None else _limited(validation, data.limit, seed)
        note += f"; limited to {data.limit} images for each of training, validation and test"
    return Source(train, validation, test, classes, note)


def _limited(part: Part, limit: int, seed: int) -> Part:
    return part.take(shuffled(len(part), seed)[:limit])


def _unusual(train: Split, test: Split, counts: tuple[int, int]) -> str:
    if (len(train), len(test)) == counts:
        return ""
    return f"; {len(train):,} training and {len(test):,} test images instead of all"


def _resized(split: Split, size: int) -> Split:
    if size < _SMALLEST:
        raise DataError(
            f"data.image_size is {size}: images need at least {_SMALLEST} pixels a side"
        )
    if len(split) * 3 * size * size > _LARGEST_BYTES:
        raise DataError(
            f"data.image_size is {size}: {len(split):,} images of that size would take "
            f"{len(split) * 3 * size * size / 1e9:.0f} GB in memory. Take smaller ones, or put "
            "them into folders and use image_folder"
        )
    images = torch.empty(len(split), split.images.shape[1], size, size, dtype=torch.uint8)
    for start in range(0, len(split), 1024):
        part = split.images[start : start + 1024].float()
        larger = F.interpolate(part, (size, size), mode="bilinear", antialias=True)
        images[start : start + 1024] = larger.round().clamp(0, 255).to(torch.uint8)
    return replace(split, images=images)
