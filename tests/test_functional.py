"""Functions of weights as operators, against torch.func.jacrev."""

from __future__ import annotations

import pytest
import torch
from attention_heads import attend, gaussian, jacobian, plain_head

from attncond import functional
from attncond.functional import FunctionJacobian


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("chunk", [1, 1 << 24])
@pytest.mark.parametrize(("n", "width"), [(3, 9), (9, 3)])
def test_products_and_gram_matrices(stacked, chunk, n, width, monkeypatch) -> None:
    monkeypatch.setattr(functional, "_CHUNK", chunk)
    x, *weights = plain_head(n, width, 2)
    operator = FunctionJacobian(lambda *w: attend(x, *w), weights, stacked)
    convention = "stacked" if stacked else "wide"
    matrix = jacobian(tuple(weights), convention, lambda *w: attend(x, *w))
    assert operator.shape == matrix.shape
    v, u = gaussian(matrix.shape[1]), gaussian(matrix.shape[0])
    torch.testing.assert_close(operator.forward(v), matrix @ v)
    torch.testing.assert_close(operator.adjoint(u), matrix.mT @ u)
    torch.testing.assert_close(operator.gram("rows"), matrix @ matrix.mT)
    torch.testing.assert_close(operator.gram("columns"), matrix.mT @ matrix)
    torch.testing.assert_close(operator.dense(), matrix)
    assert not operator.dense().requires_grad


def test_fused_attention_has_forward_derivatives_too() -> None:
    x, *weights = plain_head(5, 6, 2)

    def head(*w):
        q, k, v = (x @ m.mT for m in w)
        return torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]

    operator = FunctionJacobian(head, weights, False)
    expected = jacobian(tuple(weights), "wide", lambda *w: attend(x, *w))
    v = gaussian(expected.shape[1])
    torch.testing.assert_close(operator.forward(v), expected @ v)
