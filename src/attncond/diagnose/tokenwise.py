"""What a module does to queries, keys and values one token at a time, as small matrices.

Rotary embeddings, norms of queries and keys and affine maps take each token's query by itself. Then
d(q)/d(XW_Q) is one block for each token, and one pass back for each channel tells all blocks at
once, where otherwise every entry of the head's output would need a pass. That it is so is not taken
on trust: a random vector is sent through the graph and through the blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attncond.functional import back
from attncond.sites import Role

__all__ = ["ReplayError", "TokensMixedError", "Use", "cut_uses"]

_SAME = 1e-11  # in units of the largest


class ReplayError(Exception):
    """Why an attention cannot be run again as a function of one head."""


class TokensMixedError(ReplayError):
    """Some query, key or value is made of several tokens, or of several weights."""


@dataclass(frozen=True, eq=False)
class Use:
    """One product with a head's weight: tokens ``(tokens, in)``, and the leaf ``(tokens, d)``.

    ``map`` ``(tokens, c, d)``, if any, is what makes the leaf ``(tokens, c)`` of the product.
    """

    role: Role
    x: Tensor
    leaf: Tensor
    map: Tensor | None = None


def cut_uses(uses: Sequence[Use], cuts: Mapping[Role, tuple[Tensor, Tensor]]) -> list[Use]:
    """The uses with what reached the attention as leaves; raises `TokensMixedError`.

    ``cuts`` has, by role, what reached it ``(tokens, c)`` and the leaf that took its place.
    """
    found = []
    for role, (made, leaf) in cuts.items():
        if not made.requires_grad:
            raise ReplayError(f"the product with W_{role.upper()} was not found")
        generator = torch.Generator().manual_seed(0)
        shape = (2, *made.shape)
        vectors = torch.randn(shape, generator=generator, dtype=made.dtype, device="cpu")
        first, second = vectors.to(made.device)
        felt = [g.any(1) for g in back(made, [u.leaf for u in uses], first)]
        sources = [i for i, here in enumerate(felt) if bool(here.any())]
        if [uses[i].role for i in sources] != [role]:
            raise TokensMixedError
        use, here = uses[sources[0]], felt[sources[0]]
        if int(here.sum()) != len(made):
            raise TokensMixedError
        every = torch.eye(made.shape[1], dtype=made.dtype, device=made.device)
        every = every[:, None].expand(-1, len(made), -1)
        blocks = back(made, [use.leaf], every, is_grads_batched=True)[0]
        blocks = blocks[:, here].transpose(0, 1)
        want = back(made, [use.leaf], second)[0]
        got = torch.zeros_like(want)
        got[here] = (second[:, None] @ blocks)[:, 0]
        if float((got - want).abs().max()) > _SAME * float(want.abs().max()):
            raise TokensMixedError
        found.append(Use(role, use.x[here], leaf, blocks.contiguous()))
    return found
