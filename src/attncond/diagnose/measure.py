"""The numbers of a diagnosis, in float64: spectra of weights and attention, entropy, tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from attncond.diagnose.capture import Scores, wide
from attncond.linalg import spectral_norm
from attncond.methods.gap import uniform
from attncond.methods.precondition import Precondition

__all__ = ["Values", "attention", "singular_values", "spread", "tokens", "weight"]

Values = dict[str, float | str | None]

SATURATED = 0.99  # a query whose largest weight is above this looks at one key
_EPS = torch.finfo(torch.float64).eps
_GRAM = 1e-6  # κ² eps up to which the Gram matrix gives σ_min to about 7 digits
_CHUNK = 2**22  # numbers of attention matrices in float64 at a time
_DENSE = 640  # up to this side a dense eigensolver; a Krylov space beyond
_WIDTH, _STEPS = 8, 12  # of that space
_WEIGHT = ("sigma_max", "sigma_min", "kappa", "stable_rank")


def spread(count: int, most: int | None) -> list[int]:
    """At most ``most`` of ``range(count)``, evenly spaced, the first and the last among them.

    >>> spread(10, 4)
    [0, 3, 6, 9]
    """
    if most is None or most >= count:
        return list(range(count))
    if most == 1:
        return [0]
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def singular_values(a: Tensor, count: int | None = None) -> Tensor:
    """All singular values, in float64 and descending: ``(..., m, n) -> (..., min(m, n))``.

    Through the eigenvalues of the Gram matrix where they resolve the smallest to 7 digits, which is
    faster for batches of heads above all, and directly where not. ``count``: only the first so many
    are wanted that exactly. NaN throughout for a matrix that holds NaN or inf.

    >>> singular_values(torch.tensor([[3.0, 0.0], [0.0, -4.0]]))
    tensor([4., 3.], dtype=torch.float64)
    """
    a = a.detach()
    lead, a = a.shape[:-2], a.reshape(-1, *a.shape[-2:])
    a = a if a.shape[-2] <= a.shape[-1] else a.mT
    x = wide(a)
    peak = torch.linalg.vector_norm(x, math.inf, (-2, -1))  # NaN where there is one
    finite = peak.isfinite()
    if not bool(finite.all()):
        x, peak = torch.where(finite[:, None, None], x, 0.0), torch.where(finite, peak, 0.0)
    # A power of two divides exactly, and then no square can overflow or vanish.
    scale = torch.exp2(torch.frexp(torch.where(peak > 0, peak, 1.0))[1].double())
    if bool(((scale < 1e-30) | (scale > 1e30)).any()):
        x = x / scale[:, None, None]
    else:
        scale = torch.ones_like(scale)
    squares = torch.linalg.eigvalsh(_lower_gram(x)).flip(-1).clamp_min(0)
    sigma = squares.sqrt()
    last = squares.shape[-1] if count is None else min(count, squares.shape[-1])
    poor = squares[:, last - 1] * _GRAM < _EPS * squares[:, 0]
    if bool(poor.any()):
        sigma[poor] = torch.linalg.svdvals(x[poor])
    sigma = torch.where(finite[:, None], sigma * scale[:, None], math.nan)
    return sigma.reshape(*lead, -1)


def _lower_gram(x: Tensor) -> Tensor:
    """The lower triangle of XXᵀ, which is all that eigvalsh reads, for six tenths of the work."""
    n = x.shape[-2]
    if n < 512:
        return x @ x.mT
    gram, step = x.new_zeros(len(x), n, n), math.ceil(n / 6)
    for start in range(0, n, step):
        end = min(n, start + step)
        gram[:, start:end, :end] = x[:, start:end] @ x[:, :end].mT
    return gram


def weight(sigma: Tensor, shape: tuple[int, int]) -> Values:
    """What is said of one weight, from its singular values; κ of a singular one is inf."""
    top, low = float(sigma[0]), float(sigma[-1])
    if math.isnan(top):
        return dict.fromkeys(_WEIGHT, math.nan)
    resolved = low > max(shape) * _EPS * top
    return {
        "sigma_max": top,
        "sigma_min": low,
        "kappa": top / low if resolved else math.inf,
        "stable_rank": float((sigma / sigma[0]).square().sum()) if top > 0 else math.nan,
    }


def tokens(x: Tensor, samples: int | None = None) -> Values:
    """Stable rank of XXᵀ, Σσ⁴/σ_max⁴, and residue ‖X − 1·mean‖/‖X‖: means over (batch, t, d)."""
    x = x[spread(len(x), samples)]
    x = wide(x)
    if not bool(x.isfinite().all()) or not bool(x.any()):
        return {
            "tokens": x.shape[1],
            "token_stable_rank": math.nan,
            "token_residue": math.nan,
            "token_rms": float(x.square().mean().sqrt()),
        }
    size: Tensor = torch.linalg.matrix_norm(x)
    unit = x / size.clamp_min(torch.finfo(x.dtype).tiny)[:, None, None]
    small = unit if x.shape[1] <= x.shape[2] else unit.mT
    fourth = torch.linalg.matrix_norm(small @ small.mT).square()
    residue = torch.linalg.matrix_norm(unit - unit.mean(1, keepdim=True))
    return {
        "tokens": x.shape[1],
        "token_stable_rank": float((fourth / spectral_norm(small).pow(4)).nanmean()),
        "token_residue": float(residue[size > 0].mean()),
        "token_rms": float(x.square().mean().sqrt()),
    }


def attention(
    scores: Scores,
    heads: Sequence[int],
    *,
    gap: bool = False,
    precondition: Precondition | None = None,
    samples: int | None = None,
) -> list[Values]:
    """Entropy, saturation, logits, the spectrum of each head's attention matrix and its output's.

    Means over the items of the batch (``samples`` of them at the most) and their queries.
    ``gap``: what meets the values is P − U; P itself is reported as "raw". ``precondition`` is what
    the product with them goes through. Queries that see fewer than two keys have no choice and do
    not count for entropy and saturation.
    """
    step = max(1, _CHUNK // max(1, scores.queries * scores.keys))
    result: list[Values] = []
    items = spread(scores.items, samples)
    for part in _runs(heads, step):
        found = [
            _measured(*scores.read(i, part), scores.values(i, part), gap, precondition)
            for i in items
        ]
        for h in range(part.stop - part.start):
            result.append(_merged([{k: v[h] for k, v in f.items()} for f in found], gap))
    return result


def _runs(heads: Sequence[int], step: int) -> list[slice]:
    """Heads as slices of consecutive ones, none longer than ``step``."""
    runs: list[slice] = []
    for h in heads:
        if runs and runs[-1].stop == h and h - runs[-1].start < step:
            runs[-1] = slice(runs[-1].start, h + 1)
        else:
            runs.append(slice(h, h + 1))
    return runs


def _measured(
    logits: Tensor,
    visible: Tensor,
    value: Tensor | None,
    gap: bool,
    precondition: Precondition | None,
) -> dict[str, Tensor]:
    """Sums over the queries of one item, for each head: (heads, queries, keys) -> (heads,)."""
    count = visible.sum(-1)
    hidden = logits.masked_fill(~visible, -math.inf)
    p = torch.softmax(hidden, -1).masked_fill((count == 0)[..., None], 0.0)
    counts = count >= 2
    entropy = torch.special.entr(p).sum(-1)
    relative = entropy / count.clamp_min(2).double().log()
    shown = logits.masked_fill(~visible, 0.0)
    found = {
        "rows": counts.sum(-1),
        "entropy": torch.where(counts, entropy, 0.0).sum(-1),
        "entropy_min": torch.where(counts, entropy, math.inf).amin(-1),
        "entropy_relative": torch.where(counts, relative, 0.0).sum(-1),
        "saturation": (counts & (p.amax(-1) > SATURATED)).sum(-1),
        "logit_max": shown.abs().amax((-2, -1)),
        "logits": visible.sum((-2, -1)),
        "logit_squares": shown.square().sum((-2, -1)),
    }
    sinks = value is not None and value.shape[1] < p.shape[2]
    if sinks and value is not None:  # columns without a value, which meet none
        p, visible = p[..., : value.shape[1]], visible[..., : value.shape[1]]
    if gap:
        found |= {f"raw_{k}": v for k, v in _spectrum(p).items()}
        mean = uniform(visible, -1, p.dtype)
        p = p - (mean * p.sum(-1, keepdim=True) if sinks else mean)  # of what sinks leave
    if value is not None:
        output = p @ value.to(p.device)
        found |= _output(output if precondition is None else precondition.equilibrate(output))
    return {k: v.cpu() for k, v in (found | _spectrum(p)).items()}


def _output(a: Tensor) -> dict[str, Tensor]:
    """Ends of the spectrum of heads' outputs, (heads, queries, channels)."""
    sigma = singular_values(a)
    top, low = sigma[:, 0], sigma[:, -1]
    resolved = low > max(a.shape[1:]) * _EPS * top
    kappa = torch.where(resolved | top.isnan(), top / low, math.inf)
    return {"output_sigma_max": top, "output_sigma_min": low, "output_kappa": kappa}


def _spectrum(p: Tensor) -> dict[str, Tensor]:
    finite = p.isfinite().all(-1).all(-1)
    safe = torch.where(finite[:, None, None], p, 0.0)
    top = singular_values(safe, 2) if min(p.shape[-2:]) <= _DENSE else _top_two(safe)
    first = top[:, 0]
    second = top[:, 1] if top.shape[1] > 1 else torch.zeros_like(first)
    rank = safe.square().sum((-2, -1)) / first.square()
    values = {
        "attention_sigma_1": first,
        "attention_sigma_2": second,
        "attention_gap": first - second,
        "attention_stable_rank": rank,
    }
    return {k: torch.where(finite, v, math.nan) for k, v in values.items()}


def _top_two(p: Tensor) -> Tensor:
    """The two largest singular values from a block Krylov space, never above the true ones."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(p.shape[-1], _WIDTH, generator=generator, dtype=p.dtype, device="cpu")
    start[:, 0] = 1.0  # nearly the first singular vector of a matrix whose rows sum to one
    block = torch.linalg.qr(start.to(p.device))[0].expand(len(p), -1, -1)
    basis = [block]
    for _ in range(_STEPS):
        block = torch.linalg.qr(p.mT @ (p @ block))[0]
        basis.append(block)
    space = torch.linalg.qr(torch.cat(basis, -1))[0]
    values: Tensor = torch.linalg.svdvals(p @ space)
    return values[:, :2]


def _merged(items: list[dict[str, Tensor]], gap: bool) -> Values:
    total = {k: sum(float(i[k]) for i in items) for k in items[0]}
    rows, logits = total["rows"], total["logits"]
    values: Values = {
        "entropy": total["entropy"] / rows if rows else None,
        "entropy_min": float(_all(items, "entropy_min").amin()) if rows else None,
        "entropy_relative": total["entropy_relative"] / rows if rows else None,
        "saturation": total["saturation"] / rows if rows else None,
        "logit_max": float(_all(items, "logit_max").amax()),
        "logit_rms": math.sqrt(total["logit_squares"] / logits) if logits else None,
    }
    for name in ("sigma_1", "sigma_2", "gap", "stable_rank"):
        for prefix in ("", "raw_"):
            source = f"raw_attention_{name}" if prefix and gap else f"attention_{name}"
            values[f"{prefix}attention_{name}"] = total[source] / len(items)
    for name in ("output_sigma_max", "output_sigma_min", "output_kappa"):
        if name in total:
            values[name] = total[name] / len(items)
    return values


def _all(items: list[dict[str, Tensor]], name: str) -> Tensor:
    return torch.stack([i[name] for i in items])  # whose extremes are NaN where one of them is
