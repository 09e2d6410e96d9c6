"""Condition the attention inside a module's own forward: what is done to what is found there.

:mod:`attncond.recognition` finds it; an :class:`Interception` changes it, and sees to it that every
site was reached:

- ``scaled_dot_product_attention``: its output is changed, so the fused kernels stay in use and no
  attention matrix is formed.
- ``softmax(q kᵀ + mask) v``, written out: the uniform part U goes with the attention matrix P until
  they meet the values, and the rows of that product are equilibrated.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from attncond import kernels
from attncond.attention_logits import Logits, visible_keys
from attncond.attention_matrices import Matrix, subtract
from attncond.calls import FusedAttention, TorchCall
from attncond.errors import ConditioningError, UnsupportedAttentionError
from attncond.methods.gap import RemoveGap, centre, uniform, visible_mean
from attncond.methods.precondition import Precondition
from attncond.recognition import Recognition


class Interception(Recognition):
    """Changes the attention of one forward of one site.

    ``expected``: how many heads' outputs there have to be at the least. ``compiled``: whether the
    forward is being compiled, as a whole, and not run.
    """

    def __init__(
        self,
        gap: RemoveGap | None,
        precondition: Precondition | None,
        hidden: float,
        softmax: int,
        expected: int,
        path: str,
        compiled: bool = False,
    ) -> None:
        super().__init__(hidden, softmax)
        self.gap = gap
        self.precondition = precondition
        self.expected = expected
        self.path = path
        self.compiled = compiled
        self.acted = 0
        self.differentiated = torch.is_grad_enabled()
        self.multiplied: list[int] = []

    # As in the base class, but Dynamo goes on after a graph break under modes that have no others,
    # and leaves the whole forward alone under those that have.
    def __enter__(self) -> Self:
        enter: Callable[[], None] = super().__enter__
        enter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        leave: Callable[..., None] = super().__exit__
        leave(kind, error, trace)

    def check(self) -> None:
        """Raise if not every attention of the site was changed in this forward pass."""
        if self.matrices.missed:
            raise UnsupportedAttentionError(
                f"the attention of {self.path or 'the model'} meets values entry by entry "
                "((attn.unsqueeze(-1) * values).sum(-2)), where nothing would be conditioned; "
                "write it with matmul or einsum"
            )
        if self.acted < self.expected:
            raise ConditioningError(
                f"the attention of {self.path or 'the model'} was not reached in this forward pass "
                f"({self.acted} of {self.expected} heads' outputs seen), so that nothing would be "
                "conditioned there. attncond sees scaled_dot_product_attention and softmax "
                "attention written with matmul, bmm or einsum; kernels of other packages "
                "(flash_attn, xformers, FlexAttention) hide it: choose another implementation, "
                "e.g. attn_implementation='sdpa' in transformers. Linear attention has no softmax, "
                "and nothing to condition."
            )

    def _act(self) -> None:
        """Count a head's output, and refuse one that the backward pass would compute otherwise."""
        self.acted += 1
        self._check_backward(functions=True)

    def _check_backward(self, functions: bool) -> None:
        """Refuse what autograd does not see; ``functions`` that are differentiated by hand, too."""
        if not self.differentiated or torch.compiler.is_compiling():
            return
        if (reason := _backward_apart(functions)) is not None:
            raise ConditioningError(f"the forward of {self.path or 'the model'} {reason}")

    def _fused(self, attention: FusedAttention) -> Tensor:
        if attention.query.is_nested or attention.value.is_nested:
            raise nested(self.path)
        if self.gap is not None and _keys_apart(attention.value):
            raise ConditioningError(
                f"the keys of {self.path or 'the model'} are split among processes (context "
                "parallelism), none of which has the mean of all values that RemoveGap subtracts"
            )
        attention = attention.with_plain_mask()
        gap, mask, causal = self.gap is not None, attention.attn_mask, attention.is_causal
        acts = gap or self.precondition is not None
        plain = mask is None and not attention.dropout_p
        if acts and plain and not causal and kernels.suit_short(*attention.operands):
            self._act()
            return kernels.short_attention(
                *attention.operands, attention.scale, gap, self.precondition
            )
        visible = seen = mean = None
        if mask is not None:
            visible = visible_keys(mask, self.hidden, attention.key.shape[-2])
            seen = visible.any(-1, keepdim=True)
            # Kernels disagree on a row that sees nothing (NaN, zeros, the mean of all values), and
            # its gradient may be NaN: let it see everything, and make it zero afterwards.
            opened = (
                mask | ~seen
                if mask.dtype == torch.bool
                else torch.where(seen, mask, torch.zeros_like(mask))
            )
            attention = attention._replace(attn_mask=opened)
        if gap and plain and causal and kernels.suit_causal(*attention.operands):
            output = kernels.causal_attention(*attention.operands, attention.scale)
        else:
            if gap:
                mean, attention = self._mean(attention, visible)
            output = attention.run()
        self._act()
        if mean is not None:
            output = subtract(output, mean)
        if gap and self.precondition is not None and attention.dropout_p == 0.0:
            # A query that sees one key has nothing left but rounding, which must not get length 1.
            alone = _sees_one(attention, visible)
            output = torch.where(alone, torch.zeros_like(output), output)
        if seen is not None:
            output = torch.where(seen, output, torch.zeros_like(output))
        return self._equilibrated(output, -1)

    def _mean(
        self, attention: FusedAttention, visible: Tensor | None
    ) -> tuple[Tensor | None, FusedAttention]:
        """What to subtract from the output, and what to run to get it.

        Where all queries see the same keys and no weight is dropped, P(V − mean) is the same, is
        cheaper, and rounds the difference instead of what it is the difference of.
        """
        query, value, causal = attention.query, attention.value, attention.is_causal
        groups = query.shape[-3] // value.shape[-3] if attention.enable_gqa else 1
        by_head = groups > 1 and visible is not None and visible.ndim > 2 and visible.shape[-3] > 1
        alike = not causal and (visible is None or visible.shape[-2] == 1)
        if attention.dropout_p == 0.0 and alike and not by_head:
            return None, attention._replace(value=centre(value, visible))
        seen_by = value
        if by_head:
            seen_by, groups = value.repeat_interleave(groups, -3), 1
        mean = visible_mean(seen_by, query.shape[-2], causal=causal, visible=visible)
        return (mean.repeat_interleave(groups, -3) if groups > 1 else mean), attention

    def _softmax(self, logits: Logits, call: TorchCall) -> Any:
        """The attention matrix; a row that sees nothing becomes zero, and so do its gradients."""
        self._check_backward(functions=False)  # whose values may be met elsewhere
        dim, visible = call.dim, logits.shown()
        if visible is None:
            matrix: Tensor = call.run()
            keys = max(matrix.shape[dim], 1)
            minus = None if self.gap is None else matrix.new_full((), 1 / keys).expand_as(matrix)
        else:
            blind = ~visible.any(dim, keepdim=True)
            if torch.is_grad_enabled():  # the softmax of such a row would have gradients of NaN
                safe = logits.tensor.masked_fill(blind, 0)
                matrix = call.exchanged(logits.tensor, safe).run()
                del safe
                matrix = matrix.masked_fill(blind, 0)
            else:
                matrix = call.run().masked_fill_(blind, 0)
            minus = None if self.gap is None else uniform(visible, dim, matrix.dtype)
            if minus is not None and logits.sinks:
                # What the sink leaves to the keys, as if it were a gate on the head's output.
                minus = minus * (matrix * visible).sum(dim, keepdim=True)
        self._made_matrix(matrix, minus, call)
        return matrix

    def _product(self, matrix: Matrix, call: TorchCall) -> Tensor:
        """The attention matrix times the values."""
        if self.precondition is not None and matrix.root in self.multiplied:
            raise UnsupportedAttentionError(
                f"the heads' outputs of {self.path or 'the model'} are sums of several products "
                "with the attention matrix, so that no single one can be preconditioned"
            )
        self.multiplied.append(matrix.root)
        self._act()
        output: Tensor = call.exchanged(matrix.tensor, matrix.value()).run()
        if self.precondition is None:
            return output
        if matrix.keys is not None and len(call.summed(matrix.tensor)) > 1:
            raise UnsupportedAttentionError(
                f"the einsum '{call.args[0]}' of {self.path or 'the model'} sums over heads and "
                "keys at once, so that no head's output can be preconditioned"
            )
        output = self._equilibrated(output, call.channel_axis(matrix.tensor))
        out = call.kwargs.get("out")
        return output if out is None else out.copy_(output)

    def _equilibrated(self, output: Tensor, dim: int) -> Tensor:
        if self.precondition is None:
            return output
        if dim == -1 and output.ndim == 4 and output.transpose(1, 2).is_contiguous():
            # In the order in which it lies in memory, see subtract().
            return self.precondition.equilibrate(output.transpose(1, 2)).transpose(1, 2)
        return self.precondition.equilibrate(output, dim)


def _backward_apart(functions: bool) -> str | None:
    """Why autograd does not see what the forward that is under way computes now, if so."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") != "attncond.effective":
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return (
                "checkpoints its attention itself, which is then computed again in the backward "
                "pass, out of sight and without any conditioning. Turn that off, and checkpoint "
                "the module as a whole instead."
            )
        code = frame.f_code
        if functions and not torch.is_grad_enabled() and code.co_argcount:
            first = frame.f_locals.get(code.co_varnames[0])
            if isinstance(first, torch.autograd.function.FunctionCtx):
                return (
                    "computes its attention in a torch.autograd.Function, whose own backward pass "
                    "knows of no conditioning. Write it with differentiable functions instead."
                )
        frame = frame.f_back
    return None


def nested(path: str) -> ConditioningError:
    """What to raise where nested tensors come in."""
    return ConditioningError(
        f"nested tensors in the attention of {path or 'the model'} are not supported; "
        "use padded tensors and a mask, and enable_nested_tensor=False where nn.TransformerEncoder "
        "makes nested ones of those"
    )


def _keys_apart(value: Tensor) -> bool:
    """Whether each process holds the values of some keys alone."""
    return isinstance(value, DTensor) and any(p.is_shard(value.ndim - 2) for p in value.placements)


def _sees_one(attention: FusedAttention, visible: Tensor | None) -> Tensor:
    """Which queries see a single key: (..., queries or 1, 1)."""
    if visible is not None:
        return visible.sum(-1, keepdim=True) <= 1
    queries, keys = attention.query.shape[-2], attention.value.shape[-2]
    device = attention.value.device
    if attention.is_causal:
        return torch.arange(queries, device=device)[:, None] < (queries if keys == 1 else 1)
    return torch.full((1, 1), keys == 1, device=device)
