"""What folding writes into weights: s·(W + C), and what heads do where that is exact.

That is the gap over channels alone; the rest is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from attncond.corrections import check_calibrated, effective, flat, full, like, records, unflat
from attncond.errors import ConditioningError, NotFoldableError
from attncond.heads import HeadMethod, conditioned_heads
from attncond.inspection import Plan
from attncond.methods import Precondition
from attncond.sites import Projection, Site
from attncond.weights import Weight

Changed = list[tuple[Tensor, Tensor]]  # parameters, and what they become


@contextmanager
def overwritten(changed: Changed) -> Iterator[None]:
    """Write values into parameters. What fails in that, or inside, leaves all as they were."""
    before = [(parameter, parameter.detach().clone()) for parameter, _ in changed]
    try:
        for parameter, value in changed:
            parameter.copy_(value)
        yield
    except BaseException:
        for parameter, value in before:
            parameter.copy_(value)
        raise


def folded_weights(weights: Sequence[Weight]) -> Changed:
    """The conditioned parameters, and their effective weights."""
    folded: dict[int, tuple[Weight, Tensor]] = {}
    for weight in weights:
        if weight.raw.is_meta:
            raise ConditioningError("weights on the meta device cannot be folded: load them first")
        check_calibrated(weight.owner)
        value = effective(weight.owner, weight.name, full(weight.raw))
        first, other = folded.setdefault(id(weight.raw), (weight, value))
        if not torch.equal(value, other):
            raise NotFoldableError(
                f"{weight} and {first} are one parameter with two corrections (other heads, or "
                "tied after conditioning), which no single weight can hold; untie them first"
            )
    for weight, value in folded.values():
        if not torch.isfinite(value).all():
            raise ConditioningError(
                f"the effective {weight} is not finite, so nothing was folded; remove() gives "
                "the raw weights back"
            )
    return [(weight.raw, like(value, weight.raw)) for weight, value in folded.values()]


def folded_heads(
    model: nn.Module, modules: Sequence[nn.Module], plan: Plan, method: HeadMethod
) -> Changed:
    """W_V with which the stock heads do what the method does, or a refusal by name.

    ``modules``: those whose heads are conditioned; ``plan``: what the model has now.

    Attention over the channels of a head has a d×d matrix P with rows that sum to one, so that
    (P − 11ᵀ/d)V = P(V − 11ᵀV/d): it is enough to take the mean over the head's channels out of V,
    that is, out of the rows of W_V and of its bias.
    """
    if isinstance(method, Precondition):
        raise NotFoldableError(
            "Precondition cannot be folded: the length of each row depends on the input, and no "
            "weight does. remove() takes it off."
        )
    sites = [site for module in modules for site in plan if site.module is module]
    stuck = [site for site in sites if not site.over_channels]
    if stuck:
        more = f" and {len(stuck) - 1} more" if len(stuck) > 1 else ""
        raise NotFoldableError(
            f"RemoveGap cannot be folded in {stuck[0].path or 'the model'} ({stuck[0].cls}){more}: "
            "the mean over the tokens depends on the input, and no weight does. It folds in "
            "attention over channels (cross-covariance) alone; nothing was changed. remove() "
            "takes it off; ac.condition(part, ...) gives parts of the model a handle each."
        )
    for module in modules:
        if not any(site.module is module for site in sites):
            record = conditioned_heads(module)
            raise NotFoldableError(
                f"RemoveGap cannot be folded in {(record and record.path) or 'the model'}: its "
                "weights were exchanged since it was conditioned (by quantisation, or a "
                "parametrisation) and can be read no more. Fold before that; remove() takes it off."
            )
    return [pair for site in sites for pair in _centred(model, site)]


def _centred(model: nn.Module, site: Site) -> Changed:
    """The parameters of one site's values, without the mean over the channels of each head."""
    value = site.projection("v")
    where = site.path or "the model"
    if value is None:
        raise NotFoldableError(f"RemoveGap cannot be folded in {where}: it has no W_V")
    if records(value.owner):
        raise NotFoldableError(
            f"RemoveGap cannot be folded in {where} while Spectral conditions its W_V: fold or "
            "remove that first"
        )
    if any(getattr(m, "base_layer", None) is value.owner for m in model.modules()):
        raise NotFoldableError(
            f"RemoveGap cannot be folded in {where}: an adapter (LoRA) adds to what its W_V gives; "
            "merge the adapter into the weights first"
        )
    raw = value.raw
    if raw.is_meta:
        raise ConditioningError("weights on the meta device cannot be folded: load them first")
    pairs = [(raw, unflat(_without_mean(flat(raw, value.axis), value), raw, value.axis))]
    bias_name = value.name.replace("weight", "bias")
    bias = value.owner._parameters.get(bias_name)
    if bias is not None:
        pairs.append((bias, _without_mean(bias, value)))
    for parameter, new in pairs:
        if not torch.isfinite(new).all():
            raise ConditioningError(f"the values' weights of {where} are not finite")
        uses = sum(p is parameter for m in model.modules() for p in m._parameters.values())
        if uses > 1:
            raise NotFoldableError(f"the values' weights of {where} are tied to other weights")
    return pairs


def _without_mean(rows: Tensor, value: Projection) -> Tensor:
    """Take the mean over the channels of each head out of its rows."""
    index = value.rows.to(rows.device)
    new = rows.clone()
    part = rows[index].to(torch.promote_types(rows.dtype, torch.float32))
    new[index] = (part - part.mean(1, keepdim=True)).to(rows.dtype)
    return new
