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

from attncond.diagnose.images import read_images
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


def test_images_with_and_without_a_processor() -> None:
    import transformers

    tiny_models.save_images(Path("images"))
    model = tiny_models.make("vit")
    plain = choose(model, Path("vit"), Wanted(images=Path("images")))
    assert shapes(plain) == {"pixel_values": (3, 3, 32, 32)}
    assert "no preprocessor_config.json" in plain.notes[-1]
    assert plain.batch["pixel_values"].abs().max() <= 1
    processor = transformers.ViTImageProcessor(
        size={"height": 32, "width": 32}, image_mean=[0.0] * 3, image_std=[1.0] * 3
    )
    processor.save_pretrained("vit")
    own = choose(model, Path("vit"), Wanted(images=Path("images"), samples=3))
    assert shapes(own) == {"pixel_values": (3, 3, 32, 32)}
    assert own.batch["pixel_values"].min() >= 0
    assert not own.notes
    Path("vit/preprocessor_config.json").write_text("{broken")
    with pytest.raises(DiagnosisError, match="image processor in vit cannot be used"):
        choose(model, Path("vit"), Wanted(images=Path("images")))


def test_every_kind_of_image_is_read() -> None:
    folder = Path("images/ü b [0]")
    folder.mkdir(parents=True)
    colour = Image.new("RGB", (8, 6), (255, 0, 0))
    colour.save(folder / "a.jpg")
    colour.convert("L").save(folder / "b.png")
    Image.new("RGBA", (8, 6), (255, 0, 0, 0)).save(folder / "c.PNG")  # nothing to be seen
    colour.convert("CMYK").save(folder / "d.jpeg")
    colour.convert("P").save(folder / "e.gif")
    Image.new("I;16", (8, 6), 65535).save(folder / "f.tif")
    Image.new("1", (8, 6), 1).save(folder / "g.bmp")
    colour.save(folder / "h.webp")
    turned = Image.Exif()
    turned[0x0112] = 6
    colour.save(folder / "i.jpg", exif=turned)
    (folder / ".j.jpg").write_text("hidden: left behind by another system")
    (folder / "k.txt").write_text("no image")
    images, notes = read_images(Path("images"), 20)
    assert [image.mode for image in images] == ["RGB"] * 9
    assert [image.size for image in images] == [(8, 6)] * 8 + [(6, 8)]
    pixels = [image.getpixel((0, 0)) for image in images]
    assert pixels[2] == (255, 255, 255)
    assert pixels[5] == (255, 255, 255)
    assert notes == ["9 images were found, 20 asked for"]
    assert [i.mode for i in read_images(Path("images"), 2, channels=1)[0]] == ["L", "L"]
    one, _ = read_images(folder / "a.jpg", 1)
    assert len(one) == 1


def test_broken_images_are_skipped_with_a_note_or_named() -> None:
    tiny_models.save_images(Path("images"), 2)
    whole = Path("images/0.png").read_bytes()
    Path("images/00.png").write_bytes(whole[: len(whole) // 2])
    Path("images/000.jpg").write_bytes(b"")
    images, notes = read_images(Path("images"), 2)
    assert len(images) == 2
    assert "images/00.png" in " ".join(notes)
    assert "cannot be read" in notes[0]
    for name in ("0.png", "1.png"):
        Path("images", name).unlink()
    with pytest.raises(DiagnosisError, match=r"no image could be read: images/00\.png.*1 more"):
        read_images(Path("images"), 2)


def test_a_bomb_is_a_broken_image(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_models.save_images(Path("images"), 1)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(DiagnosisError, match="DecompressionBomb"):
        read_images(Path("images"), 1)


def test_folders_without_images(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DiagnosisError, match="there is no folder nowhere"):
        read_images(Path("nowhere"), 1)
    Path("empty").mkdir()
    Path("empty/notes.txt").write_text("x")
    with pytest.raises(DiagnosisError, match=r"no images in empty.*\.jpg"):
        read_images(Path("empty"), 1)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.listdir", refuse)
    with pytest.raises(DiagnosisError, match="empty cannot be read: Permission denied"):
        read_images(Path("empty"), 1)


def wanted(text: str | bytes, **options: Any) -> Wanted:
    content = text if isinstance(text, bytes) else text.encode()
    Path("text.txt").write_bytes(content)
    return Wanted(text=Path("text.txt"), **options)


def test_text_is_cut_into_windows() -> None:
    tiny_models.save_tokenizer(Path("model"))
    model = tiny_models.make("bert")
    inputs = choose(model, Path("model"), wanted("abcdefghij" * 9, samples=3, length=12))
    ids = inputs.batch["input_ids"]
    assert ids.shape == (3, 12)
    assert (ids[:, 0] == 1).all()
    assert (ids[:, -1] == 2).all()
    assert ids[0, 1:11].tolist() == ids[1, 1:11].tolist()  # ten letters in each
    assert inputs.words == "3 x 12 tokens of text.txt"
    assert not inputs.notes
    short = choose(model, Path("model"), wanted("\ufeffabc", samples=3, length=12))
    assert short.batch["input_ids"].tolist() == [[1, *(4 + ord(c) - 32 for c in "abc"), 2]]
    assert "gives 1 x 5 tokens; 3 x 12 were asked for" in short.notes[0]
    strange = choose(model, Path("model"), wanted("äöü" * 30, samples=2, length=12))
    assert "unknown to the tokenizer" in strange.notes[0]


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


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "text.txt is empty"),
        (b" \n\t\n", "text.txt is empty"),
        (b"\x89PNG\r\n\x1a\n\0\0\xff\xfe", "is not text in UTF-8"),
        (b"abc\0\0\0def", "holds zero bytes"),
        (b"a", "too short: its text has 3 tokens"),
    ],
)
def test_files_that_are_no_text(content: bytes, said: str) -> None:
    tiny_models.save_tokenizer(Path("model"))
    with pytest.raises(DiagnosisError, match=said):
        choose(tiny_models.make("bert"), Path("model"), wanted(content))


def test_text_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models.make("bert")
    with pytest.raises(DiagnosisError, match=r"there is no file gone\.txt"):
        choose(model, None, Wanted(text=Path("gone.txt")))
    Path("folder").mkdir()
    with pytest.raises(DiagnosisError, match="folder is a folder"):
        choose(model, None, Wanted(text=Path("folder")))
    given = wanted("some text")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(DiagnosisError, match=r"text\.txt cannot be read: Permission denied"):
        choose(model, None, given)


def test_text_without_a_tokenizer_is_an_error_that_tells_the_ways_out() -> None:
    """transformers would make an empty tokenizer without a word."""
    tiny_models.save("gpt2", Path("gpt2"))
    model = tiny_models.make("gpt2")
    with pytest.raises(
        DiagnosisError, match=r"no tokenizer in gpt2.*--tokenizer.*leave --text out"
    ):
        choose(model, Path("gpt2"), wanted("some text"))
    with pytest.raises(DiagnosisError, match="--text needs a tokenizer"):
        choose(model, None, wanted("some text"))
    tiny_models.save_tokenizer(Path("other"))
    found = choose(model, Path("gpt2"), wanted("some text", tokenizer=Path("other")))
    assert found.batch["input_ids"].shape == (1, 11)
    Path("gpt2/tokenizer.json").write_text("{broken")
    with pytest.raises(DiagnosisError, match="tokenizer in gpt2 cannot be loaded"):
        choose(model, Path("gpt2"), wanted("some text"))


def test_a_tokenizer_of_another_model_is_told() -> None:
    tiny_models.save_tokenizer(Path("model"))
    model = tiny_models.make("bert")
    model.config.vocab_size = 40
    with pytest.raises(DiagnosisError, match=r"not of this model: it gives token \d+.*knows 40"):
        choose(model, Path("model"), wanted("some text"))


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
