"""Find, read and split a data set."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn import functional as F

from attncond.lab.data import digits, parquet
from attncond.lab.data.source import DataError, DataSettings, Files, Source, Split
from attncond.lab.data.split import hold_out, shuffled

__all__ = ["load"]


def load(data: DataSettings, root: Path | None = None, seed: int = 0) -> Source:
    """The data set that a recipe names, decoded and split.

    ``root`` is the folder with its files; None is the environment's ATTNCOND_DATA, or ``data``.
    ``seed`` decides nothing but which images are taken where ``data.limit`` is set: the split into
    training and validation is the same for every seed.
    """
    folder = Path(root or os.environ.get("ATTNCOND_DATA") or "data")
    if data.name == "digits":
        (train, test), classes, note = digits.read_digits(), 10, digits.NOTE
    elif data.name in parquet.PARQUET:
        what = parquet.PARQUET[data.name]
        train = parquet.read_parquet(folder / what.train, what)
        test = parquet.read_parquet(folder / what.test, what)
        classes, note = what.classes, what.note
    else:
        raise DataError(f"no such data set: {data.name}")
    return _parts(data, train, test, classes, note, seed)


def _parts(
    data: DataSettings, train: Split, test: Split, classes: int, note: str, seed: int
) -> Source:
    train, test = _resized(train, data.image_size), _resized(test, data.image_size)
    mean, std = train.mean, train.std
    validation = None
    if data.validation:
        kept, held = hold_out(train.labels, data.validation, "validation")
        train, validation = train.take(kept), train.take(held)
    if data.limit is not None:
        train = _limited(train, data.limit, seed)
        validation = validation and _limited(validation, data.limit, seed)
        test = _limited(test, data.limit, seed)
        note += f"; only {data.limit} images of each part are used"
    return Source(train, validation, test, classes, mean, std, note)


def _limited(split: Split, limit: int, seed: int) -> Split:
    return split.take(shuffled(len(split), seed)[:limit])


def _resized(split: Split, size: int) -> Split:
    if split.images.shape[-1] == size:
        return split
    done = [
        F.interpolate(part.float(), (size, size), mode="bilinear", antialias=True)
        .round()
        .clamp(0, 255)
        .to(torch.uint8)
        for part in split.images.split(4096)
    ]
    return replace(split, images=torch.cat(done))
