"""Parquet files: read as they are, refused with reasons."""

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lab_data_cases import Data, encoded, noise_split, real_data

from attncond.lab.data import DataError, load
from attncond.lab.data.cache import _KEPT
from attncond.lab.data.decoding import decoded
from attncond.lab.data.parquet import PARQUET, _columns

CIFAR = PARQUET["cifar10"]
SPLIT = noise_split(60)
JPEGS = [encoded(image) for image in SPLIT.images.permute(0, 2, 3, 1).numpy()]


def columns(**changed):
    rows = {
        "image": pa.array(JPEGS, pa.binary()),
        "label": pa.array(SPLIT.labels.tolist(), pa.int8()),
        "index_in_class": pa.array(range(60), pa.int16()),
    }
    rows.update(changed)
    return pa.table({name: row for name, row in rows.items() if row is not None})


@pytest.fixture
def folder(tmp_path):
    for name in (CIFAR.train, CIFAR.test):
        pq.write_table(columns(), tmp_path / name)
    return tmp_path


def test_read_and_split(folder):
    source = load(Data("cifar10", 32), folder)
    assert (len(source.train), len(source.validation), len(source.test)) == (50, 10, 60)
    assert source.validation.labels.tolist().count(3) == 1
    assert torch.equal(source.test.images, decoded(JPEGS, 32, "x"))
    assert torch.equal(source.test.labels, SPLIT.labels)
    assert "JPEG copy" in source.note
    assert "60 training and 60 test images instead of all" in source.note


def test_decoded_once_in_a_process_until_the_file_changes(folder, monkeypatch):
    first = load(Data("cifar10", 32), folder)
    monkeypatch.setattr("attncond.lab.data.parquet.decoded", lambda *a: pytest.fail("decoded"))
    again = load(Data("cifar10", 32), folder)
    assert again.test.images.data_ptr() == first.test.images.data_ptr()
    monkeypatch.undo()
    pq.write_table(columns(image=pa.array(JPEGS[::-1], pa.binary())), folder / CIFAR.test)
    os.utime(folder / CIFAR.test, ns=(1, 1))
    assert not torch.equal(load(Data("cifar10", 32), folder).test.images, first.test.images)
    assert len(_KEPT) <= 4


def refused(folder, *words):
    with pytest.raises(DataError) as caught:
        load(Data("cifar10", 32), folder)
    for word in words:
        assert word in str(caught.value)


def test_no_folder(tmp_path):
    refused(
        tmp_path / "none",
        "cifar10_jpeg_train.parquet",
        "there is no folder",
        "--data or ATTNCOND_DATA",
        "https://www.cs.toronto.edu/~kriz/cifar.html",
        "Nothing is downloaded",
    )


def test_no_file(folder):
    (folder / CIFAR.test).unlink()
    refused(folder, f"has no {CIFAR.test}", str(folder))


def test_a_file_instead_of_a_folder(tmp_path):
    (tmp_path / "file").touch()
    refused(tmp_path / "file", "there is no folder")
    refused(tmp_path / "file" / "below", "there is no folder")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_truncated(folder, share):
    whole = (folder / CIFAR.train).read_bytes()
    (folder / CIFAR.train).write_bytes(whole[: int(share * len(whole))])
    refused(folder, "no whole Parquet file", "bytes", "get it again")


def test_damaged_inside(folder):
    whole = bytearray((folder / CIFAR.train).read_bytes())
    whole[100:4000] = bytes(3900)
    (folder / CIFAR.train).write_bytes(whole)
    refused(folder, str(folder / CIFAR.train), CIFAR.origin)


def test_damaged_in_a_page(folder, monkeypatch):
    def unreadable(*_, **__):  # as pyarrow says it: an error of the system that the system has not
        raise OSError("Invalid BYTE_ARRAY value")

    monkeypatch.setattr(pq.ParquetFile, "read", unreadable)
    refused(folder, str(folder / CIFAR.train), "no whole Parquet file", "get it again")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"label": None}, ["has columns image: binary, index_in_class", "label: integer"]),
        ({"image": None}, ["it needs image: binary"]),
        ({"image": pa.array(["x"] * 60)}, ["image: string"]),
        ({"label": pa.array(["x"] * 60)}, ["label: string"]),
        ({"label": pa.array([0, None] * 30, pa.int8())}, ["30 rows have no label"]),
        ({"label": pa.array([*range(10), 10] + [0] * 49)}, ["row 10: label 10 is not one of 0"]),
        ({"label": pa.array([-1] + [0] * 59)}, ["row 0: label -1"]),
        ({"label": pa.array([0, 1] * 30)}, ["2 classes instead of 10", "2, 3, 4, 5, 6, ..."]),
        (
            {"image": pa.array([*JPEGS[:7], b"broken", *JPEGS[8:]], pa.binary())},
            ["row 7", "cannot be decoded", "cifar10_jpeg_train.parquet"],
        ),
        ({"image": pa.array([*JPEGS[:7], None, *JPEGS[8:]], pa.binary())}, ["row 7"]),
    ],
)
def test_wrong_content(folder, changed, words):
    pq.write_table(columns(**changed), folder / CIFAR.train)
    refused(folder, str(folder / CIFAR.train), CIFAR.origin, *words)


def test_a_column_that_is_there_twice(folder):
    twice = columns().append_column("label", pa.array([0] * 60))
    pq.write_table(twice, folder / CIFAR.train)
    refused(folder, str(folder / CIFAR.train), "label: int8, index_in_class: int16, label: int64")


def test_no_rows(folder):
    pq.write_table(columns().slice(0, 0), folder / CIFAR.train)
    refused(folder, "has no images")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission(folder):
    (folder / CIFAR.train).chmod(0)
    refused(folder, "may not be read", "permissions")


def test_no_permission_as_any_user(folder, monkeypatch):
    stat = Path.stat

    def refusing(self, **options):
        if self.name == CIFAR.train:
            raise PermissionError(13, "Permission denied", str(self))
        return stat(self, **options)

    monkeypatch.setattr(Path, "stat", refusing)
    refused(folder, "may not be read", "permissions")


def test_real_cifar10():
    source = load(Data("cifar10", 32), real_data())
    assert (len(source.train), len(source.validation), len(source.test)) == (45_000, 5_000, 10_000)
    for part, each in ((source.train, 4500), (source.validation, 500), (source.test, 1000)):
        assert torch.bincount(part.labels).tolist() == [each] * 10
    pixels = source.train.images[::50].float() / 255
    torch.testing.assert_close(pixels.mean((0, 2, 3)), torch.tensor(CIFAR.mean), atol=0.02, rtol=0)
    assert "instead of all" not in source.note


def test_real_tiny_imagenet():
    what, folder = PARQUET["tiny_imagenet32"], real_data()
    test = what.read([folder / what.test])
    assert torch.bincount(test.labels).tolist() == [50] * 200
    encoded_images, labels = _columns(folder / what.train, what)
    assert len(encoded_images) == 100_000
    assert torch.bincount(labels).tolist() == [500] * 200
    labels_of: dict[bytes, set[int]] = {}
    for image, label in zip(encoded_images, labels.tolist(), strict=True):
        labels_of.setdefault(image, set()).add(label)
    assert sum(len(both) == 2 for both in labels_of.values()) == 20  # as the note says
    assert len(labels_of) == 99_980
