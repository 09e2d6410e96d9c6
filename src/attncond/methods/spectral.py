"""Spectral conditioning of W_Q, W_K and W_V (arXiv:2603.07162), and its norm-preserving form.

The effective weight is s·(W + C) with C = λI (Thm 3.8) or C = σ_max(W)·polar(W) (Thm 3.5). λ, s and
C are constants of the forward pass: gradients reach W alone, scaled by s.

The paper proves Thm 3.8 with λ − σ_min in a denominator where Weyl's inequality gives λ − σ_max;
the printed bound is false (A = diag(−9.9, 1), λ = 10: κ(A + λI) = 110, printed 2.21). What holds is

    κ(W + λI) ≤ (λ + σ_max) / (λ − σ_max)        for λ > σ_max,

so λ = σ_max (κ + 1)/(κ − 1) guarantees a target κ. Multiplying by s changes no condition number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attncond.errors import ConditioningError
from attncond.linalg import spectral_norm, start_block, track_norm
from attncond.polar import polar, track_polar

# A tracked norm comes from below, by up to 0.3%, and a tracked factor is off by some h: W + rσU
# has κ ≤ (1 + r)/(r − h), so that an r a little above 1 costs nothing and an r below 1 would.
_TRACKED_NORM, _FRESH_NORM = 1.003, 1.0002


class PolarState(NamedTuple):
    """What the polar correction of a batch of matrices carries from step to step."""

    factor: Tensor  # (b, m, n), orthonormal on its smaller side
    norm: Tensor  # (b,), σ_max
    block: Tensor  # (b, n, k), where the largest singular vectors were last seen


@dataclass(frozen=True)
class Spectral:
    """Condition W_Q, W_K and W_V.

    Args:
        kappa: The condition number that every conditioned matrix starts with at most; chooses
            λ = σ_max (kappa + 1)/(kappa − 1) for each matrix. Default 2 (λ = 3 σ_max).
        lam: λ by hand, the same for every matrix. Gives no guarantee where λ ≤ σ_max.
        correction: ``"identity"`` adds λI, fixed for good; ``"polar"`` adds σ_max times the
            orthogonal polar factor, which follows the weights through ``handle.attach(optimizer)``.
        preserve_norm: Multiply by s = σ_max(W)/σ_max(W + C), so that the projection starts with the
            spectral norm it had and the softmax does not saturate. False is the paper, literally.
        scope: The matrix κ speaks of: the whole ``"projection"`` or each ``"head"``'s block. The
            first bounds the second; the second says nothing of the first.
        roles: Which of W_Q, W_K, W_V, e.g. ``"qk"``.
        refresh_every: Optimizer steps between two refreshes of the polar factor.
        gain: Multiplies s: effective weights start with so many times the norm.

    >>> Spectral(kappa=1.5).kappa
    1.5
    """

    kappa: float | None = None
    lam: float | None = None
    correction: Literal["identity", "polar"] = "identity"
    preserve_norm: bool = True
    scope: Literal["projection", "head"] = "projection"
    roles: str = "qkv"
    refresh_every: int = 1
    gain: float = 1.0

    def __post_init__(self) -> None:
        for name in ("kappa", "lam", "refresh_every", "gain"):
            value = getattr(self, name)
            if isinstance(value, np.number):  # plain, for JSON and for equal configs
                object.__setattr__(self, name, value.item())
        if self.correction not in ("identity", "polar"):
            raise ConditioningError(
                f"correction must be 'identity' or 'polar', not {self.correction!r}"
            )
        if self.scope not in ("projection", "head"):
            raise ConditioningError(f"scope must be 'projection' or 'head', not {self.scope!r}")
        roles = self.roles
        if (
            not isinstance(roles, str)
            or not roles
            or set(roles) - set("qkv")
            or len(set(roles)) < len(roles)
        ):
            raise ConditioningError(f"roles must be some of 'qkv', each once, not {roles!r}")
        if not _is_number(self.refresh_every) or self.refresh_every < 1 or self.refresh_every % 1:
            raise ConditioningError(
                f"refresh_every must be a whole number of steps, not {self.refresh_every!r}"
            )
        if not isinstance(self.preserve_norm, bool):
            raise ConditioningError(
                f"preserve_norm must be True or False, not {self.preserve_norm!r}"
            )
        if not (_is_number(self.gain) and self.gain > 0):
            raise ConditioningError(f"gain must be a finite number above 0, not {self.gain!r}")
        if self.correction == "polar":
            if self.kappa is not None or self.lam is not None:
                raise ConditioningError(
                    "correction='polar' takes neither kappa nor lam: it always reaches kappa <= 2"
                )
            return
        if self.refresh_every != 1:
            raise ConditioningError("refresh_every belongs to correction='polar'; λI never changes")
        if self.kappa is not None and self.lam is not None:
            raise ConditioningError("give kappa or lam, not both: each of them decides λ")
        if self.kappa is not None and not (_is_number(self.kappa) and self.kappa > 1):
            raise ConditioningError(f"kappa must be a finite number above 1, not {self.kappa!r}")
        if self.lam is not None and not (_is_number(self.lam) and self.lam > 0):
            raise ConditioningError(f"lam must be a finite number above 0, not {self.lam!r}")

    @classmethod
    def paper(cls) -> Spectral:
        """Thm 3.8 literally: λ = 10 on the whole projections, the norm not preserved."""
        return cls(lam=10.0, preserve_norm=False)

    @classmethod
    def paper_svd(cls) -> Spectral:
        """Thm 3.5 literally: σ_max times the polar factor, refreshed after every optimizer step."""
        return cls(correction="polar", preserve_norm=False)

    @property
    def target(self) -> float | None:
        """The condition number that is guaranteed, or None where λ was set by hand."""
        if self.correction == "polar":
            return 2.0
        return None if self.lam is not None else (self.kappa or 2.0)

    def identity_terms(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """(s, λ) of each matrix of a batch (b, m, n), in at least float32.

        >>> s, lam = Spectral().identity_terms(torch.diag(torch.tensor([2.0, 1.0]))[None])
        >>> lam
        tensor([6.0000])
        """
        norm = spectral_norm(matrix)
        if self.lam is not None:
            # Through float64: a λ beyond the dtype becomes infinite, and is refused by name.
            lam = torch.full_like(norm, self.lam, dtype=torch.float64).to(norm.dtype)
        else:
            kappa = self.kappa or 2.0
            # Upwards by a few roundings, so that the guarantee survives the arithmetic.
            slack = 1 + 8 * torch.finfo(norm.dtype).eps
            lam = norm * ((kappa + 1) / (kappa - 1) * slack)
        if not self.preserve_norm:
            return torch.full_like(norm, self.gain), lam
        shifted = matrix.to(norm.dtype, copy=True)
        shifted.diagonal(dim1=-2, dim2=-1).add_(lam[:, None])
        return self.gain * norm / spectral_norm(shifted), lam

    def polar_terms(self, matrix: Tensor, width: int) -> tuple[Tensor, PolarState]:
        """s and the first polar state of each matrix of a batch (b, m, n), from scratch.

        ``width`` is how many singular vectors the state follows, at most min(m, n).
        """
        norm = spectral_norm(matrix)
        state = PolarState(polar(matrix, norm), norm, start_block(matrix, width))
        # σ_max(W + σ_max U) = 2 σ_max exactly, at the start and after every refresh.
        return torch.full_like(norm, self.gain * (0.5 if self.preserve_norm else 1.0)), state


Refresh = Literal["track", "anchor", "scratch"]


def follow(matrix: Tensor, state: PolarState, how: Refresh) -> PolarState:
    """The polar state (b, m, n) after the weights moved.

    ``"track"`` costs a few products and no synchronisation, but cannot take in a singular value
    that passes through zero; ``"anchor"`` computes the factor anew, in TF32 where that is enough,
    and ``"scratch"`` in full precision.
    """
    norm, block = track_norm(matrix, state.block)
    for _ in range({"track": 0, "anchor": 1, "scratch": 3}[how]):
        norm, block = track_norm(matrix, block)  # weights that moved far need a second look
    norm = norm * (_FRESH_NORM if how == "scratch" else _TRACKED_NORM)
    # Weights that diverged are the training's business: tracking passes NaN on without an error.
    if how == "track" or not bool(matrix.isfinite().all()):
        factor = track_polar(matrix, state.factor, norm)
    else:
        factor = polar(matrix, norm, near=state.factor, tf32=how == "anchor")
    return PolarState(factor, norm, block)


def shift_certificate(lam: float, norm: float) -> float:
    """The bound on κ(W + λI) when σ_max(W) = norm: Weyl's, infinite once the weights outgrew λ.

    >>> shift_certificate(lam=3.0, norm=1.0)
    2.0
    """
    return (lam + norm) / (lam - norm) if lam > norm else math.inf


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
