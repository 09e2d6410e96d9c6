"""A run's folder: one process at a time, one configuration for ever, every file whole.

config.json comes first, metrics.jsonl grows by a line for each evaluation, result.json comes last.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from attncond.errors import ConditioningError
from attncond.files import clear_drafts, dumps, write_text
from attncond.lab.config import Config
from attncond.lab.runs import ADDED

__all__ = ["Interrupted", "Result", "RunError", "RunFolder", "run_path", "taken"]

_OWN = ("metrics.jsonl", "history.jsonl", "result.json", "model.safetensors", "config.json")
_OWN_FOLDERS = ("checkpoints", "tensorboard")
# What may change when a run goes on: nothing that is computed depends on it.
_FREE = ("train.checkpoint_every", "data.workers")
_LOCKS: weakref.WeakSet[IO[str]] = weakref.WeakSet()  # that this process holds


class RunError(ConditioningError):
    """A run cannot start, go on or end; the message says what to do."""


class Interrupted(RunError):
    """A run was asked to stop, and saved what it needs to go on; ``reason`` says what asked it."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Result:
    """How a run ended: ``values`` is its result.json."""

    folder: Path
    values: Mapping[str, Any] = field(repr=False)

    @property
    def status(self) -> str:
        """ "finished" or "diverged"."""
        return str(self.values["status"])

    @property
    def diverged(self) -> bool:
        """Whether the loss was no number any more."""
        return self.status == "diverged"

    @property
    def complete(self) -> bool:
        """Whether nothing is left to do, not even to read the test set."""
        return self.diverged or bool(self.values["test_read"])

    @property
    def test_accuracy(self) -> float | None:
        """Per cent; None if the run diverged or left the test set unread."""
        return self.values["test_accuracy"]  # type: ignore[no-any-return]

    @property
    def validation_accuracy(self) -> float | None:
        """Per cent, after the last epoch; None if nothing was held out."""
        return self.values["validation_accuracy"]  # type: ignore[no-any-return]


def run_path(root: Path, config: Config) -> Path:
    """``root/RECIPE/FORM/VARIANT/seed0``.

    Raises:
        RunError: The name is not UTF-8.
    """
    return _named(root / config.recipe / config.form / config.variant / f"seed{config.seed}")


def _named(path: Path) -> Path:
    """The path, if everything can write its name."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        shown = os.fsencode(path).decode(errors="backslashreplace")
        raise RunError(
            f"{shown}: this name is not UTF-8, in which TensorBoard has to write it. Choose "
            "another folder with --out"
        ) from None
    return path


class RunFolder:
    """The files of one run. Use it in a ``with``: the folder is locked until its end."""

    def __init__(self, path: Path, *, main: bool = True) -> None:
        self.path, self.main = path, main
        self.checkpoints = path / "checkpoints"
        self.history = path / "history.jsonl"
        self.weights = path / "model.safetensors"
        self._metrics = path / "metrics.jsonl"
        self._trained = (self._metrics, self.checkpoints, path / "result.json")
        self._lock: IO[str] | None = None

    def __enter__(self) -> RunFolder:
        if not self.main:
            return self
        try:
            _named(self.path).mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / ".lock", "w")
        except OSError as error:
            raise RunError(
                f"{self.path} cannot be written: {error.strerror}. Choose another folder with --out"
            ) from error
        if taken(self._lock) is False:
            self._lock.close()
            raise RunError(
                f"another process is training in {self.path}; wait for it, or choose another "
                "folder with --out"
            )
        _LOCKS.add(self._lock)
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.close()  # the file stays: to delete it would let two processes lock two

    def claim(self, config: Config, resume: bool) -> None:
        """Write config.json, or see that what is there is the same.

        What was never trained, for a mistake in its settings, leaves the folder to other settings.

        Raises:
            RunError: The folder is of another configuration; the message names what differs.
        """
        for name in _OWN:
            clear_drafts(self.path / name)
        if not resume:
            self._clear()
        file, new = self.path / "config.json", json.loads(config.model_dump_json())
        trained = any(path.exists() for path in self._trained)
        try:
            old = _object(file)
        except FileNotFoundError:
            if trained:
                raise RunError(
                    f"{self.path} holds a run without its config.json, so that its settings are "
                    "not known. Choose another folder with --out, or start over with --restart"
                ) from None
            write_text(file, json.dumps(new, indent=1) + "\n")
            return
        except ValueError as error:
            raise RunError(f"{file} is damaged ({error}): delete {self.path}") from error
        changes = list(_changes(old, new))
        if changes and trained:
            raise RunError(
                f"{self.path} holds a run with other settings: {'; '.join(changes)}. Choose "
                "another folder with --out, or start over with --restart"
            )
        if changes:
            write_text(file, json.dumps(new, indent=1) + "\n")

    def _clear(self) -> None:
        """Delete the run, what says of which settings it is last: whoever kills this sees it."""
        try:
            for name in _OWN_FOLDERS:
                if (self.path / name).exists():
                    shutil.rmtree(self.path / name)
            for name in _OWN:
                (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            raise RunError(
                f"{self.path} cannot be started over: {error}. Delete it, or choose another folder "
                "with --out"
            ) from error

    def result(self) -> Result | None:
        """How the run ended; None if it has not."""
        file = self.path / "result.json"
        try:
            return Result(self.path, _object(file, "status", "test_read"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise RunError(f"{file} is damaged ({error}): delete it, and run again") from error

    def finish(self, values: Mapping[str, Any]) -> None:
        """Write result.json."""
        write_text(self.path / "result.json", dumps(values, indent=1) + "\n")

    def rewind(self, step: int) -> list[dict[str, Any]]:
        """Drop what was measured after ``step``, which will be measured again; what is left."""
        if not step:
            self._metrics.unlink(missing_ok=True)
            self.history.unlink(missing_ok=True)
        if not self._metrics.exists():
            return []
        rows = []
        for line in self._metrics.read_bytes().splitlines():
            try:
                row = json.loads(line)
                if row["step"] <= step:
                    rows.append(row)
            except (ValueError, TypeError, KeyError):  # of a killed process, or a broken disk
                continue
        write_text(self._metrics, "".join(dumps(row) + "\n" for row in rows))
        return rows

    def add(self, row: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl, and hand it to the system at once."""
        try:
            with open(self._metrics, "a", encoding="utf-8") as file:
                file.write(dumps(row) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(
                f"{self._metrics} cannot be written: {error.strerror}. Make room, and the same "
                "command goes on"
            ) from error


def _unshare() -> None:
    """Close what a forked process, which decodes images for one, has of its parent's locks.

    It outlives a parent that is killed by seconds, and would keep the folder locked for them.
    """
    for lock in _LOCKS:
        lock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unshare)


def taken(file: IO[str], shared: bool = False) -> bool | None:
    """Lock a file: False if somebody else has; None where the system or the drive has no locks."""
    try:
        import fcntl

        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except ImportError:
        return None
    except OSError as error:
        return False if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    return True


def _object(file: Path, *keys: str) -> dict[str, Any]:
    """What a file of JSON holds; ValueError if that is no object with these keys."""
    found = json.loads(file.read_bytes())
    if not isinstance(found, dict):
        raise ValueError("it should hold one JSON object")
    if missing := [key for key in keys if key not in found]:
        raise ValueError(f"it has no {missing[0]}")
    return found


def _changes(old: Any, new: Any, key: str = "") -> Iterator[str]:
    if key in _FREE:
        return
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(n for n in new if n not in old)]:
            inner = f"{key}.{name}" if key else name
            yield from _changes(old.get(name), new.get(name), inner)
    elif old != new and not (old is None and ADDED.get(key) == new):
        yield f"{key} was {json.dumps(old)} and is {json.dumps(new)}"
