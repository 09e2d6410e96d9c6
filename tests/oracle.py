"""The oracle for adapters: run the model and see what really reaches the attention product.

An adapter claims which rows of which parameter feed head h, channel c of Q, K and V. The oracle
believes nothing: it runs a real forward pass, finds the two products of each attention (logits and
output, or one call of ``scaled_dot_product_attention``), reads the tensors that entered them, and
compares them with the claim in two ways.

- Values: (input of the projection) @ (claimed matrix) + bias has to be, head by head and row by
  row, what reached the product, up to one scalar factor and the order of tokens. Where a role is
  normalised row by row on its way, its direction is compared.
- Gradient support: the gradient of head h of the captured tensor is non-zero exactly on the rows
  claimed for head h. That survives rotary embeddings, normalisation and pooling.

Roles are told apart by structure alone. In ``A = f(q kT); out = A v`` the key is the operand of
the first product whose axis the second one sums over. For kind "linear" it is ``q f(kT v)``, with
the same rule for the key. An attention whose products cannot be found is an error, not a pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from attncond.inspection import inspect
from attncond.sites import Projection, Site

_MATMUL = {"matmul", "__matmul__", "bmm", "mm"}
_PROJECTING = {"linear", "conv1d", "conv2d", "addmm", "matmul", "__matmul__", "bmm", "mm"}


class OracleError(AssertionError):
    """The adapter's claim and the forward pass disagree, or there is nothing to compare."""


@dataclass
class Product:
    """``left @ right`` or an einsum of two operands; axes are counted from the end."""

    left: Tensor
    right: Tensor
    out_left: int | None  # where the axis that only `left` has ends up in the result
    out_right: int | None
    summed_left: set[int]
    summed_right: set[int]


@dataclass
class Call:
    """One forward pass of a module with sites, and what was seen in it."""

    module: nn.Module
    products: list[Product] = field(default_factory=list)
    triples: list[tuple[Tensor, Tensor, Tensor, bool]] = field(default_factory=list)
    inputs: dict[int, list[tuple[Tensor, Tensor, Tensor | None, str]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """How strongly each role of a site was confirmed: "values", "direction" or "support"."""

    path: str
    cls: str
    levels: Mapping[str, str]


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _tensors(value)


class _Recorder(TorchFunctionMode):
    """Follows three things from op to op: weights, projected values, and attention matrices."""

    def __init__(self, sites: Iterable[Site]) -> None:
        super().__init__()
        self.stack: list[Call] = []
        self.calls: list[Call] = []
        self.keep: list[Any] = []  # ids stay valid only while the tensors live
        self.weights: dict[int, int] = {}  # tensor -> claimed parameter that it is made of
        self.projected: dict[int, set[int]] = {}  # tensor -> calls whose projections made it
        self.computed: set[int] = set()  # tensors that depend on some layer's or site's input
        # tensor -> {(call, product): (axis of the left operand, axis of the right one)}
        self.attention: dict[int, dict[tuple[int, int], tuple[int | None, int | None]]] = {}
        for site in sites:
            for p in site.projections:
                self.weights[id(p.raw)] = id(p.raw)
                self.keep.append(p.raw)

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        call = Call(module)
        self.stack.append(call)
        self.calls.append(call)
        for tensor in _tensors((args, kwargs)):
            self.keep.append(tensor)
            self.computed.add(id(tensor))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.stack.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        inputs = list(_tensors((args, kwargs)))
        outputs = list(_tensors(out))
        if name == "__setitem__":  # writes into its first argument
            outputs = inputs[:1]
        if outputs and inputs:
            self.keep.append((inputs, outputs))
            self._follow(name, args, kwargs, inputs, outputs)
        return out

    def _follow(
        self, name: str, args: Any, kwargs: Any, inputs: list[Tensor], outputs: list[Tensor]
    ) -> None:
        call = self.stack[-1] if self.stack else None
        number = len(self.calls) - 1
        if call is not None:
            number = next(i for i, c in enumerate(self.calls) if c is call)
        is_computed = any(id(t) in self.computed for t in inputs) or name in _PROJECTING
        made_of = {self.weights[id(t)] for t in inputs if id(t) in self.weights}
        others = [t for t in inputs if id(t) not in self.weights and id(t) in self.computed]
        if made_of and not others and not (name in _PROJECTING and len(inputs) > 1):
            if len(made_of) == 1:  # a view, cast or reparametrisation of a claimed weight
                for t in outputs:
                    self.weights[id(t)] = next(iter(made_of))
            return
        if made_of and name in _PROJECTING:
            if call is not None:
                self._projection(call, name, args, kwargs, inputs)
            for t in outputs:
                self.computed.add(id(t))
                self.projected[id(t)] = {number} if call is not None else set()
                self.attention.pop(id(t), None)
            return
        roots = set().union(*(self.projected.get(id(t), set()) for t in inputs))
        marks: dict[tuple[int, int], tuple[int | None, int | None]] = {}
        for t in inputs:
            for mark, axes in self.attention.get(id(t), {}).items():
                marks.setdefault(mark, _moved(name, args, kwargs, t, axes))
        if call is not None:
            if name == "scaled_dot_product_attention":
                named = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
                call.triples.append((named["query"], named["key"], named["value"], True))
                marks = {}
            elif (product := _product(name, args, kwargs)) and self._is_attention(product, number):
                marks = self._pair(call, number, product)
        for t in outputs:
            if is_computed:
                self.computed.add(id(t))
            if roots:
                self.projected[id(t)] = roots
            if marks:
                self.attention[id(t)] = dict(marks)

    def _projection(
        self, call: Call, name: str, args: Any, kwargs: Any, inputs: list[Tensor]
    ) -> None:
        weight = next(t for t in inputs if id(t) in self.weights)
        rest = [t for t in inputs if t is not weight]
        bias = None
        if name == "addmm":  # bias, input, weight
            bias, x = rest[0], rest[1]
        else:
            x, bias = rest[0], (rest[1] if len(rest) > 1 else None)
        call.inputs.setdefault(self.weights[id(weight)], []).append((x, weight, bias, name))

    def _is_attention(self, product: Product, number: int) -> bool:
        """One operand was projected in this call, the other at least depends on an input."""
        rooted = [number in self.projected.get(id(t), set()) for t in (product.left, product.right)]
        return any(rooted) and all(
            r or id(t) in self.computed
            for r, t in zip(rooted, (product.left, product.right), strict=True)
        )

    def _pair(
        self, call: Call, number: int, product: Product
    ) -> dict[tuple[int, int], tuple[int | None, int | None]]:
        left, right = (
            {m: a for m, a in self.attention.get(id(t), {}).items() if m[0] == number}
            for t in (product.left, product.right)
        )
        if bool(left) == bool(right):  # nothing attended yet: this may be the first product
            call.products.append(product)
            return {(number, len(call.products) - 1): (product.out_left, product.out_right)}
        marks = left or right
        summed = product.summed_left if left else product.summed_right
        other = product.right if left else product.left
        for (_, index), (axis_left, axis_right) in sorted(marks.items()):
            first = call.products[index]
            if axis_right in summed and axis_left not in summed:
                call.triples.append((first.left, first.right, other, False))
                return {}
            if axis_left in summed and axis_right not in summed:
                call.triples.append((first.right, first.left, other, False))
                return {}
        return {}


def _moved(
    name: str, args: Any, kwargs: Any, source: Tensor, axes: tuple[int | None, int | None]
) -> tuple[int | None, int | None]:
    """Where an axis (counted from the end) is after an op that permutes axes."""
    n = source.ndim
    if name in ("transpose", "transpose_", "swapaxes", "swapdims"):
        a, b = args[1:3] if len(args) > 2 else (kwargs["dim0"], kwargs["dim1"])
        a, b = a % n - n, b % n - n
        swap = {a: b, b: a}
        return swap.get(axes[0], axes[0]), swap.get(axes[1], axes[1])  # type: ignore[arg-type]
    if name in ("mT", "T", "t"):
        swap = {-1: -2, -2: -1}
        return swap.get(axes[0], axes[0]), swap.get(axes[1], axes[1])  # type: ignore[arg-type]
    if name == "permute":
        dims = args[1:] or (kwargs["dims"],)
        if len(dims) == 1 and not isinstance(dims[0], int):
            dims = tuple(dims[0])
        place = {d % n - n: i - n for i, d in enumerate(dims)}
        return place.get(axes[0]), place.get(axes[1])  # type: ignore[arg-type]
    return axes


def _product(name: str, args: Any, kwargs: Any) -> Product | None:
    if name in ("baddbmm", "baddbmm_"):
        name, args = "bmm", (*args[1:], *(kwargs[k] for k in ("batch1", "batch2") if k in kwargs))
    if name in _MATMUL:
        if len(args) < 2:
            return None
        left, right = args[:2]
        if left.ndim < 2 or right.ndim < 2:
            return None
        return Product(left, right, -2, -1, {-1}, {-2})
    if name != "einsum" or not isinstance(args[0], str):
        return None
    equation, *rest = args
    operands = list(_tensors(rest))
    if len(operands) != 2 or "->" not in equation:
        return None
    terms, result = equation.replace(" ", "").split("->")
    left_term, right_term = terms.split(",")

    def place(term: str) -> dict[str, int]:
        names = re.findall(r"\.\.\.|[a-zA-Z]", term)
        return {c: i - len(names) for i, c in enumerate(names)}

    a, b, out = place(left_term), place(right_term), place(result)
    only_a = [c for c in a if c in out and c not in b and c != "..."]
    only_b = [c for c in b if c in out and c not in a and c != "..."]
    return Product(
        operands[0],
        operands[1],
        out[only_a[-1]] if only_a else None,
        out[only_b[-1]] if only_b else None,
        {i for c, i in a.items() if c not in out},
        {i for c, i in b.items() if c not in out},
    )


def record(sites: Iterable[Site], run: Callable[[], Any]) -> list[Call]:
    """Run the forward pass and return what was seen in every call of a module with sites."""
    sites = list(sites)
    recorder = _Recorder(sites)
    modules = {id(s.module): s.module for s in sites}
    with ExitStack() as stack:
        for module in modules.values():
            enter = module.register_forward_pre_hook(recorder.enter, with_kwargs=True, prepend=True)
            leave = module.register_forward_hook(recorder.leave)
            stack.callback(enter.remove)
            stack.callback(leave.remove)
        # Functions of torch.nn.functional written in Python would otherwise reach the mode as a
        # whole (multi_head_attention_forward) and hide the products inside them.
        for name in ("", "_unary", "_variadic"):
            patch = mock.patch.object(F, f"has_torch_function{name}", return_value=False)
            stack.enter_context(patch)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(recorder)
        run()
    return recorder.calls


def _arranged(tensor: Tensor, heads: int, dim: int) -> Iterator[Tensor]:
    """Every reading of ``tensor`` as (heads, rows, channels) that its shape allows."""
    for c in range(tensor.ndim):
        if tensor.shape[c] == dim + 1 and bool((tensor.select(c, dim) == 1).all()):
            # Linear attention appends a one to its values, which sums the weights.
            yield from _arranged(tensor.narrow(c, 0, dim), heads, dim)
        if tensor.shape[c] != dim:
            continue
        if heads == 1:
            yield tensor.movedim(c, -1).reshape(1, -1, dim)
            continue
        for h in range(tensor.ndim):
            size = tensor.shape[h]
            if h == c or size % heads:
                continue
            front = tensor.movedim((h, c), (0, -1))
            yield front.reshape(heads, -1, dim)  # heads first; repeated groups stay together
            if size != heads:  # (batch * heads), or groups tiled
                split = front.unflatten(0, (size // heads, heads)).movedim(1, 0)
                yield split.reshape(heads, -1, dim)


def _expected(call: Call, p: Projection) -> Tensor | None:
    """(heads, rows, channels) that the claim predicts before anything else touches them."""
    raw, parts = p.raw, []
    for x, weight, bias, name in call.inputs.get(id(raw), []):
        first = 0
        if raw.ndim == 2 and weight.stride() == raw.stride()[::-1] != raw.stride():
            weight = weight.mT  # written x @ weight.T
        if weight.shape[: raw.ndim] != raw.shape:
            if (
                p.axis != 0
                or weight.untyped_storage().data_ptr() != raw.untyped_storage().data_ptr()
            ):
                continue
            first = (weight.storage_offset() - raw.storage_offset()) // raw.stride(0)
        rows = p.rows - first
        if int(rows.min()) < 0 or int(rows.max()) >= weight.shape[p.axis]:
            continue
        matrix = weight.movedim(p.axis, 0).flatten(1)[rows]
        if name.startswith("conv"):
            x = x.movedim(1, -1)
        value = torch.einsum("ti,hci->htc", x.reshape(-1, x.shape[-1]), matrix)
        if bias is not None:
            value = value + bias[rows][:, None]
        parts.append(value)
    return torch.cat(parts, 1) if parts else None


def _compare(got: Tensor, want: Tensor) -> str | None:
    """ "values" if every row of ``got`` is a row of ``want`` times one scalar, "direction" if
    the scalar differs from row to row, else None."""
    got, want = got.detach(), want.detach().to(got.dtype)
    exact = got.dtype == torch.float64
    near, same = (1e-10, 1e-7) if exact else (1e-5, 1e-3)
    ratios = []
    for g, w in zip(got, want, strict=True):
        size, length = g.norm(dim=-1), w.norm(dim=-1)
        keep, some = size > 0, length > 0  # padding of windows is zero
        if not bool(keep.any()) or not bool(some.any()):
            return None
        cosine = (g[keep] / size[keep, None]) @ (w[some] / length[some, None]).T
        best, where = cosine.max(dim=1)
        if float((1 - best).max()) > near:
            return None
        ratios.append(size[keep] / length[some][where])
    ratio = torch.cat(ratios)
    return "values" if float(ratio.max() / ratio.min()) - 1 < same else "direction"


def _support(part: Tensor, p: Projection) -> set[int]:
    """Rows of the parameter on which ``part`` depends."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(part.shape, generator=generator, dtype=torch.float64).to(part)
    (gradient,) = torch.autograd.grad(part, p.raw, weight, retain_graph=True, allow_unused=True)
    if gradient is None:
        return set()
    rows = gradient.movedim(p.axis, 0).flatten(1)
    return set(torch.nonzero((rows != 0).any(1)).flatten().tolist())


def _check_support(got: Tensor, p: Projection, mixed: bool) -> str | None:
    """None if the gradient agrees with the claim, else what is wrong."""
    claim = [set(r.tolist()) for r in p.rows]
    if mixed:  # heads meet on the way (a norm or convolution over all channels)
        seen = _support(got, p)
        if seen != set().union(*claim):
            return f"depends on {_show(seen)}, claimed {_show(set().union(*claim))}"
        return None
    for h, want in enumerate(claim):
        if (seen := _support(got[h], p)) != want:
            return f"head {h} depends on rows {_show(seen)}, claimed {_show(want)}"
    for c in range(min(p.head_dim, 6)):
        if int(p.rows[0, c]) not in (seen := _support(got[0, :, c], p)):
            return f"channel {c} of head 0 depends on {_show(seen)}, claimed {int(p.rows[0, c])}"
    return None


def _show(rows: set[int]) -> str:
    spans: list[list[int]] = []
    for r in sorted(rows):
        if spans and spans[-1][1] == r - 1:
            spans[-1][1] = r
        else:
            spans.append([r, r])
    text = ", ".join(f"{a}..{b}" for a, b in spans[:6]) + (", ..." if len(spans) > 6 else "")
    return f"[{text}]"


def _check_role(call: Call, p: Projection, tensor: Tensor, transformed: bool, mixed: bool) -> str:
    if not bool(torch.isfinite(tensor).all()):
        raise OracleError(f"{p.role}: what reaches the product is not finite")
    arrangements = list(_arranged(tensor, p.heads, p.head_dim))
    if not arrangements:
        raise OracleError(
            f"{p.role}: what reaches the product has shape {tuple(tensor.shape)}, which cannot be "
            f"{p.heads} heads of {p.head_dim} channels"
        )
    want = _expected(call, p)
    level = None
    chosen: Tensor | None = None
    if want is not None:
        for got in arrangements:
            if (found := _compare(got, want)) and (level is None or found == "values"):
                level, chosen = found, got
    if level != "values" and not transformed:
        raise OracleError(
            f"{p.role}: what reaches the product is not input @ claimed rows"
            + ("" if want is not None else " (the projection's input was never seen)")
            + ("; it is, up to a factor per row" if level else "")
        )
    readings = [chosen] if chosen is not None else arrangements
    reasons = [_check_support(got, p, mixed) for got in readings]
    if None not in reasons:
        raise OracleError(f"{p.role}: " + ", or ".join(dict.fromkeys(map(str, reasons[:3]))))
    return level or "support"


def _piece(call: Call, where: str) -> Tensor:
    number, part = where.split(".")
    if part in ("left", "right"):
        return getattr(call.products[int(number)], part)  # type: ignore[no-any-return]
    return call.triples[int(number)]["qkv".index(part)]  # type: ignore[return-value]


def _of(option: str | Mapping[str, str], site: Site) -> str:
    return option if isinstance(option, str) else option.get(site.cls.rsplit(".", 1)[-1], "")


def check(
    model: nn.Module,
    run: Callable[[], Any],
    *,
    sites: Iterable[Site] | None = None,
    transformed: str | Mapping[str, str] = "",
    mixed: str | Mapping[str, str] = "",
    unused: Iterable[str] = (),
    pieces: Mapping[str, tuple[Mapping[str, str], ...]] | None = None,
) -> list[Verdict]:
    """Hold every site of ``model`` against a forward pass; raise :class:`OracleError` if one fails.

    ``run`` runs the forward pass. ``transformed`` names the roles that something (rotary embedding,
    normalisation, pooling) changes between projection and product, so that only the gradient can
    be compared; ``mixed`` those where it also mixes heads. Both may be given per class (short
    name). ``unused`` are paths of sites that this forward pass never runs.
    ``pieces`` is for classes (short name) that compute an attention in several products, as sparse
    and landmark attention do: for each of the module's sites, where each role is to be found, as
    "3.k" (the key of the fourth attention seen) or "3.left", "3.right" (an operand of the fourth
    product that may start one).
    The model should be in eval mode, in float64, with no parameter between at zero.
    """
    found = list(inspect(model).sites if sites is None else sites)
    if not found:
        raise OracleError("no sites to check")
    calls = record(found, run)
    verdicts = []
    for site in found:
        if site.path in unused:
            continue
        mine = [c for c in calls if c.module is site.module]
        if not mine:
            raise OracleError(f"{site.path}: its forward never ran")
        call = mine[0]
        here = [s for s in found if s.module is site.module]
        short = site.cls.rsplit(".", 1)[-1]
        if pieces and short in pieces:
            captured = {r: _piece(call, w) for r, w in pieces[short][here.index(site)].items()}
        elif len(call.triples) != len(here):
            raise OracleError(
                f"{site.path} ({site.cls}): {len(here)} sites, but {len(call.triples)} attention "
                f"products seen (and {len(call.products)} products that may be parts of some)"
            )
        else:
            first, second, third, fused = call.triples[here.index(site)]
            captured = {"q": first, "k": second, "v": third}
            if site.kind == "linear" and not fused:  # q (kT v): v meets k in the first product
                captured = {"q": third, "k": second, "v": first}
        levels = {}
        for p in site.projections:
            try:
                levels[p.role] = _check_role(
                    call,
                    p,
                    captured[p.role],
                    p.role in _of(transformed, site),
                    p.role in _of(mixed, site),
                )
            except OracleError as error:
                raise OracleError(f"{site.path} ({site.cls}, {site.layout}): {error}") from None
        verdicts.append(Verdict(site.path, site.cls, levels))
    return verdicts


def prepare(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model in eval mode and float64, with no parameter left at zero.

    Zero biases and gates would hide a wrong bias or cut the gradient. A fresh batch norm is left
    alone: in eval mode it is a scalar factor, so that what it follows can be compared by value.
    """
    generator = torch.Generator().manual_seed(seed)
    model.double().eval()
    norms = (m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    shifts = {id(m.bias) for m in norms}
    with torch.no_grad():
        for p in model.parameters():
            p.requires_grad_(p.is_floating_point())
            if p.is_floating_point() and not bool(p.any()) and id(p) not in shifts:
                p.copy_(0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model
