"""Models by name: what is built, that nothing is downloaded or run, and what a mistake is told."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from torch import nn

from attncond import sources
from attncond.errors import close
from attncond.sources import SourceError, build, call, library, one_line, split


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, and the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_what_stands_before_and_after_the_colon() -> None:
    assert split("timm:vit") == ("timm", "vit")
    assert split("package.module:make") == ("package.module", "make")
    assert split("hf:C:/models") == ("hf", "C:/models")


@pytest.mark.parametrize("source", ["", ":", "timm:", ":vit", "vit"])
def test_what_is_no_source(source: str) -> None:
    with pytest.raises(SourceError, match=r"is not a model: give timm:NAME, hf:FOLDER or") as told:
        build(source)
    assert ("Did you mean vit:FUNCTION, or timm:vit?" in str(told.value)) == (source == "vit")


def test_names_that_look_alike() -> None:
    assert close("spectrl", ["spectral", "gap"]) == " Did you mean spectral?"
    assert close("zzz", ["spectral", "gap"]) == ""


def test_a_timm_model_takes_memory_only_where_it_is_real() -> None:
    pytest.importorskip("timm")
    assert all(p.is_meta for p in build("timm:test_vit").parameters())
    model = build("timm:test_vit", real=True)
    assert not any(t.is_meta for t in [*model.parameters(), *model.buffers()])
    with pytest.raises(SourceError, match=r"has no model 'tset_vit'\. Did you mean .*test_vit"):
        build("timm:tset_vit")


def test_a_model_that_does_not_fit_is_refused_before_it_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("timm")
    need = sum(t.numel() for t in build("timm:test_vit").parameters()) * 4
    monkeypatch.setattr(sources, "_free_memory", lambda: need - 1)
    with pytest.raises(SourceError, match=r"timm:test_vit has weights of .* GB of memory are free"):
        build("timm:test_vit", real=True)
    monkeypatch.setattr(sources, "_free_memory", lambda: None)  # a system that does not tell
    assert build("timm:test_vit", real=True)


def test_constructors_that_compute_are_built_on_the_cpu() -> None:
    def create() -> nn.Module:
        model = nn.Linear(2, 2)
        model.weight.sum().item()  # which a tensor without memory cannot tell
        return model

    built = sources._without_memory(create, "it")
    assert not any(weight.is_meta for weight in built.parameters())


def config(folder: Path, **content: object) -> str:
    (folder / "config.json").write_text(json.dumps(content))
    return f"hf:{folder}"


TINY = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 9}


def test_a_configuration_names_its_class(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    named = build(config(tmp_path, **TINY, architectures=["Unheard", "GPT2LMHeadModel"]))
    assert type(named) is transformers.GPT2LMHeadModel
    assert type(build(config(tmp_path, **TINY))) is transformers.GPT2Model
    assert type(build(f"hf:{tmp_path / 'config.json'}", real=True)) is transformers.GPT2Model


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{'single': quotes}", "cannot be read as JSON"),
        ('{"model_type": "gp', "cannot be read as JSON"),
        ("", "cannot be read as JSON"),
        ("[1, 2]", "has no model_type"),
        ('{"model_type": 3}', "has no model_type"),
        ('{"model_type": "mistrall"}', "has no model type 'mistrall'.* Did you mean .*mistral"),
        ('{"model_type": "own", "auto_map": {}}', "trust_remote_code is never on"),
        ('{"model_type": "gpt2", "n_embd": 10, "n_head": 3}', "cannot be built: ValueError"),
    ],
)
def test_a_configuration_that_is_none(tmp_path: Path, text: str, said: str) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SourceError, match=said):
        build(f"hf:{tmp_path}")


def test_a_configuration_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SourceError, match=r"config\.json cannot be read as JSON"):
        build(f"hf:{tmp_path}")
    with pytest.raises(SourceError, match=r"there is no .*gone.*never downloaded"):
        build("hf:gone")


MODULE = """
from torch import nn
number = 3
model = nn.Linear(2, 2)
def good(): return nn.Linear(2, 2)
def wrong(): return "a string"
def broken(): raise RuntimeError("no such luck\\nsecond line")
def leaves(): raise SystemExit(3)
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wrong", r"theirs:wrong\(\) returned no torch\.nn\.Module but a value of type str"),
        ("number", "is not a function but of type int"),
        ("model", "is not a function but of type Linear; name one that returns it"),
        ("goood", "theirs has no 'goood'. Did you mean good?"),
        ("broken", r"failed with RuntimeError: no such luck \(--debug"),
        ("leaves", "failed with SystemExit: 3"),
    ],
)
def test_functions_of_the_user(here: Path, name: str, said: str) -> None:
    (here / "theirs.py").write_text(MODULE)
    assert isinstance(build("theirs:good"), nn.Linear)
    with pytest.raises(SourceError, match=said):
        build(f"theirs:{name}")


def test_models_of_torchvision_are_found_one_level_down(here: Path) -> None:
    pytest.importorskip("torchvision")
    with pytest.raises(SourceError, match=r"Did you mean torchvision\.models:vit_b_16\?$"):
        build("torchvision:vit_b_16")
    with pytest.raises(SourceError, match=r"torchvision has no 'qqqq'\.$"):
        build("torchvision:qqqq")


def test_modules_that_cannot_be_imported(here: Path) -> None:
    (here / "theirs.py").write_text("import torch\nraise OSError('no disk')\n")
    (here / "leaves.py").write_text("import sys\nsys.exit(1)\n")
    for module, said in {
        "theirs": "importing theirs failed with OSError: no disk",
        "leaves": "importing leaves failed with SystemExit: 1",
        "their": r"no module named 'their' in the current directory.*Did you mean theirs\?",
        "nowhere.at.all": "no module named 'nowhere.at.all': ModuleNotFoundError",
        "./src/theirs.py": "is a file; give the name that Python imports it by.*theirs:make",
    }.items():
        with pytest.raises(SourceError, match=said):
            call(module, "make")


def test_a_library_that_is_missing(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(SourceError, match=r"timm is not installed: pip install 'attncond\[timm\]'"):
        library("timm")
    with pytest.raises(SourceError, match="nosuchlib is not installed: pip install 'nosuchlib'"):
        library("nosuchlib.part")
    (here / "halfway.py").write_text("import nosuchdependency\n")
    monkeypatch.syspath_prepend(str(here))
    with pytest.raises(ModuleNotFoundError, match="nosuchdependency"):  # told as it is
        library("halfway")


def test_errors_of_others_in_one_line() -> None:
    assert one_line(ValueError("  first \n second")) == "ValueError: first"
    assert one_line(ValueError("Invalid value:\n it is too wide\n more")) == (
        "ValueError: Invalid value: it is too wide"
    )
    assert one_line(KeyError()) == "KeyError: no message"


def test_free_memory_is_known_or_not() -> None:
    free = sources._free_memory()
    assert free is None or 0 < free < 2**50
