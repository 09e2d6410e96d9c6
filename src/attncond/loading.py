"""A model of the command line that can run: built, with the weights it was asked to have."""

from __future__ import annotations

import difflib
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from attncond import checkpoints
from attncond.checkpoints import CheckpointError, Tensors
from attncond.diagonal import decode, with_code
from attncond.methods import Spectral
from attncond.methods.parse import method_name
from attncond.sources import SourceError, build, library, one_line, split

__all__ = ["Loaded", "load", "restore"]

_GUESSING = 6.0  # seconds
# Parts of transformers' models that come after all attention: they may be new and untrained.
_ENDS = frozenset(("pooler", "classifier", "score", "qa_outputs", "lm_head", "cls"))


@dataclass
class Loaded:
    """A model, where its weights come from in words, and what is worth a note.

    ``corrections`` are the λ, s and C of a checkpoint that was saved from a conditioned model.
    """

    model: nn.Module
    weights: str
    notes: list[str] = field(default_factory=list)
    corrections: Tensors = field(default_factory=dict)


def load(
    source: str, checkpoint: Path | None = None, *, seed: int = 0, random: bool = False
) -> Loaded:
    """Build the model on the CPU and give it its weights.

    Those of ``checkpoint``; otherwise those in an hf folder, unless ``random`` is asked for;
    otherwise what its constructor gives with ``seed``.
    """
    prefix, rest = split(source)
    folder = Path(rest) if prefix == "hf" else None
    if folder is not None and folder.is_dir() and checkpoint is None and not random:
        checkpoint = checkpoints.in_folder(folder)
    torch.manual_seed(seed)
    if checkpoint is None:
        model = _with_numbers(source)
        own = prefix not in ("timm", "hf")
        words = f"as {source} makes them, seed {seed}" if own else f"random, seed {seed}"
        return Loaded(model, words)
    tensors, file = checkpoints.read(checkpoint)
    if prefix == "hf":
        sketch = build(source)
        if isinstance(sketch, library("transformers").PreTrainedModel):
            return _pretrained(sketch, tensors, file, source)
    return _plain(_with_numbers(source), tensors, file, source)


def _with_numbers(source: str) -> nn.Module:
    model = build(source, real=True)
    if any(p.is_meta for p in model.parameters()):
        raise SourceError(
            f"{source} makes a model on the meta device, where weights have no numbers: let it "
            "make one on the CPU"
        )
    return model


def _apart(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """The weights, and what a method added to them."""
    extra = {k: v for k, v in tensors.items() if checkpoints.is_correction(k)}
    return {k: v for k, v in tensors.items() if k not in extra}, extra


def _prefix_note(prefix: str) -> list[str]:
    return (
        [f"the names in the checkpoint begin with '{prefix}', which was left out"] if prefix else []
    )


def _pretrained(sketch: Any, tensors: Tensors, file: Path, source: str) -> Loaded:
    """transformers renames, merges and ties weights as it loads them: leave that to it."""
    base = getattr(sketch, "base_model_prefix", "")
    known = [*sketch.state_dict(), f"{base}.", *(f"{n}." for n, _ in _children(sketch, base))]
    tensors, prefix = checkpoints.strip(tensors, known)
    weights, extra = _apart(tensors)
    logging = library("transformers").logging
    logging.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # what it would say of keys is said below
    try:
        model, found = type(sketch).from_pretrained(
            None,
            config=sketch.config,
            state_dict=weights,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            dtype=torch.float32,
        )
    except Exception as error:
        raise CheckpointError(f"{file} does not load into {source}: {one_line(error)}") from error
    finally:
        logging.set_verbosity(verbosity)
    missing, shapes = sorted(found["missing_keys"]), sorted(found["mismatched_keys"])
    missing = [key for key in missing if key not in {k for k, *_ in shapes}]
    unexpected = sorted(found["unexpected_keys"])
    tops = {key.partition(".")[0] for key in known}
    heads = [key for key in unexpected if key.partition(".")[0] not in tops]
    notes = _prefix_note(prefix)
    ends = [key for key in missing if set(key.split(".")) & _ENDS]
    missing = [key for key in missing if key not in ends]
    if missing or shapes or len(heads) < len(unexpected):
        words = checkpoints.differences(missing, unexpected, shapes)
        raise CheckpointError(
            f"{file} is not a checkpoint of {source} ({type(sketch).__name__}): {words}. The "
            "config.json must be the one that was saved with the weights."
        )
    if heads:
        notes.append(
            f"{len(heads)} tensors of the checkpoint are of parts that {type(sketch).__name__} "
            f"does not have, and were left out: {', '.join(heads[:3])}"
        )
    if ends:
        notes.append(
            f"{len(ends)} tensors behind the attention are not in the checkpoint, and random: "
            f"{', '.join(ends[:3])}"
        )
    return Loaded(model, str(file), notes, extra)


def _children(model: nn.Module, base: str) -> list[tuple[str, nn.Module]]:
    inner = getattr(model, base, None) if base else None
    return list(inner.named_children()) if isinstance(inner, nn.Module) else []


def _plain(model: nn.Module, tensors: Tensors, file: Path, source: str) -> Loaded:
    tensors, prefix = checkpoints.strip(tensors, model.state_dict())
    weights, extra = _apart(tensors)
    notes = _prefix_note(prefix)
    if source.startswith("timm:"):
        notes += _fit_classifier(model, weights)
    own = model.state_dict(keep_vars=True)
    shapes = [(k, v.shape, own[k].shape) for k, v in weights.items() if k in own]
    shapes = [(k, a, b) for k, a, b in shapes if a != b]
    # Tied weights are in a file once, under one of their names.
    held = {id(own[k]) for k in weights if k in own}
    missing = [k for k in own if k not in weights and id(own[k]) not in held]
    unexpected = [k for k in weights if k not in own]
    if missing or unexpected or shapes:
        words = checkpoints.differences(missing, unexpected, shapes)
        guess = _guess(source, model, weights) if source.startswith("timm:") else ""
        raise CheckpointError(f"{file} is not a checkpoint of {source}: {words}.{guess}")
    model.load_state_dict(weights, strict=False, assign=any(p.is_meta for p in model.parameters()))
    return Loaded(model, str(file), notes, extra)


def _classifiers(model: nn.Module) -> tuple[str, ...]:
    config: Any = getattr(model, "pretrained_cfg", None) or {}
    names = config.get("classifier") or ()
    return (names,) if isinstance(names, str) else tuple(names)


def _fit_classifier(model: Any, weights: Tensors) -> list[str]:
    """Give the model as many classes as the checkpoint has; attention does not depend on them."""
    for name in _classifiers(model):
        held = weights.get(f"{name}.weight")
        classes = 0 if held is None else held.shape[0]
        others = any(k.startswith(f"{name}.") for k in weights)
        if classes != model.num_classes and (classes or not others):
            was = model.num_classes
            model.reset_classifier(classes)
            return [f"the checkpoint has {classes} classes, not {was}: so has the model now"]
    return []


def _guess(source: str, model: nn.Module, weights: Tensors) -> str:
    """Another timm model that the weights fit, if one of the same family is soon found."""
    timm = library("timm")
    name = source.partition(":")[2].partition(".")[0]
    family = timm.list_models(module=type(model).__module__.rpartition(".")[2])
    ratio = {n: difflib.SequenceMatcher(None, name, n).ratio() for n in family if n != name}
    end = time.monotonic() + _GUESSING
    for other in sorted(ratio, key=lambda n: -ratio[n]):
        if time.monotonic() > end:
            break
        try:
            with torch.device("meta"):
                built = timm.create_model(other, pretrained=False)
        except Exception:
            continue
        heads = tuple(f"{c}." for c in _classifiers(built))
        own = {k: v.shape for k, v in built.state_dict().items() if not k.startswith(heads)}
        if own == {k: v.shape for k, v in weights.items() if not k.startswith(heads)}:
            return f" It fits timm:{other}."
    return ""


def restore(model: nn.Module, corrections: Tensors, method: Spectral | None, weights: str) -> None:
    """Put the λ, s and C of a checkpoint into a model that was conditioned by the same method."""
    polar = any(key.endswith("_correction") for key in corrections)
    if method is None:
        raise CheckpointError(
            f"{weights} was saved from a conditioned model ({len(corrections)} tensors as "
            f"{next(iter(corrections))}). Pass the --method it was trained with, e.g. --method "
            f"{'polar' if polar else 'spectral'}, or call handle.fold() before you save it."
        )
    own = {k: v for k, v in model.state_dict().items() if checkpoints.is_correction(k)}
    corrections = {k: with_code(k, v) for k, v in corrections.items()}
    missing, unexpected = own.keys() - corrections.keys(), corrections.keys() - own.keys()
    both = own.keys() & corrections.keys()
    shapes = [(k, corrections[k].shape, own[k].shape) for k in both]
    shapes = [(k, a, b) for k, a, b in shapes if a != b]
    words = checkpoints.differences(missing, unexpected, shapes)
    if not words and any(
        # Which rows are shifted, and in which column: that is the scope and the roles.
        not torch.equal(_pattern(k, own[k]), _pattern(k, corrections[k]))
        for k in both
        if k.endswith(("_diagonal", "_shift"))
    ):
        words = "the rows that carry λ are others (scope or roles)"
    if words:
        raise CheckpointError(
            f"{weights} was conditioned in another way than '{method_name(method)}': {words}. Pass "
            "the --method it was trained with."
        )
    model.load_state_dict(corrections, strict=False)


def _pattern(key: str, value: torch.Tensor) -> torch.Tensor:
    return decode(value) if key.endswith("_diagonal") else value != 0
