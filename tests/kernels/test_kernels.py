"""When the kernels are used, and that a model gives the same with and without them."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from functools import partial

import pytest
import torch
from naive import conditioned
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

import attncond as ac
from attncond import kernels
from attncond.heads import Heads

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")


class Attention(nn.Module):
    """Fused self-attention, causal or not."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = 2, causal
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(64, 64) for _ in range(3))
        self.proj = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
                 for p in (self.q_proj, self.k_proj, self.v_proj))  # fmt: skip
        out = scaled_dot_product_attention(*parts, is_causal=self.causal)
        return self.proj(out.transpose(1, 2).flatten(2))


@pytest.fixture(autouse=True)
def loaded() -> None:
    kernels.load()


@pytest.mark.parametrize("module", ["attncond.kernels.short", "torch._dynamo"])
def test_importing_attncond_loads_nothing_slow(module: str) -> None:
    code = f"import sys, attncond; print({module!r} in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_a_record_that_comes_from_elsewhere_loads_them(monkeypatch) -> None:
    if kernels.short is None:
        pytest.skip("no Triton, or a build without CUDA")
    sent = pickle.dumps(Heads(gap=ac.RemoveGap()))
    monkeypatch.setattr(kernels, "short", None)
    assert pickle.loads(sent) == Heads(gap=ac.RemoveGap())
    assert kernels.short is not None


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a card")
@pytest.mark.parametrize("causal", [False, True])
def test_a_fake_card_has_the_formulas(causal: bool) -> None:
    module = conditioned(partial(scaled_dot_product_attention, is_causal=causal), ac.RemoveGap())
    with FakeTensorMode():
        x = torch.empty(1, 2, 8, 16, dtype=torch.bfloat16, device="cuda")
        assert module(x, x, x).shape == x.shape


@pytest.mark.parametrize(("major", "suits"), [(8, False), (9, True), (10, True), (12, False)])
def test_cards_with_little_shared_memory_have_the_formulas(major, suits, monkeypatch) -> None:
    if kernels.short is None:
        pytest.skip("no Triton, or a build without CUDA")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, 0))
    assert kernels.short.is_hopper(0) is suits


def test_a_cpu_has_the_formulas() -> None:
    x = [torch.randn(1, 2, 8, 16, dtype=torch.bfloat16) for _ in range(3)]
    assert not kernels.suit_short(*x)
    assert not kernels.suit_causal(*x)


@cuda
@pytest.mark.parametrize(
    ("shape", "dtype", "suits"),
    [
        ((1, 2, 8, 16), torch.bfloat16, True),
        ((1, 2, 8, 16), torch.float16, True),
        ((1, 2, 8, 16), torch.float32, False),
        ((1, 2, 257, 16), torch.bfloat16, False),
        ((1, 2, 1, 16), torch.bfloat16, False),  # one key, no gap, and nothing to do
        ((1, 2, 8, 24), torch.bfloat16, False),
        ((2, 8, 16), torch.bfloat16, False),
    ],
)
def test_short_attention_is_for_few_keys_in_half_precision(shape, dtype, suits) -> None:
    x = [torch.randn(shape, device="cuda", dtype=dtype) for _ in range(3)]
    if torch.cuda.get_device_capability()[0] < 9:
        suits = False
    assert kernels.suit_short(*x) is suits
    assert not kernels.suit_short(x[0], x[1][:, :1], x[2][:, :1])  # grouped queries


@cuda
@pytest.mark.parametrize("how", ["eager", "compiled", "dynamic"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "methods",
    [(ac.RemoveGap(),), (ac.Precondition(),), (ac.RemoveGap(), ac.Precondition(detach=True))],
)
def test_a_model_gives_the_same_with_and_without(methods, causal, how, monkeypatch) -> None:
    torch.manual_seed(0)
    model = Attention(causal).cuda().bfloat16()
    for method in methods:
        ac.condition(model, method)
    run = model
    if how != "eager":
        torch._dynamo.reset()
        run = torch.compile(model, fullgraph=True, dynamic=how == "dynamic" or None)
    exact = copy.deepcopy(model).double()
    for tokens in (50, 77, 197):
        x = torch.randn(3, tokens, 64, device="cuda", dtype=torch.bfloat16)
        outcomes = []
        for net, call, enabled in ((model, run, True), (model, model, False), (exact, exact, True)):
            monkeypatch.setattr(kernels, "ENABLED", enabled)
            net.zero_grad()
            y = call(x.to(net.proj.weight.dtype))
            y.to(torch.promote_types(y.dtype, torch.float32)).square().sum().backward()
            outcomes.append([y, *(p.grad for p in net.parameters())])
        output, *grads = ([t.double() for t in each] for each in zip(*outcomes, strict=True))
        scale = max(c.norm() for _, _, c in grads)  # that of a key's bias is zero but for rounding
        for (ours, plain, right), size in (
            (output, output[2].norm()),
            *((g, scale) for g in grads),
        ):
            assert (ours - right).norm() <= max(1e-2 * size, 1.5 * (plain - right).norm())


@cuda
def test_nothing_is_saved_that_stock_attention_does_not_save() -> None:
    def saved(x: list[torch.Tensor], call) -> int:
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.append(t.numel() * t.element_size()), lambda _: None
        ):
            call(*x)
        return sum(kept)

    x = [torch.randn(4, 8, 197, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    x = [t.requires_grad_() for t in x]
    stock = saved(x, scaled_dot_product_attention)
    for precondition in (None, ac.Precondition()):
        ours = saved(
            x, lambda q, k, v, p=precondition: kernels.short_attention(q, k, v, None, True, p)
        )
        assert ours <= 1.02 * stock
