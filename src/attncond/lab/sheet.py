"""A table to look at: text, Markdown, a page of HTML, CSV and JSON from the same rows."""

from __future__ import annotations

import csv
import io
import json
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from typing import Any

__all__ = ["FORMATS", "Table"]

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 96rem; padding: 0 1rem; }
p, li { overflow-wrap: anywhere; }
div { overflow: auto; max-height: calc(100vh - 7rem); }
@media print { div { max-height: none; } }
h1 { font-size: 1.2rem; }
table { border-collapse: separate; border-spacing: 0; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem; text-align: right; white-space: nowrap; background: Canvas; }
th:first-child, td:first-child, td.text, th.text { text-align: left; }
td.text { white-space: normal; min-width: 9rem; }
th { position: sticky; top: 0; vertical-align: bottom; border-bottom: 2px solid; }
th:first-child, td:first-child {
  position: sticky; left: 0; box-sizing: border-box; width: 7rem; min-width: 7rem; max-width: 7rem;
  white-space: normal; overflow-wrap: anywhere;
}
td { border-bottom: 1px solid #8884; }
tr.new td { border-top: 2px solid #8888; }
td:first-child, td.name { z-index: 1; }
th:first-child, th.name { z-index: 2; }
@media (min-width: 40rem) { th.name, td.name { position: sticky; left: 7rem; } }
code { background: #8882; padding: .1rem .3rem; border-radius: .2rem; }
"""


@dataclass(frozen=True)
class Table:
    """Cells as they are shown, the numbers behind them (``data``), and what a reader must know."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    data: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    missing: tuple[tuple[str, str], ...] = ()  # what is not there, and the command that makes it
    texts: frozenset[str] = field(default=frozenset(("model", "variant", "data")))

    def shown(self) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
        """Columns and rows without the columns that are empty throughout."""
        # Names may come twice (two columns "p"), so that columns are told apart by place.
        kept = [
            i
            for i, name in enumerate(self.columns)
            if name in ("paper", "own") or any(row[i].strip("–") for row in self.rows)
        ]
        rows = tuple(tuple(row[i] for i in kept) for row in self.rows)
        return tuple(self.columns[i] for i in kept), rows

    def to_text(self) -> str:
        """For a terminal."""
        columns, rows = self.shown()
        wide = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]

        def line(cells: tuple[str, ...]) -> str:
            aligned = (
                cell.ljust(w) if name in self.texts else cell.rjust(w)
                for cell, w, name in zip(cells, wide, columns, strict=True)
            )
            return "  ".join(aligned).rstrip()

        parts = [self.title, "", line(columns), "  ".join("-" * w for w in wide)]
        parts += [line(row) for row in rows]
        parts += ["", *(_wrapped(note) for note in self.notes)] if self.notes else []
        if self.missing:
            parts += ["", "Missing:", *(f"  {what}\n    {how}" for what, how in self.missing)]
        return "\n".join(parts)

    def to_markdown(self) -> str:
        """For a README."""
        columns, rows = self.shown()
        align = ["---" if name in self.texts else "---:" for name in columns]
        lines = [columns, align, *rows]
        body = "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)
        parts = [f"**{_cell(self.title)}**", body, *map(_cell, self.notes)]
        if self.missing:
            parts.append(
                "Missing:\n\n"
                + "\n".join(f"- {_cell(what)}: `{how}`" for what, how in self.missing)
            )
        return "\n\n".join(parts)

    def to_html(self) -> str:
        """One page that needs nothing else; everything in it is escaped."""
        columns, rows = self.shown()
        # A row is told by its model and variant: both stay in sight, whatever is scrolled.
        kinds = [
            f'class="text{" name" if (i, name) == (1, "variant") else ""}"'
            if name in self.texts
            else ""
            for i, name in enumerate(columns)
        ]
        head = "".join(
            f'<th scope="col" {k}>{escape(c)}</th>' for c, k in zip(columns, kinds, strict=True)
        )
        body, last = "", None
        for row in rows:
            start = ' class="new"' if last is not None and row[0] != last else ""
            last = row[0]
            cells = "".join(
                # Names of methods may be broken at their commas.
                f"<td {k}>{escape(cell).replace(',', ',<wbr>') if k else escape(cell)}</td>"
                for cell, k in zip(row, kinds, strict=True)
            )
            body += f"<tr{start}>{cells}</tr>\n"
        notes = "".join(f"<p>{escape(note)}</p>\n" for note in self.notes)
        missing = "".join(
            f"<li>{escape(what)}: <code>{escape(how)}</code></li>" for what, how in self.missing
        )
        missing = f"<h2>Missing</h2><ul>{missing}</ul>" if missing else ""
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{escape(self.title)}</title><style>{_STYLE}</style></head>\n<body>"
            f'<h1 id="title">{escape(self.title)}</h1>\n'
            '<div role="region" aria-labelledby="title" tabindex="0"><table>\n'
            f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>\n"
            f"{notes}{missing}</body></html>\n"
        )

    def to_csv(self) -> str:
        """The numbers, unrounded, a line for each row."""
        names = list(dict.fromkeys(name for row in self.data for name in row))
        stream = io.StringIO()
        writer = csv.DictWriter(stream, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.data)
        return stream.getvalue()

    def to_json(self) -> str:
        """The same with title, notes and what is missing."""
        record = {
            "title": self.title,
            "rows": self.data,
            "notes": self.notes,
            "missing": [{"what": what, "command": how} for what, how in self.missing],
        }
        return json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


FORMATS: dict[str, Callable[[Table], str]] = {
    "text": Table.to_text,
    "markdown": Table.to_markdown,
    "html": Table.to_html,
    "csv": Table.to_csv,
    "json": Table.to_json,
}


def _wrapped(note: str) -> str:
    return textwrap.fill(note, 100, subsequent_indent="  ", break_long_words=False)


def _cell(text: str) -> str:
    """Neither a column more, nor markup of somebody else."""
    text = text.replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")
    return text.replace("<", "&lt;").replace("\n", " ")
