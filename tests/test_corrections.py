"""What a module remembers of its corrections, and the weights that come of it."""

import copy

import pytest
import torch
from cases import CASE
from torch import nn

import attncond as ac
from attncond.corrections import corrected, flat, unflat

vit = CASE["timm-vit"]


@pytest.mark.parametrize(
    ("shape", "axis", "rows"),
    [((6, 4), 0, 6), ((6, 4), 1, 4), ((6, 4, 1, 1), 0, 6), ((2, 6, 4), 1, 6), ((2, 3, 5), 2, 5)],
)
def test_a_parameter_of_any_layout_is_a_matrix_and_back(shape, axis, rows):
    weight = torch.randn(shape)
    matrix = flat(weight, axis)
    assert matrix.shape == (rows, weight.numel() // rows)
    for i in range(rows):
        assert torch.equal(matrix[i], weight.select(axis, i).flatten())
    assert torch.equal(unflat(matrix, weight, axis), weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_rounded_once(dtype):
    raw, correction, scale = torch.randn(64, 64).to(dtype), 30 * torch.randn(64, 64), torch.rand(64)
    result = corrected(raw, 0, {"scale": scale, "correction": correction})
    exact = (raw.double() + correction.double()) * scale.double()[:, None]
    limits = torch.finfo(dtype)
    allowed = 0.501 * limits.eps * exact.abs() + limits.smallest_normal * limits.eps
    assert result.dtype == dtype
    assert ((result.double() - exact).abs() <= allowed).all()


def test_meta_models_wait_for_their_weights():
    filled = vit.make(dtype=torch.float32)
    trained = copy.deepcopy(filled)
    ac.condition(trained, ac.Spectral())
    with torch.device("meta"):
        model = vit.build()
        late = vit.build()
    for m in (model, late):
        handle = ac.condition(m.eval(), ac.Spectral())
        m.to_empty(device="cpu")
        with pytest.raises(ac.ConditioningError, match="calibrate"):
            vit.run(m)
    model.load_state_dict(trained.state_dict())
    torch.testing.assert_close(vit.run(model), vit.run(trained))
    late.load_state_dict(filled.state_dict(), strict=False)
    handle.calibrate()
    torch.testing.assert_close(vit.run(late), vit.run(trained))


def test_a_module_waits_until_the_last_of_its_weights_is_there():
    attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=4)
    attention.q_proj_weight = nn.Parameter(torch.empty(8, 8, device="meta"))
    handle = ac.condition(attention, ac.Spectral())
    attention.to_empty(device="cpu")
    for parameter in attention.parameters():
        nn.init.normal_(parameter)
    tokens = torch.randn(3, 1, 8), torch.randn(3, 1, 6), torch.randn(3, 1, 4)
    with pytest.raises(ac.ConditioningError, match="calibrate"):
        attention(*tokens)
    handle.calibrate()
    attention(*tokens)
    assert max(c.kappa for c in handle.certificates()) <= 2
