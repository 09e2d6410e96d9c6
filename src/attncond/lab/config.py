"""What one run is made of: the schema that recipes are checked against.

Values are checked strictly (a text is no number, ``true`` is no 1), unknown keys are refused, and
combinations that cannot work are refused before anything is trained.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from attncond.errors import ConditioningError, close
from attncond.lab.initial import STARTS
from attncond.methods import Method, Spectral
from attncond.methods.parse import parse_method

Form = Literal["paper", "small", "smoke"]
FORMS: tuple[Form, ...] = ("paper", "small", "smoke")

Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]


# timm passes over what has no number, and over sets of operations (-t) that it does not know.
_RANDAUGMENT = re.compile(r"rand(-(t(weights|3aw?)|(?!t)[a-z]+\d[^-]*))+")


class RecipeError(ConditioningError):
    """A recipe, or what was set on top of it, cannot be run; the message names the key."""


class Contradiction(ValueError):
    """Values that are fine alone and impossible together; ``keys`` are those that disagree."""

    def __init__(self, keys: str | tuple[str, ...], message: str) -> None:
        super().__init__(message)
        self.keys = (keys,) if isinstance(keys, str) else keys


class Section(BaseModel):
    """A part of a :class:`Config`; cannot be changed once made."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Augment(Section):
    """How training images are varied."""

    crop: Annotated[int, Field(ge=0)] = 0
    """Pixels of padding for a random crop of the image's own size; 0: none."""
    flip: bool = False
    """Mirror half of the images."""
    randaugment: str | None = None
    """RandAugment as timm writes it, e.g. rand-m9-mstd0.5-inc1."""
    mixup: NonNegative = 0.0
    """alpha of mixup; 0: off."""
    cutmix: NonNegative = 0.0
    """alpha of cutmix; 0: off."""
    mixup_prob: Share = 1.0
    """Share of the batches that are mixed."""
    erase: Share = 0.0
    """Probability of random erasing."""
    jitter: NonNegative = 0.0
    """Strength of colour jitter."""
    repeats: Count = 1
    """Views of an image in one batch (repeated augmentation)."""


class Data(Section):
    """Which images, and how they are split."""

    name: Literal[
        "digits", "cifar10", "tiny_imagenet32", "cifar10_binary", "cifar100_binary", "image_folder"
    ]
    """The data set."""
    image_size: Count
    """Height and width that the model sees."""
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of the training images held out to choose settings on; 0: none."""
    limit: Count | None = None
    """Only so many images, drawn by the seed, for each of training, validation and test."""
    augment: Augment = Augment()
    workers: Annotated[int, Field(ge=0)] = 4
    """Processes that decode images, for sets that do not fit into memory."""


class Model(Section):
    """Which network."""

    name: str
    """A key of attncond.lab.models.MODELS, or the name of any timm model."""
    kwargs: dict[str, Any] = {}
    """Further arguments of the model, e.g. {depth: 4}."""
    drop_path: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Stochastic depth, as the model's own drop_path_rate."""
    norm: bool = True
    """False: every LayerNorm is left out (Table 6)."""
    init: str = "default"
    """default, mimetic, or a method such as spectral:lam=1, which is applied and folded into the
    weights before training, so that it is an initialisation and nothing else. Several are folded
    one after the other: spectral:roles=qk,kappa=1.5 + spectral:roles=v. Among them may be output
    or minus-output: the output projections, which no method reaches, start as s(W ± λI)."""

    def parts(self) -> list[str]:
        """What ``init`` does, one after the other; nothing for default."""
        return [] if self.init == "default" else self.init.split(" + ")


class Optim(Section):
    """AdamW."""

    lr: Positive
    """Largest learning rate."""
    weight_decay: NonNegative = 0.05
    """Not applied to biases, norms, tokens and position tables."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.999)
    eps: Positive = 1e-8
    qkv_lr: Positive = 1.0
    """Multiplies the learning rate of W_Q, W_K and W_V."""
    output_lr: Positive = 1.0
    """Multiplies the learning rate of attention's output projections."""
    clip: Positive | None = None
    """Largest norm of the gradient."""


class Schedule(Section):
    """Linear warm-up, then cosine down to min_lr."""

    epochs: Count
    warmup_epochs: NonNegative = 0.0
    min_lr: NonNegative = 0.0


class Train(Section):
    """How a step is made."""

    batch_size: Count
    """Images of one optimizer step, over all processes and accumulated parts."""
    accumulate: Count = 1
    """Parts that a batch is computed in."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    compile: bool = False
    """torch.compile."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of the moving average of the weights that is evaluated instead of them."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    distill: Literal["hard", "soft"] | None = None
    """How a DeiT's distillation head follows the teacher; none: both heads learn the labels."""
    teacher: str | None = None
    """Folder of the finished run whose model is the teacher."""
    checkpoint_every: Count = 1000
    """Optimizer steps between two checkpoints."""
    evaluate_every: Count = 1
    """Epochs between two evaluations on the validation images."""


class Watch(Section):
    """The Monitor."""

    every: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps between two measurements; 0: off."""
    probe: bool = False
    """Also run the model on a fixed batch: entropy, gap, the attention Jacobian."""
    tokens: Count | None = 32
    """Tokens that the probe's Jacobians are made of; none: no Jacobians."""


class Config(Section):
    """Everything that decides one run."""

    recipe: str
    form: Form
    variant: str
    seed: Annotated[int, Field(ge=0, lt=2**31)]  # NumPy takes 32 bits, each process its own
    data: Data
    model: Model
    methods: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Methods as attncond.methods.parse reads them, applied in this order."""
    optim: Optim
    schedule: Schedule
    train: Train
    watch: Watch = Watch()

    def conditioners(self) -> tuple[Method, ...]:
        """``methods`` as objects for :func:`attncond.condition`."""
        return tuple(parse_method(text) for text in self.methods)

    def check_device(self, device: str) -> None:
        """Refuse what the kind of device ("cpu", "cuda", ...) cannot compute."""
        if self.train.precision == "fp16" and device == "cpu":
            raise RecipeError("train.precision: fp16 needs a GPU; on a CPU use fp32 or bf16")

    @model_validator(mode="after")
    def _possible(self) -> Config:
        for check in (_methods, _model, _data, _training):
            check(self)
        return self


# Arguments of timm's models that other settings decide.
_GIVEN = {
    "num_classes": "the data decides it",
    "img_size": "say data.image_size",
    "in_chans": "the data decides it",
    "drop_path_rate": "say model.drop_path",
    "pretrained": "the seed decides every weight",
    "checkpoint_path": "the seed decides every weight",
}


def _methods(c: Config) -> None:
    kinds: dict[type, str] = {}
    for text in c.methods:
        try:
            method = parse_method(text)
        except ConditioningError as error:
            raise Contradiction("methods", str(error)) from error
        if type(method) in kinds:
            raise Contradiction(
                "methods",
                f"'{kinds[type(method)]}' and '{text}' are two methods of one kind "
                f"({type(method).__name__}); a model can carry one of each kind",
            )
        kinds[type(method)] = text


def _model(c: Config) -> None:
    for name, advice in _GIVEN.items():
        if name in c.model.kwargs:
            raise Contradiction(f"model.kwargs.{name}", f"{name} cannot be given here: {advice}")
    try:
        json.dumps(c.model.kwargs, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise Contradiction("model.kwargs", f"not plain data: {error}") from error
    parts = c.model.parts()
    for text in parts:
        if not _starts(text):
            known = ["default", *STARTS, "spectral"]
            raise Contradiction(
                "model.init",
                f"'{text}' is no initialisation.{close(text, known)} There are default, mimetic, "
                "and what can be folded into the weights: spectral methods, output and "
                "minus-output, several of them joined by ' + '",
            )
    if "mimetic" in parts and len(parts) > 1:
        raise Contradiction(
            "model.init",
            "'mimetic' stands alone: it starts every weight anew that the others are about",
        )


def _starts(text: str) -> bool:
    try:
        return text in STARTS or isinstance(parse_method(text), Spectral)
    except ConditioningError as error:
        if ":" in text:  # more is wrong than the name
            raise Contradiction("model.init", str(error)) from error
        return False


def _data(c: Config) -> None:
    d, size = c.data, c.train.batch_size
    if d.limit is not None and d.limit < size:
        raise Contradiction(
            ("data.limit", "train.batch_size"),
            f"{d.limit} images do not fill one batch of {size}",
        )
    if d.name == "digits" and d.image_size < 8:
        raise Contradiction("data.image_size", "digits have 8 pixels a side; no fewer will do")
    if d.name == "image_folder" and d.augment.crop:
        raise Contradiction(
            ("data.augment.crop", "data.name"),
            "an image_folder is cropped at random sizes anyway; the padded crop is for sets of "
            "small images",
        )
    if d.augment.crop >= d.image_size:
        raise Contradiction(
            ("data.augment.crop", "data.image_size"),
            f"{d.augment.crop} pixels of padding for images of {d.image_size}",
        )
    if d.augment.randaugment is not None and not _RANDAUGMENT.fullmatch(d.augment.randaugment):
        raise Contradiction(
            "data.augment.randaugment",
            f"'{d.augment.randaugment}' is not written as timm does, like rand-m9-mstd0.5-inc1",
        )
    if (d.augment.mixup or d.augment.cutmix) and size % 2:
        raise Contradiction(
            ("train.batch_size", "data.augment.mixup", "data.augment.cutmix"),
            f"mixup and cutmix pair the images of a batch, and {size} is odd",
        )


def _training(c: Config) -> None:
    s, t = c.schedule, c.train
    if s.warmup_epochs >= s.epochs:
        raise Contradiction(
            ("schedule.warmup_epochs", "schedule.epochs"),
            f"a warm-up of {s.warmup_epochs:g} epochs leaves nothing of a training of {s.epochs}",
        )
    if s.min_lr > c.optim.lr:
        raise Contradiction(
            ("schedule.min_lr", "optim.lr"),
            f"the last learning rate, {s.min_lr:g}, is above the largest, {c.optim.lr:g}",
        )
    if t.batch_size % t.accumulate:
        raise Contradiction(
            ("train.accumulate", "train.batch_size"),
            f"a batch of {t.batch_size} cannot be computed in {t.accumulate} equal parts",
        )
    if (t.distill is None) != (t.teacher is None):
        raise Contradiction(
            ("train.distill", "train.teacher"),
            "distillation needs both: hard or soft, and a teacher, the folder of a finished run",
        )
    if t.distill and "deit" not in c.model.name:
        raise Contradiction(
            ("train.distill", "model.name"),
            f"'{c.model.name}' has no distillation head; a deit has",
        )
    if c.watch.probe and not c.watch.every:
        raise Contradiction(
            ("watch.probe", "watch.every"), "a probe is never run while watch.every is 0"
        )
