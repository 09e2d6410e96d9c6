"""What may be compared with what."""

import json

import pytest
from fabricate import Fake, dump, study

from attncond.lab.compare import group
from attncond.lab.results import load_runs
from attncond.lab.tables import table


def settings(folder, on="test"):
    return group(load_runs([folder]), on)


@pytest.fixture
def vit(tmp_path):
    (setting,) = settings(study(tmp_path, ("vit-cifar10",)))
    return setting


def named(setting, label):
    (found,) = [g for g in setting.groups if g.label == label]
    return found


def test_groups_are_named_by_what_was_done(vit):
    assert [g.label for g in vit.groups] == [
        "baseline",
        "tuned, W_QKV rate × 0.35",
        "gap",
        "paper",
        "paper-svd",
        "precondition",
        "spectral",
    ]
    assert vit.baseline.label == "baseline"
    assert vit.tuned.label.startswith("tuned")
    assert vit.own == "CIFAR-10 (JPEG copy), form small, 20 epochs"
    assert named(vit, "spectral").seeds == "5"


def test_runs_of_other_epochs_data_or_models_are_not_compared(tmp_path):
    Fake().write(tmp_path / "a")
    Fake(epochs=40).write(tmp_path / "b")
    Fake(form="smoke").write(tmp_path / "c")
    Fake(model="swin_small32").write(tmp_path / "d")
    Fake(changes={"data.limit": 1000}).write(tmp_path / "e")
    Fake(seed=1, changes={"data.workers": 0}).write(tmp_path / "f")  # changes no result
    found = settings(tmp_path)
    assert sorted(len(s.groups[0].runs) for s in found) == [1, 1, 1, 1, 2]
    assert [s.architecture for s in found][-1] == "Swin-B"


def test_settings_that_read_alike_are_told_apart(tmp_path):
    Fake(accuracy=70.0, changes={"data.validation": 0.0}).write(tmp_path / "a")
    Fake(accuracy=75.0).write(tmp_path / "b")
    Fake(accuracy=76.0, recipe="deit-cifar10", model="deit_small32").write(tmp_path)
    found = settings(tmp_path)
    ends = ["epochs, data.validation=0.0", "epochs, data.validation=0.1", "20 epochs"]
    assert [one.own.endswith(end) for one, end in zip(found, ends, strict=True)] == [True] * 3
    assert [one.short.endswith(end) for one, end in zip(found, ends, strict=True)] == [True] * 3
    assert "data" in table(1, load_runs([tmp_path])).columns  # which says of which a row is


def test_names_tell_apart_what_differs(tmp_path):
    for seed in range(3):
        Fake(seed=seed).write(tmp_path / "a")
    Fake(changes={"optim.lr": 2e-3}).write(tmp_path / "b")
    Fake("m", changes={"model.init": "mimetic"}).write(tmp_path / "c")
    Fake("n", changes={"model.norm": False}).write(tmp_path / "d")
    (setting,) = settings(tmp_path)
    assert sorted(g.label for g in setting.groups) == [
        "baseline",
        "baseline, mimetic initialisation",
        "baseline, no LayerNorm",
        "baseline, optim.lr=0.002",
    ]
    assert len(setting.baseline.runs) == 3


def test_a_variant_with_a_rate_of_its_own_says_so(tmp_path):
    Fake().write(tmp_path)
    Fake("spectral", methods=("spectral",), changes={"optim.lr": 8e-3}).write(tmp_path)
    Fake("tuned", changes={"optim.qkv_lr": 0.5, "optim.clip": None}).write(tmp_path)
    (setting,) = settings(tmp_path)
    assert [g.label for g in setting.groups] == [
        "baseline",
        "spectral, optim.lr=0.008",
        "tuned, W_QKV rate × 0.5, optim.clip=None",
    ]
    assert setting.tuned is None  # more than the rate was changed


def test_runs_from_before_a_key_was_there_are_of_the_same_experiment(tmp_path):
    Fake().write(tmp_path)
    Fake(seed=1, changes={"optim.output_lr": 1.0}).write(tmp_path)
    both = {"optim.qkv_lr": 0.25, "optim.output_lr": 0.25}
    Fake("tuned-output", accuracy=79.0, changes=both).write(tmp_path)
    Fake("tuned", accuracy=77.0, changes={"optim.qkv_lr": 0.25}).write(tmp_path)
    (setting,) = settings(tmp_path)
    assert [g.label for g in setting.groups] == [
        "baseline",
        "tuned, W_QKV rate × 0.25",
        "tuned, W_QKV rate × 0.25, W_O rate × 0.25",
    ]
    assert len(setting.baseline.runs) == 2
    # The tuned baseline has a rate of its own for W_Q, W_K and W_V, and for nothing else.
    assert setting.tuned.label == "tuned, W_QKV rate × 0.25"


def test_the_tuned_baseline_is_chosen_on_validation_images(tmp_path):
    Fake().write(tmp_path)
    for rate, accuracy in ((0.1, 76.0), (0.35, 77.0)):
        name = f"tuned-{rate}"
        Fake(name, accuracy=accuracy, changes={"optim.qkv_lr": rate}).write(tmp_path)
    (setting,) = settings(tmp_path)
    best = setting.tuned
    assert best.label == "tuned, W_QKV rate × 0.35"
    # The other is better on the test images: that must not matter.
    for run in next(g for g in setting.groups if "0.1" in g.label).runs:
        run.result["test_accuracy"] = 99.0
    assert setting.tuned is best


def test_the_rate_of_all_others_may_be_the_tuned_one(tmp_path):
    Fake(accuracy=78.0).write(tmp_path)
    (setting,) = settings(tmp_path)
    assert setting.tuned is None  # no other was tried
    Fake("tuned-0.1", accuracy=76.0, changes={"optim.qkv_lr": 0.1}).write(tmp_path)
    (setting,) = settings(tmp_path)
    assert setting.tuned is setting.baseline
    assert setting.tuned is not None


def test_without_validation_images_no_rate_is_the_tuned_one(tmp_path):
    for folder in (
        Fake(accuracy=75.0).write(tmp_path),
        Fake("tuned-0.1", accuracy=76.0, changes={"optim.qkv_lr": 0.1}).write(tmp_path),
    ):
        result = json.loads((folder / "result.json").read_text())
        dump(folder / "result.json", result | {"validation_accuracy": None})
    (setting,) = settings(tmp_path)
    assert setting.tuned is None
    assert setting.references == [setting.baseline]
    assert {row["delta_tuned"] for row in table(1, load_runs([tmp_path])).data[:2]} == {None}


def test_no_p_value_for_the_lucky_seeds(tmp_path):
    for seed in range(3):
        Fake(seed=seed, accuracy=75 + 0.1 * seed).write(tmp_path)
        state = "diverged" if seed == 2 else "finished"
        fake = Fake("paper", seed, 80 + 0.1 * seed, methods=("paper",), state=state)
        fake.write(tmp_path)
    (setting,) = settings(tmp_path)
    paper = named(setting, "paper")
    assert paper.seeds == "2 + 1 diverged"
    found = setting.versus(paper, setting.baseline)
    assert found.delta == pytest.approx(80.05 - 75.1)
    assert found.p is None
    assert setting.paired(paper, setting.baseline) is None


def test_unfinished_runs_are_counted_and_not_averaged(tmp_path):
    Fake(seed=0).write(tmp_path)
    Fake(seed=1, state="stopped", accuracy=20.0).write(tmp_path)
    (setting,) = settings(tmp_path)
    assert setting.baseline.seeds == "1 + 1 unfinished"
    assert setting.baseline.sample.mean == 75.0


def test_costs_are_compared_on_the_same_hardware_only(tmp_path):
    h100 = {"device": "cuda", "name": "H100"}
    Fake(milliseconds=20.0, memory=4e9).write(tmp_path)
    Fake("gap", methods=("gap",), milliseconds=21.0, memory=5e9).write(tmp_path)
    Fake("spectral", methods=("spectral",), milliseconds=10.0, hardware=h100).write(tmp_path)
    (setting,) = settings(tmp_path)
    assert setting.ratio(named(setting, "gap"), "step_milliseconds") == pytest.approx(1.05)
    assert setting.ratio(named(setting, "gap"), "peak_memory_bytes") == pytest.approx(1.25)
    assert setting.ratio(named(setting, "spectral"), "step_milliseconds") is None


@pytest.mark.parametrize(("key", "value"), [("cores", 64), ("threads", 1)])
def test_one_name_of_two_cpus_is_not_one_hardware(tmp_path, key, value):
    cpu = {"device": "cpu", "name": "x86_64", "processes": 1, "cores": 8, "threads": 8}
    Fake(hardware=cpu).write(tmp_path)
    Fake("spectral", methods=("spectral",), hardware=cpu).write(tmp_path)
    Fake("gap", methods=("gap",), hardware=cpu | {key: value}).write(tmp_path)
    (setting,) = group(load_runs([tmp_path]))
    gap, spectral = (g for g in setting.groups if not g.is_baseline)
    assert setting.ratio(spectral, "step_milliseconds") == 1.0
    assert setting.ratio(gap, "step_milliseconds") is None


def test_memory_of_a_process_is_no_cost_of_a_run(tmp_path):
    cpu = {"device": "cpu", "name": "x86_64"}
    Fake(hardware=cpu).write(tmp_path)
    (setting,) = settings(tmp_path)
    assert setting.ratio(setting.baseline, "peak_memory_bytes") is None
    assert setting.ratio(setting.baseline, "step_milliseconds") == 1.0


def test_what_the_monitor_watched_is_no_slower_for_it(tmp_path):
    Fake(milliseconds=20.0).write(tmp_path)
    Fake("gap", methods=("gap",), milliseconds=90.0, watch=True).write(tmp_path)
    Fake("spectral", methods=("spectral",), milliseconds=21.0).write(tmp_path)
    (setting,) = settings(tmp_path)
    assert setting.ratio(named(setting, "gap"), "step_milliseconds") is None
    assert setting.ratio(named(setting, "spectral"), "step_milliseconds") == pytest.approx(1.05)
    Fake(milliseconds=80.0, recipe="watched", watch=True).write(tmp_path / "other")
    Fake("gap", methods=("gap",), milliseconds=90.0, watch=True).write(tmp_path / "other")
    (setting,) = settings(tmp_path / "other")
    assert setting.ratio(named(setting, "gap"), "step_milliseconds") == pytest.approx(1.125)


def test_runs_side_by_side_tell_no_costs(tmp_path):
    alone = {"device": "cuda", "name": "H200", "side_by_side": 1}
    Fake(hardware=alone).write(tmp_path)
    Fake("spectral", methods=("spectral",), hardware=alone | {"side_by_side": 4}).write(tmp_path)
    (setting,) = settings(tmp_path)
    crowd = named(setting, "spectral")
    assert setting.crowded(crowd)
    assert not setting.crowded(setting.baseline)
    for key in ("step_milliseconds", "peak_memory_bytes"):
        assert setting.ratio(setting.baseline, key) == 1.0
        assert setting.ratio(crowd, key) is None


def test_epochs_to_the_baselines_accuracy(vit):
    reached = vit.epochs_to_level(named(vit, "spectral"))
    assert len(reached) == 5
    assert all(10 < epoch < 20 for epoch in reached)
    assert vit.epochs_to_level(named(vit, "paper")) == [None] * 3


def test_lambda_over_sigma(tmp_path):
    common = {"accuracy": 75.0}
    Fake(**common).write(tmp_path)
    for text in (
        "spectral",
        "spectral:kappa=1.5",
        "spectral:lam=1.22",
        "paper",
        "spectral:roles=qk",
        "spectral:gain=2",
    ):
        Fake(text.replace(":", "-"), methods=(text,), **common).write(tmp_path)
    (setting,) = settings(tmp_path)
    found = {g.label: ratio for ratio, g in setting.sweep}
    assert found == {"spectral": 3.0, "spectral:kappa=1.5": 5.0, "spectral:lam=1.22": None} | {
        "paper": None
    }
    # A single watched run tells the scale of all: σ_max is 0.55, 0.61 and 0.67 at the start.
    Fake("w", seed=9, watch=True, **common).write(tmp_path)
    (setting,) = settings(tmp_path)
    found = {g.label: ratio for ratio, g in setting.sweep}
    assert found["spectral:lam=1.22"] == pytest.approx(2.0, rel=0.01)
    assert found["paper"] == pytest.approx(10 / 0.61, rel=0.01)


def test_lambda_over_sigma_from_certificates(tmp_path):
    Fake("paper", methods=("paper",)).write(tmp_path)
    (setting,) = settings(tmp_path)
    setting.groups[0].first.result["certificates"] = {"start": {"sigma_mean": 0.5}}
    assert setting.sweep[0][0] == 20.0
