"""Watch the attention of one forward pass: what enters each product, without changing any of it.

The tensors are found as :mod:`attncond.recognition` finds them. Every attention is handed over at
once, while its tensors live anyway, and forgotten: nothing is kept for later.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attncond.attention_logits import Logits
from attncond.attention_matrices import Matrix
from attncond.calls import PROJECTING, FusedAttention, TorchCall, tensors
from attncond.diagnose.dependence import Dependence
from attncond.diagnose.layout import as_tokens, by_head, split_heads
from attncond.errors import ConditioningError
from attncond.heads import Heads, conditioned_heads
from attncond.recognition import Recognition
from attncond.sites import HIDDEN, Site

__all__ = ["Call", "Captured", "ProjectionInput", "Scores", "watch", "wide"]


@dataclass(frozen=True, eq=False)
class ProjectionInput:
    """What some weight of ``rows`` outputs was multiplied with, and the bias that was added."""

    x: Tensor
    bias: Tensor | None
    rows: int


@dataclass(frozen=True, eq=False)
class Scores:
    """Logits of an attention, one item of the batch and some heads at a time."""

    items: int
    heads: int
    queries: int
    keys: int
    read: Callable[[int, slice], tuple[Tensor, Tensor]]
    """(item, heads) -> logits in float64, visible keys; both (heads, queries, keys)."""
    value: Tensor | None = None
    """(items, heads or fewer, keys, channels), what the attention matrix meets; sinks have none."""

    def values(self, item: int, chosen: slice) -> Tensor | None:
        """Those of some heads, (heads, keys, channels), in float64."""
        if self.value is None:
            return None
        index = torch.arange(self.heads, device=self.value.device)[chosen]
        return wide(self.value[item, index * self.value.shape[1] // self.heads])


@dataclass(frozen=True, eq=False)
class Call:
    """The forward that an attention happened in, and which of its attentions it was."""

    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    turn: int


@dataclass(frozen=True, eq=False)
class Captured:
    """One attention as it happened.

    ``query``, ``key``, ``value`` (items, heads, tokens, channels), ``mask`` and ``causal`` are
    those of scaled_dot_product_attention; ``fixed``: the mask does not depend on queries, keys or
    values. Where attention is written out, ``product`` is q·kᵀ and ``matrix`` what meets the values
    (both like the scores), if the logits are ``scale`` times the one plus something fixed, and the
    last ``sinks`` columns of the logits belong to no key.
    """

    site: Site
    scores: Scores
    tokens: Tensor | None  # (batch, tokens, channels), what the queries are projected from
    inputs: Sequence[ProjectionInput]
    conditioned: Heads | None
    call: Call
    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    mask: Tensor | None = None
    causal: bool = False
    scale: float = 1.0
    fixed: bool = True
    product: Tensor | None = None
    matrix: Tensor | None = None
    sinks: bool = False

    @property
    def gap(self) -> bool:
        """Whether what meets the values is P − U."""
        return self.conditioned is not None and self.conditioned.gap is not None


Sink = Callable[[Captured], None]


@dataclass
class _Session:
    sink: Sink
    stack: list[Observer] = field(default_factory=list)


class Observer(Recognition):
    """Sees the attention of one forward of one module, and hands it to the session's sink."""

    def __init__(self, sites: list[Site], session: _Session, call: Call) -> None:
        first = sites[0]
        super().__init__(first.hidden, first.softmax)
        self.sites = sites
        self.products = 0
        self.session = session
        self.forward = call
        self.arguments = _floating((*call.args, *call.kwargs.values()))
        self.inputs: list[ProjectionInput] = []
        self.pending: dict[int, tuple[Logits, int]] = {}
        self.dependence = Dependence()
        self.conditioned = conditioned_heads(first.module)

    def _called(self, call: TorchCall) -> Any:
        if self.session.stack[-1] is not self:  # an attention inside of this one's module
            return call.run()
        projected = call.name in PROJECTING and self._projection(call)
        result = super()._called(call)
        if call.func is not F.multi_head_attention_forward:  # whose parts were seen one by one
            self.dependence.note(call, result, projected)
        return result

    def _projection(self, call: TorchCall) -> bool:
        """Note what a weight of the right width is multiplied with."""
        name, args = call.name, call.args
        named = dict(zip(("input", "weight", "bias"), args, strict=False)) | call.kwargs
        x, weight, bias = (named.get(key) for key in ("input", "weight", "bias"))
        if name == "addmm" and len(args) == 3:
            bias, x, weight = args
        elif "matmul" in name and len(args) == 2:
            x, weight = args
        if not isinstance(x, Tensor) or not isinstance(weight, Tensor) or not weight.ndim >= 2:
            return False
        if x.ndim < 2 or (weight.ndim > 2) != name.startswith("conv"):
            return False
        widths = {p.in_features for site in self.sites for p in site.projections}
        x = x.movedim(1, -1) if name.startswith("conv") else x
        if x.shape[-1] not in widths:
            return False
        rows = weight.shape[0] if name in ("linear", "conv1d", "conv2d") else weight.shape[1]
        for argument in self.arguments:  # Conv1D of transformers flattens the batch
            if x.ndim == 2 and argument.ndim > 2 and argument.shape[-1] == x.shape[-1]:
                x = x.view(argument.shape) if argument.numel() == x.numel() else x
        self.inputs.append(ProjectionInput(x, bias if isinstance(bias, Tensor) else None, rows))
        return True

    def _fused(self, attention: FusedAttention) -> Tensor:
        if attention.query.is_nested or attention.key.is_nested:
            raise ConditioningError(
                f"nested tensors in the attention of {self.sites[0].path or 'the model'} cannot be "
                "diagnosed; use padded tensors and a mask"
            )
        turn, site = self._next_site()
        split, scale = by_head(attention.with_plain_mask(), site), attention.factor
        causal = split.is_causal
        q, k, v = (t.detach() for t in split.operands)
        mask = None if split.attn_mask is None else split.attn_mask.detach()
        (items, count, queries, _), keys = q.shape, k.shape[2]

        def read(item: int, chosen: slice) -> tuple[Tensor, Tensor]:
            index = torch.arange(count, device=k.device)[chosen] * k.shape[1] // count
            logits = wide(q[item, chosen]) @ wide(k[item, index]).mT * scale
            visible = torch.ones_like(logits, dtype=torch.bool)
            if causal:
                visible = visible.tril()
            if mask is not None:
                part = mask[item, chosen].to(logits.device)
                if part.dtype == torch.bool:
                    visible = visible & part
                else:
                    visible, logits = visible & (part > self.hidden), logits + part.double()
            return logits, visible

        self._hand_over(
            site,
            Scores(items, count, queries, keys, read, v),
            turn,
            query=q,
            key=k,
            value=v,
            mask=mask,
            causal=causal,
            scale=scale,
            fixed=self.dependence.fixed(attention.attn_mask),
        )
        return attention.run()

    def _softmax(self, logits: Logits, call: TorchCall) -> Any:
        self.pending[self.softmaxes] = (logits, call.dim)
        return super()._softmax(logits, call)

    def _product(self, matrix: Matrix, call: TorchCall) -> Tensor:
        turn, site = self._next_site()
        if (found := self.pending.pop(matrix.root, None)) is not None:
            first = len(call.args) == 2 and call.args[0] is matrix.tensor
            value = call.args[1] if first else None
            self._written_out(site, turn, *found, matrix.tensor, value)
        return super()._product(matrix, call)

    def _written_out(
        self,
        site: Site,
        turn: int,
        logits: Logits,
        dim: int,
        matrix: Tensor,
        value: Tensor | None,
    ) -> None:
        """softmax(logits) met the values, as ``matrix`` and, if that came first, ``value``."""
        tensor = split_heads(logits.tensor.detach().movedim(dim, -1), site.heads)
        visible = None
        if logits.visible is not None and not logits.sinks:
            visible = logits.visible.expand_as(logits.tensor).movedim(dim, -1)
            visible = split_heads(visible, site.heads)

        def read(item: int, chosen: slice) -> tuple[Tensor, Tensor]:
            part = wide(tensor[item, chosen])
            shown = part > HIDDEN
            if visible is not None:
                shown = shown & visible[item, chosen].to(shown.device)
            return part, shown | part.isnan()

        items, heads, queries, keys = tensor.shape
        known = self.dependence.multiple(logits.tensor)
        last = dim in (-1, logits.tensor.ndim - 1)
        v = None if value is None or not last else split_heads(value.detach(), site.heads)
        fits = v is not None and v.shape[0] == items and heads % v.shape[1] == 0
        fits = fits and v is not None and v.shape[2] in (keys, queries if logits.sinks else keys)
        scores = Scores(items, heads, queries, keys, read, v if fits else None)
        if known is None or v is None or logits.sinks:
            self._hand_over(site, scores, turn, value=v, sinks=logits.sinks)
            return
        shape = (items, heads, queries, keys)
        product = known.product().detach()
        self._hand_over(
            site,
            scores,
            turn,
            value=v,
            product=product.reshape(shape) if product.numel() == tensor.numel() else None,
            matrix=matrix.detach().reshape(shape) if matrix.numel() == tensor.numel() else None,
            scale=known.factor,
        )

    def _next_site(self) -> tuple[int, Site]:
        """Which attention of the forward this is, and whose: several sites attend in order."""
        turn = self.products
        self.products += 1
        return turn, self.sites[turn % len(self.sites)]

    def _hand_over(self, site: Site, scores: Scores, turn: int, **known: Any) -> None:
        with torch.no_grad():
            self.session.sink(
                Captured(
                    site,
                    scores,
                    self._tokens(site, scores.queries),
                    self.inputs,
                    self.conditioned,
                    replace(self.forward, turn=turn),
                    **known,
                )
            )

    def _tokens(self, site: Site, queries: int) -> Tensor | None:
        """What the queries were projected from, as (batch, tokens, channels)."""
        width = site.projections[0].in_features
        read = [i.x for i in self.inputs if i.x.ndim > 2] + self.arguments
        for x in (*read, *(i.x for i in self.inputs)):
            if x.shape[-1] == width and x.ndim >= 2:
                return as_tokens(x.detach(), site, queries)
        return None


@contextmanager
def watch(sites: Iterable[Site], sink: Sink) -> Iterator[Counter[int]]:
    """Hand every attention of ``sites`` to ``sink`` while the block runs.

    Yields how often each site's module ran, by its id. The modules' ``forward`` is exchanged on
    the instances and put back at the end.
    """
    session, calls = _Session(sink), Counter[int]()
    groups: dict[int, list[Site]] = defaultdict(list)
    for site in sites:
        groups[id(site.module)].append(site)
    before = [(g[0].module, g[0].module.__dict__.get("forward")) for g in groups.values()]
    try:
        for group in groups.values():
            _observe(group, session, calls)
        yield calls
    finally:
        for module, forward in before:
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = forward


def _observe(sites: list[Site], session: _Session, calls: Counter[int]) -> None:
    module = sites[0].module
    original = module.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        calls[id(module)] += 1
        observer = Observer(sites, session, Call(original, args, kwargs, 0))
        session.stack.append(observer)
        try:
            with observer:
                return original(*args, **kwargs)
        finally:
            session.stack.pop()

    module.__dict__["forward"] = forward


def wide(t: Tensor) -> Tensor:
    """In float64, which not every device has."""
    return (t.cpu() if t.device.type == "mps" else t).detach().double()


def _floating(values: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Mapping):
            value = list(value.values())
        found += [t for t in tensors(value) if t.is_floating_point() and t.ndim >= 2]
    return found
