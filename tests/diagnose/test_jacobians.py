"""κ of captured heads against jacrev of the module's own forward, and the bounds against theory."""

import pytest
import torch
from cases import CASE
from plain_attention import Normed, Plain, masks
from torch import nn

import attncond as ac
from attncond.diagnose import run


def head_kappa(model, head, x, rank, **given):
    """Differentiate the module itself in the rows of one head, with everything else fixed."""
    rows = slice(head * model.dim, (head + 1) * model.dim)
    group = head * model.kv_heads // model.heads
    shared = slice(group * model.dim, (group + 1) * model.dim)
    state = {k: v.detach() for k, v in model.state_dict().items()}

    def output(q, k, v):
        changed = dict(state)
        for name, part, at in (("q", q, rows), ("k", k, shared), ("v", v, shared)):
            weight = state[f"{name}.weight"].clone()
            weight[at] = part
            changed[f"{name}.weight"] = weight
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return torch.func.functional_call(model, changed, (x,), given)[0, head]

    weights = (
        state["q.weight"][rows],
        state["k.weight"][shared],
        state["v.weight"][shared],
    )
    parts = [
        torch.autograd.functional.jacobian(
            lambda w, i=i: output(*weights[:i], w, *weights[i + 1 :]), weights[i]
        )
        for i in range(3)
    ]
    flat = torch.cat([p.flatten(0, 1).flatten(1) for p in parts], 1)
    sigma = torch.linalg.svdvals(flat)
    return float(sigma[0] / sigma[rank - 1])


@pytest.mark.parametrize("mask", ["none", "causal", "padding", "bias"])
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("how", ["sdpa", "matmul"])
def test_kappa_is_that_of_the_module(mask, kv_heads, how):
    model, given = Plain(how, kv_heads=kv_heads).double().eval(), masks()[mask]
    x = torch.randn(2, 6, 12, dtype=torch.float64)
    report = ac.diagnose(model, {"x": x, **given})
    for row in report.rows:
        if row.head is None:
            continue
        assert row.values["jacobian_status"] == "closed form", row.values["jacobian_status"]
        one = {k: v[:1] if torch.is_tensor(v) and v.ndim == 4 else v for k, v in given.items()}
        want = head_kappa(model, row.head, x[:1], int(row.values["jacobian_rank"]), **one)
        assert row.values["jacobian_kappa"] == pytest.approx(want, rel=1e-5)
        assert row.values["jacobian_certificate"] >= want * (1 - 1e-9)
    worst = max(r.values["jacobian_kappa"] for r in report.rows if r.head is not None)
    assert report.rows[0].values["jacobian_kappa"] == worst


def test_tokens_are_sampled():
    model = Plain("sdpa").double()
    x = torch.randn(1, 20, 12, dtype=torch.float64)
    few = ac.diagnose(model, x, tokens=5).rows[1].values
    assert few["jacobian_tokens"] == 5
    picked = [0, 5, 10, 14, 19]
    want = ac.diagnose(model, x[:, picked]).rows[1].values["jacobian_kappa"]
    assert few["jacobian_kappa"] == pytest.approx(want, rel=1e-6)


def test_conditioned_weights_are_the_ones_differentiated():
    model = Plain("sdpa").double()
    x = torch.randn(1, 6, 12, dtype=torch.float64)
    handle = ac.condition(model, ac.Spectral())
    conditioned = ac.diagnose(model, x).rows[1].values["jacobian_kappa"]
    handle.fold()
    folded = ac.diagnose(model, x).rows[1].values["jacobian_kappa"]
    assert conditioned == pytest.approx(folded, rel=1e-6)


class Depends(Plain):
    """Its mask is made of its queries."""

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (2, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        mask = (q @ q.mT).tanh()
        if self.how == "sdpa":
            return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return (q @ k.mT + mask).softmax(-1) @ v


class Capped(Plain):
    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (2, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return (q @ k.mT).tanh().softmax(-1) @ v


@pytest.mark.parametrize(
    "model",
    [Depends("sdpa"), Normed("sdpa"), Depends("matmul"), Normed("matmul"), Capped("")],
    ids=lambda m: f"{type(m).__name__}-{m.how}",
)
def test_what_the_closed_form_does_not_cover_is_run_again(model):
    model, x = model.double(), torch.randn(2, 6, 12, dtype=torch.float64)
    values = ac.diagnose(model, x).rows[2].values
    assert values["jacobian_path"] == "dense"
    want = head_kappa(model, 1, x[:1], int(values["jacobian_rank"]))
    assert values["jacobian_kappa"] == pytest.approx(want, rel=1e-8)
    assert "jacobian_certificate" not in values


def test_jobs_hold_no_weights():
    model = Plain("sdpa")
    held = []
    real = run.job_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "job_of", lambda *args: held.append(real(*args)) or held[-1])
        ac.diagnose(model, torch.randn(1, 20, 12), tokens=5)
    tensors = [v for v in vars(held[0]).values() if torch.is_tensor(v)]
    assert [tuple(t.shape) for t in tensors] == [(5, 12)]  # a layer's, all heads, would be large


@pytest.mark.parametrize("mask", ["none", "causal", "padding", "bias"])
@pytest.mark.parametrize("how", ["sdpa", "matmul"])
def test_jobs_that_are_taken_need_no_model(how, mask):
    model, held, real = Plain(how, kv_heads=1).double(), [], run.job_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "job_of", lambda *args: held.append(real(*args)) or held[-1])
        x = torch.randn(2, 6, 12, dtype=torch.float64)
        report = ac.diagnose(model, {"x": x, **masks()[mask]})
    taken = held[0].taken([0, 1], 0)
    assert taken.written == 0
    with torch.no_grad():
        for tensor in (x, *model.parameters()):
            tensor.zero_()
    for h in (0, 1):
        found, want = taken.of_head(h).solve(), report.rows[h + 1].values
        assert found == {k: v for k, v in want.items() if k in found}
        assert found["jacobian_kappa"] > 1


def test_a_scale_that_is_one_but_for_rounding_is_one():
    torch.manual_seed(0)
    model, held, real = Plain("sdpa"), [], run.job_of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "job_of", lambda *args: held.append(real(*args)) or held[-1])
        ac.diagnose(model, torch.randn(1, 20, 12))
    assert held[0].scale == model.dim**-0.5


def test_position_biases_inside_the_product_are_covered():
    case = CASE["hf-bloom"]  # alibi goes through baddbmm
    values = ac.diagnose(case.make(), case.run).rows[1].values
    assert values["jacobian_status"] == "closed form"
    assert values["jacobian_kappa"] <= values["jacobian_certificate"]
