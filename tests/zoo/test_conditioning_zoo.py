"""Condition, train and fold every tiny model: what the adapters read is also what can be changed.

The sites themselves are proven elsewhere, by the oracle. Here each model goes through the life of a
conditioned one: its outputs change, gradients reach the raw weights, and folding gives a stock
model with the same outputs.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")

import oracle  # noqa: E402
import torch  # noqa: E402
import transformers_inputs  # noqa: E402
from packaging.version import Version  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers_configs import CASES  # noqa: E402
from transformers_models import build  # noqa: E402
from zoo_models import TIMM, TIMM_NAMES, enliven, tensors, timm_model  # noqa: E402

import attncond as ac  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> None:
    transformers.logging.set_verbosity_error()


def observed(
    model: nn.Module, run: Callable[[], Any], unused: tuple[str, ...]
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """What a run returns, and what each call of an attention module returns in it."""
    torch.manual_seed(0)  # random masks and hashes are drawn in eval mode too
    random.seed(0)
    np.random.seed(0)
    inner: list[list[Tensor]] = []

    def note(_: nn.Module, __: Any, output: Any) -> None:
        inner.append(list(tensors(output)))

    modules = {id(s.module): s.module for s in ac.inspect(model) if s.path not in unused}
    hooks = [m.register_forward_hook(note) for m in modules.values()]
    output = run()
    for hook in hooks:
        hook.remove()
    return list(tensors(output)), inner


def distances(got: list[Tensor], wanted: list[Tensor]) -> list[float]:
    """The relative difference of each number of two runs, by its largest entry."""
    assert [t.shape for t in got] == [t.shape for t in wanted]
    assert all(t.isfinite().all() for t in (*got, *wanted))
    with torch.no_grad():
        return [
            float((a - b).abs().max() / b.abs().max().clamp_min(1e-300))
            for a, b in zip(got, wanted, strict=True)
        ]


def live_and_fold(
    model: nn.Module,
    run: Callable[[], Any],
    *,
    skip: bool = False,
    silent: bool = False,
    unused: tuple[str, ...] = (),
    tolerance: float = 1e-9,
) -> None:
    enliven(model)
    keys = list(model.state_dict())
    classes = [type(m) for m in model.modules()]
    stock, stock_inner = observed(model, run, unused)

    handle = ac.condition(model, ac.Spectral(), skip_unsupported=skip)
    output, inner = observed(model, run, unused)
    assert inner
    for now, before in zip(inner, stock_inner, strict=True):
        assert max(distances(now, before)) > 1e-3
    # Far above the tolerance of the last comparison below, or that one would prove nothing.
    assert silent or max(distances(output, stock)) > 100 * tolerance

    generator = torch.Generator().manual_seed(3)
    loss = torch.zeros((), dtype=torch.float64)
    parts = [*output, *itertools.chain(*inner)]
    for t in parts:  # the last layer may compute more than the model returns
        if t.requires_grad:
            loss = loss + (t * torch.randn(t.shape, generator=generator, dtype=t.dtype)).sum()
    loss.backward()
    reached = set()
    for site in ac.inspect(model):
        if site.path in unused:
            continue
        for p in site.projections:
            assert p.raw.grad is not None, f"{p.path}.{p.name}"
            gradient = p.matrix(p.raw.grad)
            assert gradient.isfinite().all(), f"{p.path}.{p.name}"
            if gradient.any():
                reached.add(p.role)
            else:  # attention to one token alone: the softmax is constant
                assert p.role != "v", f"{p.path}.{p.name}"
    assert reached == {p.role for site in ac.inspect(model) for p in site.projections}

    handle.fold()
    after, after_inner = observed(model, run, unused)
    assert max(distances([*after, *itertools.chain(*after_inner)], parts)) <= tolerance
    assert list(model.state_dict()) == keys
    assert [type(m) for m in model.modules()] == classes


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.sites])
def test_transformers(name: str) -> None:
    case = CASES[name]
    if Version(transformers.__version__) < Version(case.since):
        pytest.skip(f"came with transformers {case.since}")
    model = oracle.prepare(build(case.type or name, dict(case.config), case.head))
    given = case.inputs(model)
    run = (lambda: case.run(model)) if case.run else (lambda: model(**given))
    # Masks of these models are float32 constants, so that the whole model is.
    tolerance = 1e-4 if case.inputs is transformers_inputs.float32 else 1e-9
    live_and_fold(
        model,
        run,
        skip=bool(case.refused),
        silent=case.run is not None,  # such a run returns nothing, only its attention does
        unused=case.unused,
        tolerance=tolerance,
    )


@pytest.mark.parametrize("name", TIMM_NAMES)
def test_timm(name: str) -> None:
    model, x = timm_model(name)
    refused = {u.cls for u in ac.inspect(model).unsupported}
    assert refused <= set(TIMM.REFUSED)
    live_and_fold(model, lambda: model(x), skip=bool(refused))
