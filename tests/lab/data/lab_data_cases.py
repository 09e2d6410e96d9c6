"""A recipe's data section for tests, without a recipe."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Augment:
    crop: int = 0
    flip: bool = False
    randaugment: str | None = None
    mixup: float = 0.0
    cutmix: float = 0.0
    mixup_prob: float = 1.0
    erase: float = 0.0
    jitter: float = 0.0
    repeats: int = 1


@dataclass(frozen=True)
class Data:
    name: str = "digits"
    image_size: int = 8
    validation: float = 0.1
    limit: int | None = None
    augment: Augment = field(default_factory=Augment)
    workers: int = 0
