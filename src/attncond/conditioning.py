"""Join sites and methods: condition a model in place, and hand back what undoes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from attncond._version import __version__
from attncond.corrections import records
from attncond.effective import install, kept, recast, uninstall
from attncond.errors import AlreadyConditionedError, ConditioningError
from attncond.folding import folded_heads, folded_weights, overwritten
from attncond.following import follow
from attncond.heads import HeadMethod, add, conditioned_heads, drop
from attncond.inspection import Plan, inspect
from attncond.methods import METHODS, Method, Precondition, RemoveGap, Spectral
from attncond.selection import check_weight, select, select_heads
from attncond.weights import Certificate, Weight, certify, refresh, solve


def condition(
    model: nn.Module,
    method: Method | Mapping[str, Any],
    *,
    skip_unsupported: bool = False,
) -> Handle:
    """Condition the attention of ``model`` in place and return its handle.

    Args:
        model: Any module; may be compiled, wrapped (DDP, FSDP2) or on the meta device.
        method: What to do: ``ac.Spectral()``, ``ac.RemoveGap()``, ``ac.Precondition()``, or the
            ``config`` of another handle. Different methods compose by calling again; whatever the
            order of the calls, the weights come first, then the gap, then the preconditioner.
        skip_unsupported: Leave attention that cannot be conditioned as it is, instead of raising.

    Raises:
        UnsupportedAttentionError: No attention, or some that this method cannot reach.
        AlreadyConditionedError: The method is on the model already.
        ConditioningError: Weights that cannot be conditioned (not finite, zero, quantised, ...).

    Whatever it raises, the model is as it was.

    >>> import attncond as ac
    >>> model = nn.TransformerEncoderLayer(32, 4)
    >>> handle = ac.condition(model, ac.Spectral())
    >>> max(c.kappa for c in handle.certificates()) <= 2
    True
    >>> handle.fold()
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"condition needs a torch.nn.Module, not {type(model).__name__}")
    method = _method(method)
    plan = inspect(model)
    if done := [path or "the model" for path in _carriers(model, type(method))]:
        carry = f"and {len(done) - 1} more carry" if len(done) > 1 else "carries"
        raise AlreadyConditionedError(
            f"{done[0]} {carry} {(name := type(method).__name__)} already. "
            f"ac.handle(model, ac.{name}) gives the handle: remove() takes it off, fold() makes it "
            "part of the weights where that is possible."
        )
    if not isinstance(method, Spectral):
        return Handle(model, method, heads=_condition_heads(model, plan, method, skip_unsupported))
    weights = select(model, plan, method, skip_unsupported)
    solved = solve(weights)
    try:
        for weight, buffers in zip(weights, solved, strict=True):
            install(weight.owner, weight.name, weight.correction, buffers)
    except BaseException:
        for weight in weights:
            uninstall(weight.owner)
        raise
    return Handle(model, method, weights=weights)


def _condition_heads(
    model: nn.Module, plan: Plan, method: HeadMethod, skip_unsupported: bool
) -> list[nn.Module]:
    sites = select_heads(model, plan, method, skip_unsupported)
    counts = Counter(id(site.module) for site in sites if not site.optional)
    unique = {id(site.module): site for site in sites}.values()
    try:
        for site in unique:
            add(site, method, counts[id(site.module)])
            recast(site.module)
    except BaseException:
        for site in unique:
            _drop(site.module, type(method))
        raise
    return [site.module for site in unique]


def _drop(module: nn.Module, method: type[HeadMethod]) -> None:
    drop(module, method)
    recast(module)


def _on(module: nn.Module, method: type[Method]) -> list[Method]:
    """The methods of one kind on a module itself: one for each of its weights, or for its heads."""
    if method is Spectral:
        return [correction.method for correction in records(module).values()]
    heads = conditioned_heads(module)
    return [m for m in heads.methods() if type(m) is method] if heads else []


def _carriers(model: nn.Module, method: type[Method]) -> dict[str, nn.Module]:
    """The modules that carry a method, by their paths."""
    return {path: m for path, m in model.named_modules() if _on(m, method)}


def handle(model: nn.Module, method: type[Method] | None = None) -> Handle:
    """The handle of a model that is conditioned already: a deep copy, a loaded or an EMA model.

    ``method`` says which, where several are on: ``ac.handle(model, ac.RemoveGap)``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"handle needs a torch.nn.Module, not {type(model).__name__}")
    on = [m for m in METHODS.values() if _carriers(model, m)]
    if not on:
        raise ConditioningError("this model is not conditioned; ac.condition(model, ...) does that")
    names = " and ".join(m.__name__ for m in on)
    if method is None and len(on) > 1:
        raise ConditioningError(
            f"this model carries {names}: say which one you mean, e.g. "
            f"ac.handle(model, ac.{on[0].__name__})"
        )
    method = method or on[0]
    if method not in on:
        wanted = getattr(method, "__name__", repr(method))
        raise ConditioningError(f"this model carries {names}, not {wanted}")
    carriers = _carriers(model, method)
    weights: list[Weight] = []
    if method is Spectral:
        weights = [
            Weight(path, module, name, correction)
            for path, module in carriers.items()
            for name, correction in records(module).items()
        ]
    found = [each for module in carriers.values() for each in _on(module, method)]
    if len(set(found)) > 1:
        raise ConditioningError(
            "parts of this model were conditioned in different ways; ask for the handle of each "
            "part, e.g. ac.handle(model.encoder)"
        )
    heads = () if method is Spectral else list(carriers.values())
    return Handle(model, found[0], weights=weights, heads=heads)


class Handle:
    """Holds on to a conditioned model. Made by :func:`condition` and :func:`handle`.

    A handle is of one method: that of :class:`Spectral` changes weights, the others heads.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        *,
        weights: Sequence[Weight] = (),
        heads: Sequence[nn.Module] = (),
    ) -> None:
        self.model = model
        self.method = method
        self._weights = list(weights)
        self._heads = list(heads)
        self._ended: str | None = None
        self._hooks: list[Any] = []

    def __repr__(self) -> str:
        count = f"{len(self._weights)} weights" if self._weights else f"{len(self._heads)} modules"
        state = self._ended or count
        return f"<attncond.Handle {self.method} on {type(self.model).__name__}: {state}>"

    @property
    def config(self) -> dict[str, Any]:
        """Plain data that rebuilds the method: ``ac.condition(model, config)``; for a sidecar."""
        return {
            "attncond": __version__,
            "method": type(self.method).__name__,
            "parameters": asdict(self.method),
        }

    @property
    def _follows(self) -> bool:
        return isinstance(self.method, Spectral) and self.method.correction == "polar"

    def attach(self, optimizer: torch.optim.Optimizer) -> Handle:
        """Let the polar factor follow the weights: refresh it after ``optimizer.step()``.

        Only the polar correction has something to follow; elsewhere this does nothing. Steps that
        a gradient scaler skips do not count; a fused optimizer skips them itself, so its steps do.
        """
        self._check_alive()
        if self._follows:
            self._hooks.append(follow(optimizer, self._weights))
        return self

    @torch.no_grad()
    def calibrate(self) -> None:
        """Choose λ, s and C anew from the weights as they are now.

        For models conditioned on the meta device, and after loading a stock checkpoint.
        """
        self._check_alive()
        for weight in self._weights:
            check_weight(self.model, weight)
        solved = solve(self._weights)
        with kept(w.owner for w in self._weights):
            for weight, buffers in zip(self._weights, solved, strict=True):
                install(weight.owner, weight.name, weight.correction, buffers)

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring the polar factor up to date with the weights; λI has nothing to refresh."""
        self._check_alive()
        if self._follows:
            try:
                refresh(self._weights, "scratch")
            except ValueError as error:
                raise ConditioningError(f"the polar factor cannot be refreshed: {error}") from error

    def certificates(self, *, exact: bool = True) -> list[Certificate]:
        """A row for each conditioned matrix: the bound on its κ, and its κ unless ``exact=False``.

        λ stays while the weights grow: a bound may become infinite in training, κ itself may not.
        """
        self._check_alive()
        rows: list[Certificate] = []
        with torch.no_grad():
            for weight in self._weights:
                rows += certify(weight, exact)
        return rows

    @torch.no_grad()
    def fold(self) -> None:
        """Write the effective weights into the parameters: a stock model with the same outputs.

        Parameter objects and state-dict keys are the stock model's afterwards. Only this handle's
        method is folded; others stay. What a head does with its output is no weight, so that
        Precondition cannot be folded, nor RemoveGap, save in attention over channels
        (cross-covariance), where the mean of the values is one of the rows of W_V.
        """
        self._check_alive()
        if not isinstance(self.method, Spectral):
            plan = inspect(self.model)  # anew: what held W_V may have been exchanged since
            with overwritten(folded_heads(self.model, self._heads, plan, self.method)):
                pass  # to heads that still take the mean off, the new values are the same
            self._end("folded")
            return
        try:
            with (
                overwritten(folded_weights(self._weights)),
                kept(w.owner for w in self._weights),
            ):
                self._end("folded")
        except BaseException:
            self._ended = None
            raise

    def remove(self) -> None:
        """Take the conditioning off: the stock model with its raw weights."""
        self._check_alive()
        self._end("removed")

    def _end(self, how: str) -> None:
        for weight in self._weights:
            uninstall(weight.owner)
        if not isinstance(self.method, Spectral):
            for module in self._heads:
                _drop(module, type(self.method))
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._ended = how

    def _check_alive(self) -> None:
        if self._ended:
            raise ConditioningError(
                f"this handle was {self._ended}: the model is a stock model again, and "
                "ac.condition(model, ...) conditions it anew"
            )
        carriers = {id(m) for m in _carriers(self.model, type(self.method)).values()}
        owners = [w.owner for w in self._weights] + self._heads
        left = sum(id(owner) in carriers for owner in owners)
        if 0 < left < len(owners):
            name = type(self.method).__name__
            raise ConditioningError(
                f"{len(owners) - left} of the {len(owners)} places that this handle conditioned "
                "carry nothing any more (modules that were exchanged, or a part with a handle of "
                f"its own); ac.handle(model, ac.{name}) gives the handle of those that are left"
            )
        if owners and not left:
            self._ended = "overtaken (another handle of the same model removed or folded it)"
            self._check_alive()


def _method(method: Method | Mapping[str, Any]) -> Method:
    if isinstance(method, Mapping):
        cls = METHODS.get(str(method.get("method")))
        if cls is None or not isinstance(method.get("parameters"), Mapping):
            raise ConditioningError(
                f"a config needs 'method' (one of {', '.join(METHODS)}) and 'parameters'; "
                "handle.config writes it"
            )
        try:
            return cls(**method["parameters"])
        except TypeError as error:
            raise ConditioningError(f"this config does not fit this version: {error}") from error
    if not isinstance(method, Spectral | Precondition | RemoveGap):
        given = f"the class {method.__name__}" if isinstance(method, type) else repr(method)
        raise ConditioningError(f"method must be an instance such as ac.Spectral(), not {given}")
    return method
