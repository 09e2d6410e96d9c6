"""Batches: functions of seed and epoch alone, whatever the start and however many ranks."""

import pytest
import torch
from lab_data_cases import EVERYTHING, Augment, Data, noise_split

from attncond.lab.data import Batches, DataError, Split

AUGMENTS = {
    "nothing": Augment(),
    "crop": Augment(crop=4, flip=True),
    "jitter": Augment(jitter=0.4, erase=0.25),
    "everything": EVERYTHING,
}


def batches(augment=None, split=None, train=True, **options):
    data = Data(image_size=32, augment=augment or Augment())
    options = {"batch_size": 16, "seed": 0, "device": "cpu", "classes": 10, **options}
    split = noise_split(100) if split is None else split
    return Batches(split, data, train=train, **options)


def same(first, second):
    first, second = list(first), list(second)
    assert len(first) == len(second)
    return all(
        torch.equal(a, b)
        for one, two in zip(first, second, strict=True)
        for a, b in zip(one, two, strict=True)
    )


@pytest.mark.parametrize("augment", AUGMENTS.values(), ids=AUGMENTS)
def test_same_seed_same_batches(augment):
    torch.manual_seed(1)
    first = list(batches(augment).epoch(2))
    torch.manual_seed(2)
    again = batches(augment)
    list(again.epoch(0))
    assert same(first, again.epoch(2))
    assert len(first) == 6
    assert not same(first, batches(augment).epoch(3))
    assert not same(first, batches(augment, seed=1).epoch(2))


@pytest.mark.parametrize("augment", AUGMENTS.values(), ids=AUGMENTS)
@pytest.mark.parametrize("start", [1, 4, 6])
def test_resumed_in_the_middle(augment, start):
    made = batches(augment, smoothing=0.1)
    assert same(list(made.epoch(1))[start:], made.epoch(1, start))


@pytest.mark.parametrize("augment", AUGMENTS.values(), ids=AUGMENTS)
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_together_see_what_one_sees(augment, world):
    alone = list(batches(augment, smoothing=0.1).epoch(1))
    ranks = [
        batches(augment, batch_size=16 // world, rank=r, world=world, smoothing=0.1)
        for r in range(world)
    ]
    assert {rank.steps_per_epoch for rank in ranks} == {6}
    parts = [list(rank.epoch(1)) for rank in ranks]
    for step, whole in enumerate(alone):
        for i in (0, 1):
            pieces = [part[step][i] for part in parts]
            if ranks[0].mixes:  # each rank holds its slice of the first half, and the partners
                halves = [piece.tensor_split(2) for piece in pieces]
                pieces = [h[0] for h in halves] + [h[1] for h in reversed(halves)]
            assert torch.equal(torch.cat(pieces), whole[i])


@pytest.mark.parametrize("world", [1, 2, 3])
def test_evaluation_keeps_everything_as_it_is(world):
    split = noise_split(100)
    ranks = [
        list(batches(EVERYTHING, split, train=False, rank=r, world=world).epoch(0))
        for r in range(world)
    ]
    steps = [batch for step in zip(*ranks, strict=True) for batch in step]
    images, labels = (torch.cat(parts) for parts in zip(*steps, strict=True))
    assert torch.equal(labels, split.labels)
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (split.mean, split.std))
    torch.testing.assert_close(images, (split.images / 255 - mean) / std, rtol=1e-5, atol=1e-5)


def test_training_shows_each_image_once_and_drops_the_rest():
    labels = torch.arange(100)
    split = noise_split(100)
    named = Split(split.images, labels, split.mean, split.std)
    made = batches(Augment(crop=4, flip=True), named, classes=100)
    seen = torch.cat([targets for _, targets in made.epoch(0)])
    assert len(seen) == 96
    assert len(seen.unique()) == 96
    assert made.steps_per_epoch == 6


def test_labels_stay_with_their_images():
    split = noise_split(100)
    by_image = {each.float().sum().item(): i for i, each in enumerate(split.images)}
    named = Split(split.images, torch.arange(100), (0.0,) * 3, (1 / 255,) * 3)
    for images, labels in batches(Augment(flip=True), named, classes=100).epoch(0):
        found = [by_image[round(image.sum().item())] for image in images]
        assert found == labels.tolist()


def test_repeated_images_are_varied():
    split = noise_split(100)
    named = Split(split.images, torch.arange(100), split.mean, split.std)
    augment = Augment(crop=4, flip=True, repeats=4)
    images, labels = next(iter(batches(augment, named, classes=100).epoch(0)))
    assert len(labels.unique()) == 4
    assert not torch.equal(images[0], images[1])


@pytest.mark.parametrize("mixup", [0.0, 0.8])
def test_kinds_of_targets(mixup):
    augment = Augment(mixup=mixup, mixup_prob=0.5)
    images, targets = next(iter(batches(augment, smoothing=0.1).epoch(0)))
    assert images.dtype == torch.float32
    assert images.is_contiguous()
    assert targets.shape == ((16, 10) if mixup else (16,))
    assert targets.dtype == (torch.float32 if mixup else torch.int64)
    evaluated = next(iter(batches(augment, train=False, smoothing=0.1).epoch(0)))[1]
    assert evaluated.dtype == torch.int64


def test_jitter_makes_way_for_randaugment():
    only = Augment(randaugment="rand-m9-mstd0.5-inc1")
    both = Augment(randaugment="rand-m9-mstd0.5-inc1", jitter=0.4)
    assert same(batches(only).epoch(0), batches(both).epoch(0))


def test_one_augmentation_does_not_move_another():
    plain = list(batches(Augment(crop=4, flip=True)).epoch(0))
    erased = list(batches(Augment(crop=4, flip=True, erase=0.5)).epoch(0))
    for (before, _), (after, _) in zip(plain, erased, strict=True):
        untouched = (before == after).float().mean()
        assert 0.8 < untouched < 1


def test_the_global_generators_are_left_alone():
    state = torch.random.get_rng_state()
    list(batches(EVERYTHING).epoch(0))
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 101}, "do not fill one batch of 101: .* data.validation smaller"),
        ({"batch_size": 60, "world": 2}, "do not fill one batch of 120"),
        ({"batch_size": 15, "augment": Augment(mixup=0.8)}, "is odd"),
        ({"batch_size": 0}, "at least 1"),
        ({"split": noise_split(0)}, "no image"),
    ],
)
def test_impossible_batches_are_refused(options, words):
    with pytest.raises(DataError, match=words):
        batches(**options)


@pytest.mark.parametrize("augment", AUGMENTS.values(), ids=AUGMENTS)
def test_nothing_is_asked_back_from_the_device(augment):
    """Tensors without values: whatever waits for a value, or for a shape made of values, fails."""
    steps = list(batches(augment, smoothing=0.1, device="meta").epoch(1))
    assert [images.shape for images, _ in steps] == [(16, 3, 32, 32)] * 6
    with pytest.raises(Exception, match="meta"):
        steps[0][0].max().item()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("augment", AUGMENTS.values(), ids=AUGMENTS)
def test_gpu_sees_what_the_cpu_sees_and_is_never_waited_for(augment):
    cpu = list(batches(augment, smoothing=0.1).epoch(1))
    made = batches(augment, smoothing=0.1, device="cuda").epoch(1)
    steps = [next(made)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps += list(made)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for (a, b), (c, d) in zip(cpu, steps, strict=True):
        assert (a - c.cpu()).abs().gt(1e-5).float().mean() < 1e-3
        torch.testing.assert_close(b, d.cpu())
