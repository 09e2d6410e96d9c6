"""Modules of classes of their own, with parts under given names."""

from __future__ import annotations

from torch import nn


def named(cls: str, *names: str) -> nn.Module:
    """A module with a linear layer under each of some names."""
    return holding(cls, **{name: nn.Linear(4, 12) for name in names})


def holding(cls: str, **parts: nn.Module | nn.Parameter) -> nn.Module:
    """A module of a class of its own with some parts."""
    module: nn.Module = type(cls, (nn.Module,), {})()
    for name, part in parts.items():
        setattr(module, name, part)
    return module


def with_heads(module: nn.Module) -> nn.Module:
    """The same, of two heads."""
    module.num_heads = 2
    return module
