"""Checkpoints: what was saved comes back bit for bit, and no accident costs the last good one."""

import errno
import json
import os
import random
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from attncond.lab import checkpoint
from attncond.lab.checkpoint import CheckpointError


def tensors(value=0.0):
    return {"model": {"w": torch.full((64, 64), value), "n": torch.tensor(3)}, "optimizer": {}}


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_what_was_saved_comes_back(tmp_path):
    saved = {"model": {"a": torch.randn(3, 4).bfloat16(), "b": torch.arange(5)}, "ema": {}}
    state = {"seconds": 0.1 + 0.2, "nested": [1, None, {"x": "y"}]}
    path = checkpoint.save(tmp_path / "c", 7, saved, state)
    found = checkpoint.newest(tmp_path / "c")
    assert (found.step, found.state, found.path) == (7, state, path)
    assert found.tensors.keys() == saved.keys()
    for key, value in saved["model"].items():
        assert found.tensors["model"][key].dtype == value.dtype
        assert torch.equal(found.tensors["model"][key], value)


def test_two_are_kept(tmp_path):
    for step in (5, 10, 15):
        checkpoint.save(tmp_path, step, tensors(step), {})
    assert names(tmp_path) == ["step-00000010", "step-00000015"]
    assert checkpoint.newest(tmp_path).step == 15


def test_nothing_is_no_checkpoint(tmp_path):
    assert checkpoint.newest(tmp_path) is None
    assert checkpoint.newest(tmp_path / "missing") is None


def truncate(path):
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("harm", [truncate, flip, os.unlink, lambda p: p.write_bytes(b"")])
def test_a_damaged_one_falls_back_to_the_one_before(tmp_path, name, harm):
    checkpoint.save(tmp_path, 1, tensors(1.0), {"k": 1})
    newer = checkpoint.save(tmp_path, 2, tensors(2.0), {"k": 2})
    harm(newer / name)
    with pytest.warns(RuntimeWarning, match="step-00000002 is damaged"):
        found = checkpoint.newest(tmp_path)
    assert found.step == 1
    assert found.state == {"k": 1}
    # Set aside, it does not count as one of the two that are kept.
    checkpoint.save(tmp_path, 3, tensors(3.0), {})
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def test_a_number_changed_in_the_state_is_noticed(tmp_path):
    path = checkpoint.save(tmp_path, 2, tensors(), {"loss_sum": 12345.0}) / "state.json"
    path.write_text(path.read_text().replace("12345.0", "12346.0"))
    with pytest.warns(RuntimeWarning, match="not what was written"):
        assert checkpoint.newest(tmp_path) is None


def test_another_format_is_not_read(tmp_path):
    path = checkpoint.save(tmp_path, 2, tensors(), {}) / "state.json"
    body = json.loads(path.read_text())
    del body["checksum"]
    body["format"] = "attncond.lab.checkpoint/99"
    sum_ = checkpoint._sum(checkpoint._dumps(body).encode())
    path.write_text(json.dumps({**body, "checksum": sum_}))
    with pytest.warns(RuntimeWarning, match="checkpoint/99"):
        assert checkpoint.newest(tmp_path) is None


def test_the_same_step_is_written_again(tmp_path):
    checkpoint.save(tmp_path, 2, tensors(1.0), {"try": 1})
    checkpoint.save(tmp_path, 2, tensors(2.0), {"try": 2})
    assert names(tmp_path) == ["step-00000002"]
    assert checkpoint.newest(tmp_path).state == {"try": 2}


@pytest.mark.parametrize("place", ["save_file", "_sync", "_dumps"])
def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch, place):
    checkpoint.save(tmp_path, 1, tensors(1.0), {})

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, place, full)
    with pytest.raises(CheckpointError, match=r"No space left.*step-00000001 is whole: make room"):
        checkpoint.save(tmp_path, 2, tensors(2.0), {})
    monkeypatch.undo()
    assert names(tmp_path) == ["step-00000001"]
    assert checkpoint.newest(tmp_path).step == 1


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="There is none yet"):
        checkpoint.save(tmp_path / "file" / "c", 1, tensors(), {})


def test_what_a_killed_writer_left_is_cleared(tmp_path):
    checkpoint.save(tmp_path, 1, tensors(), {})
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".writing-step-00000002")
    assert checkpoint.newest(tmp_path).step == 1
    checkpoint.save(tmp_path, 3, tensors(), {})
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def test_one_file_in_one_piece(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    checkpoint.write_tensors(path, {"a": torch.ones(2)})
    assert oct(path.stat().st_mode)[-3:] == "644"
    monkeypatch.setattr(checkpoint, "_sync", lambda _: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(CheckpointError, match=r"model.safetensors could not be written: full"):
        checkpoint.write_tensors(path, {"a": torch.zeros(2)})
    assert load_file(path)["a"].tolist() == [1, 1]
    assert names(tmp_path) == ["model.safetensors"]


def trained(seed, steps=3):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    groups = [{"params": model[0].parameters(), "lr": 1e-2}, {"params": model[1:].parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    run(model, optimizer, steps)
    return model, optimizer


def run(model, optimizer, steps):
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4, generator=generator)).square().sum().backward()
        optimizer.step()


def test_a_model_and_its_optimizer_go_on_as_if_nothing_had_been():
    model, optimizer = trained(0)
    weights = checkpoint.whole(model.state_dict())
    moments = checkpoint.optimizer_state(optimizer, model)
    assert {k.partition("/")[0] for k in moments} == {"step", "exp_avg", "exp_avg_sq"}
    assert "exp_avg/0.weight" in moments
    run(model, optimizer, 2)
    other, its = trained(1, steps=0)
    checkpoint.load_model(other, weights)
    checkpoint.load_optimizer(its, other, moments)
    run(other, its, 2)
    for key, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[key], value)


def test_copies_do_not_follow_the_model():
    model = nn.Linear(2, 2)
    kept = checkpoint.whole(model.state_dict())
    with torch.no_grad():
        model.weight.fill_(7)
    assert not (kept["weight"] == 7).any()


def test_a_checkpoint_of_another_model_is_refused():
    with pytest.raises(CheckpointError, match="not of this model"):
        checkpoint.load_model(nn.Linear(2, 2), {"weight": torch.zeros(3, 3)})
    model, optimizer = trained(0)
    with pytest.raises(CheckpointError, match=r"trains 9.weight"):
        checkpoint.load_optimizer(optimizer, model, {"exp_avg/9.weight": torch.zeros(1)})


def test_random_numbers_go_on():
    def draw():
        return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random(), random.gauss()

    random.gauss()
    np.random.randn()  # both remember the second of a pair
    state = json.loads(json.dumps(checkpoint.random_state()))
    first = draw()
    draw()
    checkpoint.load_random(state)
    assert draw() == first


def test_nothing_reads_a_pickle():
    from pathlib import Path

    import attncond.lab

    for path in Path(attncond.lab.__file__).parent.rglob("*.py"):
        text = path.read_text()
        for word in ("torch.load", "import pickle", "allow_pickle=True", "load_state("):
            assert word not in text, (path, word)
