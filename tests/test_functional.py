"""Functions of weights as operators, against torch.func.jacrev."""

from __future__ import annotations

import pytest
import torch
from attention_heads import attend, jacobian, plain_head
from spectra import gaussian

from attncond import functional
from attncond.functional import FunctionJacobian, GraphJacobian


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


@pytest.mark.parametrize("mapped", [False, True])
def test_graph_jacobian_is_that_of_the_weights(mapped):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, y, w, u, turn = draw(5, 7), draw(4, 6), draw(7, 3), draw(6, 2), draw(5, 3, 3)

    def turned(t):
        return (turn @ t[..., None])[..., 0] if mapped else t

    def function(w, u):
        return torch.softmax(turned(x @ w) @ draw_mix, -1) @ torch.tanh(y @ u)

    draw_mix = draw(3, 4)
    parts = torch.func.jacrev(function, argnums=(0, 1))(w, u)
    want = torch.cat([p.flatten(0, 1).flatten(1) for p in parts], 1)
    first = turned(x @ w).requires_grad_(True)
    second = (y @ u).requires_grad_(True)
    unused = draw(3, 2).requires_grad_(True)
    output = torch.softmax(first @ draw_mix, -1) @ torch.tanh(second)
    maps = [turn if mapped else None, None, None]
    found = GraphJacobian(output, [first, second, unused], [x, y, draw(3, 4)], maps)
    with torch.no_grad():
        assert found.shape == (10, 7 * 3 + 6 * 2 + 4 * 2)
        dense = found.dense()
        assert torch.allclose(dense[:, : want.shape[1]], want)
        assert not bool(dense[:, want.shape[1] :].any())
        v, c = draw(dense.shape[1]), draw(10)
        assert torch.allclose(found.forward(v), dense @ v)
        assert torch.allclose(found.adjoint(c), dense.mT @ c)
        assert torch.allclose(found.gram("rows"), dense @ dense.mT)
        assert torch.allclose(found.gram("columns"), dense.mT @ dense)
