"""The Jacobian of any differentiable function of weights, through torch.func."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attncond.errors import ConditioningError
from attncond.lanczos import Side

__all__ = ["FunctionJacobian"]

_CHUNK = 1 << 24  # elements of weights and outputs that are differentiated at once


class FunctionJacobian:
    """J of ``function(*weights)`` as an operator, by forward and reverse derivatives.

    Wide: the derivative of the flattened output in all weights, one after the other. Stacked: the
    derivatives in each weight above one another, for weights of one shape.
    """

    def __init__(
        self, function: Callable[..., Tensor], weights: Sequence[Tensor], stacked: bool
    ) -> None:
        self._function = function
        self._weights = tuple(w.detach().double() for w in weights)
        self._sizes = [w.numel() for w in self._weights]
        self._stacked = stacked
        with _differentiable():
            try:
                pulled: tuple[Any, Any] = torch.func.vjp(function, *self._weights)  # type: ignore[assignment]
            except RuntimeError as error:
                raise ConditioningError(
                    f"the function failed on float64 weights ({error}); make the tensors that it "
                    "uses beside them (tokens, rotary tables) float64, too"
                ) from error
        output, self._pull = pulled
        if not isinstance(output, Tensor) or output.dtype != torch.float64:
            what = output.dtype if isinstance(output, Tensor) else type(output).__name__
            raise ConditioningError(f"the function must return one float64 tensor, not {what}")
        if not bool(output.isfinite().all()):
            raise ConditioningError("the function returned NaN or inf for these weights")
        self._output = output.shape
        self._outputs = output.numel()

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        if self._stacked:
            return len(self._sizes) * self._outputs, self._sizes[0]
        return self._outputs, sum(self._sizes)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._weights[0].device

    def forward(self, vector: Tensor) -> Tensor:
        """J·v."""
        with _differentiable():
            if not self._stacked:
                return self._push(vector.split(self._sizes))
            zero = torch.zeros_like(vector)
            turns = range(len(self._sizes))
            parts = [self._push([vector if i == j else zero for j in turns]) for i in turns]
            return torch.cat(parts)

    def adjoint(self, vector: Tensor) -> Tensor:
        """Jᵀ·u."""
        with _differentiable():
            if not self._stacked:
                return torch.cat([g.flatten() for g in self._pull(vector.view(self._output))])
            parts = [self._pull(u.view(self._output)) for u in vector.split(self._outputs)]
            return torch.stack([g[i].flatten() for i, g in enumerate(parts)]).sum(0)

    def gram(self, side: Side) -> Tensor:
        """JJᵀ or JᵀJ, column by column; J is never stored."""
        if side == "rows":
            return self._rows(lambda u: self.forward(self.adjoint(u)), self.shape[0])
        return self._rows(lambda v: self.adjoint(self.forward(v)), self.shape[1])

    def dense(self) -> Tensor:
        """J, by the mode that needs fewer passes."""
        rows, columns = self.shape
        if rows <= columns:
            return self._rows(self.adjoint, rows)
        return self._rows(self.forward, columns).mT

    def _push(self, tangents: Sequence[Tensor]) -> Tensor:
        shaped = tuple(t.view_as(w) for t, w in zip(tangents, self._weights, strict=True))
        pushed: tuple[Any, Any] = torch.func.jvp(self._function, self._weights, shaped)  # type: ignore[assignment]
        derivative: Tensor = pushed[1]
        return derivative.flatten()

    def _rows(self, apply: Callable[[Tensor], Tensor], size: int) -> Tensor:
        many = torch.vmap(apply)
        step = max(1, min(256, _CHUNK // sum(self.shape)))
        result: Tensor | None = None  # allocated once: joining parts would take twice the memory
        for start in range(0, size, step):
            count = min(step, size - start)
            basis = torch.zeros(count, size, dtype=torch.float64, device=self.device)
            basis.diagonal(start).fill_(1)
            part = many(basis).detach()
            if result is None:
                result = part.new_empty(size, part.shape[1])
            result[start : start + count] = part
        assert result is not None
        return result


@contextmanager
def _differentiable() -> Iterator[None]:
    # The fused attention kernels have no forward derivative.
    with sdpa_kernel(SDPBackend.MATH):
        yield
