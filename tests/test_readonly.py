"""Effective weights as tensors: what may be done with them, and what is refused."""

import io

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import attncond as ac
from attncond.readonly import EffectiveWeight


@pytest.fixture
def attention():
    """An owner with a property in place of its weight."""
    model = nn.MultiheadAttention(24, 3)
    ac.condition(model, ac.Spectral())
    return model


@pytest.mark.parametrize(
    "write",
    [
        lambda w: nn.init.normal_(w),
        lambda w: nn.init.trunc_normal_(w),
        lambda w: w.data.zero_(),
        lambda w: w.data[:3].fill_(1),
        lambda w: w.detach().T.copy_(torch.ones(24, 72)),
        lambda w: w.__setitem__(0, 1.0),
        lambda w: w.mul_(2),
        lambda w: w.chunk(3)[1].add_(1),
        lambda w: setattr(w, "data", torch.zeros(72, 24)),
        lambda w: w.requires_grad_(False),
        lambda w: setattr(w, "requires_grad", False),
        lambda w: torch.zeros(72, 24, out=w),
        lambda w: torch.add(w, 1, out=w),
        lambda w: w.__iadd__(1),
        lambda w: w.detach().diagonal().fill_(0),
        lambda w: w.swapaxes(0, 1).zero_(),
        lambda w: torch._foreach_mul_([torch.ones(2), w], 2),
        lambda w: torch._foreach_copy_([w], [torch.zeros(72, 24)]),
    ],
)
def test_a_write_that_would_be_lost_is_refused(attention, write):
    raw = attention.get_parameter("in_proj_weight").detach().clone()
    with torch.no_grad(), pytest.raises(ac.ConditioningError, match="would be lost"):
        write(attention.in_proj_weight)
    assert torch.equal(attention.get_parameter("in_proj_weight"), raw)


def test_reading_is_plain_and_differentiable(attention):
    weight = attention.in_proj_weight
    assert isinstance(weight, EffectiveWeight)
    assert weight.shape == (72, 24)
    assert type(weight * 2) is torch.Tensor
    assert type(weight.clone().zero_()) is torch.Tensor
    assert weight.data.dtype == weight.dtype == torch.float32
    assert repr(weight).startswith("EffectiveWeight(")
    weight.sum().backward()
    scale = attention.attncond_in_proj_weight_scale
    torch.testing.assert_close(
        attention.get_parameter("in_proj_weight").grad, scale[:, None].expand(72, 24)
    )


def test_a_saved_copy_of_the_effective_weight_needs_no_attncond(attention):
    file = io.BytesIO()
    torch.save(attention.in_proj_weight.detach(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded) is torch.Tensor
    assert torch.equal(loaded, attention.in_proj_weight)


@pytest.mark.parametrize("method", [ac.Spectral(), ac.RemoveGap()], ids=["weights", "heads"])
def test_tracers_get_plain_tensors(method):
    """They refuse types of tensors that they do not know."""
    model = nn.MultiheadAttention(24, 4, batch_first=True).eval()
    ac.condition(model, method)
    x = torch.randn(2, 5, 24)
    with torch.no_grad():
        expected = model(x, x, x)[0]
        graph = make_fx(lambda t: model(t, t, t)[0])(x)
        torch.testing.assert_close(graph(x), expected)
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            assert model(*[fake.from_tensor(x)] * 3)[0].shape == expected.shape
