"""The training comparison: plain Adam, runs that do not see each other, and what became of them."""

from __future__ import annotations

import math

import pytest
import torch

from attncond import propagation
from attncond.propagation import Stack, forward, generator_of
from attncond.propagation_training import TARGETS, outcome, train


def test_what_becomes_of_a_run() -> None:
    assert outcome([1.0, 0.2], constant=0.25) == "learned"
    assert outcome([1.0, 0.24], constant=0.25) == "stuck"
    assert outcome([0.3, 0.31], constant=0.25) == "diverged"
    assert outcome([1.0, math.inf, 0.1], constant=0.25) == "diverged"


def test_runs_side_by_side_are_the_runs_one_by_one() -> None:
    stack = Stack(remove_gap=True, layer_norm=True, skip=True)
    settings_ = {"t": 6, "samples": 3, "steps": 4}
    together = train(stack, 2, rates=[1e-3, 1e-2], seeds=[0, 1], **settings_)
    for run in together:
        (alone,) = train(stack, 2, rates=[run["rate"]], seeds=[run["seed"]], **settings_)
        assert alone["losses"] == pytest.approx(run["losses"], rel=1e-5)


@pytest.mark.parametrize("attention", ["A", "A(X)"])
def test_training_is_plain_adam(attention: str) -> None:
    stack = Stack(attention, layer_norm=True)
    (run,) = train(stack, 1, rates=[0.01], seeds=[5], t=5, samples=2, steps=3, target="sigmoid")
    generator = generator_of(5)
    x = torch.stack([propagation.orthonormal_tokens(5, 5, generator) for _ in range(2)]).float()
    drawn = propagation.initial_weights(stack, 1, 5, 5, generator)
    weights = drawn._replace(
        **{k: v.float().requires_grad_() for k, v in drawn._asdict().items() if v is not None}
    )
    optimizer = torch.optim.Adam([w for w in weights if w is not None], lr=0.01)
    y, losses = torch.sigmoid(20 * (x + 0.5)), []
    for _ in range(4):
        (out,) = forward(stack, weights, x)
        loss = torch.nn.functional.mse_loss(out, y)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert run["losses"] == pytest.approx(losses, rel=1e-5)


def test_a_run_that_diverges_leaves_its_neighbours_alone() -> None:
    stack = Stack()
    runs = train(stack, 2, rates=[1e-3, 1e30], seeds=[0], t=6, samples=2, steps=3)
    assert [r["outcome"] for r in runs][1] == "diverged"
    assert all(map(math.isfinite, runs[0]["losses"]))


def test_removing_the_gap_lets_ten_plain_layers_start_from_a_finite_loss() -> None:
    losses = {
        gap: train(Stack(remove_gap=gap), 10, rates=[1e-2], seeds=[0], t=32, samples=4, steps=1)
        for gap in (False, True)
    }
    assert losses[False][0]["losses"][0] > 1e9 * losses[True][0]["losses"][0]


def test_the_loss_of_the_best_constant_is_the_variance_of_the_targets() -> None:
    (run,) = train(Stack(), 1, rates=[1e-3], seeds=[2], t=6, samples=4, steps=0)
    generator = generator_of(2)
    x = torch.stack([propagation.orthonormal_tokens(6, 6, generator) for _ in range(4)])
    share = float((x > 0).double().mean())
    assert run["constant"] == pytest.approx(share * (1 - share), rel=1e-5)
    assert len(run["losses"]) == 1


def test_targets_are_functions_of_single_entries() -> None:
    x = torch.tensor([-1.0, -0.5, 0.0, 2.0])
    assert TARGETS["heaviside"](x).tolist() == [0, 0, 0, 1]
    assert TARGETS["sigmoid"](x)[1] == 0.5
    assert torch.equal(TARGETS["identity"](x), x)


def test_value_std_scales_the_values_at_the_start_alone() -> None:
    runs = [
        train(Stack(), 1, rates=[1e-3], seeds=[0], t=6, samples=2, steps=0, value_std=std)[0]
        for std in (0.0, 1.0)
    ]
    # Without values the stack gives zeros: the loss is the mean square of the targets.
    share = runs[0]["losses"][0]
    assert runs[0]["constant"] == pytest.approx(share * (1 - share), rel=1e-5)
    assert runs[1]["losses"][0] > share
    assert runs[0]["constant"] == runs[1]["constant"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rates": [], "seeds": [0]}, "at least one learning rate and one seed"),
        ({"rates": [0.1], "seeds": []}, "at least one learning rate and one seed"),
        (
            {"rates": [0.1], "seeds": [0], "target": "cosine"},
            "target must be one of heaviside, sigmoid, identity, not 'cosine'",
        ),
    ],
)
def test_bad_settings_are_named(options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(Stack(), 1, **options)
