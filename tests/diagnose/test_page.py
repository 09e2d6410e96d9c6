"""The page as text: what it holds, and that nothing in it can do harm. A browser comes later."""

import html
import json
import math
import os
import re
import tempfile
from html.parser import HTMLParser
from pathlib import Path

import pytest
from cases import CASE
from pages import HOSTILE, history, made_up, several_calls, weights_only

import attncond as ac
from attncond.diagnose import page

REPORTS = {
    "made up": made_up,
    "hostile": lambda: made_up(name=HOSTILE),
    "weights": weights_only,
    "calls": several_calls,
    "empty": lambda: ac.Report(()),
}


class Parsed(HTMLParser):
    """All tags, and the text of every script and style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.blocks: dict[str, str] = {}
        self.inside = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.inside = dict(attrs).get("id") or tag if tag in ("script", "style") else None

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, data):
        if self.inside:
            self.blocks[self.inside] = self.blocks.get(self.inside, "") + data


@pytest.fixture(scope="module")
def real():
    case = CASE["timm-vit"]
    return ac.diagnose(case.make(), case.run, loss="sum")


@pytest.mark.parametrize("name", REPORTS)
def test_the_data_in_the_page_are_the_report(name):
    report = REPORTS[name]()
    blocks = Parsed(page.render(report)).blocks
    assert json.loads(blocks["report"]) == report.to_dict()
    assert set(blocks) == {"style", "meta", "report", "script"}


def test_a_report_can_be_read_back_from_its_page(real, tmp_path):
    path = real.to_html(tmp_path / "r.html", before=real, history=history())
    blocks = Parsed(path.read_text(encoding="utf-8")).blocks
    assert ac.Report.from_dict(json.loads(blocks["report"])) == real
    assert ac.Report.from_dict(json.loads(blocks["before"])) == real
    assert json.loads(blocks["history"]) == history()
    assert [p.name for p in tmp_path.iterdir()] == ["r.html"]


@pytest.mark.parametrize("name", REPORTS)
def test_nothing_is_fetched_and_nothing_foreign_runs(name):
    text = page.render(REPORTS[name](), history=history(name=HOSTILE))
    parsed = Parsed(text)
    for tag, attributes in parsed.tags:
        assert tag not in ("img", "iframe", "object", "embed", "base", "form", "audio", "video")
        assert not any(a.startswith("on") or a == "style" for a in attributes)
        assert attributes.get("src") is None
        assert (attributes.get("href") or "#").startswith(("#", "data:,"))
    addresses = set(re.findall(r"(?:https?:)?//[\w.]+\.\w+[^\s\"'<]*", parsed.blocks["script"]))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # a name, not a place
    assert not re.search(r"url\(|@import|@font-face", parsed.blocks["style"])
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|eval|write\(", parsed.blocks["script"]
    )
    assert sum(tag == "script" for tag, _ in parsed.tags) == len(parsed.blocks) - 1


@pytest.mark.parametrize(
    "hostile", [HOSTILE, "]]>", "<!--<script>", "\ud800", "\x00\x07", "$title"]
)
def test_names_cannot_leave_their_place(hostile, tmp_path):
    report = made_up(name=hostile)
    text = report.to_html(tmp_path / "r.html").read_text(encoding="utf-8")
    parsed = Parsed(text)
    assert json.loads(parsed.blocks["report"]) == report.to_dict()
    for sign in "<>&\u2028\u2029":
        assert sign not in parsed.blocks["report"]
    title = re.search(r"<title>(.*?)</title>", text, re.S).group(1)
    shown = hostile.encode("utf-8", "replace").decode()
    assert html.unescape(title) == f"{shown} · attncond"


def test_the_policy_names_the_script_and_the_style(real):
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page.render(real)).group(1)
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert len(re.findall(r"sha256-[\w+/]{43}=", policy)) == 2


def test_without_scripts_there_are_findings_and_layers():
    report = made_up()
    static = page.render(report).split("<noscript>")[1].split("</noscript>")[0]
    assert report.findings
    assert all(html.escape(f.message) in static for f in report.findings)
    assert static.count("<tr>") == 1 + 4
    assert "note: Made up" in static
    assert "Nothing out of the ordinary" in page.render(weights_only())
    assert "history of 6 records" in page.render(history=history())


def test_a_history_may_be_an_object(real):
    class Recorded:
        def to_dict(self):
            return history()

    assert json.loads(Parsed(page.render(history=Recorded())).blocks["history"]) == history()
    with_numbers = history()
    with_numbers["records"][0]["loss"] = math.nan
    blocks = Parsed(page.render(history=with_numbers)).blocks
    assert json.loads(blocks["history"])["records"][0]["loss"] == "nan"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "nothing to draw"),
        ({"history": {}}, "schema is None"),
        ({"history": []}, "schema is None"),
        ({"history": {"schema": "attncond.history/9"}}, r"history/9"),
        ({"history": {"schema": "attncond.history/1"}}, "damaged"),
        ({"history": {"schema": "attncond.history/1", "records": [{"step": 1}]}}, "damaged"),
        ({"before": weights_only()}, "give report="),
        ({"report": made_up(), "before": weights_only()}, "in common"),
    ],
)
def test_what_cannot_be_drawn_is_named_and_writes_nothing(arguments, words, tmp_path):
    with pytest.raises(ac.DiagnosisError, match=words):
        page.write(tmp_path / "r.html", **arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("write", [ac.Report.to_html, ac.Report.to_json])
def test_a_path_that_cannot_be_written_comes_with_advice(write, tmp_path, monkeypatch):
    report = weights_only()
    with pytest.raises(FileNotFoundError, match=r"no folder.*missing; make it first"):
        write(report, tmp_path / "missing" / "r")
    with pytest.raises(IsADirectoryError, match="is a folder: name a file in it"):
        write(report, tmp_path)

    def refuse(**arguments):
        raise PermissionError(13, "Permission denied", "x.tmp")

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    with pytest.raises(PermissionError, match="takes no new files; choose another"):
        write(report, tmp_path / "r")
    assert not list(tmp_path.iterdir())


def test_a_page_that_fails_halfway_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "r.html"
    path.write_text("old")

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        weights_only().to_html(path)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["r.html"]


def test_the_page_itself_is_small():
    assert len(page.render(ac.Report(()))) < 100_000


def test_its_files_are_in_the_package():
    folder = Path(page.__file__).parent
    found = {p.name for p in folder.iterdir() if p.suffix in (".js", ".css", ".html")}
    assert found == {*page._SCRIPTS, "style.css", "template.html"}
    assert not any(
        "</script" in (folder / name).read_text(encoding="utf-8")
        for name in found - {"template.html"}
    )
