"""Calls of torch functions as a mode sees them: kinds of functions, operands, exchanging one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attncond.errors import UnsupportedAttentionError
from attncond.readonly import EffectiveWeight

PRODUCTS = frozenset(("matmul", "__matmul__", "linalg_matmul", "bmm", "einsum", "baddbmm", "mm"))
ADDITIONS = frozenset(("add", "add_", "__add__", "__radd__", "__iadd__"))
SUBTRACTIONS = frozenset(("sub", "sub_", "subtract", "subtract_", "__sub__", "__isub__"))
MULTIPLICATIONS = frozenset(
    ("mul", "mul_", "multiply", "multiply_", "__mul__", "__rmul__", "__imul__")
)
# What may lift a masked logit out of the range that tells it from the others.
SCALINGS = MULTIPLICATIONS.union(
    (
        *("div", "div_", "divide", "divide_", "true_divide", "true_divide_"),
        *("__truediv__", "__itruediv__", "tanh", "tanh_"),
        *("clamp", "clamp_", "clamp_min", "clamp_min_", "clip", "clip_", "maximum", "hardtanh"),
    )
)
# Looked up, as torch.export before torch 2.12 has names that are no str.
IN_PLACE = frozenset(
    (
        *("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"),
        *(n for n in {*dir(torch), *dir(Tensor), *dir(F)} if n.endswith("_") and n[0] != "_"),
    )
)
SUMS = frozenset(("sum", "mean"))
EXTREMES = frozenset(("amax", "max", "amin", "min"))
SOFTMAXES = frozenset(("softmax", "special_softmax"))
JOINS = frozenset(("cat", "concat", "concatenate"))
# What takes of a tensor its shape or its kind, and none of its entries.
MAKERS = frozenset(
    (
        *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"),
        *("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"),
    )
)
DROPOUTS = frozenset(("dropout", "dropout1d", "dropout2d", "dropout3d", "native_dropout"))
PROJECTING = frozenset(("linear", "conv1d", "conv2d", "addmm", "matmul", "__matmul__"))
CASTS = frozenset(
    (
        *("to", "type", "type_as", "float", "half", "bfloat16", "double"),
        *("cpu", "cuda", "clone", "detach"),
    )
)
TURNS = frozenset(("mT", "T", "mH", "H"))  # attributes, not methods
# What gives axes another order and changes nothing else.
TRANSPOSES = TURNS.union(
    (*("transpose", "t", "adjoint", "permute", "movedim", "moveaxis", "swapaxes", "swapdims"),)
)
RESHAPES = TRANSPOSES.union(
    (
        *("contiguous", "__getitem__", "reshape", "view", "view_as", "flatten", "unflatten"),
        *("squeeze", "unsqueeze", "expand", "expand_as", "narrow", "select", "diagonal"),
        *("chunk", "split", "unbind"),
    )
)
# What looks at an attention matrix without leading on to the values.
OBSERVERS = frozenset(
    (
        *("argmax", "argmin", "argsort", "any", "all", "numpy"),
        *("kthvalue", "median", "nanmedian", "quantile", "nanquantile"),
        *("isnan", "isinf", "isfinite", "gt", "ge", "lt", "le", "eq", "ne"),
        *("__gt__", "__ge__", "__lt__", "__le__", "__eq__", "__ne__"),
        *("log", "log2", "log10", "xlogy", "special_xlogy", "special_entr"),
    )
).union(SUMS, EXTREMES)
# What gives the entries another order.
REARRANGEMENTS = frozenset(
    (
        *("flip", "fliplr", "flipud", "roll", "index_select", "gather", "take_along_dim"),
        *("repeat", "repeat_interleave", "tile", "broadcast_to", "tensor_split"),
    )
)
# What returns entries by their size, and the places where they stood.
ORDERS = frozenset(("topk", "sort"))
# What is done to an attention matrix because its entries are probabilities.
GUARDS = frozenset(
    (
        *("nan_to_num", "nan_to_num_", "clamp", "clamp_", "clamp_min", "clip"),
        *("relu", "relu_", "abs", "abs_", "__abs__"),
    )
)
# What makes another matrix of it, as for sharper or flatter weights.
CURVES = frozenset(
    (
        *("pow", "pow_", "__pow__", "__ipow__", "float_power", "square", "square_"),
        *("sqrt", "sqrt_", "rsqrt", "exp", "exp2", "sigmoid", "tanh", "normalize"),
        *SOFTMAXES,
    )
)
# What changes its entries one by one, and is as likely to be returned as to lead on to the values.
ARITHMETIC = frozenset(
    (
        *("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide"),
        *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__"),
        *("add_", "sub_", "mul_", "div_", "__iadd__", "__isub__", "__imul__", "__itruediv__"),
        *("masked_fill", "masked_fill_", "where"),
    )
)


def tensors(result: Any) -> list[Tensor]:
    """The tensors in what a function returned: one, or those of a tuple or list."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, tuple | list):
        return [r for r in result if isinstance(r, Tensor)]
    return []


def find(known: list[Any], operands: list[Tensor]) -> Any:
    """The entry whose tensor is among the operands."""
    for entry in reversed(known):
        for operand in operands:
            if entry.tensor is operand:
                return entry
    return None


def held(known: list[Any]) -> list[Any]:
    """The entries whose tensor others hold, too: no call can get any other once more.

    To keep those would be to keep all intermediate attention matrices of a forward. A compiler sees
    to that itself.
    """
    if torch.compiler.is_compiling():
        return known
    last = {id(entry.tensor): entry for entry in known}  # find() never gets to one before it
    return [e for e in known if e is last[id(e.tensor)] and sys.getrefcount(e.tensor) > 2]


class TorchCall(NamedTuple):
    """One call, not run yet. A named tuple, because torch.compile traces what is made of those."""

    func: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(
        cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> TorchCall:
        """The call as ``__torch_function__`` gets it, with the name that tells its kind."""
        if func is Tensor.unflatten:
            func = torch.unflatten  # the method's super() call stops torch.compile before 2.12
        name = getattr(func, "__name__", "")
        if name == "__get__" and not torch.compiler.is_compiling():
            name = getattr(getattr(func, "__self__", None), "__name__", "")  # attn.mT
        return cls(func, name, args, kwargs)

    def run(self) -> Any:
        """What the function returns."""
        return self.func(*self.args, **self.kwargs)

    def operands(self) -> list[Tensor]:
        """The tensors that it gets, in their order."""
        found: list[Tensor] = []
        for a in (*self.args, *self.kwargs.values()):
            found += tensors(a)
        return found

    @property
    def target(self) -> Tensor | None:
        """The tensor that it writes into, if it does."""
        return self.operands()[0] if self.name in IN_PLACE else None

    @property
    def dim(self) -> int:
        """The axis of a softmax."""
        given: int | None = self.kwargs["dim"] if "dim" in self.kwargs else self.args[1]
        if given is None:  # as torch.nn.functional chooses it, with a warning
            return 0 if self.operands()[0].ndim in (0, 1, 3) else 1
        return given

    @property
    def ordered(self) -> int:
        """The axis of what orders entries by their size: topk, sort."""
        before = 1 if self.name == "sort" else 2
        given = self.args[before] if len(self.args) > before else self.kwargs.get("dim", -1)
        return int(given)

    def made(self, result: Any) -> list[Tensor]:
        """The tensors that it made: what it returned, or what it wrote into.

        Those that are no real numbers (which keys are the largest, or above a threshold) carry
        nothing.
        """
        made = [self.args[0]] if self.name == "__setitem__" else tensors(result)
        return [m for m in made if m.is_floating_point()]

    def exchanged(self, old: Tensor, new: Tensor) -> TorchCall:
        """The same call with one tensor exchanged, also inside a list of tensors."""

        def changed(a: Any) -> Any:
            if a is old:
                return new
            return type(a)(new if b is old else b for b in a) if type(a) in (tuple, list) else a

        args = tuple(changed(a) for a in self.args)
        return self._replace(args=args, kwargs={k: changed(a) for k, a in self.kwargs.items()})

    def reshaped(self, old: Tensor, new: Tensor, result: Any) -> Any:
        """What the reshape of ``old`` to ``result`` makes of ``new``, which may lie otherwise."""
        if self.name in ("contiguous", "clone"):
            return new  # laid out anew, an expanded tensor would be written in full
        if self.name in ("view", "view_as") and result.dtype == old.dtype:
            return new.reshape(result.shape)
        return self.exchanged(old, new).run()

    def views(self, old: Tensor, result: Tensor) -> bool:
        """Whether a result that is not written into may share its entries with an operand."""
        if self.name in CASTS:
            return self.name != "clone" and result.dtype == old.dtype
        return self.name in RESHAPES

    def followed(self, axis: int | None, old: Tensor, result: Tensor) -> int | None:
        """Where an axis of ``old`` lies in the result, both from the end; None if that is open."""
        if axis is None or 0 in old.shape:
            return None
        if self.name in TRANSPOSES or self.name == "__get__":  # a turn that is compiled
            marked: Tensor = self.exchanged(old, old.detach().narrow(axis, 0, 0)).run()
            return list(marked.shape).index(0) - marked.ndim
        if self.name == "einsum":
            own, letters = self._letters(old)
            inside = -axis > len(own) or "." in own[axis:]
            return None if inside else letters.index(own[axis]) - len(letters)
        if self.name in PRODUCTS:
            return axis if result.ndim >= old.ndim else None
        if result.shape == old.shape:
            return axis
        if axis != -1 or result.ndim == 0:
            return None
        before, after = old.shape[-1], result.shape[-1]
        if self.name in ("view", "view_as", "reshape", "flatten"):
            return -1 if after % before == 0 else None  # the last axis, or what it became a part of
        same = before == after != 1  # others may be of length one
        return -1 if same and (self.name in RESHAPES or self.name in JOINS) else None

    @property
    def projects(self) -> bool:
        """Whether a product is with a weight on the right, as that of linear is."""
        right = [o for o in self.operands() if o is not self.kwargs.get("out")][-1]
        return any(isinstance(w, nn.Parameter | EffectiveWeight) for w in (right, right._base))

    def summed(self, matrix: Tensor) -> list[int]:
        """The axes of one operand that a product sums over, from the end."""
        if self.name != "einsum":
            read = [o for o in self.operands() if o is not self.kwargs.get("out")]
            return [-1 if read[-2] is matrix else -2]  # baddbmm has one before
        own, letters = self._letters(matrix)
        return [i - len(own) for i, c in enumerate(own) if c not in letters]

    def _letters(self, matrix: Tensor) -> tuple[str, str]:
        """The letters of one operand of an einsum, and those of its result; a dot for any axes."""
        terms, arrow, letters = self.args[0].replace(" ", "").replace("...", ".").partition("->")
        if not arrow:
            once = (c for c in set(terms) - {","} if c == "." or terms.count(c) == 1)
            letters = "".join(sorted(once))
        return terms.split(",")[[a is matrix for a in self.operands()].index(True)], letters

    def einsum_axes(self, matrix: Tensor) -> tuple[str, str]:
        """The letters of one operand of an einsum, and those of its result."""
        if "->" not in self.args[0]:
            raise UnsupportedAttentionError(
                f"the einsum '{self.args[0]}' does not say where its axes go; "
                "write them after an arrow"
            )
        return self._letters(matrix)

    def channel_axis(self, matrix: Tensor) -> int:
        """The axis of ``matrix @ value`` (or its transpose) that only the values have."""
        if self.name != "einsum":
            return self.summed(matrix)[0]
        own, letters = self.einsum_axes(matrix)
        only = [i - len(letters) for i, c in enumerate(letters) if c not in own]
        lost = [c for c in self.args[0] if c.isalpha() and c not in own + letters]
        if len(only) != 1 or lost:  # where channels are summed over, those left are not the head's
            raise UnsupportedAttentionError(
                f"the einsum '{self.args[0]}' has no single axis of channels to equilibrate along"
            )
        return only[0]


class FusedAttention(NamedTuple):
    """A call of scaled_dot_product_attention: ``FusedAttention(func, *args, **kwargs)``.

    Tensors are (..., heads, queries or keys, channels).
    """

    func: Callable[..., Tensor]
    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values."""
        return self.query, self.key, self.value

    @property
    def factor(self) -> float:
        """What q·kᵀ is multiplied by."""
        return self.query.shape[-1] ** -0.5 if self.scale is None else float(self.scale)

    def with_plain_mask(self) -> FusedAttention:
        """The same, with a mask of at least two axes and no more than the queries, or none.

        A mask of torch.nn.attention.bias becomes the flag or the tensor it means, and one that is
        expanded is taken as it lies in memory: what is computed of it would be written in full.
        """
        bias: Any = self.attn_mask
        if bias is None:
            return self
        if type(bias).__name__ != "CausalBias":  # by name: importing it takes torch._dynamo along
            for _ in range(bias.ndim - self.query.ndim):
                bias = bias.squeeze(0)  # torch broadcasts it, and adds no axis to the output
            bias = torch.atleast_2d(bias)  # (keys,) is for all queries
            for axis, stride in enumerate(bias.stride()[:-1]):  # kernels want all keys written
                if stride == 0 and bias.shape[axis] > 1:
                    bias = bias.narrow(axis, 0, 1)
            return self._replace(attn_mask=bias)
        queries, keys = bias.seq_len_q, bias.seq_len_kv
        if bias.variant.name == "UPPER_LEFT" or queries == keys:
            return self._replace(attn_mask=None, is_causal=True)
        square = torch.ones(queries, keys, dtype=torch.bool, device=self.query.device)
        return self._replace(attn_mask=square.tril(keys - queries))

    def run(self) -> Tensor:
        """The heads' outputs."""
        func, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = self
        return func(
            query,
            key,
            value,
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
