"""Separate Q, K and V recognised by their names and shapes, whatever the library.

Only weights of their own are matched here: where three roles share a weight, nothing about its
shape tells their order, and a guess would condition the wrong rows in silence.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from attncond.errors import UnsupportedAttentionError
from attncond.sites import Site, raw_parameter, separate

TRIPLES = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
    ("linear_q", "linear_k", "linear_v"),
    ("query_proj", "key_proj", "value_proj"),
    ("to_q", "to_k", "to_v"),
    ("w_q", "w_k", "w_v"),
    ("wq", "wk", "wv"),
    ("W_q", "W_k", "W_v"),
    ("Wq", "Wk", "Wv"),
    ("W_Q", "W_K", "W_V"),
    ("q_linear", "k_linear", "v_linear"),
    ("fc_q", "fc_k", "fc_v"),
    ("proj_q", "proj_k", "proj_v"),
)
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads", "num_head")
_HEAD_DIM = ("head_dim", "attention_head_size", "dim_head", "head_size", "d_head", "d_k", "d_kv")


def _attribute(module: nn.Module, names: tuple[str, ...]) -> int | None:
    for source in (module, getattr(module, "config", None)):
        for name in names:
            value: Any = getattr(source, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def match(module: nn.Module) -> Site | None:
    """The site of a module with a weight for each of Q, K and V, or None."""
    for names in TRIPLES:
        children = [module._modules.get(n) for n in names]
        q, k, v = children
        if q is None or k is None or v is None:
            continue
        sizes = [_rows(child) for child in (q, k, v)]
        head_dim = _attribute(module, _HEAD_DIM)
        heads = _attribute(module, _HEADS)
        if heads is None and head_dim is None:
            raise UnsupportedAttentionError(
                f"has {', '.join(names)}, but no attribute tells the number of heads "
                f"(looked for {', '.join(_HEADS + _HEAD_DIM)})"
            )
        # A module's own head count may be per rank or per group: trust it only if the rows agree.
        if heads is None or sizes[0] % heads:
            heads = sizes[0] // head_dim if head_dim and sizes[0] % head_dim == 0 else None
        if heads is None:
            raise UnsupportedAttentionError(
                f"{names[0]} has {sizes[0]} rows, heads do not divide it"
            )
        width = sizes[0] // heads
        if sizes[1] % width:
            raise UnsupportedAttentionError(
                f"{names[1]} has {sizes[1]} rows, which is no multiple of the head size {width}"
            )
        return separate(q, k, v, heads=heads, kv_heads=sizes[1] // width)
    return None


def _rows(child: nn.Module) -> int:
    while isinstance(base := getattr(child, "base_layer", None), nn.Module):
        child = base
    weight = raw_parameter(child, "weight")
    return weight.shape[1 if type(child).__name__ == "Conv1D" else 0]
