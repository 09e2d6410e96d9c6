"""Where W_Q, W_K and W_V live: every layout reduced to one canonical (heads, head_dim, in) view.

A projection is a list of rows of a parameter. Stacked, head-major, grouped and transposed weights
differ only in which row belongs to which head and channel, so an index says it all, and everything
that is built on top (conditioning, diagnosis) never sees a layout again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from attncond.errors import UnsupportedAttentionError

Role = Literal["q", "k", "v"]
Kind = Literal["self", "cross", "class", "window", "cross-covariance", "channel", "linear"]


@dataclass(frozen=True, eq=False)
class Projection:
    """One of W_Q, W_K, W_V, as rows of the parameter ``owner.<name>``.

    ``rows[h, c]`` is the index along ``axis`` of the row that produces channel ``c`` of head ``h``.
    ``tiled``: where there are fewer of them, query heads take them in turns, not block by block.
    """

    role: Role
    owner: nn.Module
    rows: Tensor
    name: str = "weight"
    axis: int = 0
    path: str = ""
    tiled: bool = False

    def serving(self, head: int, heads: int) -> int:
        """Which of its heads belongs to one of as many ``heads`` of queries."""
        return head % self.heads if self.tiled else head * self.heads // heads

    @property
    def raw(self) -> Tensor:
        """The stored parameter, never the effective weight."""
        return raw_parameter(self.owner, self.name)

    @property
    def heads(self) -> int:
        """How many heads this projection feeds."""
        return self.rows.shape[0]

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.rows.shape[1]

    @property
    def in_features(self) -> int:
        """Channels that the projection reads."""
        return self.raw.numel() // self.raw.shape[self.axis]

    def matrix(self, weight: Tensor | None = None) -> Tensor:
        """The canonical (heads, head_dim, in_features) matrix of ``weight``, or of the raw one."""
        weight = self.raw if weight is None else weight
        flat = weight.movedim(self.axis, 0).flatten(1)
        return flat[self.rows.to(flat.device)]


SCRIPTED = "TorchScript modules cannot be changed; use the eager model"

# Masks are -inf, the least number of a dtype, or -1e4 at the smallest; logits are never so low.
HIDDEN = -9000.0


@dataclass(frozen=True, eq=False)
class Site:
    """One attention: the module that computes it, and its projections.

    ``hidden``: what lowers a logit by more hides its key; Swin's windows have masks of -100.
    ``opaque``: why its attention matrix and heads' outputs cannot be reached, if they cannot.
    ``scattered``: why a head's output is nowhere in one piece, if so; only its sum could be
    preconditioned, while the gap can still be removed from each part.
    ``softmax``: which softmax of its forward the values meet, counted from 1, where others stand
    between it and the heads' outputs (Nyströmformer); 0 where each meets values.
    ``optional``: a forward may do without it, as Longformer's does where no token is global.
    """

    projections: tuple[Projection, ...]
    layout: str
    kind: Kind = "self"
    module: nn.Module = field(default_factory=nn.Identity)
    path: str = ""
    hidden: float = HIDDEN
    opaque: str = ""
    scattered: str = ""
    softmax: int = 0
    optional: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind must be one of {', '.join(get_args(Kind))}, not {self.kind!r}")

    def projection(self, role: Role) -> Projection | None:
        """The projection of one role, or None where the attention has none (V of some kinds)."""
        return next((p for p in self.projections if p.role == role), None)

    @property
    def cls(self) -> str:
        """Qualified name of the attention's class, conditioned or not."""
        return class_name(self.module)

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.projections[0].heads

    @property
    def over_channels(self) -> bool:
        """Whether its attention matrix is one of a head's channels, not of tokens."""
        return self.kind in ("cross-covariance", "channel")


def class_name(module: nn.Module) -> str:
    """Qualified name of a module's class as its library defined it."""
    cls = getattr(type(module), "_attncond_base", type(module))
    if cls.__module__.startswith("torch.distributed.fsdp"):  # fully_shard's: (FSDPModule, the own)
        cls = cls.__bases__[-1]
    return f"{cls.__module__}.{cls.__qualname__}"


def raw_parameter(owner: nn.Module, name: str) -> Tensor:
    """The tensor registered under ``name``, past any conditioning, or a refusal that says why."""
    parameter = owner._parameters.get(name)
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise UnsupportedAttentionError(
            f"'{name}' of {class_name(owner)} has no shape yet; run the model once to give it one"
        )
    if parameter is None:
        raise UnsupportedAttentionError(
            f"'{name}' of {class_name(owner)} is not a plain Parameter "
            "(quantised, parametrised, shared through a hook, or absent)"
        )
    return parameter


def layers_with(owner: nn.Module, name: str) -> list[str]:
    """The modules inside of ``owner`` that have a parameter of that name."""
    return [path for path, m in owner.named_modules() if m._parameters.get(name) is not None]


def weight_of(owner: nn.Module, name: str, transposed: bool = False) -> tuple[nn.Module, int]:
    """Resolve wrappers, check that the weight is a matrix, and return (owner, output axis)."""
    while isinstance(base := getattr(owner, "base_layer", None), nn.Module):  # peft keeps W there
        owner = base
    if isinstance(owner, torch.jit.ScriptModule):
        raise UnsupportedAttentionError(SCRIPTED)
    if not isinstance(owner, nn.Module):
        raise UnsupportedAttentionError(
            f"the layer that holds the weight is wanted, such as an nn.Linear, not {type(owner)}"
        )
    if name not in owner._parameters and (inner := layers_with(owner, name)):
        raise UnsupportedAttentionError(
            f"{class_name(owner)} has no '{name}' of its own, but holds layers that have "
            f"({', '.join(inner)}); if the projection is one of them alone, an adapter can name it"
        )
    weight = raw_parameter(owner, name)
    wide = any(size != 1 for size in weight.shape[2:])
    if wide and isinstance(owner, nn.modules.conv._ConvNd):
        raise UnsupportedAttentionError(f"kernel {tuple(weight.shape[2:])} is not 1x1")
    if getattr(owner, "groups", 1) != 1 and isinstance(owner, nn.modules.conv._ConvNd):
        raise UnsupportedAttentionError("grouped convolution: the projection is block diagonal")
    if wide or weight.ndim < 2:
        raise UnsupportedAttentionError(f"weight of shape {tuple(weight.shape)} is not a matrix")
    # transformers' Conv1D (GPT-2) stores (in, out).
    in_out = transposed or any(c.__name__ == "Conv1D" for c in type(owner).__mro__)
    return owner, 1 if in_out else 0


def project(
    role: Role, owner: nn.Module, rows: Tensor, *, name: str = "weight", transposed: bool = False
) -> Projection:
    """A projection from an explicit (heads, head_dim) index of rows, for layouts of your own.

    ``transposed``: the weight is (in, out), as in ``x @ W``, and its columns are meant.

    >>> linear = nn.Linear(8, 24)
    >>> project("k", linear, torch.arange(8, 16).view(2, 4)).matrix().shape
    torch.Size([2, 4, 8])
    """
    owner, axis = weight_of(owner, name, transposed)
    size = raw_parameter(owner, name).shape[axis]
    if rows.ndim != 2 or rows.numel() == 0:
        raise UnsupportedAttentionError(f"rows must be (heads, head_dim), not {tuple(rows.shape)}")
    if rows.is_meta:
        raise UnsupportedAttentionError("rows on the meta device hold no numbers: device='cpu'")
    rows = rows.cpu()  # built under a default device, they lie there
    if int(rows.min()) < 0 or int(rows.max()) >= size:
        raise UnsupportedAttentionError(f"rows reach {int(rows.max())}, the weight has {size}")
    return Projection(role, owner, rows, name, axis)


def _divide(size: int, parts: int, what: str) -> int:
    if parts <= 0 or size <= 0 or size % parts:
        raise UnsupportedAttentionError(f"{what}: {size} rows do not divide into {parts} heads")
    return size // parts


def separate(
    q: nn.Module | None,
    k: nn.Module | None,
    v: nn.Module | None,
    *,
    heads: int,
    kv_heads: int | None = None,
    kind: Kind = "self",
    names: tuple[str, str, str] = ("weight", "weight", "weight"),
    transposed: bool = False,
) -> Site:
    """A site whose Q, K and V have a weight each (``nn.Linear``, 1x1 convolution, ``Conv1D``).

    ``names`` are the parameters' names, for modules that hold the three weights themselves, and
    ``transposed`` says that these are (in, out), as in ``x @ W``.

    >>> m = nn.ModuleDict({r: nn.Linear(16, 16) for r in "qkv"})
    >>> separate(m["q"], m["k"], m["v"], heads=4).projections[0].rows.shape
    torch.Size([4, 4])
    """
    projections = []
    roles: tuple[Role, Role, Role] = ("q", "k", "v")
    for role, owner, name in zip(roles, (q, k, v), names, strict=True):
        if owner is None:
            continue
        owner, axis = weight_of(owner, name, transposed)
        size = raw_parameter(owner, name).shape[axis]
        count = heads if role == "q" or kv_heads is None else kv_heads
        rows = torch.arange(size, device="cpu")  # whatever the default device is
        rows = rows.view(count, _divide(size, count, role.upper()))
        projections.append(Projection(role, owner, rows, name, axis))
    return Site(tuple(projections), "separate", kind)


def fused(
    owner: nn.Module,
    order: str = "qkv",
    *,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    v_head_dim: int | None = None,
    head_major: bool = False,
    start: int = 0,
    name: str = "weight",
    transposed: bool = False,
    kind: Kind = "self",
) -> Site:
    """A site whose roles share one weight.

    Role by role (``[q; k; v]``, the default) or head by head (``head_major``: ``[q_1; k_1; v_1;
    q_2; ...]``), in the order given, from row ``start`` on. ``head_dim`` is inferred when all rows
    belong to the roles named and all heads are of one size, save those of ``v_head_dim``.
    ``transposed``: the weight is (in, out), as in ``x @ W``, and its columns are meant.

    >>> site = fused(nn.Linear(8, 24), heads=2, head_major=True)
    >>> site.projection("k").rows
    tensor([[ 4,  5,  6,  7],
            [16, 17, 18, 19]])
    """
    if not order or set(order) - set("qkv") or len(set(order)) < len(order):
        raise UnsupportedAttentionError(f"order must be some of 'qkv', each once, not {order!r}")
    owner, axis = weight_of(owner, name, transposed)
    size = raw_parameter(owner, name).shape[axis] - start
    count = {r: heads if r == "q" or kv_heads is None else kv_heads for r in order}
    given = {r: v_head_dim if r == "v" and v_head_dim is not None else head_dim for r in order}
    dim = {r: d for r, d in given.items() if d is not None}
    if open_heads := sum(count[r] for r in order if r not in dim):
        rest = size - sum(count[r] * d for r, d in dim.items())
        dim = dict.fromkeys(order, _divide(rest, open_heads, "fused weight")) | dim
    total = sum(count[r] * dim[r] for r in order)
    if total > size:
        raise UnsupportedAttentionError(
            f"fused weight has {size} rows, {order} with {count} heads of {dim} needs {total}"
        )
    rows: dict[str, Tensor] = {}
    index = torch.arange(start, start + total, device="cpu")
    if head_major:
        if len(set(count.values())) != 1:
            raise UnsupportedAttentionError("head-major weights need as many K, V as Q heads")
        parts = index.view(count[order[0]], -1).split([dim[r] for r in order], dim=1)
        rows = dict(zip(order, parts, strict=True))
    else:
        parts = index.split([count[r] * dim[r] for r in order])
        rows = {r: part.view(count[r], -1) for r, part in zip(order, parts, strict=True)}
    layout = f"fused {order}, {'head' if head_major else 'role'}-major"
    return Site(
        tuple(Projection(r, owner, rows[r], name, axis) for r in ("q", "k", "v") if r in rows),
        layout,
        kind,
    )


def join(*sites: Site, kind: Kind | None = None, layout: str | None = None) -> Site:
    """One site out of parts, e.g. ``join(separate(q, None, None, ...), fused(kv, "kv", ...))``."""
    parts = [p for site in sites for p in site.projections]
    order = {"q": 0, "k": 1, "v": 2}
    text = layout or " + ".join(dict.fromkeys(s.layout for s in sites))
    ordered = tuple(sorted(parts, key=lambda p: order[p.role]))
    return replace(sites[0], projections=ordered, layout=text, kind=kind or sites[0].kind)
