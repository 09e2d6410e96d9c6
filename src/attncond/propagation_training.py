"""The training comparison of arXiv:2410.07799: does removing the gap help a random stack to learn?

A stack learns an entry-by-entry function of orthonormal tokens by Adam on the mean squared error,
for every learning rate of a sweep. Runs that differ in learning rate and seed alone are trained
side by side, as one batch of matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attncond.propagation import (
    Stack,
    Weights,
    forward,
    generator_of,
    initial_weights,
    orthonormal_tokens,
)

TARGETS: dict[str, Callable[[Tensor], Tensor]] = {
    "heaviside": lambda x: (x > 0).to(x.dtype),
    "sigmoid": lambda x: torch.sigmoid(20 * (x + 0.5)),
    "identity": lambda x: x,
}

Run = dict[str, Any]


def outcome(losses: Sequence[float], constant: float) -> str:
    """What became of a run, given its losses and the loss of the best constant prediction.

    "diverged": a loss was not finite, or the last is above the first. "stuck": less than a tenth
    better than that constant. "learned": the rest.

    >>> [outcome([1.0, last], constant=0.25) for last in (0.1, 0.24, 1.5, math.nan)]
    ['learned', 'stuck', 'diverged', 'diverged']
    """
    if not all(map(math.isfinite, losses)) or losses[-1] > losses[0]:
        return "diverged"
    return "learned" if losses[-1] < 0.9 * constant else "stuck"


def train(
    stack: Stack,
    depth: int,
    *,
    rates: Sequence[float],
    seeds: Sequence[int],
    t: int = 32,
    samples: int = 32,
    steps: int = 100,
    target: str = "heaviside",
    value_std: float = 1.0,
) -> list[Run]:
    """Train a stack of ``depth`` layers (T = d = t) with each learning rate from each seed.

    The seed decides the weights and the data, so that stacks and rates can be compared seed by
    seed. Full batches of ``samples`` sequences, float32, all weights trained. ``value_std`` is that
    of W_V at the start.

    >>> runs = train(Stack(), 1, rates=[1e-3], seeds=[0], t=4, samples=2, steps=2)
    >>> sorted(runs[0])
    ['constant', 'depth', 'losses', 'outcome', 'rate', 'seed', 'stack']
    """
    if target not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}, not {target!r}")
    if not rates or not seeds:
        raise ValueError("train needs at least one learning rate and one seed")
    runs = [(rate, seed) for rate in rates for seed in seeds]
    drawn = {seed: _draw(stack, depth, t, samples, seed, value_std) for seed in seeds}
    x = torch.stack([drawn[seed][1] for _, seed in runs])
    y = TARGETS[target](x)
    constant = y.var(dim=(1, 2, 3), correction=0).tolist()
    # Each run has parameters of its own: one Adam, a group for each, and no run sees another.
    own = [[p.clone().requires_grad_() for p in drawn[seed][0]] for _, seed in runs]
    groups = [
        {"params": parameters, "lr": rate} for parameters, (rate, _) in zip(own, runs, strict=True)
    ]
    optimizer = torch.optim.Adam(groups)
    names = _names(stack)
    losses: list[list[float]] = []
    for step in range(steps + 1):
        stacked = [torch.stack(parts)[:, None] for parts in zip(*own, strict=True)]
        weights = Weights(**dict(zip(names, stacked, strict=True)))
        *_, out = forward(stack, weights, x)
        by_run = (out - y).square().mean(dim=(1, 2, 3))
        losses.append(by_run.tolist())
        if step < steps:
            optimizer.zero_grad()
            by_run.sum().backward()
            optimizer.step()
    return [
        {
            "stack": str(stack),
            "depth": depth,
            "rate": rate,
            "seed": seed,
            "constant": constant[i],
            "losses": (mine := [row[i] for row in losses]),
            "outcome": outcome(mine, constant[i]),
        }
        for i, (rate, seed) in enumerate(runs)
    ]


def _names(stack: Stack) -> list[str]:
    kind = ["logits"] if stack.attention == "A" else ["query", "key"]
    return ["value", *kind, *(["gain", "bias"] if stack.layer_norm else [])]


def _draw(
    stack: Stack, depth: int, t: int, samples: int, seed: int, value_std: float
) -> tuple[list[Tensor], Tensor]:
    generator = generator_of(seed)
    x = torch.stack([orthonormal_tokens(t, t, generator) for _ in range(samples)])
    weights = initial_weights(stack, depth, t, t, generator, value_std=value_std)
    return [getattr(weights, name).float() for name in _names(stack)], x.float()
