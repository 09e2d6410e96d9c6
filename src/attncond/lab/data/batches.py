"""One rank's batches: the same for the same seed, whatever came before and however many ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from attncond.lab.data.crops import Crops, padded
from attncond.lab.data.draws import Draw, Ints, evaluation_bounds, image_order, rank_places
from attncond.lab.data.erasing import Erasing
from attncond.lab.data.layers import Layers, colour_jitter, rand_augment
from attncond.lab.data.mixing import Mixing
from attncond.lab.data.source import DataError, DataSettings, Files, Split
from attncond.lab.data.streaming import Stream

__all__ = ["Batches"]


class Batches:
    """One rank's share of every batch of ``batch_size * world`` images.

    In training every epoch has its own order and augmentation, both functions of ``seed`` and the
    epoch's number, and what does not fill a batch is left out. In evaluation images come in their
    own order, all of them, as they are. Images are float (N, C, H, W), normalised, on ``device``;
    targets are int64 labels, or float (N, ``classes``) in training with mixup or cutmix, with
    ``smoothing`` in them.

    >>> batches = Batches(source.train, data, batch_size=256, ...)          # doctest: +SKIP
    >>> for images, targets in batches.epoch(3, start=17): ...              # doctest: +SKIP
    """

    def __init__(
        self,
        split: Split | Files,
        data: DataSettings,
        *,
        batch_size: int,
        seed: int,
        device: torch.device | str,
        train: bool,
        classes: int,
        rank: int = 0,
        world: int = 1,
        smoothing: float = 0.0,
    ) -> None:
        self.data, self.train, self.seed = data, train, seed
        self.batch_size, self.rank, self.world = batch_size, rank, world
        self.classes, self.smoothing = classes, smoothing
        self.device = torch.device(device)
        self.count = len(split)
        self.mixes = train and bool(data.augment.mixup or data.augment.cutmix)
        self.steps_per_epoch = self._steps()
        self._mean = self._per_channel(split.mean)
        self._std = self._per_channel(split.std)
        self._images: Tensor | None = None
        if isinstance(split, Split):
            self._images = padded(split.images.to(self.device), data.augment.crop if train else 0)
            self._labels = split.labels.to(self.device)
            self.size = split.images.shape[-1]
        else:
            self._stream = Stream(split, data, seed, train, self.device.type == "cuda")
            self.size = data.image_size

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of an epoch from step ``start`` on: images and targets."""
        return self._training(number, start) if self.train else self._evaluation(start)

    def _training(self, number: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        augment = self.data.augment
        places = rank_places(
            self.steps_per_epoch, self.batch_size, self.rank, self.world, self.mixes
        )
        order = image_order(self.count, augment.repeats, self.seed, number)
        draw = Draw(self.seed, number, self.count, places, self.device)
        erase = Erasing(draw, augment.erase, self.size) if augment.erase else None
        mix = None
        if self.mixes:
            mix = Mixing(augment, draw, self.size, self.classes, self.smoothing)
        if self._images is not None:
            batches = self._views(self._images, draw, order, start)
        else:
            batches = self._streamed(number, places, order, start)
        for step, (images, labels) in enumerate(batches, start):
            images = self._normalised(images)
            if erase is not None:
                images = erase(images, step)
            yield (images, labels) if mix is None else mix(images, labels, step)

    def _views(
        self, images: Tensor, draw: Draw, order: Ints, start: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        augment = self.data.augment
        crops = Crops(augment, draw, order, self.size)
        fill = (self._mean.flatten()).round()
        layers: Layers | None = None
        if augment.randaugment:
            layers = rand_augment(draw, augment.randaugment, self.size, fill)
        elif augment.jitter:  # as in timm, RandAugment takes its place
            layers = colour_jitter(draw, augment.jitter, fill)
        for step in range(start, self.steps_per_epoch):
            views = crops(images, step)
            yield views if layers is None else layers(views, step), self._labels[crops.which[step]]

    def _streamed(
        self, number: int, places: Ints, order: Ints, start: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        keys = (
            [(number, *each) for each in zip(row.tolist(), order[row].tolist(), strict=True)]
            for row in places[start:]
        )
        for images, labels in self._stream(keys):
            yield self._here(images), self._here(labels)

    def _evaluation(self, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        bounds = evaluation_bounds(self.count, self.batch_size, self.rank, self.world)[start:]
        if self._images is None:
            keys = ([(0, i, i) for i in range(low, high)] for low, high in bounds)
            for images, labels in self._stream(keys):
                yield self._normalised(self._here(images)), self._here(labels)
            return
        for low, high in bounds:
            images = self._images[low:high].permute(0, 3, 1, 2).contiguous()
            yield self._normalised(images), self._labels[low:high]

    def _normalised(self, images: Tensor) -> Tensor:
        return (images.float() - self._mean) / self._std

    def _here(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)

    def _per_channel(self, values: tuple[float, ...]) -> Tensor:
        return torch.tensor(np.array(values) * 255, dtype=torch.float32, device=self.device).view(
            1, -1, 1, 1
        )

    def _steps(self) -> int:
        whole = self.batch_size * self.world
        if self.batch_size < 1:
            raise DataError(
                f"a batch of {self.batch_size} images per process: at least 1 is needed"
            )
        if self.mixes and self.batch_size % 2:
            raise DataError(
                f"mixup and cutmix mix images in pairs: a batch of {self.batch_size} per process "
                "is odd. Change train.batch_size"
            )
        if not self.count:
            raise DataError("there is no image to make batches of")
        if not self.train:
            return -(-self.count // whole)
        if self.count < whole:
            raise DataError(
                f"{self.count} training images do not fill one batch of {whole}: make "
                "train.batch_size or data.validation smaller, or data.limit larger"
            )
        return self.count // whole
