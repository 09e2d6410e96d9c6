"""The closed form of heads with RemoveGap and Precondition, against jacrev and an SVD."""

import math

import pytest
import torch

import attncond as ac
from attncond.diagnose import conditioned, replayed
from attncond.diagnose.conditioned import conditioned_spectrum
from attncond.head_inputs import Inputs
from attncond.heads import Heads

GAP, PRE = ac.RemoveGap(), ac.Precondition()
METHODS = {
    "gap": Heads(GAP),
    "precondition": Heads(None, PRE),
    "detached": Heads(None, ac.Precondition(detach=True)),
    "both": Heads(GAP, PRE),
    "both detached": Heads(GAP, ac.Precondition(detach=True)),
}


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def sigma(x, weights, heads, x_kv=None, bias_v=None, mask=None):
    """All singular values; mask is additive."""
    source = x if x_kv is None else x_kv

    def output(w_q, w_k, w_v):
        logits = (x @ w_q.T) @ (source @ w_k.T).T / math.sqrt(len(w_q))
        logits = logits if mask is None else logits + mask
        p = torch.softmax(logits, -1)
        if heads.gap is not None:
            seen = logits > -math.inf
            p = p - seen / seen.double().sum(1, keepdim=True)
        a = p @ (source @ w_v.T if bias_v is None else source @ w_v.T + bias_v)
        return a if heads.precondition is None else heads.precondition.equilibrate(a)

    parts = torch.func.jacrev(output, argnums=(0, 1, 2))(*weights)
    return torch.linalg.svdvals(torch.cat([p.flatten(0, 1).flatten(1) for p in parts], 1))


def check(found, want, rel=1e-8):
    assert found.rank == int((want > 1e-12 * want[0]).sum()), want
    assert found.sigma_max == pytest.approx(float(want[0]), rel=1e-10)
    assert found.sigma_min == pytest.approx(float(want[found.rank - 1]), rel=rel)
    assert found.kappa_error < 1e-6 * found.kappa


@pytest.mark.parametrize("channels", [6, 24])  # written down and decomposed; by Gram matrices
@pytest.mark.parametrize("heads", METHODS.values(), ids=METHODS)
def test_a_head(heads, channels, monkeypatch):
    if channels > 6:  # these need no Jacobian written down
        monkeypatch.setattr(conditioned, "dense_spectrum", None)
    x, weights = normal(12, 40), normal(3, channels, 40, seed=1) / 6
    bias = normal(channels, seed=2)
    found = conditioned_spectrum(Inputs.of(x, *weights, bias_v=bias), heads)
    check(found, sigma(x, weights, heads, bias_v=bias))
    assert found.path == "closed form"
    assert found.shape == (12 * channels, 3 * channels * 40)


@pytest.mark.parametrize("heads", METHODS.values(), ids=METHODS)
def test_causal_cross_attention_and_position_biases(heads, monkeypatch):
    monkeypatch.setattr(conditioned, "dense_spectrum", None)
    x, weights = normal(12, 40), normal(3, 24, 40, seed=1) / 6
    hidden = torch.full((12, 12), -math.inf, dtype=torch.float64).triu(1)
    causal = hidden + normal(12, 12, seed=2)
    check(
        conditioned_spectrum(Inputs.of(x, *weights, mask=causal), heads),
        sigma(x, weights, heads, mask=causal),
    )
    keys = normal(15, 40, seed=3)
    check(
        conditioned_spectrum(Inputs.of(x, *weights, x_kv=keys), heads),
        sigma(x, weights, heads, x_kv=keys),
    )


def test_equal_tokens_and_rows_too_short_to_be_divided_by_their_length():
    weights = normal(3, 24, 40, seed=1) / 6
    twice = normal(12, 40)
    twice[3] = twice[7]
    for heads in METHODS.values():
        check(conditioned_spectrum(Inputs.of(twice, *weights), heads), sigma(twice, weights, heads))
    x = normal(12, 40)
    logits = (x @ weights[0].T) @ (x @ weights[1].T).T / math.sqrt(24)
    length = (torch.softmax(logits, -1) @ x @ weights[2].T).norm(dim=1)
    for eps in (1.001 * length.median(), 2 * length.max()):
        heads = Heads(None, ac.Precondition(eps=float(eps)))
        check(conditioned_spectrum(Inputs.of(x, *weights), heads), sigma(x, weights, heads))


def test_too_large_to_write_down_has_the_largest_singular_value(monkeypatch):
    x, weights = normal(12, 40), normal(3, 24, 40, seed=1) / 6
    for module in (conditioned, replayed):
        monkeypatch.setattr(module, "memory_limit", lambda device: 0)
    found = conditioned_spectrum(Inputs.of(x, *weights), METHODS["both"])
    assert found.path == "matrix-free"
    assert not found.resolved
    want = sigma(x, weights, METHODS["both"])
    assert found.sigma_max == pytest.approx(float(want[0]), rel=1e-10)
