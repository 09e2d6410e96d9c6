"""Preconditioned attention: a diagonal matrix that equilibrates the rows of each head's output.

A reconstruction. The paper says that each head is multiplied by a diagonal matrix C which depends
on Q, K and V, and bases it on Guggenheimer's bound

    κ(M) < (2 / |det M|) · (‖M‖_F / √n)ⁿ;

it does not give C. Minimising that bound over diagonal C with rows m_i of M gives c_i ∝ 1/‖m_i‖
(the arithmetic mean of the ‖c_i m_i‖² is least, for a given product, when all are equal), which is
what stands here: C_ii = 1/‖A_i‖ for the output A = P·V of a head.

It cannot help where the rows are of one length already, and the bound speaks of square matrices: a
tall head (197 tokens, 64 channels) may gain or lose a little. Measure it; nothing is promised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attncond.errors import ConditioningError

_LEAST = 1e-18  # its square is about the least that float32 can hold


@dataclass(frozen=True)
class Precondition:
    """Divide each row of each head's output by its length.

    Args:
        eps: Rows shorter than this are divided by it instead; rows of zeros stay as they are.
        detach: Treat the lengths as constants in the backward pass.

    >>> Precondition().equilibrate(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])
    """

    eps: float = 1e-6
    detach: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.eps, bool) or not isinstance(self.eps, int | float):
            raise ConditioningError(f"eps must be a number, not {self.eps!r}")
        if not (self.eps >= _LEAST and math.isfinite(self.eps)):
            raise ConditioningError(f"eps must be finite and at least {_LEAST}, not {self.eps!r}")
        if not isinstance(self.detach, bool):
            raise ConditioningError(f"detach must be True or False, not {self.detach!r}")

    def equilibrate(self, output: Tensor, dim: int = -1) -> Tensor:
        """C·A for an output whose rows run along ``dim``; any shape, half precision too."""
        # In half precision the squares of a row neither fit nor keep enough digits.
        wide = output.float() if output.dtype.itemsize < 4 else output
        # Not vector_norm and a division: the compiler makes slower kernels of them.
        squares = wide.square().sum(dim, keepdim=True)
        # Rows of zeros are those that see nothing, or one key and no gap. Their gradients come to
        # nothing further back, but 1/eps times each of them would drown those of other rows.
        scale = torch.where(
            squares == 0, torch.ones_like(squares), squares.clamp_min(self.eps**2).rsqrt()
        )
        result: Tensor = wide * (scale.detach() if self.detach else scale)
        return result.to(output.dtype)
