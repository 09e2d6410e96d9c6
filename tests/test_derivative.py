"""J as an operator and its four Gram matrices, against J written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_heads import heads
from hypothesis import given, settings
from spectra import gaussian

from attncond import derivative
from attncond.derivative import HeadJacobian, differentiate
from attncond.head_inputs import Inputs

props = settings(derandomize=True, deadline=None, max_examples=150)


@props
@given(heads())
def test_products_and_gram_matrices(case: Any) -> None:
    inputs, details = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(derivative, "_CHUNK", 32 * 40)  # several pieces even here
        jacobian, _ = Inputs.of(*inputs, **{**details, "mask": None}).jacobian()
        matrix = jacobian.dense()
        assert matrix.shape == jacobian.shape
        v, u = gaussian(matrix.shape[1]), gaussian(matrix.shape[0])
        torch.testing.assert_close(jacobian.forward(v), matrix @ v)
        torch.testing.assert_close(jacobian.adjoint(u), matrix.mT @ u)
        torch.testing.assert_close(jacobian.gram("rows").tril(), (matrix @ matrix.mT).tril())
        torch.testing.assert_close(jacobian.gram("columns").tril(), (matrix.mT @ matrix).tril())


def test_the_same_token_everywhere_leaves_the_values() -> None:
    # All keys alike: the softmax cannot move the output, only W_V can.
    x = gaussian(1, 5).expand(4, 5)
    q, k, v = (x @ gaussian(5, 3, seed=i) for i in range(3))
    p = torch.full((4, 4), 0.25, dtype=torch.float64)
    head = differentiate(q, k, v, p, x, x, 1.0)
    assert head.s.abs().max() < 1e-15
    assert head.b.abs().max() < 1e-15
    j_q, _, j_v = HeadJacobian(head, stacked=False).blocks()
    assert j_q.abs().max() < 1e-14
    torch.testing.assert_close(j_v[:, 0, :, 0], x)
