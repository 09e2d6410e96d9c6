"""Crops: a window of the padded image, mirrored or not."""

import numpy as np
import torch
from lab_data_cases import Augment, noise_split

from attncond.lab.data.crops import Crops, padded
from attncond.lab.data.draws import Draw, rank_places


def crops(augment, count=256, size=32):
    draw = Draw(0, 0, count, rank_places(1, count, 0, 1, False), torch.device("cpu"))
    return Crops(augment, draw, np.arange(count)[::-1].copy(), size)


def test_each_view_is_a_window():
    images = noise_split(256).images
    made = crops(Augment(crop=4, flip=True))
    views = made(padded(images, 4), 0)
    large = torch.nn.functional.pad(images, (4,) * 4).flip(0)
    for i in range(256):
        y, x = made.shift[0, i].tolist()
        window = large[i, :, y : y + 32, x : x + 32]
        assert torch.equal(views[i], window.flip(-1) if made.mirrored[0, i] else window)
    assert set(made.shift.flatten().tolist()) == set(range(9))
    assert 90 < made.mirrored.sum() < 166
    assert views.is_contiguous()


def test_without_anything_images_stay_as_they_are():
    images = noise_split(256).images
    assert torch.equal(crops(Augment())(padded(images, 0), 0), images.flip(0))


def test_flip_alone_and_crop_alone():
    images = noise_split(256).images
    made = crops(Augment(flip=True))
    views = made(padded(images, 0), 0)
    same = (views == images.flip(0)).flatten(1).all(1)
    assert torch.equal(~same, made.mirrored[0])
    assert not crops(Augment(crop=2)).mirrored.any()
