"""Which logits are a multiple of a product plus something fixed, one function at a time."""

import math

import pytest
import torch
from torch.overrides import TorchFunctionMode

from attncond.calls import TorchCall
from attncond.diagnose.dependence import Dependence


class Watch(TorchFunctionMode):
    """Notes every call; products with ``self.weight`` are the projections."""

    def __init__(self, weight):
        super().__init__()
        self.weight, self.dependence = weight, Dependence()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        call = TorchCall.of(func, args, kwargs or {})
        result = call.run()
        self.dependence.note(call, result, any(a is self.weight for a in args))
        return result


X = torch.randn(2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
MASK = torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
HIDE = torch.ones(5, 5, dtype=torch.bool).triu(1)


def followed(change):
    """What is known of ``change(q @ kᵀ, q)``."""
    weight = torch.randn(4, 4, dtype=torch.float64)
    watch = Watch(weight)
    with watch:
        q = X @ weight
        logits = q @ X.mT
        result = change(logits, q)
    return watch.dependence, logits, result


KEPT = {
    "as it is": (lambda z, q: z, 1.0),
    "scaled": (lambda z, q: z * 0.5, 0.5),
    "scaled from the left": (lambda z, q: 3 * z, 3.0),
    "scaled by a tensor": (lambda z, q: z * torch.tensor(0.25), 0.25),
    "divided in place": (lambda z, q: z.div_(4), 0.25),
    "masked": (lambda z, q: z + MASK, 1.0),
    "added to a mask": (lambda z, q: MASK + z, 1.0),
    "filled": (lambda z, q: z.masked_fill(HIDE, -math.inf), 1.0),
    "reshaped": (lambda z, q: z.unflatten(0, (2, 1)).transpose(1, 2).contiguous(), 1.0),
    "all of it": (lambda z, q: (z.clone().float() / 8 + MASK).masked_fill(HIDE, -1e30) * 2, 0.25),
    "like another": (lambda z, q: z + torch.zeros_like(q @ X.mT), 1.0),
}
LOST = {
    "capped": lambda z, q: z.tanh(),
    "turned over": lambda z, q: z.mT,
    "scaled by row": lambda z, q: z * MASK,
    "scaled by zero": lambda z, q: z * 0,
    "twice itself": lambda z, q: z + z,
    "plus queries": lambda z, q: z + q.sum(-1, keepdim=True),
    "divided from the left": lambda z, q: 1 / z,
    "filled with a small number": lambda z, q: z.masked_fill(HIDE, -1.0),
    "added with a factor": lambda z, q: torch.add(z, MASK, alpha=2),
}


@pytest.mark.parametrize("name", KEPT)
def test_kept(name):
    change, factor = KEPT[name]
    dependence, logits, result = followed(change)
    known = dependence.multiple(result)
    assert known is not None
    assert known.factor == pytest.approx(factor)
    if name != "divided in place":  # the product itself was changed
        assert torch.equal(known.product(), logits)
    assert not dependence.fixed(result)


@pytest.mark.parametrize("name", LOST)
def test_lost(name):
    dependence, _, result = followed(LOST[name])
    assert dependence.multiple(result) is None
    assert not dependence.fixed(result)


def test_in_place_changes_are_not_missed():
    def change(z, q):
        z[0, 0, 0] = q[0, 0, 0]
        return z

    dependence, _, result = followed(change)
    assert dependence.multiple(result) is None


def test_masks_are_fixed_unless_they_are_made_of_queries():
    dependence, _, (fixed, made, shaped) = followed(
        lambda z, q: (X.sum(-1), (q.sum(-1) > 0).double(), torch.ones_like(q))
    )
    assert dependence.fixed(None)
    assert dependence.fixed(fixed)
    assert dependence.fixed(shaped)
    assert not dependence.fixed(made)


@pytest.mark.parametrize("alpha", [1, 0.5])
def test_baddbmm_multiplies_and_adds(alpha):
    bias = MASK.expand(2, 5, 5)
    dependence, _, result = followed(lambda z, q: torch.baddbmm(bias, q, X.mT, alpha=alpha))
    known = dependence.multiple(result)
    assert known.factor == alpha
    assert torch.allclose(bias + alpha * known.product(), result)
    lost, _, result = followed(lambda z, q: torch.baddbmm(z, q, X.mT))
    assert lost.multiple(result) is None


def test_nothing_is_kept_alive():
    dependence, logits, result = followed(lambda z, q: z * 2)
    assert len(dependence._derived) >= 2
    del logits, result
    assert len(dependence._multiples) <= 1
