"""A site's module in float64, past hooks and conditioning; the module itself does not change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attncond.corrections import effective, full, records
from attncond.diagnose.tokenwise import ReplayError
from attncond.effective import Conditioned
from attncond.sites import Projection, Site

__all__ = ["Shell", "doubled", "doubled_copy", "stock"]


class Shell(nn.Module):
    """The module, called past its hooks: they have acted on the arguments already."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.run = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


def doubled(site: Site) -> tuple[dict[str, Tensor], dict[int, list[Projection]]]:
    """The module's tensors in float64, and whose weight each storage is."""
    state: dict[str, Tensor] = {}
    known: dict[int, list[Projection]] = {}
    named = dict(site.module.named_modules())
    for path, module in named.items():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or not tensor.is_floating_point():
                continue
            value = full(tensor.detach())
            if name in records(module):
                value = effective(module, name, value)  # rounded as in the model's own forward
            value = value.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
            state[".".join(filter(None, ("module", path, name)))] = value
            own = [p for p in site.projections if p.owner is module and p.name == name]
            if own:
                known[value.untyped_storage().data_ptr()] = own
    if {id(p) for own in known.values() for p in own} != {id(p) for p in site.projections}:
        raise ReplayError("its projections are outside of its module")
    return state, known


@contextmanager
def stock(module: nn.Module) -> Iterator[None]:
    """As the library made it: what conditioning adds is in the weights, or done by the run."""
    before = [(m, type(m)) for m in module.modules() if isinstance(m, Conditioned)]
    try:
        for m, cls in before:
            m.__class__ = cls._attncond_base  # type: ignore[attr-defined]
        yield
    finally:
        for m, cls in before:
            m.__class__ = cls


def doubled_copy(t: Tensor) -> Tensor:
    """An argument in float64; never the tensor itself, which a forward may change in place."""
    t = t.detach()
    return t.to(torch.float64, copy=True) if t.is_floating_point() else t.clone()
