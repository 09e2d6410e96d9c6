"""What a forward was called with: taken down to one item and some tokens, and made float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attncond.calls import TorchCall
from attncond.sites import Projection

__all__ = ["in_double", "map_tensors", "row_range", "shortened"]

_LOW = frozenset((torch.float32, torch.float16, torch.bfloat16))
_TO_LOW = frozenset(("float", "half", "bfloat16"))


def map_tensors(given: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same containers with all tensors changed; caches are left out.

    A cache was filled by the forward that is to be repeated, and would be filled once more.
    """
    if isinstance(given, Tensor):
        return change(given)
    if type(given) in (tuple, list):
        return type(given)(map_tensors(v, change) for v in given)
    if isinstance(given, Mapping) and type(given) is dict:
        return {k: map_tensors(v, change) for k, v in given.items()}
    return None if type(given).__name__.endswith("Cache") else given


def shortened(
    args: tuple[Any, ...], kwargs: dict[str, Any], tokens: int, rows: Sequence[int]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], bool]]:
    """Ways to take arguments down to the first item, the smallest first; whether to ``rows`` too.

    Only a try shows which of them a module takes: an axis as long as the batch, or as there are
    tokens, may be another. Windows come with a mask for all those of an image.
    """
    found: list[Tensor] = []
    map_tensors([*args, *kwargs.values()], found.append)
    whole = next((t.shape[0] for t in found if t.is_floating_point() and t.ndim > 1), 1)
    sizes = {t.shape[0] for t in found if t.ndim > 1 and whole % max(1, t.shape[0]) == 0}

    def taken(count: int, sampled: bool) -> Callable[[Tensor], Tensor]:
        def take(t: Tensor) -> Tensor:
            t = t.detach()
            if t.ndim and t.shape[0] == whole and count < whole:
                t = t[:count]
            if sampled:
                index = torch.tensor(rows, device=t.device)
                for axis in range(t.ndim):
                    t = t.index_select(axis, index) if t.shape[axis] == tokens else t
            # A view would keep the whole batch in memory.
            return t.clone() if t._is_view() and t.untyped_storage().nbytes() > t.nbytes else t

        return take

    for count in sorted({1, *sizes, whole}):
        for sampled in (True, False) if len(rows) < tokens else (False,):
            take = taken(count, sampled)
            yield map_tensors(args, take), map_tensors(kwargs, take), sampled


def in_double(call: TorchCall) -> TorchCall:
    """A call that keeps float64: what asks for float32 or less gets float64."""
    func, name, args, kwargs = call
    if name in _TO_LOW:
        return TorchCall.of(Tensor.double, args[:1], {})
    if any(isinstance(a, torch.dtype) and a in _LOW for a in (*args, *kwargs.values())):
        args = tuple(_raised(a) for a in args)
        kwargs = {k: _raised(a) for k, a in kwargs.items()}
    return TorchCall(func, name, args, kwargs)


def _raised(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _LOW else value


def row_range(weight: Tensor, p: Projection) -> range | None:
    """Which rows of the parameter a view of it holds, where they are consecutive whole rows."""
    total, width, first = p.raw.shape[p.axis], p.in_features, int(weight.storage_offset())
    if p.axis == 0:
        start, rest = divmod(first, width)
        count, more = divmod(weight.numel(), width)
        strides = sorted(s for s, n in zip(weight.stride(), weight.shape, strict=True) if n > 1)
        plain = strides in ([1, width], [1], [width], [])
        return range(start, start + count) if plain and not rest and not more else None
    if weight.ndim != 2 or weight.shape[0] != width or first + weight.shape[1] > total:
        return None
    return range(first, first + weight.shape[1]) if weight.stride(0) == total else None
