"""The Jacobian of any differentiable function of weights: torch.func, or a graph that is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attncond.errors import ConditioningError
from attncond.lanczos import Side
from attncond.written import Written

__all__ = ["FunctionJacobian", "GraphJacobian", "back"]

_CHUNK = 1 << 24  # elements of weights and outputs that are differentiated at once
_CACHED = 1 << 19  # the same where a graph is short, and memory would limit it on a CPU


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
                pulled = torch.func.vjp(function, *self._weights)
            except RuntimeError as error:
                raise ConditioningError(
                    f"the function failed on float64 weights ({error}); make the tensors that it "
                    "uses beside them (tokens, rotary tables) float64, too"
                ) from error
        output, self._pull = pulled[0], pulled[1]
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
        derivative: Tensor = torch.func.jvp(self._function, self._weights, shaped)[1]
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


class GraphJacobian:
    """J of an output in X_1·W_1, X_2·W_2, ..., which are leaves of its graph, taken on to the W_i.

    ``leaves`` are ``(tokens, c_i)`` and ``lefts`` the tokens ``(tokens, r_i)`` that made them, in
    any coordinates. Where a leaf is not the product itself but, token by token, ``maps[i]`` times
    it, that is ``(tokens, c_i, d_i)``. Nothing is computed again: products with Jᵀ go back through
    the graph that the output came with, and products with J through that of Jᵀu, linear in u.
    """

    def __init__(
        self,
        output: Tensor,
        leaves: Sequence[Tensor],
        lefts: Sequence[Tensor],
        maps: Sequence[Tensor | None] | None = None,
    ) -> None:
        self._output = output
        self._leaves = tuple(leaves)
        self._lefts = tuple(lefts)
        self._maps = tuple(maps) if maps is not None else (None,) * len(self._leaves)
        with torch.enable_grad():
            self._cotangent = torch.zeros_like(output, requires_grad=True)

    @property
    def _shapes(self) -> list[tuple[int, int]]:
        """Of each W, in the coordinates of the tokens."""
        parts = zip(self._lefts, self._leaves, self._maps, strict=True)
        return [(x.shape[1], (leaf if m is None else m).shape[-1]) for x, leaf, m in parts]

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return self._output.numel(), sum(r * d for r, d in self._shapes)

    @property
    def device(self) -> torch.device:
        """Where the output is."""
        return self._output.device

    def forward(self, vector: Tensor) -> Tensor:
        """J·v."""
        split = vector.split([r * d for r, d in self._shapes])
        tangents = []
        for v, shape, x, m in zip(split, self._shapes, self._lefts, self._maps, strict=True):
            t = x @ v.view(shape)
            tangents.append(t if m is None else (m @ t[..., None])[..., 0])
        with torch.enable_grad():
            back = self._back(self._cotangent, create_graph=True)
            pairs = [(b, t) for b, t in zip(back, tangents, strict=True) if b.requires_grad]
            found = torch.autograd.grad(
                [b for b, _ in pairs],
                self._cotangent,
                [t for _, t in pairs],
                materialize_grads=True,
            )
        return found[0].flatten()

    def adjoint(self, vector: Tensor) -> Tensor:
        """Jᵀ·u."""
        return self._weights(self._back(vector.view_as(self._output)), 1)[0]

    def dense(self) -> Tensor:
        """J, many rows at a time."""
        rows, columns = self.shape
        result = torch.empty(rows, columns, dtype=self._output.dtype, device=self.device)
        each = columns + sum(leaf.numel() for leaf in self._leaves)
        chunk = _CHUNK if self._output.is_cuda else _CACHED
        step = max(1, min(256, chunk // each))
        for start in range(0, rows, step):
            count = min(step, rows - start)
            basis = torch.zeros(count, rows, dtype=self._output.dtype, device=self.device)
            basis.diagonal(start).fill_(1)
            back = self._back(basis.view(count, *self._output.shape), is_grads_batched=True)
            result[start : start + count] = self._weights(back, count)
        return result

    def gram(self, side: Side) -> Tensor:
        """JJᵀ or JᵀJ."""
        return Written(self.dense()).gram(side)

    def _weights(self, back: Sequence[Tensor], count: int) -> Tensor:
        """Gradients in the leaves, one or ``count`` of each, as gradients in the weights."""
        parts = []
        for g, leaf, x, m in zip(back, self._leaves, self._lefts, self._maps, strict=True):
            # A leaf that the output does not depend on has one gradient for all.
            each = g.expand(count, *leaf.shape)
            each = each if m is None else torch.einsum("bnc,ncd->bnd", each, m)
            parts.append(torch.einsum("nr,bnd->brd", x, each).flatten(1))
        return torch.cat(parts, 1)

    def _back(self, cotangent: Tensor, **options: Any) -> tuple[Tensor, ...]:
        return back(self._output, self._leaves, cotangent, **options)


def back(
    output: Tensor, leaves: Sequence[Tensor], cotangent: Tensor, **options: Any
) -> tuple[Tensor, ...]:
    """Jᵀ·u by leaf, with zeros where the output does not depend on one; the graph stays."""
    return torch.autograd.grad(
        output,
        leaves,
        cotangent,
        retain_graph=True,
        allow_unused=True,
        materialize_grads=True,
        **options,
    )


@contextmanager
def _differentiable() -> Iterator[None]:
    # The fused attention kernels have no forward derivative.
    with sdpa_kernel(SDPBackend.MATH):
        yield
