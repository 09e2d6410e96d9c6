"""What README and docs show has to run: the python blocks of a file, in order, in one namespace."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest
from torch import nn

from attncond import adapters

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    ".".join(p.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
    for p in (ROOT / "src").rglob("*.py")
    if p.stem != "__main__"
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def python_blocks(text: str) -> list[tuple[int, str]]:
    """(line of the block's first line of code, code)."""
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, m.start(1)) + 1, m.group(1)) for m in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_code_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # pages write files
    adapters.find_adapter(nn.Identity())  # the libraries' adapters are loaded on first use
    monkeypatch.setattr(adapters, "_REGISTRY", dict(adapters._REGISTRY))  # pages register classes
    blocks = python_blocks(page.read_text(encoding="utf-8"))
    assert blocks
    names: dict[str, object] = {"__name__": page.stem}
    for line, code in blocks:
        # Blank lines in front, so that a traceback names the line of the page.
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = [t for t in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in t]
    missing = [t for t in targets if not (page.parent / t).exists()]
    assert not missing


def test_the_adapter_of_the_docs_takes_less_than_ten_lines() -> None:
    text = (ROOT / "docs" / "adapters.md").read_text(encoding="utf-8")
    (adapter,) = re.findall(r"^@ac\.register\(MyAttention\)\n.*?\n\n", text, re.M | re.S)
    assert len(adapter.strip().splitlines()) < 10


def test_the_map_of_the_source_is_whole() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named_as_one = {"adapters", "cli", "integrations", "lab/data"}
    source = ROOT / "src" / "attncond"
    files = [p.relative_to(source) for p in source.rglob("[a-z]*.py")]
    files = [f for f in files if str(f.parent) not in named_as_one]
    missing = [f for f in files if f.name not in text and not f.match("propagation_*.py")]
    assert not missing


def test_blocks_are_found() -> None:
    assert python_blocks("x\n```python\na = 1\n```\n```sh\nb\n```\n") == [(3, "a = 1\n")]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters.find_adapter(nn.Identity())
    monkeypatch.setattr(adapters, "_REGISTRY", dict(adapters._REGISTRY))
    assert doctest.testmod(importlib.import_module(name)).failed == 0
