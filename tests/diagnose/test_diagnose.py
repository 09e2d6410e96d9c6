"""The public function: inputs, sampling, errors, and real models."""

import copy
import math

import pytest
import timm
import torch
from cases import CASE, CASES
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModel

import attncond as ac
from attncond.diagnose import measure


def vit(**kwargs):
    case = CASE["timm-vit"]
    return case.make(**kwargs), case.run


def test_weights_are_those_of_an_svd():
    for case in CASES:
        model = case.make()
        plan = ac.inspect(model)
        rows = {(r.path, r.head): r.values for r in ac.diagnose(model).rows}
        for site in plan.sites:
            for p in site.projections:
                matrix = p.matrix().detach()
                parts = {None: matrix.flatten(0, 1)}
                parts |= {h: matrix[h * p.heads // site.heads] for h in range(site.heads)}
                for head, part in parts.items():
                    sigma = torch.linalg.svdvals(part)
                    want = {
                        "sigma_max": float(sigma[0]),
                        "sigma_min": float(sigma[-1]),
                        "kappa": float(sigma[0] / sigma[-1]),
                        "stable_rank": float(sigma.square().sum() / sigma[0] ** 2),
                    }
                    for name, value in want.items():
                        for column in (f"{p.role}_{name}", f"raw_{p.role}_{name}"):
                            assert rows[site.path, head][column] == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("method", [ac.Spectral(), ac.Spectral.paper_svd()])
def test_effective_weights_stand_beside_the_raw_ones(method):
    model, run = vit()
    before = ac.diagnose(model, run, jacobian=False)
    handle = ac.condition(model, method)
    after = ac.diagnose(model, run, jacobian=False)
    kappas = {(c.parameter, c.role): c.kappa for c in handle.certificates()}
    for old, new in zip(before.rows, after.rows, strict=True):
        for role in "qkv":
            assert new.values[f"raw_{role}_kappa"] == old.values[f"{role}_kappa"]
            if new.head is None:
                want = kappas[f"{new.path}.qkv.weight", role]
                assert new.values[f"{role}_kappa"] == pytest.approx(want, rel=1e-6)


def test_every_form_of_batch():
    model = nn.TransformerDecoderLayer(16, 2, 16, batch_first=True).double()
    x, memory = (torch.randn(2, n, 16, dtype=torch.float64) for n in (5, 4))
    forms = [
        (x, memory),
        [x, memory],
        {"tgt": x, "memory": memory},
        lambda m: m(x, memory),
    ]
    reports = [ac.diagnose(model, form) for form in forms]
    assert all(r.rows == reports[0].rows for r in reports)
    assert {r.path for r in reports[0].rows} == {"self_attn", "multihead_attn"}
    assert all(r.values["jacobian_status"] == "closed form" for r in reports[0].rows)


def test_the_same_twice():
    model, run = vit()
    first, second = (ac.diagnose(model, run, loss="sum") for _ in range(2))
    assert first.rows == second.rows
    assert first.spectra == second.spectra


def test_layers_heads_and_samples():
    model, run = vit()
    whole = {r.key: r.values for r in ac.diagnose(model, run).rows}
    for layers in ([1], [-1], ["blocks.1*"], 1, "blocks.1.attn"):
        part = ac.diagnose(model, run, layers=layers, heads=[2])
        assert [(r.layer, r.path, r.head) for r in part.rows] == [
            (1, "blocks.1.attn", None),
            (1, "blocks.1.attn", 2),
        ]
        assert part.rows[1].values == pytest.approx(whole[part.rows[1].key])
    one = ac.diagnose(model, run, samples=1).rows[1].values
    assert one["entropy"] != whole[0, "blocks.0.attn", 0, 0]["entropy"]


@pytest.mark.parametrize("head", [3, -1, "1"])
def test_heads_that_are_not_there(head):
    model, run = vit()
    with pytest.raises(ac.DiagnosisError, match=f"no head {head!r}, the last one is 2"):
        ac.diagnose(model, run, heads=[0, head])
    assert not ac.diagnose(model, run, layers=[], heads=None).rows


@pytest.mark.parametrize("layers", [[7], ["nothing*"], [-3]])
def test_layers_that_are_not_there(layers):
    model, run = vit()
    with pytest.raises(ac.DiagnosisError, match="2 attentions"):
        ac.diagnose(model, run, layers=layers)


def test_time_budget_stops_and_says_so():
    model, run = vit()
    report = ac.diagnose(model, run, time_budget=1e-9)
    assert len(report.rows) == 8
    assert any("time budget" in note for note in report.notes)
    assert "jacobian_kappa" not in report.rows[1].values
    assert "time budget" in report.summary()


def test_gradients_are_those_of_backward():
    model, run = vit()
    report = ac.diagnose(model, run, loss=lambda out: out.square().mean())
    run(model).square().mean().backward()
    for row in report.rows:
        grad = model.blocks[row.layer].attn.qkv.weight.grad.view(3, 3, 8, 24)
        for i, role in enumerate("qkv"):
            part = grad[i] if row.head is None else grad[i, row.head]
            assert row.values[f"{role}_grad_norm"] == pytest.approx(float(part.norm()), rel=1e-9)


def test_gradients_behind_a_reentrant_checkpoint_are_refused_not_zero():
    """autograd.grad does not get there, and says nothing."""
    layer = nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return checkpoint(self.layer, x, use_reentrant=True)

    x = torch.randn(2, 5, 16, requires_grad=True)
    with pytest.raises(ac.DiagnosisError, match=r"use_reentrant=False, or leave out loss="):
        ac.diagnose(Checkpointed(), x, loss=lambda output: output.square().sum())
    assert ac.diagnose(Checkpointed(), x).rows


def test_gradients_of_a_frozen_and_of_a_conditioned_model():
    model, run = vit()
    ac.condition(model, ac.Spectral())
    model.requires_grad_(False)
    report = ac.diagnose(model, run, loss="sum")
    assert all(r.values["q_grad_norm"] > 0 for r in report.rows)


def test_half_precision_is_measured_in_double():
    model = CASE["timm-vit"].make(torch.float32)
    x = torch.randn(2, 3, 8, 8)
    want = ac.diagnose(model, x)
    half = ac.diagnose(copy.deepcopy(model).bfloat16(), x.bfloat16())
    for a, b in zip(want.rows, half.rows, strict=True):
        assert b.values["entropy"] == pytest.approx(a.values["entropy"], rel=0.05)
        assert b.values["v_sigma_max"] == pytest.approx(a.values["v_sigma_max"], rel=0.01)
        assert b.values["jacobian_status"] in ("closed form", "unresolved")


def test_attention_in_chunks_is_the_same(monkeypatch):
    model, run = vit()
    want = ac.diagnose(model, run)
    monkeypatch.setattr(measure, "_CHUNK", 1)
    for a, b in zip(want.rows, ac.diagnose(model, run).rows, strict=True):
        assert b.values == pytest.approx(a.values)


def test_errors_are_named():
    model, _ = vit()
    with pytest.raises(ac.UnsupportedAttentionError, match="no attention"):
        ac.diagnose(nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(TypeError, match=r"nn\.Module"):
        ac.diagnose(lambda x: x, torch.ones(1))
    with pytest.raises(ac.DiagnosisError, match=r"float64 \(2, 3, 9, 9\)"):
        ac.diagnose(model, torch.randn(2, 3, 9, 9, dtype=torch.float64))
    with pytest.raises(ac.DiagnosisError, match=r"batch\[0\]"):
        ac.diagnose(model, (torch.randn(2, 3, 8, 8).double(), torch.zeros(2), torch.zeros(2)))
    with pytest.raises(ac.DiagnosisError, match="KeyError: 'x'"):
        ac.diagnose(model, lambda _: {}["x"])
    with pytest.raises(ac.DiagnosisError, match=r"\(batch,\) passes it"):
        ac.diagnose(model, {"image": torch.randn(2, 3, 8, 8).double()})
    with pytest.raises(ac.DiagnosisError, match="a dict, or a function"):
        ac.diagnose(model, "text")
    with pytest.raises(ac.DiagnosisError, match="loss must be"):
        ac.diagnose(model, torch.randn(1, 3, 8, 8).double(), loss="mean")
    with pytest.raises(ac.DiagnosisError, match="one number"):
        ac.diagnose(model, torch.randn(1, 3, 8, 8).double(), loss=lambda out: out)
    with pytest.raises(ac.DiagnosisError, match="has no loss"):
        ac.diagnose(model, torch.randn(1, 3, 8, 8).double(), loss="output")
    with pytest.raises(ValueError, match="samples"):
        ac.diagnose(model, samples=0)
    with torch.device("meta"):
        empty = nn.MultiheadAttention(8, 2)
    with pytest.raises(ac.DiagnosisError, match="meta"):
        ac.diagnose(empty)


def test_the_default_device_does_not_matter():
    """Of a model on the CPU, say, where a GPU is the default; here is one that has no numbers."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", hidden_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=9
    )
    rotary = AutoModel.from_config(config)
    plain, tokens = nn.MultiheadAttention(16, 2), torch.randn(5, 3, 16)
    for model, batch in ((plain, (tokens, tokens, tokens)), (rotary, torch.arange(5)[None])):
        want = ac.diagnose(model, batch, loss="sum")
        with torch.device("meta"):
            found = ac.diagnose(model, batch, loss="sum")
        assert [row.values for row in found.rows] == [row.values for row in want.rows]


def test_running_out_of_memory_comes_with_advice(monkeypatch):
    model, run = vit()

    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(measure, "attention", fail)
    with pytest.raises(ac.DiagnosisError, match="samples="):
        ac.diagnose(model, run)


def test_progress_bar(capsys):
    model, run = vit()
    ac.diagnose(model, run, progress=True)
    quiet = capsys.readouterr().out
    assert not quiet  # it goes to stderr
    ac.diagnose(model, run)
    assert not capsys.readouterr().err


SMALL = {"num_classes": 4, "img_size": 32}
TIMM = {
    "deit_tiny_patch16_224": {"depth": 2, "embed_dim": 24, "num_heads": 3},
    "cait_xxs24_224": {"depth": 1, "embed_dim": 24, "num_heads": 3},
    "xcit_nano_12_p8_224": {"depth": 1, "embed_dim": 24, "num_heads": 3},
    "swin_tiny_patch4_window7_224": {"depths": (2,), "embed_dim": 12, "num_heads": (3,)},
    "twins_svt_small": {"embed_dims": (8, 16), "depths": (1, 1), "num_heads": (1, 2)},
    "eva02_tiny_patch14_224": {"depth": 1, "embed_dim": 24, "num_heads": 3, "img_size": 28},
}
TRANSFORMERS = {
    "bert": {},
    "gpt_neox": {},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 32},
    "qwen2": {"num_key_value_heads": 2},
    "roberta": {},
    "mistral": {"num_key_value_heads": 2},
    "electra": {},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 8},
}


def check(report, sites):
    assert {r.layer for r in report.rows} == set(range(sites))
    for row in report.rows:
        if row.head is None:
            assert 0 <= row.values["entropy_relative"] <= 1 + 1e-6
            assert row.values["attention_sigma_1"] >= row.values["attention_sigma_2"] >= 0
            assert row.values["token_stable_rank"] >= 1 - 1e-6
        assert row.values["q_kappa"] >= 1
        assert isinstance(row.values["jacobian_status"], str)
    assert not [f for f in report.findings if f.severity == "error"]
    assert math.isfinite(len(report.summary()))


@pytest.mark.parametrize("name", TIMM)
def test_timm(name):
    model = timm.create_model(name, **SMALL | TIMM[name])
    size = (SMALL | TIMM[name])["img_size"]
    check(ac.diagnose(model, torch.randn(2, 3, size, size)), len(ac.inspect(model)))


@pytest.mark.parametrize(
    ("name", "how"),
    # gemma2 caps its logits, which scaled_dot_product_attention cannot
    [(n, h) for n in TRANSFORMERS for h in ("sdpa", "eager") if (n, h) != ("gemma2", "sdpa")],
)
def test_transformers(name, how):
    tiny = {"num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 32, "vocab_size": 32}
    config = AutoConfig.for_model(name, **tiny, intermediate_size=32, **TRANSFORMERS[name])
    config.pad_token_id = 0
    model = AutoModel.from_config(config, attn_implementation=how)
    ids = torch.randint(3, 30, (2, 7))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    report = ac.diagnose(model, {"input_ids": ids, "attention_mask": mask})
    check(report, 1)
    status = report.rows[1].values["jacobian_status"]
    plain = name in ("bert", "opt", "roberta", "electra")
    assert (status == "closed form") == plain, status
