"""What must hold of an attention whose heads are conditioned, told from outside.

A site's forward is called again and again with the inputs that it had in the model, while what its
projections give is changed on the way out. Nothing here knows how conditioning works.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from zoo_models import tensors

import attncond as ac
from attncond.sites import Projection, Site

Change = Callable[[Tensor], Tensor]  # of what a projection gives, (..., heads, head_dim)


class Precise(TorchFunctionMode):
    """Softmaxes that are written in float32 stay in float64, or nothing could be told exactly."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "softmax" and kwargs.get("dtype") == torch.float32:
            kwargs = {**kwargs, "dtype": args[0].dtype}
        return func(*args, **kwargs)


class Altering(TorchFunctionMode):
    """Changes what the rows of some projections give, wherever their weights are used.

    ``uniform`` makes attention uniform over the keys that it sees, when queries are zero too: what
    is added to logits is a mask below -50, a position otherwise.
    """

    def __init__(self, changes: list[tuple[Projection, Change]], uniform: bool) -> None:
        super().__init__()
        self.changes = changes
        self.uniform = uniform
        self.met: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "float" and args[0].dtype == torch.float64:
            return args[0]  # logits on their way to a softmax
        if name == "softmax" and self.uniform:
            args = (_masked_only(args[0]), *args[1:])
        if name == "scaled_dot_product_attention" and self.uniform:
            args, kwargs = _blind(*args, **kwargs)
        out = func(*args, **kwargs)
        if name not in ("linear", "conv1d", "conv2d", "addmm", "matmul", "__matmul__"):
            return out
        for operand in [*args, *kwargs.values()]:
            if not isinstance(operand, Tensor):
                continue
            for p, change in self.changes:
                if (first := _first_row(operand, p)) is not None:
                    self.met.add(p.role)
                    out = _changed(out, 1 if name.startswith("conv") else -1, p, first, change)
        return out


def _masked_only(logits: Tensor) -> Tensor:
    return torch.where(logits < -50, logits, torch.zeros_like(logits))


def _blind(query: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Arguments of scaled_dot_product_attention for queries that see all keys alike."""
    given = list(args)
    mask = given[2] if len(given) > 2 else kwargs.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        if len(given) > 2:
            given[2] = _masked_only(mask)
        else:
            kwargs = {**kwargs, "attn_mask": _masked_only(mask)}
    return (torch.zeros_like(query), *given), kwargs


def _first_row(operand: Tensor, p: Projection) -> int | None:
    """The first of the parameter's rows in an operand that is the parameter, or a slice of it."""
    raw = p.raw
    if operand is raw:
        return 0
    if operand.untyped_storage().data_ptr() != raw.untyped_storage().data_ptr():
        return None
    if p.axis:
        return 0
    first = (operand.storage_offset() - raw.storage_offset()) // raw.stride(0)
    rows = operand.shape[1] if operand.stride()[::-1] == raw.stride() else operand.shape[0]
    inside = int(p.rows.min()) >= first and int(p.rows.max()) < first + rows
    return first if inside else None


def _changed(out: Tensor, axis: int, p: Projection, first: int, change: Change) -> Tensor:
    channels = out.movedim(axis, -1).clone()
    index = p.rows - first
    channels[..., index] = change(channels[..., index])
    return channels.movedim(-1, axis)


@dataclass
class Call:
    """One forward of a module with sites, to be repeated."""

    module: nn.Module
    sites: list[Site]
    args: Any
    kwargs: Any

    def __call__(self, values: Change | None = None, *, uniform: bool = False) -> Tensor:
        """The output, with what the V projections give changed, or attention made uniform."""
        seed()
        projections = [p for s in self.sites for p in s.projections]
        found = [(p, values) for p in projections if values and p.role == "v"]
        if uniform:
            found += [(p, scale(0.0)) for p in projections if p.role == "q"]
        with ExitStack() as stack:
            stack.enter_context(Precise())
            mode = stack.enter_context(Altering(found, uniform))
            if not hasattr(type(self.module), "_attncond_base"):
                # torch's multi_head_attention_forward would reach the mode as a whole.
                for n in ("", "_unary", "_variadic"):
                    patch = mock.patch.object(F, f"has_torch_function{n}", return_value=False)
                    stack.enter_context(patch)
            output = self.module(*copied(self.args), **copied(self.kwargs))
        assert mode.met == {p.role for p, _ in found}, "a projection was never used"
        return flat(output)

    @property
    def over_channels(self) -> bool:
        """Whether its keys are the channels of a head."""
        return self.sites[0].kind in ("cross-covariance", "channel")

    @property
    def cls(self) -> str:
        """The short name of its class."""
        return self.sites[0].cls.rsplit(".", 1)[-1]

    @property
    def has_values(self) -> bool:
        """Whether V has a projection of its own."""
        return any(p.role == "v" for s in self.sites for p in s.projections)


def copied(tree: Any) -> Any:
    """The same tensors anew, so that a forward that writes into its inputs does no harm."""

    def copy_one(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().clone()
        return copy.deepcopy(leaf) if hasattr(leaf, "update") else leaf  # a cache grows

    return pytree.tree_map(copy_one, tree)


def seed() -> None:
    """Random masks and hashes are drawn in eval mode too."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def flat(output: Any) -> Tensor:
    """The hidden states that a site returns: its first tensor, without attention weights."""
    return next(tensors(output)).detach()


def record(model: nn.Module, run: Callable[[], Any]) -> list[Call]:
    """Every first call of a module with sites in one forward pass."""
    sites = ac.inspect(model).sites
    calls: dict[int, Call] = {}

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        if id(module) not in calls:
            mine = [s for s in sites if s.module is module]
            calls[id(module)] = Call(module, mine, copied(args), copied(kwargs))

    with ExitStack() as stack:
        for module in {id(s.module): s.module for s in sites}.values():
            hook = module.register_forward_pre_hook(note, with_kwargs=True, prepend=True)
            stack.callback(hook.remove)
        seed()
        with torch.no_grad():
            run()
    return list(calls.values())


def distance(a: Tensor, b: Tensor, size: Tensor | None = None) -> float:
    """The largest difference, relative to the largest entry of ``size``, or of ``b``."""
    assert a.shape == b.shape
    assert a.isfinite().all()
    assert b.isfinite().all()
    a, b = a.detach(), b.detach()
    whole = b if size is None else size
    return float((a - b).abs().max() / whole.abs().max().clamp_min(1e-300))


@contextmanager
def conditioned(module: nn.Module, *methods: Any) -> Iterator[None]:
    """The module with methods on it for a while."""
    handles = [ac.condition(module, m) for m in methods]
    try:
        yield
    finally:
        for handle in reversed(handles):
            handle.remove()


def shift(call: Call) -> Change:
    """Add what a row of P − U does not see: a constant over its keys."""
    size = max(
        float(p.matrix().detach().norm(dim=-1).mean())
        for s in call.sites
        for p in s.projections
        if p.role == "v"
    )

    def change(values: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(5)
        width = 1 if call.over_channels else values.shape[-1]
        constant = torch.randn(values.shape[-2], width, generator=generator, dtype=torch.float64)
        return values + size * constant.to(values)

    return change


def same(*, unit: bool) -> Change:
    """The same value for all keys, so that every row of a head's output is that; of length one?"""

    def change(values: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(6)
        one = torch.randn(values.shape[-2:], generator=generator, dtype=torch.float64).to(values)
        return (one / one.norm(dim=-1, keepdim=True) if unit else one).expand_as(values)

    return change


def scale(factor: float) -> Change:
    """Multiply by a number."""
    return lambda values: factor * values
