"""Decoding: exactly what Pillow gives, and the broken image by its row."""

import io

import numpy as np
import pytest
import torch
from lab_data_cases import encoded, noise_split
from PIL import Image

from attncond.lab.data import DataError
from attncond.lab.data.decoding import decoded, in_colour

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


def test_sixteen_bits_of_grey_are_not_all_white():
    pixels = np.linspace(0, 65535, 32 * 32).astype(np.uint16).reshape(32, 32)
    out = decoded([encoded(pixels, "PNG")], 32, "x")[0]
    assert np.array_equal(out[1].numpy(), pixels // 256)
    assert torch.equal(out[0], out[2])


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_numbers_without_a_range_are_refused(kind):
    with pytest.raises(ValueError, match=r"which of its numbers is white .* 8 or 16 bits"):
        in_colour(Image.fromarray(np.full((4, 4), 300, kind)))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV"])
def test_other_modes_are_as_pillow_has_them(mode):
    image = Image.fromarray(IMAGES[0]).convert(mode)
    assert np.array_equal(np.asarray(in_colour(image)), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("bad", [b"", None, b"not an image", JPEGS[0][:200], b"\xff\xd8\xff"])
def test_the_broken_row_is_named(bad):
    with pytest.raises(DataError, match=r"x\.parquet, row 5: .*decoded"):
        decoded([*JPEGS[:5], bad, *JPEGS[5:]], 32, "x.parquet")


def test_what_is_no_image_is_told_without_an_address_in_memory():
    with pytest.raises(DataError, match=r"decoded \(it is neither a JPEG nor a PNG\)"):
        decoded([b"not an image"], 32, "x.parquet")


def test_another_size_is_named():
    small = encoded(IMAGES[0][:16])
    with pytest.raises(DataError, match="row 2: the image has 16x32 pixels, not 32x32"):
        decoded([*JPEGS[:2], small], 32, "x.parquet")


def test_all_of_another_size():
    with pytest.raises(DataError, match="row 0: the image has 32x32 pixels, not 64x64"):
        decoded(JPEGS, 64, "x.parquet")


def test_nothing_to_decode():
    assert decoded([], 32, "x").shape == (0, 3, 32, 32)
