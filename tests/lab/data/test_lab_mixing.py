"""Mixup and cutmix are timm's."""

import numpy as np
import pytest
import torch
from lab_data_cases import Augment
from timm.data import Mixup
from timm.data import mixup as timm_mixup

from attncond.lab.data.draws import Draw, rank_places
from attncond.lab.data.mixing import Mixing, soft_targets

CASES = [(0.8, 0.0, 1.0), (0.0, 1.0, 1.0), (0.8, 1.0, 1.0), (0.8, 1.0, 0.5)]


def mixing(augment, steps=40, batch=8, size=32, classes=10, smoothing=0.1, seed=0):
    places = rank_places(steps, batch, 0, 1, True)
    draw = Draw(seed, 0, steps * batch, places, torch.device("cpu"))
    return Mixing(augment, draw, size, classes, smoothing)


@pytest.mark.parametrize(("mixup", "cutmix", "probability"), CASES)
def test_same_as_timm_with_the_same_draws(mixup, cutmix, probability, monkeypatch):
    ours = mixing(Augment(mixup=mixup, cutmix=cutmix, mixup_prob=probability))
    theirs = Mixup(mixup, cutmix, prob=probability, label_smoothing=0.1, num_classes=10)
    images = torch.randn(8, 3, 32, 32)
    labels = torch.randint(0, 10, (8,))
    for step in range(40):
        share, cut = float(ours.share[step]), bool(ours.cut[step])
        box = [int(ours.box[step][i]) for i in (0, 2, 1, 3)]  # top, bottom, left, right
        monkeypatch.setattr(theirs, "_params_per_batch", lambda s=share, c=cut: (s, c))
        monkeypatch.setattr(timm_mixup, "rand_bbox", lambda *a, box=box, **k: box)
        expected, targets = theirs(images.clone(), labels)
        got, got_targets = ours(images, labels, step)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(got_targets, targets, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("mixup", "cutmix", "probability"), CASES)
def test_drawn_as_often_and_as_much_as_timm(mixup, cutmix, probability):
    ours = mixing(Augment(mixup=mixup, cutmix=cutmix, mixup_prob=probability), steps=4000, batch=2)
    theirs = Mixup(mixup, cutmix, prob=probability, num_classes=10)
    np.random.seed(0)
    shares, cuts = [], []
    for _ in range(4000):
        share, cut = theirs._params_per_batch()
        if cut:
            _, share = timm_mixup.cutmix_bbox_and_lam((1, 3, 32, 32), share)
        shares.append(share)
        cuts.append(cut)
    mixed = ours.share != 1
    assert abs((np.array(shares) != 1).mean() - mixed.mean()) < 0.04
    assert abs(np.mean(cuts) - (ours.cut & mixed).mean()) < 0.06
    levels = np.linspace(0.05, 0.95, 19)
    assert np.abs(np.quantile(shares, levels) - np.quantile(ours.share, levels)).max() < 0.06


def test_targets_of_a_mixed_pair():
    targets = soft_targets(torch.tensor([1, 3]), 4, 0.75, 0.0)
    assert targets.tolist() == [[0, 0.75, 0, 0.25], [0, 0.25, 0, 0.75]]
    smooth = soft_targets(torch.tensor([1, 3]), 4, 0.75, 0.2)
    torch.testing.assert_close(smooth.sum(1), torch.ones(2))
    assert smooth.min().item() == pytest.approx(0.05)


def test_images_are_not_changed_in_place():
    images = torch.randn(8, 3, 32, 32)
    before = images.clone()
    ours = mixing(Augment(mixup=0.8, cutmix=1.0))
    for step in range(10):
        ours(images, torch.zeros(8, dtype=torch.long), step)
    assert torch.equal(images, before)
