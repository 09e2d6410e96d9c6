"""κ of a head's Jacobian where no closed form covers it: from the module itself, run once more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attncond.diagnose.arguments import shortened
from attncond.diagnose.capture import Call, Captured
from attncond.diagnose.measure import Values, spread
from attncond.diagnose.replay import Replay
from attncond.diagnose.tokenwise import ReplayError, Use
from attncond.functional import GraphJacobian
from attncond.jacobian import JacobianSpectrum, memory_limit
from attncond.lanczos import Bound, Operator, extremes
from attncond.rank import reduce_tokens
from attncond.written import matrix_extremes

__all__ = [
    "ReplayJob",
    "TakenJobs",
    "dense_spectrum",
    "replay_of",
    "spectrum_values",
    "without_idle_rows",
]

CLOSE = {torch.float64: 1e-8, torch.float32: 1e-3}  # of logits, in units of the largest
_ROUNDED = 1e-5  # the same where a module computes some of them in float32, whatever its dtype
_IDLE = 1e-10  # what float64 leaves of a derivative that is zero, in units of its row's


@dataclass(frozen=True, eq=False)
class ReplayJob:
    """One head of an attention that is run again for its Jacobian."""

    replay: Replay
    rtol: float
    tokens: int
    head: int = 0

    def of_head(self, head: int) -> ReplayJob:
        """The same attention, another head."""
        return replace(self, head=head)

    def solve(self) -> Values:
        """κ and what belongs to it; there are no bounds to compare with."""
        return self._taken(0).solve()

    def taken(self, heads: Sequence[int], room: int) -> TakenJobs:
        """What is left to do without the model, which has to run again here and now.

        The heads' Jacobians are written down in the host's memory. Those for which there is no
        room, in bytes, are solved.
        """
        found: dict[int, _Matrix | _Solved] = {}
        for head in heads:
            found[head] = self.of_head(head)._taken(room)
            room -= found[head].written
        return TakenJobs(found)

    def _taken(self, room: int) -> _Matrix | _Solved:
        try:
            traced = self.replay.trace(self.head)
        except ReplayError as error:
            return _Solved({"jacobian_status": f"not measured: {error}"})
        uses, output = traced.uses, traced.output.detach()
        lefts = [self._left(use) for use in uses]
        with torch.no_grad():
            leaves, maps = [use.leaf for use in uses], [use.map for use in uses]
            jacobian = GraphJacobian(traced.output, leaves, lefts, maps)
            if 8 * math.prod(jacobian.shape) <= room and _fits(jacobian):
                return _Matrix(jacobian.dense().cpu(), output.cpu(), self.tokens)
            return _Solved(_values(dense_spectrum(jacobian, output), self.tokens))

    def _left(self, use: Use) -> Tensor:
        """The tokens in coordinates of what those span that have a part in the output."""
        felt = use.x.any(1)
        reduced = reduce_tokens(use.x[felt], self.rtol).left
        left = reduced.new_zeros(len(use.x), reduced.shape[1])
        left[felt] = reduced
        return left


@dataclass(frozen=True, eq=False)
class TakenJobs:
    """The heads of an attention that was run again: nothing of the model is needed any more."""

    found: dict[int, _Matrix | _Solved]

    @property
    def written(self) -> int:
        """Bytes of Jacobians that are written down already."""
        return sum(one.written for one in self.found.values())

    def of_head(self, head: int) -> _Matrix | _Solved:
        """One of them."""
        return self.found[head]


@dataclass(frozen=True, eq=False)
class _Matrix:
    jacobian: Tensor
    output: Tensor
    tokens: int

    @property
    def written(self) -> int:
        return self.jacobian.nbytes

    def solve(self) -> Values:
        with torch.no_grad():
            return _values(_written_spectrum(self.jacobian, self.output), self.tokens)


@dataclass(frozen=True, eq=False)
class _Solved:
    values: Values
    written: int = 0

    def solve(self) -> Values:
        return self.values


def _values(found: JacobianSpectrum, tokens: int) -> Values:
    return spectrum_values(found) | {"jacobian_tokens": float(tokens)}


def spectrum_values(found: JacobianSpectrum) -> Values:
    """A spectrum as columns of the report."""
    return {
        "jacobian_kappa": found.kappa,
        "jacobian_kappa_error": found.kappa_error,
        "jacobian_sigma_max": found.sigma_max,
        "jacobian_sigma_min": found.sigma_min,
        "jacobian_rank": None if found.rank is None else float(found.rank),
        "jacobian_path": found.path,
        "jacobian_status": found.path if found.resolved else "unresolved",
    }


def dense_spectrum(jacobian: Operator, output: Tensor) -> JacobianSpectrum:
    """Of a Jacobian whose rank nobody knows, written down if memory allows it."""
    if _fits(jacobian):
        return _written_spectrum(jacobian.dense(), output)
    found = extremes(jacobian, Bound(min(jacobian.shape)), smallest=False)
    return JacobianSpectrum(
        **vars(found), shape=jacobian.shape, convention="wide", path="matrix-free"
    )


def _fits(jacobian: Operator) -> bool:
    """Whether memory allows to write it down, and to decompose it."""
    rows, columns = jacobian.shape
    needed = 8 * (2 * rows * columns + 3 * min(rows, columns) ** 2) + (1 << 29)
    return needed <= memory_limit(jacobian.device)


def _written_spectrum(matrix: Tensor, output: Tensor) -> JacobianSpectrum:
    rows, columns = matrix.shape
    matrix = without_idle_rows(matrix, output)
    found = matrix_extremes(matrix)
    return JacobianSpectrum(**vars(found), shape=(rows, columns), convention="wide", path="dense")


def without_idle_rows(jacobian: Tensor, output: Tensor) -> Tensor:
    """J without rows of zeros, and without the direction of an output whose length is fixed.

    Where Precondition makes each row of the output a unit vector, no weights change its length:
    that direction is no small singular value but none. ``jacobian`` is (n·d, columns), ``output``
    (n, d); the singular values that remain are the same.
    """
    n, d = output.shape
    parts = jacobian.view(n, d, -1)
    size = torch.linalg.matrix_norm(parts)
    length = torch.linalg.vector_norm(output, dim=1, keepdim=True)
    unit = output / length.clamp_min(torch.finfo(output.dtype).tiny)
    along = torch.linalg.vector_norm((unit[:, None] @ parts)[:, 0], dim=1)
    idle = size <= _IDLE**1.5 * size.amax()
    turned = ~idle & (along <= _IDLE * size) & (length[:, 0] > 0)
    if not bool((idle | turned).any()):
        return jacobian
    kept = []
    for i in torch.nonzero(~idle)[:, 0].tolist():
        part = parts[i]
        if bool(turned[i]):
            part = torch.linalg.svd(unit[i : i + 1])[2][1:] @ part
        kept.append(part)
    return torch.cat(kept) if kept else jacobian


def replay_of(captured: Captured, heads: Sequence[int], tokens: int | None) -> ReplayJob:
    """What the Jacobians of an attention's heads need, tried on one; raises `ReplayError`."""
    site, scores = captured.site, captured.scores
    if site.scattered and not site.softmax:
        raise ReplayError(site.scattered)
    if scores.heads != site.heads or not heads:
        raise ReplayError("its attention matrices are not found head by head")
    channels = site.over_channels
    extra = scores.keys - scores.queries
    if channels or site.softmax:
        count = scores.keys
        if channels:
            if captured.value is None:
                raise ReplayError("its values are not found")
            count = captured.value.shape[-1]
        chosen = spread(count, tokens)
        queries, keys = list(range(scores.queries)), list(range(scores.keys))
        rows, columns = (queries, chosen) if channels else (chosen, keys)
    else:
        chosen = rows = queries = spread(scores.queries, tokens)
        if extra == 0 or (captured.sinks and extra > 0):
            columns = rows + list(range(scores.queries, scores.keys))
        else:
            columns = spread(scores.keys, tokens)
        keys = columns
    logits, visible = _expected(captured, heads, queries, keys)
    dtype = next((i.x.dtype for i in captured.inputs), torch.float32)
    exact = 4 * torch.finfo(torch.float32).eps if dtype != torch.float64 else 0.0
    width = max(p.in_features for p in site.projections)
    rtol = max(exact, max(width, scores.keys) * torch.finfo(torch.float64).eps)
    call, problem = captured.call, ReplayError("it was not run")
    between = not channels and not site.softmax
    few = (scores.queries, rows) if between else (1, [0])
    for args, kwargs, sampled in shortened(call.args, call.kwargs, *few):
        here, there = rows, columns
        if sampled:
            here = list(range(len(rows)))
            there = list(range(len(columns))) if len(columns) - len(rows) == extra else columns
        replay = Replay(
            site,
            Call(call.forward, args, kwargs, call.turn),
            captured.conditioned,
            here,
            there,
            logits,
            visible,
            max(CLOSE.get(dtype, 0.05), _ROUNDED),
        )
        try:
            replay.trace(heads[0])
        except ReplayError as error:
            problem = error
            continue
        return ReplayJob(replay, rtol, len(chosen))
    raise problem


def _expected(
    captured: Captured, heads: Sequence[int], rows: list[int], columns: list[int]
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Logits and visible keys of the sampled tokens, by head: (queries, keys)."""
    logits: dict[int, Tensor] = {}
    visible: dict[int, Tensor] = {}
    for h in heads:
        found = captured.scores.read(0, slice(h, h + 1))
        logits[h], visible[h] = (t[0][rows][:, columns] for t in found)
    return logits, visible
