"""Which tensors of a forward pass depend on queries, keys and values, and which logits simply do.

The closed form of the Jacobian is for logits that are a multiple of q·kᵀ plus something that no
weight moves. What a module computes between the product and its softmax is followed here, one
function at a time; whatever is not known to keep that form loses it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from attncond.calls import ADDITIONS, CASTS, MAKERS, PRODUCTS, RESHAPES, TURNS, TorchCall, tensors
from attncond.sites import HIDDEN

__all__ = ["Dependence", "Multiple"]

_MULTIPLY = frozenset(("mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__"))
_DIVIDE = frozenset(("div", "div_", "divide", "true_divide", "__truediv__", "__itruediv__"))
_HIDE = frozenset(("masked_fill", "masked_fill_"))
# Logits that are turned over do not lie as their product does.
_KEEP = ((CASTS | RESHAPES) - TURNS - {"detach"}) | {"dropout"}


class Multiple(NamedTuple):
    """Logits that are ``factor`` times the product ``left @ right``, plus what is fixed."""

    left: Tensor | None
    right: Tensor | None
    whole: Tensor  # the product itself, where its operands are not known
    factor: float

    def product(self) -> Tensor:
        """q·kᵀ as the module computed it."""
        if self.left is None or self.right is None:
            return self.whole
        return self.left @ self.right


class Dependence:
    """Follows one forward of one attention; tensors are held weakly."""

    def __init__(self) -> None:
        self._derived = WeakIdKeyDictionary()
        self._multiples = WeakIdKeyDictionary()

    def fixed(self, tensor: Tensor | None) -> bool:
        """Whether no projection of this attention had a part in it."""
        return tensor is None or tensor not in self._derived

    def multiple(self, logits: Tensor) -> Multiple | None:
        """What is known of logits, if they are of the simple kind."""
        found: Multiple | None = self._multiples.get(logits)
        return found

    def note(self, call: TorchCall, result: Any, new: bool) -> None:
        """One function was called; ``new`` where it is a projection itself."""
        operands = call.operands()
        if call.name in MAKERS:
            return
        if not new and not any(o in self._derived for o in operands):
            return
        results = operands[:1] if call.name == "__setitem__" else tensors(result)
        multiple = None if new else self._after(call, operands, results)
        for part in results:
            self._derived[part] = True
            self._multiples.pop(part, None)  # it may have been changed in place
            if multiple is not None:
                self._multiples[part] = multiple

    def _after(
        self, call: TorchCall, operands: list[Tensor], results: list[Tensor]
    ) -> Multiple | None:
        _, name, args, kwargs = call
        if name in PRODUCTS and results:
            return self._product(call, results[0])
        if not args or not isinstance(args[0], Tensor):
            return None
        known = self.multiple(args[0])
        if known is None and name in ADDITIONS and len(operands) == 2:
            args, known = (args[1], args[0]), self.multiple(operands[1])  # mask + logits
        others = [o for o in operands if o is not args[0]]
        twice = len(operands) - len(others) > 1  # logits + logits
        if known is None or twice or any(o in self._derived for o in others):
            return None
        if name in _KEEP or (name in ADDITIONS and "alpha" not in kwargs):
            return known
        if name in _MULTIPLY | _DIVIDE and len(args) == 2:
            number = _number(args[1])
            if number is None or number == 0:
                return None
            factor = known.factor * number if name in _MULTIPLY else known.factor / number
            return known._replace(factor=factor)
        if name in _HIDE:
            value = _number(kwargs["value"] if "value" in kwargs else args[-1])
            return known if value is not None and value <= HIDDEN else None
        return None

    def _product(self, call: TorchCall, result: Tensor) -> Multiple | None:
        if call.name != "baddbmm":
            return Multiple(None, None, result, 1.0)
        named = dict(zip(("input", "batch1", "batch2"), call.args, strict=False)) | call.kwargs
        if not self.fixed(named["input"]):
            return None
        return Multiple(
            named["batch1"], named["batch2"], result, float(call.kwargs.get("alpha", 1))
        )


def _number(value: Any) -> float | None:
    """A factor that is the same for all logits."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, Tensor) and value.numel() == 1 and value.dtype != torch.bool:
        return float(value)
    return None
