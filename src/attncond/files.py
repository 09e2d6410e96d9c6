"""JSON that everything reads, and files in one piece: one stays until its successor is whole."""

from __future__ import annotations

import contextlib
import glob
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attncond.errors import DiagnosisError

__all__ = ["clear_drafts", "dumps", "plain", "spelled_out", "unpacking", "write_bytes"]
__all__ += ["write_text"]


def dumps(value: Any, indent: int | None = None) -> str:
    """JSON that everything reads."""
    return json.dumps(plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def plain(value: Any) -> Any:
    """Without NaN and infinities, which a diverged run has and JSON has not: they become None."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def spelled_out(value: Any) -> Any:
    """Plain data: NaN and infinities as texts that ``float`` reads, other objects as their own.

    >>> spelled_out({1: (0.5, float("-inf")), "device": Path("cpu")})
    {'1': [0.5, '-inf'], 'device': 'cpu'}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): spelled_out(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [spelled_out(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


@contextmanager
def unpacking(data: Any, schema: str, what: str) -> Iterator[None]:
    """Take apart what JSON gave in the block; say so where it is no ``what``, or a damaged one."""
    found = data.get("schema") if isinstance(data, Mapping) else None
    if found != schema:
        raise DiagnosisError(
            f"this is no {what} that this version of attncond reads: its schema is {found!r}, "
            f"wanted is {schema!r}"
        )
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DiagnosisError(f"the {what} is damaged: {error!r}") from error


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    r""":func:`write_bytes` of ``text`` as UTF-8.

    Bytes of a file's name that are none are written as \udce9, which JSON reads as they were.
    """
    return write_bytes(path, text.encode(errors="backslashreplace"))


def write_bytes(path: str | os.PathLike[str], content: bytes) -> Path:
    """Write a file; one that is there is exchanged in one piece, or stays.

    Raises:
        OSError: The folder is missing or not writable, or ``path`` is a folder.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"{path} cannot be written: there is no folder {path.parent}; make it first"
        )
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    except PermissionError as error:
        raise PermissionError(
            f"{path} cannot be written: the folder {path.parent} takes no new files; choose another"
        ) from error
    try:
        with open(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())  # mkstemp's files are for their owner alone
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return path


def clear_drafts(path: str | os.PathLike[str]) -> None:
    """Delete what :func:`write_bytes` left beside ``path`` where it was killed.

    Only for who knows that nobody is writing the file now.
    """
    path = Path(path)
    # Eight characters of those that mkstemp has: a file of the user's is hardly called so.
    for draft in path.parent.glob(f".{glob.escape(path.name)}.{'[a-z0-9_]' * 8}.tmp"):
        with contextlib.suppress(OSError):  # nobody reads it: it only takes room
            draft.unlink()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
