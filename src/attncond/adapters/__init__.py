"""The registry: which class keeps its Q, K and V where.

Fused weights are only ever read by an adapter registered for their class, because their order
cannot be seen from outside. Separate projections may be matched by their names and shapes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import nn

from attncond.sites import Site

# None says nothing about a module, () that there is no attention in it, nor in what it holds.
Adapter = Callable[[Any], Site | Iterable[Site] | None]
A = TypeVar("A", bound=Adapter)

_REGISTRY: dict[str, Adapter] = {}
_LIBRARIES = (
    "torch",
    "timm",
    "transformers",
    "torchvision",
    "diffusers",
    "vit_pytorch",
    "lucidrains",
)
_loaded = False


def register(*classes: type[nn.Module] | str) -> Callable[[A], A]:
    """Teach attncond an attention class. The function gets the module and returns its site.

    Classes may be given as qualified names, so that their library need not be imported.
    A subclass inherits the adapter of its nearest registered base. Registering a class again
    replaces the adapter.

    >>> import attncond as ac
    >>> class MyAttention(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.heads, self.to_qkv = 4, nn.Linear(32, 96)
    >>> @ac.register(MyAttention)
    ... def my_attention(module):
    ...     return ac.fused(module.to_qkv, "qkv", heads=module.heads)
    >>> len(ac.inspect(MyAttention()).sites)
    1
    """
    wrong = [cls for cls in classes if not isinstance(cls, type | str)]
    if wrong or not classes:
        given = ", ".join(map(repr, wrong)) or "nothing"
        raise TypeError(
            "register needs the class of an attention, or its qualified name, such as "
            f"@ac.register(MyAttention); it was given {given}"
        )

    def add(adapter: A) -> A:
        for cls in classes:
            key = cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}"
            _REGISTRY[key] = adapter
        return adapter

    return add


def find_adapter(module: nn.Module) -> Adapter | None:
    """The adapter of the module's class or of its nearest registered base."""
    global _loaded
    if not _loaded:
        user = dict(_REGISTRY)
        for library in _LIBRARIES:
            importlib.import_module(f"attncond.adapters.{library}")
        _REGISTRY.update(user)  # what a user registered first still wins
        _loaded = True
    for cls in type(module).__mro__:
        if adapter := _REGISTRY.get(f"{cls.__module__}.{cls.__qualname__}"):
            return adapter
    return None
