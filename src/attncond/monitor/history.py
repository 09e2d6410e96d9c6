"""What a Monitor recorded: numbers by step, layer and head; as data, a table, JSON or a page."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attncond.diagnose.columns import COLUMNS
from attncond.diagnose.report import pandas_for
from attncond.errors import DiagnosisError
from attncond.files import dumps, spelled_out, unpacking, write_bytes, write_text

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["History", "Journal", "Record", "Row", "parse"]

SCHEMA = "attncond.history/1"


@dataclass(frozen=True)
class Row:
    """One head of one attention, or (``head`` None) the whole of it; columns as in a report."""

    layer: int
    path: str
    head: int | None
    values: Mapping[str, float | None]


@dataclass(frozen=True)
class Record:
    """What was measured after ``step`` optimizer steps."""

    step: int
    rows: tuple[Row, ...]
    loss: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; NaN and infinities are strings."""
        rows = [
            {
                "layer": row.layer,
                "path": row.path,
                "head": row.head,
                "values": spelled_out(row.values),
            }
            for row in self.rows
        ]
        return {"step": self.step, "rows": rows, "loss": spelled_out(self.loss)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Record:
        """Undo :meth:`to_dict`."""
        rows = tuple(
            Row(
                int(row["layer"]),
                str(row["path"]),
                None if row["head"] is None else int(row["head"]),
                {str(k): _number(v) for k, v in row["values"].items()},
            )
            for row in data["rows"]
        )
        return cls(int(data["step"]), rows, _number(data.get("loss")))


@dataclass
class History:
    """Records in the order of their steps. Iterates over them."""

    model: str
    records: list[Record] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records)

    def __getitem__(self, index: int) -> Record:
        return self.records[index]

    @property
    def frame(self) -> DataFrame:
        """A pandas table: one row for each step, attention and head; ``head`` missing is all."""
        pandas = pandas_for("history.frame", "history.records")
        rows = [
            {"step": record.step, "loss": record.loss, "layer": row.layer, "path": row.path}
            | {"head": row.head}
            | dict(row.values)
            for record in self.records
            for row in record.rows
        ]
        measured = {name for record in self.records for row in record.rows for name in row.values}
        numbers = [name for name in COLUMNS if name in measured]
        frame = pandas.DataFrame(rows, columns=["step", "loss", "layer", "path", "head", *numbers])
        types = {"head": "Int64", "loss": "float64"} | dict.fromkeys(numbers, "float64")
        typed: DataFrame = frame.astype(types)
        return typed

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, which the page draws."""
        records = [record.to_dict() for record in self.records]
        return {"schema": SCHEMA, "model": self.model, "records": records}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> History:
        """Undo :meth:`to_dict`."""
        with unpacking(data, SCHEMA, "history"):
            history = cls(str(data["model"]), [Record.from_dict(r) for r in data["records"]])
        steps = [record.step for record in history]
        for before, after in pairwise(steps):
            if after <= before:
                raise DiagnosisError(
                    f"the history is damaged: step {after} comes after step {before}; did two runs "
                    "write to one file?"
                )
        return history

    def to_json(self, path: str | os.PathLike[str]) -> Path:
        """Write all of it as one JSON object; a file that is there is exchanged in one piece."""
        return write_text(path, dumps(self.to_dict()) + "\n")

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write a page with the curves: one file that works offline, anywhere."""
        from attncond.diagnose import page

        return page.write(path, history=self.to_dict())

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> History:
        """Read what a Monitor's ``log=path`` or ``to_json`` wrote.

        A last line that was cut short, because the process was killed, is left out; anything else
        that is damaged is an error.
        """
        history, _ = parse(Path(path))
        if history is None:
            raise DiagnosisError(f"{os.fspath(path)} holds no history: it is empty, or cut short")
        return history


def parse(path: Path) -> tuple[History | None, bool]:
    """A file's history, None where not even its head is whole; and whether all of it is."""
    *lines, rest = path.read_bytes().split(b"\n")
    found: list[Any] = []
    for number, line in enumerate([*lines, rest], 1):
        try:
            found.append(json.loads(line))
        except ValueError as error:
            if number <= len(lines):
                raise DiagnosisError(f"{path}, line {number}, is not JSON: {error}") from error
    if not found:
        return None, False
    head, *records = found
    if isinstance(head, dict) and "records" not in head:
        head = {**head, "records": records}
    elif records:
        raise DiagnosisError(f"{path} goes on after its history: line 2 should not be there")
    try:
        return History.from_dict(head), not rest
    except DiagnosisError as error:
        raise DiagnosisError(f"{path}: {error}") from error


class Journal:
    """A history on disk, one JSON line for each record, written as they come.

    Each line is handed to the operating system at once, so that a killed process loses none that
    was added. After a write that failed (a full disk) the next one starts where the last good one
    ended, and brings what is missing.
    """

    def __init__(self, path: str | os.PathLike[str], model: str, start: int) -> None:
        self.path = Path(path)
        self.records: list[Record] = []
        old, clean, head = None, False, {"schema": SCHEMA, "model": model}
        if self.path.exists() and self.path.stat().st_size:
            old, clean = parse(self.path)
            if old is None and not dumps(head).encode().startswith(self.path.read_bytes()):
                raise DiagnosisError(f"{self.path} is no history of {model}: choose another file")
        if old is not None:
            if old.model != model:
                raise DiagnosisError(
                    f"{self.path} is of {old.model}, not of {model}: choose another file"
                )
            if start == 0 and old.records:
                raise DiagnosisError(
                    f"{self.path} holds a history up to step {old[-1].step} already. To go on with "
                    "that run, pass start=, the number of steps behind it; else choose another file"
                )
            # What lies behind the checkpoint is of a run that was given up there.
            self.records = [r for r in old if r.step <= start]
            clean = clean and len(self.records) == len(old)
        self._good = self.path.stat().st_size if clean else 0
        self._unsaved: list[Any] = []
        if not clean:
            self._unsaved = [head, *(record.to_dict() for record in self.records)]
        self._save()

    def add(self, record: Record) -> None:
        """Append a record.

        Raises:
            OSError: It could not be written; it will be tried again with the next one.
        """
        self._unsaved.append(record.to_dict())
        self._save()

    def _save(self) -> None:
        text = "".join(dumps(line) + "\n" for line in self._unsaved).encode()
        if self._good == 0 and self.path.exists():
            write_bytes(self.path, text)  # never less on disk than before
        else:
            with open(self.path, "r+b" if self._good else "wb") as file:
                file.seek(self._good)
                file.truncate()
                file.write(text)
        self._good += len(text)
        self._unsaved.clear()


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
