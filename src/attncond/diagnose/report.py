"""The outcome of a diagnosis: rows of numbers, findings in words, JSON, and tables."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attncond.diagnose.columns import COLUMNS, IDENTITY, TEXT
from attncond.diagnose.compare import Comparison, check_report, compare
from attncond.diagnose.findings import Finding, find
from attncond.errors import DiagnosisError
from attncond.files import dumps, spelled_out, unpacking, write_text
from attncond.inspection import table

if TYPE_CHECKING:
    from pandas import DataFrame

    from attncond.diagnose.page import History

__all__ = ["Report", "Row", "Spectrum"]

SCHEMA = "attncond.report/1"
Value = float | str | None


@dataclass(frozen=True)
class Row:
    """One head of one attention, or (``head`` None) the whole of it, in one run of it.

    ``values`` has the columns of ``COLUMNS`` that were measured; the others were not.
    """

    layer: int
    path: str
    cls: str
    kind: str
    call: int
    head: int | None
    values: Mapping[str, Value]

    @property
    def key(self) -> tuple[int, str, int, int | None]:
        """What names the same row in another report of the model; a path may have two sites."""
        return self.layer, self.path, self.call, self.head

    def number(self, name: str) -> float | None:
        """A measured number, or None."""
        value = self.values.get(name)
        return None if isinstance(value, str) else value


@dataclass(frozen=True)
class Spectrum:
    """Singular values of one whole projection, descending; evenly spaced ones if there are many."""

    layer: int
    path: str
    role: str
    raw: bool
    rank: tuple[int, ...]  # 1 is the largest
    values: tuple[float, ...]


@dataclass(frozen=True)
class Report:
    """What :func:`attncond.diagnose` found.

    ``rows`` holds the numbers; ``frame`` is the same as a pandas table, whose columns
    ``Report.columns`` explains. ``notes`` say what was left out and why; ``info`` is where it all
    comes from.
    """

    rows: tuple[Row, ...]
    spectra: tuple[Spectrum, ...] = ()
    notes: tuple[str, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict)

    columns = COLUMNS

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is worth a look, the most serious first."""
        return find(self.rows)

    @property
    def frame(self) -> DataFrame:
        """One row for each head of each attention, and one with ``head`` missing for all of it."""
        pandas = pandas_for("report.frame", "report.rows")
        rows = [{k: getattr(row, k) for k in IDENTITY} | dict(row.values) for row in self.rows]
        frame: DataFrame = pandas.DataFrame(rows, columns=list(COLUMNS))
        numbers = [c for c in COLUMNS if c not in TEXT and c not in IDENTITY]
        types = {"head": "Int64"} | dict.fromkeys(numbers, "float64")
        return frame.astype(types)

    def compare(self, other: Report) -> Comparison:
        """From this report (before) to another (after): differences, findings gone and new."""
        return compare(self, other)

    def summary(self) -> str:
        """A table of the layers and the findings, drawn with rich where that is installed."""
        head, body = self._layers()
        findings = self.findings
        words = [f"{f.severity:7} {f.code}: {f.message}" for f in findings]
        words = words or ["nothing out of the ordinary"]
        words += [f"note: {note}" for note in self.notes]
        title = f"{self.info.get('model', 'model')}: {len({r.path for r in self.rows})} attentions"
        try:
            from rich.console import Console
            from rich.table import Table
            from rich.text import Text
        except ImportError:
            return "\n".join([title, "", table(head, body), "", *words])
        drawn = Table(*head, title=Text(title), title_justify="left")
        for line in body:
            drawn.add_row(*(Text(cell) for cell in line))
        out = StringIO()
        console = Console(file=out, width=_width(head, body), highlight=False)
        console.print(drawn)
        return out.getvalue() + "\n".join(words)

    def __str__(self) -> str:
        return self.summary()

    def _layers(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        shown = {
            "entropy": "entropy",
            "saturation": "saturated",
            "attention_sigma_2": "σ₂ of P",
            "token_stable_rank": "tokens sr",
            "token_residue": "residue",
            "q_kappa": "κ(W_Q)",
            "k_kappa": "κ(W_K)",
            "v_kappa": "κ(W_V)",
            "jacobian_kappa": "worst κ(J)",
        }
        body = []
        for row in self.rows:
            if row.head is None:
                name = (row.path or "(the model)") + (f" #{row.call}" if row.call else "")
                cells = (_short(row.number(c)) for c in shown)
                body.append((str(row.layer), name, *cells))
        return ("layer", "path", *shown.values()), body

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; NaN and infinities are strings."""
        return {
            "schema": SCHEMA,
            "info": spelled_out(dict(self.info)),
            "notes": list(self.notes),
            "findings": [spelled_out(asdict(f)) for f in self.findings],
            "rows": [spelled_out(asdict(row)) for row in self.rows],
            "spectra": [spelled_out(asdict(s)) for s in self.spectra],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """Undo :meth:`to_dict`."""
        with unpacking(data, SCHEMA, "report"):
            rows = tuple(
                Row(**{**r, "values": {k: _value(k, v) for k, v in r["values"].items()}})
                for r in data["rows"]
            )
            spectra = tuple(
                Spectrum(
                    **{
                        **s,
                        "rank": tuple(s["rank"]),
                        "values": tuple(float(v) for v in s["values"]),
                    }
                )
                for s in data["spectra"]
            )
            return cls(rows, spectra, tuple(data["notes"]), dict(data["info"]))

    def to_json(self, path: str | os.PathLike[str]) -> Path:
        """Write the report; a file that is there is exchanged in one piece, or stays."""
        return write_text(path, dumps(self.to_dict()) + "\n")

    def to_html(
        self,
        path: str | os.PathLike[str],
        *,
        before: Report | None = None,
        history: History | None = None,
    ) -> Path:
        """Write a page to look at: one file that works offline, anywhere.

        ``before``, an earlier report of the same model, adds what changed; ``history``, a monitor's
        record, adds curves over the steps of training.
        """
        from attncond.diagnose import page

        if before is not None:
            check_report("to_html(before=...)", before)
        return page.write(path, self, before, history)

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> Report:
        """Read what :meth:`to_json` wrote."""
        name = os.fspath(path)
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise DiagnosisError(f"{name} is not JSON: {error}") from error
        except DiagnosisError as error:
            raise DiagnosisError(f"{name}: {error}") from error


def pandas_for(table: str, numbers: str) -> Any:
    """pandas, or what to install for a table, and where its ``numbers`` are without it."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError(
            f"{table} needs pandas: pip install 'attncond[report]'. {numbers} has the same numbers "
            "without it."
        ) from error
    return pandas


def _value(name: str, value: Value) -> Value:
    return value if value is None or name in TEXT else float(value)


def _width(head: tuple[str, ...], body: list[tuple[str, ...]]) -> int:
    """As wide as its longest cells: a summary is for files and notebooks, too."""
    columns = zip(head, *body, strict=True)
    return 4 + sum(max(len(cell) for cell in column) + 3 for column in columns)


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
