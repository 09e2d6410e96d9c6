"""Random erasing: timm's rectangles, noise inside, nothing outside."""

import random

import numpy as np
import pytest
import torch
from timm.data.random_erasing import RandomErasing

from attncond.lab.data.draws import Draw, rank_places
from attncond.lab.data.erasing import Erasing


def erasing(probability, count=2048, size=32, seed=0, epoch=0):
    draw = Draw(seed, epoch, count, rank_places(1, count, 0, 1, False), torch.device("cpu"))
    return Erasing(draw, probability, size)


@pytest.mark.parametrize("size", [8, 32])
def test_as_often_and_as_large_as_timm(size):
    ours = erasing(0.25, size=size)(torch.full((2048, 3, size, size), 50.0), 0)
    random.seed(0)
    theirs = torch.full((2048, 3, size, size), 50.0)
    RandomErasing(0.25, mode="pixel", device="cpu")(theirs)
    shares = [(x[:, 0] != 50).float().mean((1, 2)) for x in (ours, theirs)]
    hit = [(share > 0).float().mean().item() for share in shares]
    assert abs(hit[0] - hit[1]) < 0.04
    levels = np.linspace(0.1, 0.9, 9)
    quantiles = [np.quantile(share[share > 0].numpy(), levels) for share in shares]
    assert np.abs(quantiles[0] - quantiles[1]).max() < 0.04


def test_inside_is_noise_in_one_rectangle():
    out = erasing(1.0)(torch.full((2048, 3, 32, 32), 50.0), 0)
    changed = out != 50
    noise = out[changed]
    assert abs(noise.mean()) < 0.02
    assert abs(noise.std() - 1) < 0.02
    for one in changed[:50]:
        assert torch.equal(one[0], one[1])
        rows, columns = one[0].any(1), one[0].any(0)
        assert torch.equal(one[0], rows[:, None] & columns[None, :])


def test_rectangles_reach_every_border():
    changed = erasing(1.0)(torch.full((2048, 3, 32, 32), 50.0), 0)[:, 0] != 50
    for border in (changed[:, 0], changed[:, -1], changed[:, :, 0], changed[:, :, -1]):
        assert 0.03 < border.any(1).float().mean() < 0.3


def test_none_at_zero_and_another_field_each_epoch():
    images = torch.randn(2048, 3, 32, 32)
    assert torch.equal(erasing(0.0)(images, 0), images)
    assert not torch.equal(erasing(1.0, epoch=0)(images, 0), erasing(1.0, epoch=1)(images, 0))
