"""Heads of two kinds, in a small class of the same names."""

from __future__ import annotations

from typing import Any

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
