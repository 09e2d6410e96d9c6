from __future__ import annotations

from typing import Any

import pytest

from attncond.lab.config import RecipeError
from attncond.lab.recipe import load


def refused(overrides: dict[str, Any], form: str = "small", recipe: str = "vit-cifar10") -> str:
    with pytest.raises(RecipeError) as error:
        load(recipe).config(form, "baseline", 0, overrides)
    return str(error.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            {"optim.lrr": "1"},
            ["there is no key 'optim.lrr'", "Did you mean optim.lr?", "--set optim.lrr=1"],
        ),
        ({"lr": "1"}, ["there is no key 'lr'", "Did you mean optim.lr?"]),
        ({"data.augment.mixupp": "1"}, ["data.augment.mixupp", "Did you mean data.augment.mixup"]),
        ({"optim.lr": "fast"}, ["optim.lr must be a valid number, not 'fast'"]),
        ({"optim.lr": "0"}, ["optim.lr must be greater than 0, not 0"]),
        ({"optim.lr": ".nan"}, ["optim.lr must be a finite number"]),
        ({"schedule.epochs": "2.5"}, ["schedule.epochs must be a valid integer, not 2.5"]),
        ({"schedule.epochs": "true"}, ["schedule.epochs must be a valid integer, not True"]),
        ({"train.compile": "1"}, ["train.compile must be a valid boolean, not 1"]),
        ({"train.precision": "bf61"}, ["'fp32', 'bf16' or 'fp16'", "Did you mean bf16"]),
        ({"data.name": "cifar-10"}, ["data.name must be", "Did you mean cifar10"]),
        ({"optim": "3"}, ["optim must be a mapping, not 3"]),
        ({"methods": "{a: 1}"}, ["methods must be a list"]),
        ({"optim.betas": "[0.9]"}, ["optim.betas.1 is missing"]),
        ({"methods": "[spektral]"}, ["methods: 'spektral' is no method", "Did you mean spectral?"]),
        (
            {"methods": "[spectral, paper]"},
            ["methods: 'spectral' and 'paper' are two methods of one kind"],
        ),
        ({"methods": "['spectral:kappa=0.5']"}, ["kappa must be a finite number above 1"]),
        ({"model.init": "gap"}, ["model.init: 'gap' is no initialisation"]),
        ({"model.init": "mimetik"}, ["model.init: 'mimetik' is no init", "Did you mean mimetic?"]),
        (
            {"model.init": "outptu + spectral"},
            ["'outptu' is no init", "output and minus-output, several"],
        ),
        ({"model.init": "output+spectral"}, ["'output+spectral' is no init", "joined by ' + '"]),
        ({"model.init": "default + output"}, ["model.init: 'default' is no initialisation"]),
        ({"model.init": "output + spectral:kapa=3"}, ["model.init: 'spectral:kapa=3': spectral"]),
        ({"model.init": "spectral:roles=qk + mimetic"}, ["model.init: 'mimetic' stands alone"]),
        ({"model.kwargs.img_size": "64"}, ["model.kwargs.img_size", "data.image_size"]),
        ({"model.kwargs.drop_path_rate": "0.1"}, ["say model.drop_path"]),
        ({"model.kwargs.pretrained": "true"}, ["model.kwargs.pretrained", "the seed decides"]),
        (
            {"model.name": "vit_tiny_patch16_224", "model.kwargs.checkpoint_path": "vit.pth"},
            ["model.kwargs.checkpoint_path", "the seed decides every weight"],
        ),
        ({"model.kwargs.day": "2020-01-01"}, ["model.kwargs: not plain data"]),
        (
            {"schedule.warmup_epochs": "20"},
            ["schedule.warmup_epochs: a warm-up of 20 epochs leaves nothing"],
        ),
        (
            {"schedule.epochs": "1"},
            ["schedule.warmup_epochs", "vit-cifar10.yaml, forms.small", "--set schedule.epochs=1"],
        ),
        ({"schedule.min_lr": "0.1"}, ["schedule.min_lr", "is above the largest, 0.001"]),
        ({"train.accumulate": "3"}, ["train.accumulate: a batch of 256 cannot be computed in 3"]),
        ({"train.distill": "hard"}, ["train.distill: distillation needs both"]),
        ({"train.teacher": "runs/x"}, ["train.distill: distillation needs both"]),
        (
            {"train.distill": "hard", "train.teacher": "x"},
            ["'vit_small32' has no distillation head"],
        ),
        ({"data.limit": "200"}, ["data.limit: 200 images do not fill one batch of 256"]),
        ({"data.augment.crop": "32"}, ["32 pixels of padding for images of 32"]),
        ({"data.augment.randaugment": "strong"}, ["is not written as timm does"]),
        ({"data.augment.randaugment": "rand-m9-strong"}, ["is not written as timm does"]),
        ({"data.augment.randaugment": "rand-m9-tSolarize"}, ["is not written as timm does"]),
        (
            {"data.augment.mixup": "0.8", "train.batch_size": "255"},
            ["pair the images of a batch, and 255 is odd"],
        ),
        ({"data.name": "image_folder"}, ["data.augment.crop: an image_folder is cropped"]),
        ({"data.name": "digits", "data.image_size": "7"}, ["digits have 8 pixels a side"]),
        ({"watch.probe": "true"}, ["a probe is never run while watch.every is 0"]),
        ({"seed": "3"}, ["seed is chosen with --seeds"]),
        ({"form": "small"}, ["form is chosen with --form"]),
        ({"optim..lr": "3"}, ["'optim..lr' is no key"]),
        ({"optim.lr": "[1"}, ["--set optim.lr=[1: line 1"]),
    ],
)
def test_the_message_names_the_key_and_who_set_it(
    overrides: dict[str, str], words: list[str]
) -> None:
    message = refused(overrides)
    assert all(word in message for word in words), message
    assert "--set" in message


def test_all_problems_are_told_at_once() -> None:
    message = refused({"optim.lrr": "1", "train.batch_size": "none"})
    assert "optim.lrr" in message
    assert "train.batch_size" in message


def test_long_values_are_cut() -> None:
    message = refused({"optim.lr": "x" * 5000, "data.name": "[" + "1, " * 500 + "1]"})
    lines = [line.split(" (--set")[0] for line in message.splitlines()]
    assert max(map(len, lines)) < 250
