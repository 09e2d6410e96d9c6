"""What is captured, against tensors caught in another way."""

import by_the_book
import pytest
import torch
from cases import CASE
from plain_attention import Plain, masks
from torch import nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils.checkpoint import checkpoint

import attncond as ac


def by_hand(model, x, context=None, mask=None, causal=False):
    """(logits, visible), each (batch, heads, queries, keys)."""
    context = x if context is None else context
    q = (x @ model.q.weight.T + model.q.bias).unflatten(-1, (model.heads, -1))
    k = (context @ model.k.weight.T + model.k.bias).unflatten(-1, (model.kv_heads, -1))
    k = k.repeat_interleave(model.heads // model.kv_heads, 2)
    logits = torch.einsum("bnhd,bmhd->bhnm", q, k) / 2
    visible = torch.ones_like(logits, dtype=torch.bool)
    if causal:
        visible = visible.tril()
    if mask is not None:
        if mask.dtype == torch.bool:
            visible = visible & mask
        else:
            visible, logits = visible & (mask > -9000), logits + mask.clamp_min(-9000)
    return logits.detach(), visible


def assert_like_the_book(report, logits, visible):
    rows = [r for r in report.rows if r.head is not None]
    assert len(rows) == logits.shape[1]
    for row in rows:
        h = row.head
        p = [by_the_book.probabilities(a[h], s[h]) for a, s in zip(logits, visible, strict=True)]
        want = by_the_book.statistics(p, list(visible[:, h]))
        assert {k: row.values[k] for k in want} == pytest.approx(want, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("how", ["sdpa", "matmul", "einsum", "bmm"])
@pytest.mark.parametrize("mask", ["none", "causal", "padding", "bias", "hiding"])
def test_every_way_to_write_attention(how, mask):
    model, given = Plain(how).double(), masks()[mask]
    x = 2 * torch.randn(2, 6, 12, dtype=torch.float64)
    report = ac.diagnose(model, {"x": x, **given}, jacobian=False)
    assert_like_the_book(report, *by_hand(model, x, **given))
    want = [by_the_book.token_statistics(item) for item in x]
    assert report.rows[0].values["token_stable_rank"] == pytest.approx(
        sum(w[0] for w in want) / 2, rel=1e-9
    )


@pytest.mark.parametrize("corner", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("keys", [6, 8])
def test_a_causal_mask_of_torch_is_read_as_the_mask_that_it_stands_for(corner, keys):
    model = Plain("sdpa").double()
    x, context = (torch.randn(2, n, 12, dtype=torch.float64) for n in (6, keys))
    ahead = keys - 6 if corner is causal_lower_right else 0
    mask = torch.ones(6, keys, dtype=torch.bool).tril(ahead)
    report = ac.diagnose(model, {"x": x, "context": context, "mask": corner(6, keys)})
    assert_like_the_book(report, *by_hand(model, x, context, mask))
    want = ac.diagnose(model, {"x": x, "context": context, "mask": mask})
    assert [r.values["jacobian_kappa"] for r in report.rows] == pytest.approx(
        [r.values["jacobian_kappa"] for r in want.rows], rel=1e-9
    )


@pytest.mark.parametrize("how", ["sdpa", "matmul"])
def test_grouped_queries_and_cross_attention(how):
    model = Plain(how, heads=4, kv_heads=2).double()
    x, context = (torch.randn(2, n, 12, dtype=torch.float64) for n in (6, 5))
    report = ac.diagnose(model, (x, context), jacobian=False)
    assert_like_the_book(report, *by_hand(model, x, context))


@pytest.mark.parametrize("how", ["sdpa", "matmul"])
@pytest.mark.parametrize("mask", ["none", "causal", "padding"])
def test_gap_removal_is_seen_beside_the_softmax(how, mask):
    model, given = Plain(how).double(), masks()[mask]
    x = 2 * torch.randn(2, 6, 12, dtype=torch.float64)
    stock = ac.diagnose(model, {"x": x, **given}, jacobian=False)
    ac.condition(model, ac.RemoveGap())
    ac.condition(model, ac.Precondition())
    report = ac.diagnose(model, {"x": x, **given}, jacobian=False)
    assert_like_the_book(stock, *by_hand(model, x, **given))
    for before, after in zip(stock.rows, report.rows, strict=True):
        for name in ("sigma_1", "sigma_2", "stable_rank"):
            assert after.values[f"raw_attention_{name}"] == pytest.approx(
                before.values[f"attention_{name}"], rel=1e-6
            )
        assert after.values["entropy"] == pytest.approx(before.values["entropy"], rel=1e-9)
        assert after.values["attention_sigma_1"] < before.values["attention_sigma_1"]


def test_multihead_attention_has_tokens_first():
    model = nn.MultiheadAttention(12, 3).double()
    x = torch.randn(5, 2, 12, dtype=torch.float64)
    report = ac.diagnose(model, (x, x, x), jacobian=False)
    weights = model(x, x, x, average_attn_weights=False)[1].detach()
    assert_like_the_book(report, weights.log(), torch.ones_like(weights, dtype=torch.bool))
    want = [by_the_book.token_statistics(x[:, i])[0] for i in range(2)]
    assert report.rows[0].values["token_stable_rank"] == pytest.approx(sum(want) / 2, rel=1e-9)


def test_padded_encoder_takes_no_shortcut_through_nested_tensors():
    layer = nn.TransformerEncoderLayer(12, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).double().eval()
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    report = ac.diagnose(model, {"src": x, "src_key_padding_mask": padding})
    assert all(r.values["entropy"] is not None for r in report.rows)
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_layer_that_runs_three_times_has_three_sets_of_rows():
    case = CASE["hf-albert"]
    report = ac.diagnose(case.make(), case.run, jacobian=False)
    whole = [r for r in report.rows if r.head is None]
    assert [r.call for r in whole] == [0, 1, 2]
    assert len({r.values["entropy"] for r in whole}) == 3


def test_a_row_that_sees_nothing_stays_what_the_model_makes_of_it():
    model = Plain("sdpa").double()
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    mask[..., 1, :] = False
    x = torch.randn(1, 3, 12, dtype=torch.float64)
    outputs = []

    def run(m):
        outputs.append(m(x, mask=mask))

    run(model)
    ac.diagnose(model, run)
    torch.testing.assert_close(*outputs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("how", ["sdpa", "matmul"])
def test_a_checkpointed_model_is_diagnosed_like_any_other(how):
    """What is computed again in the backward pass is the model's own, as it was."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.checkpointed = Plain(how), False

        def forward(self, x):
            if self.checkpointed:
                return checkpoint(self.attention, x, use_reentrant=False)
            return self.attention(x)

    model, x = Block(), torch.randn(2, 5, 12, requires_grad=True)
    reports = []
    for model.checkpointed in (False, True):
        report = ac.diagnose(model, x, loss=lambda output: output.square().sum())
        reports.append([row.values for row in report.rows])
    plain, again = reports
    assert "q_grad_norm" in plain[0]
    for wanted, found in zip(plain, again, strict=True):
        assert found == pytest.approx(wanted)
