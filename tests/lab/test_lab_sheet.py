"""One table as text, Markdown, HTML, CSV and JSON: the same cells, and nobody else's markup."""

import csv
import io
import json
import re
from html.parser import HTMLParser

import pytest

from attncond.lab.sheet import FORMATS, Table

ROWS = (
    ("ViT-B", "baseline", "80.7", "75.00 ± 0.10", "–", "–", "–"),
    ("ViT-B", "spectral", "–", "77.50 ± 0.20", "+2.50 **", "0.0012", "–"),
    ("Swin-B", "spectral", "–", "–", "–", "–", "–"),
)
COLUMNS = ("model", "variant", "paper", "own", "Δ baseline", "p", "p")
DATA = (
    {"model": "ViT-B", "variant": "baseline", "mean": 75.0},
    {"model": "ViT-B", "variant": "spectral", "mean": 77.49999, "p": 1.2e-3},
    {"model": "Swin-B", "variant": "spectral", "mean": None},
)
NOTE = "own: CIFAR-10, " + "accuracy in percent, mean of the seeds " * 5
COMMAND = "attncond lab run swin-cifar10 --seeds 5"


def made(**changes):
    fields = {"columns": COLUMNS, "rows": ROWS, "data": DATA, "notes": (NOTE,)}
    return Table(**{"title": "Table 1", "missing": (("Swin-B", COMMAND),), **fields, **changes})


def test_columns_that_are_empty_throughout_are_left_out():
    columns, rows = made().shown()
    assert columns == ("model", "variant", "paper", "own", "Δ baseline", "p")
    assert rows[1] == ROWS[1][:-1]  # of two columns of one name, the one with values
    nothing = tuple((*row[:2], *("–",) * 5) for row in ROWS)
    assert made(rows=nothing).shown()[0] == ("model", "variant", "paper", "own")


def test_text_is_aligned_and_notes_are_wrapped():
    lines = made().to_text().splitlines()
    assert lines[:2] == ["Table 1", ""]
    head, rule, *body = lines[2:7]
    assert [len(part) for part in rule.split("  ")] == [6, 8, 5, 12, 10, 6]
    assert head.startswith("model   variant   paper")
    assert body[0] == "ViT-B   baseline   80.7  75.00 ± 0.10           –       –"
    assert body[2].startswith("Swin-B  spectral      –             –")
    assert max(map(len, lines)) <= 100
    assert lines[-3:] == ["Missing:", "  Swin-B", f"    {COMMAND}"]
    assert re.sub(r"\s+", " ", "\n".join(lines)).count(NOTE.strip()) == 1


def test_text_without_notes_or_rows():
    assert made(notes=(), missing=(), rows=()).to_text() == "Table 1\n\npaper  own\n-----  ---"


def test_markdown_has_as_many_cells_in_each_line():
    evil = ("a|b", "<img src=x>", "–", "_own_", "**", "line\nbreak", "–")
    text = made(rows=(*ROWS, evil)).to_markdown()
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 4
    assert {len(re.split(r"(?<!\\)\|", line)) for line in lines} == {6 + 2}
    assert lines[1] == "| --- | --- | ---: | ---: | ---: | ---: |"
    assert "| +2.50 \\*\\* |" in lines[3]
    assert lines[5] == "| a\\|b | &lt;img src=x> | – | \\_own\\_ | \\*\\* | line break |"
    assert f"- Swin-B: `{COMMAND}`" in text


def test_csv_has_every_number_of_every_row():
    read = list(csv.DictReader(io.StringIO(made().to_csv())))
    assert [r["mean"] for r in read] == ["75.0", "77.49999", ""]
    assert [r["p"] for r in read] == ["", "0.0012", ""]
    assert list(read[0]) == ["model", "variant", "mean", "p"]


def test_json_has_the_rest_as_well():
    record = json.loads(made().to_json())
    assert record["title"] == "Table 1"
    assert record["rows"] == list(DATA)
    assert record["notes"] == [NOTE]
    assert record["missing"] == [{"what": "Swin-B", "command": COMMAND}]
    with pytest.raises(ValueError, match="not JSON compliant"):  # never a file that none can read
        made(data=({"mean": float("nan")},)).to_json()


class Page(HTMLParser):
    """Cells by row, and every tag."""

    def __init__(self):
        super().__init__()
        self.tags, self.rows = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        assert not {name for name, _ in attrs} & {"src", "href", "onload", "onerror"}
        if tag == "tr":
            self.rows.append([])

    def handle_data(self, data):
        if self.tags and self.tags[-1] in ("td", "th") and data.strip():
            self.rows[-1].append(data)


def test_html_is_one_page_and_runs_nothing():
    evil = "<img src=x onerror=alert(1)>"
    columns = (*COLUMNS[:-1], evil)
    rows = tuple((*row[:-1], evil) for row in ROWS)
    found = made(title=evil, columns=columns, rows=rows, notes=(evil,), missing=((evil, evil),))
    text = found.to_html()
    page = Page()
    page.feed(text)
    assert page.tags.count("table") == 1
    assert not {"script", "img", "link"} & set(page.tags)
    assert page.rows == [list(columns), *map(list, rows)]
    assert text.count('<tr class="new">') == 1  # where another model begins
    assert text.count("&lt;img") == 2 + 1 + 3 + 1 + 2


def test_names_of_methods_may_be_broken_at_commas_and_leave_room_for_numbers():
    row = ("ViT-B", "spectral:roles=qk,kappa=3", "1,024")
    page = Table("t", ("model", "variant", "own"), (row,)).to_html()
    assert ">spectral:roles=qk,<wbr>kappa=3<" in page
    assert ">1,024<" in page


@pytest.mark.parametrize("place", [1, 2])
def test_headers_models_and_variants_stay_in_sight_where_a_page_is_scrolled(place):
    """What says whose numbers these are; a variant only beside the model that it is placed by."""
    columns, rows = [list(COLUMNS[:-1])], [list(row[:-1]) for row in ROWS]
    for row in (*columns, *rows):
        row.insert(place, row.pop(1))
    text = made(columns=tuple(columns[0]), rows=tuple(map(tuple, rows))).to_html()
    stuck = ["variant", "baseline", "spectral", "spectral"] if place == 1 else []
    assert re.findall(r'class="text name">([^<]*)<', text) == stuck
    rules = {"th", "th:first-child, td:first-child", "th.name, td.name"}
    assert set(re.findall(r"(t[^{}]*?) {\s*position: sticky", text)) == rules
    region = re.search(r"<div [^>]*><table>.*</table></div>", text, re.DOTALL)[0]
    assert 'tabindex="0"' in region  # keys scroll it
    assert NOTE.strip() not in region


def test_every_format_has_a_name():
    assert set(FORMATS) == {"text", "markdown", "html", "csv", "json"}
    assert len({make(made()) for make in FORMATS.values()}) == 5
