"""Find logits, attention matrices and their products with values among the calls of a forward.

While the forward of a site runs, a :class:`Recognition` sees every torch function that it calls
(a TorchFunctionMode: of this thread, for this call; nothing is patched, and torch.compile traces
through it, so that the compiled graph holds the changed arithmetic and nothing of this file).

Two ways lead from queries, keys and values to a head's output:

- ``scaled_dot_product_attention``: one call, whose mask is at hand.
- ``softmax(q kᵀ + mask) v``, written out. Here tensors are followed by identity: a product is taken
  for logits (:mod:`attncond.attention_logits`), the softmax of logits for an attention matrix
  (:mod:`attncond.attention_matrices`), the product of such a matrix with something else for the
  heads' output.

What is done to them is for a subclass to say: :mod:`attncond.interception` conditions them.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from attncond.attention_logits import FollowedLogits, Logits
from attncond.attention_matrices import FollowedMatrices, Matrix
from attncond.calls import CASTS, MAKERS, RESHAPES, SOFTMAXES, FusedAttention, TorchCall, held
from attncond.errors import ConditioningError


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
        self.logits = FollowedLogits(hidden)
        self.matrices = FollowedMatrices()

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
        self.matrices.begin(matrix, minus, self.softmaxes, softmax)

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
            if getattr(func, "__name__", "") == "flex_attention":
                return func(*args, **(kwargs or {}))  # which compiles itself, and hides attention
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
        self.logits.known = held(self.logits.known)
        self.matrices.known = held(self.matrices.known)
        name, operands = call.name, call.operands()
        if name in MAKERS:
            return call.run()
        if name in CASTS or name in RESHAPES:
            operands = operands[:1]  # value.type_as(matrix) makes no matrix of the value
        if (matrix := self.matrices.among(operands)) is not None:
            self.matrices.check(call)
            if self.matrices.meets_values(matrix, call):
                return self._product(matrix, call)
            return self.matrices.run(call, matrix)
        logits = self.logits.among(operands)
        if logits is not None and name in SOFTMAXES and operands[0] is logits.tensor:
            logits = self.logits.wary(logits)
            self.softmaxes += 1
            chosen = self.softmax in (0, self.softmaxes)
            return self._softmax(logits, call) if chosen else call.run()
        return self.logits.run(call, logits)


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
