"""What is done to each token by itself, as blocks, against the graph it came from."""

import pytest
import torch

from attncond.diagnose.tokenwise import ReplayError, TokensMixedError, Use, cut_uses


def uses(seed=0):
    generator = torch.Generator().manual_seed(seed)
    found = []
    for role in "qkv":
        x, leaf = (torch.randn(6, n, generator=generator, dtype=torch.float64) for n in (9, 4))
        found.append(Use(role, x, leaf.requires_grad_(True)))
    return found


def cut(t):
    return t, t.detach().requires_grad_(True)


ROWS = [1, 3, 4]


def test_blocks_are_the_derivative():
    given = uses()
    q, k, v = (use.leaf for use in given)
    turn = torch.randn(6, 5, 4, dtype=torch.float64)
    made = {
        "q": cut((turn @ q[..., None])[ROWS, :, 0]),
        "k": cut(torch.nn.functional.normalize(k, dim=-1)[ROWS]),
        "v": cut(v[ROWS]),
    }
    found = {use.role: use for use in cut_uses(given, made)}
    assert torch.allclose(found["q"].map, turn[ROWS])
    for i, row in enumerate(ROWS):
        want = torch.autograd.functional.jacobian(
            lambda t: torch.nn.functional.normalize(t, dim=-1), k[row].detach()
        )
        assert torch.allclose(found["k"].map[i], want)
    assert torch.allclose(found["v"].map, torch.eye(4, dtype=torch.float64).expand(3, 4, 4))
    for role, use in zip("qkv", given, strict=True):
        assert torch.equal(found[role].x, use.x[ROWS])
        assert found[role].leaf is made[role][1]


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k: (q + q.mean(0))[ROWS],  # all tokens
        lambda q, k: (q + q.flip(0))[[0, 1, 2]],  # as many, but two of them each
        lambda q, k: q[ROWS] + k[ROWS],  # another weight
        lambda q, k: q[[4, 3, 1]],  # not in order
    ],
)
def test_what_is_mixed_is_told(change):
    given = uses()
    with pytest.raises(TokensMixedError):
        cut_uses(given, {"q": cut(change(given[0].leaf, given[1].leaf))})


def test_a_role_that_has_no_leaf_is_told():
    with pytest.raises(ReplayError, match="W_V was not found"):
        cut_uses(uses(), {"v": cut(torch.ones(3, 4, dtype=torch.float64))})
