"""How well conditioned an attention head is as a function of its weights: exact κ of its Jacobian.

Two conventions. "wide" is [J_Q J_K J_V], the derivative of the head's output in all three weights.
"stacked" is [J_Q; J_K; J_V], which arXiv:2603.07162 bounds (Thms 3.3 and 3.4).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict, Unpack

import torch
from torch import Tensor

from attncond import lanczos
from attncond.errors import ConditioningError
from attncond.functional import FunctionJacobian
from attncond.head_inputs import Convention, Inputs
from attncond.lanczos import Bound, Extremes, extremes

__all__ = [
    "Details",
    "JacobianSpectrum",
    "attention_jacobian",
    "attention_jacobians",
    "derivatives",
    "gram",
    "jacobian_of",
    "memory_limit",
]

Path = Literal["closed form", "matrix-free", "dense"]


class Details(TypedDict, total=False):
    """What a head has beside tokens and weights; `attention_jacobian` explains each."""

    x_kv: Tensor | None
    scale: float | None
    bias_q: Tensor | None
    bias_k: Tensor | None
    bias_v: Tensor | None
    mask: Tensor | None
    causal: bool
    convention: Convention


@dataclass(frozen=True)
class JacobianSpectrum(Extremes):
    """The ends of a Jacobian's spectrum; None means unresolved, and is never a guess.

    ``sigma_min`` is the smallest singular value at ``rank``, the structural rank: directions that
    no weights of these shapes could have do not count. ``rank_rule`` says where the rank is from:
    "formula" (holds for generic weights), "attained" (an upper bound, and the numbers reach it),
    "numerical" (counted, where no formula is known) or "given". ``numerical_rank`` counts
    singular values above ``floor``, what the way taken can tell from rounding: sqrt(n·eps)·σ_max
    with n the smaller side from a Gram matrix, 10·N·eps·σ_max with N the larger one from J itself.
    A ``sigma_min`` below it is not reported. Errors are absolute estimates.
    """

    shape: tuple[int, int]
    convention: Convention
    path: Path

    @property
    def resolved(self) -> bool:
        """Whether κ is known."""
        return self.sigma_min is not None

    @property
    def kappa(self) -> float | None:
        """σ_max/σ_min at the structural rank, or None."""
        return None if self.sigma_min is None else self.sigma_max / self.sigma_min

    @property
    def kappa_error(self) -> float | None:
        """Absolute error estimate of κ, or None."""
        if self.sigma_min is None or self.sigma_min_error is None:
            return None
        relative = self.sigma_max_error / self.sigma_max + self.sigma_min_error / self.sigma_min
        return relative * self.sigma_max / self.sigma_min

    def __str__(self) -> str:
        kappa = "κ unresolved" if self.kappa is None else f"κ = {self.kappa:.6g}"
        rank = "unknown" if self.rank is None else str(self.rank)
        rows, columns = self.shape
        return (
            f"{kappa}, σ_max = {self.sigma_max:.6g}, rank {rank} ({self.rank_rule}) of "
            f"{rows} x {columns}, {self.convention}, {self.path}"
        )


def attention_jacobian(
    x: Tensor,
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    *,
    smallest: bool = True,
    memory: int | None = None,
    **details: Unpack[Details],
) -> JacobianSpectrum:
    """The spectrum of d(softmax(c·QKᵀ + mask)·V)/d(W_Q, W_K, W_V) for one head.

    ``x`` is ``(n, in)``; weights are rows of a layer's, ``(d, in)``, ``(d, in_kv)`` and
    ``(d_v, in_kv)``, biases ``(d,)`` or ``(d_v,)``. Keys and values come from ``x_kv``
    ``(m, in_kv)`` in cross-attention. ``scale`` is 1/√d unless given. ``mask`` broadcasts to
    ``(n, m)``: True where a query may look, or numbers to add. ``causal`` hides keys after the
    query, counted from the first of each as scaled_dot_product_attention does. ``smallest=False``
    finds σ_max alone, which needs far less memory. ``memory`` limits the bytes taken.

    Whatever the dtypes, everything is computed in float64, and nothing is differentiable.

    >>> x = torch.eye(3, 5)
    >>> w = torch.eye(2, 5)
    >>> spectrum = attention_jacobian(x, w, w, w)
    >>> spectrum.rank, spectrum.rank_rule, spectrum.path
    (6, 'formula', 'closed form')
    >>> round(spectrum.kappa, 4)
    8.1686
    """
    with torch.no_grad():
        inputs = Inputs.of(x, w_q, w_k, w_v, **details)
        shape = inputs.shape
        inputs = inputs.distinct()
        limit = memory_limit(x.device) if memory is None else memory
        needed = inputs.bytes(smallest)
        _require(needed, x.device, limit, "fewer tokens, or smallest=False")
        found = extremes(*inputs.jacobian(), smallest=smallest, memory=limit - needed)
    convention = details.get("convention", "wide")
    return JacobianSpectrum(**vars(found), shape=shape, convention=convention, path="closed form")


def attention_jacobians(
    x: Tensor,
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    *,
    smallest: bool = True,
    memory: int | None = None,
    **details: Unpack[Details],
) -> list[JacobianSpectrum]:
    """`attention_jacobian` of each query head: weights ``(heads, d, in)``, biases ``(heads, d)``.

    K and V may have fewer heads, each shared by as many consecutive query heads (grouped-query);
    every spectrum is that of one query head with the K and V that it reads. ``x``, ``x_kv`` and
    ``mask`` may have a leading dimension of heads, too. Heads go one after the other, so that
    memory does not grow with their number.

    >>> w = torch.eye(4, 5).reshape(2, 2, 5)
    >>> [s.rank for s in attention_jacobians(torch.eye(3, 5), w, w[:1], w[:1])]
    [6, 6]
    """
    for name, w in (("w_q", w_q), ("w_k", w_k), ("w_v", w_v)):
        if w.ndim != 3 or 0 in w.shape:
            raise ConditioningError(f"{name} must be (heads, head_dim, in), not {tuple(w.shape)}")
    heads, few = len(w_q), len(w_k)
    if few != len(w_v) or heads % few:
        raise ConditioningError(
            f"{heads} query heads cannot share {few} heads of K and {len(w_v)} of V: K and V need "
            "equally many, and their number must divide that of Q"
        )
    result = []
    for h in range(heads):
        kv = h * few // heads
        own = details.copy()
        own["x_kv"] = _of_head("x_kv", details.get("x_kv"), h, 3, heads)
        own["bias_q"] = _of_head("bias_q", details.get("bias_q"), h, 2, heads)
        own["bias_k"] = _of_head("bias_k", details.get("bias_k"), kv, 2, few)
        own["bias_v"] = _of_head("bias_v", details.get("bias_v"), kv, 2, few)
        own["mask"] = _of_head("mask", details.get("mask"), h, 3, heads)
        tokens = _of_head("x", x, h, 3, heads)
        result.append(
            attention_jacobian(
                x if tokens is None else tokens,
                w_q[h],
                w_k[kv],
                w_v[kv],
                smallest=smallest,
                memory=memory,
                **own,
            )
        )
    return result


def jacobian_of(
    function: Callable[..., Tensor],
    weights: Sequence[Tensor],
    *,
    convention: Convention = "wide",
    rank: int | None = None,
    smallest: bool = True,
    memory: int | None = None,
) -> JacobianSpectrum:
    """The spectrum of the derivative of ``function(*weights)``, for attention of any other kind.

    Rotary embeddings, normalised queries and keys, cross-covariance, Nyström: write the head as a
    differentiable function of its weights that answers float64 with float64. Small ones are
    differentiated densely, others through products with J and Jᵀ. ``rank`` is the structural rank
    if you know it; otherwise it is counted.

    >>> x = torch.eye(3, 5, dtype=torch.float64)
    >>> spectrum = jacobian_of(lambda w: torch.tanh(x @ w), [torch.zeros(5, 2)])
    >>> spectrum.kappa, spectrum.rank, spectrum.path
    (1.0, 6, 'dense')
    """
    if not weights or any(0 in w.shape or not w.is_floating_point() for w in weights):
        raise ConditioningError("weights must be a sequence of non-empty tensors of real numbers")
    if not all(bool(w.isfinite().all()) for w in weights):
        raise ConditioningError("weights hold NaN or inf; conditioning is defined at finite ones")
    if convention not in ("wide", "stacked"):
        raise ConditioningError(f"convention must be 'wide' or 'stacked', not {convention!r}")
    if convention == "stacked" and len({w.shape for w in weights}) > 1:
        shapes = ", ".join(str(tuple(w.shape)) for w in weights)
        raise ConditioningError(f"the stacked convention needs weights of one shape, not {shapes}")
    jacobian = FunctionJacobian(function, weights, convention == "stacked")
    side = min(jacobian.shape)
    if rank is not None and not 0 < rank <= side:
        raise ConditioningError(f"rank is {rank}, the Jacobian {jacobian.shape} has at most {side}")
    dense = side <= lanczos.SMALL and smallest
    entries = jacobian.shape[0] * jacobian.shape[1] if dense else int(2.5 * side * side)
    if smallest:
        remedy = "fewer tokens, or smallest=False"
        _require(8 * entries + (1 << 28), jacobian.device, memory, remedy)
    bound = Bound(side) if rank is None else Bound(rank, "given")
    with torch.no_grad():
        found = extremes(jacobian, bound, smallest=smallest)
    path: Path = "dense" if dense else "matrix-free"
    return JacobianSpectrum(**vars(found), shape=jacobian.shape, convention=convention, path=path)


def derivatives(
    x: Tensor,
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    *,
    memory: int | None = None,
    **details: Unpack[Details],
) -> tuple[Tensor, Tensor, Tensor]:
    """∂A/∂W_Q, ∂A/∂W_K, ∂A/∂W_V of one head (Thm 3.3), each ``(n, d_v, *weight.shape)``, float64.

    Takes what `attention_jacobian` takes.

    >>> w = torch.eye(2, 5)
    >>> [tuple(j.shape) for j in derivatives(torch.eye(3, 5), w, w, w)]
    [(3, 2, 2, 5), (3, 2, 2, 5), (3, 2, 2, 5)]
    """
    with torch.no_grad():
        inputs = Inputs.of(x, w_q, w_k, w_v, **details)
        entries = len(x) * len(w_v) * (w_q.numel() + w_k.numel() + w_v.numel())
        _require(8 * entries, x.device, memory, "fewer tokens")
        j_q, j_k, j_v = (block.mT for block in inputs.whole().blocks())
    return j_q, j_k, j_v


def gram(
    x: Tensor,
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    *,
    memory: int | None = None,
    **details: Unpack[Details],
) -> Tensor:
    """JJᵀ of the wide Jacobian, ``(n·d_v, n·d_v)``, or JᵀJ of the stacked one, ``(d·in, d·in)``.

    In float64, rows and columns ordered as ``output.flatten()`` and ``weight.flatten()``. Its size
    is that of the weights given; `attention_jacobian` works in fewer coordinates. Takes what
    `attention_jacobian` takes.

    >>> gram(torch.eye(3, 5), *[torch.eye(2, 5)] * 3).shape
    torch.Size([6, 6])
    """
    with torch.no_grad():
        inputs = Inputs.of(x, w_q, w_k, w_v, **details)
        size = inputs.shape[1] if inputs.stacked else inputs.shape[0]
        _require(8 * int(3.5 * size * size), x.device, memory, "fewer tokens")
        matrix = inputs.whole().gram("columns" if inputs.stacked else "rows").tril()
        matrix = matrix + matrix.tril(-1).mT
        if inputs.stacked:
            d, width = w_q.shape
            matrix = matrix.view(width, d, width, d).permute(1, 0, 3, 2).reshape(size, size)
    return matrix


def _of_head(name: str, t: Tensor | None, h: int, ndim: int, count: int) -> Tensor | None:
    if t is None or (t.ndim == 2 and ndim == 3):  # shared by all heads
        return t
    if t.ndim != ndim or len(t) not in (1, count):
        raise ConditioningError(
            f"{name} of shape {tuple(t.shape)} does not fit: its first of {ndim} dimensions must "
            f"be the {count} heads that it serves"
        )
    return t[h if len(t) == count else 0]


def memory_limit(device: torch.device) -> int:
    """The bytes that may be taken on a device if nobody says otherwise."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 3 // 4
    return 8 << 30


def _require(needed: int, device: torch.device, limit: int | None, remedy: str) -> None:
    limit = memory_limit(device) if limit is None else limit
    if needed > limit:
        raise ConditioningError(
            f"this Jacobian needs about {needed / 1e9:.1f} GB, {limit / 1e9:.1f} GB are allowed: "
            f"take {remedy}, or raise memory="
        )
