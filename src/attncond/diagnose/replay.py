"""Run an attention once more, in float64, as a function of what one head's weights project.

Between its projections and the product with the values a module may rotate, normalise, pool or mix
queries and keys as it likes: its own code is run, so that the derivative is that of whatever it
does. Three things are exchanged on the way: the products with W_Q, W_K and W_V become leaves of an
autograd graph, keys that were not sampled are hidden, and the head's output ends the run. That the
run is the one that was captured is not taken on trust: its logits are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attncond.attention_logits import Logits
from attncond.attention_matrices import Matrix
from attncond.calls import PROJECTING, FusedAttention, TorchCall, tensors
from attncond.diagnose.arguments import in_double, map_tensors, row_range
from attncond.diagnose.capture import Call
from attncond.diagnose.doubled import Shell, doubled, doubled_copy, stock
from attncond.diagnose.layout import by_head, split_heads
from attncond.diagnose.tokenwise import ReplayError, TokensMixedError, Use, cut_uses
from attncond.functional import back
from attncond.heads import Heads
from attncond.interception import Interception
from attncond.sites import HIDDEN, Role, Site

__all__ = ["Replay", "Traced"]


class _Reached(BaseException):
    """Carries the head's output out of the module's forward, past whatever it catches.

    ``cuts``: by role, what reached the attention, and the leaf that went on in its place.
    """

    def __init__(self, output: Tensor, cuts: dict[Role, tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.output = output
        self.cuts = cuts


@dataclass(frozen=True, eq=False)
class Traced:
    """A head's output ``(rows, channels)`` with its graph, and what it was made from."""

    output: Tensor
    uses: Sequence[Use]


@dataclass(frozen=True, eq=False)
class Replay:
    """One attention that can be run again.

    ``call`` is the forward with its arguments taken down to what is needed. ``rows`` and
    ``columns`` are the sampled queries and keys (for attention between channels, ``columns`` are
    the tokens of the output), ``logits`` and ``visible`` what they were, by head.
    """

    site: Site
    call: Call
    conditioned: Heads | None
    rows: Sequence[int]
    columns: Sequence[int]
    logits: Mapping[int, Tensor]
    visible: Mapping[int, Tensor]
    tolerance: float

    @property
    def between_tokens(self) -> bool:
        """Whether the rows and columns of the logits are queries and keys."""
        return not self.site.over_channels and not self.site.softmax

    def trace(self, head: int) -> Traced:
        """Run it; raises `ReplayError`."""
        try:
            # Most do to each query, key and value what it does by itself. Then a few passes
            # through that part tell all of it, and the rest is small.
            return self._trace(head, cut=True)
        except TokensMixedError:
            return self._trace(head, cut=False)

    def _trace(self, head: int, cut: bool) -> Traced:
        run = _Run(self, head, cut)
        module, shell = self.site.module, Shell(self.site.module, self.call.forward)
        args, kwargs = (
            map_tensors(given, doubled_copy) for given in (self.call.args, self.call.kwargs)
        )
        try:
            with (
                stock(module),
                sdpa_kernel(SDPBackend.MATH),  # the fused ones have no second derivatives
                torch.autocast(run.device.type, enabled=False),
                torch.enable_grad(),
                run,
            ):
                output = torch.func.functional_call(shell, run.state, args, kwargs)
        except _Reached as reached:
            if reached.cuts:
                return Traced(reached.output, cut_uses(run.uses, reached.cuts))
            return self._checked(run, reached.output)
        except (torch.OutOfMemoryError, ReplayError):
            raise
        except Exception as error:
            text = str(error).strip().splitlines() or [type(error).__name__]
            raise ReplayError(f"it cannot be run again in float64: {text[0]}") from error
        if not self.site.softmax or not run.checked:
            raise ReplayError("its heads' outputs were not met when it was run again")
        return self._checked(run, self._of_module(output, head))

    def _of_module(self, output: Any, head: int) -> Tensor:
        """A head's part of what the module returns, where it has no projection after the heads."""
        whole = next(iter(tensors(output)), None)
        width = sum(p.heads * p.head_dim for p in self.site.projections if p.role == "v")
        if whole is None or whole.ndim != 3 or whole.shape[-1] != width:
            raise ReplayError("its heads' outputs are not what the module returns")
        with torch.enable_grad():
            part: Tensor = whole[0].unflatten(-1, (self.site.heads, -1))[self.rows, head]
        return part

    def _checked(self, run: _Run, output: Tensor) -> Traced:
        if not output.requires_grad:
            raise ReplayError("its heads' outputs do not depend on the weights")
        generator = torch.Generator().manual_seed(0)
        random = torch.randn(output.shape, generator=generator, dtype=torch.float64, device="cpu")
        grads = back(output, [use.leaf for use in run.uses], random.to(output.device))
        # Tokens that were not sampled, other items and windows have no part in this output.
        felt = [grad.any(1) for grad in grads]
        kept = [
            replace(use, x=torch.where(here[:, None], use.x, 0.0))
            for use, here in zip(run.uses, felt, strict=True)
            if bool(here.any())
        ]
        roles = [use.role for use in kept]
        if len(set(roles)) < len(roles):
            raise ReplayError("one of its weights has several parts in a head's output")
        if missing := {p.role for p in self.site.projections} - set(roles):
            names = " and ".join(f"W_{r.upper()}" for r in sorted(missing))
            raise ReplayError(f"the product with {names} was not found when it was run again")
        return Traced(output, kept)


class _Run(Interception):
    """Makes leaves of a head's projections, and stops at the head's output."""

    def __init__(self, replay: Replay, head: int, cut: bool) -> None:
        heads = replay.conditioned or Heads()
        site = replay.site
        super().__init__(heads.gap, heads.precondition, site.hidden, site.softmax, 1, site.path)
        self.replay = replay
        self.head = head
        self.cut = cut
        self.turn = replay.call.turn
        self.uses: list[Use] = []
        self.checked = False
        self.root = 0  # the softmax of this attention
        self.state, self.known = doubled(site)
        self.device = next(iter(self.known.values()))[0].raw.device

    def _called(self, call: TorchCall) -> Any:
        call = in_double(call)
        result = super()._called(call)
        if call.name in PROJECTING and isinstance(result, Tensor):
            return self._projected(call.name, call.operands(), result)
        return result

    def _projected(self, name: str, operands: list[Tensor], result: Tensor) -> Tensor:
        weight = next((o for o in operands if o.untyped_storage().data_ptr() in self.known), None)
        if weight is None:
            return result
        axis = 1 if name.startswith("conv") else -1
        flat = result.movedim(axis, -1).flatten(0, -2) if result.ndim > 2 else result
        for p in self.known[weight.untyped_storage().data_ptr()]:
            if (found := row_range(weight, p)) is None:
                continue
            rows = p.rows[p.serving(self.head, self.replay.site.heads)] - found.start
            if int(rows.min()) < 0 or int(rows.max()) >= len(found):
                continue
            wide = [o for o in operands if o is not weight and o.ndim > 1]
            wide = [o for o in wide if o.shape[axis] == p.in_features]
            if len(wide) == 0 or flat.shape[-1] != len(found):
                continue
            x = wide[0].detach().movedim(axis, -1)
            x = x.flatten(0, -2) if x.ndim > 2 else x
            if len(x) != len(flat):
                raise ReplayError(f"W_{p.role.upper()} projects other tokens than it reads")
            leaf = flat[:, rows.to(flat.device)].detach().requires_grad_(True)
            flat = flat.index_copy(1, rows.to(flat.device), leaf)
            self.uses.append(Use(p.role, x, leaf))
        shape = result.movedim(axis, -1).shape
        return flat.view(shape).movedim(-1, axis)

    def _fused(self, attention: FusedAttention) -> Tensor:
        if self.turn:
            self.turn -= 1
            return attention.run()
        rows, columns, site = self.replay.rows, self.replay.columns, self.replay.site
        split, head, scale = by_head(attention, site), self.head, attention.factor
        own = head * split.key.shape[1] // split.query.shape[1]
        q = split.query[:1, head : head + 1, rows]
        k, v = (t[:1, own : own + 1, columns] for t in (split.key, split.value))
        mask = split.attn_mask
        if mask is not None:
            mask = mask[:1, head : head + 1, rows][..., columns]
        if attention.is_causal:
            places = [torch.tensor(i, device=q.device) for i in (rows, columns)]
            seen = (places[0][:, None] >= places[1])[None, None]
            if mask is None or mask.dtype == torch.bool:
                mask = seen if mask is None else mask & seen
            else:
                mask = mask.masked_fill(~seen, -torch.inf)
        logits = (q @ k.mT)[0, 0].detach() * scale
        shown = torch.ones_like(logits, dtype=torch.bool)
        if mask is not None:
            boolean = mask.dtype == torch.bool
            shown = mask[0, 0] if boolean else mask[0, 0] > self.hidden
            logits = logits if boolean else logits + mask[0, 0].detach()
        self._compare(logits, shown)
        cuts: dict[Role, tuple[Tensor, Tensor]] = {}
        if self.cut:
            if mask is not None and mask.requires_grad:  # made of queries or keys, too
                raise TokensMixedError
            cuts = {"q": _cut(q), "k": _cut(k), "v": _cut(v)}
            q, k, v = (leaf[None, None] for _, leaf in cuts.values())
        output = super()._fused(FusedAttention(attention.func, q, k, v, mask, scale=scale))
        raise _Reached(output[0, 0], cuts)

    def _softmax(self, logits: Logits, call: TorchCall) -> Any:
        replay = self.replay
        if self.softmaxes != (replay.site.softmax or replay.call.turn + 1):
            return super()._softmax(logits, call)
        self.root = self.softmaxes
        dim = call.dim
        heads = split_heads(logits.tensor.detach().movedim(dim, -1), replay.site.heads)
        if heads.shape[1] != replay.site.heads:
            raise ReplayError("its attention matrices are not found head by head")
        part = heads[0, self.head]
        if replay.between_tokens:
            part = part[replay.rows][:, replay.columns]
        self._compare(part, part > HIDDEN)
        tensor = logits.tensor
        if replay.between_tokens:
            hidden = sorted(set(range(tensor.shape[dim])) - set(replay.columns))
            index = torch.tensor(hidden, dtype=torch.long, device=tensor.device)
            tensor = tensor.index_fill(dim, index, -torch.inf)
        changed = logits._replace(tensor=tensor)
        return super()._softmax(changed, call.exchanged(logits.tensor, tensor))

    def _product(self, matrix: Matrix, call: TorchCall) -> Tensor:
        output = super()._product(matrix, call)
        replay = self.replay
        if matrix.root != self.root or replay.site.softmax:
            return output
        output = _in_order_of(call, matrix.tensor, output)
        part = split_heads(output, replay.site.heads)[0, self.head]
        raise _Reached(
            part[:, replay.columns] if replay.site.over_channels else part[replay.rows], {}
        )

    def _compare(self, logits: Tensor, visible: Tensor) -> None:
        """Whether these are the logits that were captured."""
        want, shown = self.replay.logits[self.head], self.replay.visible[self.head]
        if logits.shape != want.shape:
            raise ReplayError("its logits have another shape when it is run again")
        far = _shifted(logits, shown) - _shifted(want, shown)
        size = _shifted(want, shown).abs().amax()
        # Where the adapter knows of masks of -100, what was captured has them taken out.
        near = float(far.abs().amax()) <= self.replay.tolerance * float(size)
        if bool((shown & ~visible).any()) or not near:
            raise ReplayError("its logits are others when it is run again")
        self.checked = True


def _shifted(logits: Tensor, visible: Tensor) -> Tensor:
    """Without what a row's logits have in common: no softmax sees it, and some modules take it."""
    shown = torch.where(visible, logits, -torch.inf)
    top = torch.where(visible.any(-1), shown.amax(-1), 0.0)
    return torch.where(visible, logits - top[:, None], 0.0)


def _cut(t: Tensor) -> tuple[Tensor, Tensor]:
    return t[0, 0], t[0, 0].detach().requires_grad_(True)


def _in_order_of(call: TorchCall, matrix: Tensor, output: Tensor) -> Tensor:
    """What a product made of an attention matrix, its axes in the matrix's order."""
    if call.name != "einsum" or "." in call.args[0]:
        return output.movedim(call.channel_axis(matrix), -1)
    own, result = call.einsum_axes(matrix)
    order = [c for c in own if c in result] + [c for c in result if c not in own]
    return output.permute([result.index(c) for c in order])
