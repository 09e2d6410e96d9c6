"""README's figures are those of the committed JSON, to the letter."""

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


def test_readme_is_what_the_results_say(tables):
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert tables.render(page) == page
    with pytest.raises(ValueError, match="section marked demo"):
        tables.render(page.replace("<!-- /demo -->", ""))


@pytest.mark.parametrize("path", sorted((ROOT / "results").rglob("*.json")), ids=lambda p: p.stem)
def test_every_result_names_its_command_versions_and_hardware(path):
    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["command"].split()[0] in ("python", "attncond")
    assert {"attncond", "torch", "python"} <= set(record["versions"])
    assert record["hardware"]
