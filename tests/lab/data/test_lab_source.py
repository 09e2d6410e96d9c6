"""A data set's parts, and labels that cannot be those of the data set."""

import os

import numpy as np
import pytest
import torch
from lab_data_cases import Augment, Data, noise_split

from attncond.lab.config import Augment as AugmentSection
from attncond.lab.config import Data as DataSection
from attncond.lab.data import DataError
from attncond.lab.data.source import AugmentSettings, DataSettings, Files, checked_labels


def test_images_are_taken_in_the_order_asked_for():
    split = noise_split(8)
    part = split.take(torch.tensor([5, 0, 5]))
    assert len(part) == 3
    assert part.labels.tolist() == [split.labels[n] for n in (5, 0, 5)]
    assert torch.equal(part.images[1], split.images[0])
    assert torch.equal(part.images[0], part.images[2])
    assert (part.mean, part.std) == (split.mean, split.std)
    assert len(split) == 8


def test_files_are_taken_with_their_labels(tmp_path):
    names = np.array([os.fsencode(f"n{n}/ü{n}.JPEG") for n in range(3)])
    files = Files(tmp_path, names, torch.tensor([7, 8, 9]), (0.5,), (0.5,))
    part = files.take(torch.tensor([2, 1]))
    assert len(part) == 2
    assert part.path(0) == tmp_path / "n2" / "ü2.JPEG"
    assert part.labels.tolist() == [9, 8]
    assert files.path(0) == tmp_path / "n0" / "ü0.JPEG"


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ([], r"^here has no images$"),
        ([0, 1, 2, 3], r"^here, row 3: label 3 is not one of 0 to 2$"),
        ([0, -1, 2, 9], r"^here, row 1: label -1 is not one of 0 to 2$"),
        ([0, 2, 2], r"images of 2 classes instead of 3 \(none of 1\): it is a part of"),
    ],
)
def test_labels_that_are_not_those_of_the_data_set(labels, said):
    with pytest.raises(DataError, match=said):
        checked_labels(torch.tensor(labels, dtype=torch.int64), 3, "here")


def test_many_missing_classes_are_not_all_named():
    with pytest.raises(DataError, match=r"\(none of 1, 2, 3, 4, 5, \.\.\.\)"):
        checked_labels(torch.zeros(4, dtype=torch.int64), 200, "here")
    checked_labels(torch.arange(200), 200, "here")


@pytest.mark.parametrize(
    ("protocol", "classes"),
    [(DataSettings, (DataSection, Data)), (AugmentSettings, (AugmentSection, Augment))],
)
def test_recipes_have_every_setting_that_data_needs(protocol, classes):
    wanted = {name for name, value in vars(protocol).items() if isinstance(value, property)}
    section, case = classes
    assert wanted == set(section.model_fields)
    assert wanted == set(case.__dataclass_fields__)
