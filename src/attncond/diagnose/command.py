"""What the command line's diagnose does: condition, measure, compare, write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from attncond.conditioning import condition
from attncond.diagnose import Report, diagnose
from attncond.diagnose.inputs import Inputs
from attncond.errors import DiagnosisError
from attncond.inspection import inspect
from attncond.loading import Loaded, restore
from attncond.methods import Method, Spectral
from attncond.methods.parse import method_name

__all__ = ["Job", "check_comparable", "checked_output", "read_earlier", "write"]


class Job:
    """One model and one input, measured as often as it takes."""

    def __init__(
        self, source: str, loaded: Loaded, inputs: Inputs, options: dict[str, Any], *, own: bool
    ) -> None:
        self.source, self.loaded, self.inputs = source, loaded, inputs
        self.options, self.own = options, own

    def run(self, methods: Sequence[Method], before: Report | None) -> tuple[Report, Report | None]:
        """The report, and what to compare it with: ``before``, or the model without methods."""
        # Conditioned first: what cannot be is told before anything takes its time.
        handles = [condition(self.loaded.model, method) for method in methods]
        if self.loaded.corrections:
            spectral = next((m for m in methods if isinstance(m, Spectral)), None)
            restore(self.loaded.model, self.loaded.corrections, spectral, self.loaded.weights)
        report = self._measure(methods)
        if handles and before is None:
            for handle in reversed(handles):
                handle.remove()
            before = self._measure(())
        return report, before

    def _measure(self, methods: Sequence[Method]) -> Report:
        try:
            report = diagnose(self.loaded.model, self.inputs.batch, **self.options)
        except DiagnosisError as error:
            if self.own or "cannot run on this batch" not in str(error):
                raise
            raise DiagnosisError(
                f"{error}\nThis input was made by attncond. Give one of your own with --batch "
                "MODULE:FUNCTION, or measure the weights alone with --weights-only."
            ) from error
        info = {
            "source": self.source,
            "weights": self.loaded.weights,
            "input": self.inputs.words,
            "method": " + ".join(method_name(m) for m in methods) or None,
        }
        notes = (*report.notes, *self.loaded.notes, *self.inputs.notes)
        return replace(report, info={**report.info, **info}, notes=notes)


def checked_output(path: Path) -> Path:
    """Refuse before the work what would fail after it."""
    if path.suffix.lower() not in (".html", ".htm", ".json"):
        raise DiagnosisError(f"--out takes a name that ends in .html or .json, not '{path}'")
    if path.is_dir():
        raise DiagnosisError(f"{path} is a folder: --out takes the name of a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        probe = path.with_name(f".{path.name}.probe")
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise DiagnosisError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def write(path: Path, report: Report, before: Report | None) -> Path:
    """A page or JSON, as the name says; whole or not at all."""
    try:
        if path.suffix.lower() == ".json":
            return report.to_json(path)
        return report.to_html(path, before=before)
    except OSError as error:
        raise DiagnosisError(f"cannot write {path}: {error.strerror or error}") from error


def read_earlier(path: Path) -> Report:
    """A report that was written as JSON."""
    try:
        return Report.from_json(path)
    except OSError as error:
        raise DiagnosisError(f"cannot read {path}: {error.strerror or error}") from error


def check_comparable(model: nn.Module, before: Report, path: Path | None) -> None:
    """Before the work: two reports without a common attention cannot be compared."""
    paths = {site.path for site in inspect(model)}
    known = {row.path for row in before.rows}
    if not paths & known:
        raise DiagnosisError(
            f"{path} is a report of another model: it speaks of {', '.join(sorted(known)[:2])}, "
            f"..., and this one has {', '.join(sorted(paths)[:2]) or 'no attention'}, ..."
        )
