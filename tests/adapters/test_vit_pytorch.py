"""Every attention of vit-pytorch that is read, and the package's main models as a whole."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor, nn

import attncond as ac
from attncond.adapters.vit_pytorch import FUSED, KEY_VALUE

GIVEN: dict[str, Any] = {
    "dim": 24,
    "heads": 3,
    "num_heads": 3,
    "dim_head": 6,
    "dim_context": 20,
    "cross_attend": True,
    "window_size": 4,
}
SHAPES = {
    "mobile_vit": (2, 4, 5, 24),
    "nest": (2, 24, 4, 4),
    "max_vit": (2, 1, 1, 4, 4, 24),
    "simple_vit_with_relative_proj_pos_bias": (2, 4, 4, 24),
}
NORMALISED = {"na_vit": "qk", "simple_vit_with_qk_norm": "qk", "vit_5": "qk"}


class StandIn(nn.Module):
    """The arithmetic of most of them, where the package is not installed."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.heads, self.norm = 3, nn.LayerNorm(24)
        if fused:
            self.to_qkv = nn.Linear(24, 90, bias=False)
        else:
            self.to_q, self.to_kv = nn.Linear(24, 30, bias=False), nn.Linear(24, 60, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        one = hasattr(self, "to_qkv")
        qkv = self.to_qkv(x).chunk(3, -1) if one else (self.to_q(x), *self.to_kv(x).chunk(2, -1))
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in qkv)
        return (q @ k.mT * 0.3).softmax(-1) @ v


@pytest.mark.parametrize("fused", [True, False])
def test_where_the_package_is_not_installed(fused: bool) -> None:
    names = {
        "__module__": "vit_pytorch." + ("vit" if fused else "cait"),
        "__qualname__": "Attention",
    }
    model = oracle.prepare(type("Attention", (StandIn,), names)(fused))
    (verdict,) = oracle.check(model, lambda: model(torch.randn(2, 5, 24, dtype=torch.float64)))
    assert set(verdict.levels.values()) == {"values"}


def build(module: str, cls: str = "Attention") -> nn.Module:
    pytest.importorskip("vit_pytorch")
    found: Any = getattr(importlib.import_module(f"vit_pytorch.{module}"), cls)
    taken = inspect.signature(found.__init__).parameters
    return oracle.prepare(found(**{k: v for k, v in GIVEN.items() if k in taken}))


@pytest.mark.parametrize("module", [*FUSED, *KEY_VALUE])
def test_each_attention(module: str) -> None:
    model = build(module)
    x = torch.randn(SHAPES.get(module, (2, 5, 24)), dtype=torch.float64)
    more = [torch.randn(2, 4, 20, dtype=torch.float64)] if module.startswith("vat") else []

    def run() -> Tensor:
        out = model(x, *more)
        return out if isinstance(out, Tensor) else out[0]

    (verdict,) = oracle.check(model, run, transformed=NORMALISED.get(module, ""))
    assert verdict.levels["v"] == "values"
    assert ac.inspect(model).sites[0].kind == ("cross" if more else "self")
    for method in (ac.RemoveGap(), ac.Precondition()):
        before = run()
        handle = ac.condition(model, method)
        assert not torch.allclose(run(), before)
        handle.remove()
        assert torch.equal(run(), before)


def test_cross_covariance() -> None:
    model = build("xcit", "XCAttention")
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    oracle.check(model, lambda: model(x), transformed="qk")
    assert ac.inspect(model).sites[0].kind == "cross-covariance"


def models() -> dict[str, Callable[[], nn.Module]]:
    vit = pytest.importorskip("vit_pytorch")
    cait = importlib.import_module("vit_pytorch.cait")
    common: dict[str, Any] = {"image_size": 16, "patch_size": 4, "num_classes": 5, "dim": 24}
    common |= {"depth": 2, "heads": 3, "mlp_dim": 32, "dim_head": 6}
    return {
        "vit": lambda: vit.ViT(**common),
        "simple": lambda: vit.SimpleViT(**common),
        "cait": lambda: cait.CaiT(**common, cls_depth=1),
    }


@pytest.mark.parametrize("name", ["vit", "simple", "cait"])
def test_models(name: str) -> None:
    model = oracle.prepare(models()[name]())
    image = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    assert len(oracle.check(model, lambda: model(image))) == (3 if name == "cait" else 2)
    handle = ac.condition(model, ac.Spectral())
    conditioned = model(image)
    handle.fold()
    torch.testing.assert_close(model(image), conditioned)
