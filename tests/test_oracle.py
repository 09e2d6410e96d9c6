"""The oracle has to catch every way in which an adapter can be wrong, in every style."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from oracle import OracleError, check, prepare
from torch import Tensor, nn
from torch.nn import functional as F

from attncond.inspection import inspect
from attncond.sites import Site, fused, separate

HEADS, DIM, TOKENS = 3, 4, 5
WIDTH = HEADS * DIM


class Fused(nn.Module):
    """Attention over one qkv weight, in several styles that libraries use."""

    def __init__(self, style: str, head_major: bool = False) -> None:
        super().__init__()
        self.style, self.head_major = style, head_major
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.talk = nn.Linear(HEADS, HEADS)
        self.norm = nn.LayerNorm(DIM)
        with torch.no_grad():  # initial biases are zero in some layers of libraries, not here
            self.qkv.bias.normal_()

    def roles(self, x: Tensor) -> tuple[Tensor, ...]:
        b, n, _ = x.shape
        if self.head_major:
            return self.qkv(x).view(b, n, HEADS, 3 * DIM).transpose(1, 2).chunk(3, dim=-1)
        return self.qkv(x).view(b, n, 3, HEADS, DIM).permute(2, 0, 3, 1, 4).unbind(0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.roles(x)
        b, h, n, d = q.shape
        if self.style == "sdpa":
            return F.scaled_dot_product_attention(q, k, v)
        if self.style == "eager":
            return ((q * d**-0.5) @ k.transpose(-2, -1)).softmax(-1) @ v
        if self.style == "normed":
            q, k = self.norm(q), self.norm(k)
            return ((q * d**-0.5) @ k.mT).softmax(-1) @ v
        if self.style == "keys first":  # the logits stand transposed until after the softmax
            return (k @ q.mT).softmax(-2).transpose(2, 3) @ v
        if self.style == "talking":
            a = (q @ k.mT).permute(0, 2, 3, 1)
            return self.talk(self.talk(a).softmax(-2)).permute(0, 3, 1, 2) @ v
        if self.style == "bmm":
            q, k, v = (t.reshape(b * h, n, d) for t in (q, k, v))
            a = torch.baddbmm(torch.zeros(1, n, n, dtype=q.dtype), q, k.transpose(1, 2))
            return torch.bmm(a.softmax(-1), v)
        if self.style == "einsum":
            a = torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)
            return torch.einsum("bhij,bhjd->bihd", a, v)
        if self.style == "cross-covariance":
            return (q.mT @ k).softmax(-1) @ v.mT
        if self.style == "linear":
            return F.softplus(q) @ (k.softmax(-2).mT @ v)
        if self.style == "no product":
            return (q * k).sum(-1, keepdim=True).softmax(2) * v
        raise AssertionError(self.style)


STYLES = ["sdpa", "eager", "normed", "keys first", "talking", "bmm", "einsum", "linear"]
STYLES += ["cross-covariance"]
TRANSFORMED = {"normed": "qk", "linear": "qk"}


def claim(module: Fused) -> Site:
    kind = module.style if module.style in ("linear", "cross-covariance") else "self"
    site = fused(module.qkv, heads=HEADS, head_major=module.head_major, kind=kind)
    return replace(site, module=module, path="attention")


def verdict(module: Fused, site: Site) -> dict[str, str]:
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    transformed = TRANSFORMED.get(module.style, "")
    (result,) = check(module, lambda: module(x), sites=[site], transformed=transformed)
    return dict(result.levels)


def make(style: str, head_major: bool = False) -> Fused:
    torch.manual_seed(0)
    module = Fused(style, head_major)
    prepare(module)
    return module


@pytest.mark.parametrize("head_major", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_true_claim_passes(style: str, head_major: bool) -> None:
    levels = verdict(m := make(style, head_major), claim(m))
    assert set(levels) == {"q", "k", "v"}
    assert levels["v"] == "values"
    if style not in TRANSFORMED:
        assert set(levels.values()) == {"values"}


def _edit(site: Site, change: Callable[[str, Tensor], Tensor]) -> Site:
    return replace(
        site, projections=tuple(replace(p, rows=change(p.role, p.rows)) for p in site.projections)
    )


def _swap(site: Site, a: str, b: str) -> Site:
    names = {a: b, b: a}
    return replace(
        site,
        projections=tuple(replace(p, role=names.get(p.role, p.role)) for p in site.projections),
    )


def _other_major(site: Site) -> Site:
    other = fused(site.projections[0].owner, heads=HEADS, head_major="role" in site.layout)
    return replace(site, projections=other.projections)


WRONG: dict[str, Callable[[Site], Site]] = {
    "q and k swapped": lambda s: _swap(s, "q", "k"),
    "q and v swapped": lambda s: _swap(s, "q", "v"),
    "k and v swapped": lambda s: _swap(s, "k", "v"),
    "head-major and role-major confused": _other_major,
    "heads of all roles swapped": lambda s: _edit(s, lambda _, r: r[[1, 0, 2]]),
    "heads of v rotated": lambda s: _edit(s, lambda role, r: r.roll(1, 0) if role == "v" else r),
    "channels shifted within heads": lambda s: _edit(s, lambda _, r: r.roll(1, 1)),
    "channels of v reversed": lambda s: _edit(s, lambda role, r: r.flip(1) if role == "v" else r),
    "one row off": lambda s: _edit(s, lambda _, r: (r + 1) % (3 * WIDTH)),
    "too few heads": lambda s: _edit(s, lambda _, r: r.reshape(1, -1)),
    "heads and channels exchanged": lambda s: _edit(s, lambda _, r: r.T.reshape(HEADS, DIM)),
}


@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.parametrize("head_major", [False, True])
@pytest.mark.parametrize("style", STYLES)
def test_wrong_claim_is_caught(style: str, head_major: bool, fault: str) -> None:
    module = make(style, head_major)
    with pytest.raises(OracleError):
        verdict(module, WRONG[fault](claim(module)))


def test_support_alone_tells_roles_and_heads() -> None:
    """Where q and k are transformed only the gradient speaks: it still tells roles and heads."""
    module = make("normed")
    for fault in ("q and k swapped", "heads of all roles swapped", "one row off"):
        wrong = WRONG[fault](claim(module))
        only_qk = replace(wrong, projections=tuple(p for p in wrong.projections if p.role != "v"))
        with pytest.raises(OracleError, match=r"depends on"):
            verdict(module, only_qk)


def test_missing_product_is_an_error() -> None:
    module = make("no product")
    with pytest.raises(OracleError, match="0 attention products"):
        verdict(module, claim(module))


def test_forward_that_never_runs_is_an_error() -> None:
    module = make("sdpa")
    with pytest.raises(OracleError, match="never ran"):
        check(module, lambda: None, sites=[claim(module)])


def test_no_sites_is_an_error() -> None:
    with pytest.raises(OracleError, match="no sites"):
        check(nn.Linear(2, 2), lambda: None)


def test_undeclared_transformation_is_an_error() -> None:
    module = make("normed")
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    with pytest.raises(OracleError, match="not input @ claimed rows"):
        check(module, lambda: module(x), sites=[claim(module)])


class Grouped(nn.Module):
    """Grouped queries over separate weights; k and v are repeated before the product."""

    num_heads = 4

    def __init__(self, tile: bool = False) -> None:
        super().__init__()
        self.tile = tile
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, n * DIM) for n in (4, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (-1, DIM)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.tile:
            k, v = k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)
        else:
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        return (q @ k.mT).softmax(-1) @ v


@pytest.mark.parametrize("tile", [False, True])
def test_grouped_queries(tile: bool) -> None:
    module = prepare(Grouped(tile))
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    site = separate(module.q_proj, module.k_proj, module.v_proj, heads=4, kv_heads=2)
    site = replace(site, module=module)
    check(module, lambda: module(x), sites=[site])
    with pytest.raises(OracleError):
        check(module, lambda: module(x), sites=[_edit(site, lambda _, r: r.flip(0))])


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("cross", [False, True])
def test_sees_into_multihead_attention(need_weights: bool, cross: bool) -> None:
    """The products hide inside one function of torch, and cross attention cuts its weight."""
    module = prepare(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True))
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    y = torch.randn(2, TOKENS + 2, WIDTH, dtype=torch.float64) if cross else x
    site = fused(module, heads=HEADS, name="in_proj_weight")
    site = replace(site, module=module)

    def run() -> None:
        module(x, y, y, need_weights=need_weights)

    (result,) = check(module, run, sites=[site])
    assert set(result.levels.values()) == {"values"}
    with pytest.raises(OracleError):
        check(module, run, sites=[_swap(site, "q", "k")])


def test_model_without_claim_uses_inspection() -> None:
    module = prepare(Grouped())
    x = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
    assert len(inspect(module).sites) == len(check(module, lambda: module(x))) == 1
