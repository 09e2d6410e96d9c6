import math

import pytest
import torch
from cases import CASE
from torch import nn

import attncond as ac
from attncond.diagnose.findings import CODES, find
from attncond.diagnose.report import Row


def row(head=None, call=0, **values):
    return Row(3, "blocks.3.attn", "c", "self", call, head, values)


def codes(*rows):
    return [f.code for f in find(rows)]


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"k_kappa": 1.2e4}, "ill-conditioned-weight"),
        ({"k_kappa": math.inf}, "singular-weight"),
        ({"v_kappa": math.nan}, "weights-not-finite"),
        ({"entropy": math.nan}, "activations-not-finite"),
        ({"token_rms": math.inf}, "activations-not-finite"),
        ({"saturation": 0.9, "entropy": 0.02}, "saturated-attention"),
        ({"entropy_relative": 0.9999}, "uniform-attention"),
        ({"logit_max": 300.0}, "large-logits"),
        ({"token_residue": 0.01}, "rank-collapse"),
        ({"q_grad_norm": 0.0}, "no-gradient"),
        ({"jacobian_status": "not reached"}, "not-reached"),
    ],
)
def test_each_finding(values, code):
    assert codes(row(**values)) == [code]
    assert code in CODES
    [finding] = find([row(**values)])
    assert "layer 3, blocks.3.attn: " in finding.message


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"jacobian_kappa": 1e7}, "ill-conditioned-jacobian"),
        ({"jacobian_kappa": 50.0, "jacobian_paper_bound": 6.0}, "paper-bound-exceeded"),
    ],
)
def test_findings_of_heads(values, code):
    assert codes(row(), row(0, **values)) == [code]


def test_words_for_people():
    [finding] = find([row(saturation=1.0, entropy=0.02)])
    assert "attention is saturated" in finding.message
    assert "entropy 0.02 nats" in finding.message
    [finding] = find([row(k_kappa=1.2e4)])
    assert finding.message.endswith("W_K has kappa 1.2e+04")


def test_heads_are_counted_and_the_worst_is_named():
    rows = [row(), *(row(h, entropy=0.1, saturation=0.5 + h / 10) for h in range(3))]
    [finding] = find(rows)
    assert (finding.head, finding.heads) == (2, 3)
    assert "head 2" in finding.message


def test_errors_come_first_and_weights_are_told_once():
    rows = [row(q_kappa=1e5), row(call=1, q_kappa=1e5, entropy=math.nan)]
    found = find(rows)
    assert [f.code for f in found] == ["activations-not-finite", "ill-conditioned-weight"]


def test_every_code_is_explained():
    assert all(CODES.values())


def test_nan_in_weights_is_a_finding():
    case = CASE["timm-vit"]
    model = case.make()
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight[0, 0] = math.nan
    found = {f.code for f in ac.diagnose(model, case.run).findings}
    assert {"weights-not-finite", "activations-not-finite"} <= found


def test_nan_in_a_batch_is_a_finding():
    x = torch.randn(2, 5, 16)
    x[0, 0, 0] = math.nan
    model = nn.TransformerEncoderLayer(16, 2, batch_first=True)
    assert {f.code for f in ac.diagnose(model, x).findings} == {"activations-not-finite"}


def test_attention_that_does_not_run():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.other = nn.MultiheadAttention(8, 2), nn.MultiheadAttention(8, 2)

        def forward(self, x):
            return self.used(x, x, x)[0]

    report = ac.diagnose(Half(), torch.randn(3, 1, 8))
    assert [(f.code, f.path) for f in report.findings] == [("not-reached", "other")]
    assert all(r.values["q_kappa"] > 1 for r in report.rows)


def test_literal_lambda_saturates():
    model = nn.MultiheadAttention(32, 4, batch_first=True)
    x = nn.functional.layer_norm(torch.randn(1, 20, 32), (32,))
    ac.condition(model, ac.Spectral.paper())
    found = {f.code for f in ac.diagnose(model, (x, x, x), jacobian=False).findings}
    assert "saturated-attention" in found
