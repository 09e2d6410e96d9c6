"""Snapshots: weights as they were at the step, each copied and solved once, against numpy."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import attncond as ac
from attncond.diagnose import measure
from attncond.inspection import inspect
from attncond.monitor.snapshot import Stage, measured

WIDTH, HEADS = 16, 2


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def sites(model):
    return list(enumerate(inspect(model)))


def take(model, roles="qkv", loss=None, **options):
    return Stage(**options).take(sites(model), roles, loss)


def kappa(matrix):
    return np.linalg.cond(matrix.detach().double().numpy())


def test_what_is_copied_stays_as_it_was():
    model = encoder()
    loss = torch.tensor(2.5)
    found = take(model, loss=loss)
    before = [w.raw.clone() for w in found.weights]
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        loss.zero_()
    found.wait()
    assert all(torch.equal(w.raw, b) for w, b in zip(found.weights, before, strict=True))
    assert float(found.loss) == 2.5
    assert not any(w.raw.requires_grad for w in found.weights)


def test_only_the_roles_that_were_asked_for():
    found = take(encoder(), roles="vq")
    assert [(w.layer, w.projection.role) for w in found.weights] == [
        (0, "q"), (0, "v"), (1, "q"), (1, "v")
    ]  # fmt: skip


def test_a_fused_weight_is_copied_once_and_corrected_beside_it():
    model = encoder()
    plain = take(model).weights
    assert len({id(w.raw) for w in plain}) == 2  # one for each attention
    assert all(w.effective is w.raw for w in plain)
    ac.condition(model, ac.Spectral(roles="q"))
    corrected = take(model).weights[:3]
    assert all(torch.equal(w.raw, plain[0].raw) for w in corrected)
    rows = slice(0, WIDTH)
    assert not torch.equal(corrected[0].effective[rows], corrected[0].raw[rows])
    used = model.layers[0].self_attn.in_proj_weight.as_subclass(torch.Tensor)
    assert torch.equal(corrected[0].effective, used)


def test_tied_weights_are_copied_and_solved_once(monkeypatch):
    model = encoder()
    model.layers[1].self_attn = model.layers[0].self_attn
    other = nn.MultiheadAttention(WIDTH, HEADS)
    other.in_proj_weight = model.layers[0].self_attn.in_proj_weight
    svd, solved = measure.singular_values, []
    monkeypatch.setattr(measure, "singular_values", lambda a: solved.append(a) or svd(a))
    rows, troubles = measured(take(nn.ModuleList([model, other])).weights, heads=False)
    assert len(rows) == 2
    assert rows[0].values == rows[1].values
    assert (len(solved), troubles) == (3, [])


def test_a_loss_is_one_number():
    assert take(encoder(), loss=1.5).loss == 1.5
    assert float(take(encoder(), loss=torch.ones(1, 1)).loss) == 1.0
    with pytest.raises(ValueError, match=r"loss must be one number, not a tensor of \(2,\)"):
        take(encoder(), loss=torch.zeros(2))


def test_a_helper_keeps_nothing():
    found = take(encoder(), loss=torch.ones(()), keep=False)
    assert all(w.raw.numel() == 0 for w in found.weights)
    assert found.loss.numel() == 0


def test_spectra_of_the_whole_and_of_each_head():
    model = encoder()
    rows, troubles = measured(take(model).weights, heads=True)
    assert troubles == []
    assert [(r.layer, r.head) for r in rows] == [(n, h) for n in (0, 1) for h in (None, 0, 1)]
    weight = model.layers[1].self_attn.in_proj_weight
    for place, role in enumerate("qkv"):
        matrix = weight[place * WIDTH : (place + 1) * WIDTH]
        assert rows[3].values[f"{role}_kappa"] == pytest.approx(kappa(matrix), rel=1e-6)
        for head in range(HEADS):
            part = matrix[head * WIDTH // HEADS : (head + 1) * WIDTH // HEADS]
            assert rows[4 + head].values[f"raw_{role}_kappa"] == pytest.approx(kappa(part), 1e-6)


def test_query_heads_that_share_keys_have_the_same_numbers():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1,
        intermediate_size=16, vocab_size=8,
    )  # fmt: skip
    model = transformers.LlamaModel(config)
    rows, _ = measured(take(model).weights, heads=True)
    found = {r.head: r.values for r in rows}
    assert found[0]["k_kappa"] == found[1]["k_kappa"] != found[2]["k_kappa"]
    assert len({found[h]["q_kappa"] for h in range(4)}) == 4
    part = model.layers[0].self_attn.k_proj.weight[4:8]
    assert found[3]["k_kappa"] == pytest.approx(kappa(part), rel=1e-6)


def test_query_heads_that_take_keys_in_turns_have_those_of_their_own():
    class Turns(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)

    @ac.register(Turns)
    def adapter(module):
        site = ac.separate(module.q, module.k, module.v, heads=4, kv_heads=2)
        tiled = tuple(replace(p, tiled=p.role != "q") for p in site.projections)
        return replace(site, projections=tiled)

    model = Turns()
    rows, _ = measured(take(model).weights, heads=True)
    found = {r.head: r.values for r in rows}
    assert found[0]["k_kappa"] == found[2]["k_kappa"] != found[1]["k_kappa"]
    assert found[3]["v_kappa"] == pytest.approx(kappa(model.v.weight[4:]), rel=1e-6)


def test_weights_that_are_not_finite_are_named_and_the_others_measured():
    model = encoder()
    with torch.no_grad():
        model.layers[1].self_attn.in_proj_weight[20] = math.inf  # W_K, its first head
    rows, troubles = measured(take(model).weights, heads=True)
    assert troubles == ["W_K of layers.1.self_attn holds NaN or Inf"]
    found = {(r.layer, r.head): r.values for r in rows}
    assert math.isnan(found[1, None]["k_kappa"])
    assert math.isnan(found[1, 0]["k_sigma_min"])
    assert found[1, 1]["k_kappa"] > 1
    assert found[0, None]["k_kappa"] > 1


def test_an_eigensolver_that_fails_costs_one_matrix(monkeypatch):
    svd, solved = measure.singular_values, []

    def fails(matrix):
        solved.append(matrix)
        if len(solved) == 1:
            raise RuntimeError("failed to converge")
        return svd(matrix)

    monkeypatch.setattr(measure, "singular_values", fails)
    rows, troubles = measured(take(encoder()).weights, heads=False)
    assert troubles == ["W_Q of layers.0.self_attn cannot be solved: failed to converge"]
    assert math.isnan(rows[0].values["q_kappa"])
    assert rows[0].values["v_kappa"] > 1
