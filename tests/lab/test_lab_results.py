"""Runs as they may lie on disk: whole, cut short, damaged, twice, somewhere else."""

import errno
import fcntl
import json
import os
import time

import pytest
from fabricate import NOTE, STEPS, Fake, dump

from attncond.errors import ConditioningError
from attncond.lab.results import collect, dumps, load_runs, status
from attncond.lab.runs import ResultsError
from attncond.lab.tables import TABLES, table


def one(folder):
    (run,) = load_runs([folder])
    return run


def test_a_finished_run(tmp_path):
    folder = Fake("spectral", 3, 77.5, methods=("spectral",), watch=True).write(tmp_path)
    run = one(folder)
    assert (run.recipe, run.form, run.variant, run.seed) == ("vit-cifar10", "small", "spectral", 3)
    assert run.name == "vit-cifar10/small/spectral/seed3"
    assert run.state == "finished"
    assert run.accuracy() == 77.5
    assert run.data == NOTE
    assert run.architecture == "ViT-B"
    assert run.epochs == len(run.metrics) == 20
    assert run.steps_per_epoch == STEPS
    assert run.get("optim.lr") == 1e-3
    assert run.get("optim.nothing", 7) == 7
    assert run.notes == ()


def test_paths_may_be_a_run_a_root_or_a_pattern(tmp_path):
    for variant in ("baseline", "gap"):
        for seed in (0, 1):
            Fake(variant, seed, methods=() if variant == "baseline" else ("gap",)).write(tmp_path)
    assert len(load_runs([tmp_path])) == 4
    assert len(load_runs([tmp_path / "vit-cifar10/small/gap/seed1"])) == 1
    assert len(load_runs([str(tmp_path / "vit*/small/*/seed0")])) == 2
    assert len(load_runs([tmp_path, tmp_path / "vit-cifar10"])) == 4


def test_links_are_followed_and_not_in_a_ring(tmp_path):
    Fake(seed=1).write(tmp_path / "scratch")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "vit-cifar10").symlink_to(tmp_path / "scratch" / "vit-cifar10")
    (tmp_path / "runs" / "ring").symlink_to(tmp_path / "runs")
    (found,) = load_runs([tmp_path / "runs"], once=False)
    assert found.seed == 1


def test_nothing_found_says_what_was_looked_for(tmp_path):
    with pytest.raises(ResultsError, match=r"no runs in .*config\.json.*attncond lab run"):
        load_runs([tmp_path])
    with pytest.raises(ResultsError, match=r"there is no .*nowhere"):
        load_runs([tmp_path / "nowhere"])


def test_checkpoints_are_not_taken_for_runs(tmp_path):
    folder = Fake().write(tmp_path)
    inner = folder / "checkpoints" / "step-000100"
    inner.mkdir(parents=True)
    dump(inner / "config.json", {"hidden_size": 3})
    assert len(load_runs([tmp_path])) == 1


def test_a_run_that_is_killed_has_a_last_line_that_is_cut_short(tmp_path):
    folder = Fake(state="stopped", watch=True).write(tmp_path)
    for name in ("metrics.jsonl", "history.jsonl"):
        file = folder / name
        file.write_bytes(file.read_bytes()[:-30])
    os.utime(folder / "config.json", (0, 0))
    run = one(folder)
    assert run.state == "running"  # written a moment ago
    assert len(run.metrics) == 9
    assert "cut short" in run.notes[0]
    assert run.accuracy() is None
    assert run.curves.steps[-1] == 19 * STEPS
    assert run.curves.trouble == ""


def test_a_run_that_nobody_writes_to_has_stopped(tmp_path):
    folder = Fake(state="stopped").write(tmp_path)
    for file in folder.iterdir():
        os.utime(file, (time.time() - 3600,) * 2)
    assert one(folder).state == "stopped"


def test_a_lock_says_whether_somebody_is_training(tmp_path):
    folder = Fake(state="stopped").write(tmp_path)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for file in folder.iterdir():
            os.utime(file, (0, 0))
        assert one(folder).state == "running"
    assert one(folder).state == "stopped"  # killed: the file is there, its lock is not


def test_without_locks_the_time_of_the_last_write_says_it(tmp_path, monkeypatch):
    folder = Fake(state="stopped").write(tmp_path)
    (folder / ".lock").touch()

    def refused(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    assert one(folder).state == "running"
    for path in folder.iterdir():
        os.utime(path, (0, 0))
    assert one(folder).state == "stopped"


def test_a_diverged_run_is_a_failure_and_not_a_number(tmp_path):
    run = one(Fake(state="diverged").write(tmp_path))
    assert run.state == "diverged"
    assert run.accuracy() is None


def test_a_loss_that_is_not_finite_means_diverged_before_the_end_too(tmp_path):
    folder = Fake(state="diverged").write(tmp_path)
    (folder / "result.json").unlink()
    assert one(folder).state == "diverged"


def test_a_line_in_the_middle_that_is_damaged_is_told(tmp_path):
    folder = Fake().write(tmp_path)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    lines[4] = "{" + lines[4]
    lines.append(lines[7])  # written twice by a resume
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    run = one(folder)
    assert [p["epoch"] for p in run.metrics] == [e for e in range(1, 21) if e != 5]
    assert run.notes == ("line 5 of metrics.jsonl could not be read and was left out",)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"recipe": '])
def test_a_damaged_config_makes_a_broken_run_not_a_crash(tmp_path, text):
    folder = Fake(state="stopped").write(tmp_path)
    (folder / "config.json").write_text(text)
    run = one(folder)
    assert run.state == "broken"
    assert any("config.json" in note for note in run.notes)


def test_a_result_has_the_config_in_it(tmp_path):
    folder = Fake("gap", methods=("gap",)).write(tmp_path)
    (folder / "config.json").unlink()
    assert one(folder).variant == "gap"


def test_a_damaged_result_is_told(tmp_path):
    folder = Fake().write(tmp_path)
    (folder / "result.json").write_text("{")
    run = one(folder)
    assert run.state == "running"
    assert "result.json" in run.notes[0]


def test_methods_that_are_no_list_are_told(tmp_path):
    folder = Fake().write(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    dump(folder / "config.json", {**config, "methods": 5})
    run = one(folder)
    assert run.state == "broken"
    assert "its methods cannot be read" in run.notes[-1]


def test_an_unknown_method_is_told(tmp_path):
    run = one(Fake(methods=("spektral",)).write(tmp_path))
    assert run.state == "broken"
    assert "Did you mean spectral" in run.notes[-1]


@pytest.mark.parametrize(
    ("key", "value"),
    [("schedule.epochs", None), ("schedule.epochs", 0), ("optim.qkv_lr", "fast")],
)
def test_numbers_that_are_none_make_a_broken_run_not_a_crash(tmp_path, key, value):
    Fake().write(tmp_path)
    Fake("other", changes={key: value}).write(tmp_path)
    runs = load_runs([tmp_path])
    assert [run.state for run in runs] == ["finished", "broken"]
    assert f"its {key} should be a number above 0" in runs[1].notes[-1]
    for name in TABLES:
        assert name in "89" or any(key in note for note in table(name, runs).notes)


def test_a_collection_is_json_whatever_runs_hold(tmp_path):
    folder = Fake().write(tmp_path)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 21, "train_loss": NaN, "lr": Infinity}\n')
    text = dumps(collect(load_runs([tmp_path]), "attncond lab collect runs"))
    assert "NaN" not in text
    assert "Infinity" not in text


def test_a_test_set_that_was_not_read(tmp_path):
    folder = Fake().write(tmp_path)
    result = json.loads((folder / "result.json").read_text())
    dump(folder / "result.json", result | {"test_accuracy": None, "test_loss": None})
    run = one(folder)
    assert run.state == "finished"
    assert run.accuracy() is None
    assert run.accuracy("validation") is not None
    assert "unread" in run.notes[0]


def test_a_run_that_is_there_twice_counts_once(tmp_path):
    Fake(recipe="vit-cifar10").write(tmp_path / "a")
    Fake(recipe="spectra", variant="vit", watch=True).write(tmp_path / "b")
    run = one(tmp_path)
    assert run.recipe == "vit-cifar10"  # its steps were not watched
    assert len(run.curves.steps) == 21  # the other's were
    assert "also in" in run.notes[0]
    assert "otherwise" not in run.notes[0]


def test_a_run_that_is_there_three_times_is_the_one_that_was_not_watched(tmp_path):
    Fake(recipe="spectra", variant="vit", accuracy=71.0, watch=True).write(tmp_path / "a")
    Fake(recipe="vit-cifar10", accuracy=70.0).write(tmp_path / "b")
    seldom = Fake(recipe="vit-lambda", accuracy=72.0, watch=True).write(tmp_path / "c")
    history = (seldom / "history.jsonl").read_text().splitlines(keepends=True)
    (seldom / "history.jsonl").write_text("".join(history[: len(history) // 2]))
    file = tmp_path / "collected.json"
    file.write_text(dumps(collect(load_runs([tmp_path], once=False), "a test")))
    for place in (tmp_path / "a", tmp_path / "b", tmp_path / "c"), (file,):
        (run,) = load_runs(place)
        assert run.accuracy() == 70.0
        assert len(run.curves.steps) == 21
        assert sum("it ended otherwise" in note for note in run.notes) == 2
        assert set(run.shared) == {"spectra", "vit-lambda"}


def test_a_run_that_has_read_its_test_stands_for_one_that_has_not(tmp_path):
    unread = Fake().write(tmp_path / "a") / "result.json"
    unread.write_text(json.dumps({**json.loads(unread.read_text()), "test_accuracy": None}))
    Fake(accuracy=70.0).write(tmp_path / "b")
    run = one(tmp_path)
    assert run.accuracy() == 70.0
    assert "otherwise" not in run.notes[0]  # it did not end at all


def test_a_finished_run_stands_for_an_unfinished_one(tmp_path):
    Fake(state="stopped").write(tmp_path / "a")
    Fake(accuracy=70.0).write(tmp_path / "b")
    assert one(tmp_path).accuracy() == 70.0


def test_status_counts(tmp_path):
    Fake(seed=0).write(tmp_path)
    Fake(seed=1, state="diverged").write(tmp_path)
    Fake(seed=2, state="stopped").write(tmp_path)
    Fake("gap", methods=("gap",)).write(tmp_path)
    first, second = status(load_runs([tmp_path]))
    assert [first.count(s) for s in ("finished", "diverged", "running")] == [1, 1, 1]
    assert (second.variant, second.count("finished")) == ("gap", 1)


def test_status_tells_the_points_of_a_grid_apart(tmp_path):
    for rate in ("0.1", "0.2"):
        folder = Fake(state="stopped").write(tmp_path)
        folder.parent.rename(folder.parents[1] / f"baseline@qkv_lr={rate}")
    found = status(load_runs([tmp_path], once=False))
    assert [one.variant for one in found] == ["baseline@qkv_lr=0.1", "baseline@qkv_lr=0.2"]


def test_a_collection_says_the_same_as_its_folders(tmp_path):
    Fake(seed=0, watch=True).write(tmp_path / "runs")
    Fake(seed=1, state="diverged").write(tmp_path / "runs")
    runs = load_runs([tmp_path / "runs"])
    text = dumps(collect(runs, "attncond lab collect runs"))
    (tmp_path / "all.json").write_text(text)
    record = json.loads(text)
    assert record["versions"]["torch"]
    assert record["hardware"]["name"] == "H200"
    assert len(text.splitlines()) == 4  # one for each run
    again = load_runs([tmp_path / "all.json"])
    assert [r.accuracy() for r in again] == [r.accuracy() for r in runs]
    assert [r.state for r in again] == ["finished", "diverged"]
    assert again[0].metrics == runs[0].metrics
    assert again[0].curves.points("q_kappa").keys() == runs[0].curves.points("q_kappa").keys()
    for step, value in runs[0].curves.points("q_kappa").items():
        assert again[0].curves.points("q_kappa")[step] == pytest.approx(value, rel=1e-4)
    # Found below a folder, too, and not counted twice.
    assert len(load_runs([tmp_path])) == 2


@pytest.mark.parametrize(
    "damage", [{"metrics": ["x"]}, {"metrics": {"epoch": 1}}, {"result": "x"}], ids=str
)
def test_a_collection_with_runs_of_another_kind(tmp_path, damage):
    Fake().write(tmp_path / "runs")
    record = collect(load_runs([tmp_path / "runs"]), "lab collect")
    record["runs"][0] |= damage
    (tmp_path / "x.json").write_text(dumps(record))
    with pytest.raises(ConditioningError, match=r"x\.json is no file of collected runs.*mapping"):
        load_runs([tmp_path / "x.json"])


def test_a_file_that_is_no_collection(tmp_path):
    (tmp_path / "x.json").write_text('{"schema": "attncond.lab.runs/1", "runs": [{}]}')
    (tmp_path / "y.json").write_text("[1, 2]")
    for name in ("x.json", "y.json"):
        with pytest.raises(ConditioningError, match="no file of collected runs"):
            load_runs([tmp_path / name])


@pytest.mark.parametrize("place", ["", "x.json"])
def test_a_collection_of_another_version_is_not_passed_over(tmp_path, place):
    Fake().write(tmp_path / "runs")
    (tmp_path / "x.json").write_text('{"schema": "attncond.lab.runs/2", "runs": []}')
    with pytest.raises(ResultsError, match=r"x\.json was collected by another version.*runs/2"):
        load_runs([tmp_path / place])


def test_a_collected_method_of_another_version_leaves_the_other_runs(tmp_path):
    Fake(seed=0).write(tmp_path / "runs")
    Fake("new", methods=("gap",)).write(tmp_path / "runs")
    text = dumps(collect(load_runs([tmp_path / "runs"]), "attncond lab collect runs"))
    (tmp_path / "all.json").write_text(text.replace('["gap"]', '["flux"]'))
    good, broken = load_runs([tmp_path / "all.json"])
    assert (good.state, broken.state) == ("finished", "broken")
    assert "'flux' is no method" in broken.notes[-1]
