"""Encoded images of one size to one tensor; the image that cannot be decoded is named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attncond.lab.data.places import required
from attncond.lab.data.source import DataError

__all__ = ["decoded"]

_CHUNK = 2048  # images handed to the decoder at once


def decoded(encoded: Sequence[bytes | None], size: int, where: str) -> Tensor:
    """uint8 (N, 3, size, size) of JPEG or PNG images; ``where`` names them in errors.

    One thread: at 40 microseconds an image, handing work to others costs more than it gains.
    """
    io = required("torchvision.io", "decoding images")
    images = torch.empty(len(encoded), 3, size, size, dtype=torch.uint8)
    for start in range(0, len(encoded), _CHUNK):
        part = encoded[start : start + _CHUNK]
        try:
            inputs = [_buffer(each) for each in part]
            together = torch.stack(io.decode_jpeg(inputs, mode=io.ImageReadMode.RGB))
            images[start : start + len(part)] = together
        except (RuntimeError, TypeError, ValueError):
            # Something in here is no JPEG, or has another size: find out which.
            for row, each in enumerate(part, start):
                images[row] = _one(each, size, f"{where}, row {row}", io)
    return images


def _buffer(encoded: bytes | None) -> Tensor:
    if not encoded:
        raise ValueError("no bytes")
    return torch.frombuffer(bytearray(encoded), dtype=torch.uint8)


def _one(encoded: bytes | None, size: int, where: str, io: Any) -> Tensor:
    try:
        image: Tensor = io.decode_image(_buffer(encoded), mode=io.ImageReadMode.RGB)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(
            f"{where}: the image cannot be decoded ({reason}). The file is damaged or was not "
            "written whole: get it again"
        ) from error
    if image.shape[-2:] != (size, size):
        height, width = image.shape[-2:]
        raise DataError(f"{where}: the image has {height}x{width} pixels, not {size}x{size}")
    return image
