"""The figures of README and docs are those of the committed JSON, to the letter."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import tables

    yield tables
    sys.modules.pop("tables")


PAGES = ["README.md", "docs/methods.md", "docs/diagnose.md", "results/benchmarks/README.md"]


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_what_the_results_say(tables, name):
    assert name in tables.PAGES
    page = (ROOT / name).read_text(encoding="utf-8")
    assert tables.render(name, page) == page
    section = next(iter(tables.PAGES[name]))
    with pytest.raises(ValueError, match=f"section marked {section}"):
        tables.render(name, page.replace(f"<!-- /{section} -->", ""))


@pytest.mark.parametrize("path", sorted((ROOT / "results").rglob("*.json")), ids=lambda p: p.stem)
def test_every_result_names_its_command_versions_and_hardware(path):
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["command"].split()[0] in ("python", "attncond")
    assert {"attncond", "torch", "python"} <= set(record["versions"])
    assert record["hardware"]
