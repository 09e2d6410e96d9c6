"""Measure the attention of a model on a batch: ``report = diagnose(model, batch)``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attncond.diagnose.compare import Change, Comparison
from attncond.diagnose.findings import CODES, Finding
from attncond.diagnose.guard import unchanged, unwrapped
from attncond.diagnose.progress import Clock
from attncond.diagnose.report import Report, Row, Spectrum
from attncond.diagnose.run import Diagnosis, Options, choose_sites
from attncond.errors import ConditioningError, DiagnosisError, UnsupportedAttentionError
from attncond.inspection import inspect, unsupported_table
from attncond.sites import Site

__all__ = ["CODES", "Change", "Comparison", "Finding", "Report", "Row", "Spectrum", "diagnose"]

Batch = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any] | Callable[[nn.Module], Any]
Loss = Callable[[Any], Tensor] | str


def diagnose(
    model: nn.Module,
    batch: Batch | None = None,
    *,
    layers: Iterable[int | str] | None = None,
    heads: Iterable[int] | None = None,
    samples: int | None = 4,
    tokens: int | None = 32,
    jacobian: bool = True,
    weights: bool = True,
    loss: Loss | None = None,
    time_budget: float | None = None,
    progress: bool | None = None,
) -> Report:
    """Measure how well conditioned the attention of ``model`` is, on one batch.

    The model runs once, in eval mode; afterwards it is as it was, whatever happens.

    Args:
        model: Any model that :func:`attncond.inspect` reads; may be compiled or conditioned.
        batch: Its input: a tensor, a tuple of positional or a dict of keyword arguments, or a
            function ``run(model)``. Tensors are moved to the model's device. None measures the
            weights alone.
        layers: Which attentions: numbers in the order of ``inspect``, or patterns of paths
            (``"blocks.1*"``). None is all.
        heads: Which query heads; None is all.
        samples: Items of the batch (windows, where attention is in windows) that attention
            matrices are measured for at the most; None is all.
        tokens: Tokens that a Jacobian is computed with at the most, evenly spaced; None is all,
            which is slow: its cost grows with their cube.
        jacobian: Whether to compute the heads' Jacobians.
        weights: Whether to compute the spectra of the weights.
        loss: For norms of gradients: a function of the model's output, ``"sum"`` of it, or
            ``"output"`` for its own ``.loss``. None leaves them out.
        time_budget: Seconds after which no new measurement is started; the report notes what is
            missing. The forward pass itself is not cut short.
        progress: A progress bar; None shows one if rich is installed and stderr is a terminal.

    Raises:
        UnsupportedAttentionError: The model has no attention that ``inspect`` can read.
        DiagnosisError: The model cannot run on the batch, or memory does not suffice.

    >>> import attncond as ac
    >>> report = ac.diagnose(nn.TransformerEncoderLayer(16, 2), torch.randn(5, 3, 16))
    >>> [(row.path, row.head) for row in report.rows]  # the whole attention, and its heads
    [('self_attn', None), ('self_attn', 0), ('self_attn', 1)]
    >>> 0 < report.rows[0].values["entropy_relative"] <= 1
    True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"diagnose needs a torch.nn.Module, not {type(model).__name__}")
    model = unwrapped(model)
    plan = inspect(model)
    if not plan.sites:
        unread = f"\n\n{unsupported_table(plan.unsupported)}" if plan.unsupported else ""
        raise UnsupportedAttentionError(
            f"{type(model).__name__} has no attention to diagnose.{unread}"
        )
    if any(p.is_meta for p in model.parameters()):
        raise DiagnosisError("the model is on the meta device and holds no numbers: load weights")
    _check_positive(samples=samples, tokens=tokens, time_budget=time_budget)
    sites = choose_sites(plan.sites, layers)
    heads = None if heads is None else frozenset(heads)
    most = max((site.heads for _, site in sites), default=0)
    for head in heads or ():
        if head not in range(most):
            raise DiagnosisError(f"heads: there is no head {head!r}, the last one is {most - 1}")
    options = Options(heads, samples, tokens, jacobian, loss is not None)
    diagnosis = Diagnosis(model, sites, options, Clock(time_budget, progress))
    with _undisturbed(diagnosis):
        if weights:
            diagnosis.measure_weights()
        if batch is not None:
            _forward(model, batch, loss, diagnosis)
            diagnosis.measure_jacobians()
    return diagnosis.report(plan.unsupported)


def begin(
    model: nn.Module,
    sites: Sequence[tuple[int, Site]],
    batch: Batch,
    samples: int | None,
    tokens: int | None,
) -> Diagnosis:
    """Run the model as `diagnose` does, and leave the Jacobians for later: they take longest.

    ``measure_jacobians`` of what is returned computes them on the CPU, in any thread, as they are
    now, whatever becomes of the model. ``tokens`` None leaves them out.
    """
    _check_positive(samples=samples, tokens=tokens)
    options = Options(None, samples, tokens, tokens is not None, False)
    diagnosis = Diagnosis(model, list(sites), options, Clock(None, False))
    with _undisturbed(diagnosis):
        _forward(model, batch, None, diagnosis)
        diagnosis.take_jobs()
    return diagnosis


def _check_positive(**numbers: float | None) -> None:
    for name, number in numbers.items():
        if number is not None and not number > 0:
            raise ValueError(f"{name} must be above 0 or None, not {number!r}")


@contextmanager
def _undisturbed(diagnosis: Diagnosis) -> Iterator[None]:
    """Measure a model that stays as it is."""
    try:
        with unchanged(diagnosis.model), torch.inference_mode(False), diagnosis.clock:
            yield
    except torch.OutOfMemoryError as error:
        raise DiagnosisError(
            "the device ran out of memory. Take a smaller batch, fewer samples= or tokens=, "
            "jacobian=False, or some layers= at a time."
        ) from error


def _forward(model: nn.Module, batch: Batch, loss: Loss | None, diagnosis: Diagnosis) -> None:
    """Run the model on the batch, watched; and the gradients of the loss, if there is one."""
    weights = diagnosis.raw_weights() if loss is not None else []
    for weight in weights:
        weight.requires_grad_(True)
    with torch.set_grad_enabled(loss is not None):
        with diagnosis.watch():
            try:
                output = _call(model, _moved(batch, model))
            except (torch.OutOfMemoryError, ConditioningError):
                raise
            except Exception as error:
                if diagnosis.measuring:
                    raise
                raise DiagnosisError(_advice(model, batch, error)) from error
        if loss is not None:
            value = _loss(output, loss)
            if _is_reentrant(value):
                raise DiagnosisError(
                    "the model checkpoints with use_reentrant=True, which keeps the gradients of "
                    "its weights from anyone but loss.backward(). Turn its checkpointing off for "
                    "the diagnosis, pass use_reentrant=False, or leave out loss=."
                )
            grads = torch.autograd.grad(value, weights, allow_unused=True)
            diagnosis.measure_gradients(weights, grads)


def _is_reentrant(value: Tensor) -> bool:
    """Whether a reentrant checkpoint lies on the way back from here."""
    todo, seen = [value.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return True
        seen.add(node)
        todo += [before for before, _ in node.next_functions]
    return False


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return model(batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return batch(model)


def _moved(batch: Any, model: nn.Module) -> Any:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {k: _moved(v, model) for k, v in batch.items()}
    if type(batch) in (tuple, list):
        return type(batch)(_moved(v, model) for v in batch)
    return batch


def _advice(model: nn.Module, batch: Any, error: Exception) -> str:
    what = f"{type(model).__name__} cannot run on this batch ({_described(batch)}): "
    what += f"{type(error).__name__}: {error}"
    if isinstance(batch, tuple | list):
        what += "\nA tuple is unpacked into arguments: where it holds labels too, pass batch[0]."
    elif isinstance(batch, Tensor):
        what += "\nPass what model(...) takes; a dict becomes keyword arguments."
    elif isinstance(batch, Mapping):
        what += "\nA dict becomes keyword arguments: (batch,) passes it as it is."
    elif not callable(batch):
        what += "\nA batch is a tensor, a tuple, a dict, or a function of the model."
    return what


def _described(batch: Any) -> str:
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')} {tuple(batch.shape)}"
    if isinstance(batch, Mapping):
        return ", ".join(f"{k}: {_described(v)}" for k, v in batch.items())
    if isinstance(batch, tuple | list):
        return "; ".join(_described(v) for v in batch)
    return type(batch).__name__


def _loss(output: Any, loss: Loss) -> Tensor:
    value: Any = None
    if callable(loss):
        value = loss(output)
    elif loss == "sum":
        value = _first(output).sum()
    elif loss == "output":
        value = getattr(output, "loss", None)
        if value is None:
            raise DiagnosisError("the model's output has no loss: give labels, or loss=function")
    else:
        raise DiagnosisError(f"loss must be a function, 'sum' or 'output', not {loss!r}")
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        raise DiagnosisError("the loss must be one number that depends on the model's weights")
    return value


def _first(output: Any) -> Tensor:
    """The first tensor of numbers in what a model returns."""
    if isinstance(output, Tensor) and output.is_floating_point():
        return output
    parts = output.values() if isinstance(output, Mapping) else output
    if isinstance(output, Mapping | tuple | list):
        for part in parts:
            try:
                return _first(part)
            except DiagnosisError:
                continue
    raise DiagnosisError("the model returned no tensor to sum: give loss=function of its output")
