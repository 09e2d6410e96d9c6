"""One run as it was written: what it was, how far it came, and what it is a seed of."""

import json
import math

import pytest
from fabricate import STEPS, Fake

from attncond.errors import ConditioningError
from attncond.lab.curves import Curves
from attncond.lab.results import load_runs
from attncond.lab.runs import Run, flat, number


def one(folder):
    (run,) = load_runs([folder])
    return run


def made(config=(), metrics=(), result=None, state="finished", **more):
    return Run("nowhere", dict(config), tuple(metrics), result, state, **more)


def test_values_of_the_configuration_by_dotted_keys():
    run = made({"optim": {"lr": 0.1, "clip": None}, "seed": 3})
    assert run.get("optim.lr") == 0.1
    assert run.get("optim.clip", 5) is None  # it is there
    assert run.get("optim.eps", 5) == 5
    assert run.get("seed.value", "none") == "none"
    assert run.get("nothing.at.all") is None


def test_a_configuration_of_which_nothing_is_known():
    run = made()
    assert run.name == "?/?/?/seed-1"
    assert (run.architecture, run.data, run.epochs) == ("?", "?", 0)
    assert run.methods == ()
    assert run.steps_per_epoch is None
    run = made(config={"seed": None, "schedule": {"epochs": "many"}})
    assert (run.seed, run.epochs) == (-1, 0)


def test_the_data_in_the_run_s_own_words():
    config = {"data": {"name": "cifar10"}}
    assert made(config).data == "cifar10"
    assert made(config, result={"data_note": "", "note": "older words"}).data == "older words"
    assert made(config, result={"data_note": "CIFAR-10", "note": "x"}).data == "CIFAR-10"
    assert made(config, result={"data_note": 3}).data == "cifar10"


def test_accuracy_is_of_runs_that_ended_well():
    result = {"test_accuracy": 81.5, "validation_accuracy": math.nan}
    assert made(result=result).accuracy() == 81.5
    assert made(result=result).accuracy("validation") is None
    for state in ("diverged", "running", "stopped", "broken"):
        assert made(result=result, state=state).accuracy() is None
    assert made().accuracy() is None


def test_steps_of_an_epoch_from_the_result_or_else_the_last_evaluation():
    points = [{"epoch": 1, "step": 10}, {"epoch": 2, "step": 24}, {"epoch": 3, "step": None}]
    assert made(result={"epochs": 4, "steps": 60}, metrics=points).steps_per_epoch == 15
    assert made(metrics=points).steps_per_epoch == 12
    assert made(metrics=[{"epoch": 0, "step": 0}]).steps_per_epoch is None


@pytest.mark.parametrize(
    ("value", "wanted"),
    [(3, 3.0), (0.5, 0.5), *((x, None) for x in (True, "1", None, math.nan, -math.inf))],
)
def test_numbers(value, wanted):
    assert number(value) == wanted


def test_a_method_of_another_version_is_told_by_name():
    with pytest.raises(ConditioningError, match="spektral"):
        made({"methods": ["spektral"]}).methods


def test_curves_that_were_collected_are_not_looked_for_on_disk(tmp_path):
    kept = Curves((0, 5), {"q_kappa": (3.0, 2.0)})
    assert made(collected=kept).curves is kept
    assert "Monitor was off" in Run(str(tmp_path), {}, (), None, "stopped").curves.trouble


def test_plain_data_for_a_collection(tmp_path):
    run = one(Fake("spectral", methods=("spectral",), watch=True).write(tmp_path))
    told = run.to_dict()
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert "config" not in told["result"]
    assert told["result"]["test_accuracy"] == 75.0
    assert told["config"] == run.config
    assert len(told["metrics"]) == 20
    assert Curves.from_dict(told["curves"]).steps[-1] == 20 * STEPS
    assert made().to_dict()["result"] is None


@pytest.mark.parametrize(
    ("model", "column"),
    [
        ("vit_small32", "ViT-B"),
        ("vit_b", "ViT-B"),
        ("davit_small32", "DaViT-B"),
        ("deit_b", "DeiT-B"),
        ("swin_small32", "Swin-B"),
        ("xcit_m24", "XCiT-M"),
        ("cait_s24_224", "cait_s24_224"),
    ],
)
def test_which_column_of_the_paper_a_model_belongs_to(tmp_path, model, column):
    assert one(Fake(model=model).write(tmp_path)).architecture == column


def test_seeds_of_one_experiment_are_alike_but_for_what_matters(tmp_path):
    runs = {
        name: one(Fake(recipe=name, **fields).write(tmp_path))
        for name, fields in {
            "a": {},
            "b": {"seed": 4, "watch": True, "variant": "vit"},
            "c": {"changes": {"optim.lr": 2e-3}},
            "d": {"methods": ("spectral:lam=10,preserve_norm=false",)},
            "e": {"methods": ("paper",)},
            "f": {"methods": ("spectral",)},
            "g": {"methods": ("spectral:kappa=2",)},
            "h": {"methods": ("spectral:kappa=3",)},
        }.items()
    }
    assert runs["a"].experiment == runs["b"].experiment
    assert runs["a"].experiment != runs["c"].experiment
    assert runs["d"].experiment == runs["e"].experiment
    assert runs["f"].experiment == runs["g"].experiment != runs["h"].experiment


def test_epochs_to_a_level(tmp_path):
    run = one(Fake(accuracy=75.0).write(tmp_path))
    reached = run.epochs_to(60.0)
    accuracies = {p["epoch"]: p["validation_accuracy"] for p in run.metrics}
    assert accuracies[reached] >= 60 > accuracies[reached - 1]
    assert run.epochs_to(99.0) is None


def test_a_damaged_history_is_told_by_its_curves(tmp_path):
    folder = Fake(watch=True).write(tmp_path)
    lines = (folder / "history.jsonl").read_text().splitlines()
    lines[3] = "nonsense"
    (folder / "history.jsonl").write_text("\n".join(lines))
    assert "line 4" in one(folder).curves.trouble
    assert one(Fake("x", methods=("gap",)).write(tmp_path)).curves.trouble.startswith("the Monitor")


def test_flat_keys():
    config = {"data": {"name": "digits", "workers": 4}, "watch": {"every": 3}, "methods": ["gap"]}
    assert flat(config) == {"data.name": "digits", "methods": ["gap"]}
