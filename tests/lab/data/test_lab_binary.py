"""CIFAR's own binary files; its pickles are refused."""

import builtins
import pickle

import numpy as np
import pytest
import torch
from lab_data_cases import Data, noise_split

from attncond.lab.data import DataError, load
from attncond.lab.data.binary import BINARY


def write(folder, name="cifar10_binary", count=20):
    what = BINARY[name]
    split = noise_split(count * (len(what.train) + 1), classes=what.classes)
    pixels = split.images.flatten(1).numpy()
    labels = split.labels.numpy().astype(np.uint8)[:, None]
    if what.label_bytes == 2:
        labels = np.concatenate([labels // 5, labels], 1)
    rows = np.concatenate([labels, pixels], 1)
    for i, file in enumerate((*what.train, what.test)):
        rows[i * count : (i + 1) * count].tofile(folder / file)
    return split


@pytest.mark.parametrize("inner", [False, True])
def test_cifar10(tmp_path, inner):
    folder = tmp_path / "cifar-10-batches-bin" if inner else tmp_path
    folder.mkdir(exist_ok=True)
    split = write(folder)
    source = load(Data("cifar10_binary", 32, validation=0.0), tmp_path)
    assert source.validation is None
    assert torch.equal(source.train.images, split.images[:100])
    assert torch.equal(source.train.labels, split.labels[:100])
    assert torch.equal(source.test.images, split.images[100:])
    assert (
        source.note == "CIFAR-10, original images; 100 training and 20 test images instead of all"
    )


def test_cifar100_takes_the_fine_labels(tmp_path):
    split = write(tmp_path, "cifar100_binary", 100)
    source = load(Data("cifar100_binary", 32, validation=0.0), tmp_path)
    assert source.classes == 100
    assert torch.equal(source.train.labels, split.labels[:100])


@pytest.mark.parametrize("inner", ["", "cifar-10-batches-py"])
def test_pickles_are_never_loaded(tmp_path, inner, monkeypatch):
    class Trap:
        def __reduce__(self):
            return builtins.exec, ("raise SystemExit('a pickle was loaded')",)

    folder = tmp_path / inner
    folder.mkdir(exist_ok=True)
    for name in ("data_batch_1", "test_batch"):
        (folder / name).write_bytes(pickle.dumps(Trap()))
    monkeypatch.setattr(pickle, "load", lambda *a, **k: pytest.fail("a pickle was loaded"))
    monkeypatch.setattr(pickle, "loads", lambda *a, **k: pytest.fail("a pickle was loaded"))
    with pytest.raises(DataError, match=r"Python version.*none is ever loaded.*binary\.tar\.gz"):
        load(Data("cifar10_binary", 32), tmp_path)


def test_a_folder_of_images_is_no_pickle(tmp_path):
    (tmp_path / "train" / "n01440764").mkdir(parents=True)  # ImageNet's layout
    with pytest.raises(DataError, match=r"has no data_batch_1\.bin"):
        load(Data("cifar10_binary", 32), tmp_path)


def test_missing(tmp_path):
    with pytest.raises(DataError, match=r"data_batch_1\.bin.*cifar-10-binary\.tar\.gz"):
        load(Data("cifar10_binary", 32), tmp_path)


def test_one_batch_missing(tmp_path):
    write(tmp_path)
    (tmp_path / "data_batch_4.bin").unlink()
    with pytest.raises(DataError, match=r"has no data_batch_4\.bin"):
        load(Data("cifar10_binary", 32), tmp_path)


def test_cut_off(tmp_path):
    write(tmp_path)
    file = tmp_path / "data_batch_2.bin"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(DataError, match=r"data_batch_2\.bin has 61,455 bytes, which are not"):
        load(Data("cifar10_binary", 32), tmp_path)


@pytest.mark.parametrize("name", ["data_batch_2.bin", "test_batch.bin"])
def test_empty(tmp_path, name):
    write(tmp_path)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataError, match=rf"{name} has 0 bytes, .*Get it again from"):
        load(Data("cifar10_binary", 32), tmp_path)


def test_foreign(tmp_path):
    write(tmp_path)
    (tmp_path / "test_batch.bin").write_bytes(b"\xff" * 3073)
    said = rf"{tmp_path}: test_batch\.bin, row 0: label 255 .*cifar-10-binary\.tar\.gz"
    with pytest.raises(DataError, match=said):
        load(Data("cifar10_binary", 32), tmp_path)
