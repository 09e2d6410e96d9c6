"""Attention that is found however a module writes it, against matrices formed in a loop."""

import pytest
import torch
from attention_forms import (
    ASSIGNED,
    FORMS,
    GAP,
    INF,
    LEAST,
    MASKS,
    METHODS,
    PRE,
    WRITTEN,
    additive,
    alike,
    boolean,
    close,
    compare,
    compiled,
    einsum,
    flattened,
    fused,
    keys_first,
    linalg,
    logits_of,
    make_mask,
    matmul,
    methods,
    normal,
    sdpa,
    split_heads,
    values_first,
    viewed,
    where,
    with_open_rows,
)
from naive import attention, conditioned
from torch import nn
from torch.nn import functional as F

import attncond as ac
from attncond.recognition import Recognition
from attncond.sites import HIDDEN

# Forms --------------------------------------------------------------------------------------------


forms = pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)


@forms
def test_by_itself_it_changes_nothing(form):
    q, k, v = torch.randn(3, 2, 2, 4, 3, dtype=torch.float64)
    for mask in (None, torch.ones(4, 4, dtype=torch.bool).tril()):
        with Recognition(HIDDEN, 0) as mode:
            output = form(q, k, v, mask)
        assert torch.equal(output, form(q, k, v, mask))
        assert mode.softmaxes == (form in WRITTEN)


@methods
@pytest.mark.parametrize("form", FORMS + ASSIGNED, ids=lambda f: f.__name__)
def test_every_form_with_every_mask(form, on):
    if form is split_heads and PRE in on:
        with pytest.raises(ac.UnsupportedAttentionError, match="several products"):
            conditioned(form, *on)(*torch.randn(3, 1, 2, 3, 4), None)
        return
    generator = torch.Generator().manual_seed(3)
    tensors = [normal(generator, 2, 2, n, c) for n, c in ((3, 4), (4, 4), (4, 3))]
    for kind in MASKS:
        mask, visible, bias = make_mask(kind, 2, 2, 3, 4, generator)
        compare(conditioned(form, *on), tensors, mask, on, visible, bias)


@pytest.mark.parametrize(
    ("form", "on"),
    [
        *[(form, METHODS["both"]) for form in FORMS if form is not split_heads],
        (split_heads, METHODS["gap"]),
        (fused, METHODS["gap"]),
        (matmul, METHODS["gap"]),
    ],
    ids=lambda value: (
        value.__name__ if callable(value) else "-".join(type(m).__name__ for m in value)
    ),
)
def test_compiled_forms_are_the_naive_ones(form, on):
    if form in (viewed, keys_first) and torch.__version__ < "2.12":
        pytest.skip("compiled code of torch 2.11 does not show .mT to a mode; it is refused there")

    def every(q, k, v, mask, bias):
        return form(q, k, v, None), form(q, k, v, mask), form(q, k, v, bias)

    generator = torch.Generator().manual_seed(3)
    tensors = [normal(generator, 2, 2, t, 4) for t in (3, 4, 4)]
    mask, visible, _ = make_mask("blind, inf", 2, 2, 3, 4, generator)
    bias = normal(generator, 2, 3, 4)
    module = compiled(conditioned(every, *on), backend="eager")
    alike(
        lambda *t: module(*t, mask, bias),
        lambda *t: [
            attention(*t, on, s, b) for s, b in ((None, None), (visible, None), (None, bias))
        ],
        tensors,
    )


@methods
@pytest.mark.parametrize("form", WRITTEN, ids=lambda f: f.__name__)
def test_what_is_not_a_number_is_not_hidden(form, on):
    """A query of NaN sees all keys, and NaN comes of it: zeros would hide a broken model."""
    if form is split_heads and PRE in on:
        return
    q, k, v = torch.randn(3, 1, 2, 3, 4, dtype=torch.float64)
    q[0, 0, 1] = torch.nan
    output = conditioned(form, *on)(q, k, v, None)
    assert output[0, 0, 1].isnan().all()
    assert output[0, 0, ::2].isfinite().all()


def test_a_softmax_of_something_else_is_left_alone():
    def form(q, k, v):
        gate = torch.softmax(v.mean(-1, keepdim=True), -2)
        return torch.softmax(v, -1), gate, sdpa(q, k, v)

    q, k, v = torch.randn(3, 1, 2, 4, 3, dtype=torch.float64)
    channels, gate, output = conditioned(form, GAP)(q, k, v)
    close(channels, v.softmax(-1))
    close(gate, v.mean(-1, keepdim=True).softmax(-2))
    close(output, attention(q, k, v, (GAP,)))


class Projecting(nn.Module):
    """Attention beside a softmax of a projection, or of no other, written as products."""

    def __init__(self, linear, how):
        super().__init__()
        self.num_heads, self.linear, self.how = 1, linear, how
        self.q, self.k, self.v = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.gate = nn.Parameter(torch.randn(4, 3))
        self.prompts = nn.Parameter(torch.randn(3, 4))

    def project(self, x, weight):
        if self.how == "linear":
            return F.linear(x, weight.t())
        return torch.einsum("bnd,de->bne", x, weight) if self.how == "einsum" else x @ weight

    def forward(self, x):
        q, k, v = (self.project(x, p.weight.t()) for p in (self.q, self.k, self.v))
        if self.linear:
            return q.softmax(-1) @ (k.softmax(-2).mT @ v)
        return self.project(x, self.gate).softmax(-1) @ self.prompts + sdpa(q, k, v)


@methods
@pytest.mark.parametrize("how", ["linear", "matmul", "einsum"])
def test_a_product_with_a_weight_makes_no_logits(how, on):
    """Or gates lose their gap, and linear attention counts as conditioned."""
    x = normal(torch.Generator().manual_seed(0), 2, 5, 4)
    module = Projecting(False, how).double()
    beside = (x @ module.gate).softmax(-1) @ module.prompts
    q, k, v = (p(x)[:, None] for p in (module.q, module.k, module.v))
    module_compiled = compiled(module)
    for method in on:
        ac.condition(module, method)
    wanted = attention(q, k, v, on)[:, 0] + beside
    close(module(x), wanted)
    close(module_compiled(x), wanted)
    module = Projecting(True, how).double()
    for method in on:
        ac.condition(module, method)
    with pytest.raises(ac.ConditioningError, match="was not reached"):
        module(x)


@methods
@pytest.mark.filterwarnings("ignore:Implicit dimension choice for softmax")
@pytest.mark.parametrize("axes", [2, 3, 4])
def test_a_softmax_that_chooses_its_axis(axes, on):
    """Of three axes it is the first, which then has to be that of the keys."""

    def implicit(q, k, v):
        logits = q @ k.mT / q.shape[-1] ** 0.5
        if axes == 2:
            return nn.Softmax()(logits[0, 0])[None, None] @ v
        if axes == 3:
            return nn.Softmax()(logits[0].movedim(-1, 0)).movedim(0, -1)[None] @ v
        return nn.Softmax()(logits.transpose(1, -1)).transpose(1, -1) @ v

    q, k, v = (normal(torch.Generator().manual_seed(i), 1, 1, 4, 3) for i in range(3))
    close(conditioned(implicit, *on)(q, k, v), attention(q, k, v, on))


# What happens to a matrix on its way to the values ------------------------------------------------


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
def test_logits_and_matrices_that_are_written_into_other_tensors(on):
    q, k, v = (normal(torch.Generator().manual_seed(i), 2, 2, 4, 3) for i in range(3))

    def copied(q, k, v):
        logits = logits_of(q, k, None)
        masked = torch.full_like(logits, -torch.inf)
        masked[..., 1:] = logits[..., 1:]
        weights = masked.softmax(-1)
        whole = torch.zeros_like(weights)
        whole[:] = weights
        return whole @ v

    visible = torch.tensor([False, True, True, True])
    close(conditioned(copied, *on)(q, k, v), attention(q, k, v, on, visible))


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


def gathered(v, places):
    """The values at each query's places, (..., queries, places, channels)."""
    whole = v.unsqueeze(-3).expand(*places.shape[:-1], *v.shape[-2:])
    return whole.gather(-2, places[..., None].expand(*places.shape, v.shape[-1]))


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


@methods
def test_the_largest_logits_keep_their_masks(on):
    q, k, v = (normal(torch.Generator().manual_seed(i), 2, 2, 4, 3) for i in range(3))

    def form(q, k, v):
        logits, places = (filled(q @ k.mT) / 8).topk(3)
        return (logits.softmax(-1).unsqueeze(-2) @ gathered(v, places)).squeeze(-2)

    logits = (q @ k.mT / 8).masked_fill(AHEAD, -INF)
    logits = logits.masked_fill(logits < logits.topk(3).values[..., -1:], -INF)
    weights, seen = logits.softmax(-1), (logits > -INF).double()
    wanted = (weights - seen / seen.sum(-1, keepdim=True) if GAP in on else weights) @ v
    if PRE in on:
        wanted = PRE.equilibrate(torch.where(wanted.norm(dim=-1, keepdim=True) < 1e-12, 0, wanted))
    close(conditioned(form, *on)(q, k, v), wanted)


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
GATE = torch.tensor([1.0, 0.5])[:, None, None]


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


# Masks that come before something that lifts them -----------------------------------------------


AHEAD = torch.ones(4, 4, dtype=torch.bool).triu(1)


def filled(logits):
    return logits.masked_fill(AHEAD, -1e4)


def filled_in_place(logits):
    logits[..., AHEAD] = -1e4
    return logits.view(-1, 4, 4).mul_(0.1).view_as(logits)


MASKED = {
    "divided": lambda w: filled(w) / 8,
    "times a number": lambda w: 0.1 * filled(w),
    "times a tensor": lambda w: torch.mul(GATE.double() / 8, filled(w)),
    "added, then divided": lambda w: (w + additive(AHEAD.logical_not(), -1e4)).div_(8),
    "in place": filled_in_place,
    "clamped": lambda w: w.masked_fill(AHEAD, -INF).clamp(min=-1000, max=1000),
    "capped": lambda w: torch.tanh(w.masked_fill(AHEAD, -INF) / 200) * 200,
}


@methods
@pytest.mark.parametrize("mask", MASKED.values(), ids=MASKED.keys())
def test_a_mask_that_is_scaled_with_the_logits_hides_as_it_did(mask, on):
    """At the softmax it is no lower than a bias may be."""
    q, k, v = (normal(torch.Generator().manual_seed(i), 2, 2, 4, 3) for i in range(3))

    def form(q, k, v):
        return mask(q @ k.mT).softmax(-1) @ v

    weights = mask(q @ k.mT).softmax(-1)
    seen = ~AHEAD.expand_as(weights)
    assert weights[~seen].max() < 1e-30
    wanted = weights @ v
    if GAP in on:
        wanted = wanted - seen.double() @ v / seen.sum(-1, keepdim=True)
    if PRE in on:
        wanted = PRE.equilibrate(torch.where(wanted.norm(dim=-1, keepdim=True) < 1e-12, 0, wanted))
    close(conditioned(form, *on)(q, k, v), wanted)


UNMASKED = (matmul, where, flattened, viewed, split_heads, einsum, values_first, keys_first, linalg)


@methods
@pytest.mark.parametrize("form", [fused, *UNMASKED], ids=lambda f: f.__name__)
def test_logits_that_no_mask_lowered_hide_nothing(form, on):
    """Of weights that are drawn wide, or grew without bounds."""
    if form is split_heads and PRE in on:
        return
    q, k, v = (normal(torch.Generator().manual_seed(i), 2, 2, 4, 3) for i in range(3))
    q = q * 1e5
    assert logits_of(q, k, None).min() < 3 * HIDDEN
    close(conditioned(form, *on)(q, k, v, None), attention(q, k, v, on), 1e-9)


def in_a_view(logits):
    logits.view(-1, 4, 4).masked_fill_(AHEAD, -INF)


def in_its_data(logits):
    logits.data[..., AHEAD] = -INF


def in_what_is_detached(logits):
    logits.detach()[:, :, AHEAD] = -INF


def with_out(logits):
    torch.add(logits, additive(~AHEAD, -INF), out=logits[:])


@methods
@pytest.mark.parametrize(
    "write", [in_a_view, in_its_data, in_what_is_detached, with_out], ids=lambda f: f.__name__
)
def test_masks_that_are_written_through_a_view_of_the_logits(write, on):
    q, k, v = (normal(torch.Generator().manual_seed(i), 2, 2, 4, 3) for i in range(3))

    def form(q, k, v):
        logits = logits_of(q, k, None)
        write(logits)
        return logits.softmax(-1) @ v

    with torch.no_grad():
        close(conditioned(form, *on)(q, k, v), attention(q, k, v, on, ~AHEAD))


TURNED = torch.arange(3, -1, -1)


@pytest.mark.parametrize(
    "order",
    [
        lambda t, axis: t.flip(axis),
        lambda t, axis: torch.roll(t, 1, axis),
        lambda t, axis: t.index_select(axis, TURNED),
        lambda t, axis: torch.gather(t, axis, TURNED.view(-1, *(1,) * ~axis).expand_as(t)),
    ],
)
def test_keys_that_a_mask_hid_are_hidden_in_another_order_too(order):
    q, k, v = (normal(torch.Generator().manual_seed(i), 2, 2, 4, 4) for i in range(3))

    def form(q, k, v):
        logits = filled(q @ k.mT) / 8
        return order(logits, -1).softmax(-1) @ order(v, -2)

    weights = (filled(q @ k.mT) / 8).softmax(-1)
    uniform = (~AHEAD).double() / (~AHEAD).sum(-1, keepdim=True)
    close(conditioned(form, GAP)(q, k, v), (weights - uniform) @ v)


# Masks that are only told where they are added: windows' -100 -------------------------------------


def window_mask(q, k, v, mask):
    """As Swin does: windows beside the batch, a bias, then the mask, in views."""
    b, h, n, _ = q.shape
    w = mask.shape[0]
    logits = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5 + torch.linspace(-9, 9, n).to(q)
    logits = logits.view(b // w, w, h, n, n) + mask.unsqueeze(1).unsqueeze(0).type_as(logits)
    return F.softmax(logits.view(-1, h, n, n), dim=-1) @ v


def window_mask_in_place(q, k, v, mask):
    b, _, n, _ = q.shape
    w = mask.shape[0]
    logits = (q @ k.mT) / q.shape[-1] ** 0.5
    logits += torch.linspace(-9, 9, n).to(q)
    logits = logits.unflatten(0, (b // w, w))
    logits = mask[None, :, None] + logits
    return F.softmax(logits.flatten(0, 1), -1) @ v


def window_mask_alone(q, k, v, mask):
    b, h, n, _ = q.shape
    w = mask.shape[0]
    q = torch.cat([q, torch.ones_like(q[..., :1])], -1)  # the bias, as one more channel
    k = torch.cat([k, torch.linspace(-9, 9, n).to(k).expand(b, h, n).unsqueeze(-1)], -1)
    logits = (q * torch.tensor([3**-0.5] * 3 + [1.0]).to(q)) @ k.mT
    logits = logits.view(b // w, w, h, n, n) + mask[:, None]
    return logits.view(-1, h, n, n).softmax(-1) @ v


def window_mask_transposed(q, k, v, mask):
    """The softmax over the axis before the last: keys down, queries across."""
    b, h, n, _ = q.shape
    logits = q @ k.mT * q.shape[-1] ** -0.5 + torch.linspace(-9, 9, n).to(q)
    logits = logits.view(b // len(mask), len(mask), h, n, n) + mask[:, None]
    weights = logits.view(-1, h, n, n).mT.softmax(-2)
    return F.dropout(weights.mT, 0.0) @ v


def window_mask_filled(q, k, v, mask):
    b, h, n, _ = q.shape
    logits = q @ k.mT * q.shape[-1] ** -0.5 + torch.linspace(-9, 9, n).to(q)
    logits = logits.view(b // len(mask), len(mask), h, n, n)
    logits = logits.masked_fill(mask[:, None] < 0, -100.0).masked_fill(mask[:, None] > 0, 3.0)
    return logits.view(-1, h, n, n).softmax(-1) @ v


def window_mask_in_baddbmm(q, k, v, mask):
    b, h, n, _ = q.shape
    full = mask[None, :, None] + torch.linspace(-9, 9, n).to(q)
    full = full.expand(b // len(mask), len(mask), h, n, n).reshape(b * h, n, n)
    q, k = q.flatten(0, 1) * q.shape[-1] ** -0.5, k.flatten(0, 1)
    return (torch.baddbmm(full, q, k.mT).softmax(-1) @ v.flatten(0, 1)).view(b, h, n, -1)


def window_mask_fused(q, k, v, mask):
    b, h, n, _ = q.shape
    full = mask[None, :, None].expand(b // len(mask), len(mask), h, n, n).reshape(b, h, n, n)
    return sdpa(q, k, v, attn_mask=full + torch.linspace(-9, 9, n).to(q))


@methods
@pytest.mark.parametrize(
    "form",
    [
        window_mask,
        window_mask_in_place,
        window_mask_alone,
        window_mask_transposed,
        window_mask_filled,
        window_mask_in_baddbmm,
        window_mask_fused,
    ],
    ids=lambda f: f.__name__,
)
def test_masks_of_minus_one_hundred(form, on):
    generator = torch.Generator().manual_seed(5)
    tensors = [normal(generator, 6, 2, 4, 3) for _ in range(3)]
    visible = with_open_rows(boolean((3, 4, 4), generator))
    mask = additive(visible, -100.0)
    bias = torch.linspace(-9, 9, 4).double()
    full = visible[:, None].repeat(2, 1, 1, 1)
    module = conditioned(form, *on, hidden=-50.0)
    wanted = attention(*tensors, on, full, bias)
    # exp(-100) is not nothing, but less than float64 can tell from it.
    exact = 1e-6 if form is window_mask_alone else 1e-10  # its constants are float32
    close(module(*tensors, mask), wanted, exact)
    if GAP in on:
        unaware = conditioned(form, *on)(*tensors, mask)
        assert (unaware - wanted).abs().max() > 1e-2


# Sinks --------------------------------------------------------------------------------------------


@methods
def test_a_sink_as_a_column_is_a_sink_as_a_gate(on):
    """What it leaves to the keys is their total weight; the gap is a part of that."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (normal(generator, 2, 2, 4, 3) for _ in range(3))
    sink = normal(generator, 2)
    visible = with_open_rows(boolean((2, 1, 4, 4), generator))

    def column(q, k, v):
        logits = logits_of(q, k, visible)
        logits = torch.cat([logits, sink[:, None, None].expand(2, 2, 4, 1)], -1)
        return (logits - logits.amax(-1, keepdim=True)).softmax(-1)[..., :-1] @ v

    logits = logits_of(q, k, visible)
    gate = torch.sigmoid(logits.logsumexp(-1, keepdim=True) - sink[:, None, None])
    wanted = attention(q, k, v, (GAP,) if GAP in on else (), visible) * gate
    if PRE in on:
        wanted = wanted / torch.linalg.vector_norm(wanted, dim=-1, keepdim=True).clamp_min(1e-6)
    close(conditioned(column, *on)(q, k, v), wanted)


def laid_out(logits):
    return logits.contiguous().softmax(-1)


def viewed_flat(logits):
    return logits.flatten(0, 1).softmax(-1).view(logits.shape)


def turned(logits):
    return torch.moveaxis(logits, -1, 1).softmax(1).permute(0, 2, 3, 1)


def one_by_one(logits):
    return torch.stack([logits[:, h].softmax(-1) for h in range(logits.shape[1])], 1)


@methods
@pytest.mark.parametrize(
    "softmax", [laid_out, viewed_flat, turned, one_by_one], ids=lambda f: f.__name__
)
def test_a_sink_stays_one_when_the_logits_are_reshaped(softmax, on):
    generator = torch.Generator().manual_seed(5)
    q, k, v = (normal(generator, 2, 2, 4, 3) for _ in range(3))
    sink = normal(generator, 2)[:, None, None].expand(2, 2, 4, 1)
    visible = with_open_rows(boolean((2, 1, 4, 4), generator))

    def form(q, k, v):
        logits = torch.cat([logits_of(q, k, None), sink], -1)
        return softmax(logits + F.pad(additive(visible, -INF), (0, 1)))[..., :-1] @ v

    gate = torch.sigmoid(logits_of(q, k, visible).logsumexp(-1, keepdim=True) - sink)
    wanted = attention(q, k, v, (GAP,) if GAP in on else (), visible) * gate
    if PRE in on:
        wanted = PRE.equilibrate(wanted)
    close(conditioned(form, *on)(q, k, v), wanted)


def beside(logits):
    return torch.cat([logits, torch.zeros_like(logits[..., :1])], -1)


def anew(logits):
    return torch.cat([logits, logits.new_zeros(*logits.shape[:-1], 1)], -1)


def padded(logits):
    return F.pad(logits, (0, 1))


@methods
@pytest.mark.parametrize("widen", [beside, anew, padded], ids=lambda f: f.__name__)
def test_a_sink_of_zero_however_it_comes_beside_the_logits(widen, on):
    """The softmax with one more in its denominator."""
    q, k, v = (normal(torch.Generator().manual_seed(i), 2, 2, 4, 3) for i in range(3))

    def column(q, k, v):
        return widen(logits_of(q, k, None)).softmax(-1)[..., :-1] @ v

    gate = torch.sigmoid(logits_of(q, k, None).logsumexp(-1, keepdim=True))
    wanted = attention(q, k, v, (GAP,) if GAP in on else ()) * gate
    if PRE in on:
        wanted = wanted / torch.linalg.vector_norm(wanted, dim=-1, keepdim=True)
    close(conditioned(column, *on)(q, k, v), wanted)
