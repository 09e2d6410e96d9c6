"""Images from a folder: every kind that is met, broken ones, and as a model wants them."""

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

from attncond.diagnose.images import for_timm, for_transformers, read_images
from attncond.errors import DiagnosisError


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_processor_is_used_where_there_is_one() -> None:
    import transformers

    tiny_models.save_images(Path("images"))
    shape = (3, 32, 32)
    plain, notes = for_transformers(Path("vit"), Path("images"), 3, shape)
    assert "no preprocessor_config.json" in notes[-1]
    processor = transformers.ViTImageProcessor(
        size={"height": 32, "width": 32}, image_mean=[0.0] * 3, image_std=[1.0] * 3
    )
    processor.save_pretrained("vit")
    own, notes = for_transformers(Path("vit"), Path("images"), 3, shape)
    assert own["pixel_values"].shape == plain["pixel_values"].shape == (3, 3, 32, 32)
    assert plain["pixel_values"].min() < 0 <= own["pixel_values"].min()
    assert not notes
    Path("vit/preprocessor_config.json").write_text("{broken")
    with pytest.raises(DiagnosisError, match="image processor in vit cannot be used"):
        for_transformers(Path("vit"), Path("images"), 3, shape)


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


def model(channels: int) -> Any:
    middle = (0.5,) * channels
    overlay = {"input_size": (channels, 160, 160), "mean": middle, "std": middle}
    return timm.create_model("test_vit", in_chans=channels, pretrained_cfg_overlay=overlay)


def test_images_of_as_many_channels_as_the_model_reads() -> None:
    tiny_models.save_images(Path("images"), 1)
    grey, _ = for_timm(model(1), Path("images"), 1)
    assert grey.shape[:2] == (1, 1)
    for read in (
        lambda: for_timm(model(4), Path("images"), 1),
        lambda: for_transformers(None, Path("images"), 1, (4, 8, 8)),
    ):
        with pytest.raises(DiagnosisError, match=r"images of 4 channels: .*--batch MODULE"):
            read()


def test_without_a_processor_images_are_scaled_to_one() -> None:
    Path("images").mkdir()
    for name, value in (("a", 0), ("b", 255)):
        Image.new("RGB", (9, 5), (value,) * 3).save(f"images/{name}.png")
    batch, notes = for_transformers(None, Path("images"), 2, (3, 4, 6))
    pixels = batch["pixel_values"]
    assert pixels.shape == (2, 3, 4, 6)
    assert torch.equal(pixels[0], torch.full((3, 4, 6), -1.0))
    assert torch.equal(pixels[1], torch.full((3, 4, 6), 1.0))
    assert "resized to 4x6 and scaled to -1 ... 1" in notes[-1]


def test_many_broken_images_are_counted() -> None:
    tiny_models.save_images(Path("images"), 1)
    for n in range(7):
        Path(f"images/.{n}.png").write_bytes(b"hidden, and not even tried")
        Path(f"images/-{n}.png").write_bytes(b"broken")
    images, notes = read_images(Path("images"), 1)
    assert len(images) == 1
    assert len(notes) == 6
    assert notes[-1] == "2 more images skipped because they cannot be read"


def test_no_more_are_opened_than_are_wanted() -> None:
    tiny_models.save_images(Path("images"), 2)
    Path("images/z.png").write_bytes(b"broken, and never looked at")
    assert read_images(Path("images"), 2)[1] == []


def test_numbers_of_any_range_become_grey() -> None:
    Path("images").mkdir()
    deep = Image.new("F", (2, 1))
    deep.putpixel((0, 0), -3.0)
    deep.putpixel((1, 0), 5.0)
    deep.save("images/a.tif")
    Image.new("I", (2, 1), 70000).save("images/b.tif")  # nothing varies
    (first, second), _ = read_images(Path("images"), 2, channels=1)
    assert [first.getpixel((x, 0)) for x in (0, 1)] == [0, 255]
    assert second.getpixel((0, 0)) == second.getpixel((1, 0))
