"""Images in folders: ImageNet's layout, and what can be wrong with it."""

import pytest
from lab_data_cases import Data, write_folders

from attncond.lab.data import DataError, load
from attncond.lab.data.folder import read_folders


def test_classes_are_sorted(tmp_path):
    train, test, classes = read_folders(write_folders(tmp_path))
    assert classes == ["n01", "n02", "n10"]
    assert train.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert train.path(0) == tmp_path / "train/n01/n01_0.JPEG"
    assert train.path(11) == tmp_path / "train/n10/n10_3.JPEG"
    assert test.path(5) == tmp_path / "val/n02/n02_1.JPEG"


def test_other_files_are_passed_over_and_folders_below_are_looked_into(tmp_path):
    write_folders(tmp_path)
    (tmp_path / "train" / "README.txt").write_text("")
    (tmp_path / "train" / "n01" / "boxes.txt").write_text("")
    (tmp_path / "train" / "n01" / "._n01_0.JPEG").write_text("")
    for hidden in ("train/.cache", "train/n01/.ipynb_checkpoints"):
        (tmp_path / hidden).mkdir()
        (tmp_path / hidden / "n01_0-checkpoint.JPEG").write_text("")
    (tmp_path / "train" / "n02" / "images").mkdir()
    (tmp_path / "train" / "n02" / "images" / "été.png").write_text("")
    train, _, _ = read_folders(tmp_path)
    assert len(train) == 13
    assert tmp_path / "train/n02/images/été.png" in [train.path(i) for i in range(13)]


def test_split_and_note(tmp_path):
    source = load(Data("image_folder", 32, validation=0.25), write_folders(tmp_path))
    assert (len(source.train), len(source.validation), len(source.test)) == (9, 3, 12)
    assert source.validation.labels.tolist() == [0, 1, 2]
    names = {
        str(part.path(i)) for part in (source.train, source.validation) for i in range(len(part))
    }
    assert len(names) == 12
    assert "3 classes, 12 training and 12 test images" in source.note
    limited = load(Data("image_folder", 32, limit=2), tmp_path)
    assert len(limited.train) == 2


def refused(root, *words):
    with pytest.raises(DataError) as caught:
        load(Data("image_folder", 32), root)
    for word in words:
        assert word in str(caught.value)


def test_no_folder(tmp_path):
    refused(tmp_path / "none", "train/CLASS", "https://image-net.org/download.php", "--data")
    (tmp_path / "train").mkdir()
    refused(tmp_path, f"there is no folder {tmp_path / 'val'}")


def test_no_classes(tmp_path):
    write_folders(tmp_path, classes=("n01",))
    refused(tmp_path, "1 folders; at least two classes")


def test_other_classes_in_val(tmp_path):
    write_folders(tmp_path)
    (tmp_path / "val" / "n99").mkdir()
    refused(tmp_path, "train has 3 classes and val 4; n99 is in val alone")


def test_empty_class(tmp_path):
    write_folders(tmp_path)
    for file in (tmp_path / "train" / "n10").iterdir():
        file.unlink()
    refused(tmp_path, "n10 has no images", ".jpeg")
