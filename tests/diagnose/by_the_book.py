"""Attention statistics computed in plain loops from captured tensors: what is compared with."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def probabilities(logits: Tensor, visible: Tensor) -> Tensor:
    """Row by row, (queries, keys)."""
    rows = []
    for row, seen in zip(logits, visible, strict=True):
        weights = torch.zeros_like(row)
        if bool(seen.any()):
            shifted = (row[seen] - row[seen].max()).exp()
            weights[seen] = shifted / shifted.sum()
        rows.append(weights)
    return torch.stack(rows)


def statistics(matrices: list[Tensor], visible: list[Tensor]) -> dict[str, float]:
    """Of one head's attention matrices over the items of a batch."""
    entropies, relative, saturated, tops = [], [], 0, []
    for p, seen in zip(matrices, visible, strict=True):
        for row, shown in zip(p, seen, strict=True):
            keys = int(shown.sum())
            if keys < 2:
                continue
            entropy = -sum(float(w) * math.log(float(w)) for w in row if w > 0)
            entropies.append(entropy)
            relative.append(entropy / math.log(keys))
            saturated += float(row.max()) > 0.99
        sigma = torch.linalg.svdvals(p)
        second = float(sigma[1]) if len(sigma) > 1 else 0.0
        rank = float(sigma.square().sum() / sigma[0] ** 2)
        tops.append((float(sigma[0]), second, float(sigma[0]) - second, rank))
    names = ("sigma_1", "sigma_2", "gap", "stable_rank")
    result = {
        f"attention_{name}": sum(t[i] for t in tops) / len(tops) for i, name in enumerate(names)
    }
    if entropies:
        result["entropy"] = sum(entropies) / len(entropies)
        result["entropy_min"] = min(entropies)
        result["entropy_relative"] = sum(relative) / len(relative)
        result["saturation"] = saturated / len(entropies)
    return result


def token_statistics(x: Tensor) -> tuple[float, float]:
    """Stable rank of XXᵀ and residue of (tokens, channels)."""
    s = torch.linalg.svdvals(x @ x.mT)
    rank = float(s.square().sum() / s[0] ** 2)
    return rank, float((x - x.mean(0)).norm() / x.norm())
