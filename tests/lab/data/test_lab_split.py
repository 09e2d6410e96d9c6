"""The validation split: the same share of each class, the same images for every seed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attncond.lab.data import DataError
from attncond.lab.data.split import hold_out, shuffled


@given(st.integers(1, 400), st.integers(1, 7), st.floats(0, 0.9))
def test_apart_and_together_everything(count, classes, share):
    labels = torch.arange(count) % classes
    kept, held = hold_out(labels, share, "validation")
    assert sorted([*kept.tolist(), *held.tolist()]) == list(range(count))
    for label in labels.unique().tolist():
        here = int((labels == label).sum())
        out = int((labels[held] == label).sum()) if len(held) else 0
        assert out < here
        wanted = max(round(share * here), int(share > 0))
        assert out == min(wanted, here - 1)


def test_drawn_once_and_for_all():
    labels = torch.arange(100) % 5
    torch.manual_seed(1)
    first = hold_out(labels, 0.2, "validation")
    torch.manual_seed(2)
    second = hold_out(labels, 0.2, "validation")
    assert torch.equal(first[1], second[1])
    assert first[1].tolist()[:8] == [8, 10, 14, 24, 32, 33, 34, 35]
    assert not torch.equal(first[1], hold_out(labels, 0.2, "digits")[1])


@pytest.mark.parametrize("share", [-0.1, 1.0, 1.5])
def test_a_share_is_a_share(share):
    with pytest.raises(DataError, match=r"data\.validation"):
        hold_out(torch.arange(10), share, "validation")


def test_shuffled_by_its_seed():
    assert torch.equal(shuffled(50, 3), shuffled(50, 3))
    assert not torch.equal(shuffled(50, 3), shuffled(50, 4))
    assert sorted(shuffled(50, 3).tolist()) == list(range(50))
