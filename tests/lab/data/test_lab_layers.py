"""RandAugment and jitter: each image gets its own operations, whatever else is in the batch."""

import numpy as np
import pytest
import torch
from lab_data_cases import noise_split
from PIL import Image
from timm.data.auto_augment import LEVEL_TO_ARG
from torchvision.transforms import functional

from attncond.lab.data import DataError
from attncond.lab.data.draws import Draw, rank_places
from attncond.lab.data.layers import (
    _AMOUNTS,
    _NAMES,
    Layers,
    colour_jitter,
    rand_augment,
    read_policy,
)
from attncond.lab.data.operations import OPERATIONS

FILL = torch.tensor([100.0, 110.0, 120.0])
CPU = torch.device("cpu")


def draw(count=64, batch=16, seed=0):
    return Draw(seed, 0, count, rank_places(count // batch, batch, 0, 1, False), CPU)


def test_sorted_by_operation_is_the_same_as_one_by_one():
    random = np.random.default_rng(0)
    kinds = random.integers(0, len(_NAMES), (64, 3))
    amounts = random.uniform(0.5, 1.5, (64, 3, 6))
    layers = Layers(draw(), kinds, amounts, FILL)
    images = noise_split(64).images
    for step in range(4):
        together = layers(images[step * 16 : step * 16 + 16], step)
        for i in range(16):
            place = step * 16 + i
            alone = images[place : place + 1].float()
            for k in range(3):
                amount = torch.from_numpy(amounts[place, k : k + 1]).float()
                alone = OPERATIONS[_NAMES[kinds[place, k]]](alone, amount, FILL)
            assert torch.equal(together[i], alone[0])


@pytest.mark.parametrize("text", ["rand-m9-mstd0.5-inc1", "rand-m7-n3-p0.8", "rand-m9-mstd101"])
def test_rand_augment_changes_images_as_often_as_timm(text):
    images = noise_split(64).images.repeat(20, 1, 1, 1)
    made = rand_augment(draw(1280, 64), text, 32, FILL)
    changed = torch.cat([made(images[:64], s) for s in range(20)]) != images.float()
    share = changed.flatten(1).any(1).float().mean().item()
    layers, probability = (3, 0.8) if "n3" in text else (2, 0.5)
    # A few operations leave an image as it is at low levels.
    assert (
        0.75 * (1 - (1 - probability) ** layers) < share <= 1 - (1 - probability) ** layers + 0.05
    )


@pytest.mark.parametrize("text", ["rand-m9-n0", "rand-m9-p0.01-inc1"])
def test_operations_that_no_image_gets(text):
    images = noise_split(16).images
    made = rand_augment(draw(16, 16), text, 32, FILL)
    assert (made(images, 0) == images).flatten(1).all(1).sum() > 8


def test_levels_are_timm_s():
    for name in ("Rotate", "ShearX", "SolarizeAdd", "Solarize", "SolarizeIncreasing", "Color"):
        for level in (0.0, 3.3, 9.0, 10.0):
            ours = _AMOUNTS[name][1](np.array([level]), np.array([1.0]), 32)[0]
            theirs = LEVEL_TO_ARG[name](level, {})[0]
            if name == "Rotate":
                assert np.degrees(np.arcsin(abs(ours[1]))) == pytest.approx(abs(theirs))
            else:
                assert abs(ours[1 if name == "ShearX" else 0]) == pytest.approx(abs(theirs))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rand-m9-q3", "is no RandAugment"),
        ("original", "is no RandAugment"),
        ("rand-m9-tweights", "weighted choices"),
        ("rand-m9-t3a", "Desaturate"),
    ],
)
def test_what_cannot_be_done_is_named(text, words):
    with pytest.raises(DataError, match=words):
        rand_augment(draw(), text, 32, FILL)
    if text.startswith("rand-m9-t"):  # images that are read one by one get them
        assert read_policy(text, in_memory=False)
    else:
        with pytest.raises(DataError, match=words):
            read_policy(text, in_memory=False)


def test_jitter_is_torchvision_s():
    images = noise_split(16).images
    made = colour_jitter(draw(16), 0.4, FILL)
    out = made(images, 0)
    moves, sizes = made.moves[0], made.sizes[0]
    # Follow each image through its three turns, with Pillow.
    pictures = [Image.fromarray(each.permute(1, 2, 0).numpy()) for each in images]
    change = {
        "Brightness": functional.adjust_brightness,
        "Contrast": functional.adjust_contrast,
        "Color": functional.adjust_saturation,
    }
    for k in range(3):
        pictures = [pictures[i] for i in moves[k].tolist()]
        names = [name for name, size in sizes[k] for _ in range(size)]
        amounts = made.amounts[0, k, :, 0].tolist()
        assert all(0.6 <= amount <= 1.4 for amount in amounts)
        pictures = [change[n](p, a) for n, p, a in zip(names, pictures, amounts, strict=True)]
    pictures = [pictures[i] for i in moves[3].tolist()]
    expected = np.stack([np.asarray(p) for p in pictures])
    assert torch.equal(out, torch.from_numpy(expected).permute(0, 3, 1, 2).float())


def test_jitter_gives_every_image_all_three():
    made = colour_jitter(draw(256, 256), 0.4, FILL)
    for k in range(3):
        counts = dict(made.sizes[0][k])
        assert set(counts) == {"Brightness", "Contrast", "Color"}
        assert all(50 < count < 120 for count in counts.values())
