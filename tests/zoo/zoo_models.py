"""The small models that the adapters are proven with, ready to be conditioned."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn


def adapter_cases(library: str) -> ModuleType:
    """The tests of a library's adapters, for the models in them."""
    path = Path(__file__).parents[1] / "adapters" / f"test_{library}.py"
    spec = importlib.util.spec_from_file_location(f"{library}_cases", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TIMM = adapter_cases("timm")
TIMM_NAMES = [*TIMM.MODELS, *TIMM.LAYERS]


def timm_model(name: str) -> tuple[nn.Module, Tensor]:
    """A model or a layer of timm, and what it takes."""
    if name in TIMM.MODELS:
        make, size, *_ = TIMM.MODELS[name]
        shape: tuple[int, ...] = (2, 3, size, size)
    else:
        make, shape, *_ = TIMM.LAYERS[name]
    generator = torch.Generator().manual_seed(1)
    return TIMM.build(make), torch.randn(shape, dtype=torch.float64, generator=generator)


def enliven(model: nn.Module) -> None:
    """Scale up what starts near zero, so that attention matters to the output as in trained models.

    Layer scales start at 1e-6, and some models initialise all of their weights with 1e-10.
    """
    with torch.no_grad():
        for p in model.parameters():
            if not p.is_floating_point() or not p.any():
                continue
            size = p.square().mean().sqrt()
            wanted = 0.5 * p[0].numel() ** -0.5 if p.ndim > 1 else 0.1
            if size < wanted:
                p.mul_(wanted / size)


def tensors(output: Any) -> Iterator[Tensor]:
    """All real numbers in what a module returns."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from tensors(value)
