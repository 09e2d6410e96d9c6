"""Parameter groups: what decays, and what has a learning rate of its own."""

from __future__ import annotations

from typing import Any

from timm.optim import param_groups_weight_decay
from torch import nn

from attncond.errors import UnsupportedAttentionError
from attncond.inspection import inspect
from attncond.lab.config import Optim
from attncond.lab.initial import outputs

__all__ = ["parameter_groups", "qkv_parameters"]


def qkv_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The weights that hold W_Q, W_K and W_V, and all other parameters, in the model's order.

    A fused weight counts as one of the first; biases do not. Works on conditioned models too.
    """
    weights = {id(p.raw) for site in inspect(model) for p in site.projections}
    parameters = list(model.parameters())
    return (
        [p for p in parameters if id(p) in weights],
        [p for p in parameters if id(p) not in weights],
    )


def parameter_groups(model: nn.Module, optim: Optim) -> list[dict[str, Any]]:
    """Groups for ``torch.optim.AdamW(groups, betas=..., eps=...)``; each has its own ``lr``.

    timm's rule says what does not decay: vectors, biases, and what the model itself names (tokens,
    position tables). A group's ``name`` is decay, no_decay, qkv, or, where these have a rate of
    their own, output.

    Raises:
        UnsupportedAttentionError: Weights shall have a rate of their own, and there are none.
    """
    own: Any = getattr(model, "no_weight_decay", tuple)
    qkv = {id(p) for p in qkv_parameters(model)[0]}
    output = {id(p.weight) for p in outputs(model)} if optim.output_lr != 1.0 else set()
    if optim.qkv_lr != 1.0 and not qkv:
        raise UnsupportedAttentionError("optim.qkv_lr: there is no attention with W_Q, W_K and W_V")
    if optim.output_lr != 1.0 and not output:
        raise UnsupportedAttentionError(
            "optim.output_lr: there is no attention with an output projection 'proj'"
        )
    groups: dict[str, dict[str, Any]] = {}
    found = param_groups_weight_decay(model, optim.weight_decay, no_weight_decay_list=own())
    for group in found:
        decay = group["weight_decay"]
        for parameter in group["params"]:
            rate = optim.lr
            name = "decay" if decay else "no_decay"
            if id(parameter) in qkv:
                name, rate = "qkv", optim.lr * optim.qkv_lr
            elif id(parameter) in output:
                name, rate = "output", optim.lr * optim.output_lr
            made = groups.setdefault(
                name, {"name": name, "params": [], "lr": rate, "weight_decay": decay}
            )
            made["params"].append(parameter)
    return list(groups.values())
