"""Checkpoints as users have them: whole, in shards, and broken in every way."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch

pytest.importorskip("safetensors")

from safetensors.torch import save_file

from attncond.checkpoints import CheckpointError, in_folder, is_correction, read, strip

TENSORS = {"a.weight": torch.arange(6.0).view(2, 3), "a.bias": torch.ones(2)}


class Evil:
    """Leaves a trace where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return open, (str(self.trace), "w")


def whole(path: Path) -> Path:
    save_file(TENSORS, path)
    return path


def test_a_file_a_folder_and_an_index(tmp_path: Path) -> None:
    file = whole(tmp_path / "model.safetensors")
    for given in (file, tmp_path):
        tensors, found = read(given)
        assert found == file
        assert torch.equal(tensors["a.weight"], TENSORS["a.weight"])
    shards = tmp_path / "shards"
    shards.mkdir()
    for i, (key, value) in enumerate(TENSORS.items()):
        save_file({key: value}, shards / f"{i}.safetensors")
    index = shards / "model.safetensors.index.json"
    places = {key: f"{i}.safetensors" for i, key in enumerate(TENSORS)}
    index.write_text(json.dumps({"weight_map": places}))
    for given in (index, shards):
        tensors, found = read(given)
        assert found == index
        assert tensors.keys() == TENSORS.keys()


def test_one_file_of_another_name_is_found_and_of_several_none_is_guessed(tmp_path: Path) -> None:
    assert in_folder(tmp_path) is None
    file = whole(tmp_path / "mine.safetensors")
    assert in_folder(tmp_path) == file
    whole(tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"2 safetensors files \(mine.*--checkpoint"):
        in_folder(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"hello, this is a letter to you\n" * 9, "it holds text"),
        (b'{"a": 1}', "it holds text"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "git lfs pull"),
        (b"PK\x03\x04" + b"\0" * 80, "is a pickle.*weights_only=True"),
        (b"\x08\0\0\0\0\0\0\0" + b"\xff" * 99, "damaged"),
        (b"\x02\0\0\0\0\0\0\0{}", "holds no tensors"),
    ],
    ids=("empty", "text", "json", "lfs", "pickle", "garbage", "nothing"),
)
def test_what_is_not_a_checkpoint(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=said):
        read(file)


@pytest.mark.parametrize("part", [0.01, 0.5, 0.99])
def test_a_truncated_file_is_named_as_such(tmp_path: Path, part: float) -> None:
    file = whole(tmp_path / "model.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[: max(1, int(len(content) * part))])
    with pytest.raises(CheckpointError, match=r"not a whole safetensors file.*Fetch it again"):
        read(file)


@pytest.mark.parametrize("name", ["model.bin", "model.pt", "model.pth", "model.safetensors"])
def test_a_pickle_is_refused_and_never_run(tmp_path: Path, name: str) -> None:
    trace = tmp_path / "ran"
    (tmp_path / name).write_bytes(pickle.dumps(Evil(trace), protocol=4))
    with pytest.raises(CheckpointError, match="is a pickle"):
        read(tmp_path / name)
    torch.save({"a": Evil(trace)}, tmp_path / name)
    with pytest.raises(CheckpointError, match="is a pickle"):
        read(tmp_path / name)
    assert not trace.exists()


def test_a_folder_of_pickles_tells_how_to_convert_them(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    (tmp_path / "training_args.bin").write_bytes(b"PK\x03\x04")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*save_file.*--random-weights"):
        in_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    (tmp_path / "optimizer.pt").write_bytes(b"PK\x03\x04")
    assert in_folder(tmp_path) is None  # what training leaves behind is no model


def test_what_is_not_there_or_no_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no"):
        read(tmp_path / "missing.safetensors")
    with pytest.raises(CheckpointError, match="no safetensors file in the folder"):
        read(tmp_path)
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(CheckpointError, match="is not a file"):
        read(tmp_path / "pipe.safetensors")


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = whole(tmp_path / "model.safetensors")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: Permission"):
        read(file)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("not json", "is not the index"),
        ("[]", "is not the index"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "lists gone.safetensors, which is not in"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "outside its folder"),
        ('{"weight_map": {"b": "0.safetensors"}}', "lists b, which is in none"),
    ],
)
def test_a_broken_index(tmp_path: Path, content: str, said: str) -> None:
    whole(tmp_path / "0.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=said):
        read(tmp_path)


@pytest.mark.parametrize(
    "prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "model.net.", "_orig_mod.module."]
)
def test_prefixes_of_wrappers_are_taken_off(prefix: str) -> None:
    held = {f"{prefix}{key}": value for key, value in TENSORS.items()}
    tensors, taken = strip(held, TENSORS)
    assert tensors.keys() == TENSORS.keys()
    assert sorted(taken.split(".")) == sorted(prefix.split("."))


def test_names_that_are_the_models_own_stay() -> None:
    held = {"a.b.weight": torch.ones(1), "a.c.weight": torch.ones(1)}
    assert strip(held, ["a.x"]) == (held, "")
    assert strip({"x.a": 1, "y.a": 1}, ["a"])[1] == ""  # type: ignore[dict-item]
    assert strip({"a.block._orig_mod.w": 1}, ["a.block.w"])[0] == {"a.block.w": 1}  # type: ignore[dict-item]


def test_corrections_are_told_by_their_names() -> None:
    assert is_correction("blocks.0.attn.qkv.attncond_weight_scale")
    assert not is_correction("attncond_model.weight")
