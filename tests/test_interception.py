"""Heads as they come out of a site's forward, against attention matrices formed in a loop."""

import itertools

import pytest
import torch
import torch.distributed as dist
from attention_forms import (
    FORMS,
    GAP,
    INF,
    MASKS,
    METHODS,
    PRE,
    additive,
    alike,
    boolean,
    close,
    compare,
    compiled,
    fused,
    logits_of,
    make_mask,
    matmul,
    methods,
    normal,
    sdpa,
    split_heads,
    with_open_rows,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import attention, conditioned
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import attncond as ac


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_outputs_and_gradients_are_the_naive_ones(data):
    size = st.integers(1, 4)
    b, h, q, k, d, e = (data.draw(size, label=n) for n in ("b", "h", "q", "k", "d", "e"))
    kind = data.draw(st.sampled_from(MASKS), label="mask")
    form = data.draw(st.sampled_from(FORMS), label="form")
    names = ["gap"] if form is split_heads else list(METHODS)
    on = METHODS[data.draw(st.sampled_from(names), label="methods")]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**20), label="seed"))
    tensors = [normal(generator, b, h, n, c) for n, c in ((q, d), (k, d), (k, e))]
    mask, visible, bias = make_mask(kind, b, h, q, k, generator)
    compare(conditioned(form, *on), tensors, mask, on, visible, bias)


@pytest.mark.parametrize("form", FORMS)
def test_a_single_key(form):
    """Its maximum has the shape of the logits themselves."""
    generator = torch.Generator().manual_seed(0)
    names = ["gap"] if form is split_heads else list(METHODS)
    for kind, queries, name in itertools.product(MASKS, (1, 2, 3), names):
        tensors = [normal(generator, 1, 1, n, 1) for n in (queries, 1, 1)]
        mask, visible, bias = make_mask(kind, 1, 1, queries, 1, generator)
        compare(conditioned(form, *METHODS[name]), tensors, mask, METHODS[name], visible, bias)


# Grouped heads, causal attention, other lengths --------------------------------------------------


def grouped(q, k, v, mask):
    return sdpa(q, k, v, attn_mask=mask, enable_gqa=True)


def repeated(q, k, v, mask):
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    return sdpa(q, k, v, attn_mask=mask)


def repeated_by_hand(q, k, v, mask):
    b, h, n, _ = k.shape
    group = q.shape[1] // h
    k, v = (t[:, :, None].expand(b, h, group, n, -1).reshape(b, h * group, n, -1) for t in (k, v))
    return matmul(q, k, v, mask)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_grouped_heads(data):
    size = st.integers(1, 3)
    b, h, group, q, k, d = (data.draw(size) for _ in range(6))
    kind = data.draw(st.sampled_from(MASKS), label="mask")
    form = data.draw(st.sampled_from([grouped, repeated, repeated_by_hand]), label="form")
    on = METHODS[data.draw(st.sampled_from(list(METHODS)), label="methods")]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**20)))
    tensors = [
        normal(generator, b, heads, n, c)
        for heads, n, c in ((h * group, q, d), (h, k, d), (h, k, 3))
    ]
    mask, visible, bias = make_mask(kind, b, h * group, q, k, generator)
    compare(conditioned(form, *on), tensors, mask, on, visible, bias)


def causal(q, k, v, mask):
    return sdpa(q, k, v, is_causal=True)


def causal_grouped(q, k, v, mask):
    return sdpa(q, k, v, None, 0.0, True, enable_gqa=True)


@methods
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (4, 4), (3, 5), (5, 3), (1, 4)])
@pytest.mark.parametrize("form", [causal, causal_grouped], ids=lambda f: f.__name__)
def test_causal_by_flag(form, queries, keys, on):
    generator = torch.Generator().manual_seed(5)
    heads = 4 if form is causal_grouped else 2
    tensors = [normal(generator, 2, h, n, 3) for h, n in ((heads, queries), (2, keys), (2, keys))]
    visible = torch.ones(queries, keys, dtype=torch.bool).tril()
    compare(conditioned(form, *on), tensors, None, on, visible, None)


@methods
@pytest.mark.parametrize(("queries", "keys"), [(1, 4), (3, 5), (4, 4), (5, 3)])
@pytest.mark.parametrize("corner", [causal_upper_left, causal_lower_right])
@pytest.mark.filterwarnings("ignore:Lower right causal bias")
def test_causal_by_a_bias_of_torch(corner, queries, keys, on):
    def form(q, k, v, mask):
        return sdpa(q, k, v, attn_mask=corner(queries, keys))

    generator = torch.Generator().manual_seed(5)
    tensors = [normal(generator, 2, 2, n, 3) for n in (queries, keys, keys)]
    diagonal = 0 if corner is causal_upper_left else keys - queries
    visible = torch.ones(queries, keys, dtype=torch.bool).tril(diagonal)
    compare(conditioned(form, *on), tensors, None, on, visible, None)


@methods
@pytest.mark.parametrize("mask", ["causal", "window", "heads"])
def test_heads_that_share_keys_and_values_without_an_axis_of_their_own(mask, on):
    generator = torch.Generator().manual_seed(5)
    tensors = [normal(generator, *s, 3) for s in ((2, 3, 4), (4,), (4,))]
    shown = {
        "causal": torch.ones(4, 4, dtype=torch.bool).tril(),
        "window": make_mask("window", 1, 1, 4, 4, generator)[1],
        "heads": with_open_rows(boolean((3, 4, 4), generator)),
    }[mask]

    def shared(q, k, v):
        return sdpa(q, k, v, is_causal=True) if mask == "causal" else sdpa(q, k, v, shown)

    def wanted(q, k, v):
        return attention(q, *(t.expand(2, 3, 4, 3) for t in (k, v)), on, shown)

    alike(conditioned(shared, *on), wanted, tensors)


@methods
def test_a_batch_of_nothing(on):
    module = conditioned(causal, *on)
    assert module(*torch.empty(3, 0, 4, 2), None).shape == (0, 4, 2)


@methods
def test_a_mask_with_more_axes_than_the_queries(on):
    """torch broadcasts such a mask, and gives the output no further axis."""
    generator = torch.Generator().manual_seed(5)
    tensors = [normal(generator, 3, 4, 2) for _ in range(3)]
    mask = with_open_rows(boolean((1, 3, 4, 4), generator))

    def wanted(q, k, v):
        return attention(q[None], k[None], v[None], on, mask)[0]

    alike(conditioned(lambda q, k, v: sdpa(q, k, v, mask), *on), wanted, tensors)


class Largest(TorchDispatchMode):
    """Remembers the most numbers that any tensor had which was computed inside."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor):
                size = t.untyped_storage().nbytes() // t.itemsize
                self.numbers = max(self.numbers, size)
        return result


@methods
@pytest.mark.parametrize("shape", [(2, 1, 1, 64), (1, 1, 64, 64), (2, 1, 64, 64)])
def test_an_expanded_mask_is_never_written_in_full(shape, on):
    """Nor is anything else that has the size of all heads' attention matrices."""
    generator = torch.Generator().manual_seed(5)
    tensors = [normal(generator, 2, 8, 64, 2) for _ in range(3)]
    mask = additive(with_open_rows(boolean(shape, generator)), -INF).expand(2, 8, 64, 64)
    tensors = [t.requires_grad_() for t in tensors]
    with Largest() as largest:
        conditioned(fused, *on)(*tensors, mask).sum().backward()
    assert largest.numbers <= mask.numel() / 8


@methods
def test_tensors_of_other_ranks(on):
    """(tokens, channels), (heads, ...) and (batch, windows, heads, ...) are attended to as well."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (normal(generator, 2, 3, 2, 4, 3) for _ in range(3))
    mask = with_open_rows(boolean((3, 1, 4, 4), generator))
    module = conditioned(fused, *on)
    for given_mask in (None, mask):
        visible = None if mask is None else given_mask
        wanted = torch.stack(
            [
                torch.cat(
                    [
                        attention(
                            *(t[b, w][None] for t in (q, k, v)),
                            on,
                            None if visible is None else visible[w][None],
                        )
                        for w in range(3)
                    ]
                )
                for b in range(2)
            ]
        )
        close(module(q, k, v, given_mask), wanted)
        inner = None if given_mask is None else given_mask[1]
        close(module(q[0, 1], k[0, 1], v[0, 1], inner), wanted[0, 1])
        flat = None if given_mask is None else given_mask[1, 0]
        close(module(q[0, 1, 0], k[0, 1, 0], v[0, 1, 0], flat), wanted[0, 1, 0])


@methods
@pytest.mark.parametrize("hide", [None, -torch.inf])
def test_a_mask_of_keys_alone(hide, on):
    """With as many heads as queries, a mean without its axis of queries would fit as well."""

    def form(q, k, v, mask):  # torch takes such masks in some of its kernels, this one's included
        return sdpa(q[0], k[0], v[0], mask)[None]

    generator = torch.Generator().manual_seed(5)
    tensors = [normal(generator, 1, 3, 3, channels) for channels in (4, 4, 2)]
    visible = torch.tensor([True, False, True])
    mask = visible if hide is None else additive(visible, hide)
    compare(conditioned(form, *on), tensors, mask, on, visible, None)


def test_no_keys_at_all():
    q, k, v = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 0, 4), torch.randn(1, 2, 0, 4)
    for on in METHODS.values():
        assert torch.equal(conditioned(fused, *on)(q, k, v, None), torch.zeros(1, 2, 3, 4))


# Precision ---------------------------------------------------------------------------------------

EXACT = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def half_softmax(q, k, v, mask):
    weights = F.softmax(logits_of(q, k, mask), dim=-1, dtype=torch.float32).to(q.dtype)
    return weights @ v


@methods
@pytest.mark.parametrize("kind", ["none", "boolean", "per-head", "least", "padding", "blind"])
@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("form", [fused, matmul, half_softmax], ids=lambda f: f.__name__)
def test_low_precision(form, dtype, kind, on):
    generator = torch.Generator().manual_seed(5)
    tensors = [normal(generator, 2, 2, n, 16).to(dtype) for n in (5, 9, 9)]
    mask, visible, _ = make_mask(kind, 2, 2, 5, 9, generator)
    if kind == "blind":  # rows with two visible keys have but one direction, in rounding errors
        mask = visible = boolean((2, 1, 5, 9), generator, 0.8)
        mask[1, 0, 2] = False
    if mask is not None and mask.dtype != torch.bool:
        mask = additive(visible, torch.finfo(dtype).min, dtype)
    elif mask is not None and form is not fused:
        mask = additive(mask, -INF, dtype)
    mine = [t.clone().requires_grad_() for t in tensors]
    output = conditioned(form, *on)(*mine, mask)
    assert output.dtype == dtype
    wide = [t.double().requires_grad_() for t in tensors]
    wanted = attention(*wide, on, visible)
    close(output.double(), wanted, EXACT[dtype])
    direction = torch.randn(wanted.shape, generator=generator).to(dtype)
    found = torch.autograd.grad((output * direction).sum(), mine)
    expected = torch.autograd.grad((wanted * direction.double()).sum(), wide)
    for f, e in zip(found, expected, strict=True):
        close(f.double(), e, 2 * EXACT[dtype] * max(1.0, float(e.abs().max())))


@pytest.mark.parametrize("queries", [1, 64], ids=["one row", "expanded"])
def test_padding_costs_no_precision(queries):
    """P(V − mean) is rounded, and not PV, which is large where all values have much in common."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (normal(generator, 2, 2, 64, 8).bfloat16() for _ in range(3))
    v += 20
    padding = torch.ones(2, 1, 1, 64, dtype=torch.bool)
    padding[0, ..., 40:] = False
    wanted = attention(*(t.double() for t in (q, k, v)), (GAP,), padding)
    mask = padding.expand(2, 1, queries, 64)
    found = conditioned(fused, GAP)(q, k, v, mask).double()
    assert (found - wanted).norm() < 0.05 * wanted.norm()


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("form", [causal, matmul], ids=lambda f: f.__name__)
def test_a_row_that_sees_one_key_does_not_drown_the_gradients_of_others(form, dtype):
    """Without the gap it is zero, and dividing zero by eps multiplies its gradient by 1/eps."""
    generator = torch.Generator().manual_seed(5)
    tensors = [normal(generator, 1, 2, 12, 16).to(dtype) for _ in range(3)]
    visible = torch.ones(12, 12, dtype=torch.bool).tril()
    mine = [t.clone().requires_grad_() for t in tensors]
    wide = [t.double().requires_grad_() for t in tensors]
    output = conditioned(form, GAP, PRE)(*mine, additive(visible, -INF, dtype))
    assert not output[:, :, 0].any()
    wanted = attention(*wide, (GAP, PRE), visible)
    direction = torch.randn(wanted.shape, generator=generator).to(dtype)
    found = torch.autograd.grad((output * direction).sum(), mine)
    expected = torch.autograd.grad((wanted * direction.double()).sum(), wide)
    for f, e in zip(found, expected, strict=True):
        close(f.double(), e, 4 * EXACT[dtype] * float(e.abs().max()))


def test_many_large_values_do_not_overflow_half_precision():
    big = (100 + torch.randn(1, 1, 1024, 4)).half()
    q = torch.randn(1, 1, 3, 4).half()
    for mask in (None, torch.ones(1, 1, 3, 1024, dtype=torch.bool), torch.zeros(3, 1024).half()):
        output = conditioned(fused, GAP)(q, big, big, mask)
        assert torch.isfinite(output).all()
        assert output.abs().max() < 10


@methods
@pytest.mark.parametrize("kind", ["none", "per-head", "padding", "bias", "causal", "blind, inf"])
@pytest.mark.parametrize("form", [fused, matmul], ids=lambda f: f.__name__)
def test_gradcheck(form, kind, on):
    generator = torch.Generator().manual_seed(2)
    tensors = [normal(generator, 1, 2, n, 2).requires_grad_() for n in (3, 4, 4)]
    mask = make_mask(kind, 1, 2, 3, 4, generator)[0]
    learned = kind == "bias"
    if learned:
        tensors.append(mask.requires_grad_())
    module = conditioned(form, *on)
    assert torch.autograd.gradcheck(
        lambda *t: module(*t[:3], t[3] if learned else mask), tensors, atol=1e-6
    )


def test_detached_lengths():
    on = (GAP, ac.Precondition(eps=0.3, detach=True))
    generator = torch.Generator().manual_seed(2)
    tensors = [normal(generator, 2, 2, 3, 2) for _ in range(3)]
    for form in (fused, matmul):
        compare(conditioned(form, *on), tensors, None, on, None, None)


# Dropout -----------------------------------------------------------------------------------------


def dropped(q, k, v, mask):
    return F.dropout(logits_of(q, k, mask).softmax(-1), 0.4, training=True) @ v


def dropped_in_place(q, k, v, mask):
    weights = logits_of(q, k, mask).softmax(-1)
    nn.Dropout(0.4, inplace=True)(weights)
    return weights @ v


def dropped_fused(q, k, v, mask):
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(q, k, v, attn_mask=mask, dropout_p=0.4)


@methods
@pytest.mark.parametrize("kind", ["none", "boolean", "bias", "blind"])
@pytest.mark.parametrize(
    "form", [dropped, dropped_in_place, dropped_fused], ids=lambda f: f.__name__
)
def test_dropout_acts_on_the_softmax_alone(form, kind, on):
    generator = torch.Generator().manual_seed(5)
    q, k, v = (normal(generator, 2, 2, n, 3) for n in (4, 5, 5))
    mask, visible, bias = make_mask(kind, 2, 2, 4, 5, generator)
    torch.manual_seed(11)
    # The same draw, seen through the identity: which weights were kept, and what they became.
    ones = F.dropout(torch.ones(2, 2, 4, 5, dtype=torch.float64), 0.4, training=True)
    if form is dropped_fused:
        torch.manual_seed(11)
        eye = torch.eye(5, dtype=torch.float64).expand(2, 2, 5, 5)
        zero = torch.zeros_like
        with sdpa_kernel(SDPBackend.MATH):
            ones = sdpa(zero(q), zero(k), eye, dropout_p=0.4) * 5
    assert ((ones == 0) | ((ones - 1 / 0.6).abs() < 1e-12)).all()
    assert 0 < (ones == 0).sum() < ones.numel()
    module = conditioned(form, *on)
    torch.manual_seed(11)
    close(module(q, k, v, mask), attention(q, k, v, on, visible, bias, kept=ones))


def test_fused_dropout_subtracts_the_mean_from_what_the_kernel_gave():
    q, k, v = torch.randn(3, 2, 2, 6, 4)
    for kwargs in ({}, {"is_causal": True}):

        def form(q, k, v, kwargs=kwargs):
            return sdpa(q, k, v, dropout_p=0.5, **kwargs)

        torch.manual_seed(3)
        stock = form(q, k, v)
        counts = torch.arange(1, 7)[:, None]
        mean = v.cumsum(-2) / counts if kwargs else v.mean(-2, keepdim=True)
        module = conditioned(form, GAP)
        torch.manual_seed(3)
        torch.testing.assert_close(module(q, k, v), stock - mean)


# What is not reached is refused ------------------------------------------------------------------


@methods
def test_attention_that_is_not_reached_raises(on):
    def by_exponentials(q, k, v):
        weights = (q @ k.mT).exp()
        return weights / weights.sum(-1, keepdim=True) @ v

    module = nn.ModuleDict({"inner": conditioned(by_exponentials, *on)})
    for method in on:
        ac.handle(module, type(method)).remove()
    for method in on:
        ac.condition(module, method)
    q, k, v = torch.randn(3, 1, 2, 4, 3)
    with pytest.raises(ac.ConditioningError, match=r"attention of inner was not reached.*0 of 1"):
        module["inner"](q, k, v)
    with pytest.raises(ac.ConditioningError, match="not reached"):  # not only the first time
        module["inner"](q, k, v)


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
def test_keys_that_are_split_among_processes_are_refused_by_name(mesh):
    whole = torch.randn(3, 1, 2, 4, 3)
    q, k, v = (distribute_tensor(t, mesh, [Shard(2)]) for t in whole)
    with pytest.raises(ac.ConditioningError, match="context parallelism"):
        conditioned(fused, *METHODS["both"])(q, k, v, None)
    by_heads = [distribute_tensor(t, mesh, [Shard(1)]) for t in whole]
    for tensors, on in (((q, k, v), "precondition"), (by_heads, "gap"), (by_heads, "both")):
        with sdpa_kernel(SDPBackend.MATH):
            found = conditioned(fused, *METHODS[on])(*tensors, None)
        wanted = conditioned(fused, *METHODS[on])(*whole, None)
        torch.testing.assert_close(found.full_tensor(), wanted)


@methods
@pytest.mark.parametrize("whole", [False, True], ids=["eager", "compiled"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_refused_by_name(whole, on):
    torch._dynamo.reset()
    module = conditioned(lambda q, k, v: flex_attention(q, k, v), *on)
    if whole:
        module = torch.compile(module, backend="aot_eager")
    with pytest.raises(ac.ConditioningError, match=r"not reached .*FlexAttention"):
        module(*torch.randn(3, 1, 2, 16, 16))


def test_nested_tensors_are_refused_by_name():
    nested = torch.nested.nested_tensor(
        [torch.randn(2, 3, 4), torch.randn(2, 5, 4)]
    ).requires_grad_()
    with pytest.raises(ac.ConditioningError, match="nested tensors"):
        conditioned(fused, GAP)(nested, nested, nested, None)


def test_a_matrix_is_used_twice():
    def form(q, k, v):
        weights = logits_of(q, k, None).softmax(-1)
        return weights @ v, weights @ k

    q, k, v = torch.randn(3, 2, 2, 4, 3, dtype=torch.float64)
    first, second = conditioned(form, GAP)(q, k, v)
    close(first, attention(q, k, v, (GAP,)))
    close(second, attention(q, k, k, (GAP,)))
    with pytest.raises(ac.UnsupportedAttentionError, match="several products"):
        conditioned(form, PRE)(q, k, v)


def test_an_einsum_that_does_not_name_its_channels_is_refused():
    def implicit(q, k, v):
        return torch.einsum("bhij,bhjd", logits_of(q, k, None).softmax(-1), v)

    def summed(q, k, v):
        return torch.einsum("bhij,bhjd->bhi", logits_of(q, k, None).softmax(-1), v)

    q, k, v = torch.randn(3, 1, 2, 4, 3, dtype=torch.float64)
    for form in (implicit, summed):
        with pytest.raises(ac.UnsupportedAttentionError, match="einsum 'bhij,bhjd"):
            conditioned(form, PRE)(q, k, v)
    wanted = attention(q, k, v, (GAP,)).sum((0, 1)).T  # letters that stand twice are summed over
    close(conditioned(implicit, GAP)(q, k, v), wanted.T.mT)
    close(conditioned(summed, GAP)(q, k, v), attention(q, k, v, (GAP,)).sum(-1))


@pytest.mark.parametrize(
    ("equation", "message"),
    [
        ("bhij,bhjd,hde->bie", "sums over heads"),
        ("bhij,bhjd->bid", "sums over heads"),
        ("bhij,bhjd,hde->bhie", "no single axis"),
    ],
)
def test_an_einsum_that_goes_on_from_the_heads_is_refused(equation, message):
    """Where heads or their channels are summed over, what could be equilibrated is gone."""
    q, k, v = torch.randn(3, 1, 2, 4, 3, dtype=torch.float64)
    others = [v, torch.randn(2, 3, 5, dtype=torch.float64)][: equation.count(",")]

    def form(q, k, v):
        return torch.einsum(equation, logits_of(q, k, None).softmax(-1), *others)

    with pytest.raises(ac.UnsupportedAttentionError, match=message):
        conditioned(form, PRE)(q, k, v)
    weights = logits_of(q, k, None).softmax(-1) - 1 / 4
    close(conditioned(form, GAP)(q, k, v), torch.einsum(equation, weights, *others))


@methods
def test_outputs_that_are_written_where_the_module_says(on):
    def form(q, k, v):
        output = torch.empty_like(v)
        torch.matmul(logits_of(q, k, None).softmax(-1), v, out=output)
        return output

    q, k, v = torch.randn(3, 1, 2, 4, 3, dtype=torch.float64)
    close(conditioned(form, *on)(q, k, v), attention(q, k, v, on))


def test_an_error_inside_leaves_no_mode_behind():
    def fails(q, k, v):
        sdpa(q, k, v)
        raise RuntimeError("inside")

    q, k, v = torch.randn(3, 1, 2, 4, 3)
    with pytest.raises(RuntimeError, match="inside"):
        conditioned(fails, GAP)(q, k, v)
    stock = torch.softmax(q @ k.mT / 3**0.5, -1) @ v
    torch.testing.assert_close(sdpa(q, k, v), stock)


@pytest.mark.parametrize("form", [fused, matmul], ids=lambda f: f.__name__)
@pytest.mark.parametrize("reentrant", [True, False])
def test_attention_that_its_own_module_checkpoints_is_refused(reentrant, form):
    """It would be computed again in the backward pass, where nothing is intercepted."""

    def again(q, k, v):
        return checkpoint(form, q, k, v, None, use_reentrant=reentrant)

    q, k, v = torch.randn(3, 1, 2, 4, 3, requires_grad=True)
    module = conditioned(again, GAP)
    with pytest.raises(ac.ConditioningError, match="checkpoints its attention itself"):
        module(q, k, v)
    with torch.no_grad():
        close(module(q, k, v), conditioned(form, GAP)(q, k, v, None))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_matrix_that_its_own_module_checkpoints_is_refused(reentrant):
    def weights(q, k):
        return logits_of(q, k, None).softmax(-1)

    def again(q, k, v):
        return checkpoint(weights, q, k, use_reentrant=reentrant) @ v

    q, k, v = torch.randn(3, 1, 2, 4, 3, requires_grad=True)
    with pytest.raises(ac.ConditioningError, match="checkpoints its attention itself"):
        conditioned(again, GAP)(q, k, v)


class LeanAttention(torch.autograd.Function):
    """Attention with a backward pass written by hand."""

    @staticmethod
    def forward(ctx, form, q, k, v):
        ctx.save_for_backward(q, k, v)
        return form(q, k, v, None)

    @staticmethod
    def backward(ctx, grad):
        q, k, _ = ctx.saved_tensors
        return None, grad, grad, logits_of(q, k, None).softmax(-1).mT @ grad


@methods
@pytest.mark.parametrize("form", [fused, matmul], ids=lambda f: f.__name__)
def test_attention_with_a_backward_pass_of_its_own_is_refused(form, on):
    def function(q, k, v):
        return LeanAttention.apply(form, q, k, v)

    q, k, v = torch.randn(3, 1, 2, 4, 3, requires_grad=True)
    module = conditioned(function, *on)
    with pytest.raises(ac.ConditioningError, match=r"in a torch\.autograd\.Function"):
        module(q, k, v)
    with torch.no_grad():
        close(module(q, k, v), conditioned(form, *on)(q, k, v, None))


# Compiled ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [fused, causal, matmul], ids=lambda f: f.__name__)
def test_compiled_for_all_lengths(form):
    on = METHODS["both"]
    module = compiled(conditioned(form, *on), dynamic=True, backend="eager")
    generator = torch.Generator().manual_seed(3)
    for batch, n, m in ((2, 3, 4), (3, 5, 7), (4, 6, 2)):
        tensors = [normal(generator, batch, 2, t, 4) for t in (n, m, m)]
        mask, visible, _ = make_mask("blind, inf", batch, 2, n, m, generator)
        if form is causal:
            visible = torch.ones(n, m, dtype=torch.bool).tril()
        alike(lambda *t, k=mask: module(*t, k), lambda *t, s=visible: attention(*t, on, s), tensors)


def test_compiled_grouped_heads_are_the_naive_ones():
    def every(q, k, v, mask):
        return grouped(q, k, v, None), grouped(q, k, v, mask), causal_grouped(q, k, v, None)

    generator = torch.Generator().manual_seed(3)
    tensors = [normal(generator, 2, h, 4, 3) for h in (4, 2, 2)]
    mask, visible, _ = make_mask("per-head", 2, 4, 4, 4, generator)
    lower = torch.ones(4, 4, dtype=torch.bool).tril()
    for on in METHODS.values():
        module = compiled(conditioned(every, *on))
        alike(
            lambda q, k, v, m=module: m(q, k, v, mask),
            lambda q, k, v, on=on: [
                attention(q, k, v, on, seen) for seen in (None, visible, lower)
            ],
            tensors,
        )


def test_compiled_dropout():
    generator = torch.Generator().manual_seed(3)
    tensors = [normal(generator, 2, 2, 4, 4) for _ in range(3)]
    module = conditioned(lambda q, k, v: (dropped(q, k, v, None), sdpa(q, k, v, None, 0.3)), GAP)
    torch.manual_seed(0)
    wanted = module(*tensors)
    torch.manual_seed(0)
    for f, w in zip(compiled(module, backend="eager")(*tensors), wanted, strict=True):
        close(f, w)


WEIGHT = torch.randn(6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def merged(output):
    return output.transpose(1, 2).reshape(output.shape[0], output.shape[2], -1)


TAILS = {
    "projected": lambda o: F.linear(merged(o), WEIGHT, WEIGHT[0]),
    "contiguous view": lambda o: F.linear(
        o.transpose(1, 2).contiguous().view(o.shape[0], -1, 6), WEIGHT
    ),
    "viewed as it is": lambda o: F.linear(o.transpose(1, 2).view(-1, 6), WEIGHT),
    "tokens in rows": lambda o: F.linear(merged(o).reshape(-1, 6), WEIGHT),
    "permuted": lambda o: F.linear(o.permute(2, 0, 1, 3).flatten(2), WEIGHT).transpose(0, 1),
    "matmul": lambda o: merged(o) @ WEIGHT,
    "returned": lambda o: o,
    "returned reshaped": lambda o: (merged(o), {"heads": o, "list": [o.transpose(1, 2)]}),
    "used twice": lambda o: (F.linear(merged(o), WEIGHT), F.linear(merged(o), WEIGHT.T), o),
    "layer norm": lambda o: F.linear(F.layer_norm(merged(o), (6,)), WEIGHT),
    "gate": lambda o: F.linear(torch.sigmoid(merged(o)) * merged(o), WEIGHT),
    "in place": lambda o: F.linear(merged(o).clone().mul_(2.0).add_(1.0), WEIGHT),
    "dropout": lambda o: F.linear(F.dropout(merged(o), 0.3, training=False), WEIGHT),
    "cast": lambda o: F.linear(merged(o).to(torch.float64).type_as(WEIGHT), WEIGHT),
    "split": lambda o: [F.linear(p, WEIGHT[:, :3]) for p in merged(o).chunk(2, -1)],
    "one token": lambda o: F.linear(merged(o)[:, 0], WEIGHT),
    "residual": lambda o: merged(o) + F.linear(merged(o), WEIGHT),
    "two together": lambda o: (o + o.mean(1, keepdim=True), torch.cat([o, o]), torch.stack([o, o])),
    "compared": lambda o: (o > 0, o.amax(-1)),
    "shape of another": lambda o: WEIGHT[0, 0].expand_as(o) + WEIGHT.to(o).sum() + o,
    "attended again": lambda o: torch.tanh(o) @ o.mT @ o,
}
PAIRS = {
    "added": lambda a, b: a + b,
    "joined": lambda a, b: torch.cat([a, b], -1),
    "projected and gated": lambda a, b: F.linear(merged(a), WEIGHT) * merged(b),
    "one and both": lambda a, b: (b, torch.stack([a, b]), a - 0.3 * b),
}


@pytest.mark.parametrize("on", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("place", ["logits", "softmax", "values", "sdpa"])
def test_a_graph_that_breaks_inside_is_changed_once(place, on):
    def attend(q, k, v, mask):
        q = q * 1
        if place == "sdpa":
            torch._dynamo.graph_break()
            return sdpa(q, k, v)
        if place == "logits":
            torch._dynamo.graph_break()
        logits = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        if place == "softmax":
            torch._dynamo.graph_break()
        matrix = logits.softmax(-1)
        if place == "values":
            torch._dynamo.graph_break()
        return matrix @ v

    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    tensors = [normal(generator, 2, 2, n, 3) for n in (4, 5, 5)]
    module = torch.compile(conditioned(attend, *on), backend="eager")
    compare(module, tensors, None, on, None, None)


@pytest.mark.parametrize("on", METHODS.values(), ids=METHODS)
def test_a_part_that_is_compiled_by_itself_is_changed_once(on):
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    tensors = [normal(generator, 2, 2, n, 3) for n in (4, 5, 5)]
    part = torch.compile(matmul, backend="eager")
    compare(conditioned(lambda *args: part(*args), *on), tensors, None, on, None, None)
    torch._dynamo.reset()
    whole = torch.compile(matmul, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="is compiled by itself with fullgraph=True"):
        conditioned(lambda *args: whole(*args), *on)(*tensors, None)


@pytest.mark.parametrize("mode", ["eager", "compiled"])
@pytest.mark.parametrize("on", [METHODS["gap"], METHODS["both"]], ids=["gap", "both"])
def test_whatever_follows_the_heads_gets_them_conditioned(on, mode):
    """However an output is used, it is the conditioned one, as kernels lay it out in memory."""

    def every(q, k, v):
        first = sdpa(q, k, v)
        second = sdpa(k, q, v)
        return [[t(first) for t in TAILS.values()], [p(first, second) for p in PAIRS.values()]]

    def wanted(q, k, v):
        first, second = attention(q, k, v, on), attention(k, q, v, on)
        first = first.transpose(1, 2).contiguous().transpose(1, 2)
        return [[t(first) for t in TAILS.values()], [p(first, second) for p in PAIRS.values()]]

    module = conditioned(every, *on)
    if mode != "eager":
        module = compiled(module)

    def laid_out(*tensors):
        return module(*[t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors])

    generator = torch.Generator().manual_seed(3)
    alike(laid_out, wanted, [normal(generator, 2, 2, 5, 3) for _ in range(3)])
