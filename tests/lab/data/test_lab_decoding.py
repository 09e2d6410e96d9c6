"""Decoding: exactly what Pillow gives, and the broken image by its row."""

import io

import numpy as np
import pytest
import torch
from lab_data_cases import encoded, noise_split
from PIL import Image

from attncond.lab.data import DataError
from attncond.lab.data.decoding import decoded

IMAGES = noise_split(8).images.permute(0, 2, 3, 1).numpy()
JPEGS = [encoded(image) for image in IMAGES]


def test_same_as_pillow():
    expected = np.stack([np.asarray(Image.open(io.BytesIO(each))) for each in JPEGS])
    assert torch.equal(decoded(JPEGS, 32, "x"), torch.from_numpy(expected).permute(0, 3, 1, 2))


def test_png_and_grey_among_jpegs():
    grey = encoded(IMAGES[1][..., 0])
    out = decoded([JPEGS[0], encoded(IMAGES[1], "PNG"), grey], 32, "x")
    assert np.array_equal(out[1].permute(1, 2, 0).numpy(), IMAGES[1])
    assert torch.equal(out[2][0], out[2][1])


@pytest.mark.parametrize("bad", [b"", None, b"not an image", JPEGS[0][:200], b"\xff\xd8\xff"])
def test_the_broken_row_is_named(bad):
    with pytest.raises(DataError, match=r"x\.parquet, row 5: .*decoded"):
        decoded([*JPEGS[:5], bad, *JPEGS[5:]], 32, "x.parquet")


def test_another_size_is_named():
    small = encoded(IMAGES[0][:16])
    with pytest.raises(DataError, match="row 2: the image has 16x32 pixels, not 32x32"):
        decoded([*JPEGS[:2], small], 32, "x.parquet")


def test_all_of_another_size():
    with pytest.raises(DataError, match="row 0: the image has 32x32 pixels, not 64x64"):
        decoded(JPEGS, 64, "x.parquet")


def test_nothing_to_decode():
    assert decoded([], 32, "x").shape == (0, 3, 32, 32)
