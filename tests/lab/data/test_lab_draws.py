"""Order and places: every image once, every place with one rank."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attncond.lab.data.draws import Draw, evaluation_bounds, image_order, rank_places


@given(st.integers(1, 300), st.integers(0, 5), st.integers(0, 5))
def test_an_epoch_shows_every_image_once(images, seed, epoch):
    order = image_order(images, 1, seed, epoch)
    assert sorted(order.tolist()) == list(range(images))


@given(st.integers(1, 300), st.integers(2, 4))
def test_repeats_are_neighbours_and_the_epoch_is_as_long(images, repeats):
    order = image_order(images, repeats, 0, 0)
    assert len(order) == images
    whole = images // repeats * repeats
    assert (order[:whole].reshape(-1, repeats) == order[:whole:repeats, None]).all()
    assert len(np.unique(order)) == -(-images // repeats)


def test_order_differs_by_epoch_and_seed():
    orders = [tuple(image_order(100, 1, s, e)) for s in range(3) for e in range(3)]
    assert len(set(orders)) == 9


@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 4), st.booleans())
def test_ranks_share_all_places(steps, half, world, paired):
    batch = 2 * half
    parts = [rank_places(steps, batch, r, world, paired) for r in range(world)]
    for step in range(steps):
        together = np.concatenate([part[step] for part in parts])
        whole = batch * world
        assert sorted(together.tolist()) == list(range(step * whole, (step + 1) * whole))
    if paired:
        for part in parts:
            inside = part[0]
            assert (inside + inside[::-1] == batch * world - 1).all()
    if world == 1:
        assert (parts[0].ravel() == np.arange(steps * batch)).all()


@settings(max_examples=300)
@given(st.integers(1, 500), st.integers(2, 40), st.integers(1, 5))
def test_evaluation_sees_each_image_once_in_as_many_batches_on_every_rank(images, batch, world):
    parts = [evaluation_bounds(images, batch, r, world) for r in range(world)]
    assert len({len(part) for part in parts}) == 1
    ordered = [bound for step in zip(*parts, strict=True) for bound in step]
    assert [i for low, high in ordered for i in range(low, high)] == list(range(images))
    sizes = [high - low for low, high in ordered]
    assert max(sizes) <= batch
    assert max(sizes) - min(sizes) <= 1
    if images >= world:
        assert min(sizes) > 0


def test_purposes_do_not_share_numbers():
    draw = Draw(0, 0, 8, rank_places(1, 8, 0, 1, False), torch.device("cpu"))
    assert draw.stream("crop").random() == draw.stream("crop").random()
    assert draw.stream("crop").random() != draw.stream("erase").random()


def test_mine_takes_the_rank_s_places():
    draw = Draw(0, 0, 8, rank_places(2, 2, 1, 2, False), torch.device("cpu"))
    assert draw.mine(np.arange(8) * 10).tolist() == [[20, 30], [60, 70]]
    assert draw.mine(np.arange(8), torch.float32).dtype == torch.float32


@pytest.mark.parametrize("numbers", [(0, 12), (3, 1)])
def test_orders_are_those_of_earlier_versions(numbers):
    """A run that is resumed with a newer version goes on with the same data."""
    known = {(0, 12): [3, 6, 5, 2, 7, 4, 0, 1], (3, 1): [3, 2, 1, 0, 4, 6, 5, 7]}
    assert image_order(8, 1, *numbers).tolist() == known[numbers]
