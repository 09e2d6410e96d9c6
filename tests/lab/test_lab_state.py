"""What a training remembers: all of it comes back, and it goes on as if nothing had been."""

import random

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from attncond.lab import checkpoint, facts
from attncond.lab.average import Average
from attncond.lab.checkpoint import CheckpointError
from attncond.lab.folder import RunFolder
from attncond.lab.state import State


def made(seed=0, width=4, average=True, **more):
    torch.manual_seed(seed)
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())
    module = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
    module.to(accelerator.device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    mean = Average(module, 0.9) if average else None
    return State(accelerator, module, optimizer, mean, **more)


def go(state, steps):
    """Steps on random images, so that the generators matter."""
    state.module.train()
    for _ in range(steps):
        loss = state.module(
            torch.randn(8, 3).to(state.accelerator.device)
        ).square().mean() * random.uniform(0.5, 1)
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.add(loss, 1)
        state.step, state.losses = state.step + 1, state.losses + 1
        if state.average is not None:
            state.average.update(state.step)


def everything(state):
    return {
        "model": state.module.state_dict(),
        "ema": state.average.tensors,
        "optimizer": checkpoint.optimizer_state(state.optimizer, state.module),
        "loss_sum": {"": state.loss_sum},
    }


def test_it_goes_on_bit_for_bit(tmp_path):
    files = RunFolder(tmp_path)
    state = made()
    go(state, 3)
    state.clock.laps[:] = [12.0, 14.0]
    state.save(files)
    go(state, 4)
    other = made(seed=1)
    random.seed(5)
    other.load(files)
    assert (other.step, other.losses) == (3, 3)
    assert other.clock.laps == [12.0, 14.0]
    assert other.clock.before > 0
    go(other, 4)
    wanted, found = everything(state), everything(other)
    for part, tensors in wanted.items():
        assert tensors.keys() == found[part].keys()
        for name, value in tensors.items():
            assert torch.equal(found[part][name], value), (part, name)
    assert other.step == 7


def test_the_mean_loss_is_over_the_steps_since_the_last_evaluation():
    state = made()
    assert state.mean_loss() == 0
    for loss in (1.0, 2.0, 6.0):
        for part in (loss - 0.5, loss + 0.5):  # a batch in two parts
            state.add(torch.tensor(part, requires_grad=True), 2)
        state.losses += 1
    assert state.mean_loss() == pytest.approx(3.0)
    assert not state.loss_sum.requires_grad
    state.forget_losses()
    state.add(torch.tensor(5.0), 1)
    state.losses += 1
    assert state.mean_loss() == 5.0


def test_memory_is_the_most_of_all_processes_without_what_others_left(monkeypatch):
    monkeypatch.setattr(facts, "peak_memory", lambda device: 100)
    assert made().memory == 100
    assert made(left=30).memory == 70
    assert made(left=30, peak=90).memory == 90
    monkeypatch.setattr(facts, "peak_memory", lambda device: None)  # a system that does not tell
    assert made(peak=5).memory == 5


def test_the_peak_is_kept_for_the_next_process(tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "peak_memory", lambda device: 1000)
    made(left=200).save(RunFolder(tmp_path))
    monkeypatch.setattr(facts, "peak_memory", lambda device: 300)
    state = made()
    state.load(RunFolder(tmp_path))
    assert state.memory == 800


def test_step_times_are_of_one_hardware_and_say_of_which(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNCOND_LAB_JOBS", "4")
    crowded = made(peak=10**15)
    crowded.clock.laps[:] = [40.0]
    crowded.save(RunFolder(tmp_path))
    monkeypatch.delenv("ATTNCOND_LAB_JOBS")
    state = made()
    state.load(RunFolder(tmp_path))
    assert (state.hardware["side_by_side"], state.clock.laps) == (4, [40.0])
    assert state.memory == 10**15
    state.lap(8)
    assert (state.hardware["side_by_side"], state.clock.laps) == (1, [])
    assert state.memory < 10**15
    state.lap(8)
    assert len(state.clock.laps) == 1


def test_without_a_checkpoint_nothing_changes(tmp_path):
    state = made()
    before = {k: v.clone() for k, v in state.module.state_dict().items()}
    drawn = torch.get_rng_state()
    state.load(RunFolder(tmp_path))
    assert state.step == 0
    assert all(torch.equal(before[k], v) for k, v in state.module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_checkpoint_cut_short_falls_back_to_the_one_before(tmp_path):
    files, state = RunFolder(tmp_path), made()
    for _ in range(2):
        go(state, 2)
        state.save(files)
    file = tmp_path / "checkpoints/step-00000004/optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    other = made(seed=1)
    with pytest.warns(RuntimeWarning, match="step-00000004 is damaged"):
        other.load(files)
    assert other.step == 2


def test_the_checkpoint_of_another_model_is_refused(tmp_path):
    made(width=5).save(RunFolder(tmp_path))
    with pytest.raises(CheckpointError, match=r"(?s)not of this model.*size mismatch"):
        made(width=4).load(RunFolder(tmp_path))


def test_without_an_average_none_is_written_and_one_that_is_there_is_left(tmp_path):
    state = made(average=False)
    state.save(RunFolder(tmp_path / "plain"))
    assert not list((tmp_path / "plain").rglob("ema.safetensors"))
    go(averaged := made(), 2)
    averaged.save(RunFolder(tmp_path / "averaged"))
    state.load(RunFolder(tmp_path / "averaged"))
    assert state.step == 2


def test_another_number_of_processes_starts_its_random_numbers_anew(tmp_path):
    state = made()
    state.save(RunFolder(tmp_path))
    saved = checkpoint.newest(tmp_path / "checkpoints")
    plain = {**saved.state, "random": saved.state["random"] * 2}  # as two processes would
    checkpoint.save(tmp_path / "checkpoints", 9, saved.tensors, plain)
    torch.manual_seed(77)
    drawn = torch.get_rng_state()
    state.load(RunFolder(tmp_path))
    assert state.step == 9
    assert torch.equal(torch.get_rng_state(), drawn)
