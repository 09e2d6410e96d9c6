"""What a command asks for: runs and their folders, seeds, and the points of a grid."""

import argparse

import pytest

from attncond.lab.config import RecipeError
from attncond.lab.plan import grid_values, plan, seeds_of
from attncond.lab.recipe import load


def test_the_runs_of_a_recipe(tmp_path):
    runs = plan(["digits"], tmp_path, form="smoke", seeds=[0, 2])
    assert len(runs) == 12
    assert runs[1].folder == tmp_path / "digits/smoke/baseline/seed2"
    assert runs[1].config.seed == 2
    assert runs[0].kind == runs[1].kind != runs[2].kind
    some = plan(["digits", "vit-cifar10"], tmp_path, form="smoke", variants=["gap"])
    assert [r.config.recipe for r in some] == ["digits", "vit-cifar10"]
    main, every = (plan(["xcit-cifar10"], tmp_path, variants=v) for v in (None, ["all"]))
    assert len(main) == 7
    assert len(every) == len(load("xcit-cifar10").variants) > 40
    with pytest.raises(RecipeError, match="no variant 'gaps'"):
        plan(["digits"], tmp_path, variants=["gaps"])


def test_a_grid_has_folders_of_its_own(tmp_path):
    grid = {"optim.lr": ["1e-3", "2e-3"], "optim.weight_decay": ["0.1"]}
    runs = plan(["digits"], tmp_path, form="smoke", variants=["gap"], grid=grid)
    assert [r.folder.relative_to(tmp_path).as_posix() for r in runs] == [
        "digits/smoke/gap@lr=1e-3,weight_decay=0.1/seed0",
        "digits/smoke/gap@lr=2e-3,weight_decay=0.1/seed0",
    ]
    assert [r.config.optim.lr for r in runs] == [1e-3, 2e-3]
    assert {r.config.variant for r in runs} == {"gap"}


def test_a_point_that_cannot_name_a_folder_is_told(tmp_path):
    grid = {"optim.lr": [f"0.{'0' * 250}1"]}
    with pytest.raises(RecipeError, match="is too long for the name of a folder"):
        plan(["digits"], tmp_path, form="smoke", grid=grid)


def test_values_are_parted_by_commas_that_are_not_theirs():
    assert grid_values("optim.lr", "1e-3,2e-3") == ["1e-3", "2e-3"]
    assert len(grid_values("methods", "'spectral:kappa=2,scope=head',[spectral, gap]")) == 2


@pytest.mark.parametrize(
    ("text", "said"), [("", "there is no value"), ("[0.9", r"--grid optim.betas=\[0.9: line 1")]
)
def test_values_that_are_none(text, said):
    with pytest.raises(RecipeError, match=said):
        grid_values("optim.betas", text)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("1", [0]), ("3", [0, 1, 2]), ("2-4", [2, 3, 4]), ("0,7-8", [0, 7, 8]), ("5,", [5])],
)
def test_seeds(text, wanted):
    assert seeds_of(text) == wanted


@pytest.mark.parametrize("text", ["", "0", "x", "-1", "4-2", "1,1", "1.5", ",", "1,,"])
def test_seeds_that_are_none(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is no number of seeds"):
        seeds_of(text)


@pytest.mark.parametrize("text", ["20260307", "0-99999999999999999999", "3,7-99999"])
def test_a_seed_that_would_be_so_many_is_told(text):
    with pytest.raises(argparse.ArgumentTypeError, match=r"more than 10,000 seeds; one seed has a"):
        seeds_of(text)
    assert seeds_of("20260307,") == [20260307]
