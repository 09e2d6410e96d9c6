"""What a module remembers of the conditioning of its heads: Precondition, RemoveGap, or both.

The order is fixed, whatever the order of the calls: the gap is removed from the attention matrix,
and the output that results is preconditioned.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from attncond import kernels
from attncond.errors import ConditioningError
from attncond.interception import Interception, nested
from attncond.methods import Precondition, RemoveGap
from attncond.readonly import tracing
from attncond.sites import HIDDEN, Site

HeadMethod = Precondition | RemoveGap

_RECORD = "_attncond_heads_record"
# Persistent, so that a checkpoint does not load into a stock model and compute another function.
_BUFFERS = {Precondition: "attncond_precondition", RemoveGap: "attncond_remove_gap"}


@dataclass(frozen=True)
class Heads:
    """The methods on the heads of one module, and what its site says of its attention."""

    gap: RemoveGap | None = None
    precondition: Precondition | None = None
    hidden: float = HIDDEN
    softmax: int = 0
    sites: int = 1
    path: str = ""

    def __post_init__(self) -> None:
        kernels.load()  # not in the forward pass, which may be compiled

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        kernels.load()

    def check(self, module: nn.Module, *given: Any) -> None:
        """Raise before a forward that would fail, or attend out of sight, without a word of why."""
        if reason := own_kernel(module):
            raise ConditioningError(f"the attention of {self.path or 'the model'}: {reason}")
        # MultiheadAttention takes these in its fused inference path alone, and that one is off.
        packed = any(isinstance(g, Tensor) and g.is_nested for g in given)
        if packed and isinstance(module, nn.MultiheadAttention):
            raise nested(self.path)

    def interception(self, compiled: bool) -> Interception:
        """The mode that does it, for one forward pass."""
        return Interception(
            self.gap, self.precondition, self.hidden, self.softmax, self.sites, self.path, compiled
        )

    def methods(self) -> list[HeadMethod]:
        """Those that are on, in the order in which they act."""
        return [m for m in (self.gap, self.precondition) if m is not None]

    def without(self, method: type[HeadMethod]) -> Heads | None:
        """What is left when one of them goes."""
        left = replace(self, gap=None) if method is RemoveGap else replace(self, precondition=None)
        return left if left.methods() else None


def own_kernel(module: nn.Module) -> str:
    """Why a module of transformers attends where nothing is seen of it, if so."""
    attention = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if not isinstance(attention, str) or attention.removeprefix("paged|") in ("sdpa", "eager"):
        return ""
    return (
        f"attn_implementation={attention!r} computes it in a kernel of its own; "
        "model.set_attn_implementation('sdpa') makes it reachable"
    )


def conditioned_heads(module: nn.Module) -> Heads | None:
    """The record of a module, if its heads are conditioned."""
    found: Heads | None = module.__dict__.get(_RECORD)
    return found


def add(site: Site, method: HeadMethod, sites: int) -> None:
    """Write a method into the record of a site's module. Its class has to be recast afterwards.

    ``sites``: how many of them every forward of the module has to come by.
    """
    module = site.module
    record = replace(
        conditioned_heads(module) or Heads(),
        hidden=site.hidden,
        softmax=site.softmax,
        sites=sites,
        path=site.path,
    )
    if isinstance(method, RemoveGap):
        module.__dict__[_RECORD] = replace(record, gap=method)
    else:
        module.__dict__[_RECORD] = replace(record, precondition=method)
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    mark = torch.ones((), dtype=torch.uint8, device=device)
    module.register_buffer(_BUFFERS[type(method)], mark)
    hooks = module._forward_pre_hooks.values()
    if isinstance(module, nn.MultiheadAttention) and _no_fast_path not in hooks:
        module.register_forward_pre_hook(_no_fast_path)


def drop(module: nn.Module, method: type[HeadMethod]) -> None:
    """Take a method out of the module's record. Its class has to be recast afterwards."""
    record = conditioned_heads(module)
    left = record.without(method) if record else None
    module._buffers.pop(_BUFFERS[method], None)
    if left is not None:
        module.__dict__[_RECORD] = left
        return
    module.__dict__.pop(_RECORD, None)
    for key, hook in list(module._forward_pre_hooks.items()):
        if hook is _no_fast_path:
            del module._forward_pre_hooks[key]


def _no_fast_path(module: nn.Module, args: Any) -> None:
    """Any hook keeps TransformerEncoderLayer from its fused kernel, which never calls self_attn."""


class _OffFastPath(Tensor):
    """A weight that reads as any other, and whose type keeps TransformerEncoder from its fast path.

    That one turns padded batches into nested tensors if no argument overrides torch functions.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def slow_path_weight(module: nn.Module) -> Tensor | None:
    """``in_proj_weight`` of a MultiheadAttention whose heads are conditioned, as it is read."""
    name = "in_proj_weight"
    held: dict[str, Any] = module._parameters if name in module._parameters else module.__dict__
    if name not in held:  # parametrize, which puts its own there, asks for that
        raise AttributeError(name)
    raw: Tensor | None = held[name]
    if raw is None or module.training or tracing() or isinstance(raw, DTensor):
        return raw  # in these there is no nested tensor to keep off
    # All others get the parameter: an alias has no .grad, and no optimizer takes it.
    reader = sys._getframe(1).f_globals.get("__name__")
    return raw.as_subclass(_OffFastPath) if reader == nn.TransformerEncoder.__module__ else raw


def replicate_weight(module: nn.Module, weight: Tensor) -> None:
    """Keep the plain tensor that a replica of nn.DataParallel has instead of the parameter."""
    module.__dict__["in_proj_weight"] = weight
