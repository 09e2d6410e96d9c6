"""The lines that a refusal prints work as they are, and are left out where they could not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from named_modules import holding, named
from torch import nn

import attncond as ac
from attncond import adapters


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    ac.inspect(nn.Identity())  # loads the adapters of the libraries
    monkeypatch.setattr(adapters, "_REGISTRY", dict(adapters._REGISTRY))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("to_kqv",), 'ac.fused(module.to_kqv, "kqv", {})'),
        (
            ("q", "kv"),
            'ac.join(ac.separate(module.q, None, None, {}), ac.fused(module.kv, "kv", {}))',
        ),
        (("query", "key"), "ac.separate(module.query, module.key, None, {})"),
        (
            ("to_q", "to_k", "to_v", "add_q", "add_k", "add_v"),
            "ac.separate(module.to_q, module.to_k, module.to_v, {}), "
            "ac.separate(module.add_q, module.add_k, module.add_v, {})",
        ),
    ],
)
def test_the_lines_to_register_have_the_names_of_the_class(
    names: tuple[str, ...], expected: str
) -> None:
    module = named("CrossAttention", *names, "to_out")
    module.num_heads = 2
    lines = str(ac.inspect(module)).splitlines()
    start = lines.index('    @ac.register("named_modules.CrossAttention")')
    expected = expected.replace("{}", "heads=module.num_heads")
    assert lines[start + 2] == f"        return {expected}"
    scope: dict[str, Any] = {"ac": ac}
    exec("\n".join(line[4:] for line in lines[start : start + 3]), scope)  # they work as they are
    assert ac.inspect(module).sites


def parameters(container: type[nn.Module] | None = None, **sizes: int) -> nn.Module:
    """Weights that are a module's own, or in a container that it holds under the name "proj"."""
    module = named("Layer")
    module.n_head = 2
    weights = {name: nn.Parameter(torch.randn(rows, 4)) for name, rows in sizes.items()}
    if container is None:
        for name, weight in weights.items():
            setattr(module, name, weight)
    elif container is nn.ParameterDict:
        module.proj = nn.ParameterDict(weights)
    else:
        module.proj = container({name: nn.Linear(4, rows) for name, rows in sizes.items()})
    return module


def in_sequences() -> nn.Module:
    module = holding("Layer", **{f"to_{r}": nn.Sequential(nn.Linear(4, 4)) for r in "qkv"})
    module.heads = 2
    return module


@pytest.mark.parametrize(
    ("make", "paths"),
    [
        (lambda: parameters(in_proj_weight=12), ["in_proj_weight"] * 3),
        (lambda: parameters(Wqkv=12), ["Wqkv"] * 3),
        (lambda: parameters(W_q=4, W_k=4, W_v=4), ["W_q", "W_k", "W_v"]),
        (lambda: parameters(w_q=4, w_kv=8), ["w_q", "w_kv", "w_kv"]),
        (lambda: parameters(nn.ModuleDict, q=4, k=4, v=4), [f"proj.{r}.weight" for r in "qkv"]),
        (lambda: parameters(nn.ParameterDict, q=4, k=4, v=4), [f"proj.{r}" for r in "qkv"]),
        (lambda: parameters(nn.ModuleDict, qkv=12), ["proj.qkv.weight"] * 3),
        (in_sequences, [f"to_{r}.0.weight" for r in "qkv"]),
    ],
)
def test_the_lines_to_register_work_as_they_are(
    make: Callable[[], nn.Module], paths: list[str]
) -> None:
    module = make()
    model = nn.ModuleDict({"known": nn.MultiheadAttention(4, 2), "own": module})
    (row,) = ac.inspect(model).unsupported
    assert '@ac.register("named_modules.Layer")' in row.adapter
    exec(row.adapter, {"ac": ac})
    plan = ac.inspect(model)
    assert not plan.unsupported
    assert [s.path for s in plan] == ["known", "own"]
    found = [f"{p.path}.{p.name}" for p in plan.sites[1].projections]
    assert found == [f"own.{path}" for path in paths]
    ac.condition(model, ac.Spectral()).fold()


@pytest.mark.parametrize(
    "module",
    [
        nn.ModuleList([nn.ModuleDict({r: nn.Linear(4, 4) for r in "qkv"})]),
        named("Attention", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    ],
)
def test_no_lines_to_register_where_none_could_help(module: nn.Module) -> None:
    # Of a container every other would be taken for attention; of latent attention, factors for W_K.
    plan = ac.inspect(nn.Sequential(module))
    (row,) = plan.unsupported
    assert row.adapter == ""
    assert "ac.register" not in str(plan)
    assert "docs/adapters.md" in str(plan)
