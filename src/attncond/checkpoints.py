"""Weights from files: safetensors alone, because reading a pickle runs whatever is in it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from attncond.errors import ConditioningError
from attncond.sources import library, one_line

__all__ = ["CheckpointError", "differences", "in_folder", "is_correction", "read", "strip"]

Tensors = dict[str, Tensor]

_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_CONVERT = (
    "attncond reads safetensors only, because loading a pickle can run any code. If you trust the "
    "file, convert it: from safetensors.torch import save_file; "
    "save_file(torch.load(FILE, weights_only=True), 'model.safetensors')"
)


class CheckpointError(ConditioningError):
    """A checkpoint cannot be read, or is not of this model."""


def is_correction(key: str) -> bool:
    """Whether a tensor is a part of what :func:`attncond.condition` adds to a model."""
    return key.rpartition(".")[2].startswith("attncond_")


def in_folder(folder: Path) -> Path | None:
    """The checkpoint in a folder; None if there are no weights of any kind in it.

    Raises:
        CheckpointError: There are weights, but none to read, or several to choose from.
    """
    for name in (_INDEX, _WHOLE):
        if (folder / name).is_file():
            return folder / name
    found = sorted(p for p in folder.iterdir() if p.suffix == ".safetensors")
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(p.name for p in found[:3])
        raise CheckpointError(
            f"{folder} holds {len(found)} safetensors files ({names}, ...) and no {_INDEX} that "
            "says how they belong together: name one with --checkpoint"
        )
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLES)
    weights = [n for n in pickles if n.startswith(("pytorch_model", "model")) or len(pickles) == 1]
    if weights:
        raise CheckpointError(
            f"{folder} holds its weights as a pickle, {weights[0]}. {_CONVERT} "
            "(or pass --random-weights)"
        )
    return None


def read(path: Path) -> tuple[Tensors, Path]:
    """All tensors of a file, of the shards that an index lists, or of the checkpoint in a folder.

    Returns the file too.
    """
    try:
        if not path.exists():
            raise CheckpointError(f"there is no {path}")
        if path.is_dir():
            found = in_folder(path)
            if found is None:
                raise CheckpointError(f"there is no safetensors file in the folder {path}")
            path = found
        if not path.is_file():
            raise CheckpointError(f"{path} is not a file")
        if path.suffix == ".json":
            return _shards(path), path
        return _file(path), path
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def _file(path: Path) -> Tensors:
    with open(path, "rb") as stream:
        start = stream.read(64)
    if path.suffix in _PICKLES or start.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x04")):
        raise CheckpointError(f"{path} is a pickle. {_CONVERT}")
    if not start:
        raise CheckpointError(f"{path} is empty: was it copied or downloaded to the end?")
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path} is not the weights but a Git LFS pointer: run git lfs pull")
    library("safetensors")
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: Tensors = load_file(path)
    except SafetensorError as error:
        if start[:8].isascii() and start[:8].decode("ascii").isprintable():
            why = "it holds text. A checkpoint is what safetensors.torch.save_file writes"
        elif path.suffix != ".safetensors":
            why = "give a .safetensors file, or a folder with one"
        else:
            why = f"damaged, or not copied to the end ({error}). Fetch it again"
        raise CheckpointError(f"{path} is not a whole safetensors file: {why}.") from error
    if not tensors:
        raise CheckpointError(f"{path} holds no tensors")
    return tensors


def _shards(index: Path) -> Tensors:
    try:
        places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted({str(name) for name in places.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index} is not the index of a sharded checkpoint ({one_line(error)}): it needs a "
            "weight_map from tensors to files"
        ) from error
    tensors: Tensors = {}
    for name in names:
        shard = index.parent / name
        if Path(name).name != name:
            raise CheckpointError(f"{index} names a file outside its folder: {name}")
        if not shard.is_file():
            raise CheckpointError(f"{index} lists {name}, which is not in its folder: fetch it too")
        tensors.update(_file(shard))
    if lost := sorted(places.keys() - tensors.keys()):
        raise CheckpointError(f"{index} lists {lost[0]}, which is in none of its files")
    return tensors


def strip(tensors: Tensors, keys: Iterable[str]) -> tuple[Tensors, str]:
    """Take off what wrappers put before names (``module.``, ``_orig_mod.``, ``model.``, ...).

    Returns the tensors, and the prefix in words or nothing.
    """
    known = {key.partition(".")[0] for key in keys}
    taken = []
    if any("_orig_mod." in key for key in tensors):  # torch.compile of any part
        tensors = {key.replace("_orig_mod.", ""): value for key, value in tensors.items()}
        taken.append("_orig_mod.")
    while tensors and not any(key.partition(".")[0] in known for key in tensors):
        first = {key.partition(".")[0] for key in tensors}
        if len(first) > 1 or not all("." in key for key in tensors):
            break
        tensors = {key.partition(".")[2]: value for key, value in tensors.items()}
        taken.append(f"{first.pop()}.")
    return tensors, "".join(taken)


def differences(
    missing: Iterable[str], unexpected: Iterable[str], shapes: Iterable[tuple[str, Any, Any]]
) -> str:
    """What does not fit, the first few of each kind."""
    parts = []
    wrong = [f"{key} is {_size(a)} in the file, {_size(b)} in the model" for key, a, b in shapes]
    for what, names in (
        ("only in the model", list(missing)),
        ("only in the file", list(unexpected)),
        ("of another shape", wrong),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            parts.append(f"{what}: {', '.join(sorted(names)[:3])}{more}")
    return "; ".join(parts)


def _size(shape: Any) -> str:
    return "x".join(map(str, shape)) or "a single number"
