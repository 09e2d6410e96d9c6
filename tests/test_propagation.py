"""Signal propagation against closed forms, autograd and the constants of arXiv:2410.07799."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attncond import propagation, propagation_study, propagation_view
from attncond.propagation import Stack, forward, generator_of
from attncond.propagation_training import outcome, train

F64 = torch.float64
PROPERTY = settings(max_examples=40, deadline=None, derandomize=True)
STACKS = propagation_study.STACKS
RESULTS = Path(__file__).parents[1] / "results" / "propagation"

stacks = st.sampled_from(STACKS)


def draw(stack: Stack, depth: int, t: int, d: int, seed: int):
    generator = generator_of(seed)
    x = propagation.orthonormal_tokens(t, d, generator)
    return propagation.initial_weights(stack, depth, t, d, generator), x


def mean(values) -> float:
    return statistics.fmean(values)


# The pieces


@PROPERTY
@given(st.integers(1, 12), st.integers(0, 8), st.integers(0, 10**6))
def test_tokens_are_orthonormal(t: int, more: int, seed: int) -> None:
    x = propagation.orthonormal_tokens(t, t + more, generator_of(seed))
    torch.testing.assert_close(x @ x.T, torch.eye(t, dtype=F64), atol=1e-12, rtol=0)


@PROPERTY
@given(st.integers(1, 30), st.integers(0, 10**6))
def test_a_random_markov_matrix_is_one(t: int, seed: int) -> None:
    a = propagation.random_markov(t, generator_of(seed))
    assert bool((a > 0).all())
    torch.testing.assert_close(a.sum(1), torch.ones(t, dtype=F64))


def test_the_exponentials_of_the_logits_have_mean_and_variance_one() -> None:
    e = propagation.markov_logits(1500, generator_of(0)).exp()
    assert float(e.mean()) == pytest.approx(1, abs=0.01)
    assert float(e.var()) == pytest.approx(1, abs=0.05)


@PROPERTY
@given(stacks, st.integers(2, 6), st.integers(0, 3), st.integers(0, 10**6))
def test_a_layer_is_what_the_paper_writes(stack: Stack, t: int, more: int, seed: int) -> None:
    d = t + more
    weights, x = draw(stack, 2, t, d, seed)
    for layer, found in enumerate(forward(stack, weights, x)):
        if stack.attention == "A":
            logits = weights.logits[layer]
        else:
            logits = x @ weights.query[layer] @ (x @ weights.key[layer]).T / math.sqrt(d)
        a = logits.exp() / logits.exp().sum(1, keepdim=True)
        if stack.remove_gap:
            a = a - torch.ones(t, t, dtype=F64) / t
        expected = a @ x @ weights.value[layer]
        if stack.skip:
            expected = expected + x
        if stack.layer_norm:
            centred = expected - expected.mean(1, keepdim=True)
            expected = centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt()
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
        x = found


@PROPERTY
@given(st.integers(1, 30), st.integers(0, 10**6))
def test_removing_the_gap_needs_no_attention_matrix(t: int, seed: int) -> None:
    generator = generator_of(seed)
    a = propagation.random_markov(t, generator)
    v = torch.randn(t, 4, generator=generator, dtype=F64)
    torch.testing.assert_close((a - 1 / t) @ v, a @ v - v.mean(0))


@PROPERTY
@given(st.integers(2, 20), st.integers(0, 10**6))
def test_without_the_gap_attention_is_singular(t: int, seed: int) -> None:
    a = propagation.random_markov(t, generator_of(seed)) - 1 / t
    assert a.sum(1).abs().max() < 1e-14  # A⊥·1 = 0, so that κ(A⊥) would be infinite
    sigma = torch.linalg.svdvals(a)
    assert sigma[-1] < 1e-13 * sigma[0]


@PROPERTY
@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 10**6))
def test_the_stable_rank_is_that_of_the_covariance(t: int, d: int, seed: int) -> None:
    x = torch.randn(t, d, generator=generator_of(seed), dtype=F64)
    s = torch.linalg.svdvals(x @ x.T)
    rank, excess = propagation.stable_rank(x)
    assert rank == pytest.approx(float((s**2).sum() / s[0] ** 2), rel=1e-9)
    assert 1 <= rank <= min(t, d) + 1e-9
    assert rank - 1 == pytest.approx(excess, abs=1e-12)


def test_the_excess_is_not_lost_in_the_one() -> None:
    assert propagation.stable_rank(torch.diag(torch.tensor([1.0, 1e-6], dtype=F64)))[1] == (
        pytest.approx(1e-24)
    )
    assert all(map(math.isnan, propagation.stable_rank(torch.zeros(2, 2))))
    assert all(map(math.isnan, propagation.stable_rank(torch.full((2, 2), math.inf))))


def test_the_residue_of_equal_and_of_centred_tokens() -> None:
    assert propagation.residue(torch.ones(4, 3)) == 0
    assert propagation.residue(torch.tensor([[1.0], [-1.0]])) == 1


# Gradients


def autograd_norm(stack: Stack, weights, x: Tensor, layer: int, last: int) -> float:
    def output(value: Tensor) -> Tensor:
        values = [value if i == layer - 1 else weights.value[i] for i in range(last)]
        cut = weights._replace(value=torch.stack(values))
        *_, out = forward(stack, cut, x)
        return out

    return float(torch.func.jacrev(output)(weights.value[layer - 1]).norm())


@pytest.mark.parametrize("stack", STACKS, ids=str)
def test_gradient_norms_are_those_of_autograd(stack: Stack) -> None:
    weights, x = draw(stack, 4, 4, 5, seed=3)
    for layer in (1, 2, 4):
        found = propagation.gradient_norms(stack, weights, x, layer, chunk=7)
        expected = [autograd_norm(stack, weights, x, layer, last) for last in range(layer, 5)]
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("gap", [False, True])
def test_the_closed_form_of_constant_attention(gap: bool) -> None:
    stack = Stack(remove_gap=gap)
    weights, x = draw(stack, 5, 6, 6, seed=0)
    for layer in (1, 3, 5):
        expected = propagation.gradient_norms(stack, weights, x, layer)
        found = [
            propagation.constant_gradient_norm(stack, weights, x, layer, last)
            for last in range(layer, 6)
        ]
        assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("gap", "power"), [(False, 4), (True, 1)])
def test_gradients_explode_with_the_gap_and_not_without(gap: bool, power: int) -> None:
    stack, t = Stack(remove_gap=gap), 200
    squares = []
    for seed in range(6):
        weights, x = draw(stack, 4, t, t, seed)
        squares.append(propagation.constant_gradient_norm(stack, weights, x, 2, 4) ** 2)
    assert statistics.geometric_mean(squares) / t**power == pytest.approx(1, abs=0.35)


# The constants of the figures


def test_the_spectral_gap() -> None:
    t = 300
    values = [propagation_study.spectra(t, seed)["A"] for seed in range(6)]
    for sigma in values:
        assert sigma[0] == pytest.approx(math.sqrt(t), rel=0.01)  # σ₁ = 1
    # σ₂ = 2/√T; single draws go up to 2.3, for the largest of T² log-normal entries stands out.
    assert mean(sigma[1] for sigma in values) == pytest.approx(2, abs=0.2)


def test_keys_and_queries_have_the_gap_too() -> None:
    sigma = propagation_study.spectra(150, 0)["A(X)"]
    assert sigma[0] == pytest.approx(math.sqrt(150), rel=0.03)
    assert sigma[1] < 0.3 * sigma[0]


def test_rank_collapses_in_width() -> None:
    t = 200
    profiles = [propagation.depth_profile(Stack(), t, 2, seed) for seed in range(12)]
    first = mean(p["excess"][0] for p in profiles)
    second = mean(p["excess"][1] for p in profiles)
    assert 2 <= t * first <= 3.6
    assert propagation.excess_limit(1) == 3
    assert 3.5 <= t**3 * second <= 6
    assert propagation.excess_limit(2) == 5


def test_without_the_gap_it_does_not() -> None:
    stack = Stack(remove_gap=True)
    for t in (80, 200):
        ranks = [
            propagation.depth_profile(stack, t, 1, seed)["stable_rank"][0] for seed in range(6)
        ]
        assert mean(ranks) / t == pytest.approx(0.07, abs=0.012)
    assert propagation.stable_rank_limit(1) == pytest.approx(3 / (27 / 4) ** 2)


def test_the_limits_are_moments_and_edges_of_gaussian_products() -> None:
    t, moments, ranks = 300, [], []
    for seed in range(5):
        noise = torch.randn(2, t, t, generator=generator_of(seed), dtype=F64) / math.sqrt(t)
        moments.append(float((torch.linalg.svdvals(noise[0] @ noise[1]) ** 4).mean()))
        ranks.append(propagation.stable_rank(noise[0] @ noise[1])[0] / t)
    assert mean(moments) == pytest.approx(propagation.excess_limit(1), rel=0.05)
    assert mean(ranks) == pytest.approx(propagation.stable_rank_limit(1), rel=0.15)


@pytest.mark.parametrize(("name", "plotted"), propagation_study.PLOTTED.items())
def test_the_layers_of_the_papers_plot(name: str, plotted: tuple[float, float]) -> None:
    (stack,) = (s for s in STACKS if str(s) == name)
    profiles = [propagation.depth_profile(stack, 150, 10, seed) for seed in range(4)]
    for layer, value in zip((1, 10), plotted, strict=True):
        found = mean(p["stable_rank"][layer - 1] for p in profiles)
        assert found == pytest.approx(value, abs=0.1 if value == 1 else 0.4 * value)


def test_plain_tokens_become_one_with_depth() -> None:
    plain = propagation.depth_profile(Stack(), 60, 6, 0)["residue"]
    fixed = propagation.depth_profile(Stack(remove_gap=True), 60, 6, 0)["residue"]
    assert plain[0] < 0.9
    assert plain[-1] < 1e-3
    assert min(fixed) > 0.9


def test_keys_and_queries_without_the_gap_vanish() -> None:
    # What is not in the paper's model "A": the logits shrink with the tokens, and the tokens with
    # the logits, until nothing is left.
    norms = propagation.depth_profile(Stack("A(X)", remove_gap=True), 60, 4, 0)["norm"]
    assert norms[1] < 1e-4 * norms[0]
    assert norms[3] < 1e-40


# Training


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


# The command and its record


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(propagation_study, "WIDTHS", [10, 20])
    monkeypatch.setattr(propagation_study, "DEPTHS", [1, 2])
    measure = propagation_study.measure
    monkeypatch.setattr(propagation_study, "gradients", _few_gradients(propagation_study.gradients))
    monkeypatch.setattr(propagation_study, "measure", lambda seeds: measure(seeds, t=12))


def _few_gradients(gradients):
    return lambda stack, t, layer, depth, seeds: gradients(stack, 5, layer, depth, seeds)


@pytest.mark.usefixtures("quick")
def test_the_command_writes_records_and_figures(tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib")
    words = "--seeds 1 --train-seeds 1 --tokens 6 --samples 2 --steps 2 --rates 0.001 0.1"
    with pytest.raises(SystemExit) as end:
        propagation_study.main([*words.split(), "--out", str(tmp_path)])
    assert end.value.code == 1  # the constants are those of larger sizes
    assert "NOT" in capsys.readouterr().out
    for name in ("measured", "training"):
        text = (tmp_path / f"{name}.json").read_text(encoding="utf-8")
        record = json.loads(text)
        assert record["command"] == f"python -m attncond.propagation {words}"
        assert str(tmp_path) not in text
        assert {"attncond", "torch", "python"} <= set(record["versions"])
    assert {row["runs"] for row in record["summary"]} == {2}
    names = ["spectra", "stable_rank", "width", "gradients", "training", "training_scaled"]
    for name in names:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*.part"))


def test_the_committed_constants_hold() -> None:
    record = json.loads((RESULTS / "measured.json").read_text(encoding="utf-8"))
    assert all(row["holds"] for row in record["checks"])
    for row in record["checks"]:
        low, high = row["range"]
        assert low <= row["found"] <= high


def test_the_committed_table_is_what_the_runs_say() -> None:
    record = json.loads((RESULTS / "training.json").read_text(encoding="utf-8"))
    rows = [
        {**row, "last_loss": [math.nan if v is None else v for v in row["last_loss"]]}
        for row in record["rows"]
    ]
    found = propagation_study.summary(rows, record["setting"]["constant_loss"])
    for again, committed in zip(found, record["summary"], strict=True):
        for key in ("stack", "depth", "learned", "stuck", "diverged", "best_rate"):
            assert again[key] == committed[key]
    page = (RESULTS / "README.md").read_text(encoding="utf-8")
    assert propagation_view.training_table(record) in page


def test_diverged_runs_are_null_in_json_and_counted() -> None:
    rows = [
        {
            "value_std": "1",
            "stack": "A",
            "depth": 1,
            "rate": rate,
            "last_loss": losses,
            "outcome": outcomes,
        }
        for rate, losses, outcomes in (
            (0.1, [math.nan, 1.0, math.inf], ["diverged", "stuck", "diverged"]),
            (0.01, [0.1, 0.2, math.nan], ["learned", "learned", "diverged"]),
        )
    ]
    (row,) = propagation_study.summary(rows, constant=0.25)
    assert (row["learned"], row["stuck"], row["diverged"]) == (2, 1, 3)
    assert (row["best_rate"], row["best_median_loss"]) == (0.01, 0.2)
    assert propagation_study._plain([math.nan, math.inf, 1 / 3]) == [None, None, 0.333333]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Stack("B"), "'A' or 'A\\(X\\)'"),
        (lambda: propagation.orthonormal_tokens(4, 3, generator_of(0)), "1 <= t <= d"),
        (lambda: propagation.random_markov(0, generator_of(0)), "t must be a whole number"),
        (lambda: draw(Stack(), 0, 3, 3, 0), "depth must be a whole number"),
        (
            lambda: propagation.gradient_norms(Stack(), *draw(Stack(), 2, 3, 3, 0), layer=3),
            "between 1 and 2",
        ),
        (
            lambda: propagation.constant_gradient_norm(
                Stack(skip=True), *draw(Stack(), 2, 3, 3, 0), 1, 2
            ),
            "the closed form is for",
        ),
        (lambda: train(Stack(), 1, rates=[], seeds=[0]), "at least one learning rate"),
        (lambda: train(Stack(), 1, rates=[0.1], seeds=[0], target="cosine"), "target must be"),
    ],
)
def test_bad_input_is_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "words", ["--seeds 0", "--rates -1", "--only nothing", "--target nothing", "--steps x"]
)
def test_bad_options_are_named(words: str, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        propagation_study.main([*words.split(), "--out", str(tmp_path)])
    assert end.value.code == 2
    assert words.split()[0].removeprefix("--") in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_named(tmp_path, capsys) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as end:
        propagation_study.main(["--out", str(tmp_path / "file" / "folder")])
    assert end.value.code == 2
    assert "folder" in capsys.readouterr().err
