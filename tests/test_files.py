"""Files in one piece: what was there stays until its successor is whole; and what JSON gave."""

import json
import os
import stat
import subprocess
import sys

import pytest

import attncond as ac
from attncond.files import clear_drafts, dumps, unpacking, write_text


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_text_is_written_as_it_is(tmp_path):
    path = write_text(tmp_path / "ü.html", "κ\r\nσ\n")
    assert path.read_bytes() == "κ\r\nσ\n".encode()
    assert write_text(os.fspath(path), "new") == path
    assert path.read_text() == "new"
    assert names(tmp_path) == ["ü.html"]


def test_a_name_that_is_no_text_does_not_cost_the_file(tmp_path):
    name = os.fsdecode(b"caf\xe9")  # as Latin-1 wrote it
    path = write_text(tmp_path / "result.json", dumps({"note": name}))
    assert json.loads(path.read_text(encoding="utf-8")) == {"note": name}


@pytest.mark.skipif(os.name != "posix", reason="needs permissions")
@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_others_may_read_it_as_any_file_of_the_user(tmp_path, mask):
    before = os.umask(mask)
    try:
        path = write_text(tmp_path / "page.html", "x")
        assert os.umask(mask) == mask  # as it was
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


def test_a_path_that_cannot_be_written_is_told(tmp_path):
    with pytest.raises(IsADirectoryError, match="is a folder: name a file in it"):
        write_text(tmp_path, "x")
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*gone; make it first"):
        write_text(tmp_path / "gone" / "x.json", "x")
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        write_text(tmp_path / "file" / "x.json", "x")


def test_a_folder_that_takes_no_files_is_told(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    with pytest.raises(PermissionError, match=r"takes no new files; choose another"):
        write_text(tmp_path / "x.json", "x")


@pytest.mark.parametrize("place", ["os.fsync", "os.replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left"), KeyboardInterrupt()], ids=str)
def test_what_was_there_stays_and_nothing_is_left_behind(tmp_path, monkeypatch, place, error):
    path = write_text(tmp_path / "page.html", "old")

    def fail(*_):
        raise error

    monkeypatch.setattr(place, fail)
    with pytest.raises(type(error)):
        write_text(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["page.html"]


def test_what_a_killed_write_left_goes_and_nothing_else(tmp_path):
    path = tmp_path / "run[1].json"
    script = (
        "import os, signal, sys; from attncond.files import write_text\n"
        "os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_text(sys.argv[1], 'new')"
    )
    write_text(path, "old")
    assert subprocess.run([sys.executable, "-c", script, path], check=False).returncode == -9
    assert len(names(tmp_path)) == 2
    others = [".run1.json.abcdefgh.tmp", ".run[1].json.tmp", ".run[1].json.mine.tmp", "x.tmp"]
    for name in others:
        (tmp_path / name).touch()
    clear_drafts(path)
    assert names(tmp_path) == sorted([*others, path.name])
    assert path.read_text() == "old"
    clear_drafts(tmp_path / "gone" / "x.json")


@pytest.mark.parametrize("data", [[], {}, {"schema": "thing/2", "n": 1}])
def test_what_is_of_another_schema_is_not_taken_apart(data):
    with (
        pytest.raises(ac.DiagnosisError, match=r"no thing .* wanted is 'thing/1'"),
        unpacking(data, "thing/1", "thing"),
    ):
        pytest.fail("it was")


@pytest.mark.parametrize("n", [None, "x", float("inf")])
def test_what_cannot_be_taken_apart_is_damaged(n):
    with (
        pytest.raises(ac.DiagnosisError, match="the thing is damaged"),
        unpacking({"schema": "thing/1"}, "thing/1", "thing"),
    ):
        int(n)
