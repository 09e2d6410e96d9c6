"""How a signal passes through a stack of random attention layers (arXiv:2410.07799).

A softmax matrix has one singular value near 1 and all others near 2/√T. That gap makes the tokens
of one layer nearly equal however wide it is (rank collapse in width), which the paper removes by
A^⊥ = A − 11ᵀ/T. Here are its two models of attention at initialisation, "A" (a random Markov matrix
that ignores the tokens) and "A(X)" (keys and queries), what it measures in them, and the constants
of its figures.

    python -m attncond.propagation --out DIR

draws the figures and runs the training comparison.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = [
    "Stack",
    "Weights",
    "constant_gradient_norm",
    "depth_profile",
    "excess_limit",
    "forward",
    "gradient_norms",
    "initial_weights",
    "orthonormal_tokens",
    "random_markov",
    "residue",
    "stable_rank",
    "stable_rank_limit",
]


@dataclass(frozen=True)
class Stack:
    """Attention-only layers, one head: X ← A X W_V, with or without the gap, LayerNorm and skip.

    Args:
        attention: ``"A"`` ignores the tokens, ``"A(X)"`` is softmax(X W_Q W_Kᵀ Xᵀ/√d).
        remove_gap: Use A − 11ᵀ/T in place of A.
        layer_norm: Normalise each token after the layer.
        skip: Add the layer's input to its output.

    >>> print(Stack(remove_gap=True, skip=True))
    A⊥ + skip
    """

    attention: Literal["A", "A(X)"] = "A"
    remove_gap: bool = False
    layer_norm: bool = False
    skip: bool = False

    def __post_init__(self) -> None:
        if self.attention not in ("A", "A(X)"):
            raise ValueError(f"attention must be 'A' or 'A(X)', not {self.attention!r}")

    def __str__(self) -> str:
        name = self.attention + "⊥" * self.remove_gap
        return name + " + skip" * self.skip + " + LN" * self.layer_norm


class Weights(NamedTuple):
    """What the layers hold, (..., layers, rows, columns); leading dimensions are runs side by side.

    ``logits`` is None for "A(X)", ``query`` and ``key`` are None for "A", ``gain`` and ``bias``
    (..., layers, 1, d) are None without LayerNorm.
    """

    value: Tensor
    logits: Tensor | None = None
    query: Tensor | None = None
    key: Tensor | None = None
    gain: Tensor | None = None
    bias: Tensor | None = None


def markov_logits(t: int, generator: torch.Generator) -> Tensor:
    """Gaussian (t, t) whose softmax is a random Markov matrix: mean −ln2/2, variance ln2.

    exp of an entry then has mean and variance 1.
    """
    noise = torch.randn(t, t, generator=generator, dtype=torch.float64)
    return math.sqrt(math.log(2)) * noise - math.log(2) / 2


def random_markov(t: int, generator: torch.Generator) -> Tensor:
    """A (t, t) matrix of positive entries with rows that sum to one: softmax at the start.

    >>> a = random_markov(100, torch.Generator().manual_seed(0))
    >>> sigma = torch.linalg.svdvals(a)
    >>> 1 <= sigma[0] < 1.05 and 1.8 < sigma[1] * 100**0.5 < 2.2
    tensor(True)
    """
    _positive(t, "t")
    return markov_logits(t, generator).softmax(-1)


def orthonormal_tokens(t: int, d: int, generator: torch.Generator) -> Tensor:
    """Tokens (t, d), t ≤ d, with X Xᵀ = I, uniformly among all such."""
    if not 1 <= t <= d:
        raise ValueError(f"orthonormal tokens need 1 <= t <= d, not t={t}, d={d}")
    q, r = torch.linalg.qr(torch.randn(d, t, generator=generator, dtype=torch.float64))
    tokens: Tensor = (q * r.diagonal().sign()).mT.contiguous()
    return tokens


def initial_weights(
    stack: Stack,
    depth: int,
    t: int,
    d: int,
    generator: torch.Generator,
    *,
    key_query_std: float | None = None,
    value_std: float = 1.0,
) -> Weights:
    """Draw the weights of ``depth`` layers for t tokens of width d, in float64.

    W_V has entries N(0, 1) as in the paper, or another ``value_std``. W_Q and W_K have N(0, 1/d) as
    in the authors' code, or ``key_query_std``: with 1 and orthonormal tokens the logits of the
    first layer have variance 1.
    """
    for value, name in ((depth, "depth"), (t, "t"), (d, "d")):
        _positive(value, name)
    std = d**-0.5 if key_query_std is None else key_query_std

    def draw(scale: float) -> Tensor:
        return scale * torch.randn(depth, d, d, generator=generator, dtype=torch.float64)

    norm = stack.layer_norm
    constant = stack.attention == "A"
    return Weights(
        value=draw(value_std),
        logits=torch.stack([markov_logits(t, generator) for _ in range(depth)])
        if constant
        else None,
        query=None if constant else draw(std),
        key=None if constant else draw(std),
        gain=torch.ones(depth, 1, d, dtype=torch.float64) if norm else None,
        bias=torch.zeros(depth, 1, d, dtype=torch.float64) if norm else None,
    )


def attention_matrix(stack: Stack, weights: Weights, layer: int, x: Tensor) -> Tensor:
    """A, or A(X), of one layer: (..., t, t), with the gap removed where the stack says so."""
    if stack.attention == "A":
        assert weights.logits is not None
        logits = weights.logits[..., layer, :, :]
    else:
        assert weights.query is not None
        assert weights.key is not None
        query = _project(x, weights.query[..., layer, :, :])
        key = _project(x, weights.key[..., layer, :, :])
        logits = query @ key.mT / math.sqrt(x.shape[-1])
    a = logits.softmax(-1)
    return a - 1 / a.shape[-1] if stack.remove_gap else a


def _project(x: Tensor, weight: Tensor) -> Tensor:
    # Twice as fast as x @ weight where many sequences share a weight, which matmul would copy.
    return torch.einsum("...td,...de->...te", x, weight)


def _layer(stack: Stack, weights: Weights, layer: int, x: Tensor) -> Tensor:
    out = attention_matrix(stack, weights, layer, x) @ _project(x, weights.value[..., layer, :, :])
    out = out + x if stack.skip else out
    if stack.layer_norm:
        assert weights.gain is not None
        assert weights.bias is not None
        out = F.layer_norm(out, out.shape[-1:])
        out = out * weights.gain[..., layer, :, :] + weights.bias[..., layer, :, :]
    return out


def forward(stack: Stack, weights: Weights, x: Tensor) -> Iterator[Tensor]:
    """X_1, X_2, ... of tokens X_0 (..., t, d), layer by layer.

    >>> g = torch.Generator().manual_seed(0)
    >>> stack = Stack(remove_gap=True)
    >>> layers = forward(stack, initial_weights(stack, 2, 5, 8, g), orthonormal_tokens(5, 8, g))
    >>> [x.shape for x in layers]
    [torch.Size([5, 8]), torch.Size([5, 8])]
    """
    for layer in range(weights.value.shape[-3]):
        x = _layer(stack, weights, layer, x)
        yield x


def stable_rank(x: Tensor) -> tuple[float, float]:
    """(sr, sr − 1) of the token covariance XXᵀ of tokens (t, d): Σσ⁴/σ_max⁴ of X.

    The excess over 1 is summed by itself, so that 1e-20 is told from 0. NaN where X is zero or not
    finite.

    >>> stable_rank(torch.eye(3))
    (3.0, 2.0)
    """
    if not bool(x.isfinite().all()):
        return math.nan, math.nan
    sigma = torch.linalg.svdvals(x.double())
    excess = float((sigma[1:] / sigma[0]).pow(4).sum())
    return 1 + excess, excess


def residue(x: Tensor) -> float:
    """‖X − 1·mean(X)‖_F/‖X‖_F of tokens (t, d): 0 where all tokens are one (collapse in depth)."""
    return float((x - x.mean(-2, keepdim=True)).norm() / x.norm())


def gradient_norms(
    stack: Stack, weights: Weights, x: Tensor, layer: int = 1, chunk: int = 64
) -> list[float]:
    """‖∂X_L/∂W_V of one layer‖_F for L = layer, ..., depth; layers count from 1.

    Exact: every output's gradient is taken, ``chunk`` of them at a time.
    """
    depth = weights.value.shape[-3]
    if not 1 <= layer <= depth:
        raise ValueError(f"layer must be between 1 and {depth}, not {layer!r}")
    with torch.no_grad():
        before = x
        for i in range(layer - 1):
            before = _layer(stack, weights, i, before)
    norms = []
    for last in range(layer, depth + 1):

        def output(value: Tensor, last: int = last) -> Tensor:
            index = torch.tensor([layer - 1])
            with_value = weights._replace(value=weights.value.index_copy(0, index, value[None]))
            y = before
            for i in range(layer - 1, last):
                y = _layer(stack, with_value, i, y)
            return y.flatten()

        pulled = torch.func.vjp(output, weights.value[layer - 1])
        found, pull = pulled[0], pulled[1]
        total = 0.0
        for start in range(0, len(found), chunk):
            rows = torch.arange(start, min(start + chunk, len(found)))
            units = F.one_hot(rows, len(found)).to(found)
            (gradients,) = torch.func.vmap(pull)(units)
            total += float(gradients.square().sum())
        norms.append(math.sqrt(total))
    return norms


def constant_gradient_norm(
    stack: Stack, weights: Weights, x: Tensor, layer: int, last: int
) -> float:
    """`gradient_norms` of plain "A" or "A⊥" at L = last in closed form, for any size.

    ∂X_L/∂W_ℓ = (A_L...A_ℓ X_{ℓ−1}) ⊗ (W_{ℓ+1}...W_L)ᵀ, whose norm is the product of the norms. With
    T = d → ∞ its square tends to T^L for "A" and to T, whatever L is, for "A⊥".
    """
    if stack not in (Stack(), Stack(remove_gap=True)):
        raise ValueError(f"the closed form is for 'A' and 'A⊥', not for '{stack}'")
    left, right = x, torch.eye(x.shape[-1], dtype=x.dtype)
    for i in range(last):
        left = attention_matrix(stack, weights, i, x) @ left
        if i < layer - 1:
            left = left @ weights.value[i]
        elif i > layer - 1:
            right = right @ weights.value[i]
    return float(left.norm() * right.norm())


def generator_of(seed: int) -> torch.Generator:
    """The source of all that one seed decides."""
    return torch.Generator().manual_seed(seed)


def depth_profile(
    stack: Stack, t: int, depth: int, seed: int, key_query_std: float | None = None
) -> dict[str, list[float]]:
    """Stable rank, its excess, residue and size of the tokens after each layer, T = d = t."""
    generator = generator_of(seed)
    tokens = orthonormal_tokens(t, t, generator)
    weights = initial_weights(stack, depth, t, t, generator, key_query_std=key_query_std)
    found: dict[str, list[float]] = {"stable_rank": [], "excess": [], "residue": [], "norm": []}
    for x in forward(stack, weights, tokens):
        rank, excess = stable_rank(x)
        found["stable_rank"].append(rank)
        found["excess"].append(excess)
        found["residue"].append(residue(x))
        found["norm"].append(float(x.norm()))
    return found


def excess_limit(layer: int) -> float:
    """lim T^(2ℓ−1)·(sr(Σ_ℓ) − 1) of plain "A" with T = d → ∞: 2ℓ + 1.

    σ_max² of X_ℓ tends to T^ℓ and carries the mean token; the rest is A₁^⊥...X₀W₁..., a product of
    2ℓ independent square Gaussian matrices, whose squared singular values follow the Fuss–Catalan
    law of order 2ℓ with second moment 2ℓ + 1.

    >>> excess_limit(1), excess_limit(2)
    (3.0, 5.0)
    """
    return 2.0 * layer + 1


def stable_rank_limit(layer: int) -> float:
    """lim sr(Σ_ℓ)/T of "A⊥" with T = d → ∞: the same law's second moment over its squared edge.

    The edge is (2ℓ + 1)^(2ℓ+1)/(2ℓ)^(2ℓ), 27/4 for one layer.

    >>> round(stable_rank_limit(1), 4)
    0.0658
    """
    order = 2.0 * layer
    edge: float = (order + 1) ** (order + 1) / order**order
    return (order + 1) / edge**2


def _positive(value: Any, name: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number above 0, not {value!r}")


if __name__ == "__main__":
    from attncond.propagation_study import main

    main()
