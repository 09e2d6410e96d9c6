from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

import attncond as ac
from attncond.lab.config import Config, Data, Model, Optim, RecipeError
from attncond.lab.data import load as load_data
from attncond.lab.data.loading import NAMES
from attncond.lab.recipe import load


def test_fp16_is_refused_on_a_cpu() -> None:
    config = load("vit-cifar10").config(overrides={"train.precision": "fp16"})
    config.check_device("cuda")
    with pytest.raises(RecipeError, match=r"train.precision: fp16 needs a GPU"):
        config.check_device("cpu")


def test_a_config_cannot_be_changed() -> None:
    config = load("vit-cifar10").config()
    with pytest.raises(ValidationError):
        config.optim.lr = 1.0  # type: ignore[misc]


def test_a_config_read_back_from_json_is_the_same() -> None:
    config = load("swin-cifar10").config("smoke", "spectral+gap", 7)
    for again in (
        Config.model_validate_json(config.model_dump_json()),
        Config.model_validate(json.loads(json.dumps(config.model_dump()))),
    ):
        assert again == config


def test_conditioners_are_the_methods_in_their_order() -> None:
    config = load("vit-cifar10").config("small", "spectral+gap+precondition")
    assert config.conditioners() == (ac.Spectral(), ac.RemoveGap(), ac.Precondition())


@pytest.mark.parametrize("value", [True, "1", None, float("nan"), float("inf"), -1.0, 0])
def test_numbers_are_taken_strictly(value: object) -> None:
    with pytest.raises(ValidationError):
        Optim(lr=value)  # type: ignore[arg-type]


def test_a_seed_is_one_that_every_generator_takes() -> None:
    assert load("digits").config("smoke", seed=2**31 - 1).seed == 2**31 - 1
    with pytest.raises(RecipeError, match=r"seed must be less than 2147483648, not 4294967296"):
        load("digits").config("smoke", seed=2**32)


def test_every_data_set_that_can_be_read_can_be_asked_for() -> None:
    assert set(Data.model_fields["name"].annotation.__args__) == set(NAMES)


def test_a_limit_that_fills_one_batch_is_enough() -> None:
    """It is one of training images alone: what is held out comes off before."""
    settings = {"data.limit": "32", "train.batch_size": "32", "data.validation": "0.5"}
    config = load("digits").config("smoke", overrides=settings)
    assert len(load_data(config.data).train) == 32


def test_mixing_pairs_a_whole_batch_whatever_parts_it_is_computed_in() -> None:
    parts = {"data.augment.mixup": "0.8", "train.batch_size": "30", "train.accumulate": "2"}
    assert load("vit-cifar10").config("small", overrides=parts).train.accumulate == 2


def test_a_list_is_taken_for_a_pair() -> None:
    assert Optim(lr=1, betas=[0.5, 0.6]).betas == (0.5, 0.6)  # type: ignore[arg-type]


def test_two_models_do_not_share_their_arguments() -> None:
    Model(name="a").kwargs["depth"] = 3
    assert Model(name="a").kwargs == {}


def test_every_field_that_needs_it_is_explained() -> None:
    plain = {"epochs", "warmup_epochs", "min_lr", "betas", "eps", "precision", "label_smoothing"}
    plain |= {"augment", "recipe", "form", "variant", "seed"}
    plain |= {"data", "model", "optim", "schedule", "train", "watch"}
    sections = [Config, *(f.annotation for f in Config.model_fields.values())]
    for section in sections:
        for name, field in getattr(section, "model_fields", {}).items():
            assert field.description or name in plain, name
