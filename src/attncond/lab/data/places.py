"""Where data is looked for, and what to say when it is not there or cannot be read."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attncond.errors import installed
from attncond.lab.data.source import DataError

__all__ = ["data_folder", "readable", "reading", "required"]


def data_folder(root: Path | None) -> Path:
    """The folder given, or the environment's ATTNCOND_DATA, or ``data``."""
    return Path(root or os.environ.get("ATTNCOND_DATA") or "data").expanduser()


def readable(folder: Path, names: tuple[str, ...], what: str, how: str) -> list[Path]:
    """The paths of files that must all be there; ``how`` says how to get them."""
    files = [folder / name for name in names]
    with reading(folder):
        if not folder.is_dir():
            problem = f"there is no folder {folder}"
        elif missing := [file.name for file in files if not file.is_file()]:
            problem = f"{folder} has no {', '.join(missing)}"
        else:
            return files
    raise DataError(
        f"{what}: looked for {', '.join(names)} in {folder.absolute()}, but {problem}. "
        f"Name the folder with --data or ATTNCOND_DATA. {how} Nothing is downloaded for you."
    )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Errors of the file system with the path and what to do."""
    try:
        yield
    except PermissionError as error:
        raise DataError(
            f"{path} may not be read by this user: change its permissions, or name another folder "
            "with --data or ATTNCOND_DATA"
        ) from error
    except OSError as error:
        advice = {
            errno.EIO: "the disk or the network drive reports a failure",
            errno.EISDIR: "it is a folder, not a file",
            errno.ENOTDIR: "a part of the path is a file, not a folder",
        }.get(error.errno or 0, "check the path and the drive")
        raise DataError(f"{path} cannot be read ({error.strerror or error}): {advice}") from error


def required(module: str, what: str) -> Any:
    """A library of the lab, or how to install it."""
    return installed(module, f"{what} needs", "lab", DataError)
