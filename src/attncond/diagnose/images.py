"""Images from a folder, as a model was trained to see them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attncond.errors import DiagnosisError
from attncond.sources import library, one_line

__all__ = ["for_timm", "for_transformers", "read_images"]

# Formats that Pillow reads by itself; .eps would start another program.
ENDINGS = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".pbm", ".jp2", ".avif"),
)
_PROCESSORS = ("preprocessor_config.json", "processor_config.json", "image_processor_config.json")


def read_images(path: Path, count: int, channels: int = 3) -> tuple[list[Any], list[str]]:
    """The first ``count`` images in a folder and below, by name; and notes on what was skipped.

    ``channels`` is 3 for colour and 1 for grey.
    """
    pil = library("PIL.Image")
    images: list[Any] = []
    broken: list[str] = []
    for file in _files(path):
        if len(images) == count:
            break
        try:
            images.append(_opened(pil, file, channels))
        # Decoders raise all kinds of errors on damaged files, and one on those that are too large.
        except Exception as error:
            broken.append(f"{file}: {one_line(error)}")
    if not images and broken:
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        raise DiagnosisError(f"no image could be read: {broken[0]}{more}")
    if not images:
        raise DiagnosisError(
            f"there are no images in {path}, nor below it: looked for {', '.join(ENDINGS)}"
        )
    notes = [f"image skipped because it cannot be read: {b}" for b in broken[:5]]
    if len(broken) > 5:
        notes.append(f"{len(broken) - 5} more images skipped because they cannot be read")
    if len(images) < count:
        notes.append(f"{len(images)} images were found, {count} asked for")
    return images, notes


def _files(path: Path) -> Iterator[Path]:
    """Image files in the order of their names, one folder after another, looked up as needed."""
    try:
        if path.is_file():
            yield path
            return
        if not path.exists():
            raise DiagnosisError(f"there is no folder {path}")
        os.listdir(path)  # os.walk keeps silent about what it may not read
    except OSError as error:
        raise DiagnosisError(f"{path} cannot be read: {error.strerror or error}") from error
    for folder, folders, files in os.walk(path):
        folders.sort()
        for name in sorted(files):
            if name.lower().endswith(ENDINGS) and not name.startswith("."):
                yield Path(folder) / name


def _opened(pil: Any, file: Path, channels: int) -> Any:
    with pil.open(file) as opened:
        image = library("PIL.ImageOps").exif_transpose(opened)
        if image.mode.startswith("I;16"):  # Pillow would clip these to 255
            image = image.point(lambda value: value / 256).convert("L")
        elif image.mode in ("I", "F"):
            low, high = image.getextrema()
            scale = 255 / (high - low) if high > low else 1
            image = image.point(lambda value: (value - low) * scale).convert("L")
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = pil.alpha_composite(pil.new("RGBA", image.size, "white"), image)
        return image.convert("L" if channels == 1 else "RGB")


def for_timm(model: Any, path: Path, count: int) -> tuple[Tensor, list[str]]:
    """A batch (n, channels, height, width) as timm would make it to evaluate the model."""
    data = library("timm.data")
    config = data.resolve_model_data_config(model)
    images, notes = read_images(path, count, _checked(config["input_size"][0]))
    transform = data.create_transform(**config, is_training=False)
    return torch.stack([transform(image) for image in images]), notes


def for_transformers(
    folder: Path | None, path: Path, count: int, shape: tuple[int, int, int]
) -> tuple[Mapping[str, Tensor], list[str]]:
    """What the folder's image processor makes of images; resized to ``shape`` where it has none."""
    images, notes = read_images(path, count, _checked(shape[0]))
    if folder is not None and any((folder / name).is_file() for name in _PROCESSORS):
        try:
            processor = library("transformers").AutoImageProcessor.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
            return processor(images=images, return_tensors="pt"), notes
        except Exception as error:
            raise DiagnosisError(
                f"the image processor in {folder} cannot be used: {one_line(error)}"
            ) from error
    transform = _resized(shape)
    notes.append(
        f"there is no {_PROCESSORS[0]}: images were resized to {shape[1]}x{shape[2]} and scaled to "
        "-1 ... 1"
    )
    return {"pixel_values": torch.stack([transform(image) for image in images])}, notes


def _resized(shape: tuple[int, int, int]) -> Callable[[Any], Tensor]:
    transforms = library("torchvision.transforms")
    middle = [0.5] * shape[0]
    composed: Callable[[Any], Tensor] = transforms.Compose(
        [
            transforms.Resize(shape[1:], antialias=True),
            transforms.ToTensor(),
            transforms.Normalize(middle, middle),
        ]
    )
    return composed


def _checked(channels: int) -> int:
    if channels not in (1, 3):
        raise DiagnosisError(
            f"the model reads images of {channels} channels: make them yourself, with "
            "--batch MODULE:FUNCTION"
        )
    return channels
