"""Inputs of the command line: what each kind of model gets, and what a wrong file is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("timm")
pytest.importorskip("transformers")

import timm
import tiny_models
from PIL import Image
from torch import nn

from attncond.diagnose.inputs import Inputs, Wanted, choose
from attncond.errors import DiagnosisError
from attncond.sources import SourceError


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def shapes(inputs: Inputs) -> Any:
    if isinstance(inputs.batch, dict):
        return {k: tuple(v.shape) for k, v in inputs.batch.items()}
    return tuple(inputs.batch.shape)


IDS, BOTH = ("input_ids",), ("input_ids", "decoder_input_ids")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("bert", dict.fromkeys(IDS, (2, 50))),
        ("roberta", dict.fromkeys(IDS, (2, 38))),  # two of its forty positions are kept for padding
        ("gpt2", dict.fromkeys(IDS, (2, 24))),
        ("t5", dict.fromkeys(BOTH, (2, 50))),
        ("vit", {"pixel_values": (2, 3, 32, 32)}),
        ("videomae", {"pixel_values": (2, 4, 3, 32, 32)}),
        ("clip", {"input_ids": (2, 20), "pixel_values": (2, 3, 32, 32)}),
    ],
)
def test_random_input_by_kind(name: str, wanted: dict[str, tuple[int, ...]]) -> None:
    model = tiny_models.make(name)
    inputs = choose(model, None, Wanted(samples=2, length=50))
    assert shapes(inputs) == wanted
    assert "random" in inputs.words
    assert "seed 0" in inputs.words
    model(**inputs.batch)
    again = choose(model, None, Wanted(samples=2, length=50))
    assert all(torch.equal(v, again.batch[k]) for k, v in inputs.batch.items())


def test_random_tokens_are_no_special_ones() -> None:
    ids = choose(tiny_models.make("bert"), None, Wanted(samples=50)).batch["input_ids"]
    assert set(ids.flatten().tolist()) == set(range(99)) - {0, 1, 2}


@pytest.mark.parametrize("name", ["whisper", "wav2vec2"])
def test_sound_is_refused_by_name(name: str) -> None:
    with pytest.raises(DiagnosisError, match=r"takes input_(features|values).*--batch MODULE"):
        choose(tiny_models.make(name), None, Wanted())


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(DiagnosisError, match=r"MultiheadAttention takes.*--batch.*--weights-only"):
        choose(nn.MultiheadAttention(8, 2), None, Wanted())


def test_models_of_torchvision_see_images() -> None:
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.vit_b_32(image_size=64)
    assert shapes(choose(model, None, Wanted(samples=1))) == (1, 3, 64, 64)
    tiny_models.save_images(Path("images"))
    assert shapes(choose(model, None, Wanted(images=Path("images")))) == (3, 3, 64, 64)


def test_images_as_timm_prepares_them() -> None:
    tiny_models.save_images(Path("images"), 3, (200, 180))
    model = timm.create_model("test_vit")
    inputs = choose(model, None, Wanted(images=Path("images"), samples=2))
    config = timm.data.resolve_model_data_config(model)
    transform = timm.data.create_transform(**config, is_training=False)
    expected = torch.stack([transform(Image.open(f"images/{i}.png")) for i in range(2)])
    assert torch.equal(inputs.batch, expected)
    assert inputs.words == "2 images of images"
    with pytest.raises(DiagnosisError, match="reads images, not text: use --images"):
        choose(model, None, Wanted(text=Path("x.txt")))


def wanted(text: str | bytes, **options: Any) -> Wanted:
    content = text if isinstance(text, bytes) else text.encode()
    Path("text.txt").write_bytes(content)
    return Wanted(text=Path("text.txt"), **options)


def test_text_for_two_towers_and_for_decoders() -> None:
    tiny_models.save_tokenizer(Path("model"))
    tiny_models.save_images(Path("images"), 2)
    text = wanted("some words, " * 30, samples=2, length=16)
    both = choose(tiny_models.make("clip"), Path("model"), text)
    assert shapes(both)["pixel_values"] == (2, 3, 32, 32)
    assert "tokens of text.txt and random images" in both.words
    given = Wanted(text=Path("text.txt"), images=Path("images"), samples=2, length=16)
    both = choose(tiny_models.make("clip"), Path("model"), given)
    assert both.words == "2 x 16 tokens of text.txt and 2 images of images"
    decoder = choose(tiny_models.make("t5"), Path("model"), text).batch
    assert torch.equal(decoder["decoder_input_ids"][:, 1:], decoder["input_ids"][:, :-1])
    assert (decoder["decoder_input_ids"][:, 0] == 0).all()


def test_images_for_a_model_of_text() -> None:
    with pytest.raises(DiagnosisError, match="reads text, not images: use --text"):
        choose(tiny_models.make("bert"), None, Wanted(images=Path(".")))


def test_a_batch_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("their_batch.py").write_text(
        "import torch\n"
        "def good(): return torch.ones(2, 3)\n"
        "def nothing(): pass\n"
        "def broken(): raise ValueError('no data')\n"
    )
    monkeypatch.syspath_prepend(".")
    model = nn.MultiheadAttention(8, 2)
    inputs = choose(model, None, Wanted(batch="their_batch:good"))
    assert (shapes(inputs), inputs.words) == ((2, 3), "from their_batch:good")
    for batch, said in (
        ("their_batch", "takes MODULE:FUNCTION"),
        ("their_batch:nothing", "returned NoneType"),
        ("their_batch:goood", "Did you mean good"),
        ("their_batch:broken", "no data"),
        ("their_bach:good", "Did you mean their_batch"),
    ):
        with pytest.raises((DiagnosisError, SourceError), match=said):
            choose(model, None, Wanted(batch=batch))
    with pytest.raises(DiagnosisError, match="not both"):
        choose(model, None, Wanted(batch="their_batch:good", text=Path("x")))


def test_text_takes_the_tokenizer_that_is_named() -> None:
    tiny_models.save("gpt2", Path("gpt2"))
    tiny_models.save_tokenizer(Path("other"))
    given = wanted("some text", tokenizer=Path("other"))
    found = choose(tiny_models.make("gpt2"), Path("gpt2"), given)
    assert found.batch["input_ids"].shape == (1, 11)
    assert found.words == "1 x 11 tokens of text.txt"
    with pytest.raises(DiagnosisError, match="no tokenizer in gpt2"):
        choose(tiny_models.make("gpt2"), Path("gpt2"), wanted("some text"))


def test_a_vocabulary_that_is_too_small_for_the_text() -> None:
    tiny_models.save_tokenizer(Path("model"))
    model = tiny_models.make("bert")
    model.config.vocab_size = 40
    with pytest.raises(DiagnosisError, match=r"not of this model: it gives token \d+.*knows 40"):
        choose(model, Path("model"), wanted("some text"))
