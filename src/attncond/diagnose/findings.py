"""From numbers to words: what in a report is worth a look, each with a code that stays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

__all__ = ["CODES", "Finding", "find"]

Severity = Literal["error", "warning", "info"]

CODES: dict[str, str] = {
    "weights-not-finite": "a weight holds NaN or inf",
    "activations-not-finite": "attention or tokens hold NaN or inf",
    "singular-weight": "a projection, or a head's block of it, has no inverse in float64",
    "ill-conditioned-weight": "a weight that the forward pass uses has κ of 1e4 or more",
    "saturated-attention": "half of the queries or more look at a single key",
    "uniform-attention": "queries hardly tell keys apart: 99.9% of the largest possible entropy",
    "large-logits": "a logit beyond 100 leaves the softmax without gradient",
    "rank-collapse": "tokens are nearly equal: the residue is below 0.05",
    "no-gradient": "the loss does not depend on a weight",
    "ill-conditioned-jacobian": "κ of a head's Jacobian is 1e6 or more",
    "paper-bound-exceeded": "κ of a head's Jacobian is above the right side of Thm 3.4",
    "not-reached": "the attention was not seen in this forward pass",
}

KAPPA = 1e4
JACOBIAN = 1e6
SATURATION = 0.5
UNIFORM = 0.999
LOGIT = 100.0
RESIDUE = 0.05

_ORDER: dict[Severity, int] = {"error": 0, "warning": 1, "info": 2}
_SEVERITY: dict[str, Severity] = {
    "weights-not-finite": "error",
    "activations-not-finite": "error",
    "uniform-attention": "info",
    "paper-bound-exceeded": "info",
    "not-reached": "info",
}


class _Row(Protocol):
    @property
    def layer(self) -> int: ...
    @property
    def path(self) -> str: ...
    @property
    def call(self) -> int: ...
    @property
    def head(self) -> int | None: ...
    @property
    def values(self) -> Mapping[str, float | str | None]: ...
    def number(self, name: str) -> float | None: ...


@dataclass(frozen=True)
class Finding:
    """Something about one attention; ``head`` is the worst of the ``heads`` that show it.

    ``head`` None means the whole attention or projection.
    """

    code: str
    severity: Severity
    layer: int
    path: str
    call: int
    role: str | None
    head: int | None
    heads: int
    value: float | None
    message: str

    @property
    def key(self) -> tuple[str, int, str, int, str | None, bool]:
        """What names the same finding in another report of the model."""
        return self.code, self.layer, self.path, self.call, self.role, self.head is None


def find(rows: Iterable[_Row]) -> tuple[Finding, ...]:
    """All findings, errors first, in the order of the layers."""
    groups: dict[tuple[int, int], list[_Row]] = {}
    for row in rows:
        groups.setdefault((row.layer, row.call), []).append(row)
    found = [f for group in groups.values() for f in _of_attention(group)]
    return tuple(sorted(found, key=lambda f: (_ORDER[f.severity], f.layer, f.call)))


def _of_attention(rows: Sequence[_Row]) -> Iterable[Finding]:
    whole = [r for r in rows if r.head is None]
    heads = [r for r in rows if r.head is not None]
    if rows[0].call == 0:  # later runs use the same weights
        for role in "qkv":
            yield from _weight(whole, role, f"W_{role.upper()}")
            yield from _weight(heads, role, f"W_{role.upper()}")
    broken = [
        r
        for r in rows
        if any(_is_nan(r.number(n)) for n in ("entropy", "attention_sigma_1", "token_rms"))
        or r.number("token_rms") == math.inf
    ]
    if broken:
        message = "attention or its input holds NaN or inf"
        yield _finding("activations-not-finite", broken[:1], message, None, None)
    for row in whole:
        if row.values.get("jacobian_status") == "not reached":
            message = "its attention was not seen in this forward pass"
            yield _finding("not-reached", [row], message, None, None)
        residue = row.number("token_residue")
        if residue is not None and residue < RESIDUE:
            message = f"tokens are nearly equal at its input, residue {residue:.2g}"
            yield _finding("rank-collapse", [row], message, None, residue)
    # Where heads could not be told apart, the row of the whole stands for them.
    parts = heads if any(r.number("entropy") is not None for r in heads) else whole
    yield from _worst(parts, "saturation", SATURATION, "saturated-attention", _saturated)
    yield from _worst(
        parts,
        "entropy_relative",
        UNIFORM,
        "uniform-attention",
        lambda r, v: f"queries hardly tell keys apart, {100 * v:.2f}% of the largest entropy",
    )
    yield from _worst(
        parts, "logit_max", LOGIT, "large-logits", lambda r, v: f"a logit reaches {v:.3g}"
    )
    yield from _worst(
        heads,
        "jacobian_kappa",
        JACOBIAN,
        "ill-conditioned-jacobian",
        lambda r, v: f"the Jacobian has κ {v:.2g}",
    )
    above = [r for r in heads if _above_bound(r)]
    if above:
        values = (above[0].number("jacobian_kappa"), above[0].number("jacobian_paper_bound"))
        message = "κ of the Jacobian is {:.3g}, the paper's bound {:.3g}".format(*values)
        yield _finding("paper-bound-exceeded", above, message, None, values[0])


def _weight(rows: Sequence[_Row], role: str, name: str) -> Iterable[Finding]:
    kappas = [(r, r.number(f"{role}_kappa")) for r in rows]
    known = [(r, k) for r, k in kappas if k is not None]
    if broken := [r for r, k in known if math.isnan(k)]:
        yield _finding("weights-not-finite", broken, f"{name} holds NaN or inf", role, None)
    if singular := [r for r, k in known if k == math.inf]:
        yield _finding("singular-weight", singular, f"{name} is singular", role, math.inf)
    bad = sorted(((r, k) for r, k in known if KAPPA <= k < math.inf), key=lambda x: -x[1])
    if bad:
        message = f"{name} has kappa {bad[0][1]:.2g}"
        yield _finding("ill-conditioned-weight", [r for r, _ in bad], message, role, bad[0][1])
    if still := [r for r in rows if r.number(f"{role}_grad_norm") == 0]:
        message = f"the loss does not depend on {name}"
        yield _finding("no-gradient", still, message, role, 0.0)


def _worst(
    rows: Sequence[_Row], name: str, limit: float, code: str, words: _Words
) -> Iterable[Finding]:
    known = [(r, r.number(name)) for r in rows]
    found = sorted(((r, v) for r, v in known if v is not None and v >= limit), key=lambda x: -x[1])
    if found:
        row, value = found[0]
        yield _finding(code, [r for r, _ in found], words(row, value), None, value)


class _Words(Protocol):
    def __call__(self, row: _Row, value: float, /) -> str: ...


def _saturated(row: _Row, value: float) -> str:
    entropy = row.number("entropy")
    known = "" if entropy is None else f", entropy {entropy:.2g} nats"
    return f"attention is saturated, {100 * value:.0f}% of queries look at one key{known}"


def _above_bound(row: _Row) -> bool:
    kappa, bound = row.number("jacobian_kappa"), row.number("jacobian_paper_bound")
    return kappa is not None and bound is not None and kappa > bound


def _is_nan(value: float | None) -> bool:
    return value is not None and math.isnan(value)


def _finding(
    code: str, rows: Sequence[_Row], words: str, role: str | None, value: float | None
) -> Finding:
    row = rows[0]
    where = row.path or "the model"
    if row.call:
        where += f" (run {row.call + 1})"
    if row.head is not None:
        where += f", head {row.head}"
        if len(rows) > 1:
            words += f" ({len(rows)} heads in all)"
    return Finding(
        code=code,
        severity=_SEVERITY.get(code, "warning"),
        layer=row.layer,
        path=row.path,
        call=row.call,
        role=role,
        head=row.head,
        heads=len(rows) if row.head is not None else 0,
        value=value,
        message=f"layer {row.layer}, {where}: {words}",
    )
