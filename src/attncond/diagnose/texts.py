"""Text from a file, in the tokens that a model was trained on."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attncond.errors import DiagnosisError
from attncond.sources import library, one_line

__all__ = ["encode"]

# transformers makes an empty tokenizer where a folder has none of these.
_FILES = (
    *("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "tokenizer.model"),
    *("sentencepiece.bpe.model", "spm.model", "tokenizer.tiktoken", "tekken.json"),
)
_BYTES = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")  # need no vocabulary
_READ = 2**22  # characters: more than any batch takes
_LEAST = 4  # tokens: attention among fewer says nothing


def encode(
    path: Path, folder: Path | None, samples: int, length: int, vocabulary: int | None
) -> tuple[dict[str, Tensor], list[str]]:
    """Up to ``samples`` windows of ``length`` tokens, from the beginning of a file; and notes."""
    text = _read(path)
    tokenizer = _tokenizer(folder)
    try:
        windows = _windows(tokenizer, text, length)
    except Exception as error:
        raise DiagnosisError(f"{path} cannot be tokenised: {one_line(error)}") from error
    if not windows or len(windows[0]) < _LEAST:
        found = len(windows[0]) if windows else 0
        raise DiagnosisError(
            f"{path} is too short: its text has {found} tokens, and {_LEAST} are the least; "
            f"{samples} x {length} are asked for"
        )
    whole = [w for w in windows if len(w) == len(windows[0])][:samples]
    ids = torch.tensor(whole)
    if vocabulary is not None and int(ids.max()) >= vocabulary:
        raise DiagnosisError(
            f"the tokenizer in {folder} is not of this model: it gives token {int(ids.max())}, and "
            f"the model knows {vocabulary}"
        )
    notes = []
    if len(whole) < samples or ids.shape[1] < length:
        notes.append(
            f"{path.name} gives {len(whole)} x {ids.shape[1]} tokens; {samples} x {length} were "
            "asked for"
        )
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown is not None and (share := float((ids == unknown).double().mean())) > 0.2:
        notes.append(f"{100 * share:.0f}% of the tokens are unknown to the tokenizer")
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, notes


def _read(path: Path) -> str:
    if path.is_dir():
        raise DiagnosisError(f"{path} is a folder: --text takes a file")
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read(_READ)
    except FileNotFoundError:
        raise DiagnosisError(f"there is no file {path}") from None
    except UnicodeDecodeError as error:
        raise DiagnosisError(
            f"{path} is not text in UTF-8 (byte {_wrong(path)}): --text takes a plain text file"
        ) from error
    except OSError as error:
        raise DiagnosisError(f"{path} cannot be read: {error.strerror or error}") from error
    if "\0" in text:
        raise DiagnosisError(f"{path} is not text: it holds zero bytes")
    if not text.strip():
        raise DiagnosisError(f"{path} is empty: there is no text in it")
    return text


def _wrong(path: Path) -> int:
    """Where a file ceases to be UTF-8; a decoder that reads in pieces counts from the last one."""
    with open(path, "rb") as file:
        try:
            file.read(4 * _READ).decode()
        except UnicodeDecodeError as error:
            return error.start
    return 0  # it was written to in between


def _tokenizer(folder: Path | None) -> Any:
    advice = (
        "Name a folder with tokenizer files (tokenizer.json, ...) with --tokenizer, or leave "
        "--text out: the tokens are random then."
    )
    if folder is None:
        raise DiagnosisError(f"--text needs a tokenizer. {advice}")
    if not folder.is_dir():
        raise DiagnosisError(f"there is no folder {folder} with a tokenizer. {advice}")
    config = folder / "tokenizer_config.json"
    named = config.read_text("utf-8", "replace") if config.is_file() else ""
    if not any((folder / f).is_file() for f in _FILES) and not any(n in named for n in _BYTES):
        raise DiagnosisError(f"there is no tokenizer in {folder}. {advice}")
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            return library("transformers").AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
    except Exception as error:
        raise DiagnosisError(
            f"the tokenizer in {folder} cannot be loaded: {one_line(error)}"
        ) from error


def _windows(tokenizer: Any, text: str, length: int) -> list[list[int]]:
    """Pieces of the text with the special tokens that belong around them."""
    if getattr(tokenizer, "is_fast", False):
        tokenizer.truncation_side = tokenizer.padding_side = "right"
        found = tokenizer(
            text, truncation=True, max_length=length, return_overflowing_tokens=True, padding=False
        )
        ids: list[list[int]] = found["input_ids"]
        return ids if ids and isinstance(ids[0], list) else [ids]  # type: ignore[list-item]
    flat: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [flat[i : i + length] for i in range(0, len(flat), length)]
