"""The moving average: of weights and of conditioning's buffers, and what it changes places with."""

import contextlib

import pytest
import torch
from torch import nn

import attncond as ac
from attncond.lab.average import Average


def moved(model, value):
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(value)


def test_it_is_the_mean_that_its_decay_says():
    model = nn.Linear(2, 2)
    moved(model, 1.0)
    average = Average(model, 0.9)
    wanted = 1.0
    for step in range(1, 200):
        moved(model, float(step))
        average.update(step)
        decay = min(0.9, (1 + step) / (10 + step))
        wanted = decay * wanted + (1 - decay) * step
    assert average.tensors["weight"].flatten().tolist() == pytest.approx([wanted] * 4, rel=1e-5)
    assert (model.weight == 199).all()


def test_buffers_of_conditioning_count_too():
    model = nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
    handle = ac.condition(model, ac.Spectral.paper_svd())
    average = Average(model, 0.5)
    key = next(k for k in model.state_dict() if k.endswith("_correction"))
    before = average.tensors[key].clone()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    handle.refresh()
    average.update(1)
    after = model.state_dict()[key]
    decay = 2 / 11
    torch.testing.assert_close(average.tensors[key], decay * before + (1 - decay) * after)
    assert average.tensors[key.replace("_correction", "_age")].dtype == torch.int64


def test_counters_are_copied():
    model = nn.BatchNorm1d(2)
    average = Average(model, 0.9)
    model(torch.randn(4, 2))
    average.update(1)
    assert average.tensors["num_batches_tracked"] == 1


def test_changing_places_and_back():
    model = nn.Linear(2, 2)
    moved(model, 1.0)
    average = Average(model, 0.9)
    moved(model, 3.0)
    parameter = model.weight
    with contextlib.suppress(ZeroDivisionError), average.in_place():  # back after an error, too
        assert (model.weight == 1).all()
        assert model.weight is parameter
        1 / 0
    assert (model.weight == 3).all()
    assert (average.tensors["weight"] == 1).all()


def test_it_goes_on_from_a_checkpoint():
    model = nn.Linear(2, 2)
    average = Average(model, 0.9)
    average.load({"weight": torch.full((2, 2), 5.0), "bias": torch.zeros(2)})
    assert (average.tensors["weight"] == 5).all()


def test_shared_weights_change_places_once():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].weight = model[0].weight
    model.add_module("again", model[2])  # a module with two names, as CoaT's encodings
    moved(model, 1.0)
    average = Average(model, 0.9)
    moved(model, 3.0)
    for _ in range(2):  # two evaluations
        with average.in_place():
            assert all((p == 1).all() for p in model.parameters())
        assert all((p == 3).all() for p in model.parameters())
    average.update(1)
    wanted = 2 / 11 * 1.0 + 9 / 11 * 3.0
    assert average.tensors["0.weight"].flatten().tolist() == pytest.approx([wanted] * 4)
    other = Average(model, 0.9)
    other.load(average.tensors)
    assert all(torch.equal(other.tensors[k], v) for k, v in average.tensors.items())
