"""Decoded images, kept: in this process, and if asked for in a folder for other processes.

The folder holds plain tensors (safetensors). A file there is complete or not there at all; one that
is damaged is made again.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import torch

from attncond.files import write_bytes
from attncond.lab.data.places import reading, required
from attncond.lab.data.source import DataError, Split

__all__ = ["cache_folder", "kept"]

_VERSION = 2  # of what is kept: decode differently, and it is another
_MOST = 4  # files in memory: two data sets
_KEPT: dict[str, Split] = {}


def cache_folder() -> Path | None:
    """The environment's ATTNCOND_CACHE; without it nothing is written."""
    folder = os.environ.get("ATTNCOND_CACHE")
    return Path(folder).expanduser() if folder else None


def kept(name: str, paths: list[Path], read: Callable[[], Split]) -> Split:
    """What ``read`` makes of these files, unless that is known and they are still the same."""
    key = _key(name, paths)
    if key not in _KEPT:
        split = _through_folder(key, read)
        while len(_KEPT) >= _MOST:
            del _KEPT[next(iter(_KEPT))]
        _KEPT[key] = split
    return _KEPT[key]


def _key(name: str, paths: list[Path]) -> str:
    words = [str(_VERSION), name]
    for path in paths:
        with reading(path):
            found = path.stat()
        words += [str(path.resolve()), str(found.st_size), str(found.st_mtime_ns)]
    return f"{name}-{hashlib.sha256(chr(0).join(words).encode()).hexdigest()[:20]}"


def _through_folder(key: str, read: Callable[[], Split]) -> Split:
    folder = cache_folder()
    if folder is None:
        return read()
    file = folder / f"{key}.safetensors"
    split = _loaded(file)
    if split is None:
        split = read()
        _save(split, file)
    return split


def _loaded(file: Path) -> Split | None:
    safetensors = required("safetensors", "a cache of decoded images")
    try:
        with safetensors.safe_open(file, framework="pt") as tensors:
            images, labels = tensors.get_tensor("images"), tensors.get_tensor("labels")
            metadata = tensors.metadata()
        mean, std = json.loads(metadata["mean"]), json.loads(metadata["std"])
    except (OSError, KeyError, ValueError, TypeError, safetensors.SafetensorError):
        return None
    if images.dtype != torch.uint8 or images.ndim != 4 or labels.shape != images.shape[:1]:
        return None
    return Split(images, labels, tuple(mean), tuple(std))


def _save(split: Split, file: Path) -> None:
    save = required("safetensors.torch", "a cache of decoded images").save
    content = save(
        {"images": split.images.contiguous(), "labels": split.labels.contiguous()},
        {"mean": json.dumps(split.mean), "std": json.dumps(split.std)},
    )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, content)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        problem = "the disk is full" if full else (error.strerror or str(error))
        raise DataError(
            f"the cache of decoded images cannot be written to {file.parent}: {problem}. It needs "
            f"{len(content) / 1e6:,.0f} MB; make room, let ATTNCOND_CACHE name another folder, or "
            "unset it to do without"
        ) from error
