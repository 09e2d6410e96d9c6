import math
from dataclasses import replace

import by_the_book
import pytest
import torch

from attncond.diagnose import measure
from attncond.diagnose.capture import Scores


def scores(logits: torch.Tensor, visible: torch.Tensor | None = None) -> Scores:
    seen = torch.ones_like(logits, dtype=torch.bool) if visible is None else visible
    return Scores(*logits.shape, lambda i, h: (logits[i, h].double(), seen[i, h]))


@pytest.mark.parametrize("shape", [(5, 5), (3, 8), (8, 3), (2, 4, 6), (1, 7), (7, 1)])
def test_singular_values_are_those_of_an_svd(shape):
    a = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(
        measure.singular_values(a), torch.linalg.svdvals(a), rtol=1e-9, atol=0
    )


@pytest.mark.parametrize("kappa", [1e3, 1e6, 1e10])
@pytest.mark.parametrize("size", [1e-200, 1.0, 1e200])
def test_small_singular_values_are_resolved_where_a_gram_matrix_cannot(kappa, size):
    u, v = (torch.linalg.qr(torch.randn(20, 20, dtype=torch.float64))[0] for _ in "uv")
    sigma = torch.logspace(0, -math.log10(kappa), 20, dtype=torch.float64) * size
    found = measure.singular_values((u * sigma) @ v)
    torch.testing.assert_close(found, sigma, rtol=1e-5, atol=0)


def test_large_matrices_of_which_half_a_gram_matrix_is_formed():
    a = torch.randn(2, 700, 530, dtype=torch.float64)
    torch.testing.assert_close(
        measure.singular_values(a), torch.linalg.svdvals(a), rtol=1e-9, atol=0
    )


@pytest.mark.parametrize("size", [1e-200, 1e-30, 1e30, 1e200])
def test_no_square_overflows_or_vanishes(size):
    a = torch.randn(3, 5, 8, dtype=torch.float64)
    a[1] *= size
    torch.testing.assert_close(
        measure.singular_values(a), torch.linalg.svdvals(a), rtol=1e-9, atol=0
    )


def test_a_batch_with_a_broken_matrix_answers_for_the_others():
    a = torch.eye(3).repeat(3, 1, 1)
    a[1, 0, 0] = math.nan
    found = measure.singular_values(a)
    assert found[1].isnan().all()
    assert (found[[0, 2]] == 1).all()


def test_weight_says_what_a_singular_or_zero_matrix_has():
    singular = torch.outer(torch.arange(1.0, 5), torch.ones(4))
    values = measure.weight(measure.singular_values(singular), (4, 4))
    assert values["kappa"] == math.inf
    assert values["stable_rank"] == pytest.approx(1)
    zero = measure.weight(measure.singular_values(torch.zeros(2, 3)), (2, 3))
    assert zero["sigma_max"] == 0
    assert zero["kappa"] == math.inf


@pytest.mark.parametrize("gap", [False, True])
def test_attention_against_loops(gap):
    logits = 3 * torch.randn(3, 2, 6, 5, dtype=torch.float64)
    logits[0, 0, 1, 2] = 60.0  # one saturated query
    visible = torch.rand(3, 2, 6, 5) > 0.3
    visible[0, 0, 1, 2] = True
    visible[1, 1, 2] = False  # sees nothing
    visible[2, 0, 3] = torch.arange(5) == 1  # sees one key
    found = measure.attention(scores(logits, visible), [0, 1], gap=gap)
    for h, values in enumerate(found):
        p = [by_the_book.probabilities(logits[i, h], visible[i, h]) for i in range(3)]
        seen = [visible[i, h] for i in range(3)]
        want = by_the_book.statistics(p, seen)
        raw = {k: v for k, v in want.items() if k.startswith("attention")}
        if gap:
            less = [
                m - s.double() / s.sum(-1, keepdim=True).clamp_min(1)
                for m, s in zip(p, seen, strict=True)
            ]
            changed = by_the_book.statistics(less, seen)
            want |= {k: changed[k] for k in raw}
        want |= {f"raw_{k}": v for k, v in raw.items()}
        shown = torch.cat([logits[i, h][visible[i, h]] for i in range(3)])
        want["logit_max"] = float(shown.abs().max())
        want["logit_rms"] = float(shown.square().mean().sqrt())
        assert values == pytest.approx(want, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("gap", [False, True])
def test_a_sink_meets_no_value(gap):
    logits = torch.randn(1, 2, 5, 5, dtype=torch.float64)
    sink = torch.tensor([1.0, 30.0], dtype=torch.float64).view(1, 2, 1, 1).expand(1, 2, 5, 1)
    value = torch.randn(1, 2, 5, 3, dtype=torch.float64)
    logits = torch.cat([logits, sink], -1)
    found = measure.attention(replace(scores(logits), value=value), range(2), gap=gap)
    for head, values in enumerate(found):
        p = logits[0, head].softmax(-1)[:, :5]
        raw, name = torch.linalg.svdvals(p), "raw_attention" if gap else "attention"
        assert [values[f"{name}_sigma_{i}"] for i in (1, 2)] == pytest.approx(raw[:2].tolist())
        if gap:
            p = p - p.sum(1, keepdim=True) / 5
        sigma, out = torch.linalg.svdvals(p), torch.linalg.svdvals(p @ value[0, head])
        assert values["attention_sigma_1"] == pytest.approx(sigma[0].item())
        assert values["output_sigma_max"] == pytest.approx(out[0].item())


def test_large_attention_goes_through_a_krylov_space(monkeypatch):
    p = torch.randn(2, 1, 90, 80, dtype=torch.float64) * 2
    dense = measure.attention(scores(p), [0])
    monkeypatch.setattr(measure, "_DENSE", 8)
    monkeypatch.setattr(measure, "_CHUNK", 1)
    assert measure.attention(scores(p), [0])[0] == pytest.approx(dense[0], rel=1e-4)


def test_nothing_but_lonely_queries_has_no_entropy():
    values = measure.attention(scores(torch.zeros(1, 1, 4, 1)), [0])[0]
    assert values["entropy"] is None
    assert values["saturation"] is None
    assert values["attention_sigma_1"] == pytest.approx(2)


def test_nan_logits_give_nan_and_no_error():
    logits = torch.zeros(2, 1, 3, 3)
    logits[1, 0, 0, 0] = math.nan
    values = measure.attention(scores(logits), [0])[0]
    assert math.isnan(values["entropy"])
    assert math.isnan(values["attention_sigma_1"])


@pytest.mark.parametrize("shape", [(2, 5, 8), (1, 8, 5), (3, 1, 4)])
def test_tokens_against_an_svd(shape):
    x = torch.randn(shape, dtype=torch.float64) + 0.5
    values = measure.tokens(x)
    want = [by_the_book.token_statistics(item) for item in x]
    assert values["token_stable_rank"] == pytest.approx(sum(w[0] for w in want) / len(x), rel=1e-9)
    assert values["token_residue"] == pytest.approx(sum(w[1] for w in want) / len(x), abs=1e-12)


def test_tokens_that_are_broken_or_zero():
    assert math.isnan(measure.tokens(torch.zeros(1, 3, 4))["token_stable_rank"])
    assert math.isnan(measure.tokens(torch.full((1, 3, 4), math.nan))["token_rms"])


def test_spread_is_even_and_keeps_the_ends():
    assert measure.spread(5, None) == [0, 1, 2, 3, 4]
    assert measure.spread(197, 4) == [0, 65, 131, 196]
    assert measure.spread(9, 1) == [0]
    for count in range(1, 40):
        for most in range(1, 12):
            found = measure.spread(count, most)
            assert len(found) == min(count, most)
            assert found == sorted(set(found))
