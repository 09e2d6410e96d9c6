"""Names of transformers' classes, so that the library need not be imported to register them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from attncond.adapters import Adapter, register

A = TypeVar("A", bound=Adapter)


def models(*names: str) -> Callable[[A], A]:
    """Register for ``folder.Class`` of ``transformers.models``."""
    return register(*map(qualified, names))


def qualified(name: str) -> str:
    """``gpt2.GPT2Attention`` -> ``transformers.models.gpt2.modeling_gpt2.GPT2Attention``.

    Where the file is not called after its folder, it stands before a colon.

    >>> qualified("esm.esmfold:EsmFoldSelfAttention")
    'transformers.models.esm.modeling_esmfold.EsmFoldSelfAttention'
    """
    folder, cls = name.split(".")
    file, _, cls = cls.rpartition(":")
    return f"transformers.models.{folder}.modeling_{file or folder}.{cls}"
