"""Training: it learns, it goes on, it stops politely, and parts of a batch are the whole batch."""

import json
import math
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters

import attncond as ac
from attncond.lab import train as training
from attncond.lab.checkpoint import CheckpointError
from attncond.lab.folder import Interrupted, RunError
from attncond.lab.objective import compiled
from attncond.lab.recipe import list_recipes, load
from attncond.lab.train import cosine, train
from attncond.lab.trained import load_trained


def config(variant="baseline", seed=0, form="smoke", recipe="digits", **settings):
    named = {key.replace("__", "."): str(value) for key, value in settings.items()}
    return load(recipe).config(form, variant, seed, named)


def quiet(made, folder, **kwargs):
    return train(made, folder, progress=False, **kwargs)


def weights(folder):
    return load_file(Path(folder) / "model.safetensors")


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_it_learns_to_read_digits(tmp_path):
    settings = {"schedule__epochs": 8, "schedule__warmup_epochs": 1, "train__batch_size": 32}
    result = quiet(config("spectral", form="small", **settings), tmp_path)
    assert result.status == "finished"
    assert result.test_accuracy > 80
    assert result.validation_accuracy > 80
    found = rows(tmp_path)
    assert [row["epoch"] for row in found] == list(range(1, 9))
    assert found[-1]["train_loss"] < found[0]["train_loss"]
    assert found[-1]["validation_accuracy"] == result.validation_accuracy
    assert all(row["images_per_second"] > 0 for row in found)
    values = json.loads((tmp_path / "result.json").read_text())
    assert values == result.values
    assert values["best_validation_accuracy"] == max(r["validation_accuracy"] for r in found)
    assert values["steps"] == found[-1]["step"]
    assert 0 < values["step_milliseconds"] < 1000 * values["seconds"] / values["steps"] * 2
    assert values["config"] == json.loads((tmp_path / "config.json").read_text())
    assert {"torch", "timm", "attncond"} <= values["versions"].keys()
    assert values["hardware"]["device"] == "cpu"
    assert not (tmp_path / "checkpoints").exists()
    model = load_trained(tmp_path)
    assert not model.training
    assert sum(p.numel() for p in model.parameters()) == values["parameters"]


RECIPES = [
    (recipe.name, variant)
    for recipe in list_recipes()
    if "smoke" in recipe.forms
    for variant in [*recipe.variants][:: max(1, len(recipe.variants) - 1)][:2]
]


@pytest.mark.parametrize(("name", "variant"), RECIPES, ids=lambda x: x)
def test_every_recipe_runs_in_its_smoke_form(tmp_path, name, variant):
    made = load(name).config("smoke", variant)
    try:
        result = quiet(made, tmp_path)
    except ac.ConditioningError as error:
        if "there is no" in str(error) and made.data.name != "digits":
            pytest.skip(f"needs data: {error}")
        raise
    assert result.status == "finished"
    assert 0 <= result.test_accuracy <= 100
    assert result.values["epochs"] == made.schedule.epochs
    conditioned = any(key.rpartition(".")[2].startswith("attncond_") for key in weights(tmp_path))
    assert conditioned == bool(made.methods)


def test_parts_of_a_batch_are_the_batch(tmp_path):
    """Up to rounding, over ten steps; mixed and smoothed targets, too."""
    for name, settings in {"plain": {}, "mixed": {"data__augment__mixup": 0.8}}.items():
        folders = [tmp_path / f"{name}{parts}" for parts in (1, 2, 4)]
        for parts, folder in zip((1, 2, 4), folders, strict=True):
            quiet(config("spectral", train__accumulate=parts, **settings), folder)
        one, *others = ([r["train_loss"] for r in rows(folder)] for folder in folders)
        for other in others:
            assert other == pytest.approx(one, rel=1e-4)


def test_the_moving_average_is_what_is_evaluated_and_kept(tmp_path):
    plain = quiet(config("spectral"), tmp_path / "plain")
    mean = quiet(config("spectral", train__ema=0.5), tmp_path / "mean")
    ours, theirs = rows(tmp_path / "mean"), rows(tmp_path / "plain")
    assert [r["train_loss"] for r in ours] == [r["train_loss"] for r in theirs]
    assert mean.values["test_loss"] != plain.values["test_loss"]
    assert not torch.equal(
        weights(mean.folder)["head.weight"], weights(plain.folder)["head.weight"]
    )


def test_a_finished_run_is_not_trained_again(tmp_path, monkeypatch):
    first = quiet(config(), tmp_path)
    monkeypatch.setattr(training, "_train", None)
    assert quiet(config(), tmp_path).values == first.values


def test_checkpoints_do_not_outlive_a_run_that_was_killed_at_its_end(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(training.shutil, "rmtree", lambda *_, **__: None)  # it did not come so far
        quiet(config(), tmp_path)
    assert (tmp_path / "checkpoints").exists()
    quiet(config(), tmp_path)
    assert not (tmp_path / "checkpoints").exists()


def test_starting_over(tmp_path):
    first = quiet(config(), tmp_path)
    again = quiet(config(), tmp_path, resume=False)
    assert again.values["test_loss"] == first.values["test_loss"]
    other = quiet(config(optim__lr=1e-4), tmp_path, resume=False)
    assert other.values["config"]["optim"]["lr"] == 1e-4
    assert len(rows(tmp_path)) == 2


def test_other_settings_are_refused_by_name(tmp_path):
    quiet(config(), tmp_path)
    with pytest.raises(RunError, match=r"optim.lr was 0.002 and is 0.1.*--restart"):
        quiet(config(optim__lr=0.1), tmp_path)
    with pytest.raises(RunError, match=r"methods was \[\] and is \[\"gap\"\]"):
        quiet(config("gap", optim__lr=0.002), tmp_path)


def test_divergence_is_a_result(tmp_path):
    made = config(optim__lr=1e20, schedule__warmup_epochs=0)
    result = quiet(made, tmp_path)
    assert result.status == "diverged"
    text = (tmp_path / "result.json").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    values = json.loads(text)
    assert values["diverged"] is True
    assert 0 < values["diverged_at_step"] <= 10
    assert values["test_accuracy"] is None
    assert values["test_read"] is False
    assert quiet(made, tmp_path).status == "diverged"  # and it stays one


def test_the_test_set_is_read_once_and_later(tmp_path, monkeypatch):
    seen = []
    real = training.evaluate

    def counted(module, batches, *args):
        seen.append(batches)
        return real(module, batches, *args)

    monkeypatch.setattr(training, "evaluate", counted)
    first = quiet(config(), tmp_path, test=False)
    assert len(seen) == 2  # the validation images, after each epoch
    assert (first.test_accuracy, first.values["test_read"]) == (None, False)
    kept = weights(tmp_path)
    second = quiet(config(), tmp_path)
    assert len(seen) == 3
    assert second.values["test_read"]
    assert second.validation_accuracy == first.validation_accuracy
    assert all(torch.equal(kept[k], v) for k, v in weights(tmp_path).items())
    whole = quiet(config(), tmp_path / "at once")
    assert whole.values["test_loss"] == second.values["test_loss"]


def test_a_test_that_is_read_later_and_alone_does_not_say_so_of_the_steps(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNCOND_LAB_JOBS", "2")
    first = quiet(config(), tmp_path, test=False)
    monkeypatch.delenv("ATTNCOND_LAB_JOBS")
    second = quiet(config(), tmp_path)
    assert second.values["hardware"]["side_by_side"] == 2
    assert second.values["step_milliseconds"] == first.values["step_milliseconds"]


def test_a_time_limit_saves_and_the_same_call_goes_on(tmp_path):
    whole = quiet(config(), tmp_path / "whole")
    with pytest.raises(Interrupted, match="time limit at step 1 of 10") as caught:
        quiet(config(), tmp_path / "cut", deadline=time.time())
    assert caught.value.reason == "time limit"
    assert (tmp_path / "cut/checkpoints/step-00000001/state.json").exists()
    cut = quiet(config(), tmp_path / "cut")
    assert cut.values["test_loss"] == whole.values["test_loss"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_the_step(tmp_path, monkeypatch, number):
    real, calls = training.cosine, []

    def interrupt(*args):
        calls.append(1)
        if len(calls) == 6:
            os.kill(os.getpid(), number)
        return real(*args)

    monkeypatch.setattr(training, "cosine", interrupt)
    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match="at step 6 of 10"):
        quiet(config(), tmp_path)
    assert signal.getsignal(number) == before
    assert max(p.name for p in (tmp_path / "checkpoints").iterdir()) == "step-00000006"
    assert quiet(config(), tmp_path).status == "finished"
    assert [row["epoch"] for row in rows(tmp_path)] == [1, 2]


def test_it_trains_in_a_thread(tmp_path):
    found = []
    thread = threading.Thread(target=lambda: found.append(quiet(config(), tmp_path)))
    thread.start()
    thread.join()
    assert found[0].status == "finished"


def test_memory_that_does_not_suffice(tmp_path, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(training, "objective", full)
    with pytest.raises(RunError, match=r"train.accumulate=2"):
        quiet(config(), tmp_path)


@pytest.mark.parametrize("number", [28, 13])  # a full disk; what nobody has thought of
def test_a_disk_that_is_full_from_the_start(tmp_path, monkeypatch, number):
    def full(*_):
        raise OSError(number, "No space left on device")

    monkeypatch.setattr("attncond.lab.folder.write_text", full)
    wanted = (RunError, "Make room") if number == 28 else (PermissionError, "No space")
    with pytest.raises(wanted[0], match=wanted[1]):
        quiet(config(), tmp_path)


def test_a_disk_that_is_full_ends_the_run_with_what_to_do(tmp_path, monkeypatch):
    from attncond.lab import checkpoint

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(CheckpointError, match=r"No space left on device.*make room"):
        quiet(config(), tmp_path)


def test_two_processes_do_not_share_a_folder(tmp_path):
    import fcntl

    with open(tmp_path / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RunError, match="another process is training"):
            quiet(config(), tmp_path)
    assert quiet(config(), tmp_path).status == "finished"


def test_batches_that_cannot_be_shared_out(tmp_path):
    with pytest.raises(ac.ConditioningError, match="accumulate"):
        quiet(config(train__accumulate=5), tmp_path)


def test_half_precision_without_a_gpu(tmp_path):
    with pytest.raises(ac.ConditioningError, match="fp16 needs a GPU"):
        quiet(config(train__precision="fp16"), tmp_path)
    assert quiet(config(train__precision="bf16"), tmp_path / "bf16").status == "finished"
    assert quiet(config(), tmp_path / "fp32").status == "finished"  # another one in this process


def test_a_deit_learns_with_both_heads_and_from_a_teacher(tmp_path):
    teacher = quiet(config(recipe="deit-cifar10"), tmp_path / "teacher")
    assert teacher.status == "finished"
    losses = {None: rows(tmp_path / "teacher")[-1]["train_loss"]}
    for how in ("hard", "soft"):
        settings = {"train__distill": how, "train__teacher": tmp_path / "teacher"}
        quiet(config(recipe="deit-cifar10", **settings), tmp_path / how)
        losses[how] = rows(tmp_path / how)[-1]["train_loss"]
    assert len(set(losses.values())) == 3
    with pytest.raises(RunError, match=r"train.teacher: .*teacher does not take images of"):
        quiet(config(recipe="deit-cifar10", data__image_size=32, **settings), tmp_path / "larger")
    settings["train__teacher"] = tmp_path / "nobody"
    with pytest.raises(RunError, match=r"no finished run in .*nobody"):
        quiet(config(recipe="deit-cifar10", **settings), tmp_path / "orphan")


def test_the_monitor_writes_its_history(tmp_path):
    made = config("spectral", watch__every=4, watch__probe="true", watch__tokens=8)
    quiet(made, tmp_path)
    history = ac.Monitor.read(tmp_path / "history.jsonl")
    assert [record.step for record in history] == [0, 4, 8, 10]
    row = history[0].rows[0].values
    assert row["q_kappa"] <= 2 < row["raw_q_kappa"]
    assert row["entropy"] > 0


def test_what_is_known_of_conditioned_weights_is_in_the_result(tmp_path):
    found = quiet(config("spectral"), tmp_path / "a").values["certificates"]
    assert found["start"]["kappa_max"] <= 2 * (1 + 1e-6)
    assert found["lam_over_sigma"] == pytest.approx(3, rel=1e-3)
    assert found["end"]["matrices"] == 6
    assert quiet(config("gap"), tmp_path / "b").values["certificates"]["start"] is None


def test_compiled_runs_that_differ_in_the_seed_share_their_code(tmp_path, monkeypatch):
    """One graph without breaks, traced once; by a backend that needs no C++ compiler."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    compiled.cache_clear()
    counters.clear()
    eager = quiet(config("spectral"), tmp_path / "eager")
    graphs = []
    for seed, methods in enumerate(("spectral", "spectral", "spectral:lam=0.5")):
        settings = {"methods": methods, "train__compile": "true"}
        quiet(config("spectral", seed, **settings), tmp_path / f"seed{seed}")
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1, 1, 1]
    assert not counters["graph_break"]
    compiled.cache_clear()
    loss = rows(tmp_path / "seed0")[-1]["train_loss"]
    assert loss == pytest.approx(rows(eager.folder)[-1]["train_loss"], rel=1e-4)


def test_the_learning_rate_is_a_function_of_the_epoch():
    made = config(schedule__epochs=10, schedule__warmup_epochs=2, schedule__min_lr=1e-4)
    top = made.optim.lr
    assert cosine(made, 0) == 0
    assert cosine(made, 1) == top / 2
    assert cosine(made, 2) == top
    assert cosine(made, 6) == pytest.approx((top + 1e-4) / 2)
    assert cosine(made, 10) == pytest.approx(1e-4)
    assert cosine(config(schedule__warmup_epochs=0), 0) == top
    assert all(math.isfinite(cosine(made, e / 7)) for e in range(70))
