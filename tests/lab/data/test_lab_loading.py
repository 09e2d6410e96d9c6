"""load: which folder, which parts, which images."""

import pytest
import torch
from lab_data_cases import Data

from attncond.lab.data import DataError, find, load
from attncond.lab.data.loading import NAMES


def test_every_seed_shares_the_split():
    first, second = load(Data(), seed=0), load(Data(), seed=1)
    for part in ("train", "validation", "test"):
        assert torch.equal(getattr(first, part).images, getattr(second, part).images)


def test_the_test_images_do_not_depend_on_the_validation_share():
    with_it, without = load(Data(validation=0.3)), load(Data(validation=0.0))
    assert torch.equal(with_it.test.images, without.test.images)
    assert without.validation is None
    assert len(with_it.train) + len(with_it.validation) == len(without.train)


def test_limit_takes_other_images_for_another_seed():
    first, second = load(Data(limit=50), seed=0), load(Data(limit=50), seed=1)
    assert (len(first.train), len(first.validation), len(first.test)) == (50, 50, 50)
    assert not torch.equal(first.train.labels, second.train.labels)
    assert torch.equal(first.train.images, load(Data(limit=50), seed=0).train.images)
    assert "limited to 50" in first.note
    assert load(Data(limit=50, validation=0.0)).validation is None


@pytest.mark.parametrize("name", NAMES)
def test_files_that_are_not_there_are_told_without_reading(name, tmp_path):
    data = Data(name=name)
    if name == "digits":
        find(data, tmp_path)  # it needs none
        return
    for root in (tmp_path / "none", tmp_path):
        with pytest.raises(DataError, match="looked for") as found:
            find(data, root)
        with pytest.raises(DataError) as loaded:
            load(data, root)
        assert str(found.value) == str(loaded.value)


def test_unknown_names_get_a_suggestion():
    with pytest.raises(DataError, match="Did you mean cifar10"):
        load(Data("cifar-10"))


@pytest.mark.parametrize(("size", "words"), [(4, "at least 8"), (4000, "GB in memory")])
def test_impossible_sizes(size, words):
    with pytest.raises(DataError, match=words):
        load(Data("digits", size))


def test_names_are_the_recipes():
    config = pytest.importorskip("attncond.lab.config")
    schema = config.Data.model_json_schema()["properties"]["name"]["enum"]
    assert set(schema) <= set(NAMES)
