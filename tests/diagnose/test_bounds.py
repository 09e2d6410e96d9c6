"""The bounds against the plain reference of theory."""

import math

import pytest
import torch

import attncond as ac
from attncond import theory
from attncond.diagnose import jacobians


def job_of(x, w, scale):
    """One head with W_Q, W_K, W_V of (3, head_dim, in)."""
    owners = [torch.nn.Linear(*part.mT.shape, bias=False, dtype=w.dtype) for part in w]
    for owner, part in zip(owners, w, strict=True):
        owner.weight.data.copy_(part)
    site = ac.separate(*owners, heads=1)
    return jacobians.Job(x, None, site.projections, (None, None, None), scale, None)


def test_bounds_are_those_of_theory():
    x = torch.randn(4, 6, dtype=torch.float64)
    w = torch.randn(3, 3, 6, dtype=torch.float64) / 2
    head = theory.Head(x, *(m.mT for m in w))
    found = job_of(x, w, 3**-0.5).solve()
    assert found["jacobian_paper_bound"] == pytest.approx(theory.paper_bound(head), rel=1e-9)
    want = theory.jacobian_certificate(head, cheap=True).bound
    assert found["jacobian_certificate"] == pytest.approx(want, rel=1e-9)
    assert found["jacobian_kappa"] == pytest.approx(theory.jacobian_condition(head), rel=1e-9)


def test_certificate_is_infinite_where_nothing_holds():
    x = torch.randn(8, 3, dtype=torch.float64)  # more tokens than channels
    w = torch.randn(3, 2, 3, dtype=torch.float64)
    assert job_of(x, w, 1.0).solve()["jacobian_certificate"] == math.inf
