"""What a module remembers of the correction of its weights, and the weights that come of it.

A record for each parameter, and its numbers in buffers beside it, so that checkpoints hold them.
How the parameter then reads as s·(W + C) is told in :mod:`attncond.effective`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from attncond.diagonal import decode
from attncond.errors import ConditioningError
from attncond.methods.spectral import Spectral
from attncond.sites import Role

_RECORDS = "_attncond"
_PENDING = "_attncond_pending"
_LOADS = "_attncond_loads"
_STATE = (_RECORDS, _PENDING, _LOADS)
_PARTS = ("scale", "shift", "diagonal", "correction")


@dataclass(frozen=True, eq=False)
class Correction:
    """What is conditioned in one parameter; the numbers are buffers of its owner."""

    method: Spectral
    axis: int
    roles: tuple[Role, ...]
    rows: tuple[Tensor, ...]  # a (heads, head_dim) index for each role

    def matrices(self) -> list[tuple[Role, Tensor]]:
        """The matrices κ speaks of: (role, flat row index), whole projections or heads."""
        whole = self.method.scope == "projection"
        return [
            (role, index)
            for role, rows in zip(self.roles, self.rows, strict=True)
            for index in ([rows.flatten()] if whole else rows)
        ]


def buffer_name(name: str, part: str) -> str:
    """The name of the buffer that holds one part of the correction of a parameter."""
    return f"attncond_{name}_{part}"


def buffer(owner: nn.Module, name: str, part: str) -> Tensor | None:
    """One part of the correction of ``owner.<name>``: scale, shift, diagonal, correction, ..."""
    return owner._buffers.get(buffer_name(name, part))


def records(owner: nn.Module) -> dict[str, Correction]:
    """The corrections a module carries, by parameter name."""
    found: dict[str, Correction] = owner.__dict__.get(_RECORDS, {})
    return found


def loads(owner: nn.Module) -> int:
    """How often the numbers of a conditioned module came from outside: calibrated, or loaded."""
    count: int = owner.__dict__.get(_LOADS, 0)
    return count


def buffers(owner: nn.Module) -> dict[str, Tensor]:
    """All that hold numbers of the corrections of a module, by their names."""
    keys = tuple(buffer_name(name, "") for name in records(owner))
    return {k: b for k, b in owner._buffers.items() if b is not None and k.startswith(keys)}


def check_calibrated(owner: nn.Module) -> None:
    """Refuse to use λ, s and C that were never computed."""
    if getattr(owner, _PENDING):
        raise ConditioningError(
            "this model was conditioned on the meta device and its weights came later: load a "
            "conditioned checkpoint, or call handle.calibrate() once the weights are there"
        )


def add(owner: nn.Module, name: str, correction: Correction, numbers: dict[str, Tensor]) -> None:
    """Write a correction into the record of a module. Its class has to be recast afterwards."""
    owner.__dict__[_RECORDS] = {**records(owner), name: correction}
    owner.__dict__[_LOADS] = loads(owner) + 1
    for part, value in numbers.items():
        owner.register_buffer(buffer_name(name, part), value)
    owner.__dict__[_PENDING] = any(b.is_meta for b in buffers(owner).values())


def drop(owner: nn.Module) -> None:
    """Forget all corrections of a module. Its class has to be recast afterwards."""
    for key in buffers(owner):
        del owner._buffers[key]
        owner._non_persistent_buffers_set.discard(key)
    for key in _STATE:
        owner.__dict__.pop(key, None)


def note_load(owner: nn.Module, complete: bool) -> None:
    """Buffers of a module were loaded, and with ``complete`` all of them."""
    owner.__dict__[_LOADS] = loads(owner) + 1
    if complete:
        owner.__dict__[_PENDING] = False


def restorer(owner: nn.Module) -> Callable[[], None]:
    """What makes the corrections of a module those of now again."""
    before, state = {**owner._buffers}, {key: owner.__dict__[key] for key in _STATE}

    def restore() -> None:
        owner._buffers.update(before)
        owner.__dict__.update(state)

    return restore


def flat(weight: Tensor, axis: int) -> Tensor:
    """A parameter as a matrix (out, in): transposed and 1x1-convolution weights too."""
    rows = weight if axis == 0 else weight.movedim(axis, 0)
    return rows if rows.ndim == 2 else rows.flatten(1)


def unflat(matrix: Tensor, weight: Tensor, axis: int) -> Tensor:
    """Undo :func:`flat`."""
    if weight.ndim == 2:
        return matrix if axis == 0 else matrix.movedim(0, axis)
    return matrix.view(weight.movedim(axis, 0).shape).movedim(0, axis)


def full(weight: Tensor) -> Tensor:
    """A parameter gathered from its shards, or itself."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def like(value: Tensor, own: Tensor) -> Tensor:
    """A whole tensor as ``own`` is: sharded over processes, or whole."""
    if isinstance(own, DTensor):
        return distribute_tensor(value.to(own.device), own.device_mesh, own.placements)
    return value


def parts_of(owner: nn.Module, name: str) -> dict[str, Tensor | None]:
    """What :func:`corrected` needs of the correction of ``owner.<name>``."""
    return {part: buffer(owner, name, part) for part in _PARTS}


def effective(owner: nn.Module, name: str, weight: Tensor | None = None) -> Tensor:
    """The weight that the forward pass uses, as a plain tensor in the parameter's dtype."""
    raw = owner._parameters[name] if weight is None else weight
    assert raw is not None
    return corrected(raw, records(owner)[name].axis, parts_of(owner, name))


def corrected(raw: Tensor, axis: int, parts: Mapping[str, Tensor | None]) -> Tensor:
    """s·(W + C) of a whole parameter, from the buffers of its correction."""
    scale, correction = parts["scale"], parts.get("correction")
    assert scale is not None
    matrix = flat(raw, axis)
    if correction is None:
        shift, diagonal = parts["shift"], parts["diagonal"]
        assert shift is not None
        assert diagonal is not None
        columns = torch.arange(matrix.shape[1], device=matrix.device)
        ones = columns == decode(diagonal)[:, None]
        zero = torch.zeros((), dtype=shift.dtype, device="cpu")  # whatever the default device is
        correction = torch.where(ones, shift[:, None], zero)
    # In the buffers' float32 or float64 up to here: λ and W differ in size, so that in half
    # precision the sum should be rounded once, not twice.
    result = (matrix + correction) * scale[:, None]
    return unflat(result.to(raw.dtype), raw, axis)
