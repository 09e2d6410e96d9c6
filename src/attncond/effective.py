"""The mechanism: a module whose parameter reads as its effective weight.

The owner's class is exchanged for a subclass in which the parameter's name is a property. The
Parameter stays registered under its own name, so optimizers, state dicts and ``named_parameters``
see the raw weight, while every reader of ``module.weight`` (its own forward, or another module's
that reads it directly, as BEiT's, EVA's, Swin V2's and MultiheadAttention's do) gets
s·(W + C), where C is λI or the polar correction.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx import Proxy
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

from attncond import corrections
from attncond.corrections import (
    Correction,
    buffer_name,
    check_calibrated,
    corrected,
    effective,
    parts_of,
    records,
)
from attncond.diagonal import with_code
from attncond.errors import ConditioningError
from attncond.heads import conditioned_heads, replicate_weight, slow_path_weight
from attncond.readonly import EffectiveWeight, tracing
from attncond.sites import class_name


class Conditioned(nn.Module):
    """Mixed in before the owner's class; see :func:`conditioned_class`."""

    def __init_subclass__(cls) -> None:
        """Nothing: the owner's may want arguments, or keep a register of the user's classes."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The owner's own forward, its attention intercepted where its heads are conditioned.

        Refused where tensor parallelism sliced its weights.
        """
        # accelerate's hooks hold on to a method removed since.
        if not isinstance(self, Conditioned):
            return type(self).forward(self, *args, **kwargs)
        for name in records(self):
            if isinstance(self._parameters[name], DTensor):
                raise _sliced(self, name)
        heads = conditioned_heads(self)
        if heads is None:
            return super().forward(*args, **kwargs)
        if not tracing() and is_fx_symbolic_tracing():
            raise ConditioningError(
                f"torch.fx cannot trace into a conditioned {class_name(self)}, whose attention it "
                "would show as proxies: let the tracer take the module for a leaf"
            )
        heads.check(self, *args, *kwargs.values())
        compiled = torch.compiler.is_compiling()  # asked here: elsewhere, Dynamo would answer
        forward: Callable[..., Any] = super().forward
        if not compiled and "torch._dynamo" in sys.modules:
            forward = torch.compiler.disable(forward)  # or it would compile parts under the mode
        mode = heads.interception(compiled)
        with mode:
            output = forward(*args, **kwargs)
        mode.check()
        return output

    def get_parameter(self, target: str) -> Any:
        """The raw parameter, also where the attribute reads as the effective weight."""
        return (
            self._parameters[target] if target in records(self) else super().get_parameter(target)
        )

    def __delattr__(self, name: str) -> None:
        if name in records(self):  # parametrize, weight_norm and pruning do, to put theirs there
            raise ConditioningError(_replaced(self, name))
        super().__delattr__(name)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = corrections.buffers(self)
        apply: Callable[..., Any] = super()._apply
        result = apply(fn, recurse)
        for key, old in before.items():
            new = self._buffers[key]
            # model.half() or .to(bfloat16) must not round λ, s and C: W + C is κ-sensitive.
            if new is not None and old.is_floating_point() and new.dtype.itemsize < 4:
                kept = torch.empty_like(new, dtype=old.dtype) if old.is_meta else old
                self._buffers[key] = kept.to(device=new.device)
        return result

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for key in (prefix + buffer_name(name, "diagonal") for name in records(self)):
            if key in state_dict:
                state_dict[key] = with_code(key, state_dict[key])
        super()._load_from_state_dict(state_dict, prefix, *args)
        if not records(self):
            return
        whole = all(f"{prefix}{key}" in state_dict for key in corrections.buffers(self))
        corrections.note_load(self, whole)

    def __prepare_scriptable__(self) -> Any:  # which torch.jit.script asks for first
        raise ConditioningError(
            f"torch.jit.script cannot compile a conditioned {class_name(self)}: fold() or remove() "
            "the conditioning first, or use torch.jit.trace, torch.compile or torch.export"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        cls: Any = type(self)
        state: Callable[[], Any] = self.__getstate__
        return _rebuild, (cls._attncond_base, cls._attncond_names, cls._attncond_heads), state()


def _sliced(owner: nn.Module, name: str) -> ConditioningError:
    return ConditioningError(
        f"'{name}' of a conditioned {class_name(owner)} is a DTensor during forward: tensor "
        "parallelism is not supported. Fold the model before parallelising it."
    )


# What reads a weight to put another in its place. All but the reading goes past the module, to its
# dictionary of parameters, or comes when other things are changed already.
_REPLACING = tuple(f"torch.nn.utils.{name}" for name in ("weight_norm", "prune", "parametrize"))
# What wants the weight that is stored: to put it back on another device, or it would be conditioned
# twice; and model.get_parameter("path.to.weight"), which takes nothing but a Parameter.
_STORED = ("accelerate.utils.modeling", "torch.nn.modules.module")


def _replaced(owner: nn.Module, name: str) -> str:
    return (
        f"'{name}' of a conditioned {class_name(owner)} cannot be deleted or parametrised "
        "(weight_norm, spectral_norm, pruning): fold() or remove() the conditioning first"
    )


def _frozen(owner: nn.Module, name: str) -> str:
    return (
        f"torch.fx would write the effective '{name}' of a conditioned {class_name(owner)} into "
        "its graph as a constant, which no training reaches: let the tracer take the module that "
        "reads it for a leaf, or fold() the model first"
    )


def _rebuild(base: type[nn.Module], names: tuple[str, ...], heads: bool = False) -> nn.Module:
    cls = conditioned_class(base, names, heads)
    return cls.__new__(cls)


def _property(name: str) -> property:
    def weight(self: nn.Module) -> Tensor:
        raw = self._parameters[name]
        assert raw is not None
        if isinstance(raw, DTensor):  # FSDP2 asks for what it shards; forward sees it gathered
            return raw
        plain = tracing()
        if not plain and is_fx_symbolic_tracing():
            raise ConditioningError(_frozen(self, name))
        compiling = torch.compiler.is_compiling()
        reader = None if compiling else sys._getframe(1).f_globals.get("__name__")
        if reader in _REPLACING:
            raise ConditioningError(_replaced(self, name))
        if reader in _STORED:
            return raw
        if not raw.is_meta:
            check_calibrated(self)
        result = effective(self, name)
        return result if plain else result.as_subclass(EffectiveWeight)

    def replica(self: nn.Module, _: Tensor) -> None:
        raise ConditioningError(
            f"'{name}' of a conditioned {class_name(self)} cannot be replaced by a tensor, as "
            "nn.DataParallel does: use DistributedDataParallel, or fold() the model first"
        )

    return property(
        weight, replica, doc=f"Effective '{name}', s·(W + C). The raw one: get_parameter('{name}')."
    )


_LINEAR = nn.Linear.forward  # what others may put in its place later has to be called


def _linear_forward(self: nn.Linear, input: Tensor) -> Any:
    """nn.Linear's own forward, with the effective weight computed in place.

    Dynamo skips the guards of a module, and of all that hold it, as long as their dictionaries stay
    the same; not if their code reads a property, calls super() or asks objects that are no modules.
    """
    if not isinstance(self, Conditioned):  # as in Conditioned.forward
        return type(self).forward(self, input)
    if nn.Linear.forward is not _LINEAR or isinstance(input, Proxy):
        return Conditioned.forward(self, input)
    raw = self._parameters["weight"]
    assert raw is not None
    if isinstance(raw, DTensor):
        raise _sliced(self, "weight")
    if not raw.is_meta:
        check_calibrated(self)
    return nn.functional.linear(input, corrected(raw, 0, parts_of(self, "weight")), self.bias)


def _forward_of(base: type[nn.Module], names: tuple[str, ...], heads: bool) -> Callable[..., Any]:
    """A forward with the signature of the base's, which torch.export and others go by."""
    linear = base.forward is _LINEAR and names == ("weight",) and not heads
    shared: Any = _linear_forward if linear else Conditioned.forward
    forward: Any = types.FunctionType(
        shared.__code__, shared.__globals__, "forward", None, shared.__closure__
    )
    forward.__wrapped__ = base.forward
    return cast("Callable[..., Any]", forward)


_CLASSES: dict[tuple[type[nn.Module], tuple[str, ...], bool], type[nn.Module]] = {}


def conditioned_class(
    base: type[nn.Module], names: tuple[str, ...], heads: bool = False
) -> type[nn.Module]:
    """The subclass of ``base`` in which ``names`` read as effective weights; one per base.

    ``heads`` says that the attention is intercepted. The forward looks for itself; the class tells
    them apart so that compiled code, which is guarded by classes, does too.
    """
    key = (base, names, heads)
    if key not in _CLASSES:
        properties = {name: _property(name) for name in names}
        if heads and issubclass(base, nn.MultiheadAttention):
            properties.setdefault("in_proj_weight", property(slow_path_weight, replicate_weight))
        members = {
            "__doc__": base.__doc__,
            # FX keeps modules of torch.nn as leaves by this name; pickling goes through _rebuild.
            "__module__": base.__module__,
            "_attncond_base": base,
            "_attncond_names": names,
            "_attncond_heads": heads,
            "forward": _forward_of(base, names, heads),
            **properties,
        }
        _CLASSES[key] = type(f"Conditioned{base.__name__}", (Conditioned, base), members)
    return _CLASSES[key]


def recast(module: nn.Module) -> None:
    """Give a module the class that its records call for: its own, if there are none."""
    cls = type(module)
    base = getattr(cls, "_attncond_base", cls)
    names, heads = tuple(sorted(records(module))), conditioned_heads(module) is not None
    module.__class__ = _rebased(
        cls, conditioned_class(base, names, heads) if names or heads else base
    )


def _rebased(cls: type, new: type[nn.Module]) -> type[nn.Module]:
    """``new``, with what others derived from the class before (parametrize, fully_shard) on top."""
    if not issubclass(cls, Conditioned) or "_attncond_base" in vars(cls):
        return new
    bases = tuple(_rebased(b, new) if issubclass(b, Conditioned) else b for b in cls.__bases__)
    members = {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")}
    return type(cls.__name__.replace("Conditioned", ""), bases, members)


def install(
    owner: nn.Module, name: str, correction: Correction, numbers: dict[str, Tensor]
) -> None:
    """Make ``owner.<name>`` read as its effective weight."""
    corrections.add(owner, name, correction, numbers)
    recast(owner)


def uninstall(owner: nn.Module) -> None:
    """Make the owner the module it was; the raw parameters stay."""
    corrections.drop(owner)
    recast(owner)


@contextmanager
def kept(owners: Iterable[nn.Module]) -> Iterator[None]:
    """What fails inside leaves the corrections of these owners as they were."""
    before = [(owner, corrections.restorer(owner)) for owner in owners]
    try:
        yield
    except BaseException:
        for owner, restore in before:
            restore()
            recast(owner)
        raise
