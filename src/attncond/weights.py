"""The numbers of a correction: solved from the weights, refreshed, and certified."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attncond.corrections import (
    Correction,
    buffer,
    check_calibrated,
    corrected,
    effective,
    flat,
    full,
)
from attncond.diagonal import decode, encode
from attncond.errors import ConditioningError
from attncond.linalg import condition_number, spectral_norm
from attncond.methods.spectral import PolarState, Refresh, follow, shift_certificate
from attncond.sites import Role

# Stacked matrices are solved together, up to this many numbers at a time.
_CHUNK = 2**26
# Singular vectors that a polar correction follows for its norm.
_TRACKED = 8


@dataclass(frozen=True, eq=False)
class Weight:
    """One conditioned parameter."""

    path: str
    owner: nn.Module
    name: str
    correction: Correction

    @property
    def raw(self) -> Tensor:
        """The stored parameter."""
        parameter = self.owner._parameters[self.name]
        assert parameter is not None
        return parameter

    def buffer(self, part: str) -> Tensor:
        """One part of the correction."""
        found = buffer(self.owner, self.name, part)
        assert found is not None
        return found

    def __str__(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name


@dataclass(frozen=True)
class Certificate:
    """What is known of one conditioned matrix as it stands now."""

    parameter: str
    role: Role
    head: int | None  # None: the whole projection
    norm: float  # σ_max of the raw matrix
    bound: float  # κ of the effective matrix is at most this; inf where nothing is guaranteed
    kappa: float | None  # κ itself, in float64, where it was asked for


@dataclass(frozen=True, eq=False)
class _Item:
    """One matrix to solve: where it comes from, and its (m, n) values."""

    weight: Weight
    which: int
    index: Tensor
    matrix: Tensor


def _is_range(index: Tensor) -> bool:
    start, count = int(index[0]), index.numel()
    return int(index[-1]) - start == count - 1 and bool((index.diff() == 1).all())


def take(matrix: Tensor, index: Tensor) -> Tensor:
    """Rows of a matrix; a view where they are consecutive."""
    if _is_range(index):
        return matrix[int(index[0]) : int(index[-1]) + 1]
    return matrix[index.to(matrix.device)]


def _put(matrix: Tensor, index: Tensor, values: Tensor) -> None:
    """Write rows of a matrix."""
    if _is_range(index):
        take(matrix, index).copy_(values)
    else:
        matrix[index.to(matrix.device)] = values.to(matrix.dtype)


def _batches(weights: Iterable[Weight]) -> Iterator[list[_Item]]:
    """All matrices, those of one shape, dtype and device together, in pieces of bounded size."""
    groups: dict[Any, list[_Item]] = defaultdict(list)
    for weight in weights:
        matrix = flat(full(weight.raw.detach()), weight.correction.axis)
        width = _width(weight)
        for which, (_, index) in enumerate(weight.correction.matrices()):
            part = take(matrix, index)
            key = (part.shape, part.dtype, part.device, width)
            groups[key].append(_Item(weight, which, index, part))
    for items in groups.values():
        size = max(1, _CHUNK // items[0].matrix.numel())
        for i in range(0, len(items), size):
            yield items[i : i + size]


def _width(weight: Weight) -> int:
    """How many singular vectors of each of its matrices a weight keeps; its smallest decides."""
    correction = weight.correction
    columns = weight.raw.numel() // weight.raw.shape[correction.axis]
    return min(_TRACKED, columns, *(index.numel() for _, index in correction.matrices()))


@torch.inference_mode(False)  # buffers that autograd may meet later
@torch.no_grad()
def solve(weights: list[Weight]) -> list[dict[str, Tensor]]:
    """The buffers of every weight, computed and checked before the model is touched."""
    blank = {id(w): _blank(w) for w in weights}
    for batch in _batches(w for w in weights if not w.raw.is_meta):
        method = batch[0].weight.correction.method
        matrix = torch.stack([item.matrix for item in batch])
        if method.correction == "identity":
            scale, lam = method.identity_terms(matrix)
            for item, s, shift in zip(batch, scale, lam, strict=True):
                buffers = blank[id(item.weight)]
                _put(buffers["scale"], item.index, s)
                _put(buffers["shift"], item.index, shift)
        else:
            try:
                scale, state = method.polar_terms(matrix, _width(batch[0].weight))
            except ValueError as error:  # weights are finite here, so that it is their norm
                big = max(batch, key=lambda item: float(item.matrix.abs().amax()))
                raise _overflow(big.weight) from error
            for item, s in zip(batch, scale, strict=True):
                _put(blank[id(item.weight)]["scale"], item.index, s)
            _store(batch, state, blank)
    for weight in weights:
        buffers = blank[id(weight)]
        if weight.raw.is_meta:
            continue
        # Half precision overflows, and vanishes, where the float32 of λ and s does not.
        raw = full(weight.raw)
        result = corrected(raw, weight.correction.axis, buffers)
        if not all(torch.isfinite(b).all() for b in (*buffers.values(), result)):
            raise _overflow(weight)
        if raw.any() and not result.any():
            raise ConditioningError(
                f"the effective {weight} would be zero in {weight.raw.dtype}: gain is too small; "
                "nothing was changed"
            )
    return list(blank.values())


def _overflow(weight: Weight) -> ConditioningError:
    return ConditioningError(
        f"the correction of {weight} overflows {weight.raw.dtype}: its weights, lam or gain are "
        "too large; nothing was changed"
    )


def _blank(weight: Weight) -> dict[str, Tensor]:
    """Buffers that condition nothing, of the right shapes and on the right device."""
    raw, correction = weight.raw, weight.correction
    rows, columns = raw.shape[correction.axis], raw.numel() // raw.shape[correction.axis]
    dtype = torch.promote_types(raw.dtype, torch.float32)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=raw.device)

    buffers = {"scale": zeros(rows) + 1}
    matrices = correction.matrices()
    if correction.method.correction == "polar":
        buffers["correction"] = zeros(rows, columns)
        buffers["norm"] = zeros(len(matrices))
        buffers["block"] = zeros(len(matrices), columns, _width(weight))
        buffers["age"] = torch.zeros((), dtype=torch.int64, device=raw.device)
        return buffers
    buffers["shift"] = zeros(rows)
    diagonal = torch.full((rows,), -1, device="cpu")  # where the indexes are
    for _, index in matrices:
        ones = min(index.numel(), columns)
        diagonal[index[:ones]] = torch.arange(ones, device="cpu")
    buffers["diagonal"] = encode(diagonal).to(raw.device)
    return buffers


@torch.no_grad()
def refresh(weights: list[Weight], how: Refresh) -> None:
    """Bring every polar factor up to date with its weight, all of one shape together."""
    for batch in _batches(weights):
        matrix = torch.stack([item.matrix for item in batch])
        norm = torch.stack([item.weight.buffer("norm")[item.which] for item in batch])
        block = torch.stack([item.weight.buffer("block")[item.which] for item in batch])
        correction = torch.stack(
            [take(item.weight.buffer("correction"), item.index) for item in batch]
        )
        state = PolarState(correction / norm[:, None, None], norm, block)
        _store(batch, follow(matrix, state, how))


def _store(
    batch: list[_Item], state: PolarState, blank: dict[int, dict[str, Tensor]] | None = None
) -> None:
    """Write the polar state of a batch into buffers, new ones or the owners' own."""
    correction = state.factor * state.norm[:, None, None]
    targets, values = [], []
    for item, *new in zip(batch, correction, state.norm, state.block, strict=True):
        get = blank[id(item.weight)].__getitem__ if blank else item.weight.buffer
        if _is_range(item.index):
            targets.append(take(get("correction"), item.index))
        else:
            _put(get("correction"), item.index, new.pop(0))
        targets += [get("norm")[item.which], get("block")[item.which]]
        values += new
    torch._foreach_copy_(targets, values)  # one launch, not three for every matrix


def certify(weight: Weight, exact: bool) -> Iterator[Certificate]:
    """What holds now for each matrix of one weight, in float64."""
    check_calibrated(weight.owner)
    if not torch.isfinite(weight.raw.detach()).all():
        raise ConditioningError(f"{weight} holds NaN or Inf; nothing can be said of it")
    raw, correction = full(weight.raw.detach()), weight.correction
    result = flat(effective(weight.owner, weight.name, raw), correction.axis).double()
    matrix = flat(raw, correction.axis).double()
    whole = correction.method.scope == "projection"
    heads = [h for rows in correction.rows for h in ([None] if whole else range(len(rows)))]
    for head, (role, index) in zip(heads, correction.matrices(), strict=True):
        part = take(matrix, index)
        norm = float(spectral_norm(part))
        if correction.method.correction == "identity":
            bound = _shift_bound(weight, index, part, norm)
        else:
            correct = take(weight.buffer("correction"), index).double()
            bound = _polar_certificate(part, correct, norm)
        kappa = float(condition_number(take(result, index))) if exact else None
        yield Certificate(str(weight), role, head, norm, bound, kappa)


def _shift_bound(weight: Weight, index: Tensor, part: Tensor, norm: float) -> float:
    """Weyl's bound, if this matrix really carries λI: a checkpoint of another scope does not."""
    shift = take(weight.buffer("shift"), index).cpu()
    diagonal = take(decode(weight.buffer("diagonal").cpu()), index)
    wanted = torch.arange(len(index), device="cpu")
    wanted[part.shape[1] :] = -1
    if bool((shift != shift[0]).any()) or not torch.equal(diagonal, wanted):
        return math.inf
    return shift_certificate(float(shift[0]), norm)


def _polar_certificate(matrix: Tensor, correction: Tensor, norm: float) -> float:
    """A bound on κ(W + C) for any C, however old: σ_min(M) ≥ λ_min(sym(QᵀM)) for orthonormal Q.

    With C = σU it is at most (2σ + e)/(σ − e) after the weights moved by e = ‖W − W_ref‖₂.
    """
    if matrix.shape[0] < matrix.shape[1]:
        matrix, correction = matrix.mT, correction.mT
    size = float(spectral_norm(correction))
    inner = correction.mT @ (matrix + correction) / size
    least = float(torch.linalg.eigvalsh((inner + inner.mT) / 2)[0])
    return (norm + size) / least if least > 0 else math.inf
