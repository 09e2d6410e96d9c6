"""What conditioning costs in FLOPs and memory: Tables 8 and 9 of arXiv:2603.07162, for any model.

The paper counts one head with N tokens, width D and head size d. Here the same counts come from
the attention that `inspect` finds, and `counted_flops` checks them with torch's own counter. Two
ways to apply a correction are told apart: XW + XC, which the paper counts, and X(W + C), which
attncond runs (and the paper's Eq. 62 to 67 describe).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle

from attncond.checkpoints import is_correction
from attncond.errors import ConditioningError
from attncond.inspection import inspect, table
from attncond.sites import Projection, Role

__all__ = ["Accounting", "ProjectionCost", "account", "count_tokens", "counted_flops"]

Tokens = int | Mapping[str, int] | Mapping[tuple[str, Role], int]


@dataclass(frozen=True)
class ProjectionCost:
    """One of W_Q, W_K, W_V of one site, all heads together: out = heads · head size."""

    path: str
    role: Role
    tokens: int
    in_features: int
    out_features: int

    @property
    def parameters(self) -> int:
        """Trainable numbers, and gradients: D·out (Table 8)."""
        return self.in_features * self.out_features

    @property
    def activations(self) -> int:
        """Numbers that the projection puts out: N·out (Table 8)."""
        return self.tokens * self.out_features

    @property
    def flops(self) -> int:
        """The projection itself: 2·N·D·out (Table 9)."""
        return 2 * self.tokens * self.in_features * self.out_features

    @property
    def flops_added_to_output(self) -> int:
        """XW + XC as Table 9 counts it: N·out multiplications; as many additions are left out."""
        return self.tokens * self.out_features

    @property
    def flops_added_to_weight(self) -> int:
        """s(W + C), formed once a forward pass: an addition and a multiplication a weight."""
        return 2 * self.parameters


@dataclass(frozen=True)
class Accounting:
    """What :func:`account` found. ``print`` shows Tables 8 and 9 with the model's numbers.

    ``correction_bytes`` are the buffers that attncond keeps beside the weights, 0 in a stock model;
    ``uncounted`` are the paths of attention that `inspect` cannot read.
    """

    rows: tuple[ProjectionCost, ...]
    correction_bytes: int
    uncounted: tuple[str, ...] = ()

    def total(self, what: str) -> int:
        """The sum over all projections of one of the fields of `ProjectionCost`."""
        return sum(int(getattr(row, what)) for row in self.rows)

    @property
    def overhead_output(self) -> float:
        """Additional FLOPs of XW + XC, relative: 1/(2D) where all widths are D (Eq. 73)."""
        return self.total("flops_added_to_output") / self.total("flops")

    @property
    def overhead_weight(self) -> float:
        """Additional FLOPs of X·s(W + C), relative: 1/N where all lengths are N, batch included."""
        return self.total("flops_added_to_weight") / self.total("flops")

    @property
    def kept_for_backward(self) -> int:
        """Numbers that s(W + C) adds to what autograd keeps: a second copy of each weight.

        Table 8 has 'no extra tensors', which is true of XW + λX alone. A compiler may form the
        weight again instead of keeping it.
        """
        return self.total("parameters")

    def __str__(self) -> str:
        head = ("", "original", "with correction")
        flops = self.total("flops")
        body = [
            ("parameters", *_twice(self.total("parameters"))),
            ("gradients", *_twice(self.total("parameters"))),
            ("correction, bytes", "0", f"{self.correction_bytes:,}"),
            ("activations", *_twice(self.total("activations"))),
            ("weights kept for backward", "0", f"{self.kept_for_backward:,}"),
            (
                "FLOPs, XW + XC",
                f"{flops:,}",
                f"{flops + self.total('flops_added_to_output'):,} (+{self.overhead_output:.3%})",
            ),
            (
                "FLOPs, X(W + C)",
                f"{flops:,}",
                f"{flops + self.total('flops_added_to_weight'):,} (+{self.overhead_weight:.3%})",
            ),
        ]
        left_out = f"\n\nnot counted: {', '.join(self.uncounted)}" if self.uncounted else ""
        return table(head, body) + left_out


def account(model: nn.Module, tokens: Tokens) -> Accounting:
    """Count what the projections of a model cost, corrected and not.

    ``tokens`` is how many rows each projection multiplies, batch included: one number for all,
    a number for each site's path, or what `count_tokens` returns.

    >>> model = nn.MultiheadAttention(8, 2)
    >>> account(model, tokens=5).total("flops") == 6 * 5 * 8 * 8
    True
    """
    rows = []
    for path, projection in _projections(model):
        count = _tokens_of(tokens, path, projection.role)
        out = projection.heads * projection.head_dim
        rows.append(ProjectionCost(path, projection.role, count, projection.in_features, out))
    if not rows:
        raise ConditioningError("there is no attention in this model to account for")
    buffers = {id(buffer): buffer for name, buffer in model.named_buffers() if is_correction(name)}
    size = sum(b.numel() * b.element_size() for b in buffers.values())
    uncounted = tuple(u.path or "(the model)" for u in inspect(model).unsupported)
    return Accounting(tuple(rows), size, uncounted)


def count_tokens(model: nn.Module, run: Callable[[], Any]) -> dict[tuple[str, Role], int]:
    """See how many tokens reach each projection while ``run()`` runs the model: (path, role) -> N.

    >>> import torch
    >>> model = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    >>> count_tokens(model, lambda: model(torch.zeros(3, 5, 8)))["self_attn", "q"]
    15
    """
    found: dict[tuple[str, Role], int] = {}
    handles: list[RemovableHandle] = []
    try:
        for path, projection in _projections(model):
            found[path, projection.role] = 0
            handles.append(
                projection.owner.register_forward_pre_hook(
                    _counter(found, path, projection), with_kwargs=True
                )
            )
        run()
    finally:
        for handle in handles:
            handle.remove()
    silent = sorted({path for (path, _), count in found.items() if not count})
    if silent:
        raise ConditioningError(
            f"no tokens were seen at {', '.join(silent)}: run() did not use it, or its weight is "
            "read past the forward of the module that holds it. Give account() the numbers instead."
        )
    return found


def counted_flops(model: nn.Module, run: Callable[[], Any]) -> dict[str, int]:
    """What torch's FLOP counter sees in the modules that hold projections: their path -> FLOPs.

    The counter sees matrix products alone, so a correction, which is element by element, does not
    show. nn.MultiheadAttention, which counts its other products in the same place, is refused.
    """
    owners = {p.path: p.owner for _, p in _projections(model)}
    mixed = [path for path, owner in owners.items() if isinstance(owner, nn.MultiheadAttention)]
    if mixed:
        raise ConditioningError(
            f"torch counts the projections of {', '.join(mixed)} (nn.MultiheadAttention) together "
            "with its other products"
        )
    counter = FlopCounterMode(display=False)
    with counter:
        run()
    counts = {name.partition(".")[2]: ops for name, ops in counter.get_flop_counts().items()}
    return {path: sum(counts.get(path, {}).values()) for path in owners}


def _projections(model: nn.Module) -> list[tuple[str, Projection]]:
    return [(site.path, p) for site in inspect(model).sites for p in site.projections]


def _tokens_of(tokens: Tokens, path: str, role: Role) -> int:
    count: object = tokens
    if isinstance(tokens, Mapping):
        known: Mapping[Any, int] = tokens
        count = known.get((path, role), known.get(path))
        if count is None:
            raise ConditioningError(f"tokens says nothing of '{path}'")
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ConditioningError(f"tokens must be a whole number above 0, not {count!r}")
    return count


def _counter(
    found: dict[tuple[str, Role], int], path: str, projection: Projection
) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    role = projection.role

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if isinstance(module, nn.MultiheadAttention):
            place, name = {"q": (0, "query"), "k": (1, "key"), "v": (2, "value")}[role]
            x = kwargs[name] if name in kwargs else args[place]
        else:
            x = args[0] if args else next(iter(kwargs.values()))
        found[path, role] += x.numel() // projection.in_features

    return hook


def _twice(count: int) -> tuple[str, str]:
    return f"{count:,}", f"{count:,}"
