"""Checkpoints of a training: safetensors and JSON alone, whole or not there at all.

A checkpoint is a folder ``step-00000123`` with ``model.safetensors``, ``optimizer.safetensors``,
maybe ``ema.safetensors``, and ``state.json``, which holds what is no tensor and the checksums of
all files, its own too. It is written under another name, handed to the disk, and renamed; only then
do older ones go. A process that is killed, or a disk that is full, costs what was being written.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import random
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from attncond.checkpoints import CheckpointError
from attncond.corrections import full, like

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Tensors",
    "load_model",
    "load_optimizer",
    "load_random",
    "newest",
    "optimizer_state",
    "random_state",
    "save",
    "whole",
    "write_tensors",
]

Tensors = dict[str, Tensor]

FORMAT = "attncond.lab.checkpoint/1"
_NAME, _STATE, _WRITING, _BROKEN = "step-", "state.json", ".writing-", ".broken-"


@dataclass(frozen=True)
class Checkpoint:
    """What was saved after ``step`` optimizer steps."""

    step: int
    tensors: dict[str, Tensors]  # "model", "optimizer", "ema"
    state: dict[str, Any]
    path: Path


def save(
    folder: Path, step: int, tensors: Mapping[str, Tensors], state: Mapping[str, Any], keep: int = 2
) -> Path:
    """Write a checkpoint into ``folder``, and keep the last ``keep`` of them.

    Raises:
        CheckpointError: It could not be written; the ones before are as they were.
    """
    final = folder / f"{_NAME}{step:08d}"
    writing = folder / f"{_WRITING}{final.name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clear(folder)
        writing.mkdir()
        files = {f"{name}.safetensors": content for name, content in tensors.items()}
        for name, content in files.items():
            save_file(content, writing / name)
            _sync(writing / name)
        sums = {name: _sum((writing / name).read_bytes()) for name in files}
        body = {"format": FORMAT, "step": step, "files": sums, "state": dict(state)}
        text = _dumps({**body, "checksum": _sum(_dumps(body).encode())})
        (writing / _STATE).write_text(text, encoding="utf-8")
        _sync(writing / _STATE)
        _sync(writing)
        if final.exists():  # of a run that went back to an earlier checkpoint
            final.rename(folder / f"{_BROKEN}{final.name}")
        writing.rename(final)
        _sync(folder)
    except (OSError, SafetensorError) as error:
        left = found[-1].name if (found := _all(folder)) else None
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written to {folder}: {_why(error)}. "
            + (f"{left} is whole: make room" if left else "There is none yet: make room")
            + ", and the same command goes on from there."
        ) from error
    finally:
        shutil.rmtree(writing, ignore_errors=True)
    _clear(folder)
    for old in _all(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def newest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole; None if there is none.

    One that is damaged is told in a warning and set aside, so that it does not count as one of
    those to keep. With several processes, the first one has to look before the others do.
    """
    for path in reversed(_all(folder)):
        try:
            return _read(path)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            warnings.warn(
                f"{path} is damaged ({_why(error)}): going back to the checkpoint before it",
                RuntimeWarning,
                stacklevel=2,
            )
            with contextlib.suppress(OSError):
                path.rename(folder / f"{_BROKEN}{path.name}")
    return None


def _read(path: Path) -> Checkpoint:
    body = json.loads((path / _STATE).read_text(encoding="utf-8"))
    if body.pop("checksum") != _sum(_dumps(body).encode()):
        raise ValueError(f"{_STATE} is not what was written")
    if body["format"] != FORMAT:
        raise ValueError(f"it is a {body['format']}, wanted is {FORMAT}")
    tensors = {}
    for name, checksum in body["files"].items():
        if _sum((path / name).read_bytes()) != checksum:
            raise ValueError(f"{name} is not what was written")
        tensors[name.removesuffix(".safetensors")] = load_file(path / name)
    return Checkpoint(int(body["step"]), tensors, body["state"], path)


def write_tensors(path: Path, tensors: Tensors) -> None:
    """Write one safetensors file in one piece.

    Raises:
        CheckpointError: It could not be written; a file that was there stays.
    """
    writing = path.with_name(f"{_WRITING}{path.name}")
    try:
        save_file(tensors, writing)
        writing.chmod(0o644)  # safetensors writes for the owner alone
        _sync(writing)
        writing.replace(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} could not be written: {_why(error)}") from error
    finally:
        writing.unlink(missing_ok=True)


def whole(tensors: Mapping[str, Tensor]) -> Tensors:
    """Copies on the CPU, of what FSDP2 shards too: every process has to call it then."""
    return {k: full(v.detach()).to("cpu", copy=True).contiguous() for k, v in tensors.items()}


def load_model(model: nn.Module, tensors: Tensors) -> None:
    """Undo ``whole(model.state_dict())``; keys and shapes have to be the model's."""
    own = model.state_dict()
    parts = {k: like(v, own[k]) if k in own else v for k, v in tensors.items()}
    try:
        model.load_state_dict(parts, strict=True)
    except RuntimeError as error:
        raise CheckpointError(f"the checkpoint is not of this model: {error}") from error


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> Tensors:
    """What the optimizer remembers, by parameter: ``exp_avg/blocks.0.attn.qkv.weight``."""
    names = {id(p): name for name, p in model.named_parameters()}
    found = {
        f"{key}/{names[id(p)]}": torch.as_tensor(value)
        for p, values in optimizer.state.items()
        for key, value in values.items()
    }
    return whole(found)


def load_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: Tensors) -> None:
    """Undo :func:`optimizer_state`."""
    names = {id(p): name for name, p in model.named_parameters()}
    places = [p for group in optimizer.param_groups for p in group["params"]]
    index = {names[id(p)]: number for number, p in enumerate(places)}
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        key, _, parameter = name.partition("/")
        if parameter not in index:
            raise CheckpointError(f"the checkpoint trains {parameter}, which this run does not")
        number = index[parameter]
        same = value.shape == places[number].shape
        state.setdefault(number, {})[key] = like(value, places[number]) if same else value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def random_state() -> dict[str, Any]:
    """All of this process's random number generators, as plain data."""
    name, keys, *rest = np.random.get_state()
    version, internal, gauss = random.getstate()
    return {
        "torch": _text(torch.get_rng_state()),
        "cuda": _text(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
        "numpy": [str(name), np.asarray(keys).tolist(), *rest],
        "python": [version, list(internal), gauss],
    }


def load_random(state: Mapping[str, Any]) -> None:
    """Undo :func:`random_state`."""
    torch.set_rng_state(_bytes(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(state["cuda"]))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), *rest))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))


def _all(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{_NAME}*")) if folder.is_dir() else []


def _clear(folder: Path) -> None:
    """What killed writers left."""
    for prefix in (_WRITING, _BROKEN):
        for path in folder.glob(f"{prefix}*"):
            shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _dumps(value: Any) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False)


def _text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _why(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)
