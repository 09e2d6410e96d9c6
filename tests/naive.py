"""Attention by the book, every matrix formed and every row in a loop: what is compared with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import attncond as ac


def head(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    bias: Tensor | None = None,
    *,
    gap: bool = False,
    eps: float | None = None,
    detach: bool = False,
    kept: Tensor | None = None,
) -> Tensor:
    """One head: (L, d), (S, d) and (S, e) to (L, e); ``kept`` are the factors of dropout."""
    queries, keys = visible.shape
    matrix = []
    for i in range(queries):
        seen = [j for j in range(keys) if visible[i, j]]
        row: list[Tensor] = [v.new_zeros(())] * keys
        if seen:
            logits = [(q[i] * k[j]).sum() / q.shape[-1] ** 0.5 for j in seen]
            if bias is not None:
                logits = [logit + bias[i, j] for logit, j in zip(logits, seen, strict=True)]
            top = max(logit.detach() for logit in logits)
            weights = [(logit - top).exp() for logit in logits]
            for j, weight in zip(seen, weights, strict=True):
                row[j] = weight / sum(weights)
                if kept is not None:
                    row[j] = row[j] * kept[i, j]
                if gap:
                    row[j] = row[j] - 1 / len(seen)
        matrix.append(torch.stack(row))
    output = torch.stack(matrix) @ v
    if eps is None:
        return output
    rows = []
    for row in output:
        length = max(row.square().sum().sqrt(), row.new_tensor(eps)) if row.any() else eps
        rows.append(row / (length.detach() if detach and isinstance(length, Tensor) else length))
    return torch.stack(rows)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    methods: tuple[object, ...],
    visible: Tensor | None = None,
    bias: Tensor | None = None,
    kept: Tensor | None = None,
) -> Tensor:
    """All heads, (batch, heads, tokens, channels); fewer heads of k and v serve groups of q's."""
    shape = (*q.shape[:-1], k.shape[-2])
    visible = torch.ones(shape, dtype=torch.bool) if visible is None else visible.expand(shape)
    bias = bias if bias is None else bias.expand(shape)
    gap = any(isinstance(m, ac.RemoveGap) for m in methods)
    after = next((m for m in methods if isinstance(m, ac.Precondition)), None)
    group = q.shape[1] // k.shape[1]
    return torch.stack(
        [
            torch.stack(
                [
                    head(
                        q[b, h],
                        k[b, h // group],
                        v[b, h // group],
                        visible[b, h],
                        None if bias is None else bias[b, h],
                        gap=gap,
                        eps=after.eps if after else None,
                        detach=after.detach if after else False,
                        kept=None if kept is None else kept[b, h],
                    )
                    for h in range(q.shape[1])
                ]
            )
            for b in range(q.shape[0])
        ]
    )


class Attention(nn.Module):
    """An attention that gets its queries, keys and values, and computes with them as it is told.

    Its projections are there for the adapter alone, so that the output is the heads' own.
    """

    def __init__(self, compute: Callable[..., object], hidden: float = -9000.0) -> None:
        super().__init__()
        self.compute = compute
        self.hidden = hidden
        self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.compute(*args, **kwargs)


@ac.register(Attention)
def _adapter(module: Attention) -> ac.Site:
    site = ac.separate(module.q, module.k, module.v, heads=2)
    return ac.Site(site.projections, site.layout, hidden=module.hidden)


def conditioned(
    compute: Callable[..., object], *methods: object, hidden: float = -9000.0
) -> Attention:
    module = Attention(compute, hidden)
    for method in methods:
        ac.condition(module, method)
    return module
