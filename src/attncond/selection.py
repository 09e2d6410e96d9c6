"""Choose the parameters that a method changes, and refuse those it cannot."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from attncond.corrections import Correction, flat, full
from attncond.errors import ConditioningError, UnsupportedAttentionError
from attncond.heads import HeadMethod, own_kernel
from attncond.inspection import Plan, Unsupported, unsupported_table
from attncond.methods import Precondition, Spectral
from attncond.sites import Projection, Site
from attncond.weights import Weight, take

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_plan(model: nn.Module, plan: Plan, skip_unsupported: bool) -> None:
    """Refuse a model without attention, or with some that no adapter reads."""
    if plan.unsupported and not (skip_unsupported and plan.sites):
        others = (
            "skip_unsupported=True leaves them as they are" if plan.sites else "there is no other"
        )
        raise UnsupportedAttentionError(
            f"{len(plan.unsupported)} attention modules of {type(model).__name__} are not "
            f"supported ({others}).\n\n" + unsupported_table(plan.unsupported)
        )
    if not plan.sites:
        raise UnsupportedAttentionError(
            f"no attention was found in {type(model).__name__}. If it has some, register an "
            "adapter for its class with ac.register."
        )


def select_heads(
    model: nn.Module, plan: Plan, method: HeadMethod, skip_unsupported: bool
) -> list[Site]:
    """The sites whose heads ``method`` changes in ``model``, each checked."""
    unread = [
        Unsupported(site.path, site.cls, (), reason)
        for site in plan.sites
        if (reason := _unreachable(site, plan, method))
    ]
    paths = {u.path for u in unread}
    unknown = bool(plan.unsupported)
    plan = Plan(
        tuple(site for site in plan.sites if site.path not in paths),
        plan.unsupported + tuple(unread),
    )
    name = type(method).__name__
    if plan.unsupported and not (skip_unsupported and plan.sites):
        raise UnsupportedAttentionError(
            f"{name} cannot reach {len(plan.unsupported)} attention modules of "
            f"{type(model).__name__} (skip_unsupported=True leaves them as they are, if there are "
            "others).\n\n" + unsupported_table(plan.unsupported, advice=unknown)
        )
    check_plan(model, plan, skip_unsupported)
    return list(plan.sites)


def _unreachable(site: Site, plan: Plan, method: HeadMethod) -> str:
    """Why the attention matrix and the heads' outputs of a site cannot be reached, if so."""
    if site.opaque:
        return site.opaque
    if site.scattered and isinstance(method, Precondition):
        return site.scattered
    if site.kind == "linear":
        return "linear attention: there is no softmax, hence no matrix whose rows sum to one"
    if "forward" in site.module.__dict__:
        return (
            "its forward is replaced on the instance (by accelerate's hooks, or another library); "
            "condition the model before that"
        )
    if any(o.module is not site.module and o.module in site.module.modules() for o in plan.sites):
        return "it holds another attention, whose heads could not be told from its own"
    inside = f"{site.path}." if site.path else ""
    if any(u.path != site.path and u.path.startswith(inside) for u in plan.unsupported):
        return "a part of it is not supported, whose attention could not be told from its own"
    return own_kernel(site.module)


def select(model: nn.Module, plan: Plan, method: Spectral, skip_unsupported: bool) -> list[Weight]:
    """The weights that ``method`` changes in ``model``, each checked; a shared one stands once."""
    check_plan(model, plan, skip_unsupported)
    groups: dict[tuple[int, str], dict[bytes, Projection]] = defaultdict(dict)
    for site in plan.sites:
        for p in site.projections:
            if p.role in method.roles:
                # A shared module is met at several sites; it is conditioned once.
                groups[id(p.owner), p.name].setdefault(p.rows.numpy().tobytes(), p)
    for site in plan.sites:
        for p in site.projections:
            for other in groups.get((id(p.owner), p.name), {}).values():
                if p.role not in method.roles and torch.isin(p.rows, other.rows).any():
                    raise ConditioningError(
                        f"W_{p.role.upper()} shares {p.path}.{p.name} with W_{other.role.upper()}, "
                        f"so that roles={method.roles!r} cannot leave it as it is"
                    )
    if not groups:
        raise ConditioningError(f"none of the attention has separate weights for {method.roles!r}")
    weights = []
    for found in groups.values():
        parts = list(found.values())
        first = parts[0]
        taken = torch.cat([p.rows.flatten() for p in parts])
        if taken.unique().numel() != taken.numel():
            raise ConditioningError(f"{first.path}.{first.name}: two roles claim the same rows")
        correction = Correction(
            method, first.axis, tuple(p.role for p in parts), tuple(p.rows for p in parts)
        )
        weights.append(Weight(first.path, first.owner, first.name, correction))
    _check_sharing(model, weights)
    for weight in weights:
        check_weight(model, weight)
    return weights


def _check_sharing(model: nn.Module, weights: list[Weight]) -> None:
    """A parameter that something else reads too would change there when it is folded."""
    conditioned = {id(w.raw): w for w in weights}
    owners = {(id(w.owner), w.name) for w in weights}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            weight = conditioned.get(id(parameter))
            if weight is not None and (id(module), name) not in owners:
                other = f"{path}.{name}" if path else name
                raise ConditioningError(
                    f"{weight} is tied to {other}, which this call leaves as it is"
                )


def check_weight(model: nn.Module, weight: Weight) -> None:
    """Refuse a weight that has no condition number to improve, or that this process cannot see."""
    raw = weight.raw
    if isinstance(raw, DTensor):
        if not _is_sharded_by_fsdp(model, weight.owner):
            raise ConditioningError(
                f"{weight} is split by tensor parallelism, where no rank holds a whole matrix; "
                "condition and fold the model before parallelising it"
            )
        raw = full(raw)
    elif type(raw.data) is not Tensor or raw.dtype not in _DTYPES:
        kind = type(raw.data).__name__ if type(raw.data) is not Tensor else str(raw.dtype)
        raise ConditioningError(
            f"{weight} is quantised or packed ({kind}); condition the model in "
            "float16, bfloat16, float32 or float64 and quantise it after folding"
        )
    if raw.layout != torch.strided:
        raise ConditioningError(f"{weight} is sparse ({raw.layout}); make it dense first")
    if raw.is_meta:
        return
    matrix = flat(raw.detach(), weight.correction.axis)
    if not torch.isfinite(matrix).all():
        raise ConditioningError(f"{weight} holds NaN or Inf; nothing was changed")
    for role, index in weight.correction.matrices():
        if not take(matrix, index).any():
            raise ConditioningError(
                f"W_{role.upper()} in {weight} is all zeros: it has no condition number to "
                "improve. Initialise or load the weights first."
            )


def _is_sharded_by_fsdp(model: nn.Module, owner: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return any(
        isinstance(m, FSDPModule) and any(child is owner for child in m.modules())
        for m in model.modules()
    )
