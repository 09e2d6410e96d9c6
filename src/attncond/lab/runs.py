"""One training, as far as it has come: its configuration, its metrics, its result, its curves."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from attncond.errors import ConditioningError
from attncond.lab.curves import Curves
from attncond.methods import Method, Spectral
from attncond.methods.parse import method_name, parse_method

__all__ = ["ADDED", "ResultsError", "Run", "State", "flat", "number"]

State = Literal["finished", "diverged", "running", "stopped", "broken"]
_ARCHITECTURES = {"davit": "DaViT-B", "deit": "DeiT-B", "swin": "Swin-B", "xcit": "XCiT-M"}
# What changes no result, so that runs which differ in it are seeds of one experiment.
_IRRELEVANT = (
    *("recipe", "variant", "seed", "watch", "data.workers"),
    *("train.checkpoint_every", "train.evaluate_every"),
)
# Keys that runs of earlier versions lack, with the value that they were made with.
ADDED = {"optim.output_lr": 1.0}


class ResultsError(ConditioningError):
    """Runs could not be found or read, or are not those that a table or figure needs."""


@dataclass(frozen=True)
class Run:
    """One training, as far as it has come."""

    source: str  # its folder, or the file that it was collected into
    config: Mapping[str, Any]  # as it was written: perhaps by another version of the lab
    metrics: tuple[Mapping[str, Any], ...]
    result: Mapping[str, Any] | None
    state: State
    notes: tuple[str, ...] = ()
    collected: Curves | None = field(default=None, repr=False)
    shared: tuple[str, ...] = ()  # recipes that have run the same

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the configuration, ``schedule.epochs`` for one."""
        found: Any = self.config
        for part in key.split("."):
            if not isinstance(found, Mapping) or part not in found:
                return default
            found = found[part]
        return found

    def measured(self, key: str) -> float | None:
        """A finite number of the result, or None."""
        return number((self.result or {}).get(key))

    @property
    def recipe(self) -> str:
        return str(self.get("recipe", "?"))

    @property
    def form(self) -> str:
        return str(self.get("form", "?"))

    @property
    def variant(self) -> str:
        return str(self.get("variant", "?"))

    @property
    def seed(self) -> int:
        seed = number(self.get("seed"))
        return -1 if seed is None else int(seed)

    @property
    def epochs(self) -> int:
        return int(number(self.get("schedule.epochs")) or 0)

    @property
    def name(self) -> str:
        return f"{self.recipe}/{self.form}/{self.variant}/seed{self.seed}"

    @property
    def architecture(self) -> str:
        """The paper's column: ViT-B, DeiT-B, Swin-B, XCiT-M or DaViT-B; else the model's name."""
        model = str(self.get("model.name", "?"))
        for prefix, known in _ARCHITECTURES.items():
            if model.startswith(prefix):
                return known
        return "ViT-B" if model.startswith("vit") else model

    @property
    def data(self) -> str:
        """The data set in words, as the run itself told it."""
        told = [(self.result or {}).get(key) for key in ("data", "data_note", "note")]
        texts = [text for text in told if isinstance(text, str) and text]
        return texts[0] if texts else str(self.get("data.name", "?"))

    @cached_property
    def methods(self) -> tuple[Method, ...]:
        """What the model was conditioned with; a target that is the default's is not said."""
        found = (parse_method(str(text)) for text in self.get("methods") or ())
        default = Spectral().target
        return tuple(
            replace(m, kappa=None) if isinstance(m, Spectral) and m.kappa == default else m
            for m in found
        )

    @cached_property
    def experiment(self) -> str:
        """The same text for runs that differ in the seed alone, and in what changes no result.

        Recipes share variants: what one of them has run counts for the others.
        """
        methods = [method_name(method) for method in self.methods]  # one method, many spellings
        return json.dumps({**flat(self.config), "methods": methods}, sort_keys=True)

    @cached_property
    def curves(self) -> Curves:
        """The Monitor's record, averaged over the layers."""
        if self.collected is not None:
            return self.collected
        return Curves.read(Path(self.source) / "history.jsonl")

    @property
    def steps_per_epoch(self) -> float | None:
        """By which the Monitor's steps become epochs."""
        points = [self.result or {}, *reversed(self.metrics)]
        for point in points:
            steps = number(point.get("steps", point.get("step")))
            epochs = number(point.get("epochs", point.get("epoch")))
            if steps and epochs:
                return steps / epochs
        return None

    def accuracy(self, on: str = "test") -> float | None:
        """In percent, at the end; None unless the run has ended well."""
        return self.measured(f"{on}_accuracy") if self.state == "finished" else None

    def epochs_to(self, level: float) -> float | None:
        """The first evaluation whose validation accuracy is at least ``level``."""
        for point in self.metrics:
            accuracy = number(point.get("validation_accuracy"))
            if accuracy is not None and accuracy >= level:
                return number(point.get("epoch"))
        return None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with curves in place of the Monitor's whole record."""
        return {
            "name": self.name,
            "state": self.state,
            "notes": list(self.notes),
            **({"shared": list(self.shared)} if self.shared else {}),
            "result": {k: v for k, v in (self.result or {}).items() if k != "config"} or None,
            "config": dict(self.config),
            "metrics": [dict(point) for point in self.metrics],
            "curves": self.curves.to_dict(),
        }


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A configuration by dotted keys, without what changes no result.

    >>> flat({"seed": 1, "optim": {"lr": 0.001}})
    {'optim.lr': 0.001}
    >>> flat({"optim": {"clip": None, "output_lr": 1.0}})
    {'optim.clip': None}
    """
    found: dict[str, Any] = {}
    for key, value in config.items():
        name = prefix + key
        if name in _IRRELEVANT or ADDED.get(name, ...) == value:
            continue
        if isinstance(value, Mapping):
            found |= flat(value, f"{name}.")
        else:
            found[name] = value
    return found
