"""A disk with room for 50 bytes more."""

from __future__ import annotations

from typing import Any


class Full:
    """A file on it."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> Full:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, text: str) -> None:
        self.file.write(text[:50])
        raise OSError(28, "No space left on device")
