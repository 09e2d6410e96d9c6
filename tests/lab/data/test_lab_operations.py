"""Every operation gives what Pillow gives through timm."""

import numpy as np
import pytest
import torch
from lab_data_cases import noise_split
from PIL import Image, ImageOps
from timm.data import auto_augment

from attncond.lab.data.layers import _AMOUNTS
from attncond.lab.data.operations import OPERATIONS

FILL = (120, 110, 90)
LEVELS = (0.0, 1.3, 5.0, 9.0, 9.7, 10.0)


def without_bits(image, bits, **_):
    return ImageOps.posterize(image, bits) if bits else image.point(lambda value: 0)


def by_timm(images, name, level, sign, monkeypatch):
    monkeypatch.setattr(auto_augment.random, "random", lambda: 1.0 if sign < 0 else 0.0)
    # Pillow 13 refuses to keep no bit at all; the Pillows before it gave black.
    for posterize in ("Posterize", "PosterizeIncreasing"):
        monkeypatch.setitem(auto_augment.NAME_TO_OP, posterize, without_bits)
    hparams = {"img_mean": FILL, "interpolation": Image.Resampling.BILINEAR}
    operation = auto_augment.AugmentOp(name, prob=1.0, magnitude=level, hparams=hparams)
    done = [
        np.asarray(operation(Image.fromarray(each.permute(1, 2, 0).numpy()))) for each in images
    ]
    return torch.from_numpy(np.stack(done)).permute(0, 3, 1, 2).float()


def here(images, name, level, sign, device="cpu"):
    kind, amount = _AMOUNTS[name]
    count, size = len(images), images.shape[-1]
    rows = amount(np.full(count, level), np.full(count, sign), size)
    rows = torch.from_numpy(rows).float().to(device)
    fill = torch.tensor(FILL).float().to(device)
    return OPERATIONS[kind](images.float().to(device), rows, fill)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("name", sorted(_AMOUNTS))
def test_same_as_timm(name, sign, monkeypatch):
    images = noise_split(16).images
    images[0] = 77  # nothing to stretch
    images[1, :, ::2] = 0
    for level in LEVELS:
        ours, theirs = (
            here(images, name, level, sign),
            by_timm(images, name, level, sign, monkeypatch),
        )
        difference = (ours - theirs).abs()
        assert difference.max() <= 1
        # Linear interpolation in another order of additions may end on the other side of a whole
        # number; all else is exact.
        allowed = 0.05 if _AMOUNTS[name][0] == "affine" else 0.0
        assert (difference > 0).float().mean() <= allowed
        assert torch.equal(ours, ours.round())


@pytest.mark.parametrize("name", sorted(_AMOUNTS))
def test_small_images(name):
    images = noise_split(4, size=8).images
    out = here(images, name, 9.0, -1.0)
    assert out.shape == images.shape
    assert out.min() >= 0
    assert out.max() <= 255


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", sorted(_AMOUNTS))
def test_same_on_the_gpu(name):
    images = noise_split(64).images
    for level in LEVELS:
        cpu, gpu = here(images, name, level, 1.0), here(images, name, level, 1.0, "cuda").cpu()
        assert (cpu != gpu).float().mean() < 1e-3
        assert (cpu - gpu).abs().max() <= 1
