"""The digits that come with scikit-learn."""

import sys

import pytest
import torch
from lab_data_cases import Data

from attncond.lab.data import DataError, load
from attncond.lab.data.digits import MEAN, STD, read_digits


def test_every_class_in_both_parts_and_nothing_twice():
    train, test = read_digits()
    assert len(train) + len(test) == 1797
    assert train.images.shape[1:] == (3, 8, 8)
    for part in (train, test):
        assert part.labels.unique().tolist() == list(range(10))
    shares = torch.bincount(test.labels) / torch.bincount(torch.cat([train.labels, test.labels]))
    assert (shares - 0.2).abs().max() < 0.01
    assert train.images.max() == 255
    scaled = train.images.float() / 255
    assert scaled.mean().item() == pytest.approx(MEAN[0], abs=0.005)
    assert scaled.std().item() == pytest.approx(STD[0], abs=0.005)


@pytest.mark.parametrize("size", [8, 16, 32])
def test_any_size(size):
    source = load(Data("digits", size))
    assert source.train.images.shape[1:] == (3, size, size)
    assert source.test.images.dtype == torch.uint8
    assert ("scaled from 8x8" in source.note) == (size != 8)
    assert source.classes == 10


def test_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match="pip install 'attncond\\[lab\\]'"):
        read_digits()
