"""Streamed images: the same with any number of workers; what breaks is named."""

import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from lab_data_cases import Augment, Data, write_folders

from attncond.lab.data import Batches, DataError, load
from attncond.lab.data.streaming import _Seeded

AUGMENT = Augment(
    flip=True, randaugment="rand-m9-mstd0.5-inc1", mixup=0.8, cutmix=1.0, erase=0.5, repeats=2
)
DATA = Data("image_folder", 16, validation=0.0, augment=AUGMENT)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_folders(tmp_path_factory.mktemp("images"), 8)


def batches(root, data=DATA, train=True, **options):
    source = load(data, root)
    options = {"batch_size": 8, "seed": 0, "device": "cpu", **options}
    part = source.train if train else source.test
    return Batches(part, data, train=train, classes=source.classes, **options)


def same(first, second):
    first, second = list(first), list(second)
    assert len(first) == len(second)
    return all(torch.equal(a[i], b[i]) for a, b in zip(first, second, strict=True) for i in (0, 1))


@pytest.mark.parametrize("train", [True, False])
def test_workers_make_no_difference(root, train):
    here = batches(root, train=train)
    workers = batches(root, replace(DATA, workers=2), train=train)
    for number in (0, 1):  # the second with workers that are there already
        assert same(here.epoch(number), workers.epoch(number))


def test_workers_end_with_their_batches(root):
    made = batches(root, replace(DATA, workers=2))
    list(made.epoch(0))
    workers = made._stream._loader._iterator._workers
    assert all(worker.is_alive() for worker in workers)
    gc.disable()  # nothing may be left to it: it would take five seconds for each of them
    try:
        start = time.monotonic()
        del made
        assert not any(worker.is_alive() for worker in workers)
        assert time.monotonic() - start < 4
    finally:
        gc.enable()


def test_an_epoch_left_early_can_be_begun_again(root):
    made = batches(root, replace(DATA, workers=2))
    first = list(made.epoch(0))
    epoch = made.epoch(0)
    next(epoch)
    epoch.close()
    assert same(first, made.epoch(0))


def test_epochs_and_seeds_differ_and_a_resumed_epoch_does_not(root):
    made = batches(root)
    first = list(made.epoch(0))
    assert len(first) == made.steps_per_epoch == 3
    assert same(first[1:], made.epoch(0, 1))
    assert not same(first, made.epoch(1))
    assert not same(first, batches(root, seed=1).epoch(0))


def test_ranks_together_see_what_one_sees(root):
    data = replace(DATA, augment=replace(AUGMENT, mixup=0.0, cutmix=0.0))
    alone = list(batches(root, data).epoch(0))
    ranks = [list(batches(root, data, batch_size=4, rank=r, world=2).epoch(0)) for r in (0, 1)]
    for step, whole in enumerate(alone):
        for i in (0, 1):
            assert torch.equal(torch.cat([rank[step][i] for rank in ranks]), whole[i])


def test_evaluation_is_as_timm_s(root):
    from PIL import Image
    from timm.data import create_transform

    made = batches(root, train=False)
    images, labels = (torch.cat(part) for part in zip(*made.epoch(0), strict=True))
    source = load(DATA, root)
    transform = create_transform(
        16, interpolation="bicubic", mean=source.test.mean, std=source.test.std
    )
    expected = [transform(Image.open(source.test.path(i))) for i in range(len(source.test))]
    torch.testing.assert_close(images, torch.stack(expected), rtol=1e-4, atol=1e-4)
    assert torch.equal(labels, source.test.labels)


def test_the_global_generators_are_left_alone(root):
    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = states()
    list(batches(root).epoch(0))
    assert states() == before


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(()).item()])
def test_every_generator_is_a_function_of_seed_epoch_and_place(draw):
    def drawn(*words):
        with _Seeded(*words):
            return draw()

    found = [drawn(0, 0, 0), drawn(1, 0, 0), drawn(0, 1, 0), drawn(0, 0, 1)]
    assert len(set(found)) == 4
    assert found[0] == drawn(0, 0, 0)


def test_no_bit_left_is_black(root):
    """Pillow 13 refuses what timm's PosterizeIncreasing asks for at level 10."""
    from PIL import Image

    augment = Augment(randaugment="rand-m10-n8-p1-inc1")
    made = batches(root, replace(DATA, augment=augment))
    assert all(images.isfinite().all() for images, _ in made.epoch(0))
    operations = made._stream._dataset.transform.transforms[1].ops
    posterize = next(each for each in operations if each.name == "PosterizeIncreasing")
    assert posterize.aug_fn(Image.new("RGB", (4, 4), "white"), 0).getextrema() == ((0, 0),) * 3
    assert posterize.aug_fn(Image.new("RGB", (4, 4), "white"), 1).getextrema() == ((128, 128),) * 3


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("content", [b"", b"not an image", None])
def test_a_broken_image_is_named(tmp_path, workers, content):
    write_folders(tmp_path, 4)
    broken = tmp_path / "train" / "n02" / "n02_1.JPEG"
    broken.write_bytes(broken.read_bytes()[:150] if content is None else content)
    made = batches(tmp_path, replace(DATA, augment=Augment(), workers=workers), batch_size=4)
    with pytest.raises(DataError) as caught:
        list(made.epoch(0))
    assert str(caught.value).startswith(f"{broken} cannot be read as an image")
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize("train", [True, False])
def test_sixteen_bits_of_grey_are_grey_and_floats_are_named(tmp_path, train):
    from PIL import Image

    write_folders(tmp_path, 4)
    odd = tmp_path / ("train" if train else "val") / "n02" / "n02_1.png"
    data = replace(DATA, augment=Augment())
    Image.fromarray(np.full((20, 20), 25_700, np.uint16)).save(odd)
    source = load(data, tmp_path)
    names = source.train if train else source.test
    place = next(i for i in range(len(names)) if names.path(i) == odd)
    images, _ = next(iter(batches(tmp_path, data, train)._stream([[(0, 0, place)]])))
    assert (images == 100).all()
    odd.unlink()
    odd = odd.with_suffix(".tif")
    Image.fromarray(np.full((20, 20), 0.5, np.float32)).save(odd)
    with pytest.raises(DataError, match=r"n02_1\.tif cannot be read as an image: nobody knows"):
        list(batches(tmp_path, data, train, batch_size=4).epoch(0))


def test_what_makes_no_sense_is_refused(root):
    with pytest.raises(DataError, match=r"data\.augment\.crop"):
        batches(root, replace(DATA, augment=Augment(crop=4)))
    with pytest.raises(DataError, match="'rand-q9' is no RandAugment"):
        batches(root, replace(DATA, augment=Augment(randaugment="rand-q9")))


def test_ctrl_c_ends_quietly_and_leaves_no_workers(root, tmp_path):
    script = textwrap.dedent(f"""
        import sys, time
        sys.path[:0] = {[os.path.dirname(__file__)]}
        from pathlib import Path
        from dataclasses import replace
        from test_lab_streaming import DATA, batches
        made = batches(Path({str(root)!r}), replace(DATA, workers=2))
        try:
            for number in range(10**6):
                for batch in made.epoch(number):
                    print([w.pid for w in made._stream._loader._iterator._workers], flush=True)
                    time.sleep(0.05)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    """)
    log = tmp_path / "log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-c", script], stdout=stream, stderr=stream, start_new_session=True
        )
    deadline = time.monotonic() + 120
    while "[" not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    process.wait(30)
    lines = log.read_text().splitlines()
    assert lines[-1] == "interrupted", lines
    assert not any("Traceback" in line for line in lines)
    for pid in map(int, lines[0].strip("[]").split(",")):
        assert not os.path.exists(f"/proc/{pid}")
