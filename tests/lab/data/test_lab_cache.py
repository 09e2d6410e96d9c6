"""The cache of decoded images: never half a file, never an old one."""

import errno
import os

import pytest
import torch
from lab_data_cases import noise_split

from attncond.lab.data import DataError
from attncond.lab.data.cache import _KEPT, kept


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNCOND_CACHE", str(tmp_path / "cache"))
    (tmp_path / "source").write_text("one")
    return tmp_path


class Reader:
    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return noise_split(20)


def get(folder, read):
    """As another process would."""
    _KEPT.clear()
    return kept("set", [folder / "source"], read)


def test_decoded_once_for_all_processes(folder):
    read = Reader()
    first, second = get(folder, read), get(folder, read)
    assert read.calls == 1
    assert torch.equal(first.images, second.images)
    assert torch.equal(first.labels, second.labels)
    assert (first.mean, first.std) == (second.mean, second.std)
    assert [file.suffix for file in (folder / "cache").iterdir()] == [".safetensors"]


def test_nothing_is_written_unless_asked_for(folder, monkeypatch):
    monkeypatch.delenv("ATTNCOND_CACHE")
    read = Reader()
    get(folder, read)
    get(folder, read)
    assert read.calls == 2
    assert not (folder / "cache").exists()


def test_another_file_is_decoded_again(folder):
    read = Reader()
    get(folder, read)
    (folder / "source").write_text("another")
    get(folder, read)
    assert read.calls == 2
    os.utime(folder / "source", ns=(1, 1))  # as long as before, but not the same
    get(folder, read)
    assert read.calls == 3


@pytest.mark.parametrize("keep", [0, 5, 300, 20_000])
def test_damaged_files_are_made_again(folder, keep):
    read = Reader()
    get(folder, read)
    file = next((folder / "cache").iterdir())
    file.write_bytes(file.read_bytes()[:keep])
    assert torch.equal(get(folder, read).images, noise_split(20).images)
    assert read.calls == 2
    get(folder, read)
    assert read.calls == 2


@pytest.mark.parametrize(
    ("code", "words"), [(errno.ENOSPC, "the disk is full"), (errno.EACCES, "Permission denied")]
)
def test_a_cache_that_cannot_be_written_says_so_and_leaves_nothing(
    folder, monkeypatch, code, words
):
    def failing(descriptor):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(DataError, match=f"{words}.*MB.*ATTNCOND_CACHE"):
        get(folder, Reader())
    assert list((folder / "cache").iterdir()) == []


def test_a_file_in_the_way(folder):
    (folder / "cache").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        get(folder, Reader())
