"""Calls of torch functions as a mode sees them: kinds of functions, operands, exchanging one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from attncond.errors import UnsupportedAttentionError

PRODUCTS = frozenset(("matmul", "__matmul__", "bmm", "einsum", "baddbmm", "mm"))
ADDITIONS = frozenset(("add", "add_", "__add__", "__radd__", "__iadd__"))
JOINS = frozenset(("cat", "concat", "concatenate"))
DROPOUTS = frozenset(("dropout", "dropout1d", "dropout2d", "dropout3d", "native_dropout"))
CASTS = frozenset(("to", "type", "type_as", "float", "half", "bfloat16", "double"))
RESHAPES = frozenset(
    (
        *("transpose", "permute", "movedim", "swapaxes", "swapdims", "contiguous", "__getitem__"),
        *("mT", "T", "mH", "H"),
        *("reshape", "view", "view_as", "flatten", "unflatten", "squeeze", "unsqueeze"),
        *("expand", "expand_as", "narrow", "select", "chunk", "split", "unbind"),
    )
)
# What looks at an attention matrix without leading on to the values.
OBSERVERS = frozenset(("mean", "sum", "amax", "max", "argmax", "any", "all", "isnan", "detach"))


def tensors(result: Any) -> list[Tensor]:
    """The tensors in what a function returned: one, or those of a tuple or list."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, tuple | list):
        return [r for r in result if isinstance(r, Tensor)]
    return []


def operands_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call gets, in their order."""
    found: list[Tensor] = []
    for a in args:
        found += tensors(a)
    for a in kwargs.values():
        found += tensors(a)
    return found


def find(known: list[Any], operands: list[Tensor]) -> Any:
    """The entry whose tensor is among the operands."""
    for entry in reversed(known):
        for operand in operands:
            if entry.tensor is operand:
                return entry
    return None


def exchanged(
    args: tuple[Any, ...], kwargs: dict[str, Any], old: Tensor, new: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments with one tensor exchanged, also inside a list of tensors."""

    def changed(a: Any) -> Any:
        if a is old:
            return new
        return type(a)(new if b is old else b for b in a) if type(a) in (tuple, list) else a

    return tuple(changed(a) for a in args), {k: changed(a) for k, a in kwargs.items()}


def call_with(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    old: Tensor,
    new: Tensor,
) -> Any:
    """Call with one tensor exchanged."""
    args, kwargs = exchanged(args, kwargs, old, new)
    return func(*args, **kwargs)


def reshaped(
    func: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    old: Tensor,
    new: Tensor,
    result: Any,
) -> Any:
    """What the reshape of ``old`` to ``result`` makes of ``new``, which may lie otherwise."""
    if name == "contiguous":
        return new  # laid out anew, an expanded tensor would be written in full
    if name in ("view", "view_as") and result.dtype == old.dtype:
        return new.reshape(result.shape)
    return call_with(func, args, kwargs, old, new)


def channel_axis(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], matrix: Tensor) -> int:
    """The axis of ``matrix @ value`` (or of the transposed product) that only the values have."""
    if name != "einsum":
        return -1 if operands_of(args, kwargs)[-2] is matrix else -2  # baddbmm has one before
    terms, arrow, result = args[0].replace(" ", "").partition("->")
    if not arrow:
        raise UnsupportedAttentionError(
            f"the einsum '{args[0]}' does not say where its axes go; write them after an arrow"
        )
    own = terms.split(",")[[a is matrix for a in operands_of(args[1:], {})].index(True)]
    letters = result.replace("...", ".")
    only = [i - len(letters) for i, c in enumerate(letters) if c not in own]
    if len(only) != 1:
        raise UnsupportedAttentionError(
            f"the einsum '{args[0]}' has no single axis of channels to equilibrate along"
        )
    return only[0]
