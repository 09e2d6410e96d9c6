"""The bounds against the plain reference of theory."""

import math

import pytest
import torch

from attncond import theory
from attncond.diagnose import jacobians


def test_bounds_are_those_of_theory():
    x = torch.randn(4, 6, dtype=torch.float64)
    w = torch.randn(3, 3, 6, dtype=torch.float64) / 2
    job = jacobians.Job(x, None, tuple(w[:, None]), (None, None, None), 3**-0.5, None)
    head = theory.Head(x, *(m.mT for m in w))
    found = jacobians.solve(job)
    assert found["jacobian_paper_bound"] == pytest.approx(theory.paper_bound(head), rel=1e-9)
    want = theory.jacobian_certificate(head, cheap=True).bound
    assert found["jacobian_certificate"] == pytest.approx(want, rel=1e-9)
    assert found["jacobian_kappa"] == pytest.approx(theory.jacobian_condition(head), rel=1e-9)


def test_certificate_is_infinite_where_nothing_holds():
    x = torch.randn(8, 3, dtype=torch.float64)  # more tokens than channels
    w = torch.randn(3, 1, 2, 3, dtype=torch.float64)
    job = jacobians.Job(x, None, tuple(w), (None, None, None), 1.0, None)
    assert jacobians.solve(job)["jacobian_certificate"] == math.inf
