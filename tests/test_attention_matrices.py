"""What happens to an attention matrix on its way to the values, against the same done by hand."""

import pytest
import torch
from attention_forms import (
    AHEAD,
    GAP,
    GATE,
    LEAST,
    PRE,
    boolean,
    close,
    compare,
    compiled,
    gathered,
    logits_of,
    methods,
    normal,
    with_open_rows,
)
from naive import attention, conditioned
from torch.nn import functional as F

import attncond as ac


def gaps(q, k, v):
    """(P − U)V, by hand, and the parts it is made of."""
    weights = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1)
    return weights - 1 / k.shape[-2], weights


def several(q, k, v):
    first, second = logits_of(q, k, None).softmax(-1), logits_of(k, q, None).softmax(-1)
    return first, second


@pytest.mark.parametrize(
    "mix",
    [
        lambda a, b: a - 0.5 * b,
        lambda a, b: 0.5 * b + a,
        lambda a, b: torch.cat([a, b], 1),
        lambda a, b: torch.stack([a, b]).sum(0),
        lambda a, b: torch.lerp(a, b, 0.3),
        lambda a, b: a * b,
        lambda a, b: torch.einsum("bhij,hg->bgij", a, torch.eye(2).double()[[1, 0]]) + b,
        lambda a, b: a.masked_fill(torch.eye(4, dtype=torch.bool), 0.0) + b,
        lambda a, b: a.mul_(2.0) + b.mul_(3.0),
        lambda a, b: a.masked_fill_(torch.eye(4, dtype=torch.bool), 0.0) - b,
        lambda a, b: F.conv2d(a, torch.ones(2, 2, 1, 1).double()) + b,
        lambda a, b: F.linear(a.permute(0, 2, 3, 1), torch.ones(2, 2).double()).permute(0, 3, 1, 2),
    ],
)
def test_matrices_that_are_mixed_lose_their_gaps_first(mix):
    generator = torch.Generator().manual_seed(5)
    q, k, v = (normal(generator, 2, 2, 4, 3) for _ in range(3))

    def form(q, k, v):
        mixed = mix(*several(q, k, v))
        return mixed @ torch.cat([v, v], 1)[:, : mixed.shape[1]]

    def by_hand(q, k, v):
        mixed = mix(gaps(q, k, v)[0], gaps(k, q, v)[0])
        return mixed @ torch.cat([v, v], 1)[:, : mixed.shape[1]]

    with torch.no_grad():
        close(conditioned(form, GAP)(q, k, v), by_hand(q, k, v))


MIX = torch.tensor([[0.5, -1.0], [2.0, 0.25]], dtype=torch.float64)


def mixed_by_einsum(weights):
    return torch.einsum("b h i j, h g -> b g i j", weights, MIX)


def mixed_from_the_left(weights):
    return (MIX.mT @ weights.flatten(2)).view_as(weights)


def mixed_last(weights):
    return torch.matmul(weights.permute(0, 2, 3, 1), MIX).permute(0, 3, 1, 2)


def mixed_as_one(weights):
    turned = weights.transpose(0, 1)
    return torch.mm(MIX.t(), turned.reshape(2, -1)).view(turned.shape).movedim(0, 1)


def mixed_after_dropout(weights):
    weights = F.dropout(weights, 0.0, True).contiguous().swapaxes(1, -1)
    return torch.einsum("...h,hg->...g", weights, MIX).swapaxes(1, -1)


def pooled_queries(weights):
    return torch.ones(weights.shape[-2], weights.shape[-2]).double().tril() @ weights


@methods
@pytest.mark.parametrize("keys", [1, 2, 5])  # as many as heads, too
@pytest.mark.parametrize(
    "mix",
    [
        *(mixed_by_einsum, mixed_from_the_left, mixed_last, mixed_as_one, mixed_after_dropout),
        pooled_queries,
    ],
    ids=lambda f: f.__name__,
)
def test_a_product_that_leaves_the_keys_is_none_with_values(mix, keys, on):
    """Heads that talk after the softmax: what is equilibrated is the output that comes of it."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (normal(generator, 2, 2, n, 3) for n in (4, keys, keys))
    visible = with_open_rows(boolean((2, 1, 4, keys), generator))

    def form(q, k, v):
        return mix(logits_of(q, k, visible).softmax(-1)) @ v

    weights = logits_of(q, k, visible).softmax(-1)
    if GAP in on:
        weights = weights - visible / visible.sum(-1, keepdim=True).double()
    wanted = mix(weights) @ v
    if PRE in on:
        wanted = PRE.equilibrate(wanted)
    close(conditioned(form, *on)(q, k, v), wanted)
    close(compiled(conditioned(form, *on))(q, k, v), wanted)


def test_what_is_written_into_a_matrix_stays_there():
    def form(q, k, v):
        weights = logits_of(q, k, None).softmax(-1)
        weights[..., 0] = 0.0
        weights.clamp_(min=0.01)
        return weights @ v

    def by_hand(q, k, v):
        weights = gaps(q, k, v)[0]
        weights[..., 0] = 0.0
        return weights.clamp(min=0.01) @ v

    q, k, v = torch.randn(3, 1, 2, 4, 3, dtype=torch.float64)
    with torch.no_grad():
        close(conditioned(form, GAP)(q, k, v), by_hand(q, k, v))


def scaled_part(weights):
    weights[..., 0] *= 2
    return weights


def cleared_part(weights):
    weights.select(-1, 0).zero_()
    return weights


def cleared_diagonal(weights):
    weights.diagonal(dim1=-2, dim2=-1).zero_()
    return weights


def written_before_the_view_is_read(weights):
    flat = weights.view(-1, 4)
    weights.mul_(0.5)
    return flat.view_as(weights)


@pytest.mark.parametrize(
    "write",
    [scaled_part, cleared_part, cleared_diagonal, written_before_the_view_is_read],
    ids=lambda f: f.__name__,
)
def test_a_matrix_that_is_overwritten_through_a_view_is_refused(write):
    """What it stands for less than its entries would be that of before, in silence."""
    q, k, v = torch.randn(3, 1, 2, 4, 3, dtype=torch.float64)

    def form(q, k, v):
        return write(logits_of(q, k, None).softmax(-1)) @ v

    with torch.no_grad():
        with pytest.raises(ac.UnsupportedAttentionError, match="through a view of it"):
            conditioned(form, GAP)(q, k, v)
        kept = PRE.equilibrate(write(logits_of(q, k, None).softmax(-1)) @ v)
        close(conditioned(form, PRE)(q, k, v), kept)


def test_a_view_of_a_matrix_may_be_overwritten_and_used():
    def form(q, k, v):
        weights = logits_of(q, k, None).softmax(-1).flatten(0, 1)
        weights.mul_(0.5)
        weights = weights.view(2, 2, 4, 4)
        weights.masked_fill_(torch.eye(4, dtype=torch.bool), 0.0)
        return weights @ v

    q, k, v = (normal(torch.Generator().manual_seed(i), 2, 2, 4, 3) for i in range(3))
    weights = (gaps(q, k, v)[0] * 0.5).masked_fill(torch.eye(4, dtype=torch.bool), 0.0)
    with torch.no_grad():
        close(conditioned(form, GAP)(q, k, v), weights @ v)
        close(compiled(conditioned(form, GAP))(q, k, v), weights @ v)


@pytest.mark.parametrize(
    "write", [lambda p: p[..., 1:2], lambda p: p[..., 1:], lambda p: p[..., [0]] * 0.5]
)
def test_a_part_of_a_matrix_that_is_written_into_it(write):
    """Formed where it lies, the matrix takes its views along, which are no probabilities then."""
    q, k, v = (normal(torch.Generator().manual_seed(i), 1, 2, 4, 3) for i in range(3))

    def written(weights):
        weights[..., : write(weights).shape[-1]] = write(weights)
        return weights

    with torch.no_grad():
        output = conditioned(lambda q, k, v: written(logits_of(q, k, None).softmax(-1)) @ v, GAP)
        close(output(q, k, v), written(gaps(q, k, v)[0]) @ v)


def test_a_view_of_a_matrix_that_was_written_into_is_refused():
    def form(q, k, v):
        weights = logits_of(q, k, None).softmax(-1)
        first = weights[:, :1]
        weights[:, 1:] = weights[:, :1] * 2
        return first @ v

    q, k, v = torch.randn(3, 1, 2, 4, 3, dtype=torch.float64)
    with (
        torch.no_grad(),
        pytest.raises(ac.UnsupportedAttentionError, match="through a view of it"),
    ):
        conditioned(form, GAP)(q, k, v)


@methods
def test_returned_weights_stay_probabilities(on):
    def form(q, k, v):
        weights = logits_of(q, k, None).softmax(-1)
        output = F.dropout(weights, 0.0).to(v.dtype) @ v
        return output, weights, weights.mean(1), weights.detach()

    q, k, v = torch.randn(3, 2, 2, 4, 3, dtype=torch.float64)
    output, *returned = conditioned(form, *on)(q, k, v)
    close(output, attention(q, k, v, on))
    weights = gaps(q, k, v)[1]
    for got, wanted in zip(returned, (weights, weights.mean(1), weights), strict=True):
        close(got, wanted)


def entry_by_entry(weights, near):
    return (weights.unsqueeze(-1) * near).sum(-2)


def of_points(weights, near):
    return torch.sum(weights[..., None, :, :, None] * near[:, None], dim=-2)[:, :, 0]


@methods
@pytest.mark.parametrize("product", [entry_by_entry, of_points], ids=lambda f: f.__name__)
def test_values_that_are_met_entry_by_entry_are_not_left_out_in_silence(product, on):
    """Beside a product that is seen, as those of relative positions and of points are."""
    q, k, v = (normal(torch.Generator().manual_seed(i), 2, 2, 4, 3) for i in range(3))
    near = normal(torch.Generator().manual_seed(3), 2, 4, 4, 3)

    def form(q, k, v):
        weights = logits_of(q, k, None).softmax(-1)
        return weights @ v + product(weights, near[:, None])

    with pytest.raises(ac.UnsupportedAttentionError, match="meets values entry by entry"):
        conditioned(form, *on)(q, k, v)


@methods
def test_heads_that_are_mixed_entry_by_entry_are_none_that_meet_values(on):
    q, k, v = (normal(torch.Generator().manual_seed(i), 2, 2, 4, 3) for i in range(3))
    mixing = normal(torch.Generator().manual_seed(3), 2, 2, 1, 1)

    def form(q, k, v):
        weights = logits_of(q, k, None).softmax(-1)
        shown = (weights.unsqueeze(1) * mixing).sum(2)
        return weights @ v, shown

    output, shown = conditioned(form, *on)(q, k, v)
    close(output, attention(q, k, v, on))
    close(shown, (logits_of(q, k, None).softmax(-1).unsqueeze(1) * mixing).sum(2))


@methods
@pytest.mark.parametrize(
    ("largest", "kept"),
    [
        (lambda p: torch.topk(p, 2), 2),
        (lambda p: p.topk(k=3, dim=-1), 3),
        (lambda p: torch.sort(p, -1, True), 4),
        (lambda p: p.sort(descending=True), 4),
    ],
)
def test_the_largest_weights_are_those_of_the_matrix_with_its_gap(largest, kept, on):
    """Keys that a mask hides have weight zero, which is more than a small weight less its mean."""
    q, k, v = (normal(torch.Generator().manual_seed(i), 2, 2, 4, 3) for i in range(3))
    visible = ~AHEAD

    def scattered(q, k, v):
        weights = logits_of(q, k, visible).softmax(-1)
        values, places = largest(weights)
        return torch.zeros_like(weights).scatter(-1, places, values) @ v

    def picked(q, k, v):
        values, places = largest(logits_of(q, k, visible).softmax(-1))
        return (values.unsqueeze(-2) @ gathered(v, places)).squeeze(-2)

    def above(q, k, v):
        weights = logits_of(q, k, visible).softmax(-1)
        least = weights.kthvalue(5 - kept, keepdim=True).values
        return weights.masked_fill(weights < least, 0.0) @ v

    weights = logits_of(q, k, visible).softmax(-1)
    places = weights.topk(kept).indices
    uniform = visible / visible.sum(-1, keepdim=True).double()
    rest = weights - uniform if GAP in on else weights
    wanted = torch.zeros_like(rest).scatter(-1, places, rest.gather(-1, places)) @ v
    if PRE in on:
        wanted = PRE.equilibrate(wanted)
    for form in (scattered, picked, above):
        close(conditioned(form, *on)(q, k, v), wanted)
    close(compiled(conditioned(scattered, *on))(q, k, v), wanted)


CURVED = {
    "pow": lambda p: p.pow(2),
    "sigmoid": torch.sigmoid,
    "sqrt": torch.sqrt,
    "softmax": lambda p: p.softmax(-1),
    "normalize": lambda p: F.normalize(p, dim=-1),
}


@pytest.mark.parametrize(("name", "curve"), CURVED.items(), ids=CURVED.keys())
def test_a_function_that_makes_another_matrix_is_refused(name, curve):
    """Of P less its uniform part it is no number, or has another gap."""
    q, k, v = (normal(torch.Generator().manual_seed(i), 2, 2, 4, 3) for i in range(3))

    def form(q, k, v):
        weights = curve(logits_of(q, k, None).softmax(-1))
        return (weights / weights.sum(-1, keepdim=True)) @ v

    with pytest.raises(ac.UnsupportedAttentionError, match=f"goes through {name} on its way"):
        conditioned(form, GAP)(q, k, v)
    close(conditioned(form, PRE)(q, k, v), PRE.equilibrate(form(q, k, v)))


@methods
@pytest.mark.parametrize("curve", CURVED.values(), ids=CURVED.keys())
def test_a_function_that_only_looks_at_a_matrix_gets_probabilities(curve, on):
    def form(q, k, v):
        weights = logits_of(q, k, None).softmax(-1)
        return weights @ v, curve(weights).sum()

    q, k, v = (normal(torch.Generator().manual_seed(i), 2, 2, 4, 3) for i in range(3))
    output, looked = conditioned(form, *on)(q, k, v)
    close(output, attention(q, k, v, on))
    close(looked, form(q, k, v)[1])


CLOSED = torch.eye(4, dtype=torch.bool)


@methods
@pytest.mark.parametrize(
    ("touch", "kept"),
    [
        (lambda p: p.clone(), 1.0),
        (lambda p: p.detach(), 1.0),
        (lambda p: p.cpu(), 1.0),
        (lambda p: p.abs(), 1.0),
        (lambda p: F.relu(p), 1.0),
        (lambda p: torch.nan_to_num(p, nan=0.0), 1.0),
        (lambda p: p.clamp(min=1e-9), 1.0),
        (lambda p: p / p.sum(-1, keepdim=True), 1.0),
        (lambda p: (p + 1e-3) - 1e-3, 1.0),
        (lambda p: p * GATE, GATE),
        (lambda p: p.mul_(GATE), GATE),
        (lambda p: p.masked_fill(CLOSED, 0.0), ~CLOSED),
        (lambda p: p.masked_fill_(CLOSED, 0.0), ~CLOSED),
        (lambda p: torch.where(CLOSED, torch.zeros_like(p), p), ~CLOSED),
        (lambda p: torch.where(p > 0.2, p, 0.0), lambda p: p > 0.2),
    ],
)
def test_weights_that_are_touched_up_stay_probabilities(touch, kept, on):
    """What a module sees, drops and returns is P, whatever it does to it; U meets the values.

    ``kept``: what is left of U.
    """

    def form(q, k, v):
        weights = touch(logits_of(q, k, None).softmax(-1))
        torch.manual_seed(3)
        output = F.dropout(weights, 0.5) @ v
        return output, weights, -(weights * (weights + 1e-9).log()).sum(-1)

    generator = torch.Generator().manual_seed(5)
    q, k, v = (normal(generator, 2, 2, 4, 3) for _ in range(3))
    expected, *wanted = form(q, k, v)
    if GAP in on:
        rest = kept(gaps(q, k, v)[1]) if callable(kept) else kept
        expected = expected - (torch.full((2, 2, 4, 4), 0.25).to(v) * rest) @ v
    if PRE in on:
        expected = PRE.equilibrate(expected)
    output, *returned = conditioned(form, *on)(q, k, v)
    close(output, expected)
    for got, stock in zip(returned, wanted, strict=True):
        close(got, stock)


def test_matrices_that_are_added_to_another_tensor():
    def form(q, k, v):
        first, second = several(q, k, v)
        total = torch.zeros_like(first).add_(first)
        total += second
        total.sub_(first * 0.5)
        return total @ v

    q, k, v = torch.randn(3, 1, 2, 4, 3, dtype=torch.float64)
    total = gaps(q, k, v)[0] * 0.5 + gaps(k, q, v)[0]
    close(conditioned(form, GAP)(q, k, v), total @ v)


class LeanSoftmax(torch.autograd.Function):
    """A masked softmax that keeps its result for its own backward pass, as SEW-D's does."""

    @staticmethod
    def forward(ctx, logits, mask):
        weights = logits.masked_fill(~mask, LEAST).softmax(-1)
        weights.masked_fill_(~mask, 0)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx, grad):
        (weights,) = ctx.saved_tensors
        return weights * (grad - (weights * grad).sum(-1, keepdim=True)), None


@methods
def test_a_softmax_with_a_backward_pass_of_its_own(on):
    """It may keep its result for that, which has to stay one of a softmax."""

    def form(q, k, v, mask):
        return LeanSoftmax.apply(q @ k.mT / q.shape[-1] ** 0.5, mask) @ v

    generator = torch.Generator().manual_seed(5)
    tensors = [normal(generator, 2, 2, 4, 3) for _ in range(3)]
    mask = with_open_rows(boolean((2, 1, 4, 4), generator))
    compare(conditioned(form, *on), tensors, mask, on, mask, None)
