"""Text from a file: windows of tokens, and what a file that is no text is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import tiny_models
from torch import Tensor

from attncond.diagnose.texts import encode
from attncond.errors import DiagnosisError


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def encoded(
    text: str | bytes, folder: str | None = "model", vocabulary: int | None = None, **size: int
) -> tuple[dict[str, Tensor], list[str]]:
    Path("text.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    options: dict[str, Any] = {"samples": 3, "length": 12, **size}
    where = None if folder is None else Path(folder)
    return encode(Path("text.txt"), where, vocabulary=vocabulary, **options)


@pytest.fixture
def _tokenizer() -> None:
    tiny_models.save_tokenizer(Path("model"))


@pytest.mark.usefixtures("_tokenizer")
def test_text_is_cut_into_windows() -> None:
    batch, notes = encoded("abcdefghij" * 9)
    ids = batch["input_ids"]
    assert ids.shape == batch["attention_mask"].shape == (3, 12)
    assert (ids[:, 0] == 1).all()
    assert (ids[:, -1] == 2).all()
    assert ids[0, 1:11].tolist() == ids[1, 1:11].tolist()  # ten letters in each
    assert batch["attention_mask"].all()
    assert notes == []


@pytest.mark.usefixtures("_tokenizer")
def test_less_than_was_asked_for_is_told() -> None:
    batch, notes = encoded("\ufeffabc")
    assert batch["input_ids"].tolist() == [[1, *(4 + ord(c) - 32 for c in "abc"), 2]]
    assert notes == ["text.txt gives 1 x 5 tokens; 3 x 12 were asked for"]
    batch, notes = encoded("a" * 25)  # a last window that is not full is left out
    assert batch["input_ids"].shape == (2, 12)
    assert "gives 2 x 12 tokens" in notes[0]


@pytest.mark.usefixtures("_tokenizer")
def test_letters_that_the_tokenizer_does_not_know() -> None:
    _, notes = encoded("äöü" * 30, samples=2)
    assert notes == ["83% of the tokens are unknown to the tokenizer"]  # ten of twelve
    assert encoded("abcdefghä" * 30, samples=2)[1] == []


@pytest.mark.usefixtures("_tokenizer")
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "text.txt is empty"),
        (b" \n\t\n", "text.txt is empty"),
        (b"\x89PNG\r\n\x1a\n\0\0\xff\xfe", r"is not text in UTF-8 \(byte 0\)"),
        (b"abc \xe2\x82", r"is not text in UTF-8 \(byte 4\)"),  # cut in the middle of a letter
        (b"a" * 10000 + b"\xff", r"is not text in UTF-8 \(byte 10000\)"),
        (b"abc\0\0\0def", "holds zero bytes"),
        (b"a", "too short: its text has 3 tokens, and 4 are the least"),
    ],
)
def test_files_that_are_no_text(content: bytes, said: str) -> None:
    with pytest.raises(DiagnosisError, match=said):
        encoded(content)


def test_text_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    size = {"samples": 1, "length": 8, "vocabulary": None}
    with pytest.raises(DiagnosisError, match=r"there is no file gone\.txt"):
        encode(Path("gone.txt"), None, **size)
    Path("folder").mkdir()
    with pytest.raises(DiagnosisError, match="folder is a folder: --text takes a file"):
        encode(Path("folder"), None, **size)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(DiagnosisError, match=r"text\.txt cannot be read: Permission denied"):
        encode(Path("text.txt"), None, **size)


def test_text_without_a_tokenizer_is_an_error_that_tells_the_ways_out() -> None:
    """transformers would make an empty tokenizer without a word."""
    tiny_models.save("gpt2", Path("gpt2"))
    said = r"no tokenizer in gpt2.*--tokenizer.*leave --text out"
    with pytest.raises(DiagnosisError, match=said):
        encoded("some text", "gpt2")
    with pytest.raises(DiagnosisError, match="--text needs a tokenizer"):
        encoded("some text", None)
    with pytest.raises(DiagnosisError, match="there is no folder gone with a tokenizer"):
        encoded("some text", "gone")
    Path("gpt2/tokenizer.json").write_text("{broken")
    with pytest.raises(DiagnosisError, match="tokenizer in gpt2 cannot be loaded"):
        encoded("some text", "gpt2")


def test_a_tokenizer_of_bytes_needs_no_files() -> None:
    Path("model").mkdir()
    Path("model/tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    ids = encoded("abcdefgh" * 4, samples=2, length=8)[0]["input_ids"]
    assert ids.tolist() == [[ord(c) + 3 for c in "abcdefgh"]] * 2  # three special tokens first


@pytest.mark.usefixtures("_tokenizer")
def test_a_tokenizer_of_another_model_is_told() -> None:
    with pytest.raises(DiagnosisError, match=r"not of this model: it gives token \d+.*knows 40"):
        encoded("some text", vocabulary=40)
