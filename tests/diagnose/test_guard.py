"""A diagnosis leaves no trace."""

import random

import numpy as np
import pytest
import torch
from cases import CASE, CASES
from torch import nn
from torch.overrides import _get_current_function_mode_stack

import attncond as ac
from attncond import kernels
from attncond.diagnose import jacobians, measure
from attncond.diagnose.guard import unwrapped


def snapshot(model: nn.Module) -> dict:
    return {
        "state": {k: v.clone() for k, v in model.state_dict().items()},
        "buffers": {k: (id(v), v.clone()) for k, v in model.named_buffers()},
        "parameters": {k: (id(p), p.requires_grad, p.grad) for k, p in model.named_parameters()},
        "modules": [(type(m), m.training, set(m.__dict__)) for m in model.modules()],
        "hooks": [len(d) for m in model.modules() for k, d in m.__dict__.items() if "hooks" in k],
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1].tolist(),
        "python": random.getstate(),
        "modes": len(_get_current_function_mode_stack()),
        "grad": torch.is_grad_enabled(),
        "fast": torch.backends.mha.get_fastpath_enabled(),
    }


def assert_same(before: dict, after: dict) -> None:
    for name in ("state", "buffers"):
        torch.testing.assert_close(before[name], after[name], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(before["torch"], after["torch"])
    assert before["parameters"].keys() == after["parameters"].keys()
    for old, new in zip(before["parameters"].values(), after["parameters"].values(), strict=True):
        assert old[:2] == new[:2]
        assert old[2] is new[2]
        assert old[2] is None or bool((old[2] == 1).all())
    for name in ("modules", "hooks", "numpy", "python", "modes", "grad", "fast"):
        assert before[name] == after[name], name


def torn(model: nn.Module) -> nn.Module:
    """Modes, flags and gradients that differ from module to module."""
    for i, module in enumerate(model.modules()):
        module.training = i % 3 == 0
    for i, p in enumerate(model.parameters()):
        p.requires_grad_(i % 2 == 0)
        p.grad = torch.ones_like(p) if i % 4 == 0 else None
    return model


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_nothing_changes(case):
    model = torn(case.make())
    before = snapshot(model)
    ac.diagnose(model, case.run, loss="sum")
    assert_same(before, snapshot(model))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("where", ["forward", "measure", "jacobian"])
def test_nothing_changes_after_an_error(error, where, monkeypatch):
    case = CASE["timm-vit"]
    model = torn(case.make())
    ac.condition(model, ac.Spectral())

    def fail(*args, **kwargs):
        raise error("stop")

    batch = case.run
    if where == "forward":
        handle = model.blocks[1].attn.register_forward_hook(lambda m, a, o: fail())
    elif where == "measure":
        monkeypatch.setattr(measure, "attention", fail)
    else:
        monkeypatch.setattr(jacobians.Job, "solve", fail)
    before = snapshot(model)
    with pytest.raises((error, ac.DiagnosisError)):
        ac.diagnose(model, batch)
    assert_same(before, snapshot(model))
    if where == "forward":
        handle.remove()
    monkeypatch.undo()
    ac.diagnose(model, batch, jacobian=False)


class Restless(nn.Module):
    """Changes its buffers, attributes and caches, and draws random numbers, in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("count", torch.zeros(1))
        self.length = 0
        self.cache: dict[str, torch.Tensor] = {}

    def forward(self, x):
        self.count += 1
        self.length = x.shape[1]
        self.cache["x"] = x
        self.register_buffer("late", torch.ones(1))
        self.attn.mark = True
        x = x + torch.rand_like(x) + np.random.rand() + random.random()
        return self.norm(self.attn(x, x, x)[0].mT)


def test_what_a_forward_pass_changes_is_put_back():
    model = Restless()
    x = torch.randn(2, 3, 8)
    before = snapshot(model)
    first, second = ac.diagnose(model, x), ac.diagnose(model, x)
    assert_same(before, snapshot(model))
    assert model.length == 0
    assert not model.cache
    assert first.rows == second.rows


def test_compiled_code_stays_valid():
    model = Restless().attn.eval()
    compiled = torch.compile(model, backend="eager")
    x = torch.randn(2, 3, 8)
    want = compiled(x, x, x)[0]
    with torch.compiler.set_stance("fail_on_recompile"):
        report = ac.diagnose(compiled, (x, x, x))
        assert torch.equal(compiled(x, x, x)[0], want)
    assert report.rows[0].path == ""
    assert report.rows[0].values["entropy"] > 0


def test_unwrapped_finds_the_module_that_paths_speak_of():
    model = nn.Linear(2, 2)
    assert unwrapped(nn.DataParallel(torch.compile(model))) is model
    assert unwrapped(model) is model


def test_inside_inference_mode():
    case = CASE["timm-vit"]
    model = case.make()
    with torch.inference_mode():
        report = ac.diagnose(model, case.run)
    assert report.rows == ac.diagnose(model, case.run).rows


def test_attention_is_seen_where_kernels_of_our_own_would_compute_it(monkeypatch):
    case = CASE["timm-vit"]
    model = case.make()
    ac.condition(model, ac.Precondition())
    want = ac.diagnose(model, case.run).rows[1].values
    # As on a GPU that they suit; only they must not be asked.
    monkeypatch.setattr(kernels, "suit_short", lambda *_: kernels.ENABLED)
    monkeypatch.setattr(kernels, "short_attention", None)
    assert ac.diagnose(model, case.run).rows[1].values == want
    assert kernels.ENABLED
