"""Find logits, attention matrices and their products with values among the calls of a forward.

While the forward of a site runs, a :class:`Recognition` sees every torch function that it calls
(a TorchFunctionMode: of this thread, for this call; nothing is patched, and torch.compile traces
through it, so that the compiled graph holds the changed arithmetic and nothing of this file).

Two ways lead from queries, keys and values to a head's output:

- ``scaled_dot_product_attention``: one call, whose mask is at hand.
- ``softmax(q kᵀ + mask) v``, written out. Here tensors are followed by identity: a product is taken
  for logits, the softmax of logits for an attention matrix, the product of such a matrix with
  something else for the heads' output.

What is done to them is for a subclass to say: :mod:`attncond.interception` conditions them. An
attention matrix may stand for a difference that is not formed yet (:class:`Matrix`): P − U, until
it meets the values, because dropout acts on P alone and because weights that are returned to the
user should stay probabilities.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from attncond.calls import (
    ADDITIONS,
    ARITHMETIC,
    CASTS,
    CURVES,
    DROPOUTS,
    EXTREMES,
    GUARDS,
    JOINS,
    MAKERS,
    OBSERVERS,
    ORDERS,
    PRODUCTS,
    REARRANGEMENTS,
    RESHAPES,
    SCALINGS,
    SOFTMAXES,
    SUBTRACTIONS,
    SUMS,
    FusedAttention,
    TorchCall,
    find,
    tensors,
)
from attncond.errors import ConditioningError, UnsupportedAttentionError
from attncond.sites import HIDDEN


class Logits(NamedTuple):
    """A product of queries and keys, or what became of it, and which keys a mask left visible.

    ``sinks``: some of its columns are logits of no key (attention sinks), never visible.
    ``masked``: a mask may have come in.
    """

    tensor: Tensor
    visible: Tensor | None
    sinks: bool = False
    masked: bool = False

    def shown(self) -> Tensor:
        """Which of its entries are of keys that their query sees."""
        if not self.masked:  # however low they are
            return self.remembered()
        visible = _above(self.tensor, HIDDEN)
        return visible if self.visible is None else visible & self.visible

    def remembered(self) -> Tensor:
        """Which of its entries nothing is known to have hidden, whatever they are now."""
        if self.visible is None:
            return torch.ones_like(self.tensor, dtype=torch.bool)
        return self.visible.expand_as(self.tensor)


class Matrix(NamedTuple):
    """An attention matrix, or what became of it, that stands for ``tensor − minus``.

    ``keys``: the axis that its softmax was taken over, from the end; None if that is not known.
    ``memory``: the same number for those that may share their entries, as a view does.
    ``curve``: the function that made another matrix of it, whose gap is not known.
    """

    tensor: Tensor
    minus: Tensor | None
    root: int  # which softmax it came from
    keys: int | None
    memory: int
    curve: str = ""

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


class Recognition(TorchFunctionMode):
    """Finds the attention in one forward of one site, and changes nothing.

    ``hidden``: an additive mask below this hides its key. ``softmax``: the only one to be taken for
    one of attention, if not 0.
    """

    compiled = True  # as a whole, if at all

    def __init__(self, hidden: float, softmax: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.softmax = softmax
        self.softmaxes = 0
        self.logits: list[Logits] = []
        self.matrices: list[Matrix] = []
        self.overwritten: set[int] = set()
        self.written = False  # into logits, which may have views

    def _fused(self, attention: FusedAttention) -> Tensor:
        """The heads' outputs."""
        return attention.run()

    def _softmax(self, logits: Logits, call: TorchCall) -> Any:
        """The attention matrix, to be followed; ``softmaxes`` is its number."""
        matrix = call.run()
        self._made_matrix(matrix, None, call)
        return matrix

    def _made_matrix(self, matrix: Tensor, minus: Tensor | None, softmax: TorchCall) -> None:
        """Follow what a softmax gave."""
        keys = softmax.dim - matrix.ndim if softmax.dim >= 0 else softmax.dim
        self.matrices.append(Matrix(matrix, minus, self.softmaxes, keys, len(self.matrices)))

    def _product(self, matrix: Matrix, call: TorchCall) -> Tensor:
        """The attention matrix times the values."""
        output: Tensor = call.run()
        return output

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if torch.compiler.is_compiling() and not self.compiled:
            # It would have the change inside, and show the mode calls to change once more when it
            # runs. Dynamo leaves alone what raises, if it may.
            raise ConditioningError(
                "a part of a conditioned attention is compiled by itself with fullgraph=True: "
                "compile the module as a whole instead"
            )
        return self._called(TorchCall.of(func, args, kwargs or {}))

    def _called(self, call: TorchCall) -> Any:
        """What a call is to return instead of what it would."""
        if call.func is F.multi_head_attention_forward:
            with self:  # a function in Python, which reaches a mode as a whole
                return _multi_head_attention_forward(*call.args, **call.kwargs)
        if call.name == "scaled_dot_product_attention":
            return self._fused(FusedAttention(call.func, *call.args, **call.kwargs))
        name, operands = call.name, call.operands()
        if name in MAKERS:
            return call.run()
        if name in CASTS or name in RESHAPES:
            operands = operands[:1]  # value.type_as(matrix) makes no matrix of the value
        if (matrix := find(self.matrices, operands)) is not None:
            return self._use_matrix(matrix, call)
        logits = self._logits(operands)
        if logits is not None and name in SOFTMAXES and operands[0] is logits.tensor:
            logits = self._wary(logits)
            self.softmaxes += 1
            chosen = self.softmax in (0, self.softmaxes)
            return self._softmax(logits, call) if chosen else call.run()
        if logits is not None and (
            (name in SUBTRACTIONS and operands[0] is logits.tensor)
            or (name in SCALINGS and logits.masked)
        ):
            # Less its maximum, a row that is hidden as a whole could not be told from an open one,
            # and a mask of -1e4 that is divided by √d not from a bias.
            logits = logits._replace(visible=self._wary(logits).shown())
        into = call.target if call.target is not None else call.kwargs.get("out")
        if logits is not None and into is not None and name not in SCALINGS:
            self.written = True
        result = call.run()
        if name in PRODUCTS and (logits is not None or not call.projects):
            added = name == "baddbmm" and self.hidden > HIDDEN
            shown = _above(operands[0], self.hidden).expand_as(result) if added else None
            masked = name == "baddbmm" or logits is not None
            self.logits.append(Logits(result, shown, masked=masked))
        elif logits is not None:
            self._follow(logits, call, result)
        return result

    def _wary(self, logits: Logits) -> Logits:
        """The same, masked where a mask may have come in unseen: through a view, or compiled."""
        return logits._replace(
            masked=logits.masked or self.written or torch.compiler.is_compiling()
        )

    def _logits(self, operands: list[Tensor]) -> Logits | None:
        """The logits among the operands; those with keys in all columns, before those with sinks.

        Masks may be products and joined, as BigBird's are. What they are added to tells the keys.
        """
        latest: Logits | None = find(self.logits, operands)
        if latest is None or not latest.sinks:
            return latest
        for operand in operands:
            other: Logits | None = find(self.logits, [operand])
            wide = operand.shape[-1] == latest.tensor.shape[-1]
            if other is not None and wide and not other.sinks:
                return other
        return latest

    def _follow(self, logits: Logits, call: TorchCall, result: Any) -> None:
        """Keep an eye on what logits become on their way to the softmax."""
        name, operands = call.name, call.operands()
        visible: Any = logits.visible
        shape: Any = getattr(result, "shape", None)
        # Of a single key, the maximum has the shape of the logits; that of two tensors always has.
        single = name in EXTREMES and len(operands) == 1
        if name in OBSERVERS and (single or shape != logits.tensor.shape):
            if name not in SUMS or shape[-2:] != logits.tensor.shape[-2:]:
                return  # their maximum, which says nothing of keys
            if visible is not None:  # logits in parts, each of which may hide a key
                hidden = (~logits.remembered()).to(logits.tensor.dtype)
                visible = call.exchanged(logits.tensor, hidden).run() == 0
        sinks = logits.sinks and (name not in RESHAPES or _keeps_columns(call, logits, result))
        if logits.sinks and not sinks:
            visible = None  # positions are shifted so too, with a column of zeros
        if name in JOINS:
            parts = [
                find(self.logits, [o]) or Logits(o, torch.zeros_like(o, dtype=torch.bool), True)
                for o in operands
            ]
            sinks = any(p.sinks for p in parts)
            if any(p.visible is not None for p in parts):
                keys = [p.remembered() for p in parts]
                visible = call.func(keys, *call.args[1:], **call.kwargs)
        elif name == "__setitem__":
            whole, index, value = call.args
            whole = find(self.logits, [whole]) or Logits(whole, None)
            part = find(self.logits, [value])
            if whole.visible is not None or (part and part.visible is not None):
                visible = whole.remembered().clone()
                visible[index] = part.remembered() if part else True
        elif name == "pad":  # a column of zeros is a sink, too
            sinks, shown = True, torch.ones_like(logits.tensor, dtype=torch.bool)
            shown = shown if visible is None else visible.expand_as(shown)
            visible = F.pad(shown, call.args[1] if len(call.args) > 1 else call.kwargs["pad"])
        elif name in ADDITIONS and self.hidden > HIDDEN:
            # A mask of -100 cannot be told from the logits themselves, only where it comes in.
            for other in operands:
                if other is not logits.tensor:
                    shown = _above(other, self.hidden).expand_as(result)
                    visible = shown if visible is None else visible.expand_as(result) & shown
        elif name in ("masked_fill", "masked_fill_") and self.hidden > HIDDEN:
            mask, fill = (*call.args, *call.kwargs.values())[1:3]
            shown = (~mask | (fill > self.hidden)).expand_as(result)
            visible = shown if visible is None else visible.expand_as(result) & shown
        elif visible is not None and name in SUBTRACTIONS | SCALINGS:
            visible = visible.expand_as(result)
        elif visible is not None and name in RESHAPES | REARRANGEMENTS:
            visible = call.reshaped(logits.tensor, visible.expand_as(logits.tensor), result)
        elif visible is not None and name in ORDERS:
            visible = visible.expand_as(logits.tensor).gather(call.ordered, result.indices)
        masked = logits.masked or name not in CASTS | RESHAPES | REARRANGEMENTS | SCALINGS
        if name in JOINS:
            masked = sinks or any(p.masked for p in parts)
        for i, part in enumerate(_made(call, result)):
            shown = visible[i] if isinstance(visible, tuple | list) else visible
            self.logits.append(Logits(part, shown, sinks, masked))

    def _use_matrix(self, matrix: Matrix, call: TorchCall) -> Any:
        used = (find(self.matrices, [operand]) for operand in call.operands())
        if any(each is not None and each.memory in self.overwritten for each in used):
            # What it stands for less than its entries was changed with them, unknown to it.
            raise UnsupportedAttentionError(
                "a part of an attention matrix is overwritten through a view of it; assign to the "
                "part (attn[..., 0] = ...) or use masked_fill or where instead"
            )
        if call.name in PRODUCTS and matrix.keys in (None, *call.summed(matrix.tensor)):
            if matrix.curve:
                raise UnsupportedAttentionError(
                    f"an attention matrix goes through {matrix.curve} on its way to the values, "
                    "which makes another matrix of it, whose gap is not known"
                )
            return self._product(matrix, call)
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
        for i, part in enumerate(_made(call, result)):
            less = minus[i] if isinstance(minus, tuple | list) else minus
            keys = call.followed(matrix.keys, matrix.tensor, part)
            memory = matrix.memory if call.views(matrix.tensor, part) else len(self.matrices)
            self.matrices.append(Matrix(part, less, matrix.root, keys, memory, curve))
        return result

    def _formed(self, call: TorchCall, but: Tensor | None = None) -> TorchCall:
        """The call with all differences among the operands formed: there may be several."""
        for operand in call.operands():
            found = find(self.matrices, [operand])
            if operand is not but and found is not None and found.minus is not None:
                call = call.exchanged(operand, found.value())
        return call

    def _formed_call(self, call: TorchCall) -> Any:
        """What comes of differences. One that is written into is formed where it lies."""
        target = call.target
        formed = self._formed(call, but=target)  # before what may be views of the target change
        found = None if target is None else find(self.matrices, [target])
        if found is not None and found.minus is not None:
            # Whoever holds this tensor expects it to be changed, not a copy.
            found.tensor.copy_(found.value())
            self.overwritten.add(found.memory)
            self.matrices.append(found._replace(minus=None, memory=len(self.matrices)))
        return formed.run()


def _made(call: TorchCall, result: Any) -> list[Tensor]:
    """The tensors that a call made: what it returned, or what it wrote into.

    Those that are no real numbers (which keys are the largest, or above a threshold) carry nothing.
    """
    made = [call.args[0]] if call.name == "__setitem__" else tensors(result)
    return [m for m in made if m.is_floating_point()]


def _keeps_columns(call: TorchCall, logits: Logits, result: Any) -> bool:
    """Whether a reshape leaves the last axis whole, wherever it puts it."""
    columns = logits.tensor.shape[-1]
    axes = [(part, call.followed(-1, logits.tensor, part)) for part in tensors(result)]
    return all(axis is not None and part.shape[axis] == columns for part, axis in axes)


def _above(logits: Tensor, hidden: float) -> Tensor:
    """Which keys are not hidden. NaN hides none, or a query of a broken model would get zeros."""
    return ~(logits.detach() <= hidden)


def visible_keys(mask: Tensor, hidden: float, keys: int) -> Tensor:
    """Which keys a mask of scaled_dot_product_attention leaves to each query."""
    visible = mask if mask.dtype == torch.bool else _above(mask, hidden)
    return visible.expand(*mask.shape[:-1], keys)  # one column may stand for all keys


def _check_key_padding_mask(mask: Tensor, keys: int, batch: int) -> None:
    """As in torch.nn.functional, where its messages keep torch.compile from one graph."""
    if mask.shape[0] != batch or mask.shape[1] != keys:
        raise AssertionError(
            f"Expected key_padding_mask of shape {(batch, keys)}, but got {tuple(mask.shape)}"
        )


def _see_through(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function of torch.nn.functional that never hands itself to a mode as a whole."""
    scope = {k: v for k, v in vars(F).items() if k != "__name__"}  # or dynamo looks there instead
    scope["has_torch_function"] = lambda _: False
    scope["_check_key_padding_mask"] = _check_key_padding_mask
    copy = types.FunctionType(
        function.__code__, scope, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_multi_head_attention_forward = _see_through(F.multi_head_attention_forward)
