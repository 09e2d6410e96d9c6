"""Heads of two kinds, and heads that are shared in turns, in small classes of the same names."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch
from torch import Tensor, nn

import attncond as ac

CLASSES = (
    "performer_pytorch.performer_pytorch.Attention",
    "linear_attention_transformer.linear_attention_transformer.SelfAttention",
)


class Mixed(nn.Module):
    """Half of the heads are linear, the others have a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.to_q, self.to_k, self.to_v = (nn.Linear(12, 12) for _ in "qkv")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (4, 3)).transpose(1, 2).chunk(2, 1)
            for f in (self.to_q, self.to_k, self.to_v)
        )
        linear = q[0].softmax(-1) @ (k[0].softmax(-2).mT @ v[0])
        local = (q[1] @ k[1].mT).softmax(-1) @ v[1]
        return torch.cat((linear, local), 1).transpose(1, 2).flatten(2)


def mixed(name: str) -> Any:
    module, _, cls = name.rpartition(".")
    return type(cls, (Mixed,), {"__module__": module, "__qualname__": cls})()


@pytest.mark.parametrize("name", CLASSES)
def test_weights_are_conditioned_and_heads_are_refused(name: str) -> None:
    for method in (ac.RemoveGap(), ac.Precondition()):
        with pytest.raises(ac.UnsupportedAttentionError, match="linear attention"):
            ac.condition(mixed(name), method)
    model, x = mixed(name), torch.randn(2, 5, 12)
    handle = ac.condition(model, ac.Spectral())
    assert max(c.kappa for c in handle.certificates()) <= 2
    conditioned = model(x)
    handle.fold()
    torch.testing.assert_close(model(x), conditioned)


class Grouped(nn.Module):
    """As Attend repeats keys and values in x-transformers: "b kvh n d -> b (r kvh) n d"."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.kv_heads = 4, 2
        self.to_q, self.to_k, self.to_v = nn.Linear(12, 12), nn.Linear(12, 6), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (-1, 3)).transpose(1, 2) for f in (self.to_q, self.to_k, self.to_v)
        )
        k, v = (t.repeat(1, 2, 1, 1) for t in (k, v))
        return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)


def test_heads_that_take_keys_and_values_in_turns_are_measured_with_their_own() -> None:
    torch.manual_seed(0)
    names = {"__module__": "x_transformers.x_transformers", "__qualname__": "Attention"}
    model: Any = type("Attention", (Grouped,), names)().double()
    x = torch.randn(1, 5, 12, dtype=torch.float64)
    (verdict,) = oracle.check(model, lambda: model(x))
    assert set(verdict.levels.values()) == {"values"}
    rows = [r.values for r in ac.diagnose(model, x, loss="sum").rows if r.head is not None]
    for role, owner in (("k", model.to_k), ("v", model.to_v)):
        kappa = torch.linalg.cond(owner.weight.detach().view(2, 3, 12))
        assert [r[f"{role}_kappa"] for r in rows] == pytest.approx(kappa.repeat(2).tolist())
        model(x).sum().backward()
        norms = owner.weight.grad.view(2, -1).norm(dim=1)
        assert [r[f"{role}_grad_norm"] for r in rows] == pytest.approx(norms.repeat(2).tolist())
        model.zero_grad()
    assert {r["jacobian_status"] for r in rows} == {"dense"}
