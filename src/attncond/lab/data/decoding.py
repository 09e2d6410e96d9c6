"""Encoded images of one size to one tensor; the image that cannot be decoded is named."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attncond.lab.data.places import required
from attncond.lab.data.source import DataError

__all__ = ["decoded", "in_colour"]

_FORMATS = ("JPEG", "PNG")


def decoded(encoded: Sequence[bytes | None], size: int, where: str) -> Tensor:
    """uint8 (N, 3, size, size) of JPEG or PNG images; ``where`` names them in errors.

    Pillow, because torchvision's decoders are about to go; and one thread, because at less than 100
    microseconds an image, handing work to others costs more than it gains.
    """
    pil = required("PIL.Image", "decoding images")
    pixels = np.empty((len(encoded), size, size, 3), np.uint8)
    for row, each in enumerate(encoded):
        try:
            if not each:
                raise ValueError("it has no bytes")
            image = pil.open(io.BytesIO(each), formats=_FORMATS)
            image.load()
            picture = in_colour(image)
        # Decoders raise all kinds of errors on damaged images.
        except Exception as error:
            foreign = isinstance(error, pil.UnidentifiedImageError)  # which tells an address
            why = "it is neither a JPEG nor a PNG" if foreign else error
            raise DataError(
                f"{where}, row {row}: the image cannot be decoded ({why}). The file is damaged "
                "or was not written whole: get it again"
            ) from error
        if image.size != (size, size):
            width, height = image.size
            raise DataError(
                f"{where}, row {row}: the image has {height}x{width} pixels, not {size}x{size}"
            )
        pixels[row] = picture
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()


def in_colour(image: Any) -> Any:
    """A Pillow image of any mode in RGB, where Pillow itself would make all above 255 white.

    Raises:
        ValueError: Its numbers have no known range.
    """
    if image.mode.startswith("I;16"):
        image = image.point(lambda value: value / 256).convert("L")
    elif image.mode in ("I", "F"):
        raise ValueError(
            f"nobody knows which of its numbers is white (Pillow's mode {image.mode}); "
            "save it with 8 or 16 bits for each"
        )
    return image if image.mode == "RGB" else image.convert("RGB")
