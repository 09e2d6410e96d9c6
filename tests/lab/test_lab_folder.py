"""A run's folder: every file whole, and no number lost or doubled."""

import errno
import json
import math
import os
import shutil
import time
from functools import partial
from pathlib import Path

import pytest

from attncond.files import dumps, plain
from attncond.lab.folder import Result, RunError, RunFolder, run_path
from attncond.lab.recipe import load


def config(**settings):
    named = {k.replace("__", "."): str(v) for k, v in settings.items()}
    return load("digits").config("smoke", "gap", 3, named)


def test_where_a_run_is(tmp_path):
    assert run_path(tmp_path, config()) == tmp_path / "digits/smoke/gap/seed3"


def test_a_name_that_tensorboard_cannot_write_is_told_readably(tmp_path):
    assert run_path(tmp_path / "é", config())
    with pytest.raises(RunError, match=r"caf\\xe9/digits/.*: this name is not UTF-8"):
        run_path(tmp_path / os.fsdecode(b"caf\xe9"), config())
    with pytest.raises(RunError, match="is not UTF-8"), RunFolder(Path(os.fsdecode(b"caf\xe9"))):
        pytest.fail("it was taken")


def test_metrics_go_back_with_the_checkpoint(tmp_path):
    files = RunFolder(tmp_path)
    for step in (5, 10, 15):
        files.add({"step": step, "train_loss": 1 / step})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('12\n{"epoch": 1}\n{"step": 20, "tra')  # the last words of a killed process
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b"\n\xff\x00\n")  # what a power cut may leave
    kept = files.rewind(10)
    assert [row["step"] for row in kept] == [5, 10]
    files.add({"step": 15, "train_loss": 0.5})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [5, 10, 15]
    (tmp_path / "history.jsonl").write_text("{}\n")
    assert files.rewind(0) == []
    assert not (tmp_path / "history.jsonl").exists()


def test_the_configuration_stays(tmp_path):
    files = RunFolder(tmp_path)
    files.claim(config(), resume=True)
    before = (tmp_path / "config.json").read_bytes()
    files.claim(config(), resume=True)
    assert (tmp_path / "config.json").read_bytes() == before
    files.add({"step": 5, "train_loss": 1.0})
    with pytest.raises(RunError, match=r"data.augment.crop was 0 and is 2; optim.clip was null"):
        files.claim(config(data__augment__crop=2, optim__clip=1.0), resume=True)
    files.claim(config(train__checkpoint_every=7, data__workers=3), resume=True)  # no matter
    assert (tmp_path / "config.json").read_bytes() == before
    files.claim(config(optim__clip=1.0), resume=False)
    assert json.loads((tmp_path / "config.json").read_text())["optim"]["clip"] == 1.0


@pytest.mark.parametrize("trained", ["", "metrics.jsonl", "checkpoints", "result.json"])
def test_settings_that_never_trained_anything_give_way_to_others(tmp_path, trained):
    files = RunFolder(tmp_path)
    files.claim(config(optim__lr=5), resume=True)
    if trained:
        (tmp_path / trained).touch()
        with pytest.raises(RunError, match=r"optim.lr was 5.0 and is 0.004"):
            files.claim(config(), resume=True)
    else:
        files.claim(config(), resume=True)
        assert json.loads((tmp_path / "config.json").read_text())["optim"]["lr"] == 0.004


def test_a_run_from_before_a_setting_was_there_goes_on(tmp_path):
    files = RunFolder(tmp_path)
    files.claim(config(), resume=True)
    files.add({"step": 5, "train_loss": 1.0})
    old = json.loads((tmp_path / "config.json").read_bytes())
    del old["optim"]["output_lr"]
    (tmp_path / "config.json").write_text(json.dumps(old))
    files.claim(config(), resume=True)
    with pytest.raises(RunError, match=r"other settings: optim\.output_lr was null and is 0\.5\."):
        files.claim(config(optim__output_lr=0.5), resume=True)


def test_damaged_files_are_told(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RunError, match=r"config.json is damaged"):
        RunFolder(tmp_path).claim(config(), resume=True)
    (tmp_path / "result.json").write_text('{"status": ')
    with pytest.raises(RunError, match=r"result.json is damaged.*run again"):
        RunFolder(tmp_path).result()


@pytest.mark.parametrize("text", ["[]", "null", "{}", '{"status": "finished"}'])
def test_a_result_that_is_none_is_told(tmp_path, text):
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(RunError, match=r"result.json is damaged \(it .*run again"):
        RunFolder(tmp_path).result()
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(RunError, match=r"config.json is damaged \(it should hold one JSON object"):
        RunFolder(tmp_path).claim(config(), resume=True)


def test_starting_over_leaves_what_is_not_the_run_s(tmp_path):
    (tmp_path / "notes.md").write_text("mine")
    (tmp_path / "result.json").write_text("{}")
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    RunFolder(tmp_path).claim(config(), resume=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "notes.md"]


@pytest.mark.parametrize("resume", [True, False])
def test_what_a_killed_write_left_goes_with_the_next_claim(tmp_path, resume):
    RunFolder(tmp_path).claim(config(), resume=True)
    (tmp_path / ".result.json.q_3abcde.tmp").touch()
    (tmp_path / ".config.json.12345678.tmp").touch()
    (tmp_path / ".notes.md.12345678.tmp").touch()  # an editor's, maybe
    RunFolder(tmp_path).claim(config(), resume)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == [".notes.md.12345678.tmp", "config.json"]


@pytest.mark.parametrize("at", range(7))
def test_starting_over_that_is_killed_leaves_nothing_to_go_on_with_otherwise(
    tmp_path, monkeypatch, at
):
    RunFolder(tmp_path).claim(config(optim__lr=5), resume=True)
    for name in ("checkpoints", "tensorboard"):
        (tmp_path / name).mkdir()
    for name in ("metrics.jsonl", "history.jsonl", "result.json", "model.safetensors"):
        (tmp_path / name).touch()
    calls = 0

    def dying(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls > at:
            raise KeyboardInterrupt
        return real[kwargs.pop("which")](*args, **kwargs)

    real = {"rmtree": shutil.rmtree, "unlink": Path.unlink}
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", partial(dying, which="rmtree"))
        patch.setattr(Path, "unlink", lambda *a, **k: dying(*a, which="unlink", **k))
        with pytest.raises(KeyboardInterrupt):
            RunFolder(tmp_path).claim(config(), resume=False)
    assert (tmp_path / "config.json").exists()
    if at < 5:  # the result was still there
        with pytest.raises(RunError, match=r"optim.lr was 5.0 and is 0.004"):
            RunFolder(tmp_path).claim(config(), resume=True)
    else:
        RunFolder(tmp_path).claim(config(), resume=True)
        assert not (tmp_path / "checkpoints").exists()


def test_what_cannot_be_deleted_is_not_gone_on_with(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match=r"cannot be started over: .*--out"):
        RunFolder(tmp_path).claim(config(), resume=False)


@pytest.mark.parametrize("trained", ["metrics.jsonl", "checkpoints", "result.json"])
def test_a_run_whose_settings_are_lost_is_not_gone_on_with(tmp_path, trained):
    (tmp_path / trained).touch()
    with pytest.raises(RunError, match=r"without its config.json.*--restart"):
        RunFolder(tmp_path).claim(config(), resume=True)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(RunError, match="Choose another folder with --out"),
        RunFolder(tmp_path / "file" / "run"),
    ):
        pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_the_workers_of_a_killed_run_do_not_keep_its_folder(tmp_path):
    answer, question = os.pipe()
    run, same = RunFolder(tmp_path), RunFolder(tmp_path)
    run.__enter__()
    worker = os.fork()
    if not worker:
        os.close(question)
        os.read(answer, 1)  # until the test ends
        os._exit(0)
    os.close(answer)
    try:
        with pytest.raises(RunError, match="another process is training"), same:
            pass
        run._lock.close()  # as the system does for who is killed
        deadline = time.monotonic() + 30  # for the worker's start
        while True:
            try:
                with same:
                    break
            except RunError:
                assert time.monotonic() < deadline
                time.sleep(0.01)
    finally:
        os.close(question)
        os.waitpid(worker, 0)


def test_a_drive_without_locks_is_not_taken_for_one_in_use(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    with RunFolder(tmp_path), pytest.raises(RunError, match="another process is training"):
        RunFolder(tmp_path).__enter__()

    def refused(*_):  # as Lustre does unless it is mounted otherwise
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refused)
    with RunFolder(tmp_path) as files:
        files.claim(config(), resume=True)


def test_numbers_that_json_does_not_have():
    value = {"a": math.nan, "b": [math.inf, 1.5, {"c": -math.inf}], "d": "NaN"}
    assert plain(value) == {"a": None, "b": [None, 1.5, {"c": None}], "d": "NaN"}
    assert json.loads(dumps(value)) == plain(value)


def test_a_result_says_how_it_ended(tmp_path):
    files = RunFolder(tmp_path)
    assert files.result() is None
    how = {"status": "diverged", "test_read": False}
    files.finish({**how, "test_accuracy": math.nan, "validation_accuracy": None})
    found = files.result()
    assert isinstance(found, Result)
    assert found.diverged
    assert found.test_accuracy is None
