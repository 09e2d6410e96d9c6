"""Separate Q, K and V recognised by their names and shapes, whatever the library.

Only weights of their own are matched here: where three roles share a weight, nothing about its
shape tells their order, and a guess would condition the wrong rows in silence.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
from torch import nn

from attncond.adapters.naming import maps, roles, triples
from attncond.errors import UnsupportedAttentionError
from attncond.sites import Kind, Site, class_name, raw_parameter, separate, weight_of

_HEADS = (
    "num_heads",
    "num_attention_heads",
    "n_heads",
    "n_head",
    "nhead",
    "heads",
    "num_head",
    "encoder_attention_heads",
)
_HEAD_DIM = (
    "head_dim",
    "attention_head_size",
    "dim_head",
    "head_size",
    "d_head",
    "d_k",
    "d_kv",
    "key_value_proj_dim",
)

LATENT = "multi-head latent attention: Q, K and V are products of low-rank factors, not one weight"
RECURRENT = (
    "a gated recurrence (delta rule) after a convolution: it has no attention matrix, "
    "so that nothing bounds it by its Q, K and V"
)
CONVOLVED = "a convolution mixes tokens and channels between the projections and the product"
# Reasons for which no rows can be named.
NO_ROWS = (LATENT, RECURRENT, CONVOLVED)
_CONVOLUTION = re.compile(r"^[qkv]_\w*conv\w*$")
_LATENT = re.compile(r"^(q|kv|k|v)_(a|b|down|up)_proj(_with_mqa)?$|^to_latent_(q|kv|k|v)$")
_CROSS = re.compile(r"Cross|EncDec")
_WINDOW = re.compile(r"Swin|Window|Local|Neighborhood")


def _attribute(sources: tuple[Any, ...], names: tuple[str, ...]) -> int | None:
    for source in sources:
        for name in names:
            value: Any = getattr(source, name, None)
            if isinstance(value, int | np.integer) and not isinstance(value, bool) and value > 0:
                return int(value)
    return None


def heads_of(module: nn.Module) -> int | None:
    """How many heads a module, or else its config, says it has."""
    return _attribute((module, getattr(module, "config", None)), _HEADS)


def heads_name(module: nn.Module) -> str | None:
    """Under which name a module itself says how many heads it has."""
    return next((name for name in _HEADS if _attribute((module,), (name,))), None)


def match(module: nn.Module) -> Site | None:
    """The site of a module with a weight for each of Q, K and V, or None."""
    if any(_LATENT.match(name) for name in module._modules):
        raise UnsupportedAttentionError(LATENT)
    children = {n: m for n, m in module._modules.items() if m is not None}
    for names in triples([n for n, m in children.items() if roles(n) and maps(m)]):
        q, k, v = (children[n] for n in names)
        if {"conv1d", "q_conv1d"} & module._modules.keys():
            raise UnsupportedAttentionError(RECURRENT)
        if any(_CONVOLUTION.match(name) for name in module._modules if name not in names):
            raise UnsupportedAttentionError(CONVOLVED)
        if more := _beside(children, names):
            raise UnsupportedAttentionError(
                f"has {', '.join(more)} beside {', '.join(names)}; an adapter has to tell "
                "which of them attend, and to what"
            )
        sizes = [row_count(child) for child in (q, k, v)]
        heads = _count(module, names[0], sizes[0])
        width = sizes[0] // heads
        if sizes[1] % width:
            raise UnsupportedAttentionError(
                f"{names[1]} has {sizes[1]} rows, which is no multiple of the head size {width}"
            )
        site = separate(q, k, v, heads=heads, kv_heads=sizes[1] // width)
        return replace(site, kind=_kind(module, site))
    return None


def _beside(children: dict[str, nn.Module], taken: tuple[str, ...]) -> list[str]:
    """Other maps whose names say that they make queries, keys and values, if these are a set.

    A second stream of tokens has such a set, and so has a fused weight that replaces the three.
    """
    more = {n: roles(n) for n, m in children.items() if n not in taken and maps(m)}
    fused = any(len(r) > 1 for r in more.values())
    return (
        [n for n, r in more.items() if r] if fused or len(set("".join(more.values()))) > 1 else []
    )


def _count(module: nn.Module, name: str, size: int) -> int:
    """The number of query heads, on which the module's attributes and its rows have to agree."""
    config = getattr(module, "config", None)
    heads, head_dim = _attribute((module,), _HEADS), _attribute((module,), _HEAD_DIM)
    if heads and head_dim and heads * head_dim != size:
        # As many channels again for a gate, say: which rows are the query's is not to be guessed.
        raise UnsupportedAttentionError(
            f"{name} has {size} rows, not {heads} heads of {head_dim}; an adapter has to tell "
            "which of them are the query's"
        )
    if heads is None and head_dim is None:
        heads, head_dim = _attribute((config,), _HEADS), _attribute((config,), _HEAD_DIM)
    elif heads is None and head_dim:
        told = _attribute((config,), _HEADS)
        if told and size == 2 * told * head_dim:
            raise UnsupportedAttentionError(
                f"{name} has {size} rows, twice {told} heads of {head_dim}; an adapter has to tell "
                "which of them are the query's"
            )
    if heads is None and head_dim is None:
        raise UnsupportedAttentionError(
            f"has {name}, but no attribute tells the number of heads "
            f"(looked for {', '.join(_HEADS + _HEAD_DIM)})"
        )
    if heads is None or size % heads:
        heads = size // head_dim if head_dim and size % head_dim == 0 else None
    if heads is None:
        raise UnsupportedAttentionError(f"{name} has {size} rows, heads do not divide it")
    return heads


def _kind(module: nn.Module, site: Site) -> Kind:
    name = getattr(type(module), "_attncond_base", type(module)).__name__
    q, k = site.projection("q"), site.projection("k")
    # BART's children build self and cross attention from one class; only the first is causal.
    decoder = getattr(module, "is_decoder", False) is True
    if (
        _CROSS.search(name)
        or getattr(module, "is_cross_attention", False) is True
        or (decoder and getattr(module, "is_causal", True) is False)
        or (q is not None and k is not None and q.in_features != k.in_features)
    ):
        return "cross"
    return "window" if _WINDOW.search(name) else "self"


def row_count(child: nn.Module) -> int:
    """Rows of a projection's stored weight; its effective one may not be there to be asked yet."""
    owner, axis = weight_of(child, "weight")
    known = isinstance(owner, nn.Linear | nn.modules.conv._ConvNd) or hasattr(owner, "out_features")
    weight, rows = raw_parameter(owner, "weight"), getattr(owner, "out_features", None)
    turned = isinstance(owner, nn.modules.conv._ConvTransposeNd)
    turned |= weight.shape[axis] != rows == weight.shape[1 - axis]
    if turned or not (known or axis == 1):
        raise UnsupportedAttentionError(
            f"whether {class_name(owner)} stores its weight as (out, in) or (in, out) cannot be "
            "seen; register an adapter that says so"
        )
    packed = not weight.is_floating_point() or weight.shape[1] == 1
    if isinstance(rows, int) and rows != weight.shape[axis] and packed:
        raise UnsupportedAttentionError(
            f"{class_name(owner)} packs its weight ({rows} rows) as {tuple(weight.shape)} numbers "
            f"of {weight.dtype}; condition the model before it is quantised"
        )
    return weight.shape[axis]
