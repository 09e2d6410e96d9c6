"""A diagnosis as one HTML file that needs nothing else: no network, no library, no server."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, Protocol

from attncond._version import __version__
from attncond.diagnose.columns import COLUMNS, TEXT
from attncond.diagnose.findings import CODES, Finding
from attncond.diagnose.report import Report
from attncond.errors import DiagnosisError
from attncond.files import spelled_out, unpacking, write_text

__all__ = ["render", "write"]

HISTORY = "attncond.history/1"


class Recorded(Protocol):
    """A monitor's history."""

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        ...


History = Mapping[str, Any] | Recorded

# One scope in the page: each uses what stands before it.
_SCRIPTS = (
    "core.js",
    "chart.js",
    "table.js",
    "heat.js",
    "curves.js",
    "change.js",
    "history.js",
    "main.js",
)


def write(
    path: str | os.PathLike[str],
    report: Report | None = None,
    before: Report | None = None,
    history: History | None = None,
) -> Path:
    """Write a page of a report, of a history of training, or of both.

    Args:
        path: The file, in a folder that exists; one that is there is exchanged in one piece.
        report: What :func:`attncond.diagnose` returned.
        before: An earlier report of the same model, to show what changed.
        history: What a monitor recorded in training, or the same as plain data.

    Raises:
        DiagnosisError: There is nothing to draw, or the parts do not fit together.
        OSError: The file cannot be written.
    """
    return write_text(path, render(report, before, history))


def render(
    report: Report | None = None,
    before: Report | None = None,
    history: History | None = None,
) -> str:
    """The text of the page that :func:`write` writes."""
    if before is not None and report is None:
        raise DiagnosisError("before= is drawn beside a report: give report= too")
    if report is None and history is None:
        raise DiagnosisError("there is nothing to draw: give a report, a history, or both")
    data: dict[str, Any] = {"meta": _meta(report, before)}
    if report is not None:
        data["report"] = report.to_dict()
    if before is not None:
        data["before"] = before.to_dict()
    if history is not None:
        data["history"] = _history(history)
    source = data["report"]["info"] if report is not None else data["history"]
    style = _asset("style.css")
    script = "(() => {\n" + "".join(_asset(name) for name in _SCRIPTS) + "})();\n"
    return Template(_asset("template.html")).substitute(
        title=_escape(f"{source.get('model', 'model')} · attncond"),
        policy=(
            f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; "
            f"script-src '{_hash(script)}'; base-uri 'none'; form-action 'none'"
        ),
        style=style,
        script=script,
        static=_static(report, data.get("history")),
        data="\n".join(_block(name, content) for name, content in data.items()),
    )


def _meta(report: Report | None, before: Report | None) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "columns": COLUMNS,
        "text": sorted(TEXT),
        "codes": CODES,
        "version": __version__,
        "written": datetime.now().astimezone().isoformat(timespec="seconds"),
    }
    if report is not None and before is not None:
        change = before.compare(report)
        meta["gone"] = [f.message for f in change.gone]
        meta["new"] = [f.message for f in change.new]
        meta["missing"] = list(change.missing)
    return meta


def _history(history: History) -> Any:
    data: Any = history.to_dict() if hasattr(history, "to_dict") else history
    with unpacking(data, HISTORY, "history"):
        for record in data["records"]:
            int(record["step"])
            for row in record["rows"]:
                row["layer"], row["values"].items()
    return spelled_out(data)


def _block(name: str, content: Any) -> str:
    """Data that the browser does not run; nothing in it may end the element that holds it."""
    # ensure_ascii escapes U+2028, U+2029 and halves of surrogate pairs, which UTF-8 cannot hold.
    text = json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return f'<script type="application/json" id="{name}">{text}</script>'


def _static(report: Report | None, history: Mapping[str, Any] | None) -> str:
    """What a reader without scripts gets: findings, notes, and the table of the layers."""
    if report is None:
        records = history["records"] if history is not None else []
        return f"<p>A history of {len(records)} records.</p>"
    head, body = report._layers()
    parts = [f"<h1>{_escape(report.info.get('model', 'model'))}</h1>", "<h2>Findings</h2>"]
    parts.append(_list(_words(report.findings)) or "<p>Nothing out of the ordinary.</p>")
    if report.notes:
        parts += ["<h2>Left out</h2>", _list(report.notes)]
    parts += ["<h2>Layers</h2>", '<div class="scroll">', _table(head, body), "</div>"]
    return "\n".join(parts)


def _words(findings: Sequence[Finding]) -> Iterable[str]:
    return (f"{f.severity}: {f.message}" for f in findings)


def _list(items: Iterable[str]) -> str:
    lines = "".join(f"<li>{_escape(item)}</li>" for item in items)
    return f"<ul>{lines}</ul>" if lines else ""


def _table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    top = "".join(f'<th scope="col">{_escape(cell)}</th>' for cell in head)
    lines = ("".join(f"<td>{_escape(cell)}</td>" for cell in line) for line in body)
    rows = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{rows}</tbody></table>"


def _escape(text: object) -> str:
    return html.escape(str(text).encode("utf-8", "replace").decode("utf-8"))


def _hash(text: str) -> str:
    """Allows this very script or style in the page's security policy, and no other."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _asset(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")
