"""Images that stay on disk: read and transformed in worker processes, the same with any number.

Each image is transformed with random numbers of its own, a function of seed, epoch and place. What
comes back is uint8: the rest (normalising, erasing, mixing) is done on the device.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from attncond.lab.data.source import DataError, DataSettings, Files

__all__ = ["Stream"]

Key = tuple[int, int, int]  # epoch, place in it, image
Batch = tuple[Tensor, Tensor]


class Stream:
    """Batches (uint8 images, labels) for lists of keys.

    In training its workers live as long as it does; an evaluation's would only sit idle.
    """

    def __init__(self, files: Files, data: DataSettings, seed: int, train: bool, pin: bool) -> None:
        dataset = _Images(files, _transform(files, data, train), seed)
        self._keys: Iterable[list[Key]] = ()
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=_Handed(self),
            num_workers=data.workers,
            collate_fn=_collate,
            pin_memory=pin,
            persistent_workers=train and data.workers > 0,
            worker_init_fn=_quiet,
            generator=torch.Generator(),  # or each epoch would draw from the global one
        )

    def __call__(self, keys: Iterable[list[Key]]) -> Iterator[Batch]:
        """The batches with these keys, in this order."""
        self._keys = keys
        for batch in self._loader:
            if isinstance(batch, str):
                raise DataError(batch)
            yield batch


class _Handed:
    """A batch sampler that hands out the stream's keys of the moment."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[list[Key]]:
        return iter(self.stream._keys)


class _Images(Dataset[tuple[Tensor, int] | str]):
    def __init__(self, files: Files, transform: Callable[[Any], Any], seed: int) -> None:
        self.files, self.transform, self.seed = files, transform, seed

    def __getitem__(self, key: Key) -> tuple[Tensor, int] | str:
        from PIL import Image

        epoch, place, image = key
        path = self.files.path(image)
        try:
            with Image.open(path) as opened:
                picture = opened.convert("RGB")
        # Decoders raise all kinds of errors on damaged files. As text, because an error that
        # crosses from a worker arrives with the worker's whole traceback as its message.
        except Exception as error:
            return f"{path} cannot be read as an image: {error}. Replace it, or take it away."
        with _Seeded(self.seed, epoch, place):
            pixels = self.transform(picture)
        return torch.as_tensor(pixels), int(self.files.labels[image])


class _Seeded:
    """The global generators that timm's and torchvision's transforms draw from, seeded; and back.

    Without workers they are the training's own.
    """

    def __init__(self, *words: int) -> None:
        self.words = words

    def __enter__(self) -> None:
        self.before = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
        state = np.random.SeedSequence(self.words).generate_state(4)
        random.seed(int(state[0]))
        np.random.seed(state[1])
        # Not torch.manual_seed, which would reach for the GPU.
        torch.default_generator.manual_seed(int(state[2]) << 32 | int(state[3]))

    def __exit__(self, *error: object) -> None:
        python, numpy, pytorch = self.before
        random.setstate(python)
        np.random.set_state(numpy)
        torch.random.set_rng_state(pytorch)


def _transform(files: Files, data: DataSettings, train: bool) -> Callable[[Any], Any]:
    from timm.data import create_transform

    augment = data.augment
    if train and augment.crop:
        raise DataError(
            "data.augment.crop pads small images; images from folders are cropped and resized at "
            "random as ImageNet's are. Set it to 0"
        )
    try:
        made: Callable[[Any], Any] = create_transform(
            data.image_size,
            is_training=train,
            hflip=0.5 if augment.flip else 0.0,
            color_jitter=augment.jitter or None,
            auto_augment=augment.randaugment,
            interpolation="bicubic",
            mean=files.mean,
            std=files.std,
            crop_pct=0.875,
            normalize=False,
        )
    except (AssertionError, ValueError) as error:
        raise DataError(
            f"data.augment.randaugment: timm does not understand '{augment.randaugment}'; "
            "e.g. rand-m9-mstd0.5-inc1"
        ) from error
    for step in getattr(made, "transforms", ()):
        for operation in getattr(step, "ops", ()):
            if operation.name.startswith("Posterize"):
                operation.aug_fn = _posterize
    return made


def _posterize(picture: Any, bits: int, **_: Any) -> Any:
    """timm asks for no bit at all at times: black, which Pillow 13 refuses to make."""
    from PIL import ImageOps

    return ImageOps.posterize(picture, min(bits, 8)) if bits > 0 else picture.point(_black)


def _black(value: int) -> int:
    return 0


def _collate(items: list[tuple[Tensor, int] | str]) -> Batch | str:
    for item in items:
        if isinstance(item, str):
            return item
    images, labels = zip(*items, strict=True)
    return torch.stack(images), torch.tensor(labels)


def _quiet(worker: int) -> None:
    # Ctrl-C reaches the whole group; the training ends its workers, they need not say so each.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
