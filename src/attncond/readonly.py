"""The tensor that an effective weight is read as: it computes as any other, and refuses writes.

So do all that share its memory: its views, its ``data`` and what is detached from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from attncond.errors import ConditioningError

_TRACERS = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)


def tracing() -> bool:
    """Whether a graph is made (torch.compile, export, make_fx), or shapes alone (FakeTensorMode).

    Tensors have no types of ours there: compiled code has no need of them, the others refuse them.
    """
    return torch.compiler.is_compiling() or any(
        torch._C._get_dispatch_mode(key) is not None for key in _TRACERS
    )


class EffectiveWeight(torch.Tensor):
    """An effective weight outside of compiled code: reads as a tensor, refuses to be written.

    It is computed anew at each access, so that a write (``nn.init``, ``.data``, ``copy_``) would be
    lost without a word; it raises instead.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # a file needs no attncond

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        # torch.nn.init passes the tensor it fills by keyword.
        written = [*args[:1], kwargs.get("tensor")] if _writes(name) else []
        if written and isinstance(written[0], list | tuple):  # torch._foreach_mul_ and the like
            written += written[0]
        if any(isinstance(a, cls) for a in (*written, kwargs.get("out"))):
            what = "setting an attribute" if name == "__set__" else name
            raise ConditioningError(
                f"{what} on the effective weight of a conditioned module would be lost: it is "
                "computed anew at each access. Change the raw parameter, which "
                "model.named_parameters() and module.get_parameter(name) give; condition the model "
                "after initialising it; or clone() what you want to keep."
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        return _guard_alias(func, result)


_PRODUCTS = frozenset(
    (
        *("linear", "conv1d", "conv2d", "conv3d", "matmul", "__matmul__", "__rmatmul__"),
        *("mm", "bmm", "addmm", "baddbmm", "einsum", "tensordot"),
    )
)
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


def _writes(name: str) -> bool:
    if name.startswith("__"):
        return name in ("__setitem__", "__set__") or (
            name.startswith("__i")
            and name not in ("__init__", "__invert__", "__index__", "__iter__")
        )
    return name.endswith("_")


def _guard_alias(func: Callable[..., Any], result: Any) -> Any:
    """Keep guarding what shares memory with the effective weight: its views and its ``data``."""
    if isinstance(result, tuple | list):
        return type(result)(_guard_alias(func, r) for r in result)
    name = getattr(func, "__name__", "")
    aliases = func == _DATA or name == "detach"
    # A product's result may be a view of a buffer of its own (torch before 2.12).
    view = isinstance(result, Tensor) and result._is_view() and name not in _PRODUCTS
    if isinstance(result, Tensor) and (aliases or view):
        return result.as_subclass(EffectiveWeight)
    return result
