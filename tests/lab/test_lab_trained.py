"""The model of a run: conditioned as it was said, certified, and back from its files."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import attncond as ac
from attncond.lab.folder import RunError
from attncond.lab.recipe import load
from attncond.lab.trained import certified, load_teacher, load_trained, make

CLASSES, WIDTH = 10, 32


def config(*methods, **settings):
    named = {key.replace("__", "."): str(value) for key, value in settings.items()}
    return load("digits").config("smoke", "baseline", 0, {**named, "methods": list(methods)})


def singular_values(model):
    """Of W_Q, W_K and W_V of each block, stored, one row each."""
    parts = [p for b in model.blocks for p in b.attn.qkv.weight.detach().double().chunk(3)]
    return np.linalg.svd(torch.stack(parts).numpy(), compute_uv=False)


def test_a_model_is_made_for_its_data_and_conditioned_in_order():
    model, handles = make(config("spectral", "gap"), 7, 3)
    assert model(torch.zeros(2, 3, 8, 8)).shape == (2, 7)
    assert [type(handle.method) for handle in handles] == [ac.Spectral, ac.RemoveGap]
    assert make(config(), CLASSES, 1)[1] == []


def test_what_is_certified_is_what_a_singular_value_decomposition_says():
    model, handles = make(config("spectral:kappa=3"), CLASSES, 1)
    raw = singular_values(model)
    found = certified(handles)
    handles[0].fold()
    after = singular_values(model)
    kappas = after[:, 0] / after[:, -1]
    assert found["matrices"] == len(kappas) == 6
    assert found["kappa_max"] == pytest.approx(kappas.max(), rel=1e-4)
    assert found["kappa_median"] == pytest.approx(np.median(kappas), rel=1e-4)
    assert found["sigma_mean"] == pytest.approx(raw[:, 0].mean(), rel=1e-4)
    assert found["lam_over_sigma"] == pytest.approx(2, rel=1e-4)  # (3 + 1)/(3 − 1)
    assert found["kappa_max"] <= found["bound_max"] == pytest.approx(3, rel=1e-4)


def test_a_lambda_by_hand_is_told_over_sigma():
    model, handles = make(config("spectral:lam=0.7,roles=qk"), CLASSES, 1)
    raw = singular_values(model)[[0, 1, 3, 4], 0]
    found = certified(handles)
    assert found["matrices"] == 4
    assert found["lam_over_sigma"] == pytest.approx((0.7 / raw).mean(), rel=1e-3)


def test_nothing_to_certify():
    assert certified(make(config("gap"), CLASSES, 1)[1]) is None
    assert certified([]) is None


def test_the_polar_correction_has_no_lambda():
    found = certified(make(config("polar"), CLASSES, 1)[1])
    assert found["lam_over_sigma"] is None
    assert found["kappa_max"] <= 2 * (1 + 1e-3)


def written(folder, *methods, **settings):
    """A finished run that nobody has trained, with weights of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    made = config(*methods, **settings)
    model, _ = make(made, CLASSES, 1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.01)
    values = {"config": made.model_dump(mode="json"), "classes": CLASSES, "channels": 1}
    (folder / "result.json").write_text(json.dumps(values))
    save_file(model.state_dict(), folder / "model.safetensors")
    return model.eval()


@pytest.mark.parametrize("methods", [(), ("spectral", "gap"), ("polar",)], ids=str)
def test_a_finished_run_comes_back(tmp_path, methods):
    model = written(tmp_path, *methods)
    torch.manual_seed(5)  # its weights are those of the file, whatever the seed
    found = load_trained(tmp_path)
    assert not any(m.training for m in found.modules())
    images = torch.randn(3, 1, 8, 8)
    assert torch.equal(found(images), model(images))


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize("name", ["result.json", "model.safetensors"])
@pytest.mark.parametrize("harm", [lambda p: p.unlink(), cut, lambda p: p.write_bytes(b"")])
def test_a_run_that_is_not_whole_is_refused(tmp_path, name, harm):
    written(tmp_path / "run")
    harm(tmp_path / "run" / name)
    with pytest.raises(RunError, match=r"no finished run in .*run.* needs result\.json and model"):
        load_trained(tmp_path / "run")


@pytest.mark.parametrize(
    "values",
    [[], {}, {"config": {}, "classes": 10, "channels": 1}],
    ids=["list", "empty", "config"],
)
def test_a_result_of_something_else_is_refused(tmp_path, values):
    written(tmp_path)
    (tmp_path / "result.json").write_text(json.dumps(values))
    with pytest.raises(RunError, match=r"result\.json .*is not that of a run"):
        load_trained(tmp_path)


def test_a_teacher_has_to_know_the_images_and_the_classes(tmp_path):
    written(tmp_path)
    images = torch.zeros(2, 1, 8, 8)
    assert load_teacher(tmp_path, images, 10)(images).shape == (2, 10)
    with pytest.raises(RunError, match=r"train.teacher: .* tells 10 classes apart, the data has 3"):
        load_teacher(tmp_path, images, 3)
    with pytest.raises(RunError, match=r"train.teacher: .* not take images of \(1, 16, 16\)"):
        load_teacher(tmp_path, torch.zeros(1, 1, 16, 16), 10)


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "deit3_small_patch16_224"])
def test_a_deit_without_a_head_for_its_teacher_is_refused(name):
    small = {"model__kwargs": "{embed_dim: 32, depth: 1, num_heads: 2}", "data__image_size": 16}
    taught = {"train__distill": "hard", "train__teacher": "somewhere"}
    assert make(config(model__name=name, **small), CLASSES, 3)
    with pytest.raises(RunError, match=rf"train\.teacher: '{name}' .* has no distillation head"):
        make(config(model__name=name, **small, **taught), CLASSES, 3)
    model, _ = make(
        config(model__name="deit_tiny_distilled_patch16_224", **small, **taught), CLASSES, 3
    )
    assert len(model.train()(torch.zeros(1, 3, 16, 16))) == 2


def test_a_run_that_diverged_teaches_nothing(tmp_path):
    written(tmp_path)
    values = json.loads((tmp_path / "result.json").read_text())
    (tmp_path / "result.json").write_text(json.dumps({**values, "status": "diverged"}))
    with pytest.raises(RunError, match=r"train\.teacher: the run in .* diverged"):
        load_teacher(tmp_path, torch.zeros(2, 1, 8, 8), 10)


def test_weights_of_another_run_are_refused(tmp_path):
    written(tmp_path / "deep", model__kwargs__depth=3)
    written(tmp_path / "run")
    weights = load_file(tmp_path / "deep/model.safetensors")
    save_file(weights, tmp_path / "run/model.safetensors")
    with pytest.raises(RunError, match=r"(?s)model\.safetensors has other weights.*blocks\.2"):
        load_trained(tmp_path / "run")
