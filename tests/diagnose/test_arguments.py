"""Arguments of a forward, made shorter and exact."""

import pytest
import torch
from torch import nn

import attncond as ac
from attncond.calls import TorchCall
from attncond.diagnose.arguments import in_double, map_tensors, row_range, shortened


class DynamicCache:
    pass


def test_containers_stay_and_caches_go():
    given = {"a": (torch.ones(2), [torch.zeros(1)]), "cache": DynamicCache(), "flag": True, "n": 3}
    found = map_tensors(given, lambda t: t + 1)
    assert found["a"][0].tolist() == [2, 2]
    assert found["a"][1][0].tolist() == [1]
    assert (found["cache"], found["flag"], found["n"]) == (None, True, 3)
    assert isinstance(found["a"], tuple)
    assert given["a"][0].tolist() == [1, 1]


def shapes(*args, tokens=9, rows=(0, 4, 8), **kwargs):
    return [
        ([tuple(t.shape) for t in (*a, *k.values())], sampled)
        for a, k, sampled in shortened(args, kwargs, tokens, list(rows))
    ]


def test_the_smallest_comes_first():
    x, mask, table = torch.randn(6, 9, 4), torch.zeros(6, 1, 9, 9), torch.randn(1, 9, 2)
    assert shapes(x, mask=mask, table=table) == [
        ([(1, 3, 4), (1, 1, 3, 3), (1, 3, 2)], True),
        ([(1, 9, 4), (1, 1, 9, 9), (1, 9, 2)], False),
        ([(6, 3, 4), (6, 1, 3, 3), (1, 3, 2)], True),
        ([(6, 9, 4), (6, 1, 9, 9), (1, 9, 2)], False),
    ]


def test_windows_of_one_image_stay_together():
    x, mask = torch.randn(8, 9, 4), torch.zeros(4, 9, 9)  # two images of four windows
    counts = [found[0][0] for found, sampled in shapes(x, mask) if not sampled]
    assert counts == [1, 4, 8]


def test_all_tokens_are_not_sampled():
    assert [s for _, s in shapes(torch.randn(1, 3, 4), tokens=3, rows=(0, 1, 2))] == [False]


def test_the_rows_are_the_ones_asked_for_and_the_batch_is_let_go():
    x = torch.randn(64, 9, 4)
    (short,), _, _ = next(shortened((x,), {}, 9, [0, 4, 8]))
    assert torch.equal(short[0], x[0, [0, 4, 8]])
    (whole,), _, _ = list(shortened((x,), {}, 9, [0, 4, 8]))[1]
    assert torch.equal(whole, x[:1])
    assert whole.untyped_storage().nbytes() == whole.nbytes


@pytest.mark.parametrize(
    "call",
    [
        (torch.Tensor.float, (), {}),
        (torch.Tensor.half, (), {}),
        (torch.Tensor.to, (torch.float32,), {}),
        (torch.Tensor.to, (), {"dtype": torch.bfloat16}),
        (torch.softmax, (-1,), {"dtype": torch.float32}),
    ],
)
def test_nothing_is_rounded(call):
    x = torch.rand(3, dtype=torch.float64)
    func, args, kwargs = call
    assert in_double(TorchCall.of(func, (x, *args), kwargs)).run().dtype == torch.float64


def test_other_types_are_left_alone():
    call = TorchCall.of(torch.Tensor.to, (torch.ones(2), torch.int64), {})
    assert in_double(call).run().dtype == torch.int64


def test_rows_of_views():
    p = ac.fused(nn.Linear(8, 24), heads=2).projection("k")
    w = p.raw.detach()
    assert row_range(w, p) == range(24)
    assert row_range(w.chunk(3)[1], p) == row_range(w[8:16], p) == range(8, 16)
    assert row_range(w.mT, p) == range(24)
    assert row_range(w[:, 2:4], p) is None
    assert row_range(w[::2], p) is None
    conv = ac.fused(nn.Conv2d(8, 24, 1), heads=2).projection("k")
    assert row_range(conv.raw.detach(), conv) == range(24)


def test_rows_of_transposed_weights():
    from transformers.pytorch_utils import Conv1D

    p = ac.fused(Conv1D(24, 8), heads=2).projection("v")
    w = p.raw.detach()
    assert row_range(w, p) == range(24)
    assert row_range(w[:, 16:], p) == range(16, 24)
    assert row_range(w[2:], p) is None
