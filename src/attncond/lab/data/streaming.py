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

from attncond.lab.data.decoding import in_colour
from attncond.lab.data.layers import read_policy
from attncond.lab.data.source import DataError, DataSettings, Files

__all__ = ["Stream"]

Key = tuple[int, int, int]  # epoch, place in it, image
Batch = tuple[Tensor, Tensor]


class Stream:
    """Batches (uint8 images, labels) for lists of keys.

    In training its workers live as long as it does; an evaluation's would only sit idle.
    """

    def __init__(self, files: Files, data: DataSettings, seed: int, train: bool, pin: bool) -> None:
        self._dataset = _Images(files, _transform(files, data, train), seed)
        self._workers, self._train, self._pin = data.workers, train, pin
        self._handed = _Handed()
        self._loader: DataLoader[Any] | None = None

    def __call__(self, keys: Iterable[list[Key]]) -> Iterator[Batch]:
        """The batches with these keys, in this order."""
        self._handed.keys = keys
        if self._loader is None:
            self._loader = self._made()
        batches = iter(self._loader)
        try:
            while (batch := next(batches, None)) is not None:
                if isinstance(batch, str):
                    raise DataError(batch)
                yield batch
        except BaseException:
            # Whatever ended it, its workers end now: left to the garbage collector, they would
            # live as long as somebody holds the error, and then be waited for.
            self._loader = None
            getattr(batches, "_shutdown_workers", int)()
            raise

    def _made(self) -> DataLoader[Any]:
        return DataLoader(
            self._dataset,
            batch_sampler=self._handed,
            num_workers=self._workers,
            collate_fn=_collate,
            pin_memory=self._pin,
            persistent_workers=self._train and self._workers > 0,
            worker_init_fn=_quiet,
            generator=torch.Generator(),  # or each epoch would draw from the global one
        )


class _Handed:
    """A batch sampler that hands out the keys of the moment.

    It knows nothing of its stream: workers in a reference cycle would be ended by the garbage
    collector, whose order of doing things keeps each of them waiting for five seconds.
    """

    keys: Iterable[list[Key]] = ()

    def __iter__(self) -> Iterator[list[Key]]:
        return iter(self.keys)


class _Images(Dataset[tuple[Tensor, int] | str]):
    def __init__(self, files: Files, transform: Callable[[Any], Any], seed: int) -> None:
        self.files, self.transform, self.seed = files, transform, seed

    def __getitem__(self, key: Key) -> tuple[Tensor, int] | str:
        from PIL import Image

        epoch, place, image = key
        path = self.files.path(image)
        try:
            with Image.open(path) as opened:
                picture = in_colour(opened)
                picture.load()
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
    if augment.randaugment:
        read_policy(augment.randaugment, in_memory=False)
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
