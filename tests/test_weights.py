"""The numbers of corrections against loops over explicit slices, whatever the layout."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from spectra import drift_bound
from torch import Tensor, nn

import attncond as ac
from attncond import weights
from attncond.corrections import Correction, effective
from attncond.diagonal import decode
from attncond.effective import install
from attncond.sites import Site, fused, project, separate
from attncond.weights import Weight, certify, refresh, solve, take

RANGE, SCATTERED = torch.arange(2, 6), torch.tensor([6, 0, 3])
REVERSED, ONE, HOLE = torch.tensor([4, 3, 2]), torch.tensor([5]), torch.tensor([1, 2, 4])
# The ends are as far apart as in a range, but it is none.
SHUFFLED = torch.tensor([1, 3, 2, 4])
INDEXES = [RANGE, SCATTERED, REVERSED, ONE, HOLE, SHUFFLED]


@pytest.mark.parametrize("index", INDEXES, ids=str)
def test_rows_are_taken(index: Tensor) -> None:
    matrix = torch.randn(8, 3)
    expected = torch.stack([matrix[i] for i in index.tolist()])
    assert torch.equal(take(matrix, index), expected)


def test_consecutive_rows_are_a_view_and_others_are_not() -> None:
    matrix = torch.randn(8, 3)
    for index, shared in ((RANGE, True), (ONE, True), (SCATTERED, False), (SHUFFLED, False)):
        part = take(matrix, index)
        same = part.untyped_storage().data_ptr() == matrix.untyped_storage().data_ptr()
        assert same is shared


@pytest.mark.parametrize("index", INDEXES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_are_put_and_the_others_stay(index: Tensor, dtype: torch.dtype) -> None:
    matrix, values = torch.zeros(8, 3), torch.randn(len(index), 3, dtype=dtype)
    weights._put(matrix, index, values)
    expected = torch.zeros(8, 3)
    for row, i in enumerate(index.tolist()):
        expected[i] = values[row].float()
    assert torch.equal(matrix, expected)


@pytest.mark.parametrize("index", INDEXES, ids=str)
def test_one_number_is_put_into_all_rows(index: Tensor) -> None:
    vector = torch.zeros(8)
    weights._put(vector, index, torch.tensor(2.5))
    assert vector.nonzero().flatten().tolist() == sorted(index.tolist())
    assert vector.sum() == 2.5 * len(index)


# Layouts: a site, and its matrices as slices written out by hand ----------------------------------


def weights_of(site: Site, method: ac.Spectral, path: str = "") -> list[Weight]:
    """What condition() makes of a site, without a model around it."""
    owners: dict[tuple[int, str], list[ac.Projection]] = {}
    for p in site.projections:
        owners.setdefault((id(p.owner), p.name), []).append(p)
    return [
        Weight(
            path,
            parts[0].owner,
            parts[0].name,
            Correction(
                method,
                parts[0].axis,
                tuple(p.role for p in parts),
                tuple(p.rows for p in parts),
            ),
        )
        for parts in owners.values()
    ]


class Conv1D(nn.Module):
    """GPT-2's: a linear layer that stores (in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 24))


def head_major() -> tuple[Site, list[list[slice]]]:
    rows = [[slice(12 * h + 4 * r, 12 * h + 4 * r + 4) for h in range(3)] for r in range(3)]
    return fused(nn.Linear(10, 36), heads=3, head_major=True), rows


def grouped() -> tuple[Site, list[list[slice]]]:
    rows = [
        [slice(5 * h, 5 * h + 5) for h in range(6)],
        [slice(30, 35), slice(35, 40)],
        [slice(40, 45), slice(45, 50)],
    ]
    return fused(nn.Linear(12, 50), heads=6, kv_heads=2), rows


def transposed() -> tuple[Site, list[list[slice]]]:
    rows = [[slice(8 * r + 4 * h, 8 * r + 4 * h + 4) for h in range(2)] for r in range(3)]
    return fused(Conv1D(), heads=2), rows


def convolution() -> tuple[Site, list[list[slice]]]:
    rows = [[slice(6 * r + 3 * h, 6 * r + 3 * h + 3) for h in range(2)] for r in range(3)]
    return fused(nn.Conv2d(7, 18, 1), heads=2), rows


def scattered() -> tuple[Site, list[list[slice]]]:
    """Channels of two heads interleaved, and rows that belong to no role."""
    linear, index = nn.Linear(9, 30), torch.arange(24)
    parts = [index[8 * r : 8 * r + 8].view(4, 2).T for r in range(3)]
    rows = [[slice(8 * r + h, 8 * r + 8, 2) for h in range(2)] for r in range(3)]
    projections = tuple(project(r, linear, p) for r, p in zip("qkv", parts, strict=True))
    return Site(projections, "interleaved"), rows


LAYOUTS: list[Callable[[], tuple[Site, list[list[slice]]]]] = [
    head_major,
    grouped,
    transposed,
    convolution,
    scattered,
]
METHODS = {
    "identity": ac.Spectral(),
    "identity-head": ac.Spectral(kappa=1.5, scope="head"),
    "literal": ac.Spectral(lam=0.5, preserve_norm=False),
    "gain": ac.Spectral(gain=2.5),
    "polar": ac.Spectral(correction="polar"),
    "polar-gain": ac.Spectral(correction="polar", gain=0.4),
    "polar-head": ac.Spectral(correction="polar", scope="head", preserve_norm=False),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
methods = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def by_hand(matrix: Tensor, method: ac.Spectral) -> Tensor:
    """s·(W + C) of one matrix, from a float64 SVD."""
    left, sigma, right = torch.linalg.svd(matrix, full_matrices=False)
    if method.correction == "polar":
        changed = matrix + sigma[0] * left @ right
    else:
        target = method.kappa or 2.0
        lam = method.lam or float(sigma[0]) * (target + 1) / (target - 1)
        changed = matrix + lam * torch.eye(*matrix.shape, dtype=matrix.dtype)
    if method.preserve_norm:
        changed = changed * (sigma[0] / torch.linalg.svdvals(changed)[0])
    return method.gain * changed


def as_matrix(raw: Tensor, weight: Weight) -> Tensor:
    return (raw.T if weight.correction.axis == 1 else raw.flatten(1)).detach().clone()


def expected(weight: Weight, rows: list[list[slice]], method: ac.Spectral) -> Tensor:
    result = as_matrix(weight.raw, weight)
    for heads in rows:
        for part in [heads] if method.scope == "projection" else [[h] for h in heads]:
            block = torch.cat([as_matrix(weight.raw, weight)[h] for h in part])
            # Interleaved heads: the projection's rows are those of head 0, then those of head 1.
            new = by_hand(block, method).split([len(result[h]) for h in part])
            for h, values in zip(part, new, strict=True):
                result[h] = values
    return result


@layouts
@methods
def test_solve_against_loops_over_slices(
    layout: Callable[[], tuple[Site, list[list[slice]]]], method: ac.Spectral
) -> None:
    site, rows = layout()
    site.projections[0].owner.double()
    (weight,) = weights_of(site, method)
    wanted = expected(weight, rows, method)
    (buffers,) = solve([weight])
    install(weight.owner, weight.name, weight.correction, buffers)
    found = as_matrix(effective(weight.owner, weight.name), weight)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_rows_of_no_role_are_left_alone() -> None:
    site, _ = scattered()
    (weight,) = weights_of(site, ac.Spectral())
    (buffers,) = solve([weight])
    assert buffers["scale"][24:].tolist() == [1.0] * 6
    assert buffers["shift"][24:].tolist() == [0.0] * 6
    assert decode(buffers["diagonal"])[24:].tolist() == [-1] * 6


def test_the_diagonal_of_a_tall_matrix_ends_where_its_columns_do() -> None:
    (weight,) = weights_of(fused(nn.Linear(3, 10), "qk", heads=1), ac.Spectral())
    (buffers,) = solve([weight])
    assert decode(buffers["diagonal"]).tolist() == [0, 1, 2, -1, -1] * 2


@methods
@pytest.mark.parametrize("chunk", [1, 100, 350])
def test_pieces_of_a_batch_give_the_same_numbers(
    method: ac.Spectral, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [w for layout in LAYOUTS for w in weights_of(layout()[0], method)]
    whole = solve(found)
    sizes = [len(b) for b in weights._batches(found)]
    monkeypatch.setattr(weights, "_CHUNK", chunk)
    pieces = [len(b) for b in weights._batches(found)]
    assert sum(pieces) == sum(sizes)
    assert len(pieces) > len(sizes)
    assert max(pieces) <= max(1, chunk // 12)
    for a, b in zip(solve(found), whole, strict=True):
        assert a.keys() == b.keys()
        for part in a:
            torch.testing.assert_close(a[part], b[part], rtol=1e-5, atol=1e-5)


def test_batches_hold_one_shape_and_dtype_each() -> None:
    found = [w for layout in LAYOUTS for w in weights_of(layout()[0], ac.Spectral())]
    found += weights_of(fused(nn.Linear(12, 50).double(), heads=6, kv_heads=2), ac.Spectral())
    kinds = [{(i.matrix.shape, i.matrix.dtype) for i in b} for b in weights._batches(found)]
    assert all(len(k) == 1 for k in kinds)
    assert len(kinds) == len(set().union(*kinds))


def test_weights_whose_smallest_matrices_differ_are_tracked_side_by_side() -> None:
    """Both have a (16, 12) query, but one keeps fewer vectors of it: its keys have three rows."""
    method = ac.Spectral(correction="polar")
    wide = separate(nn.Linear(12, 16), None, None, heads=1)
    linear, rows = nn.Linear(12, 19), torch.arange(19)[None]
    narrow = Site((project("q", linear, rows[:, :16]), project("k", linear, rows[:, 16:])), "own")
    pair = weights_of(wide, method) + weights_of(narrow, method)
    for weight, buffers in zip(pair, solve(pair), strict=True):
        install(weight.owner, weight.name, weight.correction, buffers)
    assert [w.buffer("block").shape[-1] for w in pair] == [8, 3]
    with torch.no_grad():
        for weight in pair:
            weight.raw.add_(0.02 * torch.randn_like(weight.raw))
    refresh(pair, "track")
    assert max(row.kappa for w in pair for row in certify(w, True)) <= 2.02


def test_low_precision_weights_have_float32_numbers() -> None:
    for method in METHODS.values():
        (weight,) = weights_of(fused(nn.Linear(8, 24).bfloat16(), heads=2), method)
        (buffers,) = solve([weight])
        assert {b.dtype for b in buffers.values() if b.is_floating_point()} == {torch.float32}


@methods
def test_weights_on_the_meta_device_get_blank_numbers(method: ac.Spectral) -> None:
    (weight,) = weights_of(fused(nn.Linear(8, 24, device="meta"), heads=2), method)
    (real,) = weights_of(fused(nn.Linear(8, 24), heads=2), method)
    (blank,), (solved,) = solve([weight]), solve([real])
    assert {k: (b.shape, b.dtype) for k, b in blank.items()} == {
        k: (b.shape, b.dtype) for k, b in solved.items()
    }
    assert all(b.is_meta for b in blank.values())


@methods
def test_the_default_device_does_not_matter(method: ac.Spectral) -> None:
    site, _ = grouped()
    (weight,) = weights_of(site, method)
    (wanted,) = solve([weight])
    with torch.device("meta"):
        (found,) = solve([weight])
        for part in wanted:
            assert found[part].device.type == "cpu"
            assert torch.equal(found[part], wanted[part])
        install(weight.owner, weight.name, weight.correction, found)
        assert not effective(weight.owner, weight.name).is_meta
        assert all(math.isfinite(row.kappa) for row in certify(weight, True))
        if method.correction == "polar":
            refresh([weight], "scratch")
            assert all(row.kappa <= 2.002 for row in certify(weight, True))


# Certificates -------------------------------------------------------------------------------------


def conditioned(site: Site, method: ac.Spectral, path: str = "") -> Weight:
    (weight,) = weights_of(site, method, path)
    (buffers,) = solve([weight])
    install(weight.owner, weight.name, weight.correction, buffers)
    return weight


@pytest.mark.parametrize("correction", ["identity", "polar"])
@pytest.mark.parametrize(
    ("order", "heads", "kv_heads"),
    # Where the number of query heads is no multiple of the others', a head's number is not its
    # place among all matrices modulo anything.
    [("qkv", 6, 2), ("qkv", 3, 2), ("kqv", 4, 3), ("vq", 2, 5), ("qkv", 4, 1)],
)
def test_heads_are_numbered_within_their_role(
    correction: str, order: str, heads: int, kv_heads: int
) -> None:
    count = {"q": heads, "k": kv_heads, "v": kv_heads}
    linear = nn.Linear(10, 4 * sum(count[r] for r in order)).double()
    site = fused(linear, order, heads=heads, kv_heads=kv_heads)
    method = ac.Spectral(scope="head", correction=correction)
    raw = linear.weight.detach().clone()
    weight = conditioned(site, method)
    rows = list(certify(weight, True))
    result = effective(linear, "weight").detach()
    assert sorted((r.role, r.head) for r in rows) == sorted(
        (r, h) for r in order for h in range(count[r])
    )
    start = {r: 4 * sum(count[x] for x in order[: order.index(r)]) for r in order}
    for row in rows:
        first = start[row.role] + 4 * row.head
        sigma = torch.linalg.svdvals(raw[first : first + 4])
        after = torch.linalg.svdvals(result[first : first + 4])
        assert row.norm == pytest.approx(float(sigma[0]), rel=1e-10)
        assert row.kappa == pytest.approx(float(after[0] / after[-1]), rel=1e-10)


def test_two_sites_in_one_weight_number_their_heads_apart() -> None:
    linear = nn.Linear(10, 20).double()
    first, second = fused(linear, "q", heads=2, head_dim=4), fused(linear, "q", heads=3, start=8)
    both = Site((*first.projections, *second.projections), "two")
    rows = list(certify(conditioned(both, ac.Spectral(scope="head")), False))
    assert [r.head for r in rows] == [0, 1, 0, 1, 2]


def test_whole_projections_have_no_head() -> None:
    weight = conditioned(grouped()[0], ac.Spectral(), path="layer.attn")
    rows = list(certify(weight, False))
    assert [(r.parameter, r.role, r.head, r.kappa) for r in rows] == [
        ("layer.attn.weight", role, None, None) for role in "qkv"
    ]
    assert all(r.bound <= 2 for r in rows)


def test_the_bound_of_a_shift_ends_with_the_growth_of_the_weights() -> None:
    weight = conditioned(grouped()[0], ac.Spectral())
    with torch.no_grad():
        weight.raw.mul_(2)
    assert [r.bound for r in certify(weight, True)] == pytest.approx([5.0] * 3, rel=1e-5)
    assert all(r.kappa <= 5 for r in certify(weight, True))
    with torch.no_grad():
        weight.raw.mul_(2)
    assert [r.bound for r in certify(weight, False)] == [math.inf] * 3


@layouts
@pytest.mark.parametrize("scope", ["projection", "head"])
def test_polar_certificates_hold_on_stale_factors(
    layout: Callable[[], tuple[Site, list[list[slice]]]], scope: str
) -> None:
    site, _ = layout()
    site.projections[0].owner.double()
    weight = conditioned(site, ac.Spectral(correction="polar", scope=scope))
    start = weight.raw.detach().clone()
    before = list(certify(weight, True))
    assert all(r.bound <= 2 * (1 + 1e-9) for r in before)
    direction = torch.randn_like(start)
    seen_finite = seen_infinite = False
    for step in (0.01, 0.05, 0.2, 0.5, 2.0, 20.0):
        with torch.no_grad():
            weight.raw.copy_(start + step * direction)
        moved = as_matrix(step * direction, weight)
        for row, old, (_, index) in zip(
            certify(weight, True), before, weight.correction.matrices(), strict=True
        ):
            drift = float(torch.linalg.svdvals(moved[index])[0])
            assert row.kappa <= row.bound * (1 + 1e-9)
            assert row.bound <= drift_bound(old.norm, drift) * (1 + 1e-5)
            seen_finite |= 2.1 < row.bound < math.inf
            seen_infinite |= row.bound == math.inf
    assert seen_finite
    assert seen_infinite


@pytest.mark.parametrize("how", ["track", "anchor", "scratch"])
def test_refresh_renews_the_certificates(how: str) -> None:
    # Square projections have small singular values, which leave the bound no slack.
    weight = conditioned(fused(nn.Linear(16, 48), heads=2), ac.Spectral(correction="polar"))
    with torch.no_grad():
        weight.raw.add_(0.02 * torch.randn_like(weight.raw))
    stale = max(r.bound for r in certify(weight, False))
    refresh([weight], how)
    assert max(r.bound for r in certify(weight, False)) <= 2.02 < stale
