"""Let the polar factors of weights follow the optimizer that trains them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from attncond.corrections import loads, records
from attncond.errors import ConditioningError
from attncond.weights import Weight, refresh

# Optimizer steps between two polar factors computed anew; in between they are tracked.
_ANCHOR_EVERY = 64


def follow(optimizer: torch.optim.Optimizer, weights: Sequence[Weight]) -> Any:
    """Refresh the factors after each step of the optimizer; ``remove()`` of the result ends it."""
    # accelerate's wrapper keeps the real optimizer, whose hooks are the ones that run.
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, torch.optim.Optimizer):
        raise ConditioningError(
            f"attach needs a torch.optim.Optimizer, not {type(optimizer).__name__}"
        )
    others = [f for f in _FOLLOWERS.get(inner, ()) if any(map(_current, f.weights))]
    followed = {id(w.correction) for f in others for w in f.weights}
    if any(id(w.correction) in followed for w in weights):  # by another handle, too
        raise ConditioningError("this optimizer is attached already")
    follower = _Follower(weights)
    if not follower.followed(inner):
        raise ConditioningError(
            "this optimizer trains none of the conditioned weights; was it built for another "
            "copy of the model? Frozen weights need no attach."
        )
    hook = inner.register_step_post_hook(torch.compiler.disable(follower))
    _FOLLOWERS[inner] = [*others, follower]
    return hook


class _Follower:
    """What an optimizer calls after each step: refresh the polar factors of what it trains."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        self.weights = weights
        self.trained: list[Weight] = []
        self.parameters = 0
        self.every = weights[0].correction.method.refresh_every
        self.age: int | None = None
        self.seen_loads = -1

    def followed(self, optimizer: torch.optim.Optimizer) -> list[Weight]:
        """The weights that it trains, those of groups that were added since included."""
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if count != self.parameters:
            self.parameters = count
            ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
            known = {id(w) for w in self.trained}
            self.trained = [w for w in self.weights if id(w) in known or id(w.raw) in ids]
        return self.trained

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        weights = [w for w in self.followed(optimizer) if _current(w)]
        if not weights:
            return
        first = weights[0]
        if self.age is None or self.seen_loads != loads(first.owner):
            # Once, and after a checkpoint was loaded; reading it every step would stall a GPU.
            self.age = int(first.buffer("age").item())
            self.seen_loads = loads(first.owner)
        self.age += 1
        torch._foreach_add_([weight.buffer("age") for weight in weights], 1)
        if self.age % self.every == 0:
            anchor = self.age // _ANCHOR_EVERY != (self.age - self.every) // _ANCHOR_EVERY
            refresh(weights, "anchor" if anchor else "track")


def _current(weight: Weight) -> bool:
    """Whether it is still conditioned so: another handle may have removed that, or done it anew."""
    return records(weight.owner).get(weight.name) is weight.correction


# Weakly: an optimizer that is gone must not be taken for the next one at its address.
_FOLLOWERS: WeakKeyDictionary[torch.optim.Optimizer, list[_Follower]] = WeakKeyDictionary()
