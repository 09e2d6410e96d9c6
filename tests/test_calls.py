"""Calls of torch functions: their names, what they get, and what exchanging a tensor does."""

from typing import NamedTuple

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from attncond.calls import RESHAPES, TURNS, FusedAttention, TorchCall, find, tensors
from attncond.errors import UnsupportedAttentionError

A, B, C = torch.arange(18.0).view(3, 2, 3).unbind()
SQUARE = torch.eye(3)


class Recorder(TorchFunctionMode):
    """Keeps all calls, and runs them as they are."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls.append(TorchCall.of(func, args, kwargs or {}))
        return self.calls[-1].run()


class Entry(NamedTuple):
    tensor: Tensor
    number: int


def seen(function, *args):
    """The one call that ``function`` makes."""
    with Recorder() as recorder:
        function(*args)
    (call,) = recorder.calls
    return call


def same(found, wanted):
    """Whether these are the same tensors, not equal ones."""
    return [id(t) for t in found] == [id(t) for t in wanted]


# Which call it is, and what it gets --------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda a: a.softmax(-1), "softmax"),
        (lambda a: a @ SQUARE, "matmul"),
        (lambda a: torch.matmul(a, SQUARE), "matmul"),
        (lambda a: a.mT, "mT"),
        (lambda a: a.T, "T"),
        (lambda a: a.shape, "shape"),
        (lambda a: a[0], "__getitem__"),
    ],
)
def test_names(function, name):
    assert seen(function, A).name == name


def test_an_attribute_that_turns_a_tensor_is_a_reshape_and_runs_again():
    call = seen(lambda: A.mT)
    assert call.name in TURNS < RESHAPES
    assert torch.equal(call.run(), A.mT)
    assert torch.equal(call.exchanged(A, B).run(), B.mT)


def test_the_method_unflatten_becomes_the_function():
    call = seen(lambda: A.unflatten(1, (3, 1)))
    assert call.func is torch.unflatten
    assert call.name == "unflatten"
    assert call.run().shape == (2, 3, 1)


def test_callables_without_a_name_have_none():
    class Nameless:
        def __call__(self, a):
            return a + 1

    call = TorchCall.of(Nameless(), (A,), {})
    assert call.name == ""
    assert torch.equal(call.run(), A + 1)


def test_operands_come_in_order_also_out_of_lists_and_by_name():
    call = TorchCall.of(torch.cat, ([A, B], 0), {"out": C, "dim": 1})
    assert same(call.operands(), [A, B, C])
    assert TorchCall.of(torch.ones, (2, 3), {}).operands() == []


@pytest.mark.parametrize(
    ("function", "written"),
    [
        (lambda a: a.masked_fill_(a > 1, 0.0), True),
        (lambda a: a.__iadd__(1), True),
        (lambda a: a.__setitem__(0, 1.0), True),
        (lambda a: a + 1, False),
        (lambda a: a.add(1), False),
    ],
)
def test_the_tensor_that_is_written_into(function, written):
    mine = A.clone()
    with Recorder() as recorder:
        function(mine)
    assert (recorder.calls[-1].target is mine) == written


def test_tensors_of_a_result():
    assert same(tensors(A), [A])
    assert same(tensors((A, None, B)), [A, B])
    assert same(tensors([A, 3]), [A])
    assert tensors({"a": A}) == []
    assert tensors(None) == []


@pytest.mark.parametrize("function", [lambda: A.softmax(1), lambda: F.softmax(A, dim=1)])
def test_the_axis_of_a_softmax(function):
    with Recorder() as recorder:
        function()
    assert recorder.calls[-1].name == "softmax"
    assert recorder.calls[-1].dim == 1


def test_the_latest_entry_of_a_tensor_is_found():
    entries = [Entry(A, 1), Entry(B, 2), Entry(A, 3)]
    assert find(entries, [A]).number == 3
    assert find(entries, [C, B]).number == 2
    assert find(entries, [A.clone()]) is None
    assert find(entries, []) is None


# One tensor exchanged ----------------------------------------------------------------------------


def test_exchanging_goes_by_identity_and_into_lists():
    twin = A.clone()
    call = TorchCall.of(torch.stack, ([A, twin, A],), {"out": None, "dim": 0})
    new = call.exchanged(A, B)
    assert type(new.args[0]) is list
    assert same(new.args[0], [B, twin, B])
    assert new.kwargs == {"out": None, "dim": 0}
    assert same(call.args[0], [A, twin, A])  # which is as it was
    assert new.name == "stack"


def test_exchanging_by_name():
    call = TorchCall.of(torch.add, (C,), {"other": A, "alpha": 2})
    assert torch.equal(call.exchanged(A, B).run(), C + 2 * B)


@pytest.mark.parametrize(
    "function",
    [
        lambda t: t.transpose(0, 1),
        lambda t: t.reshape(3, 2),
        lambda t: t.view(6),
        lambda t: t.view_as(torch.empty(1, 6)),
        lambda t: t[:, 1:],
        lambda t: t.contiguous(),
    ],
)
def test_what_a_reshape_makes_of_a_tensor_that_is_expanded(function):
    with Recorder() as recorder:
        result = function(A)
    call = recorder.calls[-1]
    assert call.name in RESHAPES
    expanded = torch.arange(3.0).expand(2, 3)
    got = call.reshaped(A, expanded, result)
    assert torch.equal(got, function(expanded.contiguous()))
    if call.name == "contiguous":
        assert got is expanded  # not written out


def test_a_view_as_another_type_is_no_reshape():
    call = seen(lambda: A.view(torch.int32))
    assert torch.equal(call.reshaped(A, B, call.run()), B.view(torch.int32))


# The axis of the channels ------------------------------------------------------------------------

P, V, HEADS = torch.rand(2, 4, 5, 5), torch.rand(2, 4, 5, 3), torch.rand(4, 4)


@pytest.mark.parametrize(
    ("call", "axis"),
    [
        (TorchCall.of(torch.matmul, (P, V), {}), -1),
        (TorchCall.of(torch.matmul, (V.mT, P), {}), -2),
        (TorchCall.of(torch.baddbmm, (V[0], P, V), {}), -1),
        (TorchCall.of(torch.baddbmm, (V[0], V, P), {"beta": 0}), -2),
        (TorchCall.of(torch.einsum, ("bhqk,bhkd->bhqd", P, V), {}), -1),
        (TorchCall.of(torch.einsum, ("b h k d, b h q k -> b q d h", V, P), {}), -2),
        (TorchCall.of(torch.einsum, ("bhqk,bhkd->bdhq", [P, V]), {}), -3),
        (TorchCall.of(torch.einsum, ("...qk,...kd->...qd", P, V), {}), -1),
    ],
)
def test_channel_axis(call, axis):
    assert call.channel_axis(P) == axis


@pytest.mark.parametrize(
    ("call", "axes"),
    [
        (TorchCall.of(torch.matmul, (P, V), {}), [-1]),
        (TorchCall.of(torch.matmul, (P, V), {"out": torch.empty(2, 4, 5, 3)}), [-1]),
        (TorchCall.of(torch.matmul, (V.mT, P), {}), [-2]),
        (TorchCall.of(torch.einsum, ("bhqk,bhkd->bhqd", P, V), {}), [-1]),
        (TorchCall.of(torch.einsum, ("bhqk,bkhd->bqd", P, V), {}), [-3, -1]),
        (TorchCall.of(torch.einsum, ("...hqk, hg -> ...gqk", P, V), {}), [-3]),
        (TorchCall.of(torch.einsum, ("bhqk,hg", P, V), {}), [-3]),
    ],
)
def test_axes_that_a_product_sums_over(call, axes):
    assert call.summed(P) == axes


@pytest.mark.parametrize(
    ("follow", "axis"),
    [
        (lambda t: t.mT, -2),
        (lambda t: t.permute(0, 2, 3, 1), -2),
        (lambda t: torch.movedim(t, -1, 0), -4),
        (lambda t: t.flatten(2), -1),
        (lambda t: t.reshape(8, 5, 5), -1),
        (lambda t: t.unflatten(-1, (1, 5)), -1),
        (lambda t: t.view(2, 4, 5, 5, 1), None),
        (lambda t: t.unsqueeze(-1), None),
        (lambda t: t[:, 1], -1),
        (lambda t: t[..., 0].sum(), None),
        (lambda t: t[..., 1:], None),
        (lambda t: t * 2, -1),
        (lambda t: torch.cat([t, t]), -1),
        (lambda t: torch.stack([t] * 5, -1), None),
        (lambda t: torch.einsum("bhqk,hg->bkgq", t, HEADS), -3),
        (lambda t: torch.einsum("bhqk,hg", t, HEADS), -2),
        (lambda t: torch.einsum("...q,qr->...r", t.mT, P[0, 0]), None),
        (lambda t: P[0, 0] @ t, -1),
    ],
)
def test_where_an_axis_goes(follow, axis):
    with Recorder() as recorder:
        follow(P)
    followed, old = -1, P
    for call in recorder.calls:
        result = call.run()
        followed, old = call.followed(followed, old, result), result
    assert followed == axis


def test_an_axis_of_nothing_is_lost():
    call = TorchCall.of(torch.transpose, (P[:0], 0, 1), {})
    assert call.followed(-1, call.args[0], call.run()) is None


def test_axes_of_an_einsum():
    call = TorchCall.of(torch.einsum, ("bhkd, bhqk -> bqhd", V, P), {})
    assert call.einsum_axes(P) == ("bhqk", "bqhd")
    assert call.einsum_axes(V) == ("bhkd", "bqhd")


@pytest.mark.parametrize(
    ("equation", "message"),
    [
        ("bhqk,bhkd", "after an arrow"),
        ("bhqk,bhkd->bhq", "no single axis"),
        ("bhqk,bhde->bhqde", "no single axis"),
    ],
)
def test_einsums_without_one_axis_of_channels_are_refused(equation, message):
    call = TorchCall.of(torch.einsum, (equation, P, V), {})
    with pytest.raises(UnsupportedAttentionError, match=message) as error:
        call.channel_axis(P)
    assert equation in str(error.value)


# scaled_dot_product_attention --------------------------------------------------------------------

Q, K, W = (torch.randn(1, 4, 5, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
MASK = torch.ones(5, 5, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((Q, K, W), {}),
        ((Q, K, W, MASK), {}),
        ((Q, K, W, None, 0.0, True), {"scale": 0.3}),
        ((Q,), {"value": W, "key": K, "attn_mask": MASK, "scale": 2}),
        ((Q, K[:, :2], W[:, :2]), {"is_causal": True, "enable_gqa": True}),
    ],
)
def test_fused_attention_is_parsed_and_run_as_torch_does(args, kwargs):
    attention = FusedAttention(F.scaled_dot_product_attention, *args, **kwargs)
    assert torch.equal(attention.run(), F.scaled_dot_product_attention(*args, **kwargs))
    assert attention.query is Q
    assert attention.factor == kwargs.get("scale", 8**-0.5)


def test_fused_attention_drops_weights_as_torch_does():
    attention = FusedAttention(F.scaled_dot_product_attention, Q, K, W, dropout_p=0.5)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        got = attention.run()
        torch.manual_seed(0)
        assert torch.equal(got, F.scaled_dot_product_attention(Q, K, W, dropout_p=0.5))
    assert not torch.equal(got, attention._replace(dropout_p=0.0).run())


def test_fused_attention_with_other_values():
    attention = FusedAttention(F.scaled_dot_product_attention, Q, K, W, is_causal=True)
    other = attention._replace(value=2 * W)
    assert torch.allclose(other.run(), 2 * attention.run())
    assert same(attention.operands, [Q, K, W])


def test_arguments_that_torch_does_not_know_are_refused():
    with pytest.raises(TypeError):
        FusedAttention(F.scaled_dot_product_attention, Q, K, W, window=3)


# Traced ------------------------------------------------------------------------------------------


class Changing(TorchFunctionMode):
    """Uses everything that a compiled forward uses."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        call = TorchCall.of(func, args, kwargs or {})
        if call.name == "scaled_dot_product_attention":
            attention = FusedAttention(call.func, *call.args, **call.kwargs)
            return attention._replace(value=attention.value * attention.factor).run()
        if call.name == "softmax":
            first = call.operands()[0]
            return call.exchanged(first, first + 1).run().sum(call.dim, keepdim=True)
        if call.name == "view":
            return call.reshaped(call.args[0], call.args[0] * 3, call.run())
        if call.name == "einsum":
            return call.run().sum(call.channel_axis(call.args[1]))
        return call.run()


def changed(q, k, v):
    with Changing():
        heads = F.scaled_dot_product_attention(q, k, v, None, is_causal=True)
        weights = torch.softmax(heads, dim=-1).view(-1)
        return weights.sum() + torch.einsum("bhqd,bhkd->bhqk", q, k)


def test_calls_are_traced_in_one_graph():
    torch._dynamo.reset()
    compiled = torch.compile(changed, fullgraph=True, backend="eager")
    assert torch.allclose(compiled(Q, K, W), changed(Q, K, W))
