"""Join sites and methods: condition a model in place, and hand back what undoes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from attncond._version import __version__
from attncond.effective import (
    check_calibrated,
    effective,
    full,
    install,
    loads,
    records,
    uninstall,
)
from attncond.errors import AlreadyConditionedError, ConditioningError, NotFoldableError
from attncond.inspection import inspect
from attncond.methods.spectral import Spectral
from attncond.selection import check_weight, select
from attncond.weights import Certificate, Weight, certify, like_parameter, refresh, solve

# Optimizer steps between two polar factors computed anew; in between they are tracked.
_ANCHOR_EVERY = 64


def condition(
    model: nn.Module,
    method: Spectral | Mapping[str, Any],
    *,
    skip_unsupported: bool = False,
) -> Handle:
    """Condition the attention of ``model`` in place and return its handle.

    Args:
        model: Any module; may be compiled, wrapped (DDP, FSDP2) or on the meta device.
        method: What to do, e.g. ``ac.Spectral()``, or the ``config`` of another handle.
        skip_unsupported: Leave attention that no adapter reads as it is, instead of raising.

    Raises:
        UnsupportedAttentionError: No attention, or some that no adapter reads.
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
    if done := [path or "the model" for path, m in model.named_modules() if records(m)]:
        raise AlreadyConditionedError(
            f"{done[0]} and {len(done) - 1} more are conditioned already. ac.handle(model) gives "
            "the handle: remove() takes "
            "it off, fold() makes it part of the weights."
        )
    weights = select(model, plan, method, skip_unsupported)
    solved = solve(weights)
    for weight, buffers in zip(weights, solved, strict=True):
        if not all(b.is_meta or torch.isfinite(b).all() for b in buffers.values()):
            raise ConditioningError(f"the correction of {weight} overflows {weight.raw.dtype}")
    try:
        for weight, buffers in zip(weights, solved, strict=True):
            install(weight.owner, weight.name, weight.correction, buffers)
    except BaseException:
        for weight in weights:
            uninstall(weight.owner)
        raise
    return Handle(model, weights)


def handle(model: nn.Module) -> Handle:
    """The handle of a model that is conditioned already: a deep copy, a loaded or an EMA model."""
    weights = [
        Weight(path, module, name, correction)
        for path, module in model.named_modules()
        for name, correction in records(module).items()
    ]
    if len({w.correction.method for w in weights}) > 1:
        raise ConditioningError(
            "parts of this model were conditioned in different ways; ask for the handle of each "
            "part, e.g. ac.handle(model.encoder)"
        )
    if not weights:
        raise ConditioningError("this model is not conditioned; ac.condition(model, ...) does that")
    return Handle(model, weights)


class Handle:
    """Holds on to a conditioned model. Made by :func:`condition` and :func:`handle`."""

    def __init__(self, model: nn.Module, weights: list[Weight]) -> None:
        self.model = model
        self.method = weights[0].correction.method
        self._weights = weights
        self._ended: str | None = None
        self._hooks: dict[int, Any] = {}

    def __repr__(self) -> str:
        state = self._ended or f"{len(self._weights)} weights"
        return f"<attncond.Handle {self.method} on {type(self.model).__name__}: {state}>"

    @property
    def config(self) -> dict[str, Any]:
        """Plain data that rebuilds the method: ``ac.condition(model, config)``; for a sidecar."""
        return {
            "attncond": __version__,
            "method": type(self.method).__name__,
            "parameters": asdict(self.method),
        }

    def attach(self, optimizer: torch.optim.Optimizer) -> Handle:
        """Let the polar factor follow the weights: refresh it after ``optimizer.step()``.

        Only the polar correction has something to follow; elsewhere this does nothing. Steps that
        a gradient scaler skips do not count.
        """
        self._check_alive()
        if self.method.correction != "polar":
            return self
        # accelerate's wrapper keeps the real optimizer, whose hooks are the ones that run.
        inner = getattr(optimizer, "optimizer", optimizer)
        if not isinstance(inner, torch.optim.Optimizer):
            raise ConditioningError(
                f"attach needs a torch.optim.Optimizer, not {type(optimizer).__name__}"
            )
        if id(inner) in self._hooks:
            raise ConditioningError("this optimizer is attached already")
        trained = {id(p) for group in inner.param_groups for p in group["params"]}
        followed = [w for w in self._weights if id(w.raw) in trained]
        if not followed:
            raise ConditioningError(
                "this optimizer trains none of the conditioned weights; was it built for another "
                "copy of the model?"
            )
        hook = torch.compiler.disable(_Follower(followed))
        self._hooks[id(inner)] = inner.register_step_post_hook(hook)
        return self

    @torch.no_grad()
    def calibrate(self) -> None:
        """Choose λ, s and C anew from the weights as they are now.

        For models conditioned on the meta device, and after loading a stock checkpoint.
        """
        self._check_alive()
        for weight in self._weights:
            check_weight(self.model, weight)
        for weight, buffers in zip(self._weights, solve(self._weights), strict=True):
            install(weight.owner, weight.name, weight.correction, buffers)

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring the polar factor up to date with the weights; λI has nothing to refresh."""
        self._check_alive()
        if self.method.correction == "polar":
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

        Parameter objects and state-dict keys are the stock model's afterwards.
        """
        self._check_alive()
        folded: dict[int, tuple[Weight, Tensor]] = {}
        for weight in self._weights:
            if weight.raw.is_meta:
                raise ConditioningError(
                    "weights on the meta device cannot be folded: load them first"
                )
            check_calibrated(weight.owner)
            value = effective(weight.owner, weight.name, full(weight.raw))
            first, other = folded.setdefault(id(weight.raw), (weight, value))
            if not torch.equal(value, other):
                raise NotFoldableError(
                    f"{weight} and {first} are one parameter with two corrections (other heads, or "
                    "tied after conditioning), which no single weight can hold; untie them first"
                )
        for weight, value in folded.values():
            if not torch.isfinite(value).all():
                raise ConditioningError(
                    f"the effective {weight} is not finite, so nothing was folded; remove() gives "
                    "the raw weights back"
                )
        before = [(w.raw, w.raw.detach().clone()) for w, _ in folded.values()]
        buffers = [{**w.owner._buffers} for w in self._weights]
        try:
            for weight, value in folded.values():
                weight.raw.copy_(like_parameter(value, weight.raw))
            self._end("folded")
        except BaseException:
            for raw, value in before:
                raw.copy_(value)
            for weight, kept in zip(self._weights, buffers, strict=True):
                install(weight.owner, weight.name, weight.correction, {})
                weight.owner._buffers.update(kept)
            self._ended = None
            raise

    def remove(self) -> None:
        """Take the conditioning off: the stock model with its raw weights."""
        self._check_alive()
        self._end("removed")

    def _end(self, how: str) -> None:
        for weight in self._weights:
            uninstall(weight.owner)
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._ended = how

    def _check_alive(self) -> None:
        if self._ended:
            raise ConditioningError(
                f"this handle was {self._ended}: the model is a stock model again, and "
                "ac.condition(model, ...) conditions it anew"
            )
        if any(not records(w.owner) for w in self._weights):
            self._ended = "overtaken (another handle of the same model removed or folded it)"
            self._check_alive()


class _Follower:
    """What an optimizer calls after each step: refresh the polar factors of what it trains."""

    def __init__(self, weights: list[Weight]) -> None:
        self.weights = weights
        self.every = weights[0].correction.method.refresh_every
        self.age: int | None = None
        self.seen_loads = -1

    def __call__(self, *_: Any) -> None:
        # Another handle may have folded or removed some of them, or all.
        weights = [w for w in self.weights if records(w.owner)]
        if not weights:
            return
        first = weights[0]
        if self.age is None or self.seen_loads != loads(first.owner):
            # Once, and after a checkpoint was loaded; reading it every step would stall a GPU.
            self.age = int(first.buffer("age").item())
            self.seen_loads = loads(first.owner)
        self.age += 1
        torch._foreach_add_([weight.buffer("age") for weight in weights], 1)
        if self.age % self.every == 0:
            anchor = self.age // _ANCHOR_EVERY != (self.age - self.every) // _ANCHOR_EVERY
            refresh(weights, "anchor" if anchor else "track")


def _method(method: Spectral | Mapping[str, Any]) -> Spectral:
    if isinstance(method, Mapping):
        if method.get("method") != "Spectral" or not isinstance(method.get("parameters"), Mapping):
            raise ConditioningError(
                "a config needs 'method': 'Spectral' and 'parameters'; handle.config writes it"
            )
        try:
            return Spectral(**method["parameters"])
        except TypeError as error:
            raise ConditioningError(f"this config does not fit this version: {error}") from error
    if not isinstance(method, Spectral):
        given = f"the class {method.__name__}" if isinstance(method, type) else repr(method)
        raise ConditioningError(f"method must be an instance such as ac.Spectral(), not {given}")
    return method
