"""The Monitor as a callback of transformers' Trainer."""

import math

import pytest
import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import attncond as ac
from attncond.integrations.transformers import MonitorCallback


class Marks(Dataset):
    def __init__(self, size=64):
        self.tokens = torch.randint(3, 20, (size, 6), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return {"input_ids": self.tokens[i], "labels": self.tokens[i, 0] % 2}


def trainer(folder, **options):
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16,
    )  # fmt: skip
    settings = {
        "max_steps": 5, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
        "logging_steps": 1, "report_to": [], "disable_tqdm": True, "use_cpu": True,
        "save_strategy": "no",
    } | options  # fmt: skip
    arguments = TrainingArguments(str(folder), **settings)
    return Trainer(BertForSequenceClassification(config), arguments, train_dataset=Marks())


def curve(history, column="q_kappa"):
    return [(r.step, r.rows[0].values[column]) for r in history]


def test_steps_are_the_optimizers_and_training_is_the_same(tmp_path):
    stock = trainer(tmp_path / "stock")
    stock.train()
    watched = trainer(tmp_path / "watched")
    callback = MonitorCallback(every=2, patience=math.inf)
    watched.add_callback(callback)
    start = watched.model.bert.encoder.layer[0].attention.self.query.weight.detach().clone()
    watched.train()
    history = callback.monitor.history
    assert [r.step for r in history] == [0, 2, 4, 5]  # the last one is always measured
    sigma = torch.linalg.svdvals(start.double())
    assert history[0].rows[0].values["q_kappa"] == pytest.approx((sigma[0] / sigma[-1]).item())
    losses = {e["step"]: e["loss"] for e in watched.state.log_history if "loss" in e}
    assert [r.loss for r in history] == [None, losses[1], losses[3], losses[4]]
    expected = stock.model.state_dict()
    assert all(torch.equal(v, expected[k]) for k, v in watched.model.state_dict().items())


def test_curves_go_to_what_report_to_names(tmp_path, monkeypatch, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "runs"))
    watched = trainer(tmp_path, report_to=["tensorboard"])
    seen = []
    watched.add_callback(
        MonitorCallback(
            watched, every=2, patience=math.inf, log=lambda v, s: seen.append(s), layers=[0]
        )
    )
    watched.train()
    (folder,) = {p.parent for p in (tmp_path / "runs").rglob("*tfevents*")}
    events = EventAccumulator(str(folder)).Reload()
    (name,) = [n for n in events.Tags()["scalars"] if "attncond.q_kappa" in n]
    assert [e.step for e in events.Scalars(name)] == [0, 2, 4, 5] == seen
    assert "attncond.q_kappa" not in capsys.readouterr().out  # what prints is left alone
    assert watched.state.global_step == 5
    assert not [e for e in watched.state.log_history if any("attncond" in k for k in e)]


def test_a_resumed_run_goes_on_with_its_file(tmp_path):
    path = tmp_path / "curves.jsonl"
    whole = trainer(tmp_path / "whole", max_steps=6)
    callback = MonitorCallback(every=1, patience=math.inf)
    whole.add_callback(callback)
    whole.train()
    options = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}
    first = trainer(tmp_path / "run", **options)

    class Stop(MonitorCallback):
        def on_step_end(self, args, state, control, **kwargs):
            super().on_step_end(args, state, control, **kwargs)
            control.should_training_stop = state.global_step == 4

    first.add_callback(Stop(every=1, log=path, patience=math.inf))
    first.train()
    assert [r.step for r in ac.Monitor.read(path)] == [0, 1, 2, 3, 4]
    second = trainer(tmp_path / "run", **options)
    second.add_callback(MonitorCallback(every=1, log=path, patience=math.inf))
    second.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert curve(ac.Monitor.read(path)) == curve(callback.monitor.history)
