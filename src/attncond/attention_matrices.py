"""Follow attention matrices from their softmax to the values, whatever is done to them between.

An attention matrix may stand for a difference that is not formed yet (:class:`Matrix`): P − U,
until it meets the values, because dropout acts on P alone and because weights that are returned to
the user should stay probabilities.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from attncond.calls import (
    ARITHMETIC,
    CASTS,
    CURVES,
    DROPOUTS,
    GUARDS,
    MULTIPLICATIONS,
    OBSERVERS,
    ORDERS,
    PRODUCTS,
    RESHAPES,
    SUMS,
    TorchCall,
    find,
)
from attncond.errors import UnsupportedAttentionError


class Matrix(NamedTuple):
    """An attention matrix, or what became of it, that stands for ``tensor − minus``.

    ``keys``: the axis that its softmax was taken over, from the end; None if that is not known.
    ``memory``: the same number for those that may share their entries, as a view does.
    ``curve``: the function that made another matrix of it, whose gap is not known.
    ``spread``: it was multiplied with something that has axes of its own, as values do.
    """

    tensor: Tensor
    minus: Tensor | None
    root: int  # which softmax it came from
    keys: int | None
    memory: int
    curve: str = ""
    spread: bool = False

    def value(self) -> Tensor:
        """The difference itself, in the tensor's dtype."""
        return self.tensor if self.minus is None else subtract(self.tensor, self.minus)


def subtract(a: Tensor, b: Tensor) -> Tensor:
    """a − b in the precision of b and the dtype of a, in the order in which a lies in memory."""
    if a.ndim == 4 and b.ndim == 4 and not a.is_contiguous() and a.transpose(1, 2).is_contiguous():
        # Kernels return (batch, tokens, heads, channels) as a transposed view. The compiler would
        # lay the difference out anew, and copy it once more for the output projection.
        return (a.transpose(1, 2) - b.transpose(1, 2)).to(a.dtype).transpose(1, 2)
    return (a - b).to(a.dtype)


class FollowedMatrices:
    """All attention matrices of one forward so far."""

    def __init__(self) -> None:
        self.known: list[Matrix] = []
        self.memories = 0
        self.overwritten: set[int] = set()  # memory of what was changed under its views
        self.missed = False  # values that it met entry by entry, in a product and a sum

    def begin(self, matrix: Tensor, minus: Tensor | None, root: int, softmax: TorchCall) -> None:
        """Follow ``matrix − minus``, what the softmax of number ``root`` gave."""
        keys = softmax.dim - matrix.ndim if softmax.dim >= 0 else softmax.dim
        self.known.append(Matrix(matrix, minus, root, keys, self._memory()))

    def among(self, operands: list[Tensor]) -> Matrix | None:
        """The matrix among the operands."""
        found: Matrix | None = find(self.known, operands)
        return found

    def check(self, call: TorchCall) -> None:
        """Refuse a call that reads what was overwritten through a view."""
        used = (find(self.known, [operand]) for operand in call.operands())
        if any(each is not None and each.memory in self.overwritten for each in used):
            # What it stands for less than its entries was changed with them, unknown to it.
            raise UnsupportedAttentionError(
                "a part of an attention matrix is overwritten through a view of it; assign to the "
                "part (attn[..., 0] = ...) or use masked_fill or where instead"
            )

    def meets_values(self, matrix: Matrix, call: TorchCall) -> bool:
        """Whether a call is the product of a matrix with values: one that sums over its keys."""
        if call.name not in PRODUCTS or matrix.keys not in (None, *call.summed(matrix.tensor)):
            return False
        if matrix.curve:
            raise UnsupportedAttentionError(
                f"an attention matrix goes through {matrix.curve} on its way to the values, "
                "which makes another matrix of it, whose gap is not known"
            )
        return True

    def run(self, call: TorchCall, matrix: Matrix) -> Any:
        """Run a call that a matrix is among the operands of, and follow what comes of it."""
        self.missed |= matrix.spread and call.name in SUMS
        if matrix.minus is not None and call.name in OBSERVERS:
            return call.run()
        minus: Any = matrix.minus
        if call.target is matrix.tensor and minus is not None:
            self.overwritten.add(matrix.memory)
        curve = matrix.curve
        if minus is not None and call.name in CURVES:
            result, minus, curve = call.run(), None, call.name
        elif call.name in DROPOUTS or (minus is not None and call.name in GUARDS):
            result = call.run()
        elif minus is not None and call.name in ORDERS:
            result = call.run()
            minus = minus.expand_as(matrix.tensor).gather(call.ordered, result.indices)
        elif call.name in CASTS or call.name in RESHAPES:
            result = call.run()
            if minus is not None:
                whole = minus.expand_as(matrix.tensor)
                minus = call.reshaped(matrix.tensor, whole, result)
        elif (
            minus is not None
            and call.name in ARITHMETIC
            and (call.target is None or call.target is matrix.tensor)
        ):
            formed = self._formed(call).run()
            result = call.run()  # afterwards, for it may write into the matrix
            minus = result - formed
        else:
            result, minus = self._formed_call(call), None
        for i, part in enumerate(call.made(result)):
            less = minus[i] if isinstance(minus, tuple | list) else minus
            keys = call.followed(matrix.keys, matrix.tensor, part)
            memory = matrix.memory if call.views(matrix.tensor, part) else self._memory()
            apart = matrix.keys is None and part.numel() > matrix.tensor.numel()
            spread = matrix.spread or (call.name in MULTIPLICATIONS and apart)
            self.known.append(Matrix(part, less, matrix.root, keys, memory, curve, spread))
        return result

    def _memory(self) -> int:
        """A number for entries that no other tensor has."""
        self.memories += 1
        return self.memories

    def _formed(self, call: TorchCall, but: Tensor | None = None) -> TorchCall:
        """The call with all differences among the operands formed: there may be several."""
        for operand in call.operands():
            found = find(self.known, [operand])
            if operand is not but and found is not None and found.minus is not None:
                call = call.exchanged(operand, found.value())
        return call

    def _formed_call(self, call: TorchCall) -> Any:
        """What comes of differences. One that is written into is formed where it lies."""
        target = call.target
        formed = self._formed(call, but=target)  # before what may be views of the target change
        found = None if target is None else find(self.known, [target])
        if found is not None and found.minus is not None:
            # Whoever holds this tensor expects it to be changed, not a copy.
            found.tensor.copy_(found.value())
            self.overwritten.add(found.memory)
            self.known.append(found._replace(minus=None, memory=self._memory()))
        return formed.run()
