"""Where data is looked for, and what is said when it is not there or cannot be read."""

import errno
import os
import sys
from pathlib import Path

import pytest

from attncond.lab.data import DataError
from attncond.lab.data.places import data_folder, readable, reading, required

NAMES = ("train.parquet", "test.parquet")


def test_the_folder(monkeypatch):
    monkeypatch.delenv("ATTNCOND_DATA", raising=False)
    assert data_folder(None) == Path("data")
    monkeypatch.setenv("ATTNCOND_DATA", os.path.join("~", "x"))
    assert data_folder(None) == Path.home() / "x"
    assert data_folder(Path("y")) == Path("y")


def look(folder):
    return readable(folder, NAMES, "CIFAR-10", "It is at example.org.")


def test_files_that_are_all_there(tmp_path):
    for name in NAMES:
        (tmp_path / name).touch()
    assert look(tmp_path) == [tmp_path / name for name in NAMES]


def test_what_is_missing_is_told_with_where_to_get_it(tmp_path):
    (tmp_path / "train.parquet").touch()
    (tmp_path / "test.parquet").mkdir()  # a folder is no file
    with pytest.raises(DataError) as told:
        look(tmp_path)
    assert str(told.value) == (
        f"CIFAR-10: looked for train.parquet, test.parquet in {tmp_path}, but {tmp_path} has no "
        "test.parquet. Name the folder with --data or ATTNCOND_DATA. It is at example.org. Nothing "
        "is downloaded for you."
    )


def test_a_folder_that_is_not_there_is_told_in_full(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = f"in {tmp_path / 'data'}, but there is no folder data"
    with pytest.raises(DataError, match=said):
        look(Path("data"))


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EACCES, "may not be read by this user: change its permissions"),
        (errno.EPERM, "may not be read by this user"),
        (errno.EIO, "disk or the network drive reports a failure"),
        (errno.EISDIR, "it is a folder, not a file"),
        (errno.ENOTDIR, "a part of the path is a file"),
        (errno.ESTALE, "check the path and the drive"),
    ],
)
def test_errors_of_the_file_system_name_the_path(number, said):
    with pytest.raises(DataError, match=f"^some/file .*{said}") as told, reading(Path("some/file")):
        raise OSError(number, os.strerror(number))
    assert isinstance(told.value.__cause__, OSError)


def test_an_error_without_a_number_is_told_in_its_own_words():
    with pytest.raises(DataError, match=r"x cannot be read \(truncated\)"), reading(Path("x")):
        raise OSError("truncated")


def test_a_real_mistake_in_the_path(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="it is a folder, not a file"), reading(tmp_path):
        tmp_path.read_bytes()
    inner = tmp_path / "file" / "inner"
    with pytest.raises(DataError, match="a part of the path is a file"), reading(inner):
        inner.read_bytes()


def test_other_errors_pass():
    with pytest.raises(ZeroDivisionError), reading(Path("x")):
        1 / 0


def test_a_library_that_is_missing(monkeypatch):
    assert required("json", "reading") is sys.modules["json"]
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match=r"CIFAR-10 needs pyarrow, .* 'attncond\[lab\]'"):
        required("pyarrow.parquet", "CIFAR-10")
