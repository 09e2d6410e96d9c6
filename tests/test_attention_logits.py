"""The keys that masks hide in logits, whatever becomes of these before the softmax."""

import pytest
import torch
from attention_forms import (
    AHEAD,
    GAP,
    GATE,
    INF,
    PRE,
    additive,
    boolean,
    close,
    einsum,
    flattened,
    fused,
    gathered,
    keys_first,
    linalg,
    logits_of,
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
from torch.nn import functional as F

from attncond.sites import HIDDEN

# Masks that come before something that lifts them -----------------------------------------------


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
    "head by head": lambda w: torch.stack([filled(head) / 8 for head in w.unbind(1)], 1),
    "in parts": lambda w: torch.cat(torch.tensor_split(filled(w) / 8, 2, dim=1), 1),
    "repeated": lambda w: (filled(w) / 8).repeat_interleave(2, 1)[:, ::2],
    "tiled": lambda w: (filled(w) / 8).tile(2, 1, 1, 1)[:2],
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


def by_themselves(logits, places, v):
    return (logits.softmax(-1).unsqueeze(-2) @ gathered(v, places)).squeeze(-2)


def put_back(logits, places, v):
    whole = logits.new_full((2, 2, 4, 4), -INF)
    return whole.scatter(-1, places, logits).softmax(-1) @ v


def put_back_in_place(logits, places, v):
    whole = logits.new_full((2, 2, 4, 4), -INF)
    whole.scatter_(-1, index=places, src=logits)
    return whole.softmax(-1) @ v


@methods
@pytest.mark.parametrize("then", [by_themselves, put_back, put_back_in_place])
def test_the_largest_logits_keep_their_masks(then, on):
    q, k, v = (normal(torch.Generator().manual_seed(i), 2, 2, 4, 3) for i in range(3))

    def form(q, k, v):
        return then(*(filled(q @ k.mT) / 8).topk(3), v)

    logits = (q @ k.mT / 8).masked_fill(AHEAD, -INF)
    logits = logits.masked_fill(logits < logits.topk(3).values[..., -1:], -INF)
    weights, seen = logits.softmax(-1), (logits > -INF).double()
    wanted = (weights - seen / seen.sum(-1, keepdim=True) if GAP in on else weights) @ v
    if PRE in on:
        wanted = PRE.equilibrate(torch.where(wanted.norm(dim=-1, keepdim=True) < 1e-12, 0, wanted))
    close(conditioned(form, *on)(q, k, v), wanted)


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
