"""Follow the logits of attention to their softmax, and remember which keys masks hid on the way.

A mask cannot always be told from the logits that reach the softmax: one of -100 is no lower than
logits may be, one of -1e4 that was divided by √d neither. So what is visible is noted where the
mask comes in, and goes through what is done to the logits with them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from attncond.calls import (
    ADDITIONS,
    CASTS,
    EXTREMES,
    JOINS,
    OBSERVERS,
    ORDERS,
    PRODUCTS,
    REARRANGEMENTS,
    RESHAPES,
    SCALINGS,
    SUBTRACTIONS,
    SUMS,
    TorchCall,
    find,
    tensors,
)
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

    def shown(self) -> Tensor | None:
        """Which of its entries are of keys that their query sees; None: all are."""
        if not self.masked:  # however low they are
            return self.visible if self.visible is None else self.remembered()
        visible = _above(self.tensor, HIDDEN)
        return visible if self.visible is None else visible & self.visible

    def remembered(self) -> Tensor:
        """Which of its entries nothing is known to have hidden, whatever they are now."""
        if self.visible is None:
            return torch.ones_like(self.tensor, dtype=torch.bool)
        return self.visible.expand_as(self.tensor)


class FollowedLogits:
    """All logits of one forward so far.

    ``hidden``: an additive mask below this hides its key.
    """

    def __init__(self, hidden: float) -> None:
        self.hidden = hidden
        self.known: list[Logits] = []
        self.written = False  # into logits, which may have views

    def among(self, operands: list[Tensor]) -> Logits | None:
        """The logits among the operands; those with keys in all columns, before those with sinks.

        Masks may be products and joined, as BigBird's are. What they are added to tells the keys.
        """
        latest: Logits | None = find(self.known, operands)
        if latest is None or not latest.sinks:
            return latest
        for operand in operands:
            other: Logits | None = find(self.known, [operand])
            wide = operand.shape[-1] == latest.tensor.shape[-1]
            if other is not None and wide and not other.sinks:
                return other
        return latest

    def wary(self, logits: Logits) -> Logits:
        """The same, masked where a mask may have come in unseen: through a view, or compiled."""
        return logits._replace(
            masked=logits.masked or self.written or torch.compiler.is_compiling()
        )

    def run(self, call: TorchCall, logits: Logits | None) -> Any:
        """Run a call and follow what comes of it. ``logits``: those among its operands."""
        name, operands = call.name, call.operands()
        if logits is not None and (
            (name in SUBTRACTIONS and operands[0] is logits.tensor)
            or (name in SCALINGS and logits.masked)
        ):
            # Less its maximum, a row that is hidden as a whole could not be told from an open one,
            # and a mask of -1e4 that is divided by √d not from a bias.
            logits = logits._replace(visible=self.wary(logits).shown())
        into = call.target if call.target is not None else call.kwargs.get("out")
        if logits is not None and into is not None and name not in SCALINGS:
            self.written = True
        result = call.run()
        if name in PRODUCTS and (logits is not None or not call.projects):
            added = name == "baddbmm" and self.hidden > HIDDEN
            shown = _above(operands[0], self.hidden).expand_as(result) if added else None
            masked = name == "baddbmm" or logits is not None
            self.known.append(Logits(result, shown, masked=masked))
        elif logits is not None:
            self._follow(logits, call, result)
        return result

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
        joined = name in JOINS or name == "stack"
        if joined:
            parts = [find(self.known, [o]) or _beside(o, name in JOINS) for o in operands]
            sinks = any(p.sinks for p in parts)
            if any(p.visible is not None for p in parts):
                keys = [p.remembered() for p in parts]
                visible = call.func(keys, *call.args[1:], **call.kwargs)
        elif name == "__setitem__":
            whole, index, value = call.args
            whole = find(self.known, [whole]) or Logits(whole, None)
            part = find(self.known, [value])
            if whole.visible is not None or (part and part.visible is not None):
                visible = whole.remembered().clone()
                visible[index] = part.remembered() if part else True
        elif name in ("scatter", "scatter_") and visible is not None:  # the largest, put back
            known = [find(self.known, [o]) or Logits(o, None) for o in operands]
            for part in known:
                if part.tensor.is_floating_point():
                    call = call.exchanged(part.tensor, part.remembered().clone())
            visible = call.run() if len(operands) > 2 else visible
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
        if joined:
            masked = sinks or any(p.masked for p in parts)
        for i, part in enumerate(call.made(result)):
            shown = visible[i] if isinstance(visible, tuple | list) else visible
            self.known.append(Logits(part, shown, sinks, masked))


def _beside(other: Tensor, columns: bool) -> Logits:
    """What is joined with logits: ``columns`` of its own are no keys'."""
    hidden = torch.zeros_like(other, dtype=torch.bool) if columns else None
    return Logits(other, hidden, columns, masked=True)


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
